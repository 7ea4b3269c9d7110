// Making codes: the rotation measured, rows centred, rotated rows encoded, what the codes lose of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "pool.h"
#include "scan_probe.h"

namespace cdr {
namespace scan {
namespace {

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

EncodeRow encode_row() {
#if CDR_X86
  if (fast()) return encode_row_avx2;
#endif
  return encode_row_generic;
}

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
      widen(rows.dtype, rows.read(first + i), dim, x.data());
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
  // docs/proofs.md, S6.
  const double rounding = static_cast<double>(dim + 16) * kUlp *
                              (1.0 + rotation.mean_norm + rotation.frobenius * rotation.most_weight * alpha) +
                          1e-10;
  constexpr std::int64_t kRows = 64;
  parallel_for(units(n, kRows), [&](std::size_t unit) {
    std::vector<double> x(static_cast<std::size_t>(dim));
    const std::int64_t from = static_cast<std::int64_t>(unit) * kRows, to = std::min(n, from + kRows);
    for (std::int64_t i = from; i < to; ++i) {
      widen(rows.dtype, rows.read(first + i), dim, x.data());
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

}  // namespace scan
}  // namespace cdr
