// A unit vector against the codes: the query's side of the bounds of scan.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "scan.h"
#include "simd.h"

namespace cdr {
namespace scan {

constexpr double kUlp = 2.220446049250313e-16;  // 2^-52
constexpr double kAbove = 1.0 + 1e-12;          // stored numbers are this much too large, for roundings to come
constexpr double kLeast = std::numeric_limits<double>::denorm_min();  // as kUlp, below the least normal number
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kLargest = 1e30f;               // a rho beyond this bounds nothing
// How many rows ahead to prefetch: enough to hide the memory, few enough not to wait for what was asked for.
constexpr std::int64_t kScreenAhead = 128;  // codes of the first block
constexpr std::int64_t kAhead = 32;         // codes of the others
constexpr std::int64_t kRowsAhead = 4;      // stored rows

inline std::size_t units(std::int64_t n, std::int64_t size) { return static_cast<std::size_t>((n + size - 1) / size); }

inline float round_up(double x) {
  const float f = static_cast<float>(x);
  return static_cast<double>(f) >= x ? f : std::nextafterf(f, std::numeric_limits<float>::infinity());
}

// A unit vector against the codes.
struct Probe {
  std::vector<std::int16_t> k[kBlocks];               // [block_width]
  double step = 1, center = 0, error = 0;             // s, c0, e
  double zeta[kBlocks] = {};                          // zeta_1, zeta_2, 0
  double norm = 0;  // of the vector before it became a unit vector
  // For many queries at once: z, what it may be off by, the slack in e.
  std::vector<double> z;
  double rounding = 0, slack = kInf;
};

// Probes of the vectors wanted of the columns; flip[i]: of minus the vector.
std::vector<Probe> make_probes(const Rotation& rotation, double alpha, const Columns& columns,
                               const std::vector<std::int64_t>& wanted, const std::vector<bool>& flip);

inline std::int32_t dot_generic(const std::int8_t* codes, std::int64_t width, const std::int16_t* k) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < width; ++i) sum += static_cast<std::int32_t>(codes[i]) * k[i];
  return sum;
}

// r <c, k>: the sum over the blocks so far, in units of s.
inline double scaled(const float* numbers, std::int32_t dot) {
  return static_cast<double>(numbers[kScale]) * static_cast<double>(dot);
}

#if CDR_X86
CDR_AVX2 inline __m256i codes16(const std::int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
CDR_AVX2 inline __m256i load(const std::int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// The sums of four accumulators.
CDR_AVX2 inline __m128i sums4(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}

// The numbers of four rows, one register per kind.
struct Numbers4 {
  __m256d rho, beta[2], scale;
};
CDR_AVX2 inline Numbers4 numbers4(const float* a, const float* b, const float* c, const float* d) {
  __m128 w = _mm_loadu_ps(a), x = _mm_loadu_ps(b), y = _mm_loadu_ps(c), z = _mm_loadu_ps(d);
  _MM_TRANSPOSE4_PS(w, x, y, z);
  return {_mm256_cvtps_pd(w), {_mm256_cvtps_pd(x), _mm256_cvtps_pd(y)}, _mm256_cvtps_pd(z)};
}

// The middle and the half width of the bounds of four rows, as in verdict().
struct Bounds4 {
  __m256d center, error;
};
CDR_AVX2 inline Bounds4 bounds4(const Probe& probe, int b, __m128i dots, const Numbers4& x) {
  const __m256d sure = _mm256_mul_pd(_mm256_set1_pd(probe.step), _mm256_mul_pd(x.scale, _mm256_cvtepi32_pd(dots)));
  const __m256d beta = b + 1 < kBlocks ? x.beta[b] : _mm256_setzero_pd();
  const __m256d error = _mm256_add_pd(x.rho, _mm256_mul_pd(_mm256_set1_pd(probe.zeta[b]), beta));
  return {_mm256_add_pd(_mm256_set1_pd(probe.center), sure), _mm256_add_pd(error, _mm256_set1_pd(probe.error))};
}
CDR_AVX2 inline int not_below(const Bounds4& x, double below) {
  return _mm256_movemask_pd(
      _mm256_cmp_pd(_mm256_add_pd(x.center, x.error), _mm256_set1_pd(below), _CMP_NLT_UQ));
}
CDR_AVX2 inline int above_all(const Bounds4& x, double above) {
  return _mm256_movemask_pd(_mm256_cmp_pd(_mm256_sub_pd(x.center, x.error), _mm256_set1_pd(above), _CMP_GE_OQ));
}
#endif

}  // namespace scan
}  // namespace cdr
