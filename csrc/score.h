// The exact float64 scores: the one routine that computes every number handed to a caller.
//
// dot(x, v) is summed in eight lanes: element i goes to lane i % 8, multiplied, rounded, then added;
// the lanes are reduced as ((0+4)+(2+6)) + ((1+5)+(3+7)). No fused multiply-add. The generic and the
// AVX2 code walk the same lanes, so scores are bit-equal on every machine and for every number of
// threads. Where a value comes within the error of this sum of a gate, the dot product is computed
// again, correctly rounded, so the gate set is the reference's.
#pragma once

#include <cstdint>
#include <vector>

#include "rows.h"

namespace cdr {

// Each has what the one before has. avx2: with F16C. avx512: F, BW, DQ, VL and VNNI; only loops over codes use it.
enum class Simd { generic, avx2, avx512 };

// What the machine offers, lowered by CDR_KERNEL_SIMD=generic|avx2|avx512 (read once); set_simd() overrides.
// Throws std::invalid_argument when the level asked for is not to be had.
Simd simd();
void set_simd(Simd level);
Simd best_simd();
const char* name_of(Simd level);

// What one session asks of the rows: columns 0 = query, 1 = coverage, 2.. = residual.
//   value[j] = scale[j] * cos(x, v[j]) + shift[j] + addend[j](row)
//   (coverage: dot(x, v) / |x| in place of the cosine, and no addend)
struct Columns {
  std::int64_t dim = 0;
  std::int64_t lanes = 0;              // dim rounded up to a multiple of 8: the stride of vectors
  std::int64_t count = 0;
  std::vector<double> vectors;         // [count, lanes], padded with zeros
  std::vector<double> squared_norms;   // [count], correctly rounded
  std::vector<double> scale, shift, weight, gate;  // [count]
  std::vector<std::uint8_t> gate_only; // [count]: lets rows pass and takes no part in the score; empty: none
  std::vector<std::int64_t> addend_starts, addend_rows;  // column j: rows [starts[j], starts[j + 1]), ascending
  std::vector<double> addend_values;                     // starts is empty where no column has any
  bool has_coverage = false;
  bool clamp_novelty = false;
  bool factors_above_zero = false;  // what multiplies a score leaves one that is not above zero as it is

  const double* vector(std::int64_t j) const { return vectors.data() + j * lanes; }
  bool scores(std::int64_t j) const { return gate_only.empty() || !gate_only[static_cast<std::size_t>(j)]; }
  double addend(std::int64_t j, std::int64_t row) const;  // 0 where there is none
};

struct Limits {  // the specification's constants, handed in by the caller
  double penalty_cap, novelty_floor, ngram_step, ngram_cap;
};

struct Factors {  // one entry per candidate; null = 1, 1, 0
  const double* importance = nullptr;
  const double* multiplier = nullptr;
  const std::int32_t* ngram_overlap = nullptr;
};

struct Scores {  // one entry per candidate
  double *score, *score_without_guard, *relevance, *coverage, *residual_pull, *novelty;
};

// The values of columns on one row at a time, decided exactly near a gate. rows and columns must outlive it.
class Scorer {
 public:
  Scorer(const Rows& rows, const Columns& columns);

  // Values of the columns wanted[0..n).
  void values(std::int64_t row, double squared_norm, const std::int64_t* wanted, std::int64_t n, double* out) const;

  // The columns that are a gate, ascending.
  const std::vector<std::int64_t>& gated() const { return gated_; }

  // Whether any of them is at or above its gate.
  bool passes(std::int64_t row, double squared_norm) const;

 private:
  // out[j] = dot(row, vectors[j]) for j < n.
  using Dots = void (*)(const unsigned char* row, std::int64_t dim, const double* const* vectors, int n, double* out);

  double value(std::int64_t row, const unsigned char* x, double squared_norm, std::int64_t j, double dot) const;

  const Rows& rows_;
  const Columns& columns_;
  Dots dots_;
  std::vector<std::int64_t> gated_;
  std::vector<double> margin_;
};

// out[0..dim) = the row's elements, exactly.
void widen(DType dtype, const unsigned char* row, std::int64_t dim, double* out);

enum RowFlag : std::uint8_t { kRowOk = 0, kRowNotFinite = 1, kRowZero = 2, kRowOutOfRange = 3 };

// squared_norms[i] = the correctly rounded sum of squares of row i; flags[i] says what is wrong with it.
// kRowOutOfRange: the largest magnitude lies outside 2^±safe_exponent, so the row needs scaling first.
void check_rows(const Rows& rows, int safe_exponent, double* squared_norms, std::uint8_t* flags);

// Which candidates pass any gate of the columns, ascending. Candidate i is row index[i] (null: row i);
// alive: by row, null = all.
std::vector<std::int64_t> gate_rows(const Rows& rows, const double* squared_norms, const std::int64_t* index,
                                    std::int64_t candidates, const std::uint8_t* alive, const Columns& columns);

// out[i, 0] = the value of the query column of candidate i, out[i, 1 + j] = that of residual column j: the numbers
// score_rows works with, bit for bit. out is [candidates, count - 1].
void column_values(const Rows& rows, const double* squared_norms, const std::int64_t* index, std::int64_t candidates,
                   const Columns& columns, double* out);

// The scores of the rows named by index, whether they pass a gate or not.
void score_rows(const Rows& rows, const double* squared_norms, const std::int64_t* index, std::int64_t candidates,
                const Columns& columns, const Factors& factors, const Limits& limits, const Scores& out);

}  // namespace cdr
