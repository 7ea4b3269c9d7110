#include "scan_one.h"

#include <algorithm>
#include <cstring>

namespace cdr {
namespace scan {
namespace {

// What the bounds by the blocks up to b say.
inline std::uint8_t verdict(const Probe& probe, int b, std::int32_t dot, const float* numbers, double below,
                            double above) {
  const double beta = b + 1 < kBlocks ? static_cast<double>(numbers[kBeta1 + b]) : 0.0;
  const double center = probe.center + probe.step * scaled(numbers, dot);
  const double error = (static_cast<double>(numbers[kRho]) + probe.zeta[b] * beta) + probe.error;
  return center - error >= above ? kPasses : center + error < below ? kFails : kUnsure;
}

void screen_generic(const Codes& codes, std::int64_t width, std::int64_t first, std::int64_t n, const Probe& probe,
                    double below, std::int32_t* dots, std::uint8_t* keep) {
  for (std::int64_t i = 0; i < n; ++i) {
    dots[i] = dot_generic(codes.blocks[0] + (first + i) * width, width, probe.k[0].data());
    if (verdict(probe, 0, dots[i], codes.numbers + (first + i) * kNumbers, below, kInf) != kFails)
      keep[i / 4] = static_cast<std::uint8_t>(keep[i / 4] | (1u << (i % 4)));
  }
}

void refine_generic(const Codes& codes, int b, std::int64_t width, std::int64_t first, const std::int16_t* rows,
                    std::int64_t n, const Probe& probe, double below, double above, std::int32_t* dots,
                    std::uint8_t* says) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t row = first + rows[i];
    const float* numbers = codes.numbers + row * kNumbers;
    std::int32_t& dot = dots[rows[i]];
    dot += dot_generic(codes.blocks[b] + row * width, width, probe.k[b].data());
    says[i] = std::max(says[i], verdict(probe, b, dot, numbers, below, above));
  }
}

#if CDR_X86
CDR_AVX2 void screen_avx2(const Codes& codes, std::int64_t width, std::int64_t first, std::int64_t n,
                          const Probe& probe, double below, std::int32_t* dots, std::uint8_t* keep) {
  const std::int16_t* k = probe.k[0].data();
  // A copy, so that the compiler need not read it again after each store to dots and keep.
  Probe own;
  own.step = probe.step;
  own.center = probe.center;
  own.error = probe.error;
  own.zeta[0] = probe.zeta[0];
  const bool wide = width == 64;
  const __m256i k0 = load(k), k1 = load(k + 16), k2 = wide ? load(k + 32) : k0, k3 = wide ? load(k + 48) : k0;
  const std::int8_t* row = codes.blocks[0] + first * width;
  const float* numbers = codes.numbers + first * kNumbers;
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4, row += 4 * width, numbers += 4 * kNumbers) {
    __m256i sum[4];
    CDR_PREFETCH(numbers + kNumbers * kScreenAhead);
    for (int r = 0; r < 4; ++r) {
      const std::int8_t* p = row + r * width;
      __m256i a = _mm256_madd_epi16(codes16(p), k0), b = _mm256_madd_epi16(codes16(p + 16), k1);
      if (wide) {
        CDR_PREFETCH(p + 64 * kScreenAhead);
        a = _mm256_add_epi32(a, _mm256_madd_epi16(codes16(p + 32), k2));
        b = _mm256_add_epi32(b, _mm256_madd_epi16(codes16(p + 48), k3));
      }
      sum[r] = _mm256_add_epi32(a, b);
    }
    const __m128i d = sums4(sum[0], sum[1], sum[2], sum[3]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dots + i), d);
    const Numbers4 x = numbers4(numbers, numbers + kNumbers, numbers + 2 * kNumbers, numbers + 3 * kNumbers);
    keep[i / 4] = static_cast<std::uint8_t>(keep[i / 4] | not_below(bounds4(own, 0, d, x), below));
  }
  if (i < n) screen_generic(codes, width, first + i, n - i, probe, below, dots + i, keep + i / 4);
}

CDR_AVX2 void refine_avx2(const Codes& codes, int b, std::int64_t width, std::int64_t first, const std::int16_t* rows,
                          std::int64_t n, const Probe& probe, double below, double above, std::int32_t* dots,
                          std::uint8_t* says) {
  const std::int8_t* block = codes.blocks[b] + first * width;
  const float* all = codes.numbers + first * kNumbers;
  const std::int16_t* k = probe.k[b].data();
  if (n == 0) return;
  // Where most rows are read, the memory is faster at reading all of them in their order.
  const bool dense = 5 * n > 2 * (rows[n - 1] - rows[0] + 1);
  for (std::int64_t i = 0; i < std::min(n, kAhead); ++i) prefetch(block + rows[i] * width, width);
  for (std::int64_t i = 0; i < n; i += 4) {
    if (dense) {
      if (i + 4 < n) prefetch(block + (rows[i] + kAhead) * width, (rows[i + 4] - rows[i]) * width);
    } else {
      for (std::int64_t j = i + kAhead; j < std::min(n, i + kAhead + 4); ++j) prefetch(block + rows[j] * width, width);
    }
    const std::int64_t r0 = rows[i], r1 = rows[i + 1], r2 = rows[i + 2], r3 = rows[i + 3];
    const std::int8_t *p0 = block + r0 * width, *p1 = block + r1 * width, *p2 = block + r2 * width,
                      *p3 = block + r3 * width;
    __m256i s0 = _mm256_setzero_si256(), s1 = s0, s2 = s0, s3 = s0;
    for (std::int64_t j = 0; j < width; j += 16) {
      const __m256i q = load(k + j);
      s0 = _mm256_add_epi32(s0, _mm256_madd_epi16(codes16(p0 + j), q));
      s1 = _mm256_add_epi32(s1, _mm256_madd_epi16(codes16(p1 + j), q));
      s2 = _mm256_add_epi32(s2, _mm256_madd_epi16(codes16(p2 + j), q));
      s3 = _mm256_add_epi32(s3, _mm256_madd_epi16(codes16(p3 + j), q));
    }
    const Numbers4 x =
        numbers4(all + r0 * kNumbers, all + r1 * kNumbers, all + r2 * kNumbers, all + r3 * kNumbers);
    const __m128i d = _mm_add_epi32(_mm_setr_epi32(dots[r0], dots[r1], dots[r2], dots[r3]), sums4(s0, s1, s2, s3));
    dots[r0] = _mm_extract_epi32(d, 0);
    dots[r1] = _mm_extract_epi32(d, 1);
    dots[r2] = _mm_extract_epi32(d, 2);
    dots[r3] = _mm_extract_epi32(d, 3);
    const Bounds4 bounds = bounds4(probe, b, d, x);
    const int passes = above_all(bounds, above), may = not_below(bounds, below) | passes;
    for (int r = 0; r < 4; ++r)
      says[i + r] = std::max(says[i + r], static_cast<std::uint8_t>(((may >> r) & 1) + ((passes >> r) & 1)));
  }
}
#endif

}  // namespace

OneLoops one_loops() {
#if CDR_X86
  if (fast()) return {screen_avx2, refine_avx2};
#endif
  return {screen_generic, refine_generic};
}

void scan_block(const Index& index, const Place& at, std::int64_t n, std::int64_t first, const Request& request,
                const Rows& rows, const double* squared_norms, const std::uint8_t* alive, const OneLoops& loops,
                bool bounds, std::int32_t* dots, Found& found) {
  const bool tells = bounds && request.tells;
  const std::int64_t dim = index.rotation.dim;
  const std::int64_t row_bytes = rows.row_bytes();
  const Codes& codes = *at.codes;
  std::uint8_t keep[kBlock / 4] = {};
  for (std::size_t g = 0; g < request.gates.size(); ++g)
    loops.screen(codes, block_width(dim, 0), at.row, n, request.gates[g].probe, request.gates[g].below,
                 dots + static_cast<std::int64_t>(g) * kBlock, keep);

  // What is kept is compacted without branches: there is nothing to predict in it.
  std::int16_t left[kBlock + 4], open[kBlock + 4], place[kBlock + 4];
  std::uint8_t says[kBlock + 4], says_open[kBlock + 4];
  std::int64_t count = 0, unsure = 0;
  for (std::int64_t i = 0; i < n; i += 4) {
    const BitsOf4& set = kBitsOf4[keep[i / 4]];
    for (int j = 0; j < 4; ++j) left[count + j] = static_cast<std::int16_t>(i + set.at[j]);
    count += set.count;
  }
  if (alive && std::memchr(alive + first, 0, static_cast<std::size_t>(n))) {
    std::int64_t living = 0;
    for (std::int64_t c = 0; c < count; ++c) {
      left[living] = left[c];
      living += alive[first + left[c]] != 0;
    }
    count = living;
  }
  if (!count) return;
  const auto refined = [&](int b, std::int16_t* list, std::int64_t size, std::uint8_t* out) {
    std::fill_n(out, (size + 3) / 4 * 4, kFails);
    for (std::int64_t i = size; i % 4; ++i) list[i] = list[size - 1];
    for (std::size_t g = 0; g < request.gates.size(); ++g) {
      const Gate& gate = request.gates[g];
      // Bounds are told of stage 3.
      loops.refine(codes, b, block_width(dim, b), at.row, list, size, gate.probe, gate.below,
                   tells && b + 1 < kBlocks ? kInf : gate.above,
                   dots + static_cast<std::int64_t>(g) * kBlock, out);
    }
  };
  refined(1, left, count, says);
  for (std::int64_t c = 0; c < count; ++c) {
    open[unsure] = left[c];
    place[unsure] = static_cast<std::int16_t>(c);
    unsure += says[c] == kUnsure;
  }
  if (unsure) refined(2, open, unsure, says_open);
  std::int64_t rest = 0;
  for (std::int64_t c = 0; c < unsure; ++c) {
    says[place[c]] = says_open[c];
    open[rest] = place[c];
    rest += says_open[c] == kUnsure;
  }
  for (std::int64_t c = 0; c < std::min(rest, kRowsAhead); ++c) prefetch(rows.at(first + left[open[c]]), row_bytes);
  for (std::int64_t c = 0; c < rest; ++c) {
    if (c + kRowsAhead < rest) prefetch(rows.at(first + left[open[c + kRowsAhead]]), row_bytes);
    const std::int64_t row = first + left[open[c]];
    says[open[c]] = request.scorer.passes(row, squared_norms[row]) ? kPasses : kFails;
  }
  std::int64_t passing[kBlock + 1], kept = 0;
  for (std::int64_t c = 0; c < count; ++c) {
    passing[kept] = first + left[c];
    kept += says[c] == kPasses;
  }
  found.rows.insert(found.rows.end(), passing, passing + kept);
  if (!bounds) return;
  for (std::int64_t i = 0; i < kept; ++i) {
    if (!tells) {
      tell(found, -1.0, 1.0);
      continue;
    }
    const Probe& probe = request.gates[0].probe;
    const float* numbers = codes.numbers + (at.row + passing[i] - first) * kNumbers;
    const double center = probe.center + probe.step * scaled(numbers, dots[passing[i] - first]);
    const double error = static_cast<double>(numbers[kRho]) + probe.error;
    tell(found, center - error, center + error);
  }
}

}  // namespace scan
}  // namespace cdr
