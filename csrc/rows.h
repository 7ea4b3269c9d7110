// The embeddings as they are stored: blocks of rows of one type, read as one array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cdr {

enum class DType { f16, f32, f64 };

inline std::size_t size_of(DType t) { return t == DType::f16 ? 2 : t == DType::f32 ? 4 : 8; }

struct Block {
  const unsigned char* data;  // [rows, dim], C order
  std::int64_t rows;
};

struct Rows {
  DType dtype;
  std::int64_t dim;
  std::vector<Block> blocks;

  std::int64_t size() const {
    std::int64_t n = 0;
    for (const Block& b : blocks) n += b.rows;
    return n;
  }

  // row < size(); stores have one or two blocks, so a walk is the fastest search.
  const unsigned char* at(std::int64_t row) const {
    std::size_t b = 0;
    while (row >= blocks[b].rows) row -= blocks[b++].rows;
    return blocks[b].data + static_cast<std::size_t>(row * dim) * size_of(dtype);
  }
};

}  // namespace cdr
