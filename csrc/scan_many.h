// The scan for many sets of columns at once: the codes are read once for all of them.
//
// A tile of rows stays in the cache while all gates pass: first a screen of its first 128 dimensions with coarse
// integers; then, for the gates that keep several of its rows, all dimensions, going on from there (narrow). Rows that
// are still open are asked one by one: stage 3, then the stored row.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "scan_request.h"

namespace cdr {
namespace scan {

// Gates, of all columns, from which threshold() screens them together.
constexpr std::size_t kTogether = 4;
// Rows in a block, and in a tile: one bit each in 32.
constexpr std::int64_t kBlockMany = 1024, kTile = 32, kTiles = kBlockMany / kTile;
// Dimensions of the screen, and those that share a step.
constexpr int kScreened = 128, kGrain = 32;

inline int grains_of(std::int64_t dims) { return static_cast<int>((dims + kGrain - 1) / kGrain); }
inline int grains_screened(std::int64_t dim) { return grains_of(block_begin(dim, 2)); }

// Gates that are asked at a time: their sums stay in registers.
constexpr std::size_t kSide = 6;

constexpr float kUp = 1.0f + 1.0f / (1 << 18);  // for what is rounded to float32

// By row of a block: rho, beta_2, the scale, the norm of the codes times the scale, of those that are screened and of
// all. Beyond the rows anything.
struct RowNumbers {
  alignas(64) float rho[kBlockMany], beta[kBlockMany], scale[kBlockMany], screened[kBlockMany], whole[kBlockMany];
};

// A gate as the screen and narrow ask it: integers k' of 8 bits (7 without VNNI), the terms of the bounds in float32.
// The step of a grain is 2^shift that of the next, so that the sums of all grains become one integer. The last grain
// is what the integers of the first, whose step is the largest, left over.
struct Coarse {
  std::vector<std::int8_t> k;       // [grains + 1, kGrain]
  std::vector<std::int32_t> shift;  // [grains + 1]: of the sum before this grain is added
  // offset: -128 times the sum of the shifted k', modulo 2^32, since codes are read as code + 128.
  struct {
    std::int32_t offset = 0;
    float step = 0, eps = 0, zeta = 0, below = -std::numeric_limits<float>::infinity();
  } screen;
  struct {
    std::int32_t offset = 0;
    float step = 0, eps = 0, center = 0, slack = std::numeric_limits<float>::infinity();
    float below = -std::numeric_limits<float>::infinity(), above = std::numeric_limits<float>::infinity();
  } narrow;

  // reach: the largest k' that is allowed.
  Coarse(const Gate& gate, std::int64_t dim, double alpha, int reach);
};

// A gate and a tile to narrow: what goes in, what comes out.
struct Narrowing {
  const Coarse* gate;
  const std::int32_t* sums;  // [kTile], as the screen left them
  float *low, *high;         // [kTile]: what is known of the rows' relevance; null where nobody asks
  std::uint32_t may, sure;   // rows that may pass; rows that do
};

// A probe's k as 256 high + low, bytes, for stage 3 with VNNI; [block_width rounded up to 64] each.
struct Planes {
  std::vector<std::int8_t> high[kBlocks], low[kBlocks];
  std::int32_t offset = 0;  // -128 times the sum of k

  explicit Planes(const Probe& probe);
};

// The loops of one level; the same rows pass for all of them.
struct ManyLoops {
  int reach;
  int several;  // rows of a tile from which it is narrowed
  bool planes;
  // Lays n rows' codes of one block side by side: to = [fours of dimensions][kTile][4], code + 128; the rows beyond are
  // zero. Adds the squares of the codes to squares[kTile]; norms[kTile]: the roots of these, rounded up.
  void (*lay)(const std::int8_t* codes, std::int64_t width, std::int64_t n, std::uint8_t* to, std::int32_t* squares,
              float* norms);
  // Of the tile whose first row in the block is `row`: masks[g * kTiles] has the rows of which the bounds of gate g do
  // not say that they are below, and perhaps some beyond the rows; narrow goes on from sums[g * kTile].
  void (*screen)(const std::uint8_t* codes, int grains, const RowNumbers& numbers, std::int64_t row,
                 const Coarse* gates, std::size_t count, std::int32_t* sums, std::uint32_t* masks);
  // The tile again for some gates, from the sums of the grains that were screened.
  void (*narrow)(const std::uint8_t* codes, int screened, int grains, const RowNumbers& numbers, std::int64_t row,
                 Narrowing* all, std::size_t count);
  // The rows whose bits are set, ascending; returns how many. out has room for all and one tile more.
  std::int64_t (*list)(const std::uint32_t* masks, std::int64_t tiles, std::int16_t* out);
  // low[i], high[i]: the bounds of stage 3 of the row first + rows[i]; bit i % 4 of may[i / 4] is set where it is not
  // below. rows, low and high have room for a multiple of 4, rows with rows in it.
  void (*whole)(const Codes& codes, const std::int64_t* widths, std::int64_t first, const std::int16_t* rows,
                std::int64_t n, const Probe& probe, const Planes* planes, double below, double* low, double* high,
                std::uint8_t* may);
};
// Those of this processor. Each file has its level's.
ManyLoops many_loops();
ManyLoops many_loops_generic();
#if CDR_X86
ManyLoops many_loops_avx2();
ManyLoops many_loops_avx512();
#endif

// What all requests of one call ask; made once, read by all threads.
struct Many {
  const Index& index;
  const std::vector<Request>& requests;
  ManyLoops loops;
  std::vector<Coarse> coarse;  // of the gates of all requests, one after the other
  std::vector<Planes> planes;  // the same, where the level uses them

  Many(const Index& index, const std::vector<Request>& requests);
};

// What a run of blocks found: block by block, request by request.
struct Pieces {
  std::vector<std::int64_t> rows;  // ascending in each piece
  std::vector<float> low, high;    // as in Found
  std::vector<std::size_t> end;    // [blocks, requests]
};

// One thread's work.
class ManyScan {
 public:
  ManyScan(const Many& many, const Rows& rows, const double* squared_norms, const std::uint8_t* alive, bool bounds);

  // The rows first .. first + n, n <= kBlockMany, which are the codes at `at` and on; of open requests none is found.
  void scan(const Place& at, std::int64_t n, std::int64_t first, Pieces& found);

 private:
  void tile(const Place& at, std::int64_t n, std::int64_t first, std::int64_t t);
  void lay(const Codes& codes, std::int64_t row, std::int64_t n, int from, int to, const float* scales, float* norms);
  std::uint32_t living(std::int64_t first, std::int64_t n) const;
  void settle(const Place& at, std::int64_t n, std::size_t request, std::size_t gate);
  void ask_codes(const Place& at, std::size_t request, std::size_t gate, std::int64_t count);
  void decide(std::int64_t first);
  void append(std::int64_t first, Pieces& found) const;
  // What is known of the relevance of the block's rows, by row, for a request that tells; else null.
  float* low_of(std::size_t request) const {
    return telling_[request] < 0 ? nullptr : known_.get() + 2 * kBlockMany * telling_[request];
  }
  float* high_of(std::size_t request) const {
    return telling_[request] < 0 ? nullptr : low_of(request) + kBlockMany;
  }

  static constexpr std::size_t kRoom = kBlockMany + kTile;

  const Many& many_;
  const Rows& rows_;
  const double* squared_norms_;
  const std::uint8_t* alive_;
  const bool bounds_;
  const int screened_, grains_;
  const std::int64_t row_bytes_;
  std::int64_t widths_[kBlocks];
  std::vector<std::size_t> request_of_;   // by gate
  std::vector<std::int64_t> telling_;     // by request: which of those that tell, -1 for the others
  std::unique_ptr<float[]> known_;        // [those, 2, kBlockMany]

  // The tile at hand.
  std::vector<std::uint8_t> room_;
  std::uint8_t* codes_;                   // in room_, aligned: [grains, fours of a grain, kTile, 4]
  std::int32_t squares_[kTile];
  std::vector<std::int32_t> sums_;        // [gates, kTile]
  std::vector<Narrowing> narrowings_;
  std::vector<std::size_t> narrowed_;     // their gates

  // The block at hand.
  bool all_live_ = true;
  std::unique_ptr<RowNumbers> numbers_;
  std::vector<std::uint32_t> may_, sure_;  // [gates, kTiles]: rows that may pass, rows that do
  std::int16_t list_[kRoom];
  std::vector<double> low_, high_;  // stage 3 of those in list_: [gates, kRoom]
  // What may pass, request by request: its row, whether it does, what is known of its relevance.
  struct Left {
    std::vector<std::int16_t> row;
    std::vector<std::uint8_t> passes;
    std::vector<float> low, high;
    std::vector<std::size_t> end;  // by request
    std::size_t size = 0;
  } left_;
  std::vector<std::uint32_t> unsure_;  // those of left_ that the stored row decides
  std::vector<std::uint32_t> asks_;    // and who asks
  std::vector<std::uint32_t> by_row_;  // positions in these, row by row
};

}  // namespace scan
}  // namespace cdr
