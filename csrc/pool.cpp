#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(_WIN32)
#include <process.h>
#else
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace cdr {
namespace {

constexpr int kMaxThreads = 1024;

long process_id() {
#if defined(_WIN32)
  return _getpid();
#else
  return static_cast<long>(getpid());
#endif
}

int default_threads() {
  if (const char* text = std::getenv("CDR_KERNEL_THREADS")) {
    const long n = std::strtol(text, nullptr, 10);
    if (n >= 1) return static_cast<int>(n < kMaxThreads ? n : kMaxThreads);
  }
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

std::atomic<int> requested{0};

class Pool {
 public:
  explicit Pool(int workers) {
    threads_.reserve(static_cast<std::size_t>(workers));
    try {
      for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      // The machine has no more threads to give: the pool works with those it got.
    }
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  void run(std::size_t blocks, const std::function<void(std::size_t)>& body) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      blocks_ = blocks;
      next_.store(0, std::memory_order_relaxed);
      error_ = nullptr;
      busy_ = threads_.size();
      ++generation_;
    }
    wake_.notify_all();
    drain(body, blocks);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    body_ = nullptr;
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void drain(const std::function<void(std::size_t)>& body, std::size_t blocks) {
    for (;;) {
      const std::size_t block = next_.fetch_add(1, std::memory_order_relaxed);
      if (block >= blocks) return;
      try {
        body(block);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
    }
  }

  void work() {
    std::size_t seen = 0;
    for (;;) {
      const std::function<void(std::size_t)>* body;
      std::size_t blocks;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
        body = body_;
        blocks = blocks_;
      }
      drain(*body, blocks);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(std::size_t)>* body_ = nullptr;
  std::size_t blocks_ = 0;
  std::atomic<std::size_t> next_{0};
  std::size_t busy_ = 0;
  std::size_t generation_ = 0;
  std::exception_ptr error_;
  bool stop_ = false;
};

// What a process owns. After fork() the child's copy names threads that do not exist and a mutex that
// may be held for ever, so the child leaves it alone and makes its own.
struct Owned {
  long pid = process_id();
  std::atomic<bool> in_use{false};  // not a mutex: a nested loop tries again on the thread that holds it
  Pool* pool = nullptr;
  int workers = -1;
};

std::atomic<Owned*> owned{nullptr};

Owned& current() {
  Owned* o = owned.load(std::memory_order_acquire);
  while (!o || o->pid != process_id()) {
    Owned* fresh = new Owned;
    if (owned.compare_exchange_strong(o, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *o;
}

class Hold {
 public:
  explicit Hold(std::atomic<bool>& flag) : flag_(flag), got_(!flag.exchange(true, std::memory_order_acquire)) {}
  ~Hold() {
    if (got_) flag_.store(false, std::memory_order_release);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  bool got() const { return got_; }

 private:
  std::atomic<bool>& flag_;
  const bool got_;
};

}  // namespace

int threads() {
  const int n = requested.load(std::memory_order_relaxed);
  return n >= 1 ? n : default_threads();
}

void set_threads(int n) {
  if (n < 0) throw std::invalid_argument("threads: expected at least 0, got " + std::to_string(n));
  requested.store(n < kMaxThreads ? n : kMaxThreads, std::memory_order_relaxed);
}

void parallel_for(std::size_t blocks, const std::function<void(std::size_t)>& body) {
  const int n = blocks > 1 ? threads() : 1;
  if (n > 1) {
    Owned& o = current();
    const Hold hold(o.in_use);
    if (hold.got()) {
      if (o.workers != n - 1) {
        delete o.pool;
        o.pool = nullptr;
        o.workers = -1;
        o.pool = new Pool(n - 1);
        o.workers = n - 1;
      }
      o.pool->run(blocks, body);
      return;
    }
  }
  for (std::size_t block = 0; block < blocks; ++block) body(block);
}

}  // namespace cdr
