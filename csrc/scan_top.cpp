// top(): which rows may be among the k best, by bounds of the score that the codes give.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <vector>

#include "pool.h"
#include "scan_request.h"

namespace cdr {
namespace scan {
namespace {

// Rows in one unit of work, and rows that stay in the cache from one stage to the next.
constexpr std::int64_t kUnitTop = 512, kBlockTop = 64;

// out[c] += <codes, k_c> for c < count, k packed for it; out has room for a multiple of 4.
using Dots = void (*)(const std::int8_t* codes, std::int64_t width, const std::int16_t* k, std::int64_t count,
                      std::int32_t* out);

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

void dots_generic(const std::int8_t* codes, std::int64_t width, const std::int16_t* k, std::int64_t count,
                  std::int32_t* out) {
  for (std::int64_t g = 0; g < count; g += kGroup) {
    const std::int64_t n = std::min(kGroup, count - g);
    for (std::int64_t i = 0; i < width; i += 16)
      for (std::int64_t c = g; c < g + n; ++c, k += 16)
        for (std::int64_t l = 0; l < 16; ++l) out[c] += static_cast<std::int32_t>(codes[i + l]) * k[l];
  }
}

#if CDR_X86
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
#endif

Dots dots() {
#if CDR_X86
  if (fast()) return dots_avx2;
#endif
  return dots_generic;
}

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

// The computed score lies in here: the operations of score_rows() in the same order (docs/proofs.md, S14).
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

}  // namespace scan
}  // namespace cdr
