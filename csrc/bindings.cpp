// The only file that knows Python: shapes and types are checked here, the GIL is released round every
// loop, and docstrings say what comes in and goes out. Callers have validated values at their own door.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "checked_file.h"
#include "exact.h"
#include "ngram.h"
#include "pool.h"
#include "rows.h"
#include "scan.h"
#include "score.h"

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

void expect(bool ok, const std::string& message) {
  if (!ok) throw py::value_error(message);
}

// The file that the bytes of an array are mapped from, while some of it is unchecked; null for any other array. A view
// of a mapped array is known too: NumPy keeps what owns its memory as its base.
cdr::CheckedFile* unchecked_file_of(const py::array& a) {
  py::object owner = py::reinterpret_borrow<py::object>(a);
  while (owner) {
    if (py::isinstance<py::array>(owner))
      owner = py::reinterpret_borrow<py::array>(owner).base();
    else if (PyMemoryView_Check(owner.ptr()))
      owner = py::reinterpret_borrow<py::object>(PyMemoryView_GET_BUFFER(owner.ptr())->obj);
    else
      break;
  }
  if (!owner || !py::isinstance<cdr::CheckedFile>(owner)) return nullptr;
  cdr::CheckedFile* file = owner.cast<cdr::CheckedFile*>();
  return file->verified() ? nullptr : file;
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
    rows.blocks.push_back({static_cast<const unsigned char*>(a.data()), a.shape(0), unchecked_file_of(a)});
  }
  return rows;
}

// The same with their squared norms, which it checks.
cdr::Rows rows_from(const py::tuple& blocks, const Array<double>& squared_norms) {
  cdr::Rows rows = rows_from(blocks);
  expect(squared_norms.ndim() == 1 && squared_norms.shape(0) == rows.size(),
         "squared_norms: expected one entry per row");
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
                          bool has_coverage, bool clamp_novelty, const std::optional<Array<bool>>& gate_only,
                          bool factors_above_zero, const std::optional<Array<std::int64_t>>& addend_starts,
                          const std::optional<Array<std::int64_t>>& addend_rows,
                          const std::optional<Array<double>>& addend_values) {
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
  c.factors_above_zero = factors_above_zero;
  c.gate_only.assign(static_cast<std::size_t>(c.count), 0);
  if (gate_only) {
    expect(gate_only->ndim() == 1 && gate_only->shape(0) == c.count, "gate_only: expected [2 + R]");
    std::copy_n(gate_only->data(), c.count, c.gate_only.begin());
  }
  if (addend_starts) {
    expect(addend_rows && addend_values && addend_starts->ndim() == 1 && addend_starts->shape(0) == c.count + 1,
           "addend_starts: expected [3 + R], with addend_rows and addend_values");
    const std::int64_t n = addend_rows->size(), *starts = addend_starts->data();
    expect(addend_values->size() == n && starts[0] == 0 && starts[c.count] == n && starts[1] == starts[2],
           "addend_starts: expected 0 up to the number of addends, with none for coverage");
    for (std::int64_t j = 0; j < c.count; ++j) {
      expect(starts[j] <= starts[j + 1] && starts[j + 1] <= n, "addend_starts: expected to ascend");
      for (std::int64_t i = starts[j] + 1; i < starts[j + 1]; ++i)
        expect(addend_rows->data()[i - 1] < addend_rows->data()[i], "addend_rows: expected to ascend in each column");
    }
    c.addend_starts.assign(starts, starts + c.count + 1);
    c.addend_rows.assign(addend_rows->data(), addend_rows->data() + n);
    c.addend_values.assign(addend_values->data(), addend_values->data() + n);
  }
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
  const cdr::Rows rows = rows_from(blocks, squared_norms);
  const std::int64_t n = rows.size();
  expect(rows.dim == columns.dim, "columns: expected the dimension of the rows");
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
  const cdr::Rows rows = rows_from(blocks, squared_norms);
  const std::int64_t n = rows.size();
  expect(rows.dim == columns.dim, "columns: expected the dimension of the rows");
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

Array<double> column_values(const py::tuple& blocks, const Array<double>& squared_norms, const cdr::Columns& columns,
                            const std::optional<Array<std::int64_t>>& index) {
  const cdr::Rows rows = rows_from(blocks, squared_norms);
  const std::int64_t n = rows.size();
  expect(rows.dim == columns.dim, "columns: expected the dimension of the rows");
  const std::int64_t m = check_index(index, n);
  const std::int64_t* which = index ? index->data() : nullptr;
  Array<double> out(std::vector<py::ssize_t>{m, columns.count - 1});
  double* values = out.mutable_data();
  const double* norms = squared_norms.data();
  {
    py::gil_scoped_release release;
    cdr::column_values(rows, norms, which, m, columns, values);
  }
  return out;
}

double exact_sum(const Array<double>& values) {
  cdr::ExactSum sum;
  for (py::ssize_t i = 0; i < values.size(); ++i) sum.add(values.data()[i]);
  return sum.value();
}

constexpr cdr::Simd kLevels[] = {cdr::Simd::generic, cdr::Simd::avx2, cdr::Simd::avx512};

cdr::Simd simd_named(const std::string& name) {
  for (const cdr::Simd level : kLevels)
    if (name == cdr::name_of(level)) return level;
  throw py::value_error("simd: expected generic, avx2 or avx512, got " + name);
}

}  // namespace

namespace {
namespace ngram_binding {

namespace ng = cdr::ngram;

// The vector itself becomes the array's memory.
template <class T>
py::array_t<T> take(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>({static_cast<py::ssize_t>(kept->size())}, {static_cast<py::ssize_t>(sizeof(T))},
                        kept->data(), owner);
}

// The bytes of ASCII str and of bytes objects, in place; the list must outlive them.
std::vector<std::string_view> views_of(const py::list& strings, const char* name) {
  std::vector<std::string_view> views;
  views.reserve(strings.size());
  for (const py::handle item : strings) {
    PyObject* object = item.ptr();
    if (PyUnicode_Check(object) && PyUnicode_IS_ASCII(object)) {
      views.emplace_back(static_cast<const char*>(PyUnicode_DATA(object)),
                         static_cast<std::size_t>(PyUnicode_GET_LENGTH(object)));
    } else if (PyBytes_Check(object)) {
      views.emplace_back(PyBytes_AS_STRING(object), static_cast<std::size_t>(PyBytes_GET_SIZE(object)));
    } else {
      throw py::type_error(std::string(name) + ": expected str of ASCII, or bytes");
    }
  }
  return views;
}

ng::Key key_from(const std::pair<std::uint64_t, std::uint64_t>& key, int bits) {
  expect(bits >= 1 && bits <= ng::kTokenBits, "bits: expected 1 to " + std::to_string(ng::kTokenBits));
  return {key.first, key.second, bits};
}

// A tuple of (offsets int64 [R + 1], tokens uint8 [kTokenBytes * T]). The arrays must outlive the TokenRows.
ng::TokenRows tokens_from(const py::tuple& blocks) {
  ng::TokenRows rows;
  expect(!blocks.empty(), "tokens: expected at least one block");
  for (const py::handle item : blocks) {
    expect(py::isinstance<py::tuple>(item) && py::len(item) == 2, "tokens: expected blocks of (offsets, tokens)");
    const py::tuple pair = py::reinterpret_borrow<py::tuple>(item);
    expect(py::isinstance<Array<std::int64_t>>(pair[0]) && py::isinstance<Array<std::uint8_t>>(pair[1]),
           "tokens: expected C-ordered int64 offsets and uint8 tokens");
    const auto offsets = py::reinterpret_borrow<Array<std::int64_t>>(pair[0]);
    const auto tokens = py::reinterpret_borrow<Array<std::uint8_t>>(pair[1]);
    expect(offsets.ndim() == 1 && offsets.shape(0) >= 1, "tokens: expected offsets [R + 1]");
    expect(reinterpret_cast<std::uintptr_t>(offsets.data()) % alignof(std::int64_t) == 0,
           "tokens: expected aligned offsets");
    expect(tokens.ndim() == 1 && tokens.shape(0) % ng::kTokenBytes == 0,
           "tokens: expected " + std::to_string(ng::kTokenBytes) + " bytes a token");
    rows.blocks.push_back(
        {offsets.data(), tokens.data(), offsets.shape(0) - 1, tokens.shape(0) / ng::kTokenBytes,
         unchecked_file_of(tokens)});
  }
  return rows;
}

void check_n(int n) {
  expect(n >= 1 && n <= ng::kMaxN, "n: expected 1 to " + std::to_string(ng::kMaxN) + ", got " + std::to_string(n));
}

const Array<std::uint64_t>& check_hashes(const Array<std::uint64_t>& hashes) {
  expect(hashes.ndim() == 1, "hashes: expected 1 dimension, got " + std::to_string(hashes.ndim()));
  return hashes;
}

}  // namespace ngram_binding
}  // namespace

namespace {
namespace checked_binding {

using cdr::CheckedFile;

std::vector<std::uint32_t> sums_from(const py::bytes& sums) {
  const std::string_view raw = sums;
  expect(raw.size() % 4 == 0, "sums: expected 4 bytes for each block");
  std::vector<std::uint32_t> out(raw.size() / 4);
  for (std::size_t i = 0; i < out.size(); ++i)  // big-endian, as they are printed
    for (std::size_t j = 0; j < 4; ++j) out[i] = out[i] << 8 | static_cast<unsigned char>(raw[4 * i + j]);
  return out;
}

py::bytes bytes_from(const std::vector<std::uint32_t>& sums) {
  std::string out;
  out.reserve(4 * sums.size());
  for (const std::uint32_t sum : sums)
    for (int j = 3; j >= 0; --j) out.push_back(static_cast<char>(sum >> (8 * j) & 255));
  return out;
}

py::tuple block_sums(const std::string& path, std::uint64_t block) {
  expect(block >= 1, "block: expected at least 1 byte");
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> sums;
  {
    py::gil_scoped_release release;
    sums = cdr::block_sums(path, block, &bytes);
  }
  return py::make_tuple(bytes, bytes_from(sums));
}

std::unique_ptr<CheckedFile> open(const std::string& path, std::uint64_t bytes, const py::bytes& sums,
                                  std::uint64_t block, bool mapped) {
  expect(block >= 1, "block: expected at least 1 byte");
  std::vector<std::uint32_t> each = sums_from(sums);
  py::gil_scoped_release release;
  return std::make_unique<CheckedFile>(path, bytes, std::move(each), block, mapped);
}

void check(CheckedFile& file, std::uint64_t start, const std::optional<std::uint64_t>& stop) {
  const std::uint64_t end = std::min(file.size(), stop.value_or(file.size()));
  if (file.verified() || start >= end) return;
  py::gil_scoped_release release;
  if (start == 0 && end == file.size())
    file.check_all();
  else
    file.check(start, end);
}

void check_spans(CheckedFile& file, const Array<std::int64_t>& starts, const Array<std::int64_t>& stops) {
  expect(starts.ndim() == 1 && stops.ndim() == 1 && starts.shape(0) == stops.shape(0),
         "starts, stops: expected as many of the one as of the other");
  const std::int64_t n = starts.shape(0), *from = starts.data(), *to = stops.data();
  const std::int64_t size = static_cast<std::int64_t>(file.size());
  py::gil_scoped_release release;
  for (std::int64_t i = 0; i < n; ++i) {
    if (from[i] < 0 || to[i] > size) throw std::invalid_argument("starts, stops: expected bytes of the file");
    if (from[i] < to[i]) file.check(static_cast<std::uint64_t>(from[i]), static_cast<std::uint64_t>(to[i]));
  }
}

// Rows of a mapped array, or all of it: for whoever reads it by NumPy.
void check_read(const py::array& a, const std::optional<Array<std::int64_t>>& rows) {
  CheckedFile* file = unchecked_file_of(a);
  if (!file || a.size() == 0) return;
  const bool whole = a.ndim() >= 1 && (a.flags() & py::array::c_style);
  expect(whole || !rows, "array: expected a C-ordered one");
  const auto* data = static_cast<const unsigned char*>(a.data());
  const auto bytes = static_cast<std::uint64_t>(a.nbytes());
  const std::int64_t n = rows ? a.shape(0) : 0, m = check_index(rows, n);
  const std::int64_t* which = rows ? rows->data() : nullptr;
  py::gil_scoped_release release;
  // Most of a file is looked at by all threads; what jumps about in memory counts as all of it.
  if (!which && (!whole || bytes >= file->size() / 2)) return file->check_all();
  if (!which) return file->check_at(data, bytes);
  const std::uint64_t each = bytes / static_cast<std::uint64_t>(n);
  for (std::int64_t i = 0; i < m; ++i) file->check_at(data + static_cast<std::uint64_t>(which[i]) * each, each);
}

}  // namespace checked_binding
}  // namespace

void bind_checked(py::module_& m) {
  namespace cb = checked_binding;
  using cdr::CheckedFile;

  // Errors of files, as Python has them.
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const cdr::Damage& damage) {
      const py::object type = py::module_::import("cdr_kernel.exceptions").attr("DamagedFileError");
      const py::object block = damage.block < 0 ? py::object(py::none()) : py::object(py::int_(damage.block));
      PyErr_SetObject(type.ptr(), type(damage.what(), damage.path, block).ptr());
    } catch (const cdr::ReadError& error) {
      errno = error.code;
      PyErr_SetFromErrnoWithFilename(PyExc_OSError, error.path.c_str());
    }
  });

  m.def("crc32c", [](const py::buffer& data, std::uint32_t crc, bool generic) {
    const py::buffer_info info = data.request();
    const std::size_t n = static_cast<std::size_t>(info.size * info.itemsize);
    py::gil_scoped_release release;
    return generic ? cdr::crc32c_generic(info.ptr, n, crc) : cdr::crc32c(info.ptr, n, crc);
  }, py::arg("data"), py::arg("crc") = 0, py::arg("generic") = false,
        "CRC-32C of the bytes of a contiguous buffer, going on from that of what comes before them. generic: by tables.");
  m.def("block_sums", &cb::block_sums, py::arg("path"), py::arg("block"),
        "(bytes of a file, the CRC-32C of each of its blocks as 4 big-endian bytes).");
  m.def("check_read", &cb::check_read, py::arg("array"), py::arg("rows") = py::none(),
        "Raises DamagedFileError unless these rows of an array (None: all of it) are as they were written, where it is "
        "mapped from a CheckedFile; nothing for any other array.");

  py::class_<CheckedFile>(m, "CheckedFile", py::buffer_protocol(),
                          "A mapped file with the checksum of every block: its bytes are a read-only buffer. Loops over "
                          "arrays in it check each block before they read it; whoever reads them otherwise calls check.")
      .def(py::init(&cb::open), py::arg("path"), py::arg("bytes"), py::arg("sums"), py::arg("block"),
           py::arg("mapped") = true)
      .def_buffer([](CheckedFile& file) {
        static unsigned char nothing = 0;  // what an empty file has for its first byte
        if (!file.data() && file.size()) throw py::buffer_error(file.path() + " is not mapped");
        void* data = file.size() ? const_cast<unsigned char*>(file.data()) : &nothing;
        return py::buffer_info(static_cast<std::uint8_t*>(data), static_cast<py::ssize_t>(file.size()), true);
      })
      .def("__len__", &CheckedFile::size)
      .def_property_readonly("path", &CheckedFile::path, "Of the file.")
      .def_property_readonly("verified", &CheckedFile::verified, "Whether every block was checked and found whole.")
      .def_property_readonly("unverified_bytes", &CheckedFile::unverified_bytes,
                             "Bytes of the blocks that were not found whole so far.")
      .def("check", &cb::check, py::arg("start") = 0, py::arg("stop") = py::none(),
           "Raises DamagedFileError unless the blocks of these bytes are as they were written.")
      .def("check_spans", &cb::check_spans, py::arg("starts"), py::arg("stops"),
           "The same of the bytes starts[i] .. stops[i], int64 [M] each.")
      .def("check_next", &CheckedFile::check_next, py::call_guard<py::gil_scoped_release>(), py::arg("most"),
           py::arg("parallel") = false,
           "Checks the next blocks of about so many bytes, each handed out once; returns their bytes, 0 at the end.");
}

void bind_ngram(py::module_& m) {
  namespace nb = ngram_binding;
  namespace ng = cdr::ngram;
  using KeyPair = std::pair<std::uint64_t, std::uint64_t>;

  m.def(
      "hash_texts",
      [](const py::list& texts, const KeyPair& key, int bits) {
        const ng::Key k = nb::key_from(key, bits);
        const std::vector<std::string_view> views = nb::views_of(texts, "texts");
        std::vector<std::int64_t> offsets(views.size() + 1);
        std::vector<std::uint8_t> tokens;
        {
          py::gil_scoped_release release;
          ng::count_tokens(views.data(), views.size(), offsets.data());
          tokens.resize(static_cast<std::size_t>(offsets.back()) * ng::kTokenBytes);
          ng::hash_texts(views.data(), views.size(), k, offsets.data(), tokens.data());
        }
        return py::make_tuple(nb::take(std::move(offsets)), nb::take(std::move(tokens)));
      },
      py::arg("texts"), py::kw_only(), py::arg("key"), py::arg("bits"),
      "Token hashes of texts: (offsets int64 [M + 1], tokens uint8 [7 * T]). An ASCII text comes as it is, "
      "another as bytes: its folded tokens in UTF-8 parted by spaces.");

  m.def(
      "hash_tokens",
      [](const py::list& tokens, const KeyPair& key, int bits) {
        const ng::Key k = nb::key_from(key, bits);
        const std::vector<std::string_view> views = nb::views_of(tokens, "tokens");
        std::vector<std::uint8_t> result;
        {
          py::gil_scoped_release release;
          result.resize(views.size() * ng::kTokenBytes);
          ng::hash_tokens(views.data(), views.size(), k, result.data());
        }
        return nb::take(std::move(result));
      },
      py::arg("tokens"), py::kw_only(), py::arg("key"), py::arg("bits"),
      "Hashes of tokens, str of ASCII or bytes: uint8 [7 * T].");

  m.def(
      "take_tokens",
      [](const py::tuple& blocks, const std::optional<Array<std::int64_t>>& index) {
        const ng::TokenRows rows = nb::tokens_from(blocks);
        const auto count = static_cast<std::size_t>(check_index(index, rows.size()));
        const std::int64_t* which = index ? index->data() : nullptr;
        std::vector<std::int64_t> offsets(count + 1);
        std::vector<std::uint8_t> tokens;
        {
          py::gil_scoped_release release;
          ng::take_offsets(rows, which, count, offsets.data());
          tokens.resize(static_cast<std::size_t>(offsets.back()) * ng::kTokenBytes);
          ng::take_tokens(rows, which, count, offsets.data(), tokens.data());
        }
        return py::make_tuple(nb::take(std::move(offsets)), nb::take(std::move(tokens)));
      },
      py::arg("blocks"), py::arg("index"), "The rows of index (None: all) as one block: (offsets, tokens), copied.");

  m.def(
      "token_ngrams",
      [](const py::tuple& blocks, int n) {
        nb::check_n(n);
        const ng::TokenRows rows = nb::tokens_from(blocks);
        std::vector<std::int64_t> offsets(static_cast<std::size_t>(rows.size()) + 1);
        std::vector<std::uint64_t> hashes;
        {
          py::gil_scoped_release release;
          ng::ngram_offsets(rows, n, offsets.data());
          hashes.resize(static_cast<std::size_t>(offsets.back()));
          ng::ngrams(rows, n, offsets.data(), hashes.data());
        }
        return py::make_tuple(nb::take(std::move(offsets)), nb::take(std::move(hashes)));
      },
      py::arg("blocks"), py::arg("n"),
      "Hashes of the n-grams of each row of tokens, in order, repeats kept: (offsets int64 [R + 1], uint64 [H]).");

  ng::process_key();  // now: a child that is forked while another thread draws it would wait for ever
  py::class_<ng::HashSet>(m, "HashSet",
                          "An immutable set of 64-bit hashes; union() makes a new one, so readers need no lock.")
      .def(py::init<>())
      .def("__len__", &ng::HashSet::size)
      .def_property_readonly("nbytes", &ng::HashSet::bytes)
      .def(
          "union",
          [](const ng::HashSet& self, const Array<std::uint64_t>& hashes) {
            const std::uint64_t* values = nb::check_hashes(hashes).data();
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
          "contains",
          [](const ng::HashSet& self, const Array<std::uint64_t>& hashes) {
            const std::uint64_t* values = nb::check_hashes(hashes).data();
            Array<bool> found(hashes.size());
            bool* out = found.mutable_data();
            const auto count = static_cast<std::size_t>(hashes.size());
            py::gil_scoped_release release;
            for (std::size_t i = 0; i < count; ++i) out[i] = self.contains(values[i]);
            return found;
          },
          py::arg("hashes").noconvert(), "Which of these are in the set: bool [H].")
      .def(
          "overlap",
          [](const ng::HashSet& self, const py::tuple& blocks, const std::optional<Array<std::int64_t>>& index, int n) {
            nb::check_n(n);
            const ng::TokenRows rows = nb::tokens_from(blocks);
            const auto count = static_cast<std::size_t>(check_index(index, rows.size()));
            const std::int64_t* which = index ? index->data() : nullptr;
            Array<std::int32_t> result(static_cast<py::ssize_t>(count));
            std::int32_t* out = result.mutable_data();
            py::gil_scoped_release release;
            ng::overlap(self, rows, which, count, n, out);
            return result;
          },
          py::arg("blocks"), py::arg("index"), py::arg("n"),
          "How many distinct n-grams of each row of index (None: of all) are in the set: int32 [M].");
}

namespace {
namespace scan_binding {

using Floats = py::array_t<float, py::array::c_style>;
using Bytes = py::array_t<std::int8_t, py::array::c_style>;

// The blocks of codes, and the numbers.
using Run = std::tuple<Bytes, Bytes, Bytes, Floats>;

void expect_shape(const py::array& a, std::int64_t n, std::int64_t width, const char* name) {
  expect(a.ndim() == 2 && a.shape(0) == n && a.shape(1) == width,
         std::string(name) + ": expected [" + std::to_string(n) + ", " + std::to_string(width) + "]");
}

void expect_run(const Run& run, std::int64_t n, std::int64_t dim) {
  expect_shape(std::get<0>(run), n, cdr::scan::block_width(dim, 0), "first block");
  expect_shape(std::get<1>(run), n, cdr::scan::block_width(dim, 1), "second block");
  expect_shape(std::get<2>(run), n, cdr::scan::block_width(dim, 2), "third block");
  expect_shape(std::get<3>(run), n, cdr::scan::kNumbers, "numbers");
}

// A rotation and codes, with the arrays that they point into.
struct Rotation {
  Floats matrix, mean, weight;
  cdr::scan::Rotation value;

  Rotation(Floats matrix_, Floats mean_, Floats weight_)
      : matrix(std::move(matrix_)), mean(std::move(mean_)), weight(std::move(weight_)) {
    expect(mean.ndim() == 1 && mean.shape(0) >= 1, "mean: expected float32 [D]");
    const py::ssize_t dim = mean.shape(0);
    expect(matrix.ndim() == 2 && matrix.shape(0) == dim && matrix.shape(1) == dim, "matrix: expected float32 [D, D]");
    expect(weight.ndim() == 1 && weight.shape(0) == dim, "weight: expected float32 [D]");
    for (py::ssize_t i = 0; i < dim; ++i)
      expect(weight.at(i) > 1e-30f && weight.at(i) < 1e30f, "weight: expected positive numbers");
    value.dim = dim;
    value.matrix = matrix.data();
    value.mean = mean.data();
    value.weight = weight.data();
    value.measure();
    expect(value.frobenius < 1e30 && value.mean_norm < 1e30, "matrix, mean: expected finite numbers");
  }
};

struct Codes {
  py::object rotation;
  std::vector<Run> arrays;
  cdr::scan::Index value;

  Codes(const py::object& rotation_, const py::list& runs, double alpha) : rotation(rotation_) {
    value.rotation = rotation_.cast<const Rotation&>().value;
    value.alpha = alpha;
    expect(alpha >= 0.0 && alpha < 1e300, "alpha: expected a finite number");
    const std::int64_t dim = value.rotation.dim;
    for (const py::handle& run : runs) {
      Run arrays_of = run.cast<Run>();
      const auto& [first, second, third, numbers] = arrays_of;
      const std::int64_t n = numbers.ndim() == 2 ? numbers.shape(0) : 0;
      expect_run(arrays_of, n, dim);
      value.codes.push_back({n, {first.data(), second.data(), third.data()}, numbers.data()});
      arrays.push_back(std::move(arrays_of));
    }
  }
};

// The rows that codes are made of: first .. first + n.
cdr::Rows part_of(const py::tuple& blocks, const Array<double>& squared_norms, const Rotation& rotation,
                  std::int64_t first, std::int64_t n) {
  cdr::Rows rows = rows_from(blocks, squared_norms);
  expect(rows.dim == rotation.value.dim, "blocks: expected the dimension of the rotation");
  expect(first >= 0 && n >= 0 && first + n <= rows.size(), "first, n: expected rows of the blocks");
  return rows;
}

Floats center(const py::tuple& blocks, const Array<double>& squared_norms, const Rotation& rotation,
              std::int64_t first, std::int64_t n) {
  const cdr::Rows rows = part_of(blocks, squared_norms, rotation, first, n);
  Floats out({n, rows.dim});
  const double* norms = squared_norms.data();
  float* to = out.mutable_data();
  {
    py::gil_scoped_release release;
    cdr::scan::center(rows, norms, first, n, rotation.value, to);
  }
  return out;
}

py::tuple encode(const Floats& rotated, const Rotation& rotation, Bytes& first, Bytes& second, Bytes& third,
                 Floats& numbers) {
  const std::int64_t dim = rotation.value.dim;
  expect(rotated.ndim() == 2, "rotated: expected [n, D]");
  const std::int64_t n = rotated.shape(0);
  expect_shape(rotated, n, dim, "rotated");
  expect_run({first, second, third, numbers}, n, dim);
  Array<double> decoded({n, dim});
  const float* from = rotated.data();
  std::int8_t* const blocks[] = {first.mutable_data(), second.mutable_data(), third.mutable_data()};
  float* to = numbers.mutable_data();
  double* d = decoded.mutable_data();
  double alpha;
  {
    py::gil_scoped_release release;
    alpha = cdr::scan::encode(from, n, rotation.value, blocks, to, d);
  }
  return py::make_tuple(decoded, alpha);
}

void measure(const py::tuple& blocks, const Array<double>& squared_norms, const Rotation& rotation, std::int64_t first,
             double alpha, const Array<double>& rebuilt, Floats& numbers) {
  const std::int64_t n = numbers.ndim() == 2 ? numbers.shape(0) : 0;
  const cdr::Rows rows = part_of(blocks, squared_norms, rotation, first, n);
  expect_shape(rebuilt, n, rows.dim, "rebuilt");
  expect_shape(numbers, n, cdr::scan::kNumbers, "numbers");
  const double* norms = squared_norms.data();
  const double* from = rebuilt.data();
  float* to = numbers.mutable_data();
  py::gil_scoped_release release;
  cdr::scan::measure(rows, norms, first, n, rotation.value, alpha, from, to);
}

// The stored rows that a view has, and the codes of no more than these (codes may be newer than the view).
std::pair<cdr::Rows, cdr::scan::Index> behind(const py::tuple& blocks, const Array<double>& squared_norms,
                                              const Codes& codes) {
  cdr::Rows rows = rows_from(blocks, squared_norms);
  const std::int64_t n = rows.size();
  expect(rows.dim == codes.value.rotation.dim, "blocks: expected the dimension of the codes");
  cdr::scan::Index index = codes.value;
  std::int64_t left = n;
  for (cdr::scan::Codes& c : index.codes) {
    c.rows = std::min(c.rows, left);
    left -= c.rows;
  }
  return {std::move(rows), std::move(index)};
}

template <bool bounds>
py::list threshold(const Codes& codes, const py::tuple& blocks, const Array<double>& squared_norms,
                   const std::vector<const cdr::Columns*>& columns, const std::optional<Array<bool>>& alive) {
  const auto [rows, held] = behind(blocks, squared_norms, codes);
  for (const cdr::Columns* c : columns) expect(c && c->dim == rows.dim, "columns: expected the dimension of the rows");
  const std::uint8_t* live = reinterpret_cast<const std::uint8_t*>(optional_data(alive, rows.size(), "alive"));
  const double* norms = squared_norms.data();
  std::vector<cdr::scan::Found> found;
  {
    py::gil_scoped_release release;
    found = cdr::scan::threshold(held, rows, norms, live, columns, bounds);
  }
  using ngram_binding::take;
  py::list out;
  for (cdr::scan::Found& f : found) {
    if (bounds)
      out.append(py::make_tuple(take(std::move(f.rows)), take(std::move(f.low)), take(std::move(f.high))));
    else
      out.append(take(std::move(f.rows)));
  }
  return out;
}

Array<std::int64_t> top(const Codes& codes, const py::tuple& blocks, const Array<double>& squared_norms,
                        const cdr::Columns& columns, const std::optional<Array<std::int64_t>>& index,
                        const std::optional<Array<bool>>& alive, const std::optional<Array<double>>& importance,
                        const std::optional<Array<double>>& multiplier,
                        const std::optional<Array<std::int32_t>>& ngram_overlap, double penalty_cap,
                        double novelty_floor, double ngram_step, double ngram_cap, std::int64_t k) {
  const auto [rows, held] = behind(blocks, squared_norms, codes);
  const std::int64_t n = rows.size();
  expect(rows.dim == columns.dim, "columns: expected the dimension of the rows");
  expect(novelty_floor >= 0.0 && ngram_cap <= 1.0, "limits: expected factors that are not negative");
  const std::int64_t m = check_index(index, n);
  const std::int64_t* which = index ? index->data() : nullptr;
  const std::uint8_t* live = reinterpret_cast<const std::uint8_t*>(optional_data(alive, n, "alive"));
  const cdr::Factors factors{optional_data(importance, m, "importance"), optional_data(multiplier, m, "multiplier"),
                             optional_data(ngram_overlap, m, "ngram_overlap")};
  const cdr::Limits limits{penalty_cap, novelty_floor, ngram_step, ngram_cap};
  const double* norms = squared_norms.data();
  std::vector<std::int64_t> found;
  {
    py::gil_scoped_release release;
    found = cdr::scan::top(held, rows, norms, which, m, live, columns, factors, limits, k);
  }
  return ngram_binding::take(std::move(found));
}

using Found = std::tuple<Array<std::int64_t>, Floats, Floats>;

py::list likely(const std::vector<Found>& found, const Array<bool>& alive, const Array<double>& importance,
                const std::optional<Array<double>>& multiplier, std::int64_t k) {
  const std::int64_t n = alive.ndim() == 1 ? alive.shape(0) : -1;
  expect(importance.ndim() == 1 && importance.shape(0) == n, "alive, importance: expected one entry per row");
  const double* factors = optional_data(multiplier, n, "multiplier");
  expect(k >= 0, "k: expected at least 0");
  std::vector<cdr::scan::Bounded> all;
  for (const auto& [rows, low, high] : found) {
    const std::int64_t m = check_index(rows, n);
    expect(low.ndim() == 1 && low.shape(0) == m && high.ndim() == 1 && high.shape(0) == m,
           "low, high: expected one entry per row found");
    all.push_back({rows.data(), low.data(), high.data(), m});
  }
  const std::uint8_t* live = reinterpret_cast<const std::uint8_t*>(alive.data());
  const double* weights = importance.data();
  std::vector<cdr::scan::Likely> chosen;
  {
    py::gil_scoped_release release;
    chosen = cdr::scan::likely(all, n, live, weights, factors, k);
  }
  py::list out;
  for (cdr::scan::Likely& each : chosen)
    out.append(py::make_tuple(each.living, ngram_binding::take(std::move(each.positions))));
  return out;
}

std::uint64_t read_pass(const py::tuple& blocks) {
  const cdr::Rows rows = rows_from(blocks);
  py::gil_scoped_release release;
  return cdr::scan::read_pass(rows);
}

}  // namespace scan_binding
}  // namespace

void bind_scan(py::module_& m) {
  namespace sb = scan_binding;

  py::class_<sb::Rotation>(m, "Rotation", "A matrix [D, D], a mean [D] and weights > 0 [D] in float32.")
      .def(py::init<sb::Floats, sb::Floats, sb::Floats>(), py::arg("matrix"), py::arg("mean"), py::arg("weight"));

  py::class_<sb::Codes>(m, "Codes", "Runs (three blocks of codes, numbers) of coded rows, one after the other.")
      .def(py::init<const py::object&, const py::list&, double>(), py::arg("rotation"), py::arg("runs"),
           py::arg("alpha"))
      .def("threshold", &sb::threshold<false>, py::arg("blocks"), py::arg("squared_norms"), py::arg("columns"),
           py::arg("alive") = py::none(),
           "For each of the columns the rows that gate_rows() finds, int64 ascending. Rows after the coded ones are "
           "decided one by one.")
      .def("threshold_bounds", &sb::threshold<true>, py::arg("blocks"), py::arg("squared_norms"), py::arg("columns"),
           py::arg("alive") = py::none(),
           "The same with what the codes say of each row's relevance: (rows, low, high), float32.")
      .def("top", &sb::top, py::arg("blocks"), py::arg("squared_norms"), py::arg("columns"), py::arg("index"),
           py::arg("alive"), py::arg("importance"), py::arg("multiplier"), py::arg("ngram_overlap"),
           py::arg("penalty_cap"), py::arg("novelty_floor"), py::arg("ngram_step"), py::arg("ngram_cap"), py::arg("k"),
           "Positions in index (None: rows), int64 ascending, that hold the k best by score_rows() and whatever ties "
           "with them, and perhaps more.");

  m.def("scan_widths", [](std::int64_t dim) {
    return py::make_tuple(cdr::scan::block_width(dim, 0), cdr::scan::block_width(dim, 1),
                          cdr::scan::block_width(dim, 2));
  }, py::arg("dim"), "Bytes per row in the three blocks of codes.");
  m.def("scan_center", &sb::center, py::arg("blocks"), py::arg("squared_norms"), py::arg("rotation"), py::arg("first"),
        py::arg("n"), "Unit rows minus the mean, float32 [n, D].");
  m.def("scan_encode", &sb::encode, py::arg("rotated"), py::arg("rotation"), py::arg("first").noconvert(),
        py::arg("second").noconvert(), py::arg("third").noconvert(), py::arg("numbers").noconvert(),
        "Fills codes and numbers (all but rho) of rotated rows; (what they decode to before the rotation back, "
        "float64 [n, D]; the largest norm of their codes).");
  m.def("scan_measure", &sb::measure, py::arg("blocks"), py::arg("squared_norms"), py::arg("rotation"),
        py::arg("first"), py::arg("alpha"), py::arg("rebuilt"), py::arg("numbers").noconvert(),
        "Fills rho: how far rebuilt, the decoded rows rotated back, may be from the unit rows.");
  m.def("likely", &sb::likely, py::arg("found"), py::arg("alive"), py::arg("importance"), py::arg("multiplier"),
        py::arg("k"),
        "For each (rows, low, high) of threshold_bounds(): how many of the rows are alive, and the positions in them, "
        "int64 ascending, that may hold the k best by importance * multiplier * max(relevance, 0) and what ties with "
        "them. alive, importance, multiplier (None: 1): by row.");
  m.def("read_pass", &sb::read_pass, py::arg("blocks"),
        "Reads all rows once with all threads: the time to beat. The sum of their 64-bit words.");
}


PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled half of cdr_kernel. Every loop releases the GIL and runs on one pool of threads.";

  py::class_<cdr::Columns>(m, "Columns", "What one session asks of the rows; made by cdr_kernel.score.Columns.")
      .def(py::init(&make_columns), py::arg("vectors"), py::arg("squared_norms"), py::arg("scale"), py::arg("shift"),
           py::arg("weight"), py::arg("gate"), py::arg("has_coverage"), py::arg("clamp_novelty"),
           py::arg("gate_only") = py::none(), py::arg("factors_above_zero") = false,
           py::arg("addend_starts") = py::none(), py::arg("addend_rows") = py::none(),
           py::arg("addend_values") = py::none())
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
  m.def("column_values", &column_values, py::arg("blocks"), py::arg("squared_norms"), py::arg("columns"),
        py::arg("index") = py::none(),
        "Values of the query column and the residual columns, float64 [M, 1 + R]: what score_rows works with.");
  m.def("exact_sum", &exact_sum, py::arg("values"), "The correctly rounded sum of float64 values (math.fsum).");

  bind_checked(m);
  bind_ngram(m);
  bind_scan(m);

  m.def("threads", &cdr::threads, "Threads that a loop may use.");
  m.def("set_threads", &cdr::set_threads, py::arg("n"), "Fix the number of threads; 0 goes back to the default.");
  m.def("simd", [] { return cdr::name_of(cdr::simd()); }, "The SIMD level in use.");
  m.def("set_simd", [](const std::string& name) { cdr::set_simd(simd_named(name)); }, py::arg("level"),
        "Choose generic, avx2 or avx512; ValueError where the processor lacks it.");
  m.def("simd_levels", [] {
    std::vector<std::string> names;
    for (const cdr::Simd level : kLevels)
      if (level <= cdr::best_simd()) names.push_back(cdr::name_of(level));
    return names;
  }, "The SIMD levels this processor can run.");
}
