// A persistent pool of threads for loops over independent blocks.
#pragma once

#include <cstddef>
#include <functional>

namespace cdr {

// Threads that a loop may use: what set_threads() asked for, else CDR_KERNEL_THREADS, else the
// processors this process may run on.
int threads();

// n >= 1 fixes the number of threads, 0 goes back to the default; std::invalid_argument below 0. Takes effect
// with the next loop.
void set_threads(int n);

// Calls body(block) once for every block in [0, blocks), on the pool and the calling thread. Returns
// when all calls have returned; the first exception is thrown again here, after the others ended.
//
// Blocks may run in any order and on any thread, so body must write only what belongs to its block:
// that is what keeps every result independent of the number of threads. When another caller holds the
// pool, or this one does in a nested loop, the loop runs on the calling thread alone instead of waiting.
// A forked child gets a pool of its own on first use.
void parallel_for(std::size_t blocks, const std::function<void(std::size_t)>& body);

}  // namespace cdr
