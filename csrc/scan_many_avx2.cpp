#include "scan_many.h"

#if CDR_X86
namespace cdr {
namespace scan {
namespace {

// 8 x 8 fours of codes turned about: 8 rows of 32 dimensions to 8 fours of 8 rows.
CDR_AVX2 inline void turn(const __m256i* in, __m256i* out) {
  __m256i r[8], t[8];
  for (int j = 0; j < 8; j += 2) {
    t[j] = _mm256_unpacklo_epi32(in[j], in[j + 1]);
    t[j + 1] = _mm256_unpackhi_epi32(in[j], in[j + 1]);
  }
  for (int j = 0; j < 8; j += 4) {
    r[j] = _mm256_unpacklo_epi64(t[j], t[j + 2]);
    r[j + 1] = _mm256_unpackhi_epi64(t[j], t[j + 2]);
    r[j + 2] = _mm256_unpacklo_epi64(t[j + 1], t[j + 3]);
    r[j + 3] = _mm256_unpackhi_epi64(t[j + 1], t[j + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    out[j] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x20);
    out[j + 4] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x31);
  }
}

CDR_AVX2 void lay_avx2(const std::int8_t* codes, std::int64_t width, std::int64_t n, std::uint8_t* out,
                       std::int32_t* squares, float* norms) {
  const __m256i one = _mm256_set1_epi16(1), middle = _mm256_set1_epi8(-128);
  for (std::int64_t i = 0; i < kTile; i += 8) {
    __m256i* to = reinterpret_cast<__m256i*>(out + i * 4);
    __m256i* square = reinterpret_cast<__m256i*>(squares + i);
    __m256i sum = _mm256_loadu_si256(square);
    for (std::int64_t d = 0; d < width; d += 32, to += kTile) {
      __m256i r[8], t[8];
      for (std::int64_t j = 0; j < 8; ++j)
        r[j] = i + j < n ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + (i + j) * width + d))
                         : _mm256_setzero_si256();
      turn(r, t);
      for (int j = 0; j < 8; ++j) {
        _mm256_store_si256(to + j * (kTile / 8), _mm256_xor_si256(t[j], middle));
        const __m256i a = _mm256_abs_epi8(t[j]);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(one, _mm256_maddubs_epi16(a, a)));
      }
    }
    _mm256_storeu_si256(square, sum);
    _mm256_storeu_ps(norms + i, _mm256_mul_ps(_mm256_sqrt_ps(_mm256_cvtepi32_ps(sum)), _mm256_set1_ps(kUp)));
  }
}

// The sums of a tile go on with one grain. |k'| <= 63: two products with codes + 128 fit 16 bits.
CDR_AVX2 inline void add_grain(const std::uint8_t* grain, const Coarse& gate, int s, __m256i* sums) {
  const __m256i one = _mm256_set1_epi16(1);
  const __m256i* codes = reinterpret_cast<const __m256i*>(grain);
  const __m128i by = _mm_cvtsi32_si128(gate.shift[static_cast<std::size_t>(s)]);
  const std::int8_t* k = gate.k.data() + s * kGrain;
  for (int r = 0; r < 4; ++r) sums[r] = _mm256_sll_epi32(sums[r], by);
  for (int j = 0; j < kGrain; j += 4, codes += 4) {
    std::int32_t four;
    __builtin_memcpy(&four, k + j, 4);
    const __m256i x = _mm256_set1_epi32(four);
    for (int r = 0; r < 4; ++r)
      sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(one, _mm256_maddubs_epi16(codes[r], x)));
  }
}

CDR_AVX2 void screen_avx2(const std::uint8_t* codes, int grains, const RowNumbers& numbers, std::int64_t row,
                          const Coarse* gates, std::size_t count, std::int32_t* sums, std::uint32_t* masks) {
  for (std::size_t g = 0; g < count; ++g, sums += kTile, masks += kTiles) {
    const auto& gate = gates[g].screen;
    __m256i all[4] = {};
    for (int s = 0; s < grains; ++s) add_grain(codes + s * kGrain * kTile, gates[g], s, all);
    const __m256i offset = _mm256_set1_epi32(gate.offset);
    const __m256 step = _mm256_set1_ps(gate.step), zeta = _mm256_set1_ps(gate.zeta), eps = _mm256_set1_ps(gate.eps);
    const __m256 below = _mm256_set1_ps(gate.below);
    std::uint32_t mask = 0;
    for (int r = 0; r < 4; ++r) {
      const std::int64_t at = row + 8 * r;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 8 * r), all[r]);
      const __m256 sure = _mm256_mul_ps(step, _mm256_cvtepi32_ps(_mm256_add_epi32(all[r], offset)));
      const __m256 tail =
          _mm256_add_ps(_mm256_load_ps(numbers.rho + at), _mm256_mul_ps(zeta, _mm256_load_ps(numbers.beta + at)));
      const __m256 error = _mm256_add_ps(tail, _mm256_mul_ps(eps, _mm256_load_ps(numbers.screened + at)));
      const __m256 most = _mm256_add_ps(_mm256_mul_ps(_mm256_load_ps(numbers.scale + at), sure), error);
      mask |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(most, below, _CMP_NLT_UQ))) << (8 * r);
    }
    *masks = mask;
  }
}

CDR_AVX2 void narrow_avx2(const std::uint8_t* codes, int screened, int grains, const RowNumbers& numbers,
                          std::int64_t row, Narrowing* all, std::size_t count) {
  const __m256 one = _mm256_set1_ps(1.0f), pad = _mm256_set1_ps(kToldPad);
  for (Narrowing* each = all; each < all + count; ++each) {
    const auto& gate = each->gate->narrow;
    __m256i sums[4];
    for (int r = 0; r < 4; ++r) sums[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(each->sums + 8 * r));
    for (int s = screened; s <= grains; ++s) add_grain(codes + s % grains * kGrain * kTile, *each->gate, s, sums);
    each->may = each->sure = 0;
    for (int r = 0; r < 4; ++r) {
      const std::int64_t at = row + 8 * r;
      const __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sums[r], _mm256_set1_epi32(gate.offset)));
      const __m256 middle = _mm256_add_ps(
          _mm256_set1_ps(gate.center),
          _mm256_mul_ps(_mm256_load_ps(numbers.scale + at), _mm256_mul_ps(_mm256_set1_ps(gate.step), sum)));
      const __m256 error = _mm256_add_ps(
          _mm256_add_ps(_mm256_load_ps(numbers.rho + at),
                        _mm256_mul_ps(_mm256_set1_ps(gate.eps), _mm256_load_ps(numbers.whole + at))),
          _mm256_set1_ps(gate.slack));
      const __m256 low = _mm256_sub_ps(middle, error), high = _mm256_add_ps(middle, error);
      const int may = _mm256_movemask_ps(_mm256_cmp_ps(high, _mm256_set1_ps(gate.below), _CMP_NLT_UQ));
      const int sure = _mm256_movemask_ps(_mm256_cmp_ps(low, _mm256_set1_ps(gate.above), _CMP_GE_OQ));
      each->may |= static_cast<std::uint32_t>(may) << (8 * r);
      each->sure |= static_cast<std::uint32_t>(sure) << (8 * r);
      if (!each->low) continue;
      const __m256 most = _mm256_sub_ps(_mm256_min_ps(low, one), pad);
      const __m256 least = _mm256_add_ps(_mm256_max_ps(high, _mm256_sub_ps(_mm256_setzero_ps(), one)), pad);
      _mm256_storeu_ps(each->low + 8 * r, _mm256_max_ps(most, _mm256_sub_ps(_mm256_setzero_ps(), one)));
      _mm256_storeu_ps(each->high + 8 * r, _mm256_min_ps(least, one));
    }
  }
}

CDR_AVX2 void whole_avx2(const Codes& codes, const std::int64_t* widths, std::int64_t first, const std::int16_t* rows,
                         std::int64_t n, const Probe& probe, const Planes*, double below, double* low, double* high,
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

}  // namespace

ManyLoops many_loops_avx2() {
  ManyLoops loops = many_loops_generic();
  loops.several = 8;
  loops.lay = lay_avx2;
  loops.screen = screen_avx2;
  loops.narrow = narrow_avx2;
  loops.whole = whole_avx2;
  return loops;
}

}  // namespace scan
}  // namespace cdr
#endif
