// The loops of many queries with VNNI: a multiply-add of four codes and four k' per 32 bits.
#include "scan_many.h"

#include <algorithm>

#if CDR_X86

namespace cdr {
namespace scan {
namespace {

CDR_AVX512 inline __m512i four_of(const std::int8_t* k) {
  std::int32_t four;
  __builtin_memcpy(&four, k, 4);
  return _mm512_set1_epi32(four);
}

// A tile and N gates, whose sums stay in registers.
template <int N>
CDR_AVX512 inline void screen_tile(const Laid& laid, std::int64_t t, const Coarse* gates, std::uint32_t* masks) {
  const __m512i* codes = reinterpret_cast<const __m512i*>(laid.codes + t * kTile * kScreened);
  __m512i a[N], b[N];
  for (int g = 0; g < N; ++g) a[g] = b[g] = _mm512_setzero_si512();
  for (int s = 0; s < laid.grains; ++s) {
    if (s)
      for (int g = 0; g < N; ++g) {
        const __m128i by = _mm_cvtsi32_si128(gates[g].shift[s]);
        a[g] = _mm512_sll_epi32(a[g], by);
        b[g] = _mm512_sll_epi32(b[g], by);
      }
    for (int j = 0; j < kGrain; j += 4, codes += 2) {
      const __m512i x = _mm512_load_si512(codes), y = _mm512_load_si512(codes + 1);
      for (int g = 0; g < N; ++g) {
        const __m512i k = four_of(gates[g].k + s * kGrain + j);
        a[g] = _mm512_dpbusd_epi32(a[g], x, k);
        b[g] = _mm512_dpbusd_epi32(b[g], y, k);
      }
    }
  }
  const std::int64_t at = t * kTile;
  const auto keeps = [&](const Coarse& gate, __m512i sum, std::int64_t row) CDR_AVX512 {
    const __m512 sure = _mm512_mul_ps(_mm512_set1_ps(gate.step),
                                      _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(gate.offset))));
    __m512 most = _mm512_fmadd_ps(_mm512_set1_ps(gate.zeta), _mm512_load_ps(laid.beta + row),
                                  _mm512_load_ps(laid.rho + row));
    most = _mm512_fmadd_ps(_mm512_set1_ps(gate.eps), _mm512_load_ps(laid.norm + row), most);
    most = _mm512_fmadd_ps(_mm512_load_ps(laid.scale + row), sure, most);
    return static_cast<std::uint32_t>(_mm512_cmp_ps_mask(most, _mm512_set1_ps(gate.below), _CMP_NLT_UQ));
  };
  for (int g = 0; g < N; ++g)
    masks[g * kTiles + t] = keeps(gates[g], a[g], at) | keeps(gates[g], b[g], at + 16) << 16;
}

CDR_AVX512 void screen_avx512(const Laid& laid, const Coarse* gates, std::size_t count, std::uint32_t* masks) {
  constexpr std::size_t kSide = 6;
  for (std::int64_t t = 0; t * kTile < laid.rows; ++t) {
    std::size_t g = 0;
    for (; g + kSide <= count; g += kSide) screen_tile<kSide>(laid, t, gates + g, masks + g * kTiles);
    const Coarse* rest = gates + g;
    std::uint32_t* to = masks + g * kTiles;
    switch (count - g) {
      case 1: screen_tile<1>(laid, t, rest, to); break;
      case 2: screen_tile<2>(laid, t, rest, to); break;
      case 3: screen_tile<3>(laid, t, rest, to); break;
      case 4: screen_tile<4>(laid, t, rest, to); break;
      case 5: screen_tile<5>(laid, t, rest, to); break;
      default: break;
    }
  }
}

CDR_AVX512 std::int64_t list_avx512(const std::uint32_t* masks, std::int64_t tiles, std::int16_t* out) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  std::int64_t count = 0;
  for (std::int64_t t = 0; t < tiles; ++t)
    for (int half = 0; half < 2; ++half) {
      const __mmask16 mask = static_cast<__mmask16>(masks[t] >> (16 * half));
      const __m512i all = _mm512_add_epi32(low, _mm512_set1_epi32(static_cast<int>(t * kTile + 16 * half)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + count),
                          _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(mask, all)));
      count += __builtin_popcount(mask);
    }
  return count;
}

CDR_AVX512 inline __m512i half_of(const std::int8_t* p) {
  return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

CDR_AVX512 inline __m256i halves(__m512i x) {
  return _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
}

constexpr std::int64_t kNear = 8;  // rows ahead whose codes are brought nearer

// The integers of whole_avx2(): they wrap round on the way and are what they are at the end.
CDR_AVX512 void whole_avx512(const Codes& codes, const std::int64_t* widths, std::int64_t first,
                             const std::int16_t* rows, std::int64_t n, const Probe& probe, const Planes* planes,
                             double below, double* low, double* high, std::uint8_t* may) {
  const __m512i middle = _mm512_set1_epi8(-128);
  const __m128i offset = _mm_set1_epi32(planes->offset);
  const float* all = codes.numbers + first * kNumbers;
  for (std::int64_t i = 0; i < n; i += 4) {
    const std::int16_t* r = rows + i;
    for (std::int64_t j = i + kNear; j < std::min(n, i + kNear + 4); ++j)
      for (int b = 0; b < kBlocks; ++b) prefetch(codes.blocks[b] + (first + rows[j]) * widths[b], widths[b]);
    __m512i h[4], l[4];
    for (int j = 0; j < 4; ++j) h[j] = l[j] = _mm512_setzero_si512();
    for (int b = 0; b < kBlocks; ++b) {
      const std::int64_t width = widths[b];
      const std::int8_t *block = codes.blocks[b] + first * width, *p[4];
      for (int j = 0; j < 4; ++j) p[j] = block + r[j] * width;
      const std::int8_t *kh = planes->high[b].data(), *kl = planes->low[b].data();
      std::int64_t d = 0;
      for (; d + 64 <= width; d += 64) {
        const __m512i high_k = _mm512_loadu_si512(kh + d), low_k = _mm512_loadu_si512(kl + d);
        for (int j = 0; j < 4; ++j) {
          const __m512i x = _mm512_xor_si512(_mm512_loadu_si512(p[j] + d), middle);
          h[j] = _mm512_dpbusd_epi32(h[j], x, high_k);
          l[j] = _mm512_dpbusd_epi32(l[j], x, low_k);
        }
      }
      if (d == width) continue;
      const __m512i high_k = _mm512_loadu_si512(kh + d), low_k = _mm512_loadu_si512(kl + d);
      for (int j = 0; j < 4; ++j) {  // 32 dimensions; where there are none k is 0
        const __m512i x = _mm512_xor_si512(half_of(p[j] + d), middle);
        h[j] = _mm512_dpbusd_epi32(h[j], x, high_k);
        l[j] = _mm512_dpbusd_epi32(l[j], x, low_k);
      }
    }
    __m256i s[4];
    for (int j = 0; j < 4; ++j) s[j] = halves(_mm512_add_epi32(_mm512_slli_epi32(h[j], 8), l[j]));
    const __m128i dots = _mm_add_epi32(sums4(s[0], s[1], s[2], s[3]), offset);
    const Numbers4 x =
        numbers4(all + r[0] * kNumbers, all + r[1] * kNumbers, all + r[2] * kNumbers, all + r[3] * kNumbers);
    const Bounds4 bounds = bounds4(probe, kBlocks - 1, dots, x);
    _mm256_storeu_pd(low + i, _mm256_sub_pd(bounds.center, bounds.error));
    _mm256_storeu_pd(high + i, _mm256_add_pd(bounds.center, bounds.error));
    may[i / 4] = static_cast<std::uint8_t>(may[i / 4] | not_below(bounds, below));
  }
}

}  // namespace

ManyLoops many_loops_avx512() {
  ManyLoops loops = many_loops_avx2();
  loops.reach = 127;
  loops.planes = true;
  loops.screen = screen_avx512;
  loops.list = list_avx512;
  loops.whole = whole_avx512;
  return loops;
}

}  // namespace scan
}  // namespace cdr
#endif
