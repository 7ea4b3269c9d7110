// Correctly rounded sums of float64 numbers.
#pragma once

#include <cstddef>

namespace cdr {

// The float64 nearest to the exact sum of values[0..n), ties to even: what Python's math.fsum gives.
// The sum must stay finite. Shewchuk, "Adaptive Precision Floating-Point Arithmetic and Fast Robust
// Geometric Predicates" (1997): the sum is kept as non-overlapping partials.
class ExactSum {
 public:
  void add(double x);
  double value() const;

 private:
  // 2098 bits hold every finite float64 sum: 40 partials of 53 bits.
  static constexpr std::size_t kMost = 64;
  double partials_[kMost];
  std::size_t n_ = 0;
};

}  // namespace cdr
