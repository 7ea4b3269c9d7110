// The exact scan over compressed rows: which rows pass a gate, and which may be among the k best.
//
// Codes only ever reject or accept on a proven bound; what they leave open is decided on the stored row by
// the routine of score.h. So the rows found are those of gate_rows(), whatever the rotation is.
//
// Row x, u = x / |x|. For ANY matrix V, mean m and weights w > 0:
//   y = diag(1/w) V'(u - m); int8 codes c with one float32 scale r per row: a = r c; the decoded row is
//   d = m + V diag(w) a. The codes are cut into blocks: the first 64 dimensions, the next 64, the rest.
// Kept per row, measured in float64 on the stored row and rounded up:
//   rho >= |u - d|,  beta_1, beta_2 >= |diag(w) a| without the first block, without the first two;
// and of all rows together: alpha >= |a|. Whatever went wrong on the way to the codes (their rounding, float32 in the
// rotation, a V that is not orthogonal) is inside rho: that is why nothing is asked of V.
//
// A unit vector q: t = V'q, z = diag(w) t, integers k = rint(z / s), c0 = m.q, eps >= |z - s k|, and zeta_1, zeta_2 >=
// |t| without the first block, without the first two.
//   q.u = q.d + q.(u - d),                   |q.(u - d)| <= rho             (Cauchy-Schwarz, |q| = 1)
//   q.d = c0 + z.a = c0 + s r <c, k> + (z - s k).a,       the last <= alpha eps
//   of z.a, what lies beyond a block is t.(diag(w) a) there, <= zeta beta
// so with e = alpha eps + slack, and <>_i the sum over the first i blocks
//   stages i = 1, 2:  q.u = c0 + s r <c, k>_i +- (rho + beta_i zeta_i + e)
//   stage 3:          q.u = c0 + s r <c, k> +- (rho + e).
// Stage 1 only rejects; stages 2 and 3 reject or accept; then the stored row is asked.
//
// Many queries at once. Integers k' of 7 or 8 bits, and a step s_g for each grain g of 32 dimensions; s_g = 2^j_g s for
// the last one's s, so that sum 2^j_g <c, k'>_g is one integer. What the k' of the first grain, whose step is the
// largest, leave of z is asked for by one more grain over the same dimensions, with step s.
//   a screen of all:   stage 2, with |(z_2 - s_g k').a| <= eps r |c_2| in place of alpha eps, z_2 and c_2 of the first
//                      two blocks, without the last grain; it only rejects
//   narrow, of those of which several rows of a tile are left: stage 3, with eps r |c| in place of alpha eps
// then stage 3 as it is, and the stored row.
//
// Rounding. The integer sums are exact: s is chosen so that 127 sum |k| < 2^31. All else is float64:
//   - u, d, |u - d|: at most (D + 16) 2^-52 (1 + |m| + F W alpha) per row, F the Frobenius norm of V (it bounds
//     the norm of |V|) and W the largest weight; measure() adds that and 1e-10 to rho;
//   - t: at most (D + 16) 2^-52 F, so z is off by W times that: both are added to zeta and eps;
//   - the terms of the bounds and q's own normalisation: at most 16 ulp of 1 + |c0| + |m| + alpha (|z| + eps), and
//     of rho + beta zeta, which are stored 1e-12 (relative) too large for this;
//   - the number that the exact routine computes is off by (D + 8) 2^-52 from q.u, plus 1e-200 for underflow.
//   The third and the fourth are the slack, taken four times as large as needed.
//   - the screen and narrow compute in float32, ten operations: off by at most 10 2^-24 of rho + beta zeta and
//     eps r |c|, of c0, alpha |s_g k'| and the gate. The first are taken 2^-18 larger; 2^-18 of the others makes the
//     gate of the screen lower and is in narrow's slack. A fused multiply-add only leaves out roundings.
// A coverage functional is such a q times its length, however many entries it was summed from: the exact routine takes
// its product with the row, so what the entries' sum lost is in q itself and D roundings count, not one per entry.
// A gate on scale * q.u + shift is put on q.u, -q for a negative scale, and widened by the rounding of both sides.
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
