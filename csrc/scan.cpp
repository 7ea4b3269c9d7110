#include "scan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>

#include "pool.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define CDR_X86 1
#include <immintrin.h>
#define CDR_AVX2 __attribute__((target("avx2,f16c")))
#else
#define CDR_X86 0
#endif

#if defined(__GNUC__) || defined(__clang__)
#define CDR_PREFETCH(p) __builtin_prefetch(p)
#define CDR_INLINE __attribute__((always_inline)) inline
#else
#define CDR_INLINE inline
#define CDR_PREFETCH(p) ((void)0)
#endif

namespace cdr {
namespace scan {
namespace {

constexpr double kUlp = 2.220446049250313e-16;  // 2^-52
constexpr double kAbove = 1.0 + 1e-12;          // stored numbers are this much too large, for roundings to come
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kLargest = 1e30f;               // a rho beyond this bounds nothing
// threshold(): rows in one unit of work, and rows that stay in the cache from one stage to the next; top(): the same.
constexpr std::int64_t kUnit = 8192, kBlock = 512;
constexpr std::int64_t kUnitTop = 512, kBlockTop = 64;
// Queries from which threshold() screens them together, and the rows of a block then.
constexpr std::size_t kTogether = 4;
constexpr std::int64_t kBlockTogether = 512, kTile = 32;
// |k'| <= kCoarse: two products of k' + kBias in 1 .. 127 with codes fit 16 bits.
constexpr int kCoarse = 63, kBias = 64;
constexpr float kUp = 1.0f + 1.0f / (1 << 18);  // for what is rounded to float32
constexpr std::int64_t kLine = 64;
// How many rows ahead to prefetch: enough to hide the memory, few enough not to wait for what was asked for.
constexpr std::int64_t kScreenAhead = 128;  // codes of the first block
constexpr std::int64_t kAhead = 32;         // codes of the others
constexpr std::int64_t kRowsAhead = 4;      // stored rows

std::size_t units(std::int64_t n, std::int64_t size) { return static_cast<std::size_t>((n + size - 1) / size); }

inline void prefetch(const void* p, std::int64_t bytes) {
  const char* at = static_cast<const char*>(p);
  for (std::int64_t i = 0; i < bytes; i += kLine) CDR_PREFETCH(at + i);
}

float round_up(double x) {
  const float f = static_cast<float>(x);
  return static_cast<double>(f) >= x ? f : std::nextafterf(f, std::numeric_limits<float>::infinity());
}

// A unit vector against the codes.
struct Probe {
  std::vector<std::int16_t> k[kBlocks];               // [block_width]
  double step = 1, center = 0, error = 0;             // s, c0, e
  double zeta[kBlocks] = {};                          // zeta_1, zeta_2, 0
  double norm = 0;  // of the vector before it became a unit vector

  // The same for the screen of many queries.
  std::vector<std::uint8_t> coarse[2];                // k' + kBias, [block_width]
  double coarse_step[2] = {1, 1}, coarse_eps[2] = {kInf, kInf}, coarse_most = kInf, slack = kInf;  // most: alpha |s k'|
};

// t = V'q for several unit vectors q [count, dim]; a unit of work is a range of directions.
void rotate(const Rotation& rotation, const std::vector<double>& q, std::int64_t count, std::vector<double>& t) {
  const std::int64_t dim = rotation.dim;
  t.assign(static_cast<std::size_t>(count * dim), 0.0);
  constexpr std::int64_t kWidth = 64;
  const auto part = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t c = 0; c < count; ++c) {
      double* out = t.data() + c * dim;
      for (std::int64_t r = 0; r < dim; ++r) {
        const double x = q[static_cast<std::size_t>(c * dim + r)];
        const float* v = rotation.matrix + r * dim;
        for (std::int64_t i = from; i < to; ++i) out[i] += x * static_cast<double>(v[i]);
      }
    }
  };
  parallel_for(units(dim, kWidth), [&](std::size_t unit) {
    const std::int64_t from = static_cast<std::int64_t>(unit) * kWidth;
    part(from, std::min(dim, from + kWidth));
  });
}

// Probes of the vectors wanted of the columns; flip[i]: of minus the vector.
std::vector<Probe> make_probes(const Rotation& rotation, double alpha, const Columns& columns,
                               const std::vector<std::int64_t>& wanted, const std::vector<bool>& flip) {
  const std::int64_t dim = rotation.dim, count = static_cast<std::int64_t>(wanted.size());
  std::vector<Probe> probes(wanted.size());
  std::vector<double> q(static_cast<std::size_t>(count * dim), 0.0), t, z(static_cast<std::size_t>(dim));
  for (std::int64_t c = 0; c < count; ++c) {
    const double* v = columns.vector(wanted[static_cast<std::size_t>(c)]);
    double* unit = q.data() + c * dim;
    double most = 0, sum = 0;
    for (std::int64_t i = 0; i < dim; ++i) most = std::max(most, std::fabs(v[i]));
    if (most == 0) continue;  // a coverage that covers nothing: all bounds are zero
    const int exponent = std::ilogb(most);
    for (std::int64_t i = 0; i < dim; ++i) {
      unit[i] = std::ldexp(v[i], -exponent);
      sum += unit[i] * unit[i];
    }
    const double norm = std::sqrt(sum), over = (flip[static_cast<std::size_t>(c)] ? -1.0 : 1.0) / norm;
    for (std::int64_t i = 0; i < dim; ++i) unit[i] *= over;
    probes[static_cast<std::size_t>(c)].norm = std::ldexp(norm, exponent);
  }
  rotate(rotation, q, count, t);
  const double gamma = static_cast<double>(dim + 16) * kUlp;
  for (std::int64_t c = 0; c < count; ++c) {
    Probe& probe = probes[static_cast<std::size_t>(c)];
    for (int b = 0; b < kBlocks; ++b) probe.k[b].assign(static_cast<std::size_t>(block_width(dim, b)), 0);
    if (probe.norm == 0) continue;
    const double* unit = q.data() + c * dim;
    const double* turned = t.data() + c * dim;
    double most = 0, zz = 0, sum = 0, outside[kBlocks] = {};
    for (std::int64_t i = 0; i < dim; ++i) {
      z[static_cast<std::size_t>(i)] = static_cast<double>(rotation.weight[i]) * turned[i];
      const double a = std::fabs(z[static_cast<std::size_t>(i)]);
      most = std::max(most, a);
      zz += a * a;
      sum += a;
      for (int b = 0; b + 1 < kBlocks; ++b)
        if (i >= block_begin(dim, b + 1)) outside[b] += turned[i] * turned[i];
      probe.center += static_cast<double>(rotation.mean[i]) * unit[i];
    }
    // |k| <= 32767, and 127 sum |k| <= 127 (sum |z| / s + D) < 2^31
    const double room = 2147483647.0 / 127.0 - static_cast<double>(dim) - 1.0;
    probe.step = std::max(most / 32766.0, sum / room * (1.0 + 1e-9));
    if (!(probe.step > 1e-290)) probe.step = 1.0;  // then every k is 0 and all of z is left over
    double left = 0;
    for (int b = 0; b < kBlocks; ++b) {
      const std::int64_t from = block_begin(dim, b);
      for (std::int64_t i = from; i < block_begin(dim, b + 1); ++i) {
        const double r = std::nearbyint(z[static_cast<std::size_t>(i)] / probe.step);
        const double e = z[static_cast<std::size_t>(i)] - probe.step * r;
        probe.k[b][static_cast<std::size_t>(i - from)] = static_cast<std::int16_t>(r);
        left += e * e;
      }
      if (b + 1 < kBlocks) probe.zeta[b] = std::sqrt(outside[b]) * kAbove + gamma * rotation.frobenius;
    }
    const double eps = std::sqrt(left) * kAbove + gamma * rotation.most_weight * rotation.frobenius;
    const double size = 1.0 + std::fabs(probe.center) + rotation.mean_norm + alpha * (std::sqrt(zz) + eps);
    double coarse_sum = 0;
    for (int b = 0; b < 2; ++b) {
      const std::int64_t from = block_begin(dim, b), to = block_begin(dim, b + 1);
      probe.coarse[b].assign(static_cast<std::size_t>(block_width(dim, b)), kBias);
      double largest = 0, coarse_left = 0;
      for (std::int64_t i = from; i < to; ++i) largest = std::max(largest, std::fabs(z[static_cast<std::size_t>(i)]));
      const double step = std::max(largest / kCoarse * (1.0 + 1e-12), 1e-30);
      for (std::int64_t i = from; i < to; ++i) {
        const double r = std::nearbyint(z[static_cast<std::size_t>(i)] / step);
        const double e = z[static_cast<std::size_t>(i)] - step * r;
        probe.coarse[b][static_cast<std::size_t>(i - from)] = static_cast<std::uint8_t>(kBias + static_cast<int>(r));
        coarse_left += e * e;
        coarse_sum += step * step * r * r;
      }
      probe.coarse_step[b] = step;
      probe.coarse_eps[b] = std::sqrt(coarse_left) * kAbove + gamma * rotation.most_weight * rotation.frobenius;
    }
    probe.coarse_most = alpha * (std::sqrt(coarse_sum) + probe.coarse_eps[0] + probe.coarse_eps[1]) * kAbove;
    probe.slack = 4.0 * (gamma + 16.0 * kUlp) * size + 1e-200;
    probe.error = alpha * eps * kAbove + probe.slack;
  }
  return probes;
}

// ---- the loops over codes: generic and AVX2, of the same integers and the same float64 operations ----

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
// out[c] += <codes, k_c> for c < count, k packed for it; out has room for a multiple of 4.
using Dots = void (*)(const std::int8_t* codes, std::int64_t width, const std::int16_t* k, std::int64_t count,
                      std::int32_t* out);

// The screen of many queries reads rows that stand side by side, four dimensions of 8 rows to a register.
struct Laid {
  std::int64_t rows = 0, widths[2] = {};
  // [tile][width / 4][kTile][4] per block; beyond the rows zeros.
  alignas(32) std::int8_t codes[2][kBlockTogether * 64];
  alignas(32) std::int32_t bias[2][kBlockTogether];  // kBias times the sum of the row's codes
  alignas(32) float scale[kBlockTogether], rho[kBlockTogether], beta[2][kBlockTogether];
  alignas(32) float norm[2][kBlockTogether];  // of the row's codes in the block
  std::uint32_t living[kBlockTogether / kTile];
};
// What the screen asks: the terms of the bound in float32.
struct Coarse {
  std::int32_t k[2][16];  // four dimensions each
  float step[2], eps[2], zeta[2], below[2];
};
// Fills block b of the rows that are laid side by side, from codes [n, widths[b]].
using Lay = void (*)(const std::int8_t* codes, std::int64_t n, int b, Laid& laid);
// masks[t]: the bits of the living rows of tile t of which the bounds of stages 1 and 2 do not say that they are below.
using Together = void (*)(const Laid& laid, const Coarse& gate, std::uint32_t* masks);
// low[i], high[i]: the bounds of stage 3 of the row first + rows[i]; bit i % 4 of may[i / 4] is set where it is not
// below. rows, low and high have room for a multiple of 4, rows with rows in it.
using Whole = void (*)(const Codes& codes, const std::int64_t* widths, std::int64_t first, const std::int16_t* rows,
                       std::int64_t n, const Probe& probe, double below, double* low, double* high, std::uint8_t* may);

// Up to kGroup columns are read side by side, 16 dimensions at a time: [group][width / 16][columns of it][16].
constexpr std::int64_t kGroup = 4;

std::vector<std::int16_t> packed(const std::vector<Probe>& probes, int b, std::int64_t width) {
  std::vector<std::int16_t> out;
  const std::size_t count = probes.size(), group = static_cast<std::size_t>(kGroup);
  out.reserve(count * static_cast<std::size_t>(width));
  for (std::size_t g = 0; g < count; g += group)
    for (std::int64_t i = 0; i < width; i += 16)
      for (std::size_t c = g; c < std::min(count, g + group); ++c)
        out.insert(out.end(), probes[c].k[b].begin() + i, probes[c].k[b].begin() + i + 16);
  return out;
}

inline std::int32_t dot_generic(const std::int8_t* codes, std::int64_t width, const std::int16_t* k) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < width; ++i) sum += static_cast<std::int32_t>(codes[i]) * k[i];
  return sum;
}

// r <c, k>: the sum over the blocks so far, in units of s.
inline double scaled(const float* numbers, std::int32_t dot) {
  return static_cast<double>(numbers[kScale]) * static_cast<double>(dot);
}

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

void dots_generic(const std::int8_t* codes, std::int64_t width, const std::int16_t* k, std::int64_t count,
                  std::int32_t* out) {
  for (std::int64_t g = 0; g < count; g += kGroup) {
    const std::int64_t n = std::min(kGroup, count - g);
    for (std::int64_t i = 0; i < width; i += 16)
      for (std::int64_t c = g; c < g + n; ++c, k += 16)
        for (std::int64_t l = 0; l < 16; ++l) out[c] += static_cast<std::int32_t>(codes[i + l]) * k[l];
  }
}

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

template <int N>
CDR_AVX2 inline void dots_avx2_n(const std::int8_t* codes, std::int64_t width, const std::int16_t* k,
                                 std::int32_t* out) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (std::int64_t i = 0; i < width; i += 16, k += 16 * N) {
    const __m256i x = codes16(codes + i);
    a = _mm256_add_epi32(a, _mm256_madd_epi16(x, load(k)));
    if (N > 1) b = _mm256_add_epi32(b, _mm256_madd_epi16(x, load(k + 16)));
    if (N > 2) c = _mm256_add_epi32(c, _mm256_madd_epi16(x, load(k + 32)));
    if (N > 3) d = _mm256_add_epi32(d, _mm256_madd_epi16(x, load(k + 48)));
  }
  __m128i* to = reinterpret_cast<__m128i*>(out);
  _mm_storeu_si128(to, _mm_add_epi32(_mm_loadu_si128(to), sums4(a, b, c, d)));
}

CDR_AVX2 void dots_avx2(const std::int8_t* codes, std::int64_t width, const std::int16_t* k, std::int64_t count,
                        std::int32_t* out) {
  for (; count >= kGroup; count -= kGroup, k += kGroup * width, out += kGroup)
    dots_avx2_n<kGroup>(codes, width, k, out);
  if (count == 1) dots_avx2_n<1>(codes, width, k, out);
  if (count == 2) dots_avx2_n<2>(codes, width, k, out);
  if (count == 3) dots_avx2_n<3>(codes, width, k, out);
}

CDR_AVX2 std::uint64_t sum_avx2(const unsigned char* p, std::int64_t words) {
  __m256i s[4];
  for (__m256i& x : s) x = _mm256_setzero_si256();
  std::int64_t i = 0;
  for (; i + 16 <= words; i += 16)
    for (int l = 0; l < 4; ++l)
      s[l] = _mm256_add_epi64(s[l], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8 * i + 32 * l)));
  std::uint64_t lanes[4], total = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes),
                      _mm256_add_epi64(_mm256_add_epi64(s[0], s[1]), _mm256_add_epi64(s[2], s[3])));
  for (std::uint64_t l : lanes) total += l;
  for (; i < words; ++i) {
    std::uint64_t w;
    std::memcpy(&w, p + 8 * i, 8);
    total += w;
  }
  return total;
}
#endif

std::uint64_t sum_generic(const unsigned char* p, std::int64_t words) {
  std::uint64_t total = 0, w;
  for (std::int64_t i = 0; i < words; ++i) {
    std::memcpy(&w, p + 8 * i, 8);
    total += w;
  }
  return total;
}

// A row's codes: codes and decoded [n] from the rotated row t, over = 1 / weight, with room for n in y. Returns the
// scale; squares = sum of the squares of the codes. Written so that compilers turn it into vectors; the operations are
// the same on every machine.
using EncodeRow = float (*)(const float* t, const float* over, const float* weight, std::int64_t n, float* y,
                            std::int8_t* codes, double* decoded, std::int32_t* squares);

CDR_INLINE float encode_row_of(const float* t, const float* over, const float* weight, std::int64_t n, float* y,
                               std::int8_t* codes, double* decoded, std::int32_t* squares) {
  std::uint32_t most = 0;  // magnitudes of floats are ordered as integers, what is not finite above all
  for (std::int64_t d = 0; d < n; ++d) {
    y[d] = t[d] * over[d];
    std::uint32_t bits;
    std::memcpy(&bits, y + d, 4);
    bits &= 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  float largest;
  std::memcpy(&largest, &most, 4);
  const float scale = largest / 127.0f;
  *squares = 0;
  if (!(scale > 1e-30f) || !(scale < 1e30f)) {  // zeros, or nothing that codes can hold
    for (std::int64_t d = 0; d < n; ++d) codes[d] = 0, decoded[d] = 0.0;
    return 1.0f;
  }
  const float inverse = 1.0f / scale;
  std::int32_t sum = 0;  // 127^2 x 4096 fits
  for (std::int64_t d = 0; d < n; ++d) {
    float r = y[d] * inverse;
    r = r > 127.0f ? 127.0f : r;
    r = r < -127.0f ? -127.0f : r;
    const std::int32_t c = static_cast<std::int32_t>(r + std::copysign(0.5f, r));
    codes[d] = static_cast<std::int8_t>(c);
    sum += c * c;
    decoded[d] = static_cast<double>(weight[d]) * (static_cast<double>(scale) * c);
  }
  *squares = sum;
  return scale;
}

float encode_row_generic(const float* t, const float* over, const float* weight, std::int64_t n, float* y,
                         std::int8_t* codes, double* decoded, std::int32_t* squares) {
  return encode_row_of(t, over, weight, n, y, codes, decoded, squares);
}

#if CDR_X86
CDR_AVX2 float encode_row_avx2(const float* t, const float* over, const float* weight, std::int64_t n, float* y,
                               std::int8_t* codes, double* decoded, std::int32_t* squares) {
  return encode_row_of(t, over, weight, n, y, codes, decoded, squares);
}
#endif

bool fast() {
#if CDR_X86
  return simd() == Simd::avx2;
#else
  return false;
#endif
}

EncodeRow encode_row() {
#if CDR_X86
  if (fast()) return encode_row_avx2;
#endif
  return encode_row_generic;
}

Screen screen() {
#if CDR_X86
  if (fast()) return screen_avx2;
#endif
  return screen_generic;
}

Refine refine() {
#if CDR_X86
  if (fast()) return refine_avx2;
#endif
  return refine_generic;
}

Lay lay() {
#if CDR_X86
  if (fast()) return lay_avx2;
#endif
  return lay_generic;
}

Together together() {
#if CDR_X86
  if (fast()) return together_avx2;
#endif
  return together_generic;
}

Whole whole() {
#if CDR_X86
  if (fast()) return whole_avx2;
#endif
  return whole_generic;
}

Dots dots() {
#if CDR_X86
  if (fast()) return dots_avx2;
#endif
  return dots_generic;
}

// ---- threshold ----

struct Gate {
  Probe probe;
  double below, above;  // q.u under the one fails, at or above the other passes

  // What the screen of many queries asks.
  Coarse coarse() const {
    Coarse out;
    std::memset(&out, 0, sizeof out);
    for (int b = 0; b < 2; ++b) {
      if (!probe.coarse[b].empty()) std::memcpy(out.k[b], probe.coarse[b].data(), probe.coarse[b].size());
      out.step[b] = probe.coarse_step[b] < 1e15 ? static_cast<float>(probe.coarse_step[b]) : 1.0f;
      out.zeta[b] = round_up(probe.zeta[b]);
      out.eps[b] = round_up(probe.coarse_eps[b]);
      const double most = 2.0 * probe.coarse_most, limit = below - probe.center - probe.slack;
      const double lower = limit - std::ldexp(std::fabs(limit) + most + 1e-20, -18);
      out.below[b] = -round_up(-lower);
      // Beyond these the roundings are other ones: keep every row.
      const bool fits = most < 1e15 && std::fabs(lower) < 1e30 && probe.coarse_step[b] < 1e15;
      if (!fits) out.below[b] = -std::numeric_limits<float>::infinity();
    }
    return out;
  }
};

// What one set of columns asks of the scan.
struct Request {
  Scorer scorer;
  std::vector<Gate> gates;
  bool open = false;  // every row passes
  bool tells = false;  // the one gate is on the query's cosine

  Request(const Index& index, const Rows& rows, const Columns& columns) : scorer(rows, columns) {
    std::vector<std::int64_t> wanted;
    std::vector<bool> flip;
    for (std::int64_t j : scorer.gated()) {
      const double scale = columns.scale[j];
      if (columns.gate[j] == -INFINITY || (scale == 0 && columns.shift[j] >= columns.gate[j])) open = true;
      if (scale == 0) continue;  // the value is the shift
      wanted.push_back(j);
      flip.push_back(scale < 0);
    }
    if (open) return;
    std::vector<Probe> probes = make_probes(index.rotation, index.alpha, columns, wanted, flip);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const std::int64_t j = wanted[i];
      const double scale = std::fabs(columns.scale[j]);
      const double gate = (columns.gate[j] - columns.shift[j]) / scale;
      const double off = 16.0 * kUlp * (std::fabs(columns.gate[j]) + std::fabs(columns.shift[j])) / scale + 16.0 * kUlp;
      gates.push_back({std::move(probes[i]), gate - off, gate + off});
    }
    tells = wanted.size() == 1 && wanted[0] == 0 && !flip[0];
  }
};

// Where a row of the index is.
struct Place {
  const Codes* codes;
  std::int64_t row;
};

// The bits that are set in 0 .. 15.
struct BitsOf4 {
  std::int16_t at[4], count;
};
constexpr BitsOf4 kBitsOf4[16] = {
    {{0, 0, 0, 0}, 0}, {{0, 0, 0, 0}, 1}, {{1, 0, 0, 0}, 1}, {{0, 1, 0, 0}, 2}, {{2, 0, 0, 0}, 1}, {{0, 2, 0, 0}, 2},
    {{1, 2, 0, 0}, 2}, {{0, 1, 2, 0}, 3}, {{3, 0, 0, 0}, 1}, {{0, 3, 0, 0}, 2}, {{1, 3, 0, 0}, 2}, {{0, 1, 3, 0}, 3},
    {{2, 3, 0, 0}, 2}, {{0, 2, 3, 0}, 3}, {{1, 2, 3, 0}, 3}, {{0, 1, 2, 3}, 4}};

struct Loops {
  Screen screen;
  Refine refine;
  Lay lay;
  Together together;
  Whole whole;
};

// What the bounds say of a relevance, which is in -1 .. 1: a float is off by no more than 2^-25 of it.
inline void tell(Found& found, double low, double high) {
  found.low.push_back(low > -1.0 ? static_cast<float>(std::min(low, 1.0) - 1e-7) : -1.0f);
  found.high.push_back(high < 1.0 ? static_cast<float>(std::max(high, -1.0) + 1e-7) : 1.0f);
}

// The rows first .. first + n, n <= kBlock, which are the codes at `at` and on. dots: [gates, kBlock].
void scan_block(const Index& index, const Place& at, std::int64_t n, std::int64_t first, const Request& request,
                const Rows& rows, const double* squared_norms, const std::uint8_t* alive, const Loops& loops,
                bool bounds, std::int32_t* dots, Found& found) {
  const bool tells = bounds && request.tells;
  const std::int64_t dim = index.rotation.dim;
  const std::int64_t row_bytes = rows.dim * static_cast<std::int64_t>(size_of(rows.dtype));
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

// The same for many requests at once, n <= kBlockTogether: first the screen with all of them, the codes side by side;
// then stage 3 for what it keeps of each; then the stored rows that are left of all.
class TogetherScan {
 public:
  TogetherScan(const Index& index, const Rows& rows, const double* squared_norms, const std::uint8_t* alive,
               const std::vector<Request>& requests, const std::vector<Coarse>& coarse, const Loops& loops, bool bounds)
      : rows_(rows), squared_norms_(squared_norms), alive_(alive), requests_(requests), coarse_(coarse),
        loops_(loops), bounds_(bounds), laid_(new Laid()) {
    for (int b = 0; b < kBlocks; ++b) widths_[b] = block_width(index.rotation.dim, b);
    for (int b = 0; b < 2; ++b) laid_->widths[b] = widths_[b];
    std::size_t most = 0;
    for (const Request& request : requests) most = std::max(most, request.gates.size());
    bounds_of_.resize(2 * most * kStride);
  }

  // found: one per request; nothing is added for the open ones.
  void scan(const Place& at, std::int64_t n, std::int64_t first, Found* found) {
    lay(at, n, first);
    left_.clear();
    unsure_.clear();
    const std::int64_t tiles = (n + kTile - 1) / kTile;
    std::uint32_t masks[kBlockTogether / kTile], of_gate[kBlockTogether / kTile];
    std::int16_t list[kStride], open[kStride];
    std::uint8_t may[kStride / 4];
    double *low = bounds_of_.data(), *high = low + bounds_of_.size() / 2;
    const Coarse* coarse = coarse_.data();
    for (std::size_t s = 0; s < requests_.size(); ++s) {
      const Request& request = requests_[s];
      if (request.open) continue;
      fetch_next(at, n, s);
      std::fill_n(masks, tiles, 0u);
      for (std::size_t g = 0; g < request.gates.size(); ++g) {
        loops_.together(*laid_, *coarse++, of_gate);
        for (std::int64_t t = 0; t < tiles; ++t) masks[t] |= of_gate[t];
      }
      std::int64_t count = 0;
      for (std::int64_t t = 0; t < tiles; ++t)
        for (std::int64_t i = 0; i < kTile; i += 4) {
          const BitsOf4& set = kBitsOf4[masks[t] >> i & 15u];
          for (int j = 0; j < 4; ++j) list[count + j] = static_cast<std::int16_t>(t * kTile + i + set.at[j]);
          count += set.count;
        }
      if (!count) continue;
      for (std::int64_t i = count; i % 4; ++i) list[i] = list[count - 1];
      std::fill_n(may, (count + 3) / 4, std::uint8_t{0});
      for (std::size_t g = 0; g < request.gates.size(); ++g)
        loops_.whole(*at.codes, widths_, at.row, list, count, request.gates[g].probe, request.gates[g].below,
                     low + g * kStride, high + g * kStride, may);
      if (count % 4) may[count / 4] = static_cast<std::uint8_t>(may[count / 4] & ((1u << (count % 4)) - 1));
      std::int64_t rest = 0;
      for (std::int64_t i = 0; i < count; i += 4) {
        const BitsOf4& set = kBitsOf4[may[i / 4]];
        for (int j = 0; j < 4; ++j) open[rest + j] = static_cast<std::int16_t>(i + set.at[j]);
        rest += set.count;
      }
      for (std::int64_t o = 0; o < rest; ++o) {
        const std::size_t i = static_cast<std::size_t>(open[o]);
        bool passes = false;
        for (std::size_t g = 0; g < request.gates.size(); ++g)
          passes = passes || low[g * kStride + i] >= request.gates[g].above;
        if (!passes) unsure_.push_back(left_.size());
        left_.push_back({list[i], passes, static_cast<std::uint32_t>(s), low[i], high[i]});
      }
    }
    const std::int64_t row_bytes = rows_.dim * static_cast<std::int64_t>(size_of(rows_.dtype));
    const std::size_t ahead = static_cast<std::size_t>(kRowsAhead), rest = unsure_.size();
    const auto stored = [&](std::size_t i) { return rows_.at(first + left_[unsure_[i]].row); };
    for (std::size_t i = 0; i < std::min(rest, ahead); ++i) prefetch(stored(i), row_bytes);
    for (std::size_t i = 0; i < rest; ++i) {
      if (i + ahead < rest) prefetch(stored(i + ahead), row_bytes);
      Left& left = left_[unsure_[i]];
      const bool passes = requests_[left.request].scorer.passes(first + left.row, squared_norms_[first + left.row]);
      left.passes = passes;
    }
    for (const Left& left : left_) {
      if (!left.passes) continue;
      Found& to = found[left.request];
      to.rows.push_back(first + left.row);
      if (!bounds_) continue;
      if (requests_[left.request].tells)
        tell(to, left.low, left.high);
      else
        tell(to, -1.0, 1.0);
    }
  }

 private:
  struct Left {
    std::int16_t row;
    bool passes;
    std::uint32_t request;
    double low, high;
  };
  static constexpr std::size_t kStride = kBlockTogether + 4;

  // A share of the codes that come next, while those of this block are worked on.
  void fetch_next(const Place& at, std::int64_t n, std::size_t s) {
    const std::int64_t share = std::min(kBlockTogether, at.codes->rows - at.row - n);
    const std::int64_t count = static_cast<std::int64_t>(requests_.size()), i = static_cast<std::int64_t>(s);
    const std::int64_t from = at.row + n + share * i / count, rows = share * (i + 1) / count - share * i / count;
    for (int b = 0; b < kBlocks; ++b) prefetch(at.codes->blocks[b] + from * widths_[b], rows * widths_[b]);
    prefetch(at.codes->numbers + from * kNumbers, rows * kNumbers * static_cast<std::int64_t>(sizeof(float)));
  }

  void lay(const Place& at, std::int64_t n, std::int64_t first) {
    Laid& laid = *laid_;
    laid.rows = n;
    const std::int64_t padded = (n + kTile - 1) / kTile * kTile;
    for (int b = 0; b < 2; ++b) loops_.lay(at.codes->blocks[b] + at.row * widths_[b], n, b, laid);
    const float* numbers = at.codes->numbers + at.row * kNumbers;
    for (std::int64_t i = 0; i < padded; ++i) {
      const float* x = i < n ? numbers + i * kNumbers : numbers;
      laid.scale[i] = x[kScale];
      laid.rho[i] = x[kRho] * kUp;
      laid.beta[0][i] = x[kBeta1] * kUp;
      laid.beta[1][i] = x[kBeta2] * kUp;
    }
    for (std::int64_t t = 0; t * kTile < n; ++t) {
      std::uint32_t mask = 0;
      for (std::int64_t i = 0; i < std::min(kTile, n - t * kTile); ++i)
        if (!alive_ || alive_[first + t * kTile + i]) mask |= 1u << i;
      laid.living[t] = mask;
    }
  }

  const Rows& rows_;
  const double* squared_norms_;
  const std::uint8_t* alive_;
  const std::vector<Request>& requests_;
  const std::vector<Coarse>& coarse_;
  const Loops& loops_;
  const bool bounds_;
  std::int64_t widths_[kBlocks];
  std::unique_ptr<Laid> laid_;
  std::vector<Left> left_;
  std::vector<std::size_t> unsure_;
  std::vector<double> bounds_of_;  // low [gates, kStride], then high
};

// ---- top ----

// The formula of the score on intervals: effective columns 0 .. effective, then the coverage.
struct Formula {
  std::int64_t effective = 0, count = 0;  // count: with the coverage
  bool has_coverage = false, no_pull = false, clamp_novelty = false, sound = true;
  std::vector<std::int16_t> k[kBlocks];  // packed
  // A column's value times its weight: base + unit r <c, k> +- (spread rho + side beta + fixed), no side at stage 3.
  std::vector<double> base, unit, spread, side[kBlocks], fixed;

  Formula(const Index& index, const Columns& columns) {
    std::vector<std::int64_t> wanted;
    for (std::int64_t j = 0; j < columns.count; ++j)
      if (j != 1) wanted.push_back(j);
    effective = static_cast<std::int64_t>(wanted.size());
    no_pull = effective == 1;
    has_coverage = columns.has_coverage;
    clamp_novelty = columns.clamp_novelty;
    if (has_coverage) wanted.push_back(1);
    count = static_cast<std::int64_t>(wanted.size());
    const std::vector<Probe> probes =
        make_probes(index.rotation, index.alpha, columns, wanted, std::vector<bool>(wanted.size()));
    for (int b = 0; b < kBlocks; ++b) k[b] = packed(probes, b, block_width(index.rotation.dim, b));
    for (std::size_t i = 0; i < probes.size(); ++i) {
      const Probe& p = probes[i];
      const std::int64_t j = wanted[i];
      const double weight = j == 1 ? 1.0 : columns.weight[j], shift = weight * columns.shift[j];
      const double slope = weight * columns.scale[j] * (j == 1 ? p.norm : 1.0);
      base.push_back(slope * p.center + shift);
      unit.push_back(slope * p.step);
      spread.push_back(std::fabs(slope));
      for (int b = 0; b < kBlocks; ++b) {
        side[b].push_back(std::fabs(slope) * p.zeta[b]);
        sound = sound && std::isfinite(side[b].back());
      }
      fixed.push_back(std::fabs(slope) * p.error + 32.0 * kUlp * (std::fabs(slope) + std::fabs(shift)) + 1e-200);
      sound = sound && p.norm < 1e150 && std::fabs(slope) < 1e150 && std::fabs(shift) < 1e150 &&
              std::isfinite(base.back()) && std::isfinite(unit.back()) && std::isfinite(fixed.back());
    }
  }
};

struct Interval {
  double low, high;
};

// The computed score lies in here: the operations of score_rows() in the same order, which rounding keeps monotone.
inline Interval score_bounds(const Formula& f, const Limits& limits, const Interval& effective,
                             const Interval& coverage, double strength, double guard) {
  double low = f.no_pull && effective.low < 0.0 ? 0.0 : effective.low;
  double high = f.no_pull && effective.high < 0.0 ? 0.0 : effective.high;
  double most = std::max(1.0 - std::min(coverage.low, limits.penalty_cap), limits.novelty_floor);
  double least = std::max(1.0 - std::min(coverage.high, limits.penalty_cap), limits.novelty_floor);
  if (f.clamp_novelty) {
    most = std::min(most, 1.0);
    least = std::min(least, 1.0);
  }
  return {strength * low * (low >= 0.0 ? least : most) * guard, strength * high * (high >= 0.0 ? most : least) * guard};
}

// By the blocks up to b: dots [count] of a row.
inline Interval row_bounds(const Formula& f, const Limits& limits, int b, const std::int32_t* dots,
                           const float* numbers, double strength, double guard) {
  if (!(numbers[kRho] < kLargest)) return {-kInf, kInf};
  const double rho = static_cast<double>(numbers[kRho]);
  const double beta = b + 1 < kBlocks ? static_cast<double>(numbers[kBeta1 + b]) : 0.0;
  const auto column = [&](std::size_t c) {
    const double center = f.base[c] + f.unit[c] * scaled(numbers, dots[c]);
    const double error = (f.spread[c] * rho + f.side[b][c] * beta) + f.fixed[c];
    return Interval{center - error, center + error};
  };
  Interval effective{-kInf, -kInf}, coverage{0.0, 0.0};
  const std::size_t columns = static_cast<std::size_t>(f.effective);
  for (std::size_t c = 0; c < columns; ++c) {
    const Interval v = column(c);
    effective.low = v.low > effective.low ? v.low : effective.low;
    effective.high = v.high > effective.high ? v.high : effective.high;
  }
  if (f.has_coverage) coverage = column(columns);
  return score_bounds(f, limits, effective, coverage, strength, guard);
}

// low[i], high[i], i < n: the bounds of the score of the row in slot slots[i] by the blocks up to b. By slot: dots
// [.., stride], a multiple of 4, numbers, strength, guard. slots, low, high have room for a multiple of 4, slots with
// slots in it.
using Bounds = void (*)(const Formula& f, const Limits& limits, int b, const std::int32_t* dots, std::int64_t stride,
                        const float* const* numbers, const double* strength, const double* guard,
                        const std::int16_t* slots, std::int64_t n, double* low, double* high);

void bounds_generic(const Formula& f, const Limits& limits, int b, const std::int32_t* dots, std::int64_t stride,
                    const float* const* numbers, const double* strength, const double* guard,
                    const std::int16_t* slots, std::int64_t n, double* low, double* high) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int16_t s = slots[i];
    const Interval in = row_bounds(f, limits, b, dots + s * stride, numbers[s], strength[s], guard[s]);
    low[i] = in.low;
    high[i] = in.high;
  }
}

#if CDR_X86
// Dots [4 rows, 4 columns] as one register of four rows per column.
CDR_AVX2 inline void columns4(const std::int32_t* const* dots, std::int64_t column, __m256d* out) {
  __m128 a = _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(dots[0] + column)));
  __m128 b = _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(dots[1] + column)));
  __m128 c = _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(dots[2] + column)));
  __m128 d = _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(dots[3] + column)));
  _MM_TRANSPOSE4_PS(a, b, c, d);
  out[0] = _mm256_cvtepi32_pd(_mm_castps_si128(a));
  out[1] = _mm256_cvtepi32_pd(_mm_castps_si128(b));
  out[2] = _mm256_cvtepi32_pd(_mm_castps_si128(c));
  out[3] = _mm256_cvtepi32_pd(_mm_castps_si128(d));
}

// row_bounds() of four rows at a time.
CDR_AVX2 void bounds_avx2(const Formula& f, const Limits& limits, int b, const std::int32_t* dots, std::int64_t stride,
                          const float* const* numbers, const double* strength, const double* guard,
                          const std::int16_t* slots, std::int64_t n, double* low, double* high) {
  const __m256d one = _mm256_set1_pd(1.0), zero = _mm256_setzero_pd(), inf = _mm256_set1_pd(kInf);
  const __m256d cap = _mm256_set1_pd(limits.penalty_cap), floor = _mm256_set1_pd(limits.novelty_floor);
  const double *base = f.base.data(), *unit = f.unit.data(), *spread = f.spread.data(), *side = f.side[b].data(),
               *fixed = f.fixed.data();
  for (std::int64_t i = 0; i < n; i += 4) {
    const std::int16_t s0 = slots[i], s1 = slots[i + 1], s2 = slots[i + 2], s3 = slots[i + 3];
    const std::int32_t* const of[4] = {dots + s0 * stride, dots + s1 * stride, dots + s2 * stride, dots + s3 * stride};
    const Numbers4 x = numbers4(numbers[s0], numbers[s1], numbers[s2], numbers[s3]);
    const __m256d beta = b + 1 < kBlocks ? x.beta[b] : zero;
    __m256d top = _mm256_sub_pd(zero, inf), bottom = top, cover_top = zero, cover_bottom = zero;
    for (std::int64_t c = 0; c < f.count; c += 4) {
      __m256d d[4];
      columns4(of, c, d);
      const std::int64_t stop = std::min<std::int64_t>(4, f.count - c);
      for (std::int64_t j = 0; j < stop; ++j) {
        const std::int64_t at = c + j;
        const __m256d center = _mm256_add_pd(
            _mm256_set1_pd(base[at]), _mm256_mul_pd(_mm256_set1_pd(unit[at]), _mm256_mul_pd(x.scale, d[j])));
        const __m256d error = _mm256_add_pd(_mm256_add_pd(_mm256_mul_pd(_mm256_set1_pd(spread[at]), x.rho),
                                                          _mm256_mul_pd(_mm256_set1_pd(side[at]), beta)),
                                            _mm256_set1_pd(fixed[at]));
        if (at < f.effective) {
          top = _mm256_max_pd(top, _mm256_add_pd(center, error));
          bottom = _mm256_max_pd(bottom, _mm256_sub_pd(center, error));
        } else {
          cover_top = _mm256_add_pd(center, error);
          cover_bottom = _mm256_sub_pd(center, error);
        }
      }
    }
    if (f.no_pull) {
      top = _mm256_max_pd(top, zero);
      bottom = _mm256_max_pd(bottom, zero);
    }
    __m256d most = _mm256_max_pd(_mm256_sub_pd(one, _mm256_min_pd(cover_bottom, cap)), floor);
    __m256d least = _mm256_max_pd(_mm256_sub_pd(one, _mm256_min_pd(cover_top, cap)), floor);
    if (f.clamp_novelty) {
      most = _mm256_min_pd(most, one);
      least = _mm256_min_pd(least, one);
    }
    const __m256d s = _mm256_setr_pd(strength[s0], strength[s1], strength[s2], strength[s3]);
    const __m256d g = _mm256_setr_pd(guard[s0], guard[s1], guard[s2], guard[s3]);
    const __m256d with_low = _mm256_blendv_pd(most, least, _mm256_cmp_pd(bottom, zero, _CMP_GE_OQ));
    const __m256d with_high = _mm256_blendv_pd(least, most, _mm256_cmp_pd(top, zero, _CMP_GE_OQ));
    bottom = _mm256_mul_pd(_mm256_mul_pd(_mm256_mul_pd(s, bottom), with_low), g);
    top = _mm256_mul_pd(_mm256_mul_pd(_mm256_mul_pd(s, top), with_high), g);
    const __m256d sound = _mm256_cmp_pd(x.rho, _mm256_set1_pd(static_cast<double>(kLargest)), _CMP_LT_OQ);
    _mm256_storeu_pd(low + i, _mm256_blendv_pd(_mm256_sub_pd(zero, inf), bottom, sound));
    _mm256_storeu_pd(high + i, _mm256_blendv_pd(inf, top, sound));
  }
}
#endif

Bounds bounds() {
#if CDR_X86
  if (fast()) return bounds_avx2;
#endif
  return bounds_generic;
}

// The k best lower bounds so far.
class Best {
 public:
  explicit Best(std::size_t k) : k_(k) {}

  double threshold() const { return threshold_.load(std::memory_order_relaxed); }

  void add(const std::vector<double>& lower) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (double low : lower) {
      if (!(low > -kInf)) continue;  // NaN bounds nothing
      if (heap_.size() < k_) {
        heap_.push_back(low);
        std::push_heap(heap_.begin(), heap_.end(), std::greater<double>());
      } else if (low > heap_.front()) {
        std::pop_heap(heap_.begin(), heap_.end(), std::greater<double>());
        heap_.back() = low;
        std::push_heap(heap_.begin(), heap_.end(), std::greater<double>());
      }
    }
    if (heap_.size() == k_) threshold_.store(heap_.front(), std::memory_order_relaxed);
  }

 private:
  std::size_t k_;
  std::mutex mutex_;
  std::vector<double> heap_;  // the smallest first
  std::atomic<double> threshold_{-kInf};
};

struct Survivor {
  std::int64_t position;
  double upper;
};

}  // namespace

void Rotation::measure() {
  double f = 0, m = 0, w = 0;
  for (std::int64_t i = 0; i < dim * dim; ++i) f += static_cast<double>(matrix[i]) * static_cast<double>(matrix[i]);
  for (std::int64_t i = 0; i < dim; ++i) {
    m += static_cast<double>(mean[i]) * static_cast<double>(mean[i]);
    w = std::max(w, static_cast<double>(weight[i]));
  }
  frobenius = std::sqrt(f) * (1.0 + 1e-6);
  mean_norm = std::sqrt(m) * (1.0 + 1e-6);
  most_weight = w;
}

void center(const Rows& rows, const double* squared_norms, std::int64_t first, std::int64_t n,
            const Rotation& rotation, float* centred) {
  const std::int64_t dim = rotation.dim;
  constexpr std::int64_t kRows = 64;
  parallel_for(units(n, kRows), [&](std::size_t unit) {
    std::vector<double> x(static_cast<std::size_t>(dim));
    const std::int64_t from = static_cast<std::int64_t>(unit) * kRows, to = std::min(n, from + kRows);
    for (std::int64_t i = from; i < to; ++i) {
      widen(rows.dtype, rows.at(first + i), dim, x.data());
      const double over = 1.0 / std::sqrt(squared_norms[first + i]);
      float* out = centred + i * dim;
      for (std::int64_t d = 0; d < dim; ++d)
        out[d] = static_cast<float>(x[static_cast<std::size_t>(d)] * over - static_cast<double>(rotation.mean[d]));
    }
  });
}

double encode(const float* rotated, std::int64_t n, const Rotation& rotation, std::int8_t* const* blocks,
              float* numbers, double* decoded) {
  const std::int64_t dim = rotation.dim;
  std::vector<float> over(static_cast<std::size_t>(dim));
  for (std::int64_t d = 0; d < dim; ++d) over[static_cast<std::size_t>(d)] = 1.0f / rotation.weight[d];
  const EncodeRow row = encode_row();
  constexpr std::int64_t kRows = 64;
  std::vector<double> alphas(units(n, kRows), 0.0);
  parallel_for(alphas.size(), [&](std::size_t unit) {
    std::vector<float> y(static_cast<std::size_t>(dim));
    std::vector<std::int8_t> codes(y.size());
    const std::int64_t from = static_cast<std::int64_t>(unit) * kRows, to = std::min(n, from + kRows);
    for (std::int64_t i = from; i < to; ++i) {
      double* out = decoded + i * dim;
      std::int32_t squares;
      const float scale =
          row(rotated + i * dim, over.data(), rotation.weight, dim, y.data(), codes.data(), out, &squares);
      double beyond[kBlocks + 1] = {};  // sums of squares of what is decoded from block b on
      for (int b = kBlocks - 1; b >= 0; --b) {
        const std::int64_t begin = block_begin(dim, b), size = block_begin(dim, b + 1) - begin;
        const std::int64_t width = block_width(dim, b);
        std::int8_t* block = blocks[b] + i * width;
        std::memcpy(block, codes.data() + begin, static_cast<std::size_t>(size));
        std::memset(block + size, 0, static_cast<std::size_t>(width - size));
        double sums[4] = {};
        for (std::int64_t d = 0; d < size; ++d) sums[d % 4] += out[begin + d] * out[begin + d];
        beyond[b] = beyond[b + 1] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
      }
      float* number = numbers + i * kNumbers;
      number[kRho] = std::numeric_limits<float>::infinity();
      number[kBeta1] = round_up(std::sqrt(beyond[1]) * kAbove);
      number[kBeta2] = round_up(std::sqrt(beyond[2]) * kAbove);
      number[kScale] = scale;
      const double norm = static_cast<double>(scale) * std::sqrt(static_cast<double>(squares));
      alphas[unit] = std::max(alphas[unit], norm * kAbove);
    }
  });
  double alpha = 0;
  for (double a : alphas) alpha = std::max(alpha, a);
  return alpha;
}

void measure(const Rows& rows, const double* squared_norms, std::int64_t first, std::int64_t n,
             const Rotation& rotation, double alpha, const double* rebuilt, float* numbers) {
  const std::int64_t dim = rotation.dim;
  const double rounding = static_cast<double>(dim + 16) * kUlp *
                              (1.0 + rotation.mean_norm + rotation.frobenius * rotation.most_weight * alpha) +
                          1e-10;
  constexpr std::int64_t kRows = 64;
  parallel_for(units(n, kRows), [&](std::size_t unit) {
    std::vector<double> x(static_cast<std::size_t>(dim));
    const std::int64_t from = static_cast<std::int64_t>(unit) * kRows, to = std::min(n, from + kRows);
    for (std::int64_t i = from; i < to; ++i) {
      widen(rows.dtype, rows.at(first + i), dim, x.data());
      const double norm = std::sqrt(squared_norms[first + i]);
      const double* r = rebuilt + i * dim;
      double sum[8] = {};
      for (std::int64_t d = 0; d < dim; ++d) {
        const double e = (x[static_cast<std::size_t>(d)] / norm - static_cast<double>(rotation.mean[d])) - r[d];
        sum[d % 8] += e * e;
      }
      const double total = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
      const double rho = std::sqrt(total) * kAbove + rounding;
      numbers[i * kNumbers + kRho] = rho == rho ? round_up(rho * kAbove) : std::numeric_limits<float>::infinity();
    }
  });
}

std::vector<Found> threshold(const Index& index, const Rows& rows, const double* squared_norms,
                             const std::uint8_t* alive, const std::vector<const Columns*>& columns, bool bounds) {
  std::vector<Request> requests;
  requests.reserve(columns.size());
  std::size_t most_gates = 0;
  std::vector<Coarse> coarse;
  for (const Columns* c : columns) {
    requests.emplace_back(index, rows, *c);
    most_gates = std::max(most_gates, requests.back().gates.size());
    for (const Gate& gate : requests.back().gates) coarse.push_back(gate.coarse());
  }
  // Units never cross from one run of codes to the next, nor into the tail.
  struct Unit {
    Place at;
    std::int64_t first, rows;
  };
  std::vector<Unit> work;
  const auto cut = [&](const Codes* codes, std::int64_t first, std::int64_t count) {
    for (std::int64_t at = 0; at < count; at += kUnit)
      work.push_back({{codes, at}, first + at, std::min(kUnit, count - at)});
  };
  std::int64_t first = 0;
  for (const Codes& c : index.codes) {
    cut(&c, first, c.rows);
    first += c.rows;
  }
  cut(nullptr, first, rows.size() - first);

  const Loops loops{screen(), refine(), lay(), together(), whole()};
  const std::size_t sets = requests.size();
  const bool many = coarse.size() >= kTogether;
  const std::int64_t block = many ? kBlockTogether : kBlock;
  std::vector<Found> parts(work.size() * sets);
  parallel_for(work.size(), [&](std::size_t u) {
    const Unit& unit = work[u];
    std::vector<std::int32_t> dots1(many ? 0 : most_gates * static_cast<std::size_t>(kBlock));
    TogetherScan all(index, rows, squared_norms, alive, requests, coarse, loops, bounds);
    for (std::int64_t at = 0; at < unit.rows; at += block) {
      const std::int64_t size = std::min(block, unit.rows - at);
      const Place place{unit.at.codes, unit.at.row + at};
      const bool together_here = many && place.codes;
      if (together_here) all.scan(place, size, unit.first + at, parts.data() + u * sets);
      for (std::size_t s = 0; s < sets; ++s) {
        const Request& request = requests[s];
        Found& found = parts[u * sets + s];
        if (place.codes && !request.open) {
          if (!together_here)
            scan_block(index, place, size, unit.first + at, request, rows, squared_norms, alive, loops, bounds,
                       dots1.data(), found);
          continue;
        }
        for (std::int64_t row = unit.first + at; row < unit.first + at + size; ++row)
          if ((!alive || alive[row]) && (request.open || request.scorer.passes(row, squared_norms[row]))) {
            found.rows.push_back(row);
            if (bounds) tell(found, -1.0, 1.0);
          }
      }
    }
  });
  std::vector<Found> out(sets);
  for (std::size_t s = 0; s < sets; ++s) {
    std::size_t total = 0;
    for (std::size_t u = 0; u < work.size(); ++u) total += parts[u * sets + s].rows.size();
    out[s].rows.reserve(total);
    out[s].low.reserve(bounds ? total : 0);
    out[s].high.reserve(bounds ? total : 0);
    for (std::size_t u = 0; u < work.size(); ++u) {
      const Found& part = parts[u * sets + s];
      out[s].rows.insert(out[s].rows.end(), part.rows.begin(), part.rows.end());
      out[s].low.insert(out[s].low.end(), part.low.begin(), part.low.end());
      out[s].high.insert(out[s].high.end(), part.high.begin(), part.high.end());
    }
  }
  return out;
}

std::vector<std::int64_t> top(const Index& index, const Rows& rows, const double* squared_norms,
                              const std::int64_t* candidates, std::int64_t n, const std::uint8_t* alive,
                              const Columns& columns, const Factors& factors, const Limits& limits, std::int64_t k) {
  std::vector<std::int64_t> out;
  if (k <= 0) return out;
  const auto row_of = [&](std::int64_t at) { return candidates ? candidates[at] : at; };
  const auto lives = [&](std::int64_t at) { return !alive || alive[row_of(at)]; };
  const Formula formula(index, columns);
  if (k >= n || !formula.sound) {
    for (std::int64_t at = 0; at < n; ++at)
      if (lives(at)) out.push_back(at);
    return out;
  }
  const std::int64_t coded = index.size();
  const std::int64_t count = formula.count;
  std::int64_t widths[kBlocks];
  for (int b = 0; b < kBlocks; ++b) widths[b] = block_width(index.rotation.dim, b);
  const Dots dot = dots();
  const std::int64_t stride = (count + 3) / 4 * 4;
  const Bounds bound = bounds();
  const auto place = [&](std::int64_t row) {
    std::size_t c = 0;
    while (row >= index.codes[c].rows) row -= index.codes[c++].rows;
    return Place{&index.codes[c], row};
  };
  // Units come in an order that jumps over the whole range, so that a store sorted by topic soon shows its best.
  const std::size_t total = units(n, kUnitTop);
  std::size_t jump = std::max<std::size_t>(1, static_cast<std::size_t>(static_cast<double>(total) * 0.618));
  const auto common = [](std::size_t a, std::size_t b) {
    while (b) {
      const std::size_t r = a % b;
      a = b;
      b = r;
    }
    return a;
  };
  while (common(jump, total) != 1) ++jump;
  Best best(static_cast<std::size_t>(k));
  std::vector<std::vector<Survivor>> survivors(total);
  parallel_for(total, [&](std::size_t turn) {
    const std::size_t unit = turn * jump % total;
    const std::int64_t begin = static_cast<std::int64_t>(unit) * kUnitTop, end = std::min(n, begin + kUnitTop);
    std::vector<std::int32_t> sums(static_cast<std::size_t>(kBlockTop * stride));
    std::vector<double> lower;
    std::vector<Survivor>& kept = survivors[unit];
    std::vector<std::int64_t> tail;
    struct Coded {
      std::int64_t at;
      Place place;
    };
    Coded all[kUnitTop];
    const auto block_of = [&](const Coded& c, int b) { return c.place.codes->blocks[b] + c.place.row * widths[b]; };
    const auto numbers_of = [](const Coded& c) { return c.place.codes->numbers + c.place.row * kNumbers; };
    std::int64_t size = 0;
    for (std::int64_t at = begin; at < end; ++at) {
      const std::int64_t row = row_of(at);
      if (alive && !alive[row]) continue;
      if (row >= coded) {
        tail.push_back(at);
        continue;
      }
      all[size++] = {at, place(row)};
    }
    const float* numbers[kBlockTop];
    double strength[kBlockTop], guard[kBlockTop], upper[kBlockTop], lowest[kBlockTop];  // by slot
    double low[kBlockTop], high[kBlockTop];
    std::int16_t slots[kBlockTop + 4];
    std::fill_n(strength, kBlockTop, 1.0);
    std::fill_n(guard, kBlockTop, 1.0);
    for (std::int64_t i = 0; i < std::min(size, kScreenAhead); ++i) {
      CDR_PREFETCH(numbers_of(all[i]));
      prefetch(block_of(all[i], 0), widths[0]);
    }
    for (std::int64_t block = 0; block < size; block += kBlockTop) {
      const Coded* some = all + block;
      std::int64_t left = std::min(kBlockTop, size - block);
      std::fill(sums.begin(), sums.end(), 0);
      for (std::int64_t i = 0; i < left; ++i) {
        if (block + i + kScreenAhead < size) {
          CDR_PREFETCH(numbers_of(some[i + kScreenAhead]));
          prefetch(block_of(some[i + kScreenAhead], 0), widths[0]);
        }
        numbers[i] = numbers_of(some[i]);
        upper[i] = kInf;
        slots[i] = static_cast<std::int16_t>(i);
        dot(block_of(some[i], 0), widths[0], formula.k[0].data(), count, sums.data() + i * stride);
      }
      if (factors.importance)
        for (std::int64_t i = 0; i < left; ++i) strength[i] = factors.importance[some[i].at];
      if (factors.multiplier)
        for (std::int64_t i = 0; i < left; ++i)
          strength[i] = (factors.importance ? strength[i] : 1.0) * factors.multiplier[some[i].at];
      if (factors.ngram_overlap)
        for (std::int64_t i = 0; i < left; ++i)
          guard[i] = 1.0 - std::min(limits.ngram_cap,
                                    static_cast<double>(factors.ngram_overlap[some[i].at]) * limits.ngram_step);
      const double limit = best.threshold();
      for (int b = 0; b < kBlocks && left; ++b) {
        if (b) {
          for (std::int64_t i = 0; i < std::min(left, kAhead); ++i) prefetch(block_of(some[slots[i]], b), widths[b]);
          for (std::int64_t i = 0; i < left; ++i) {
            if (i + kAhead < left) prefetch(block_of(some[slots[i + kAhead]], b), widths[b]);
            dot(block_of(some[slots[i]], b), widths[b], formula.k[b].data(), count, sums.data() + slots[i] * stride);
          }
        }
        for (std::int64_t i = left; i % 4; ++i) slots[i] = slots[left - 1];
        bound(formula, limits, b, sums.data(), stride, numbers, strength, guard, slots, left, low, high);
        std::int64_t going = 0;
        for (std::int64_t i = 0; i < left; ++i) {
          const std::int16_t slot = slots[i];
          const double most = high[i] < upper[slot] ? high[i] : upper[slot];
          upper[slot] = most;
          lowest[slot] = low[i];
          slots[going] = slot;
          going += !(most < limit);
        }
        left = going;
      }
      for (std::int64_t i = 0; i < left; ++i) {
        kept.push_back({some[slots[i]].at, upper[slots[i]]});
        lower.push_back(lowest[slots[i]]);
      }
    }
    if (!tail.empty()) {
      const std::size_t m = tail.size();
      std::vector<std::int64_t> which;
      std::vector<double> importance, multiplier, values(6 * m);
      std::vector<std::int32_t> overlap;
      for (std::int64_t at : tail) {
        which.push_back(row_of(at));
        importance.push_back(factors.importance ? factors.importance[at] : 1.0);
        multiplier.push_back(factors.multiplier ? factors.multiplier[at] : 1.0);
        overlap.push_back(factors.ngram_overlap ? factors.ngram_overlap[at] : 0);
      }
      double* v = values.data();
      score_rows(rows, squared_norms, which.data(), static_cast<std::int64_t>(m), columns,
                 {importance.data(), multiplier.data(), overlap.data()}, limits,
                 {v, v + m, v + 2 * m, v + 3 * m, v + 4 * m, v + 5 * m});
      for (std::size_t i = 0; i < m; ++i) {
        kept.push_back({tail[i], v[i]});
        lower.push_back(v[i]);
      }
    }
    best.add(lower);
  });
  const double limit = best.threshold();
  for (const std::vector<Survivor>& part : survivors)
    for (const Survivor& s : part)
      if (!(s.upper < limit)) out.push_back(s.position);
  return out;
}

std::uint64_t read_pass(const Rows& rows) {
  constexpr std::int64_t kBytes = 1 << 20;
  struct Piece {
    const unsigned char* data;
    std::int64_t words;
  };
  std::vector<Piece> pieces;
  for (const Block& b : rows.blocks) {
    const std::int64_t bytes = b.rows * rows.dim * static_cast<std::int64_t>(size_of(rows.dtype));
    for (std::int64_t at = 0; at < bytes; at += kBytes)
      pieces.push_back({b.data + at, std::min(kBytes, bytes - at) / 8});
  }
  std::atomic<std::uint64_t> total{0};
  parallel_for(pieces.size(), [&](std::size_t i) {
#if CDR_X86
    if (fast()) {
      total.fetch_add(sum_avx2(pieces[i].data, pieces[i].words), std::memory_order_relaxed);
      return;
    }
#endif
    total.fetch_add(sum_generic(pieces[i].data, pieces[i].words), std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace scan
}  // namespace cdr
