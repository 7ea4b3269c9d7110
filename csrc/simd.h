// What the vector code of every file asks of the compiler and of the processor.
#pragma once

#include <cstdint>

#include "score.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define CDR_X86 1
#if defined(__GNUC__) && !defined(__clang__)
// Inside GCC 12's own avx512fintrin.h.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#define CDR_AVX2 __attribute__((target("avx2,f16c")))
#define CDR_AVX512 __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#else
#define CDR_X86 0
#endif

#if defined(__GNUC__) || defined(__clang__)
#define CDR_PREFETCH(p) __builtin_prefetch(p)
#define CDR_INLINE __attribute__((always_inline)) inline
#else
#define CDR_INLINE inline
#define CDR_PREFETCH(p) ((void)0)
#endif

// For a loop over registers: GCC would make it one that fills memory.
#if defined(__GNUC__) && !defined(__clang__)
#define CDR_UNROLL _Pragma("GCC unroll 16")
#else
#define CDR_UNROLL
#endif

namespace cdr {

// Whether the AVX2 loops are to be used.
inline bool fast() {
#if CDR_X86
  return simd() >= Simd::avx2;
#else
  return false;
#endif
}

constexpr std::int64_t kLine = 64;

// Inlined at once: a function that only prefetches looks to GCC like one without effects, and its calls are dropped.
CDR_INLINE void prefetch(const void* p, std::int64_t bytes) {
  const char* at = static_cast<const char*>(p);
  for (std::int64_t i = 0; i < bytes; i += kLine) CDR_PREFETCH(at + i);
}

}  // namespace cdr
