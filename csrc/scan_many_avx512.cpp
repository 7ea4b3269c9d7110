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

// 16 x 16 fours of codes turned about: 16 rows of 64 dimensions to 16 fours of 16 rows.
CDR_AVX512 inline void turn(__m512i* x) {
  __m512i t[16];
  for (int j = 0; j < 16; j += 2) {
    t[j] = _mm512_unpacklo_epi32(x[j], x[j + 1]);
    t[j + 1] = _mm512_unpackhi_epi32(x[j], x[j + 1]);
  }
  for (int j = 0; j < 16; j += 4)  // x[j + i]: four i of each 128 bits, of the rows j .. j + 4
    for (int i = 0; i < 2; ++i) {
      x[j + 2 * i] = _mm512_unpacklo_epi64(t[j + i], t[j + 2 + i]);
      x[j + 2 * i + 1] = _mm512_unpackhi_epi64(t[j + i], t[j + 2 + i]);
    }
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88), b = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int j = 0; j < 16; ++j) x[j] = t[j];
}

CDR_AVX512 void lay_avx512(const std::int8_t* codes, std::int64_t width, std::int64_t n, std::uint8_t* out,
                           std::int32_t* squares, float* norms) {
  const __m512i middle = _mm512_set1_epi8(-128);
  for (std::int64_t i = 0; i < kTile; i += 16) {
    __m512i sum = _mm512_loadu_si512(squares + i);
    for (std::int64_t d = 0; d < width; d += 64) {
      const int fours = width - d < 64 ? 8 : 16;
      const __mmask16 wide = fours == 8 ? 0xff : 0xffff;
      __m512i x[16];
      for (std::int64_t j = 0; j < 16; ++j)
        x[j] = _mm512_maskz_loadu_epi32(i + j < n ? wide : 0, codes + (i + j) * width + d);
      turn(x);
      __m512i* to = reinterpret_cast<__m512i*>(out + (d * kTile + 4 * i));
      for (int j = 0; j < fours; ++j) {
        const __m512i size = _mm512_abs_epi8(x[j]);
        sum = _mm512_dpbusd_epi32(sum, size, size);
        _mm512_store_si512(to + 2 * j, _mm512_xor_si512(x[j], middle));
      }
    }
    _mm512_storeu_si512(squares + i, sum);
    _mm512_storeu_ps(norms + i, _mm512_mul_ps(_mm512_sqrt_ps(_mm512_cvtepi32_ps(sum)), _mm512_set1_ps(kUp)));
  }
}

// The sums of a tile and N gates go on with one grain.
template <int N>
CDR_AVX512 inline void add_grain(const std::uint8_t* grain, const Coarse* const* gates, int s, __m512i* a,
                                 __m512i* b) {
  const __m512i* codes = reinterpret_cast<const __m512i*>(grain);
  const std::int8_t* k[N];
  CDR_UNROLL
  for (int g = 0; g < N; ++g) {
    const __m128i by = _mm_cvtsi32_si128(gates[g]->shift[static_cast<std::size_t>(s)]);
    a[g] = _mm512_sll_epi32(a[g], by);
    b[g] = _mm512_sll_epi32(b[g], by);
    k[g] = gates[g]->k.data() + s * kGrain;
  }
  for (int j = 0; j < kGrain; j += 4, codes += 2) {
    const __m512i x = _mm512_load_si512(codes), y = _mm512_load_si512(codes + 1);
    CDR_UNROLL
    for (int g = 0; g < N; ++g) {
      const __m512i four = four_of(k[g] + j);
      a[g] = _mm512_dpbusd_epi32(a[g], x, four);
      b[g] = _mm512_dpbusd_epi32(b[g], y, four);
    }
  }
}

template <int N>
CDR_AVX512 inline void screen_some(const std::uint8_t* codes, int grains, const RowNumbers& numbers, std::int64_t row,
                                   const Coarse* gates, std::int32_t* sums, std::uint32_t* masks) {
  const Coarse* each[N];
  __m512i a[N], b[N];
  CDR_UNROLL
  for (int g = 0; g < N; ++g) {
    each[g] = gates + g;
    a[g] = b[g] = _mm512_setzero_si512();
  }
  for (int s = 0; s < grains; ++s) add_grain<N>(codes + s * kGrain * kTile, each, s, a, b);
  CDR_UNROLL
  for (int g = 0; g < N; ++g) {
    const auto& gate = gates[g].screen;
    const auto keeps = [&](__m512i sum, std::int64_t at) CDR_AVX512 {
      const __m512 sure = _mm512_mul_ps(_mm512_set1_ps(gate.step),
                                        _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(gate.offset))));
      __m512 most = _mm512_fmadd_ps(_mm512_set1_ps(gate.zeta), _mm512_load_ps(numbers.beta + at),
                                    _mm512_load_ps(numbers.rho + at));
      most = _mm512_fmadd_ps(_mm512_set1_ps(gate.eps), _mm512_load_ps(numbers.screened + at), most);
      most = _mm512_fmadd_ps(_mm512_load_ps(numbers.scale + at), sure, most);
      return static_cast<std::uint32_t>(_mm512_cmp_ps_mask(most, _mm512_set1_ps(gate.below), _CMP_NLT_UQ));
    };
    _mm512_storeu_si512(sums + g * kTile, a[g]);
    _mm512_storeu_si512(sums + g * kTile + 16, b[g]);
    masks[g * kTiles] = keeps(a[g], row) | keeps(b[g], row + 16) << 16;
  }
}

CDR_AVX512 void screen_avx512(const std::uint8_t* codes, int grains, const RowNumbers& numbers, std::int64_t row,
                              const Coarse* gates, std::size_t count, std::int32_t* sums, std::uint32_t* masks) {
  for (; count >= kSide; count -= kSide, gates += kSide, sums += kSide * kTile, masks += kSide * kTiles)
    screen_some<kSide>(codes, grains, numbers, row, gates, sums, masks);
  switch (count) {
    case 1: return screen_some<1>(codes, grains, numbers, row, gates, sums, masks);
    case 2: return screen_some<2>(codes, grains, numbers, row, gates, sums, masks);
    case 3: return screen_some<3>(codes, grains, numbers, row, gates, sums, masks);
    case 4: return screen_some<4>(codes, grains, numbers, row, gates, sums, masks);
    case 5: return screen_some<5>(codes, grains, numbers, row, gates, sums, masks);
    default: return;
  }
}

template <int N>
CDR_AVX512 inline void narrow_some(const std::uint8_t* codes, int screened, int grains, const RowNumbers& numbers,
                                   std::int64_t row, Narrowing* all) {
  const Coarse* gates[N];
  __m512i a[N], b[N];
  CDR_UNROLL
  for (int g = 0; g < N; ++g) {
    gates[g] = all[g].gate;
    a[g] = _mm512_loadu_si512(all[g].sums);
    b[g] = _mm512_loadu_si512(all[g].sums + 16);
  }
  for (int s = screened; s <= grains; ++s) add_grain<N>(codes + s % grains * kGrain * kTile, gates, s, a, b);
  const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-1.0f), pad = _mm512_set1_ps(kToldPad);
  CDR_UNROLL
  for (int g = 0; g < N; ++g) {
    const auto& gate = gates[g]->narrow;
    all[g].may = all[g].sure = 0;
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = row + 16 * half;
      const __m512i sum = _mm512_add_epi32(half ? b[g] : a[g], _mm512_set1_epi32(gate.offset));
      const __m512 sure = _mm512_mul_ps(_mm512_set1_ps(gate.step), _mm512_cvtepi32_ps(sum));
      const __m512 middle =
          _mm512_fmadd_ps(_mm512_load_ps(numbers.scale + at), sure, _mm512_set1_ps(gate.center));
      const __m512 error =
          _mm512_add_ps(_mm512_fmadd_ps(_mm512_set1_ps(gate.eps), _mm512_load_ps(numbers.whole + at),
                                        _mm512_load_ps(numbers.rho + at)),
                        _mm512_set1_ps(gate.slack));
      const __m512 low = _mm512_sub_ps(middle, error), high = _mm512_add_ps(middle, error);
      const auto bits = [&](__mmask16 mask) { return static_cast<std::uint32_t>(mask) << (16 * half); };
      all[g].may |= bits(_mm512_cmp_ps_mask(high, _mm512_set1_ps(gate.below), _CMP_NLT_UQ));
      all[g].sure |= bits(_mm512_cmp_ps_mask(low, _mm512_set1_ps(gate.above), _CMP_GE_OQ));
      if (!all[g].low) continue;
      const __m512 most = _mm512_sub_ps(_mm512_min_ps(low, one), pad);
      const __m512 least = _mm512_add_ps(_mm512_max_ps(high, minus), pad);
      _mm512_storeu_ps(all[g].low + 16 * half, _mm512_max_ps(most, minus));
      _mm512_storeu_ps(all[g].high + 16 * half, _mm512_min_ps(least, one));
    }
  }
}

CDR_AVX512 void narrow_avx512(const std::uint8_t* codes, int screened, int grains, const RowNumbers& numbers,
                              std::int64_t row, Narrowing* all, std::size_t count) {
  for (; count >= kSide; count -= kSide, all += kSide) narrow_some<kSide>(codes, screened, grains, numbers, row, all);
  switch (count) {
    case 1: return narrow_some<1>(codes, screened, grains, numbers, row, all);
    case 2: return narrow_some<2>(codes, screened, grains, numbers, row, all);
    case 3: return narrow_some<3>(codes, screened, grains, numbers, row, all);
    case 4: return narrow_some<4>(codes, screened, grains, numbers, row, all);
    case 5: return narrow_some<5>(codes, screened, grains, numbers, row, all);
    default: return;
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
  loops.several = 3;
  loops.planes = true;
  loops.lay = lay_avx512;
  loops.screen = screen_avx512;
  loops.narrow = narrow_avx512;
  loops.list = list_avx512;
  loops.whole = whole_avx512;
  return loops;
}

}  // namespace scan
}  // namespace cdr
#endif
