// A file with a checksum of every block: no byte of it is used before the block that it lies in was checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace cdr {

// CRC-32C (Castagnoli) of n bytes; crc: of what comes before them, 0 for nothing. By the processor's own instruction
// where it has one.
std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t crc = 0);
// The same by tables alone.
std::uint32_t crc32c_generic(const void* data, std::size_t n, std::uint32_t crc = 0);

// What is in a file is not what was written. block: -1 for the file as a whole.
struct Damage : std::runtime_error {
  Damage(std::string path_, std::int64_t block_, const std::string& what)
      : std::runtime_error(path_ + ": " + what), path(std::move(path_)), block(block_) {}
  std::string path;
  std::int64_t block;
};

// The system could not open or read a file.
struct ReadError : std::runtime_error {
  ReadError(std::string path_, int code_) : std::runtime_error(path_), path(std::move(path_)), code(code_) {}
  std::string path;
  int code;  // errno
};

struct FileHandle;  // an open file; closed when its last user is done

// Checksums of the blocks of a file as it is now; *bytes becomes its length.
std::vector<std::uint32_t> block_sums(const std::string& path, std::uint64_t block, std::uint64_t* bytes);

class CheckedFile {
 public:
  // bytes: its length; sums: of every block. mapped: whether its bytes are mapped, and the file held open until all of
  // them are checked; else it is opened by its name for each check. Throws Damage where it has another length or the
  // sums are not one for each block, ReadError where it cannot be opened.
  CheckedFile(std::string path, std::uint64_t bytes, std::vector<std::uint32_t> sums, std::uint64_t block,
              bool mapped = true);
  ~CheckedFile();
  CheckedFile(const CheckedFile&) = delete;
  CheckedFile& operator=(const CheckedFile&) = delete;

  const std::string& path() const { return path_; }
  const unsigned char* data() const { return data_; }  // null where it is not mapped
  std::uint64_t size() const { return bytes_; }

  // Whether every block was checked and found whole.
  bool verified() const { return left_.load(std::memory_order_acquire) == 0; }
  // Bytes of the blocks that were not found whole so far.
  std::uint64_t unverified_bytes() const;

  // Throws Damage unless the blocks of the bytes from .. to are whole, ReadError where they cannot be read; reads those
  // that nobody has looked at. For any thread.
  void check(std::uint64_t from, std::uint64_t to) {
    if (from >= to || verified()) return;
    for (std::uint64_t b = from / block_; b <= (to - 1) / block_; ++b)
      if (state_[b].load(std::memory_order_acquire) != kWhole) look(b);
  }
  // The same of n bytes that lie in the mapping.
  void check_at(const unsigned char* p, std::uint64_t n) {
    const std::uint64_t from = static_cast<std::uint64_t>(p - data_);
    check(from, from + n);
  }
  // The same of all bytes, by all threads.
  void check_all();
  // The next blocks of about so many bytes, each handed out once; returns their bytes, 0 where there are none left.
  // parallel: by all threads, else on this one. Throws as check() does.
  std::uint64_t check_next(std::uint64_t most, bool parallel);

 private:
  enum State : std::uint8_t { kUnknown = 0, kWhole = 1, kDamaged = 2 };

  void look(std::uint64_t block);
  [[noreturn]] void damaged(std::uint64_t block) const;
  std::uint64_t length_of(std::uint64_t block) const {
    const std::uint64_t at = block * block_;
    return bytes_ - at < block_ ? bytes_ - at : block_;
  }

  std::string path_;
  std::uint64_t bytes_, block_;
  bool mapped_;
  std::vector<std::uint32_t> sums_;
  std::unique_ptr<std::atomic<std::uint8_t>[]> state_;
  std::atomic<std::uint64_t> left_{0};  // blocks that were not found whole
  std::atomic<std::uint64_t> next_{0};  // where check_next() goes on
  std::mutex mutex_;                    // of handle_
  std::shared_ptr<FileHandle> handle_;      // gone once all is checked: a store that is checked holds no descriptor
  const unsigned char* data_ = nullptr;
  std::vector<unsigned char> held_;  // the bytes, where files are not mapped
};

}  // namespace cdr
