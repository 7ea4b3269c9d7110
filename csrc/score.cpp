#include "score.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "exact.h"
#include "pool.h"
#include "simd.h"

namespace cdr {
namespace {

constexpr double kUlp = 2.220446049250313e-16;  // 2^-52
constexpr int kLanes = 8;
constexpr int kTile = 8;  // columns that share one pass over a row

float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  float out;
  if (exponent == 0) {  // zero and subnormals: an exact product
    out = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    std::uint32_t bits;
    std::memcpy(&bits, &out, 4);
    bits |= sign;
    std::memcpy(&out, &bits, 4);
    return out;
  }
  const std::uint32_t bits =
      exponent == 31 ? (sign | 0x7f800000u | (mantissa << 13)) : (sign | ((exponent + 112u) << 23) | (mantissa << 13));
  std::memcpy(&out, &bits, 4);
  return out;
}

inline double element(const double* x, std::int64_t i) { return x[i]; }
inline double element(const float* x, std::int64_t i) { return x[i]; }
inline double element(const std::uint16_t* x, std::int64_t i) { return half_to_float(x[i]); }

template <class T>
void widen_generic(const T* x, std::int64_t dim, double* out) {
  for (std::int64_t i = 0; i < dim; ++i) out[i] = element(x, i);
}

inline double reduce(const double* l) { return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7])); }

// out[j] = dot(row, vectors[j]) for j < n <= kTile.
using Dots = void (*)(const unsigned char* row, std::int64_t dim, const double* const* vectors, int n, double* out);

template <class T>
void dots_generic(const unsigned char* row, std::int64_t dim, const double* const* vectors, int n, double* out) {
  const T* x = reinterpret_cast<const T*>(row);
  double lanes[kTile][kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    double e[kLanes];
    for (int l = 0; l < kLanes; ++l) e[l] = element(x, i + l);
    for (int j = 0; j < n; ++j)
      for (int l = 0; l < kLanes; ++l) lanes[j][l] += e[l] * vectors[j][i + l];
  }
  for (int l = 0; i + l < dim; ++l) {
    const double e = element(x, i + l);
    for (int j = 0; j < n; ++j) lanes[j][l] += e * vectors[j][i + l];
  }
  for (int j = 0; j < n; ++j) out[j] = reduce(lanes[j]);
}

#if CDR_X86
CDR_AVX2 inline void load8(const double* x, __m256d& a, __m256d& b) {
  a = _mm256_loadu_pd(x);
  b = _mm256_loadu_pd(x + 4);
}
CDR_AVX2 inline void load8(const float* x, __m256d& a, __m256d& b) {
  a = _mm256_cvtps_pd(_mm_loadu_ps(x));
  b = _mm256_cvtps_pd(_mm_loadu_ps(x + 4));
}
CDR_AVX2 inline void load8(const std::uint16_t* x, __m256d& a, __m256d& b) {
  const __m256 f = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  a = _mm256_cvtps_pd(_mm256_castps256_ps128(f));
  b = _mm256_cvtps_pd(_mm256_extractf128_ps(f, 1));
}

template <class T>
CDR_AVX2 void widen_avx2(const T* x, std::int64_t dim, double* out) {
  std::int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    __m256d a, b;
    load8(x + i, a, b);
    _mm256_storeu_pd(out + i, a);
    _mm256_storeu_pd(out + i + 4, b);
  }
  for (; i < dim; ++i) out[i] = element(x, i);
}

template <class T, int N>
CDR_AVX2 void dots_avx2_n(const T* x, std::int64_t dim, const double* const* vectors, double* out) {
  __m256d lo[N], hi[N];
  for (int j = 0; j < N; ++j) lo[j] = hi[j] = _mm256_setzero_pd();
  __m256d a, b;
  std::int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    load8(x + i, a, b);
    for (int j = 0; j < N; ++j) {
      lo[j] = _mm256_add_pd(lo[j], _mm256_mul_pd(a, _mm256_loadu_pd(vectors[j] + i)));
      hi[j] = _mm256_add_pd(hi[j], _mm256_mul_pd(b, _mm256_loadu_pd(vectors[j] + i + 4)));
    }
  }
  if (i < dim) {  // the vectors are padded; the row's tail is copied so that nothing beyond it is read
    T tail[kLanes] = {};
    std::memcpy(tail, x + i, static_cast<std::size_t>(dim - i) * sizeof(T));
    load8(tail, a, b);
    for (int j = 0; j < N; ++j) {
      lo[j] = _mm256_add_pd(lo[j], _mm256_mul_pd(a, _mm256_loadu_pd(vectors[j] + i)));
      hi[j] = _mm256_add_pd(hi[j], _mm256_mul_pd(b, _mm256_loadu_pd(vectors[j] + i + 4)));
    }
  }
  for (int j = 0; j < N; ++j) {
    double lanes[kLanes];
    _mm256_storeu_pd(lanes, lo[j]);
    _mm256_storeu_pd(lanes + 4, hi[j]);
    out[j] = reduce(lanes);
  }
}

template <class T>
CDR_AVX2 void dots_avx2(const unsigned char* row, std::int64_t dim, const double* const* vectors, int n, double* out) {
  const T* x = reinterpret_cast<const T*>(row);
  for (; n > 4; n -= 4, vectors += 4, out += 4) dots_avx2_n<T, 4>(x, dim, vectors, out);
  switch (n) {
    case 1: return dots_avx2_n<T, 1>(x, dim, vectors, out);
    case 2: return dots_avx2_n<T, 2>(x, dim, vectors, out);
    case 3: return dots_avx2_n<T, 3>(x, dim, vectors, out);
    default: return dots_avx2_n<T, 4>(x, dim, vectors, out);
  }
}

CDR_AVX512 inline __m512d load8_avx512(const double* x) { return _mm512_loadu_pd(x); }
CDR_AVX512 inline __m512d load8_avx512(const float* x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
CDR_AVX512 inline __m512d load8_avx512(const std::uint16_t* x) {
  return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

// The eight lanes of a column in one register.
template <class T, int N>
CDR_AVX512 void dots_avx512_n(const T* x, std::int64_t dim, const double* const* vectors, double* out) {
  __m512d sums[N];
  for (int j = 0; j < N; ++j) sums[j] = _mm512_setzero_pd();
  const auto add = [&](const T* e, std::int64_t i) CDR_AVX512 {
    const __m512d a = load8_avx512(e);
    for (int j = 0; j < N; ++j) sums[j] = _mm512_add_pd(sums[j], _mm512_mul_pd(a, _mm512_loadu_pd(vectors[j] + i)));
  };
  std::int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) add(x + i, i);
  if (i < dim) {  // as above
    T tail[kLanes] = {};
    std::memcpy(tail, x + i, static_cast<std::size_t>(dim - i) * sizeof(T));
    add(tail, i);
  }
  for (int j = 0; j < N; ++j) {
    double lanes[kLanes];
    _mm512_storeu_pd(lanes, sums[j]);
    out[j] = reduce(lanes);
  }
}

template <class T>
CDR_AVX512 void dots_avx512(const unsigned char* row, std::int64_t dim, const double* const* vectors, int n,
                            double* out) {
  const T* x = reinterpret_cast<const T*>(row);
  switch (n) {
    case 1: return dots_avx512_n<T, 1>(x, dim, vectors, out);
    case 2: return dots_avx512_n<T, 2>(x, dim, vectors, out);
    case 3: return dots_avx512_n<T, 3>(x, dim, vectors, out);
    case 4: return dots_avx512_n<T, 4>(x, dim, vectors, out);
    case 5: return dots_avx512_n<T, 5>(x, dim, vectors, out);
    case 6: return dots_avx512_n<T, 6>(x, dim, vectors, out);
    case 7: return dots_avx512_n<T, 7>(x, dim, vectors, out);
    default: return dots_avx512_n<T, 8>(x, dim, vectors, out);
  }
}
#endif

std::atomic<int> chosen{-1};

Simd detect() {
  const char* text = std::getenv("CDR_KERNEL_SIMD");
  const std::string asked = text ? text : "";
  if (asked.empty()) return best_simd();
  for (const Simd level : {Simd::generic, Simd::avx2, Simd::avx512}) {
    if (asked != name_of(level)) continue;
    if (level > best_simd())
      throw std::invalid_argument("CDR_KERNEL_SIMD=" + asked + ", but this processor has only " + name_of(best_simd()));
    return level;
  }
  throw std::invalid_argument("CDR_KERNEL_SIMD: expected generic, avx2 or avx512, got " + asked);
}

Dots dots_for(DType dtype) {
#if CDR_X86
  if (simd() >= Simd::avx512) {
    switch (dtype) {
      case DType::f16: return dots_avx512<std::uint16_t>;
      case DType::f32: return dots_avx512<float>;
      default: return dots_avx512<double>;
    }
  }
  if (simd() >= Simd::avx2) {
    switch (dtype) {
      case DType::f16: return dots_avx2<std::uint16_t>;
      case DType::f32: return dots_avx2<float>;
      default: return dots_avx2<double>;
    }
  }
#endif
  switch (dtype) {
    case DType::f16: return dots_generic<std::uint16_t>;
    case DType::f32: return dots_generic<float>;
    default: return dots_generic<double>;
  }
}

template <class T>
double exact_dot_of(const T* x, const double* v, std::int64_t dim) {
  ExactSum sum;
  for (std::int64_t i = 0; i < dim; ++i) sum.add(element(x, i) * v[i]);
  return sum.value();
}

double exact_dot(DType dtype, const unsigned char* row, const double* v, std::int64_t dim) {
  switch (dtype) {
    case DType::f16: return exact_dot_of(reinterpret_cast<const std::uint16_t*>(row), v, dim);
    case DType::f32: return exact_dot_of(reinterpret_cast<const float*>(row), v, dim);
    default: return exact_dot_of(reinterpret_cast<const double*>(row), v, dim);
  }
}

inline double clamp_cosine(double c) { return c > 1.0 ? 1.0 : c < -1.0 ? -1.0 : c; }

constexpr std::int64_t kBlock = 256;   // candidates in one unit of work
constexpr std::int64_t kAhead = 4;     // candidates whose rows are on their way while one is computed

// Asks for a row that stands alone: the processor's own prefetcher only sees rows that follow one another.
CDR_INLINE void fetch(const Rows& rows, std::int64_t row) {
  prefetch(rows.at(row), rows.row_bytes());
}

std::size_t blocks_of(std::int64_t n) { return static_cast<std::size_t>((n + kBlock - 1) / kBlock); }

template <class T>
void check_rows_of(const Rows& rows, double smallest, double largest, double* squared_norms, std::uint8_t* flags) {
  const std::int64_t n = rows.size(), dim = rows.dim;
  parallel_for(blocks_of(n), [&](std::size_t block) {
    std::vector<double> x(static_cast<std::size_t>(dim));
    const std::int64_t end = std::min(n, static_cast<std::int64_t>(block + 1) * kBlock);
    for (std::int64_t row = static_cast<std::int64_t>(block) * kBlock; row < end; ++row) {
      const T* p = reinterpret_cast<const T*>(rows.read(row));
      double most = 0.0;
      bool finite = true;
      for (std::int64_t i = 0; i < dim; ++i) {
        x[static_cast<std::size_t>(i)] = element(p, i);
        const double a = std::fabs(x[static_cast<std::size_t>(i)]);
        finite &= a <= 1.7976931348623157e308;
        most = a > most ? a : most;
      }
      squared_norms[row] = 0.0;
      flags[row] = !finite ? kRowNotFinite : most == 0.0 ? kRowZero : kRowOk;
      if (flags[row] != kRowOk) continue;
      if (most < smallest || most > largest) {
        flags[row] = kRowOutOfRange;
        continue;
      }
      // Eight sums with what each addition lost (Knuth's two-sum), then two exact sums that bracket
      // what the lost parts may have lost themselves; if both round alike, that is the answer.
      double sum[kLanes] = {}, lost[kLanes] = {};
      for (std::int64_t i = 0; i < dim; ++i) {
        const int l = static_cast<int>(i % kLanes);
        const double y = x[static_cast<std::size_t>(i)] * x[static_cast<std::size_t>(i)];
        const double s = sum[l] + y, v = s - sum[l];
        lost[l] += (sum[l] - (s - v)) + (y - v);
        sum[l] = s;
      }
      ExactSum total;
      double rough = 0.0;
      for (int l = 0; l < kLanes; ++l) {
        total.add(sum[l]);
        total.add(lost[l]);
        rough += sum[l];
      }
      const double steps = static_cast<double>(dim / kLanes + 2);
      const double bound = rough * steps * steps * 1.3e-32;  // > 2^-106, with room for its own rounding
      ExactSum above = total, below = total;
      above.add(bound);
      below.add(-bound);
      squared_norms[row] = above.value();
      if (squared_norms[row] != below.value()) {
        ExactSum exact;
        for (double e : x) exact.add(e * e);
        squared_norms[row] = exact.value();
      }
    }
  });
}

}  // namespace

double Columns::addend(std::int64_t j, std::int64_t row) const {
  if (addend_starts.empty()) return 0.0;
  const auto first = addend_rows.begin() + addend_starts[static_cast<std::size_t>(j)];
  const auto last = addend_rows.begin() + addend_starts[static_cast<std::size_t>(j) + 1];
  const auto found = std::lower_bound(first, last, row);
  return found != last && *found == row ? addend_values[static_cast<std::size_t>(found - addend_rows.begin())] : 0.0;
}

Simd best_simd() {
#if CDR_X86
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return Simd::generic;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    return Simd::avx512;
  return Simd::avx2;
#else
  return Simd::generic;
#endif
}

const char* name_of(Simd level) {
  return level == Simd::generic ? "generic" : level == Simd::avx2 ? "avx2" : "avx512";
}

Simd simd() {
  int level = chosen.load(std::memory_order_relaxed);
  if (level < 0) {
    level = static_cast<int>(detect());
    chosen.store(level, std::memory_order_relaxed);
  }
  return static_cast<Simd>(level);
}

void set_simd(Simd level) {
  if (level > best_simd())
    throw std::invalid_argument(std::string("this processor has no ") + name_of(level) + ", only " + name_of(best_simd()));
  chosen.store(static_cast<int>(level), std::memory_order_relaxed);
}

Scorer::Scorer(const Rows& rows, const Columns& columns)
    : rows_(rows), columns_(columns), dots_(dots_for(rows.dtype)) {
  for (std::int64_t j = 0; j < columns.count; ++j)
    if (j != 1 && columns.gate[j] < INFINITY) gated_.push_back(j);
  // Farther than this from its gate, the lanes decide as the exact sum would (docs/proofs.md, E3).
  margin_.resize(static_cast<std::size_t>(columns.count));
  for (std::int64_t j : gated_)
    margin_[j] = std::fabs(columns.scale[j]) * static_cast<double>(columns.dim + 8) * kUlp +
                 2.0 * kUlp * (std::fabs(columns.scale[j]) + std::fabs(columns.shift[j]));
}

void Scorer::values(std::int64_t row, double squared_norm, const std::int64_t* wanted, std::int64_t n,
                    double* out) const {
  const unsigned char* x = rows_.read(row);
  for (std::int64_t at = 0; at < n; at += kTile) {
    const int tile = static_cast<int>(std::min<std::int64_t>(kTile, n - at));
    const double* vectors[kTile];
    double dots[kTile];
    for (int t = 0; t < tile; ++t) vectors[t] = columns_.vector(wanted[at + t]);
    dots_(x, columns_.dim, vectors, tile, dots);
    for (int t = 0; t < tile; ++t) out[at + t] = value(row, x, squared_norm, wanted[at + t], dots[t]);
  }
}

bool Scorer::passes(std::int64_t row, double squared_norm) const {
  for (std::size_t at = 0; at < gated_.size(); at += kTile) {
    double v[kTile];
    const std::int64_t tile = std::min<std::int64_t>(kTile, static_cast<std::int64_t>(gated_.size() - at));
    values(row, squared_norm, gated_.data() + at, tile, v);
    for (std::int64_t t = 0; t < tile; ++t)
      if (v[t] >= columns_.gate[gated_[at + static_cast<std::size_t>(t)]]) return true;
  }
  return false;
}

double Scorer::value(std::int64_t row, const unsigned char* x, double squared_norm, std::int64_t j, double dot) const {
  if (j == 1) return columns_.scale[1] * (dot / std::sqrt(squared_norm)) + columns_.shift[1];
  const double norms = std::sqrt(squared_norm * columns_.squared_norms[j]);
  const double addend = columns_.addend(j, row);
  const auto of = [&](double d) {
    const double v = columns_.scale[j] * clamp_cosine(d / norms) + columns_.shift[j];
    return addend == 0.0 ? v : v + addend;
  };
  const double v = of(dot);
  const double gate = columns_.gate[j];
  if (std::isfinite(gate) && std::fabs(v - gate) <= margin_[j] + 2.0 * kUlp * (std::fabs(gate) + std::fabs(addend)))
    return of(exact_dot(rows_.dtype, x, columns_.vector(j), columns_.dim));
  return v;
}

void widen(DType dtype, const unsigned char* row, std::int64_t dim, double* out) {
#if CDR_X86
  if (simd() >= Simd::avx2) {
    switch (dtype) {
      case DType::f16: return widen_avx2(reinterpret_cast<const std::uint16_t*>(row), dim, out);
      case DType::f32: return widen_avx2(reinterpret_cast<const float*>(row), dim, out);
      default: break;
    }
  }
#endif
  switch (dtype) {
    case DType::f16: return widen_generic(reinterpret_cast<const std::uint16_t*>(row), dim, out);
    case DType::f32: return widen_generic(reinterpret_cast<const float*>(row), dim, out);
    default: return widen_generic(reinterpret_cast<const double*>(row), dim, out);
  }
}

void check_rows(const Rows& rows, int safe_exponent, double* squared_norms, std::uint8_t* flags) {
  const double smallest = std::ldexp(1.0, -safe_exponent), largest = std::ldexp(1.0, safe_exponent);
  switch (rows.dtype) {
    case DType::f16: return check_rows_of<std::uint16_t>(rows, smallest, largest, squared_norms, flags);
    case DType::f32: return check_rows_of<float>(rows, smallest, largest, squared_norms, flags);
    default: return check_rows_of<double>(rows, smallest, largest, squared_norms, flags);
  }
}

std::vector<std::int64_t> gate_rows(const Rows& rows, const double* squared_norms, const std::int64_t* index,
                                    std::int64_t candidates, const std::uint8_t* alive, const Columns& columns) {
  const Scorer scorer(rows, columns);
  bool open = false;  // a gate of minus infinity lets every row pass
  for (std::int64_t j : scorer.gated()) open |= columns.gate[j] == -INFINITY;
  std::vector<std::vector<std::int64_t>> found(blocks_of(candidates));
  parallel_for(found.size(), [&](std::size_t block) {
    const std::int64_t end = std::min(candidates, static_cast<std::int64_t>(block + 1) * kBlock);
    for (std::int64_t at = static_cast<std::int64_t>(block) * kBlock; at < end; ++at) {
      const std::int64_t row = index ? index[at] : at;
      if (index && !open && at + kAhead < end) fetch(rows, index[at + kAhead]);
      if (alive && !alive[row]) continue;
      if (open || scorer.passes(row, squared_norms[row])) found[block].push_back(at);
    }
  });
  std::size_t total = 0;
  for (const auto& f : found) total += f.size();
  std::vector<std::int64_t> out;
  out.reserve(total);
  for (const auto& f : found) out.insert(out.end(), f.begin(), f.end());
  return out;
}

void column_values(const Rows& rows, const double* squared_norms, const std::int64_t* index, std::int64_t candidates,
                   const Columns& columns, double* out) {
  const Scorer scorer(rows, columns);
  std::vector<std::int64_t> wanted;
  for (std::int64_t j = 0; j < columns.count; ++j)
    if (j != 1) wanted.push_back(j);
  const std::int64_t width = static_cast<std::int64_t>(wanted.size());
  parallel_for(blocks_of(candidates), [&](std::size_t block) {
    const std::int64_t end = std::min(candidates, static_cast<std::int64_t>(block + 1) * kBlock);
    for (std::int64_t at = static_cast<std::int64_t>(block) * kBlock; at < end; ++at) {
      const std::int64_t row = index ? index[at] : at;
      if (index && at + kAhead < end) fetch(rows, index[at + kAhead]);
      scorer.values(row, squared_norms[row], wanted.data(), width, out + at * width);
    }
  });
}

void score_rows(const Rows& rows, const double* squared_norms, const std::int64_t* index, std::int64_t candidates,
                const Columns& columns, const Factors& factors, const Limits& limits, const Scores& out) {
  const Scorer scorer(rows, columns);
  std::vector<std::int64_t> wanted;
  for (std::int64_t j = 0; j < columns.count; ++j)
    if (j == 0 || (j == 1 ? columns.has_coverage : columns.scores(j))) wanted.push_back(j);
  const std::size_t first_residual = columns.has_coverage ? 2 : 1;
  parallel_for(blocks_of(candidates), [&](std::size_t block) {
    std::vector<double> v(wanted.size());
    const std::int64_t end = std::min(candidates, static_cast<std::int64_t>(block + 1) * kBlock);
    for (std::int64_t at = static_cast<std::int64_t>(block) * kBlock; at < end; ++at) {
      const std::int64_t row = index ? index[at] : at;
      if (index && at + kAhead < end) fetch(rows, index[at + kAhead]);
      scorer.values(row, squared_norms[row], wanted.data(), static_cast<std::int64_t>(wanted.size()), v.data());
      const double relevance = v[0];
      const double coverage = columns.has_coverage ? v[1] : 0.0;
      double pull = 0.0;
      for (std::size_t j = first_residual; j < v.size(); ++j) {
        const double p = columns.weight[wanted[j]] * v[j];
        if (j == first_residual || p > pull) pull = p;
      }
      double effective = pull;
      if (columns.scores(0) && columns.weight[0] * relevance >= pull) effective = columns.weight[0] * relevance;
      double novelty = std::max(1.0 - std::min(coverage, limits.penalty_cap), limits.novelty_floor);
      if (columns.clamp_novelty) novelty = std::min(novelty, 1.0);
      const double importance = factors.importance ? factors.importance[at] : 1.0;
      const double multiplier = factors.multiplier ? factors.multiplier[at] : 1.0;
      const double overlap = factors.ngram_overlap ? static_cast<double>(factors.ngram_overlap[at]) : 0.0;
      const bool as_it_is = columns.factors_above_zero && !(effective > 0.0);
      const double base = as_it_is ? effective : importance * multiplier * effective * novelty;
      out.relevance[at] = relevance;
      out.coverage[at] = coverage;
      out.residual_pull[at] = pull;
      out.novelty[at] = novelty;
      out.score_without_guard[at] = base;
      out.score[at] = as_it_is ? base : base * (1.0 - std::min(limits.ngram_cap, overlap * limits.ngram_step));
    }
  });
}

}  // namespace cdr
