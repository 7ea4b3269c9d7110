// likely(): of rows that a scan found, with bounds of their relevance, those that may be among the k best.
#include <algorithm>
#include <functional>
#include <vector>

#include "pool.h"
#include "scan.h"

namespace cdr {
namespace scan {

std::vector<Likely> likely(const std::vector<Bounded>& all, const std::uint8_t* alive, const double* importance,
                           const double* multiplier, std::int64_t k) {
  std::vector<Likely> out(all.size());
  parallel_for(all.size(), [&](std::size_t s) {
    const Bounded& found = all[s];
    Likely& to = out[s];
    const auto strength = [&](std::int64_t row) {
      return multiplier ? importance[row] * multiplier[row] : importance[row];
    };
    const std::size_t most = static_cast<std::size_t>(k);
    std::vector<double> best;  // the k largest lower bounds, the smallest first
    for (std::int64_t i = 0; i < found.n; ++i) {
      const std::int64_t row = found.rows[i];
      if (!alive[row]) continue;
      ++to.living;
      const double low = strength(row) * static_cast<double>(std::max(found.low[i], 0.0f));
      if (best.size() == most && (most == 0 || !(low > best.front()))) continue;
      if (best.size() == most) {
        std::pop_heap(best.begin(), best.end(), std::greater<double>());
        best.pop_back();
      }
      best.push_back(low);
      std::push_heap(best.begin(), best.end(), std::greater<double>());
    }
    const bool all_of_them = to.living <= k;
    for (std::int64_t i = 0; k > 0 && i < found.n; ++i) {
      const std::int64_t row = found.rows[i];
      if (!alive[row]) continue;
      const double high = strength(row) * static_cast<double>(std::max(found.high[i], 0.0f));
      if (all_of_them || !(high < best.front())) to.positions.push_back(i);
    }
  });
  return out;
}

}  // namespace scan
}  // namespace cdr
