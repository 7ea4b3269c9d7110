// The C++ half on its own: exact sums, scores, n-grams, the scan and the pool of threads. Built and run by run.sh.
//
//   test_core            everything
//   test_core pool ...   only the tests whose names begin so
//
// Prints what it ran, a digest of the bits of every score (equal on all machines), and "N passed, 0 failed".
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "exact.h"
#include "ngram.h"
#include "pool.h"
#include "rows.h"
#include "scan.h"
#include "score.h"

namespace {

struct Failure {
  std::string what;
};

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) throw Failure{std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition}; \
  } while (false)

template <class Error, class Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// splitmix64: the same numbers everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t x = (state_ += 0x9E3779B97F4A7C15u);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(high - low + 1));
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double centred() { return 2.0 * unit() - 1.0; }

 private:
  std::uint64_t state_;
};

class Digest {
 public:
  void add(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    value_ = (value_ ^ bits) * 0x100000001B3u;
    value_ ^= value_ >> 29;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325u;
};
Digest digest;

// The largest half below or equal to |x| with x's sign: any half will do, all that counts is which.
std::uint16_t to_half(double x) {
  const double a = std::min(std::fabs(x), 65504.0);
  int exponent;
  std::frexp(a, &exponent);
  std::uint16_t bits = 0;
  if (a >= 0x1p-14) {
    const int e = exponent - 1;
    bits = static_cast<std::uint16_t>(((e + 15) << 10) | static_cast<int>(std::ldexp(a, 10 - e) - 1024.0));
  } else {
    bits = static_cast<std::uint16_t>(a * 0x1p24);
  }
  return static_cast<std::uint16_t>(bits | (std::signbit(x) ? 0x8000 : 0));
}

double from_half(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double a = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -a : a;
}

// Rows in blocks of exactly their size, so that a sanitizer sees every byte read beyond them.
struct Matrix {
  cdr::Rows rows;
  std::vector<std::unique_ptr<unsigned char[]>> memory;
  std::vector<double> values;  // [N, D] as read back
  std::vector<double> squared_norms;
  std::vector<std::uint8_t> flags;

  Matrix(cdr::DType dtype, std::int64_t dim, const std::vector<std::int64_t>& blocks,
         const std::function<double()>& f) {
    rows.dtype = dtype;
    rows.dim = dim;
    for (const std::int64_t n : blocks) {
      const std::size_t count = static_cast<std::size_t>(n * dim), bytes = count * cdr::size_of(dtype);
      auto data = std::make_unique<unsigned char[]>(bytes);
      for (std::size_t i = 0; i < count; ++i) {
        const double x = f();
        if (dtype == cdr::DType::f16) {
          const std::uint16_t h = to_half(x);
          std::memcpy(data.get() + 2 * i, &h, 2);
          values.push_back(from_half(h));
        } else if (dtype == cdr::DType::f32) {
          const float s = static_cast<float>(x);
          std::memcpy(data.get() + 4 * i, &s, 4);
          values.push_back(s);
        } else {
          std::memcpy(data.get() + 8 * i, &x, 8);
          values.push_back(x);
        }
      }
      rows.blocks.push_back({data.get(), n});
      memory.push_back(std::move(data));
    }
    squared_norms.resize(static_cast<std::size_t>(rows.size()));
    flags.resize(squared_norms.size());
    cdr::check_rows(rows, 200, squared_norms.data(), flags.data());
  }

  const double* row(std::int64_t i) const { return values.data() + i * rows.dim; }
};

double exact_dot(const double* a, const double* b, std::int64_t n) {
  cdr::ExactSum sum;
  for (std::int64_t i = 0; i < n; ++i) sum.add(a[i] * b[i]);
  return sum.value();
}

// The sum as score.h describes it.
double lane_dot(const double* a, const double* b, std::int64_t n) {
  volatile double lanes[8] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    volatile double product = a[i] * b[i];
    lanes[i % 8] = lanes[i % 8] + product;
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

cdr::Columns make_columns(std::int64_t dim, std::int64_t residual, bool coverage, double gate, Random& random) {
  cdr::Columns c;
  c.dim = dim;
  c.lanes = (dim + 7) / 8 * 8;
  c.count = 2 + residual;
  c.vectors.assign(static_cast<std::size_t>(c.count * c.lanes), 0.0);
  for (std::int64_t j = 0; j < c.count; ++j) {
    double* v = c.vectors.data() + j * c.lanes;
    for (std::int64_t i = 0; i < dim; ++i) v[i] = j == 1 ? random.centred() / std::sqrt(double(dim)) : random.centred();
    c.squared_norms.push_back(exact_dot(v, v, dim));
  }
  const std::size_t count = static_cast<std::size_t>(c.count);
  c.scale.assign(count, 1.0);
  c.shift.assign(count, 0.0);
  c.weight.assign(count, 1.0);
  c.gate.assign(count, INFINITY);
  c.gate[0] = gate;
  c.has_coverage = coverage;
  return c;
}

struct Scored {
  std::vector<double> score, bare, relevance, coverage, pull, novelty;
  explicit Scored(std::size_t n) : score(n), bare(n), relevance(n), coverage(n), pull(n), novelty(n) {}
  cdr::Scores out() {
    return {score.data(), bare.data(), relevance.data(), coverage.data(), pull.data(), novelty.data()};
  }
  std::vector<double> all() const {
    std::vector<double> v;
    for (const auto* part : {&score, &bare, &relevance, &coverage, &pull, &novelty})
      v.insert(v.end(), part->begin(), part->end());
    return v;
  }
};

constexpr cdr::Limits kSpec{0.80, 0.20, 0.15, 0.80};

std::vector<double> score_all(const Matrix& m, const cdr::Columns& c, const cdr::Factors& factors = {}) {
  Scored s(m.squared_norms.size());
  cdr::score_rows(m.rows, m.squared_norms.data(), nullptr, m.rows.size(), c, factors, kSpec, s.out());
  return s.all();
}

bool equal_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

std::vector<cdr::Simd> levels() {
  std::vector<cdr::Simd> all;
  for (const cdr::Simd level : {cdr::Simd::generic, cdr::Simd::avx2, cdr::Simd::avx512})
    if (level <= cdr::best_simd()) all.push_back(level);
  return all;
}

constexpr cdr::DType kTypes[] = {cdr::DType::f16, cdr::DType::f32, cdr::DType::f64};

// exact

void exact_known_sums() {
  const auto sum = [](std::initializer_list<double> values) {
    cdr::ExactSum s;
    for (const double v : values) s.add(v);
    return s.value();
  };
  CHECK(sum({}) == 0.0);
  CHECK(sum({1e100, 1.0, -1e100}) == 1.0);
  CHECK(sum({1.0, 0x1p-53}) == 1.0);
  CHECK(sum({1.0, 0x1p-53, 0x1p-106}) == 1.0 + 0x1p-52);
  CHECK(sum({1.0, 0x1p-53, -0x1p-106}) == 1.0);
  CHECK(sum({1.0 + 0x1p-52, 0x1p-53}) == 1.0 + 0x1p-51);
  CHECK(sum({0x1p-1074, 0x1p1023, -0x1p1023}) == 0x1p-1074);
  CHECK(sum({0.1, 0.2, 0.3, -0.3, -0.2, -0.1}) == 0.0);
}

#if defined(__SIZEOF_INT128__)
void exact_equals_integers() {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    __int128 truth = 0;
    cdr::ExactSum sum;
    const int n = static_cast<int>(random.between(0, 60));
    for (int i = 0; i < n; ++i) {
      const std::int64_t v = random.between(-(1ll << 52), 1ll << 52);
      const int shift = static_cast<int>(random.between(0, 60));
      truth += static_cast<__int128>(v) * (static_cast<__int128>(1) << shift);
      sum.add(std::ldexp(static_cast<double>(v), shift));
    }
    CHECK(sum.value() == static_cast<double>(truth));
  }
}
#endif

void exact_is_free_of_order() {
  Random random(2);
  std::vector<double> values;
  for (int i = 0; i < 500; ++i) {
    const int exponent = static_cast<int>(random.between(-300, 300));
    values.push_back(std::ldexp(random.centred(), exponent));
  }
  cdr::ExactSum first;
  for (const double v : values) first.add(v);
  for (int round = 0; round < 20; ++round) {
    for (std::size_t i = values.size() - 1; i > 0; --i)
      std::swap(values[i], values[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(i)))]);
    cdr::ExactSum again;
    for (const double v : values) again.add(v);
    CHECK(same_bits(first.value(), again.value()));
  }
}

// score

void score_reads_every_half() {
  std::uint32_t next = 0;
  Matrix all(cdr::DType::f16, 8, {0x7C00 / 8}, [&] { return from_half(static_cast<std::uint16_t>(next++)); });
  CHECK(next == 0x7C00);
  for (std::int64_t i = 0; i < all.rows.size(); ++i)
    CHECK(same_bits(all.squared_norms[static_cast<std::size_t>(i)], exact_dot(all.row(i), all.row(i), 8)));
  Random random(3);
  const cdr::Columns c = make_columns(8, 2, true, -INFINITY, random);
  cdr::set_simd(cdr::Simd::generic);
  const std::vector<double> generic = score_all(all, c);
  for (const cdr::Simd level : levels()) {
    cdr::set_simd(level);
    CHECK(equal_bits(score_all(all, c), generic));
  }
  for (std::int64_t i = 0; i < all.rows.size(); ++i) {
    const double norm = std::sqrt(all.squared_norms[static_cast<std::size_t>(i)]);
    const double expected = lane_dot(all.row(i), c.vector(1), 8) / norm;
    CHECK(same_bits(generic[static_cast<std::size_t>(3 * all.rows.size() + i)], expected));
  }
}

void score_flags_bad_rows() {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> given{1,        2, 0,    0,   inf,     1, 1,        NAN, 0x1p201, 1,
                                  0x1p-201, 0, -0.0, 0.0, 0x1p200, 1, 0x1p-200, 0};
  std::size_t next = 0;
  const Matrix m(cdr::DType::f64, 2, {4, 0, 5}, [&] { return given[next++]; });
  const std::vector<std::uint8_t> expected{cdr::kRowOk,         cdr::kRowZero,       cdr::kRowNotFinite,
                                           cdr::kRowNotFinite,  cdr::kRowOutOfRange, cdr::kRowOutOfRange,
                                           cdr::kRowZero,       cdr::kRowOk,         cdr::kRowOk};
  CHECK(m.flags == expected);
  CHECK(m.squared_norms[0] == 5.0 && m.squared_norms[7] == 0x1p400);
}

void score_squared_norms_are_correctly_rounded() {
  Random random(4);
  for (int round = 0; round < 3000; ++round) {
    const std::int64_t dim = random.between(1, 70);
    const int spread = static_cast<int>(random.between(0, 60));
    const Matrix m(cdr::DType::f64, dim, {1}, [&] {
      const double x = static_cast<double>(random.between(1, 1ll << 53));
      return std::ldexp(x, -static_cast<int>(random.between(0, spread)));
    });
    CHECK(same_bits(m.squared_norms[0], exact_dot(m.row(0), m.row(0), dim)));
  }
}

void score_walks_the_lanes() {
  Random random(5);
  for (const cdr::DType dtype : kTypes) {
    for (std::int64_t dim = 1; dim <= 41; ++dim) {
      const std::int64_t residual = dim % 7;
      const Matrix m(dtype, dim, {5, 1, 3}, [&] { return random.centred(); });
      const cdr::Columns c = make_columns(dim, residual, dim % 2 == 0, -INFINITY, random);
      std::vector<double> importance, multiplier;
      std::vector<std::int32_t> overlap;
      for (int i = 0; i < 9; ++i) {
        importance.push_back(random.unit() * 3);
        multiplier.push_back(random.unit());
        overlap.push_back(static_cast<std::int32_t>(random.between(0, 8)));
      }
      const cdr::Factors factors{importance.data(), multiplier.data(), overlap.data()};
      for (const cdr::Simd level : levels()) {
        cdr::set_simd(level);
        const std::vector<double> found = score_all(m, c, factors);
        for (std::int64_t i = 0; i < 9; ++i) {
          const std::size_t at = static_cast<std::size_t>(i);
          const double norm = m.squared_norms[at];
          const auto cosine = [&](std::int64_t j) {
            const double dot = lane_dot(m.row(i), c.vector(j), dim);
            return std::clamp(dot / std::sqrt(norm * c.squared_norms[static_cast<std::size_t>(j)]), -1.0, 1.0);
          };
          const double relevance = cosine(0);
          const double coverage = c.has_coverage ? lane_dot(m.row(i), c.vector(1), dim) / std::sqrt(norm) : 0.0;
          double pull = residual ? -INFINITY : 0.0;
          for (std::int64_t j = 2; j < c.count; ++j) pull = std::max(pull, cosine(j));
          const double novelty = std::max(1.0 - std::min(coverage, 0.80), 0.20);
          const double bare = importance[at] * multiplier[at] * std::max(relevance, pull) * novelty;
          const double score = bare * (1.0 - std::min(0.80, overlap[at] * 0.15));
          const double expected[] = {score, bare, relevance, coverage, pull, novelty};
          for (std::size_t n = 0; n < 6; ++n) CHECK(same_bits(found[n * 9 + at], expected[n]));
        }
        if (level == cdr::Simd::generic)
          for (const double x : found) digest.add(x);
      }
    }
  }
}

void score_gates_as_the_exact_sum_does() {
  Random random(6);
  int at_the_gate = 0;
  for (int round = 0; round < 400; ++round) {
    const std::int64_t dim = random.between(1, 24);
    const bool whole = round % 2 == 0;
    const auto number = [&] { return whole ? static_cast<double>(random.between(-2, 2)) : random.centred(); };
    const Matrix m(kTypes[round % 3], dim, {30}, number);
    cdr::Columns c = make_columns(dim, 0, false, 0.0, random);
    for (std::int64_t i = 0; i < dim; ++i) c.vectors[static_cast<std::size_t>(i)] = number();
    c.vectors[0] = 1.0;
    c.squared_norms[0] = exact_dot(c.vector(0), c.vector(0), dim);
    std::vector<std::int64_t> index;
    std::vector<double> cosines(30, 0.0);
    for (std::int64_t i = 0; i < 30; ++i) {
      const std::size_t at = static_cast<std::size_t>(i);
      if (m.flags[at] != cdr::kRowOk) continue;
      index.push_back(i);
      cosines[at] = std::clamp(
          exact_dot(m.row(i), c.vector(0), dim) / std::sqrt(m.squared_norms[at] * c.squared_norms[0]), -1.0, 1.0);
    }
    if (index.empty()) continue;
    const double occurring = cosines[static_cast<std::size_t>(index[0])];
    const double above = std::nextafter(occurring, 2.0), below = std::nextafter(occurring, -2.0);
    for (const double gate : {occurring, above, below, 0.0, 1.0, -1.0}) {
      c.gate[0] = gate;
      std::vector<std::int64_t> expected;
      for (std::size_t i = 0; i < index.size(); ++i)
        if (cosines[static_cast<std::size_t>(index[i])] >= gate) expected.push_back(static_cast<std::int64_t>(i));
      for (const cdr::Simd level : levels()) {
        cdr::set_simd(level);
        CHECK(cdr::gate_rows(m.rows, m.squared_norms.data(), index.data(), static_cast<std::int64_t>(index.size()),
                             nullptr, c) == expected);
      }
    }
    at_the_gate += occurring != 0.0;
  }
  CHECK(at_the_gate > 300);
}

void score_values_of_scattered_rows() {
  Random random(11);
  for (const std::int64_t dim : {1, 24, 37}) {
    const Matrix m(cdr::DType::f32, dim, {300, 900}, [&] { return random.centred(); });
    const cdr::Columns c = make_columns(dim, 7, true, -INFINITY, random);
    std::vector<std::int64_t> index(700);  // more than one unit of work, its last rows at the end of a block of rows
    for (auto& i : index) i = random.between(0, 1199);
    index.back() = 1199;
    std::vector<double> expected;
    for (const std::int64_t i : index)
      for (std::int64_t j = 0; j < c.count; ++j) {
        if (j == 1) continue;
        const std::size_t column = static_cast<std::size_t>(j);
        const double norms = std::sqrt(m.squared_norms[static_cast<std::size_t>(i)] * c.squared_norms[column]);
        const double cosine = std::clamp(lane_dot(m.row(i), c.vector(j), dim) / norms, -1.0, 1.0);
        expected.push_back(c.scale[column] * cosine + c.shift[column]);
      }
    for (const cdr::Simd level : levels()) {
      cdr::set_simd(level);
      std::vector<double> values(expected.size());
      cdr::column_values(m.rows, m.squared_norms.data(), index.data(), 700, c, values.data());
      CHECK(values == expected);
    }
  }
}

void score_gates_by_any_column_and_by_what_is_alive() {
  Random random(7);
  const Matrix m(cdr::DType::f32, 11, {700, 800, 900}, [&] { return random.centred(); });
  cdr::Columns c = make_columns(11, 6, true, 0.4, random);
  c.gate[3] = 0.5;
  c.gate[7] = 0.3;
  c.scale[7] = -2.0;
  c.shift[7] = -0.5;
  c.gate[1] = -INFINITY;  // the coverage column is never a gate
  std::vector<std::uint8_t> alive(2400);
  for (auto& a : alive) a = random.unit() < 0.7;
  std::vector<std::int64_t> expected;
  for (std::int64_t i = 0; i < 2400; ++i) {
    const auto value = [&](std::int64_t j) {
      const std::size_t column = static_cast<std::size_t>(j);
      const double norms = std::sqrt(m.squared_norms[static_cast<std::size_t>(i)] * c.squared_norms[column]);
      return c.scale[column] * (lane_dot(m.row(i), c.vector(j), 11) / norms) + c.shift[column];
    };
    const bool passes = value(0) >= 0.4 || value(3) >= 0.5 || value(7) >= 0.3;
    if (passes && alive[static_cast<std::size_t>(i)]) expected.push_back(i);
  }
  CHECK(expected.size() > 100 && expected.size() < 1500);
  const auto found = [&] { return cdr::gate_rows(m.rows, m.squared_norms.data(), nullptr, 2400, alive.data(), c); };
  for (const cdr::Simd level : levels()) {
    for (const int threads : {1, 2, 7}) {
      cdr::set_simd(level);
      cdr::set_threads(threads);
      CHECK(found() == expected);
    }
  }
  c.gate[0] = -INFINITY;
  CHECK(found().size() == static_cast<std::size_t>(std::count(alive.begin(), alive.end(), 1)));
  c.gate.assign(c.gate.size(), INFINITY);
  CHECK(found().empty());
}

void score_is_equal_for_every_level_and_number_of_threads() {
  Random random(8);
  for (const cdr::DType dtype : kTypes) {
    const Matrix m(dtype, 37, {1000, 1, 3000}, [&] { return random.centred(); });
    const cdr::Columns c = make_columns(37, 9, true, 0.1, random);
    cdr::set_simd(cdr::Simd::generic);
    cdr::set_threads(1);
    const std::vector<double> expected = score_all(m, c);
    for (const double x : expected) digest.add(x);
    for (const cdr::Simd level : levels()) {
      for (const int threads : {1, 2, 7}) {
        cdr::set_simd(level);
        cdr::set_threads(threads);
        CHECK(equal_bits(score_all(m, c), expected));
        const Matrix again(dtype, 37, {1000, 1, 3000}, [&, at = std::size_t{0}]() mutable { return m.values[at++]; });
        CHECK(equal_bits(again.squared_norms, m.squared_norms));
      }
    }
  }
}

void score_of_nothing() {
  Random random(9);
  const cdr::Columns c = make_columns(5, 1, true, 0.5, random);
  const Matrix none(cdr::DType::f16, 5, {0}, [] { return 1.0; });
  CHECK(score_all(none, c).empty());
  CHECK(cdr::gate_rows(none.rows, none.squared_norms.data(), nullptr, 0, nullptr, c).empty());
}

void score_identical_vectors_have_cosine_one() {
  Random random(10);
  for (int round = 0; round < 1000; ++round) {
    const std::int64_t dim = random.between(1, 50);
    const Matrix m(kTypes[round % 3], dim, {1}, [&] { return random.centred(); });
    if (m.flags[0] != cdr::kRowOk) continue;
    cdr::Columns c = make_columns(dim, 0, true, 1.0, random);
    std::copy_n(m.row(0), dim, c.vectors.begin());
    std::copy_n(m.row(0), dim, c.vectors.begin() + c.lanes);
    double* const unit = c.vectors.data() + c.lanes;
    for (std::int64_t i = 0; i < dim; ++i) unit[i] /= std::sqrt(m.squared_norms[0]);
    c.squared_norms[0] = m.squared_norms[0];
    for (const cdr::Simd level : levels()) {
      cdr::set_simd(level);
      CHECK(cdr::gate_rows(m.rows, m.squared_norms.data(), nullptr, 1, nullptr, c).size() == 1);
      const std::vector<double> found = score_all(m, c);
      CHECK(found[2] == 1.0 && found[5] == 0.20);
    }
  }
}

void score_refuses_a_level_that_is_not_there() {
  for (const cdr::Simd level : {cdr::Simd::generic, cdr::Simd::avx2, cdr::Simd::avx512}) {
    if (level <= cdr::best_simd()) {
      cdr::set_simd(level);
      CHECK(cdr::simd() == level);
    } else {
      CHECK(throws<std::invalid_argument>([&] { cdr::set_simd(level); }));
    }
  }
}

// ngram

namespace ng = cdr::ngram;

void ngram_sets_hold_what_was_put_in() {
  Random random(11);
  for (const std::uint64_t range : {std::uint64_t{50}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    ng::HashSet set;
    std::set<std::uint64_t> truth;
    CHECK(!set.contains(0) && set.size() == 0 && set.values().empty());
    for (int round = 0; round < 40; ++round) {
      std::vector<std::uint64_t> values;
      for (int i = 0; i < round; ++i) values.push_back(random.next() % range);
      set.insert(values.data(), values.size());
      truth.insert(values.begin(), values.end());
      CHECK(set.size() == truth.size());
      for (int i = 0; i < 100; ++i) {
        const std::uint64_t v = random.next() % range;
        CHECK(set.contains(v) == (truth.count(v) == 1));
      }
    }
    CHECK(set.values() == std::vector<std::uint64_t>(truth.begin(), truth.end()));
    for (const ng::Key key : {ng::Key{0, 0}, ng::Key{random.next(), random.next()}}) {
      ng::HashSet other(key);
      const std::vector<std::uint64_t> values = set.values();
      other.insert(values.data(), values.size());
      CHECK(other.values() == values && other.size() == set.size());
      for (const std::uint64_t value : values) CHECK(other.contains(value));
    }
  }
  ng::HashSet zero;
  const std::uint64_t nothing = 0;
  zero.insert(&nothing, 1);
  CHECK(zero.contains(0) && zero.size() == 1 && zero.values() == std::vector<std::uint64_t>{0});
}

// Ragged rows of token hashes in two blocks of exactly their size.
struct Tokens {
  ng::TokenRows rows;
  std::vector<std::vector<std::int64_t>> offsets;
  std::vector<std::unique_ptr<std::uint8_t[]>> memory;

  explicit Tokens(const std::vector<std::vector<std::uint64_t>>& texts, std::size_t first_block) {
    for (const bool tail : {false, true}) {
      const auto begin = texts.begin() + static_cast<std::ptrdiff_t>(tail ? first_block : 0);
      const auto end = tail ? texts.end() : texts.begin() + static_cast<std::ptrdiff_t>(first_block);
      std::vector<std::int64_t> at{0};
      for (auto text = begin; text != end; ++text) at.push_back(at.back() + static_cast<std::int64_t>(text->size()));
      auto bytes = std::make_unique<std::uint8_t[]>(static_cast<std::size_t>(at.back()) * ng::kTokenBytes);
      std::size_t next = 0;
      for (auto text = begin; text != end; ++text)
        for (const std::uint64_t token : *text)
          for (int i = 0; i < ng::kTokenBytes; ++i) bytes[next++] = static_cast<std::uint8_t>(token >> (8 * i));
      offsets.push_back(std::move(at));
      memory.push_back(std::move(bytes));
      const std::vector<std::int64_t>& kept = offsets.back();
      const auto count = static_cast<std::int64_t>(kept.size()) - 1;
      rows.blocks.push_back({nullptr, memory.back().get(), count, kept.back()});
    }
    for (std::size_t i = 0; i < offsets.size(); ++i) rows.blocks[i].offsets = offsets[i].data();
  }
};

struct Ngrams {
  std::vector<std::int64_t> offsets;
  std::vector<std::uint64_t> values;

  Ngrams(const ng::TokenRows& rows, int n) : offsets(static_cast<std::size_t>(rows.size()) + 1) {
    ng::ngram_offsets(rows, n, offsets.data());
    values.resize(static_cast<std::size_t>(offsets.back()));
    ng::ngrams(rows, n, offsets.data(), values.data());
  }
  std::vector<std::uint64_t> row(std::size_t i) const {
    return {values.begin() + offsets[i], values.begin() + offsets[i + 1]};
  }
};

std::vector<std::uint64_t> some_tokens(Random& random, std::int64_t count, std::uint64_t range) {
  std::vector<std::uint64_t> tokens(static_cast<std::size_t>(count));
  for (auto& t : tokens) t = random.next() % range;
  return tokens;
}

constexpr std::uint64_t kAnyToken = std::uint64_t{1} << ng::kTokenBits;

void ngram_hashes_do_not_depend_on_where_they_stand() {
  Random random(12);
  std::vector<std::vector<std::uint64_t>> texts;
  for (const std::int64_t count : {120, 0, 5, 175, 6, 1}) texts.push_back(some_tokens(random, count, kAnyToken));
  const Tokens tokens(texts, 4);
  for (const int n : {1, 2, 6, ng::kMaxN}) {
    const Ngrams all(tokens.rows, n);
    std::set<std::uint64_t> distinct(all.values.begin(), all.values.end());
    CHECK(distinct.size() == all.values.size());
    for (std::size_t row = 0; row < texts.size(); ++row) {
      const std::vector<std::uint64_t> found = all.row(row);
      CHECK(static_cast<std::int64_t>(found.size()) ==
            std::max<std::int64_t>(0, static_cast<std::int64_t>(texts[row].size()) - n + 1));
      for (std::size_t i = 0; i < found.size(); ++i) {
        const auto from = texts[row].begin() + static_cast<std::ptrdiff_t>(i);
        const Ngrams one(Tokens({{from, from + n}}, i % 2).rows, n);
        CHECK(one.values == std::vector<std::uint64_t>{found[i]});
      }
    }
  }
}

void ngram_overlap_counts_distinct_matches() {
  Random random(13);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<std::uint64_t>> texts;
    for (int row = 0; row < 5; ++row) texts.push_back(some_tokens(random, random.between(0, 60), 3));
    const Tokens tokens(texts, static_cast<std::size_t>(random.between(0, 5)));
    const Ngrams all(tokens.rows, 4);
    ng::HashSet set;
    std::set<std::uint64_t> listed;
    for (std::size_t i = 0; i < all.values.size(); i += 7) {
      set.insert(&all.values[i], 1);
      listed.insert(all.values[i]);
    }
    std::vector<std::int32_t> expected;
    for (std::size_t row = 0; row < texts.size(); ++row) {
      std::set<std::uint64_t> matches;
      for (const std::uint64_t value : all.row(row))
        if (listed.count(value)) matches.insert(value);
      expected.push_back(static_cast<std::int32_t>(matches.size()));
    }
    std::int32_t found[5];
    ng::overlap(set, tokens.rows, nullptr, 5, 4, found);
    CHECK(std::equal(expected.begin(), expected.end(), found));
    const std::int64_t index[] = {4, 0, 2, 2};
    ng::overlap(set, tokens.rows, index, 4, 4, found);
    for (std::size_t i = 0; i < 4; ++i) CHECK(found[i] == expected[static_cast<std::size_t>(index[i])]);
  }
}

void ngram_overlap_is_equal_for_every_number_of_threads() {
  Random random(15);
  std::vector<std::vector<std::uint64_t>> texts;
  for (int row = 0; row < 5000; ++row) texts.push_back(some_tokens(random, random.between(0, 20), 4));
  const Tokens tokens(texts, 3000);
  const Ngrams all(tokens.rows, 6);
  ng::HashSet set;
  for (std::size_t i = 0; i < all.values.size(); i += 50) set.insert(&all.values[i], 1);
  std::vector<std::int32_t> first(texts.size()), again(texts.size());
  cdr::set_threads(1);
  ng::overlap(set, tokens.rows, nullptr, texts.size(), 6, first.data());
  for (const int threads : {2, 7}) {
    cdr::set_threads(threads);
    ng::overlap(set, tokens.rows, nullptr, texts.size(), 6, again.data());
    CHECK(first == again);
  }
}

void ngram_rows_are_taken_as_they_are() {
  Random random(16);
  std::vector<std::vector<std::uint64_t>> texts;
  for (const std::int64_t count : {3, 0, 40, 7}) texts.push_back(some_tokens(random, count, kAnyToken));
  const Tokens tokens(texts, 2);
  const std::int64_t index[] = {3, 2, 1, 2};
  std::int64_t offsets[5];
  ng::take_offsets(tokens.rows, index, 4, offsets);
  const std::int64_t expected[] = {0, 7, 47, 47, 87};
  CHECK(std::equal(offsets, offsets + 5, expected));
  const auto bytes = std::make_unique<std::uint8_t[]>(87 * ng::kTokenBytes);
  ng::take_tokens(tokens.rows, index, 4, offsets, bytes.get());
  for (std::size_t i = 0; i < 4; ++i) {
    const ng::TokenRow row = tokens.rows.at(index[i]);
    CHECK(row.count == offsets[i + 1] - offsets[i]);
    if (row.count == 0) continue;
    CHECK(std::memcmp(bytes.get() + offsets[i] * ng::kTokenBytes, row.tokens,
                      static_cast<std::size_t>(row.count) * ng::kTokenBytes) == 0);
  }
}

void ngram_texts_fall_into_tokens() {
  const std::vector<std::string_view> texts{"Kube-proxy, ROUTES ", "", "-- !", " x9!caf\xC3\xA9"};
  const std::vector<std::string_view> expected{"kube", "proxy", "routes", "x9", "caf\xC3\xA9"};
  std::int64_t offsets[5];
  ng::count_tokens(texts.data(), texts.size(), offsets);
  const std::int64_t counts[] = {0, 3, 3, 3, 5};
  CHECK(std::equal(offsets, offsets + 5, counts));
  const ng::Key key{7, 9};
  const std::size_t bytes = expected.size() * ng::kTokenBytes;
  const auto by_text = std::make_unique<std::uint8_t[]>(bytes), by_token = std::make_unique<std::uint8_t[]>(bytes);
  ng::hash_texts(texts.data(), texts.size(), key, offsets, by_text.get());
  ng::hash_tokens(expected.data(), expected.size(), key, by_token.get());
  CHECK(std::memcmp(by_text.get(), by_token.get(), bytes) == 0);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    std::uint64_t value = 0;
    for (int b = 0; b < ng::kTokenBytes; ++b) value |= std::uint64_t{by_text[i * ng::kTokenBytes + b]} << (8 * b);
    CHECK(value == ng::sip_hash(expected[i], key) % kAnyToken);
    CHECK(value != ng::sip_hash(expected[i], {8, 9}) % kAnyToken);
  }
  std::set<std::uint64_t> lengths;  // also words of 8 and 16 bytes, where the hash takes another turn
  for (std::size_t n = 0; n < 40; ++n) lengths.insert(ng::sip_hash(std::string(n, 'a'), key));
  CHECK(lengths.size() == 40);
}

void ngram_damaged_offsets_are_found() {
  const std::uint8_t bytes[5 * ng::kTokenBytes] = {};
  for (const std::vector<std::int64_t>& offsets :
       {std::vector<std::int64_t>{0, 6}, {-1, 2}, {3, 2}, {0, std::int64_t{1} << 62}}) {
    const ng::TokenRows rows{{{offsets.data(), bytes, 1, 5}}};
    CHECK(throws<std::invalid_argument>([&] { rows.at(0); }));
    std::int32_t out;
    ng::HashSet set;
    const std::uint64_t value = 1;
    set.insert(&value, 1);
    CHECK(throws<std::invalid_argument>([&] { ng::overlap(set, rows, nullptr, 1, 1, &out); }));
  }
}

// scan

namespace sc = cdr::scan;

// Codes of consecutive rows, in memory of exactly their size, by any matrix.
struct Coded {
  std::vector<float> matrix, mean, weight, numbers;
  std::unique_ptr<std::int8_t[]> blocks[sc::kBlocks];
  sc::Index index;

  Coded(const Matrix& m, std::int64_t rows, Random& random) {
    const std::int64_t dim = m.rows.dim;
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    const double spread = 1.0 / std::sqrt(double(dim));
    for (std::int64_t i = 0; i < dim * dim; ++i) matrix.push_back(static_cast<float>(spread * random.centred()));
    for (std::int64_t i = 0; i < dim; ++i) {
      matrix[size(i * dim + i)] += 1.0f;
      mean.push_back(static_cast<float>(0.1 * random.centred()));
      weight.push_back(static_cast<float>(0.5 + random.unit()));
    }
    sc::Rotation rotation{dim, matrix.data(), mean.data(), weight.data()};
    rotation.measure();
    std::vector<float> centred(size(rows * dim)), rotated(size(rows * dim), 0.0f);
    std::vector<double> decoded(size(rows * dim)), rebuilt(size(rows * dim), 0.0);
    numbers.resize(size(rows * sc::kNumbers));
    std::int8_t* to[sc::kBlocks];
    for (int b = 0; b < sc::kBlocks; ++b) {
      blocks[b] = std::make_unique<std::int8_t[]>(size(rows * sc::block_width(dim, b)));
      to[b] = blocks[b].get();
    }
    sc::center(m.rows, m.squared_norms.data(), 0, rows, rotation, centred.data());
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < dim; ++j)
        for (std::int64_t k = 0; k < dim; ++k)
          rotated[size(i * dim + k)] += centred[size(i * dim + j)] * matrix[size(j * dim + k)];
    const double alpha = sc::encode(rotated.data(), rows, rotation, to, numbers.data(), decoded.data());
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < dim; ++j)
        for (std::int64_t k = 0; k < dim; ++k)
          rebuilt[size(i * dim + j)] += decoded[size(i * dim + k)] * static_cast<double>(matrix[size(j * dim + k)]);
    sc::measure(m.rows, m.squared_norms.data(), 0, rows, rotation, alpha, rebuilt.data(), numbers.data());
    index.rotation = rotation;
    index.codes.push_back({rows, {to[0], to[1], to[2]}, numbers.data()});
    index.alpha = alpha;
  }
};

void scan_says_what_may_be_best() {
  Random random(23);
  for (const std::int64_t n : {0, 1, 40, 300, 700}) {
    std::vector<std::int64_t> rows;
    std::vector<float> low, high;
    std::vector<double> exact, importance(static_cast<std::size_t>(3 * n)), multiplier(importance.size());
    std::vector<std::uint8_t> alive(importance.size());
    for (std::size_t i = 0; i < importance.size(); ++i) {
      importance[i] = n == 300 ? 1.0 : random.unit() < 0.1 ? 0.0 : random.unit();  // once all the same
      multiplier[i] = random.unit();
      alive[i] = random.unit() < 0.8;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const double relevance = std::round(20.0 * random.centred()) / 20.0;  // with ties, some below zero
      rows.push_back(3 * i + 1);
      exact.push_back(relevance);
      low.push_back(static_cast<float>(relevance - 0.02 * random.unit()));
      high.push_back(static_cast<float>(relevance + 0.02 * random.unit()));
    }
    for (const bool factors : {false, true})
      for (const std::int64_t k : {0, 1, 7, 600}) {
        // Alone, and among so many that what all of them need is looked at once.
        std::vector<sc::Bounded> sets{{rows.data(), low.data(), high.data(), n}, {nullptr, nullptr, nullptr, 0}};
        const std::int64_t size = static_cast<std::int64_t>(importance.size());
        const double* other = factors ? multiplier.data() : nullptr;
        const auto found = sc::likely(sets, size, alive.data(), importance.data(), other, k);
        CHECK(found.size() == 2 && found[1].living == 0 && found[1].positions.empty());
        sets.insert(sets.end(), 20, sets[0]);
        for (const sc::Likely& each : sc::likely(sets, size, alive.data(), importance.data(), other, k))
          CHECK(each.living == 0 || (each.living == found[0].living && each.positions == found[0].positions));
        std::vector<double> scores;
        const auto score = [&](std::int64_t i) {
          const std::size_t row = static_cast<std::size_t>(rows[static_cast<std::size_t>(i)]);
          const double strength = factors ? importance[row] * multiplier[row] : importance[row];
          return strength * std::max(exact[static_cast<std::size_t>(i)], 0.0);
        };
        for (std::int64_t i = 0; i < n; ++i)
          if (alive[static_cast<std::size_t>(rows[static_cast<std::size_t>(i)])]) scores.push_back(score(i));
        CHECK(found[0].living == static_cast<std::int64_t>(scores.size()));
        std::sort(scores.rbegin(), scores.rend());
        const std::vector<std::int64_t>& kept = found[0].positions;
        CHECK(std::is_sorted(kept.begin(), kept.end()));
        for (const std::int64_t i : kept) CHECK(alive[static_cast<std::size_t>(rows[static_cast<std::size_t>(i)])]);
        if (k == 0 || scores.empty()) {
          CHECK(kept.empty());
          continue;
        }
        const double least = scores[std::min(scores.size(), static_cast<std::size_t>(k)) - 1];
        for (std::int64_t i = 0; i < n; ++i) {
          const bool lives = alive[static_cast<std::size_t>(rows[static_cast<std::size_t>(i)])];
          if (lives && score(i) >= least) CHECK(std::binary_search(kept.begin(), kept.end(), i));
        }
        if (n == 700 && k == 1) CHECK(kept.size() < 100);
      }
  }
}

void scan_finds_what_the_exact_routine_finds() {
  Random random(17);
  int passing = 0;
  for (const std::int64_t dim : {1, 7, 32, 63, 64, 65, 100, 130, 200, 330}) {
    const cdr::DType dtype = kTypes[dim % 3];
    const std::int64_t n = 90, coded = 70;  // the last rows have no codes
    const Matrix m(dtype, dim, {40, 50}, [&] { return random.centred(); });
    const Coded codes(m, coded, random);
    cdr::Columns c = make_columns(dim, 3, true, 1.0 / std::sqrt(double(dim)), random);
    c.gate[3] = 0.5;
    std::vector<std::uint8_t> alive(static_cast<std::size_t>(n));
    for (auto& a : alive) a = random.unit() < 0.8;
    const auto expected = cdr::gate_rows(m.rows, m.squared_norms.data(), nullptr, n, alive.data(), c);
    passing += static_cast<int>(expected.size());
    const std::vector<double> all = score_all(m, c);
    for (const cdr::Simd level : levels()) {
      for (const int threads : {1, 3}) {
        cdr::set_simd(level);
        cdr::set_threads(threads);
        for (const std::size_t batch : {2, 6}) {  // one query at a time, and screened together
          const std::vector<const cdr::Columns*> asked(batch, &c);
          for (const bool bounds : {false, true}) {
            const auto found = sc::threshold(codes.index, m.rows, m.squared_norms.data(), alive.data(), asked, bounds);
            CHECK(found.size() == batch);
            for (const auto& each : found) CHECK(each.rows == expected);
          }
        }
        for (const std::int64_t k : {1, 5, 50}) {
          const auto kept = sc::top(codes.index, m.rows, m.squared_norms.data(), expected.data(),
                                    static_cast<std::int64_t>(expected.size()), nullptr, c, {}, kSpec, k);
          std::vector<double> scores;
          for (const std::int64_t row : expected) scores.push_back(all[static_cast<std::size_t>(row)]);
          std::sort(scores.rbegin(), scores.rend());
          const double least = scores.empty() ? 0.0 : scores[std::min(scores.size(), static_cast<std::size_t>(k)) - 1];
          for (std::size_t i = 0; i < expected.size(); ++i) {
            const bool best = all[static_cast<std::size_t>(expected[i])] >= least;
            CHECK(!best || std::binary_search(kept.begin(), kept.end(), static_cast<std::int64_t>(i)));
          }
        }
      }
    }
  }
  CHECK(passing > 100);
}

// pool

void pool_calls_every_block_once() {
  for (const int threads : {1, 2, 7, 16}) {
    cdr::set_threads(threads);
    CHECK(cdr::threads() == threads);
    for (const std::size_t blocks : {0, 1, 2, 3, 100, 1000}) {
      std::vector<std::atomic<int>> calls(blocks);
      cdr::parallel_for(blocks, [&](std::size_t block) { ++calls[block]; });
      for (const auto& c : calls) CHECK(c == 1);
    }
  }
  cdr::set_threads(0);
  CHECK(cdr::threads() >= 1);
  CHECK(throws<std::invalid_argument>([] { cdr::set_threads(-1); }));
}

void pool_writes_are_there_when_it_returns() {
  cdr::set_threads(4);
  for (int round = 0; round < 300; ++round) {
    std::vector<int> plain(64, 0);  // not atomic: a sanitizer sees it if the pool does not order the accesses
    cdr::parallel_for(plain.size(), [&](std::size_t block) { plain[block] += static_cast<int>(block); });
    cdr::parallel_for(plain.size(), [&](std::size_t block) { plain[block] += 1; });
    for (std::size_t i = 0; i < plain.size(); ++i) CHECK(plain[i] == static_cast<int>(i) + 1);
  }
}

void pool_nested_loops_run() {
  cdr::set_threads(4);
  std::atomic<int> calls{0};
  cdr::parallel_for(20, [&](std::size_t) {
    cdr::parallel_for(10, [&](std::size_t) {
      cdr::parallel_for(3, [&](std::size_t) { ++calls; });
    });
  });
  CHECK(calls == 600);
  cdr::parallel_for(50, [&](std::size_t) { ++calls; });
  CHECK(calls == 650);
}

void pool_exceptions_come_out() {
  for (const int threads : {1, 5}) {
    cdr::set_threads(threads);
    for (int round = 0; round < 50; ++round) {
      const auto failing = [&](std::size_t block) {
        if (block % 7 == 3) throw std::runtime_error("block " + std::to_string(block));
      };
      CHECK(throws<std::runtime_error>([&] { cdr::parallel_for(40, failing); }));
      std::atomic<int> calls{0};
      cdr::parallel_for(40, [&](std::size_t) { ++calls; });
      CHECK(calls == 40);
    }
  }
}

void pool_serves_many_callers() {
  cdr::set_threads(3);
  std::atomic<long> total{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&, caller] {
      while (!go) std::this_thread::yield();
      for (int round = 0; round < 100; ++round) {
        std::vector<long> mine(30, 0);
        cdr::parallel_for(mine.size(), [&](std::size_t block) { mine[block] = caller + round; });
        for (const long x : mine) total += x == caller + round;
      }
    });
  }
  go = true;
  for (std::thread& t : callers) t.join();
  CHECK(total == 8 * 100 * 30);
}

void pool_changes_size_under_its_callers() {
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (int n = 1; !stop; n = n % 6 + 1) {
      cdr::set_threads(n);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> callers;
  std::atomic<long> calls{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) cdr::parallel_for(20, [&](std::size_t) { ++calls; });
    });
  }
  for (std::thread& t : callers) t.join();
  stop = true;
  changer.join();
  CHECK(calls == 4 * 50 * 20);
}

void pool_scores_from_many_threads() {
  Random random(14);
  const Matrix m(cdr::DType::f32, 19, {5000}, [&] { return random.centred(); });
  const cdr::Columns c = make_columns(19, 3, true, 0.2, random);
  cdr::set_threads(3);
  const std::vector<double> expected = score_all(m, c);
  const auto passing = cdr::gate_rows(m.rows, m.squared_norms.data(), nullptr, 5000, nullptr, c);
  std::atomic<int> right{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        right += equal_bits(score_all(m, c), expected);
        right += cdr::gate_rows(m.rows, m.squared_norms.data(), nullptr, 5000, nullptr, c) == passing;
      }
    });
  }
  for (std::thread& t : callers) t.join();
  CHECK(right == 60);
}

#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)
void pool_a_forked_child_has_its_own() {
  cdr::set_threads(4);
  std::atomic<bool> stop{false};
  std::thread busy([&] {  // the pool is in use at the moment of the fork
    while (!stop) cdr::parallel_for(50, [](std::size_t) { std::this_thread::yield(); });
  });
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      std::atomic<int> calls{0};
      for (int again = 0; again < 3; ++again) cdr::parallel_for(100, [&](std::size_t) { ++calls; });
      _exit(calls == 300 ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  busy.join();
}
#endif

struct Test {
  const char* name;
  void (*run)();
};

#define TEST(name) {#name, name}
const Test kTests[] = {
    TEST(exact_known_sums),
#if defined(__SIZEOF_INT128__)
    TEST(exact_equals_integers),
#endif
    TEST(exact_is_free_of_order),
    TEST(score_reads_every_half),
    TEST(score_flags_bad_rows),
    TEST(score_squared_norms_are_correctly_rounded),
    TEST(score_walks_the_lanes),
    TEST(score_gates_as_the_exact_sum_does),
    TEST(score_values_of_scattered_rows),
    TEST(score_gates_by_any_column_and_by_what_is_alive),
    TEST(score_is_equal_for_every_level_and_number_of_threads),
    TEST(score_of_nothing),
    TEST(score_identical_vectors_have_cosine_one),
    TEST(score_refuses_a_level_that_is_not_there),
    TEST(ngram_sets_hold_what_was_put_in),
    TEST(ngram_hashes_do_not_depend_on_where_they_stand),
    TEST(ngram_overlap_counts_distinct_matches),
    TEST(ngram_overlap_is_equal_for_every_number_of_threads),
    TEST(ngram_rows_are_taken_as_they_are),
    TEST(ngram_texts_fall_into_tokens),
    TEST(ngram_damaged_offsets_are_found),
    TEST(scan_says_what_may_be_best),
    TEST(scan_finds_what_the_exact_routine_finds),
    TEST(pool_calls_every_block_once),
    TEST(pool_writes_are_there_when_it_returns),
    TEST(pool_nested_loops_run),
    TEST(pool_exceptions_come_out),
    TEST(pool_serves_many_callers),
    TEST(pool_changes_size_under_its_callers),
    TEST(pool_scores_from_many_threads),
#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)
    TEST(pool_a_forked_child_has_its_own),
#endif
};

bool wanted(const std::string& name, int argc, char** argv) {
  if (argc < 2) return true;
  for (int i = 1; i < argc; ++i)
    if (name.rfind(argv[i], 0) == 0) return true;
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const cdr::Simd level = cdr::simd();
  std::printf("levels:");
  for (const cdr::Simd each : levels()) std::printf(" %s", cdr::name_of(each));
  std::printf("\n");
  int passed = 0, failed = 0;
  for (const Test& test : kTests) {
    if (!wanted(test.name, argc, argv)) continue;
    std::printf("%s", test.name);
    std::fflush(stdout);
    std::string error;
    try {
      test.run();
    } catch (const Failure& failure) {
      error = failure.what;
    } catch (const std::exception& exception) {
      error = exception.what();
    }
    cdr::set_threads(0);
    cdr::set_simd(level);
    std::printf(" %s\n", error.empty() ? "ok" : ("FAILED " + error).c_str());
    (error.empty() ? passed : failed)++;
  }
  std::printf("digest: %016llx\n", static_cast<unsigned long long>(digest.value()));
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed || !passed ? 1 : 0;
}
