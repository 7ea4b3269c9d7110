#include "exact.h"

#include <cmath>

namespace cdr {

void ExactSum::add(double x) {
  std::size_t kept = 0;
  for (std::size_t j = 0; j < n_; ++j) {
    double y = partials_[j];
    if (std::fabs(x) < std::fabs(y)) {
      const double t = x;
      x = y;
      y = t;
    }
    const double hi = x + y;
    const double lo = y - (hi - x);
    if (lo != 0.0) partials_[kept++] = lo;
    x = hi;
  }
  partials_[kept++] = x;
  n_ = kept;
}

double ExactSum::value() const {
  if (n_ == 0) return 0.0;
  std::size_t i = n_ - 1;
  double hi = partials_[i], lo = 0.0;
  while (i > 0) {
    const double x = hi;
    const double y = partials_[--i];
    hi = x + y;
    lo = y - (hi - x);
    if (lo != 0.0) break;
  }
  // The rest decides a tie: when hi was rounded from exactly half way, the next partial's sign says
  // on which side the exact sum lies.
  if (i > 0 && ((lo < 0.0 && partials_[i - 1] < 0.0) || (lo > 0.0 && partials_[i - 1] > 0.0))) {
    const double y = lo * 2.0;
    const double x = hi + y;
    if (y == x - hi) hi = x;
  }
  return hi;
}

}  // namespace cdr
