// The only file that knows Python: shapes and types are checked here, the GIL is released round every
// loop, and docstrings say what comes in and goes out. Callers have validated values at their own door.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "exact.h"
#include "ngram.h"
#include "pool.h"
#include "rows.h"
#include "score.h"

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

void expect(bool ok, const std::string& message) {
  if (!ok) throw py::value_error(message);
}

// A tuple of C-ordered, aligned [N, D] arrays of one float type. The arrays must outlive the Rows.
cdr::Rows rows_from(const py::tuple& blocks) {
  cdr::Rows rows{cdr::DType::f32, 0, {}};
  expect(!blocks.empty(), "blocks: expected at least one array");
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (!py::isinstance<py::array>(blocks[b])) throw py::type_error("blocks: expected numpy arrays");
    const py::array a = py::reinterpret_borrow<py::array>(blocks[b]);
    const char kind = a.dtype().kind();
    const auto size = a.dtype().itemsize();
    expect(kind == 'f' && (size == 2 || size == 4 || size == 8) && a.dtype().byteorder() != '>',
           "blocks: expected native float16, float32 or float64");
    const cdr::DType dtype = size == 2 ? cdr::DType::f16 : size == 4 ? cdr::DType::f32 : cdr::DType::f64;
    expect(a.ndim() == 2 && (a.flags() & py::array::c_style), "blocks: expected C-ordered [N, D] arrays");
    expect(reinterpret_cast<std::uintptr_t>(a.data()) % static_cast<std::uintptr_t>(size) == 0,
           "blocks: expected aligned arrays");
    if (b == 0) {
      rows.dtype = dtype;
      rows.dim = a.shape(1);
      expect(rows.dim >= 1, "blocks: expected at least one dimension");
    }
    expect(dtype == rows.dtype && a.shape(1) == rows.dim, "blocks: expected one type and one dimension");
    rows.blocks.push_back({static_cast<const unsigned char*>(a.data()), a.shape(0)});
  }
  return rows;
}

template <class T>
const T* optional_data(const std::optional<Array<T>>& a, std::int64_t n, const char* name) {
  if (!a) return nullptr;
  expect(a->ndim() == 1 && a->shape(0) == n, std::string(name) + ": expected one entry per row");
  return a->data();
}

std::int64_t check_index(const std::optional<Array<std::int64_t>>& index, std::int64_t n) {
  if (!index) return n;
  expect(index->ndim() == 1, "index: expected one dimension");
  const std::int64_t m = index->shape(0);
  const std::int64_t* p = index->data();
  for (std::int64_t i = 0; i < m; ++i)
    if (p[i] < 0 || p[i] >= n) throw py::index_error("index: row " + std::to_string(p[i]) + " of " + std::to_string(n));
  return m;
}

cdr::Columns make_columns(const Array<double>& vectors, const Array<double>& squared_norms, const Array<double>& scale,
                          const Array<double>& shift, const Array<double>& weight, const Array<double>& gate,
                          bool has_coverage, bool clamp_novelty) {
  expect(vectors.ndim() == 2 && vectors.shape(0) >= 2, "vectors: expected [2 + R, D]");
  cdr::Columns c;
  c.count = vectors.shape(0);
  c.dim = vectors.shape(1);
  c.lanes = (c.dim + 7) / 8 * 8;
  c.vectors.assign(static_cast<std::size_t>(c.count * c.lanes), 0.0);
  for (std::int64_t j = 0; j < c.count; ++j)
    std::copy_n(vectors.data(j, 0), c.dim, c.vectors.begin() + j * c.lanes);
  const auto take = [&](const Array<double>& a, const char* name) {
    expect(a.ndim() == 1 && a.shape(0) == c.count, std::string(name) + ": expected [2 + R]");
    return std::vector<double>(a.data(), a.data() + c.count);
  };
  c.squared_norms = take(squared_norms, "squared_norms");
  c.scale = take(scale, "scale");
  c.shift = take(shift, "shift");
  c.weight = take(weight, "weight");
  c.gate = take(gate, "gate");
  c.has_coverage = has_coverage;
  c.clamp_novelty = clamp_novelty;
  return c;
}

py::tuple check_rows(const py::tuple& blocks, int safe_exponent) {
  const cdr::Rows rows = rows_from(blocks);
  Array<double> squared_norms(rows.size());
  Array<std::uint8_t> flags(rows.size());
  double* norms = squared_norms.mutable_data();
  std::uint8_t* f = flags.mutable_data();
  {
    py::gil_scoped_release release;
    cdr::check_rows(rows, safe_exponent, norms, f);
  }
  return py::make_tuple(squared_norms, flags);
}

Array<std::int64_t> gate_rows(const py::tuple& blocks, const Array<double>& squared_norms, const cdr::Columns& columns,
                              const std::optional<Array<std::int64_t>>& index,
                              const std::optional<Array<bool>>& alive) {
  const cdr::Rows rows = rows_from(blocks);
  const std::int64_t n = rows.size();
  expect(rows.dim == columns.dim, "columns: expected the dimension of the rows");
  expect(squared_norms.ndim() == 1 && squared_norms.shape(0) == n, "squared_norms: expected one entry per row");
  const std::int64_t m = check_index(index, n);
  const std::int64_t* which = index ? index->data() : nullptr;
  const std::uint8_t* live = reinterpret_cast<const std::uint8_t*>(optional_data(alive, n, "alive"));
  const double* norms = squared_norms.data();
  std::vector<std::int64_t> found;
  {
    py::gil_scoped_release release;
    found = cdr::gate_rows(rows, norms, which, m, live, columns);
  }
  return Array<std::int64_t>(static_cast<py::ssize_t>(found.size()), found.data());
}

py::tuple score_rows(const py::tuple& blocks, const Array<double>& squared_norms, const cdr::Columns& columns,
                     const std::optional<Array<std::int64_t>>& index, const std::optional<Array<double>>& importance,
                     const std::optional<Array<double>>& multiplier,
                     const std::optional<Array<std::int32_t>>& ngram_overlap, double penalty_cap, double novelty_floor,
                     double ngram_step, double ngram_cap) {
  const cdr::Rows rows = rows_from(blocks);
  const std::int64_t n = rows.size();
  expect(rows.dim == columns.dim, "columns: expected the dimension of the rows");
  expect(squared_norms.ndim() == 1 && squared_norms.shape(0) == n, "squared_norms: expected one entry per row");
  const std::int64_t m = check_index(index, n);
  const std::int64_t* which = index ? index->data() : nullptr;
  const cdr::Factors factors{optional_data(importance, m, "importance"), optional_data(multiplier, m, "multiplier"),
                             optional_data(ngram_overlap, m, "ngram_overlap")};
  const cdr::Limits limits{penalty_cap, novelty_floor, ngram_step, ngram_cap};
  Array<double> score(m), bare(m), relevance(m), coverage(m), pull(m), novelty(m);
  const cdr::Scores out{score.mutable_data(),    bare.mutable_data(), relevance.mutable_data(),
                        coverage.mutable_data(), pull.mutable_data(), novelty.mutable_data()};
  const double* norms = squared_norms.data();
  {
    py::gil_scoped_release release;
    cdr::score_rows(rows, norms, which, m, columns, factors, limits, out);
  }
  return py::make_tuple(score, bare, relevance, coverage, pull, novelty);
}

double exact_sum(const Array<double>& values) {
  cdr::ExactSum sum;
  for (py::ssize_t i = 0; i < values.size(); ++i) sum.add(values.data()[i]);
  return sum.value();
}

cdr::Simd simd_named(const std::string& name) {
  if (name == "generic") return cdr::Simd::generic;
  if (name == "avx2") return cdr::Simd::avx2;
  throw py::value_error("simd: expected generic or avx2, got " + name);
}

}  // namespace

namespace {
namespace ngram_binding {

using Offsets = py::array_t<std::int64_t, py::array::c_style>;
using Hashes = py::array_t<std::uint64_t, py::array::c_style>;

// The vector itself becomes the array's memory.
template <class T>
py::array_t<T> take(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>({static_cast<py::ssize_t>(kept->size())}, {static_cast<py::ssize_t>(sizeof(T))},
                        kept->data(), owner);
}

py::tuple take(cdr::ngram::Ragged&& ragged) {
  return py::make_tuple(take(std::move(ragged.offsets)), take(std::move(ragged.values)));
}

// The number of rows.
std::size_t check_rows(const Offsets& offsets, std::size_t end) {
  if (offsets.ndim() != 1 ||
      !cdr::ngram::valid_offsets(offsets.data(), static_cast<std::size_t>(offsets.size()),
                                 static_cast<std::int64_t>(end))) {
    throw std::invalid_argument("offsets: expected int64 [M + 1], ascending from 0 to " + std::to_string(end));
  }
  return static_cast<std::size_t>(offsets.size()) - 1;
}

std::size_t check_rows(const Offsets& offsets, const Hashes& hashes) {
  if (hashes.ndim() != 1) {
    throw std::invalid_argument("hashes: expected 1 dimension, got " + std::to_string(hashes.ndim()));
  }
  return check_rows(offsets, static_cast<std::size_t>(hashes.size()));
}

void check_n(int n) {
  if (n < 1 || n > cdr::ngram::kMaxN) {
    throw std::invalid_argument("n: expected 1 to " + std::to_string(cdr::ngram::kMaxN) + ", got " +
                                std::to_string(n));
  }
}

}  // namespace ngram_binding
}  // namespace

void bind_ngram(py::module_& m) {
  namespace nb = ngram_binding;
  namespace ng = cdr::ngram;

  m.def(
      "hash_texts",
      [](const py::bytes& blob, const nb::Offsets& offsets, std::uint64_t key) {
        const std::string_view bytes = blob;
        const std::size_t texts = nb::check_rows(offsets, bytes.size());
        const std::int64_t* at = offsets.data();
        ng::Ragged result;
        {
          py::gil_scoped_release release;
          result = ng::hash_texts(bytes.data(), at, texts, key);
        }
        return nb::take(std::move(result));
      },
      py::arg("blob"), py::arg("offsets").noconvert(), py::kw_only(), py::arg("key"),
      "Token hashes of texts in one blob, text i at blob[offsets[i]:offsets[i + 1]]: (offsets int64 [M + 1], "
      "hashes uint64). An ASCII text comes as it is, another as its folded tokens in UTF-8 parted by spaces.");

  m.def(
      "hash_tokens",
      [](const py::bytes& blob, const nb::Offsets& offsets, std::uint64_t key) {
        const std::string_view bytes = blob;
        const std::size_t tokens = nb::check_rows(offsets, bytes.size());
        const std::int64_t* at = offsets.data();
        std::vector<std::uint64_t> result;
        {
          py::gil_scoped_release release;
          result.resize(tokens);
          ng::hash_tokens(bytes.data(), at, tokens, key, result.data());
        }
        return nb::take(std::move(result));
      },
      py::arg("blob"), py::arg("offsets").noconvert(), py::kw_only(), py::arg("key"),
      "Hashes of tokens in one blob, token i at blob[offsets[i]:offsets[i + 1]]: uint64 [T].");

  m.def(
      "token_ngrams",
      [](const nb::Offsets& offsets, const nb::Hashes& tokens, int n) {
        nb::check_n(n);
        const std::size_t rows = nb::check_rows(offsets, tokens);
        const std::int64_t* at = offsets.data();
        const std::uint64_t* values = tokens.data();
        ng::Ragged result;
        {
          py::gil_scoped_release release;
          result = ng::ngrams(at, values, rows, n);
        }
        return nb::take(std::move(result));
      },
      py::arg("offsets").noconvert(), py::arg("tokens").noconvert(), py::arg("n"),
      "Hashes of the n-grams of each row of token hashes, in order, repeats kept: (offsets, hashes).");

  py::class_<ng::HashSet>(m, "HashSet",
                          "An immutable set of 64-bit hashes; union() makes a new one, so readers need no lock.")
      .def(py::init<>())
      .def("__len__", &ng::HashSet::size)
      .def_property_readonly("nbytes", &ng::HashSet::bytes)
      .def(
          "union",
          [](const ng::HashSet& self, const nb::Hashes& hashes) {
            if (hashes.ndim() != 1) {
              throw std::invalid_argument("hashes: expected 1 dimension, got " + std::to_string(hashes.ndim()));
            }
            const std::uint64_t* values = hashes.data();
            const auto count = static_cast<std::size_t>(hashes.size());
            py::gil_scoped_release release;
            ng::HashSet result = self;
            result.insert(values, count);
            return result;
          },
          py::arg("hashes").noconvert(), "A new set that also holds these hashes.")
      .def(
          "values",
          [](const ng::HashSet& self) {
            std::vector<std::uint64_t> result;
            {
              py::gil_scoped_release release;
              result = self.values();
            }
            return nb::take(std::move(result));
          },
          "All hashes, ascending: uint64 [len].")
      .def(
          "overlap",
          [](const ng::HashSet& self, const nb::Offsets& offsets, const nb::Hashes& hashes) {
            const std::size_t rows = nb::check_rows(offsets, hashes);
            const std::int64_t* at = offsets.data();
            const std::uint64_t* values = hashes.data();
            std::vector<std::int32_t> result;
            {
              py::gil_scoped_release release;
              result.resize(rows);
              ng::overlap(self, at, values, rows, result.data());
            }
            return nb::take(std::move(result));
          },
          py::arg("offsets").noconvert(), py::arg("hashes").noconvert(),
          "Number of distinct hashes of each row that are in the set: int32 [M].")
      .def(
          "overlap_tokens",
          [](const ng::HashSet& self, const nb::Offsets& offsets, const nb::Hashes& tokens, int n) {
            nb::check_n(n);
            const std::size_t rows = nb::check_rows(offsets, tokens);
            const std::int64_t* at = offsets.data();
            const std::uint64_t* values = tokens.data();
            std::vector<std::int32_t> result;
            {
              py::gil_scoped_release release;
              result.resize(rows);
              ng::overlap_tokens(self, at, values, rows, n, result.data());
            }
            return nb::take(std::move(result));
          },
          py::arg("offsets").noconvert(), py::arg("tokens").noconvert(), py::arg("n"),
          "overlap() over the n-grams of rows of token hashes: int32 [M].");
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled half of cdr_kernel. Every loop releases the GIL and runs on one pool of threads.";

  py::class_<cdr::Columns>(m, "Columns", "What one session asks of the rows; made by cdr_kernel.score.Columns.")
      .def(py::init(&make_columns), py::arg("vectors"), py::arg("squared_norms"), py::arg("scale"), py::arg("shift"),
           py::arg("weight"), py::arg("gate"), py::arg("has_coverage"), py::arg("clamp_novelty"))
      .def_readonly("squared_norms", &cdr::Columns::squared_norms, "Correctly rounded, [2 + R].");

  m.def("check_rows", &check_rows, py::arg("blocks"), py::arg("safe_exponent"),
        "Correctly rounded squared norms float64 [N] of the rows, and flags uint8 [N]: 0 fine, 1 not finite, "
        "2 all zeros, 3 largest magnitude outside 2**±safe_exponent.");
  m.def("gate_rows", &gate_rows, py::arg("blocks"), py::arg("squared_norms"), py::arg("columns"),
        py::arg("index") = py::none(), py::arg("alive") = py::none(),
        "Positions in index (None: rows) that are alive and pass a gate, int64 ascending. Exact.");
  m.def("score_rows", &score_rows, py::arg("blocks"), py::arg("squared_norms"), py::arg("columns"), py::arg("index"),
        py::arg("importance"), py::arg("multiplier"), py::arg("ngram_overlap"), py::arg("penalty_cap"),
        py::arg("novelty_floor"), py::arg("ngram_step"), py::arg("ngram_cap"),
        "(score, score_without_guard, relevance, coverage, residual_pull, novelty), float64 [M] each, of the rows of "
        "index, gated or not. The factors have one entry per row of index.");
  m.def("exact_sum", &exact_sum, py::arg("values"), "The correctly rounded sum of float64 values (math.fsum).");

  bind_ngram(m);

  m.def("threads", &cdr::threads, "Threads that a loop may use.");
  m.def("set_threads", &cdr::set_threads, py::arg("n"), "Fix the number of threads; 0 goes back to the default.");
  m.def("simd", [] { return cdr::simd() == cdr::Simd::avx2 ? "avx2" : "generic"; }, "The SIMD level in use.");
  m.def("set_simd", [](const std::string& name) { cdr::set_simd(simd_named(name)); }, py::arg("level"),
        "Choose generic or avx2; ValueError where the processor lacks it.");
  m.def("simd_levels", [] {
    return cdr::has_avx2() ? std::vector<std::string>{"generic", "avx2"} : std::vector<std::string>{"generic"};
  }, "The SIMD levels this processor can run.");
}
