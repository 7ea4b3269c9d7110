// threshold(): which rows pass a gate, one block of rows after the other, for one set of columns or for many.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pool.h"
#include "scan_many.h"
#include "scan_one.h"

namespace cdr {
namespace scan {
namespace {

constexpr std::int64_t kUnit = 8192;  // rows in one unit of work

}  // namespace

std::vector<Found> threshold(const Index& index, const Rows& rows, const double* squared_norms,
                             const std::uint8_t* alive, const std::vector<const Columns*>& columns, bool bounds) {
  std::vector<std::optional<Request>> made(columns.size());
  parallel_for(columns.size(), [&](std::size_t i) { made[i].emplace(index, rows, *columns[i]); });
  std::vector<Request> requests;
  requests.reserve(columns.size());
  std::size_t gates = 0, most_gates = 0;
  for (std::optional<Request>& request : made) {
    gates += request->gates.size();
    most_gates = std::max(most_gates, request->gates.size());
    requests.push_back(std::move(*request));
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

  const OneLoops one = one_loops();
  const std::size_t sets = requests.size();
  const bool together = gates >= kTogether;
  const std::unique_ptr<Many> many(together ? new Many(index, requests) : nullptr);
  const std::int64_t block = together ? kBlockMany : kBlock;
  std::vector<Found> parts(work.size() * sets);  // of each unit and set, what was not found together
  std::vector<Pieces> pieces(together ? work.size() : 0);
  parallel_for(work.size(), [&](std::size_t u) {
    const Unit& unit = work[u];
    std::vector<std::int32_t> dots1(together ? 0 : most_gates * static_cast<std::size_t>(kBlock));
    const std::unique_ptr<ManyScan> all(
        together ? new ManyScan(*many, rows, squared_norms, alive, bounds) : nullptr);
    for (std::int64_t at = 0; at < unit.rows; at += block) {
      const std::int64_t size = std::min(block, unit.rows - at);
      const Place place{unit.at.codes, unit.at.row + at};
      const bool together_here = together && place.codes;
      if (together_here) all->scan(place, size, unit.first + at, pieces[u]);
      for (std::size_t s = 0; s < sets; ++s) {
        const Request& request = requests[s];
        Found& found = parts[u * sets + s];
        if (place.codes && !request.open) {
          if (!together_here)
            scan_block(index, place, size, unit.first + at, request, rows, squared_norms, alive, one, bounds,
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
  parallel_for(sets, [&](std::size_t s) {
    // A unit has either parts or pieces of a set. add: called with all of them in the order of their rows.
    const auto each = [&](const auto& add) {
      for (std::size_t u = 0; u < work.size(); ++u) {
        const Found& part = parts[u * sets + s];
        add(part, 0, part.rows.size());
        for (std::size_t i = s; together && i < pieces[u].end.size(); i += sets)
          add(pieces[u], i ? pieces[u].end[i - 1] : 0, pieces[u].end[i]);
      }
    };
    std::size_t total = 0;
    each([&](const auto&, std::size_t from, std::size_t to) { total += to - from; });
    out[s].rows.reserve(total);
    out[s].low.reserve(bounds ? total : 0);
    out[s].high.reserve(bounds ? total : 0);
    each([&](const auto& some, std::size_t from, std::size_t to) {
      const auto copy = [&](const auto& of, auto& all) {
        all.insert(all.end(), of.data() + from, of.data() + to);
      };
      copy(some.rows, out[s].rows);
      if (!bounds) return;
      copy(some.low, out[s].low);
      copy(some.high, out[s].high);
    });
  });
  return out;
}

}  // namespace scan
}  // namespace cdr
