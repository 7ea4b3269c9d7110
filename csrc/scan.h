// The exact scan over compressed rows: which rows pass a gate, and which may be among the k best.
//
// Codes only ever reject or accept on a proven bound; what they leave open is decided on the stored row by
// the routine of score.h. So the rows found are those of gate_rows(), whatever the rotation is.
//
// The bounds are proven in docs/proofs.md, claims S1 to S15. Names, for a row x with the unit vector n = x / |x|:
//   codes c (int8), scale r, a = r c; the decoded row is d = m + V diag(w) a
//   rho >= |n - d|; beta_1, beta_2 >= |diag(w) a| without the first block, without the first two; alpha >= |a|, all rows
// and for a unit vector q:
//   t = V'q, z = diag(w) t, k = rint(z / s), c0 = m.q; eps >= |z - s k|; zeta_1, zeta_2 >= |t| as beta_1, beta_2
// Stage 1 rejects. Stages 2 and 3 reject or accept (S4). Many queries at once are screened and narrowed first (S11, S12).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rows.h"
#include "score.h"

namespace cdr {
namespace scan {

constexpr int kBlocks = 3;

// The first dimension of block b; for b = kBlocks the number of dimensions.
inline std::int64_t block_begin(std::int64_t dim, int b) {
  const std::int64_t at = b == kBlocks ? dim : 64 * b;
  return at < dim ? at : dim;
}
// Bytes per row in block b; what lies beyond its dimensions is zero.
inline std::int64_t block_width(std::int64_t dim, int b) {
  return (block_begin(dim, b + 1) - block_begin(dim, b) + 31) / 32 * 32;
}

struct Rotation {
  std::int64_t dim = 0;
  const float* matrix = nullptr;  // V: [D, D], column i is direction i
  const float* mean = nullptr;    // [D]
  const float* weight = nullptr;  // [D], > 0
  double frobenius = 0, mean_norm = 0, most_weight = 0;

  void measure();  // fills the second line
};

enum { kRho = 0, kBeta1 = 1, kBeta2 = 2, kScale = 3, kNumbers = 4 };

struct Codes {  // of consecutive rows
  std::int64_t rows;
  const std::int8_t* blocks[kBlocks];  // [rows, block_width]
  const float* numbers;                // [rows, kNumbers]
};

// Making codes of rows first .. first + n, in three steps with a matrix product by the caller between them:
// centred = u - m, float32 [n, D];                      rotated = centred V
// codes, and decoded = diag(w) a, float64 [n, D];       rebuilt = decoded V', float64
// rho into numbers.
void center(const Rows& rows, const double* squared_norms, std::int64_t first, std::int64_t n,
            const Rotation& rotation, float* centred);
// Returns alpha of these rows.
double encode(const float* rotated, std::int64_t n, const Rotation& rotation, std::int8_t* const* blocks,
              float* numbers, double* decoded);
// alpha: what encode() returned. rebuilt may be any float64 product of decoded and V', summed in any order.
void measure(const Rows& rows, const double* squared_norms, std::int64_t first, std::int64_t n,
             const Rotation& rotation, double alpha, const double* rebuilt, float* numbers);

struct Index {
  Rotation rotation;
  std::vector<Codes> codes;  // of rows 0, 1, ...
  double alpha = 0;          // of all of them

  std::int64_t size() const {
    std::int64_t n = 0;
    for (const Codes& c : codes) n += c.rows;
    return n;
  }
};

struct Found {
  std::vector<std::int64_t> rows;  // ascending
  std::vector<float> low, high;    // between which the row's relevance lies, where asked for
};

// For each of the columns, the rows that are alive and pass a gate of theirs: what gate_rows() finds. Rows that have no
// codes (those after the index) are decided by the exact routine. alive: null = all. bounds: whether to say what is
// known of cos(query, row) too; it is what the codes say where the query is the one gate, else -1 to 1.
std::vector<Found> threshold(const Index& index, const Rows& rows, const double* squared_norms,
                             const std::uint8_t* alive, const std::vector<const Columns*>& columns, bool bounds);

// Positions in candidates (null: rows, those alive), ascending, among which are the k best by score_rows() and
// whatever ties with them. factors: one entry per candidate.
std::vector<std::int64_t> top(const Index& index, const Rows& rows, const double* squared_norms,
                              const std::int64_t* candidates, std::int64_t n, const std::uint8_t* alive,
                              const Columns& columns, const Factors& factors, const Limits& limits, std::int64_t k);

struct Bounded {  // rows that a scan found, and bounds of their relevance
  const std::int64_t* rows;
  const float *low, *high;
  std::int64_t n;
};
struct Likely {
  std::int64_t living = 0;              // how many of the rows are alive
  std::vector<std::int64_t> positions;  // in them, ascending: the k best of the living and whatever ties with them
};

// For each of all, where a score is importance * multiplier * max(relevance, 0): as it is where nothing is covered,
// nothing pulls and nothing was written. The bounds go through these very products, and rounding keeps order.
// alive, importance, multiplier (null: 1): by row, [rows]; the last two >= 0.
std::vector<Likely> likely(const std::vector<Bounded>& all, std::int64_t rows, const std::uint8_t* alive,
                           const double* importance, const double* multiplier, std::int64_t k);

// The time to beat: reads every byte of the rows once with all threads. Returns the sum of their 64-bit words.
std::uint64_t read_pass(const Rows& rows);

}  // namespace scan
}  // namespace cdr
