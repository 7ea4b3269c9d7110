// The embeddings as they are stored: blocks of rows of one type, read as one array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checked_file.h"

namespace cdr {

enum class DType { f16, f32, f64 };

inline std::size_t size_of(DType t) { return t == DType::f16 ? 2 : t == DType::f32 ? 4 : 8; }

struct Block {
  const unsigned char* data;  // [rows, dim], C order
  std::int64_t rows;
  CheckedFile* file;  // that the rows lie in, while some of it is unchecked; null: they can be read as they are
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

  std::int64_t row_bytes() const { return dim * static_cast<std::int64_t>(size_of(dtype)); }

  // Where a row is, for a prefetch; row < size(). Stores have one or two blocks, so a walk is the fastest search.
  const unsigned char* at(std::int64_t row) const {
    std::size_t b = 0;
    while (row >= blocks[b].rows) row -= blocks[b++].rows;
    return blocks[b].data + row * row_bytes();
  }

  // The row, to be read. Throws Damage where it is not as it was written, ReadError where the disk cannot give it.
  const unsigned char* read(std::int64_t row) const {
    std::size_t b = 0;
    while (row >= blocks[b].rows) row -= blocks[b++].rows;
    const unsigned char* p = blocks[b].data + row * row_bytes();
    if (blocks[b].file) blocks[b].file->check_at(p, static_cast<std::uint64_t>(row_bytes()));
    return p;
  }
};

}  // namespace cdr
