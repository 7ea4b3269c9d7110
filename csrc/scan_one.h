// The scan for one set of columns: every block of the codes is read for what the block before leaves.
#pragma once

#include <cstdint>

#include "scan_request.h"

namespace cdr {
namespace scan {

// Rows that stay in the cache from one stage to the next.
constexpr std::int64_t kBlock = 512;

// Stage 1. dots[i] = <c, k>_1 of row first + i; bit i % 4 of keep[i / 4] is set where the bound is not below.
using Screen = void (*)(const Codes& codes, std::int64_t width, std::int64_t first, std::int64_t n, const Probe& probe,
                        double below, std::int32_t* dots, std::uint8_t* keep);
// What the bounds say of a row and a gate.
enum : std::uint8_t { kFails = 0, kUnsure = 1, kPasses = 2 };
// Stages 2 and 3: adds block b to the dots of the rows first + rows[i]; says[i] becomes the larger of what it was and
// what the bounds say. dots: by row - first. rows and says have room for a multiple of 4, rows with rows in it.
using Refine = void (*)(const Codes& codes, int b, std::int64_t width, std::int64_t first, const std::int16_t* rows,
                        std::int64_t n, const Probe& probe, double below, double above, std::int32_t* dots,
                        std::uint8_t* says);

struct OneLoops {
  Screen screen;
  Refine refine;
};
// Those of this processor.
OneLoops one_loops();

// The rows first .. first + n, n <= kBlock, which are the codes at `at` and on. dots: [gates, kBlock].
void scan_block(const Index& index, const Place& at, std::int64_t n, std::int64_t first, const Request& request,
                const Rows& rows, const double* squared_norms, const std::uint8_t* alive, const OneLoops& loops,
                bool bounds, std::int32_t* dots, Found& found);

}  // namespace scan
}  // namespace cdr
