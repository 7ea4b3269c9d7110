// The time to beat: every byte of the rows read once.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "pool.h"
#include "scan.h"
#include "simd.h"

namespace cdr {
namespace scan {
namespace {

#if CDR_X86
CDR_AVX2 std::uint64_t sum_avx2(const unsigned char* p, std::int64_t words) {
  __m256i s[4];
  for (__m256i& x : s) x = _mm256_setzero_si256();
  std::int64_t i = 0;
  for (; i + 16 <= words; i += 16)
    for (int l = 0; l < 4; ++l)
      s[l] = _mm256_add_epi64(s[l], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8 * i + 32 * l)));
  std::uint64_t lanes[4], total = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes),
                      _mm256_add_epi64(_mm256_add_epi64(s[0], s[1]), _mm256_add_epi64(s[2], s[3])));
  for (std::uint64_t l : lanes) total += l;
  for (; i < words; ++i) {
    std::uint64_t w;
    std::memcpy(&w, p + 8 * i, 8);
    total += w;
  }
  return total;
}
#endif

std::uint64_t sum_generic(const unsigned char* p, std::int64_t words) {
  std::uint64_t total = 0, w;
  for (std::int64_t i = 0; i < words; ++i) {
    std::memcpy(&w, p + 8 * i, 8);
    total += w;
  }
  return total;
}

}  // namespace

std::uint64_t read_pass(const Rows& rows) {
  constexpr std::int64_t kBytes = 1 << 20;
  struct Piece {
    const unsigned char* data;
    std::int64_t words;
  };
  std::vector<Piece> pieces;
  for (const Block& b : rows.blocks) {
    const std::int64_t bytes = b.rows * rows.dim * static_cast<std::int64_t>(size_of(rows.dtype));
    for (std::int64_t at = 0; at < bytes; at += kBytes)
      pieces.push_back({b.data + at, std::min(kBytes, bytes - at) / 8});
  }
  std::atomic<std::uint64_t> total{0};
  parallel_for(pieces.size(), [&](std::size_t i) {
#if CDR_X86
    if (fast()) {
      total.fetch_add(sum_avx2(pieces[i].data, pieces[i].words), std::memory_order_relaxed);
      return;
    }
#endif
    total.fetch_add(sum_generic(pieces[i].data, pieces[i].words), std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace scan
}  // namespace cdr
