// CRC-32C: reflected polynomial 0x82f63b78, as iSCSI, ext4 and the instructions of x86-64 and ARM have it.
//
// The instruction takes 8 bytes a cycle and answers after three, so three runs of kRun bytes go side by side. What a run
// leaves is then moved past the runs behind it: a CRC is linear, and moving it past n zero bytes is multiplication by
// x^(8n) modulo the polynomial, here by tables of 4 x 256.
#include <array>
#include <cstring>

#include "checked_file.h"
#include "simd.h"

#if defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__)) && (defined(__linux__) || defined(__APPLE__))
#define CDR_ARM_CRC 1
#if defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif
#if defined(__clang__)
#define CDR_CRC_TARGET __attribute__((target("crc")))
#else
#define CDR_CRC_TARGET __attribute__((target("+crc")))
#endif
#else
#define CDR_ARM_CRC 0
#endif

namespace cdr {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;
constexpr std::size_t kRun = 4096;

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

// table[k][b]: the CRC of byte b with k zero bytes behind it.
Table make_bytes() {
  Table t{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int i = 0; i < 8; ++i) crc = crc & 1 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    t[0][b] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::uint32_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 255];
  return t;
}

const Table& bytes_table() {
  static const Table t = make_bytes();
  return t;
}

std::uint64_t word_at(const unsigned char* p) {  // little-endian
  std::uint64_t w = 0;
  for (int i = 0; i < 8; ++i) w |= static_cast<std::uint64_t>(p[i]) << (8 * i);
  return w;
}

// Without the inversion at both ends.
std::uint32_t plain_generic(const unsigned char* p, std::size_t n, std::uint32_t crc) {
  const Table& t = bytes_table();
  for (; n >= 8; n -= 8, p += 8) {
    const std::uint64_t w = word_at(p) ^ crc;
    crc = t[7][w & 255] ^ t[6][w >> 8 & 255] ^ t[5][w >> 16 & 255] ^ t[4][w >> 24 & 255] ^ t[3][w >> 32 & 255] ^
          t[2][w >> 40 & 255] ^ t[1][w >> 48 & 255] ^ t[0][w >> 56];
  }
  for (; n; --n, ++p) crc = (crc >> 8) ^ t[0][(crc ^ *p) & 255];
  return crc;
}

#if CDR_X86 || CDR_ARM_CRC
// table[k][b]: what byte k of a CRC, if it is b, becomes kRun zero bytes later.
using Shift = std::array<std::array<std::uint32_t, 256>, 4>;

const Shift& shift_table() {
  static const Shift table = [] {
    std::array<std::uint32_t, 32> bit{};  // of each bit alone
    const std::vector<unsigned char> zeros(kRun);
    for (int i = 0; i < 32; ++i) bit[static_cast<std::size_t>(i)] = plain_generic(zeros.data(), kRun, 1u << i);
    Shift t{};
    for (std::size_t k = 0; k < 4; ++k)
      for (std::size_t b = 0; b < 256; ++b)
        for (std::size_t i = 0; i < 8; ++i)
          if (b >> i & 1) t[k][b] ^= bit[8 * k + i];
    return t;
  }();
  return table;
}

std::uint32_t shifted(const Shift& t, std::uint32_t crc) {
  return t[0][crc & 255] ^ t[1][crc >> 8 & 255] ^ t[2][crc >> 16 & 255] ^ t[3][crc >> 24];
}

std::uint64_t load_word(const unsigned char* p) {
  std::uint64_t w;
  std::memcpy(&w, p, 8);
  return w;
}
#endif

#if CDR_X86
#define CDR_CRC_TARGET __attribute__((target("sse4.2")))
#define CDR_CRC_WORD(crc, w) static_cast<std::uint32_t>(_mm_crc32_u64(crc, w))
#define CDR_CRC_BYTE(crc, b) _mm_crc32_u8(crc, b)
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#elif CDR_ARM_CRC
CDR_CRC_TARGET inline std::uint32_t arm_word(std::uint32_t crc, std::uint64_t w) {
  __asm__("crc32cx %w0, %w1, %x2" : "=r"(crc) : "r"(crc), "r"(w));
  return crc;
}
CDR_CRC_TARGET inline std::uint32_t arm_byte(std::uint32_t crc, std::uint32_t b) {
  __asm__("crc32cb %w0, %w1, %w2" : "=r"(crc) : "r"(crc), "r"(b));
  return crc;
}
#define CDR_CRC_WORD(crc, w) arm_word(crc, w)
#define CDR_CRC_BYTE(crc, b) arm_byte(crc, b)
bool has_instruction() {
#if defined(__APPLE__)
  return true;
#else
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}
#endif

#if CDR_X86 || CDR_ARM_CRC
CDR_CRC_TARGET std::uint32_t plain_instruction(const unsigned char* p, std::size_t n, std::uint32_t crc) {
  const Shift& t = shift_table();
  for (; n >= 3 * kRun; n -= 3 * kRun, p += 3 * kRun) {
    std::uint32_t a = crc, b = 0, c = 0;
    for (std::size_t i = 0; i < kRun; i += 8) {
      a = CDR_CRC_WORD(a, load_word(p + i));
      b = CDR_CRC_WORD(b, load_word(p + i + kRun));
      c = CDR_CRC_WORD(c, load_word(p + i + 2 * kRun));
    }
    crc = shifted(t, shifted(t, a) ^ b) ^ c;
  }
  for (; n >= 8; n -= 8, p += 8) crc = CDR_CRC_WORD(crc, load_word(p));
  for (; n; --n, ++p) crc = CDR_CRC_BYTE(crc, *p);
  return crc;
}
#endif

}  // namespace

std::uint32_t crc32c_generic(const void* data, std::size_t n, std::uint32_t crc) {
  return ~plain_generic(static_cast<const unsigned char*>(data), n, ~crc);
}

std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t crc) {
#if CDR_X86 || CDR_ARM_CRC
  static const bool there = has_instruction();
  if (there) return ~plain_instruction(static_cast<const unsigned char*>(data), n, ~crc);
#endif
  return crc32c_generic(data, n, crc);
}

}  // namespace cdr
