// The scan for many sets of columns at once: the codes are read once for all of them.
//
// A block of rows stays in the cache while all queries pass: a screen of its first 128 dimensions with coarse integers,
// then stage 3 for what the screen keeps of each query, then the stored rows that are left of all.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "scan_request.h"

namespace cdr {
namespace scan {

// Queries from which threshold() screens them together.
constexpr std::size_t kTogether = 4;
// Rows in a block, and in a tile: one bit each in 32.
constexpr std::int64_t kBlockMany = 1024, kTile = 32, kTiles = kBlockMany / kTile;
// Dimensions of the screen, and those of them that share a step.
constexpr int kScreened = 128, kGrain = 32, kGrains = kScreened / kGrain;
constexpr float kUp = 1.0f + 1.0f / (1 << 18);  // for what is rounded to float32

// The rows of a block side by side, four dimensions of a tile after the other.
struct Laid {
  std::int64_t rows = 0;
  int grains = 0;
  alignas(64) std::uint8_t codes[kBlockMany * kScreened];  // [tile][4 grains of fours][kTile][4], code + 128
  // By row: rho, beta_2, the scale, the norm of the codes times the scale. Beyond the rows anything.
  alignas(64) float rho[kBlockMany], beta[kBlockMany], scale[kBlockMany], norm[kBlockMany];
  std::uint32_t living[kTiles];
};

// A gate as the screen asks it: integers k' of 8 bits (7 without VNNI), the terms of the bound in float32. The step of
// a grain is 2^shift that of the next, so that the sums of all grains become one integer.
struct Coarse {
  std::int8_t k[kScreened];
  std::int32_t shift[kGrains];  // of the sum before this grain is added
  std::int32_t offset;          // -128 times the sum of the shifted k', since codes are read as code + 128
  float step, eps, zeta, below;

  // reach: the largest k' that is allowed.
  Coarse(const Gate& gate, double alpha, int reach);
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
  bool planes;
  // Lays the rows first .. first + n of the codes side by side.
  void (*lay)(const Codes& codes, const std::int64_t* widths, std::int64_t first, std::int64_t n, Laid& laid);
  // masks[g * kTiles + t]: the rows of tile t of which the bounds of gate g do not say that they are below; what lies
  // beyond the rows may be set.
  void (*screen)(const Laid& laid, const Coarse* gates, std::size_t count, std::uint32_t* masks);
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

// The numbers of the rows, and which of them live: what lay() does not do by level.
void lay_numbers(const Codes& codes, std::int64_t first, std::int64_t n, Laid& laid);

// What all requests of one call ask; made once, read by all threads.
struct Many {
  const Index& index;
  const std::vector<Request>& requests;
  ManyLoops loops;
  std::vector<Coarse> coarse;  // of the gates of all requests, one after the other
  std::vector<Planes> planes;  // the same, where the level uses them

  Many(const Index& index, const std::vector<Request>& requests);
};

// One thread's work.
class ManyScan {
 public:
  ManyScan(const Many& many, const Rows& rows, const double* squared_norms, const std::uint8_t* alive, bool bounds);

  // The rows first .. first + n, n <= kBlockMany, which are the codes at `at` and on. found: one per request; nothing
  // is added for the open ones.
  void scan(const Place& at, std::int64_t n, std::int64_t first, Found* found);

 private:
  void lay(const Place& at, std::int64_t n, std::int64_t first);
  void fetch_next(const Place& at, std::int64_t n, std::size_t request) const;
  void bound(const Place& at, std::size_t request, std::size_t gate, std::int64_t count);
  void decide(std::int64_t first);
  void append(std::int64_t first, Found* found) const;

  static constexpr std::size_t kRoom = kBlockMany + kTile;

  const Many& many_;
  const Rows& rows_;
  const double* squared_norms_;
  const std::uint8_t* alive_;
  const bool bounds_;
  std::int64_t widths_[kBlocks];
  std::unique_ptr<Laid> laid_;
  std::vector<std::uint32_t> masks_;  // [gates, kTiles]
  std::int16_t list_[kRoom];          // what the screen leaves of one request
  std::vector<double> low_, high_;    // of these: [gates, kRoom]
  // What may pass, request by request: its row, whether it does, what is known of its relevance.
  struct Left {
    std::vector<std::int16_t> row;
    std::vector<std::uint8_t> passes;
    std::vector<float> low, high;
    std::vector<std::size_t> end;  // by request
  } left_;
  std::vector<std::uint32_t> unsure_;  // those of left_ that the stored row decides
  std::vector<std::uint32_t> asks_;    // and who asks
};

}  // namespace scan
}  // namespace cdr
