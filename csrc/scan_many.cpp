#include "scan_many.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace cdr {
namespace scan {
namespace {

void lay_generic(const std::int8_t* codes, std::int64_t n, int b, Laid& laid) {
  const std::int64_t width = laid.widths[b];
  for (std::int64_t i = 0; i < (n + kTile - 1) / kTile * kTile; ++i, codes += width) {
    std::int8_t* to = laid.codes[b] + i / kTile * kTile * width + i % kTile * 4;
    std::int32_t sum = 0, squares = 0;
    for (std::int64_t d = 0; d < width; ++d) {
      const std::int8_t c = i < n ? codes[d] : std::int8_t{0};
      to[d / 4 * kTile * 4 + d % 4] = c;
      sum += c;
      squares += c * c;
    }
    laid.bias[b][i] = kBias * sum;
    laid.norm[b][i] = std::sqrt(static_cast<float>(squares)) * kUp;
  }
}

// Whether the bounds do not say that the row is below; dots: of the blocks up to b, with their bias.
inline bool coarse_keeps(const Laid& laid, const Coarse& gate, int b, std::int64_t row, const std::int32_t* dots) {
  const auto part = [&](int i) {
    return gate.step[i] * static_cast<float>(dots[i] - laid.bias[i][row]) + gate.eps[i] * laid.norm[i][row];
  };
  const float sure = b ? part(0) + part(1) : part(0);
  const float error = laid.rho[row] + gate.zeta[b] * laid.beta[b][row];
  return !(laid.scale[row] * sure + error < gate.below[b]);
}

void together_generic(const Laid& laid, const Coarse& gate, std::uint32_t* masks) {
  for (std::int64_t t = 0; t * kTile < laid.rows; ++t) {
    std::uint32_t mask = laid.living[t];
    std::int32_t dots[2][kTile] = {};
    for (int b = 0; b < 2 && mask; ++b) {
      const std::int64_t fours = laid.widths[b] / 4;
      const std::int8_t* codes = laid.codes[b] + t * kTile * laid.widths[b];
      std::uint8_t k[64];
      std::memcpy(k, gate.k[b], sizeof k);
      for (std::int64_t j = 0; j < fours; ++j)
        for (std::int64_t i = 0; i < kTile; ++i, codes += 4)
          for (int l = 0; l < 4; ++l) dots[b][i] += static_cast<std::int32_t>(k[4 * j + l]) * codes[l];
      for (std::int64_t i = 0; i < kTile; ++i) {
        const std::int32_t of[2] = {dots[0][i], dots[1][i]};
        if (!coarse_keeps(laid, gate, b, t * kTile + i, of)) mask &= ~(1u << i);
      }
    }
    masks[t] = mask;
  }
}

void whole_generic(const Codes& codes, const std::int64_t* widths, std::int64_t first, const std::int16_t* rows,
                   std::int64_t n, const Probe& probe, double below, double* low, double* high, std::uint8_t* may) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t row = first + rows[i];
    const float* numbers = codes.numbers + row * kNumbers;
    std::int32_t dot = 0;
    for (int b = 0; b < kBlocks; ++b)
      dot += dot_generic(codes.blocks[b] + row * widths[b], widths[b], probe.k[b].data());
    const double center = probe.center + probe.step * scaled(numbers, dot);
    const double error = static_cast<double>(numbers[kRho]) + probe.error;
    low[i] = center - error;
    high[i] = center + error;
    if (!(high[i] < below)) may[i / 4] = static_cast<std::uint8_t>(may[i / 4] | (1u << (i % 4)));
  }
}

#if CDR_X86
CDR_AVX2 void lay_avx2(const std::int8_t* codes, std::int64_t n, int b, Laid& laid) {
  const std::int64_t width = laid.widths[b];
  const __m256i one = _mm256_set1_epi16(1), ones = _mm256_set1_epi8(1);
  alignas(32) std::int8_t padded[8 * 64] = {};
  for (std::int64_t i = 0; i < (n + kTile - 1) / kTile * kTile; i += 8, codes += 8 * width) {
    const std::int8_t* from = codes;
    if (i + 8 > n) {
      std::memset(padded, 0, sizeof padded);
      if (i < n) std::memcpy(padded, codes, static_cast<std::size_t>((n - i) * width));
      from = padded;
    }
    __m256i* to = reinterpret_cast<__m256i*>(laid.codes[b] + i / kTile * kTile * width + i % kTile * 4);
    __m256i sum = _mm256_setzero_si256(), squares = sum;
    for (std::int64_t d = 0; d < width; d += 32, to += kTile) {  // 8 x 8 fours of codes turned about
      __m256i r[8], t[8];
      for (int j = 0; j < 8; ++j) r[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + j * width + d));
      for (int j = 0; j < 8; j += 2) {
        t[j] = _mm256_unpacklo_epi32(r[j], r[j + 1]);
        t[j + 1] = _mm256_unpackhi_epi32(r[j], r[j + 1]);
      }
      for (int j = 0; j < 8; j += 4) {
        r[j] = _mm256_unpacklo_epi64(t[j], t[j + 2]);
        r[j + 1] = _mm256_unpackhi_epi64(t[j], t[j + 2]);
        r[j + 2] = _mm256_unpacklo_epi64(t[j + 1], t[j + 3]);
        r[j + 3] = _mm256_unpackhi_epi64(t[j + 1], t[j + 3]);
      }
      for (int j = 0; j < 4; ++j) {
        t[j] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x20);
        t[j + 4] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x31);
      }
      for (int j = 0; j < 8; ++j) {
        _mm256_store_si256(to + j * (kTile / 8), t[j]);
        const __m256i a = _mm256_abs_epi8(t[j]);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(one, _mm256_maddubs_epi16(ones, t[j])));
        squares = _mm256_add_epi32(squares, _mm256_madd_epi16(one, _mm256_maddubs_epi16(a, a)));
      }
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(laid.bias[b] + i), _mm256_mullo_epi32(sum, _mm256_set1_epi32(kBias)));
    _mm256_store_ps(laid.norm[b] + i, _mm256_mul_ps(_mm256_sqrt_ps(_mm256_cvtepi32_ps(squares)), _mm256_set1_ps(kUp)));
  }
}

// Adds to sums[g] the products of 8 rows each.
CDR_AVX2 inline void together_block(const std::int8_t* codes, std::int64_t fours, const std::int32_t* k,
                                    __m256i* sums) {
  const __m256i one = _mm256_set1_epi16(1);
  const __m256i* c = reinterpret_cast<const __m256i*>(codes);
  __m256i a = sums[0], b = sums[1], d = sums[2], e = sums[3];
  for (std::int64_t j = 0; j < fours; ++j, c += 4) {
    const __m256i x = _mm256_set1_epi32(k[j]);
    a = _mm256_add_epi32(a, _mm256_madd_epi16(one, _mm256_maddubs_epi16(x, c[0])));
    b = _mm256_add_epi32(b, _mm256_madd_epi16(one, _mm256_maddubs_epi16(x, c[1])));
    d = _mm256_add_epi32(d, _mm256_madd_epi16(one, _mm256_maddubs_epi16(x, c[2])));
    e = _mm256_add_epi32(e, _mm256_madd_epi16(one, _mm256_maddubs_epi16(x, c[3])));
  }
  sums[0] = a;
  sums[1] = b;
  sums[2] = d;
  sums[3] = e;
}

CDR_AVX2 void together_avx2(const Laid& laid, const Coarse& gate, std::uint32_t* masks) {
  for (std::int64_t t = 0; t * kTile < laid.rows; ++t) {
    std::uint32_t mask = laid.living[t];
    __m256 sure[4];
    for (int b = 0; b < 2 && mask; ++b) {
      __m256i sums[4];
      for (__m256i& s : sums) s = _mm256_setzero_si256();
      together_block(laid.codes[b] + t * kTile * laid.widths[b], laid.widths[b] / 4, gate.k[b], sums);
      const __m256 step = _mm256_set1_ps(gate.step[b]), zeta = _mm256_set1_ps(gate.zeta[b]);
      const __m256 below = _mm256_set1_ps(gate.below[b]), eps = _mm256_set1_ps(gate.eps[b]);
      std::uint32_t keeps = 0;
      for (int g = 0; g < 4; ++g) {
        const std::int64_t at = t * kTile + 8 * g;
        const __m256i bias = _mm256_load_si256(reinterpret_cast<const __m256i*>(laid.bias[b] + at));
        const __m256 part = _mm256_add_ps(_mm256_mul_ps(step, _mm256_cvtepi32_ps(_mm256_sub_epi32(sums[g], bias))),
                                          _mm256_mul_ps(eps, _mm256_load_ps(laid.norm[b] + at)));
        sure[g] = b ? _mm256_add_ps(sure[g], part) : part;
        const __m256 error =
            _mm256_add_ps(_mm256_load_ps(laid.rho + at), _mm256_mul_ps(zeta, _mm256_load_ps(laid.beta[b] + at)));
        const __m256 most = _mm256_add_ps(_mm256_mul_ps(_mm256_load_ps(laid.scale + at), sure[g]), error);
        keeps |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(most, below, _CMP_NLT_UQ))) << (8 * g);
      }
      mask &= keeps;
    }
    masks[t] = mask;
  }
}

CDR_AVX2 void whole_avx2(const Codes& codes, const std::int64_t* widths, std::int64_t first, const std::int16_t* rows,
                         std::int64_t n, const Probe& probe, double below, double* low, double* high,
                         std::uint8_t* may) {
  const float* all = codes.numbers + first * kNumbers;
  for (std::int64_t i = 0; i < n; i += 4) {
    const std::int64_t r0 = rows[i], r1 = rows[i + 1], r2 = rows[i + 2], r3 = rows[i + 3];
    __m256i s0 = _mm256_setzero_si256(), s1 = s0, s2 = s0, s3 = s0;
    for (int b = 0; b < kBlocks; ++b) {
      const std::int64_t width = widths[b];
      const std::int8_t* block = codes.blocks[b] + first * width;
      const std::int16_t* k = probe.k[b].data();
      const std::int8_t *p0 = block + r0 * width, *p1 = block + r1 * width, *p2 = block + r2 * width,
                        *p3 = block + r3 * width;
      for (std::int64_t j = 0; j < width; j += 16) {
        const __m256i q = load(k + j);
        s0 = _mm256_add_epi32(s0, _mm256_madd_epi16(codes16(p0 + j), q));
        s1 = _mm256_add_epi32(s1, _mm256_madd_epi16(codes16(p1 + j), q));
        s2 = _mm256_add_epi32(s2, _mm256_madd_epi16(codes16(p2 + j), q));
        s3 = _mm256_add_epi32(s3, _mm256_madd_epi16(codes16(p3 + j), q));
      }
    }
    const Numbers4 x =
        numbers4(all + r0 * kNumbers, all + r1 * kNumbers, all + r2 * kNumbers, all + r3 * kNumbers);
    const Bounds4 bounds = bounds4(probe, kBlocks - 1, sums4(s0, s1, s2, s3), x);
    _mm256_storeu_pd(low + i, _mm256_sub_pd(bounds.center, bounds.error));
    _mm256_storeu_pd(high + i, _mm256_add_pd(bounds.center, bounds.error));
    may[i / 4] = static_cast<std::uint8_t>(may[i / 4] | not_below(bounds, below));
  }
}
#endif

}  // namespace

ManyLoops many_loops() {
#if CDR_X86
  if (fast()) return {lay_avx2, together_avx2, whole_avx2};
#endif
  return {lay_generic, together_generic, whole_generic};
}

}  // namespace scan
}  // namespace cdr
