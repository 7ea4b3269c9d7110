// Blocks are read with pread() and not through the mapping: a block that the disk cannot give, or that is gone because
// the file was cut off, is then an error and not the end of the process. Both show the same pages.
#include "checked_file.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "pool.h"

#if defined(_WIN32)
#include <cstdio>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace cdr {
namespace {

constexpr std::size_t kRead = 64 << 10;  // read at a time: it stays in the cache for the checksum
constexpr std::uint64_t kUnit = 4 << 20;  // bytes in one unit of work

std::string counted(std::uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

}  // namespace

#if defined(_WIN32)

struct FileHandle {
  std::FILE* file;
  std::mutex mutex;
  const std::string path;
  explicit FileHandle(const std::string& path_) : file(std::fopen(path_.c_str(), "rb")), path(path_) {
    if (!file) throw ReadError(path, errno);
  }
  ~FileHandle() { std::fclose(file); }
  std::uint64_t size() {
    std::lock_guard<std::mutex> lock(mutex);
    if (_fseeki64(file, 0, SEEK_END)) throw ReadError(path, errno);
    return static_cast<std::uint64_t>(_ftelli64(file));
  }
  std::size_t read(void* to, std::size_t n, std::uint64_t at) {
    std::lock_guard<std::mutex> lock(mutex);
    if (_fseeki64(file, static_cast<std::int64_t>(at), SEEK_SET)) throw ReadError(path, errno);
    const std::size_t got = std::fread(to, 1, n, file);
    if (got < n && std::ferror(file)) throw ReadError(path, EIO);
    return got;
  }
};

#else

struct FileHandle {
  int fd;
  const std::string path;
  explicit FileHandle(const std::string& path_) : fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)), path(path_) {
    if (fd < 0) throw ReadError(path, errno);
  }
  ~FileHandle() { ::close(fd); }
  std::uint64_t size() const {
    struct stat found;
    if (::fstat(fd, &found)) throw ReadError(path, errno);
    return static_cast<std::uint64_t>(found.st_size);
  }
  std::size_t read(void* to, std::size_t n, std::uint64_t at) const {
    std::size_t got = 0;
    while (got < n) {
      const ssize_t count = ::pread(fd, static_cast<unsigned char*>(to) + got, n - got, static_cast<off_t>(at + got));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw ReadError(path, errno);
      if (count == 0) break;
      got += static_cast<std::size_t>(count);
    }
    return got;
  }
};

#endif

namespace {

// The checksum of up to `length` bytes from `at` on; *length becomes how many there were.
std::uint32_t sum_of(FileHandle& handle, std::uint64_t at, std::uint64_t* length) {
  const std::unique_ptr<unsigned char[]> buffer(new unsigned char[kRead]);
  std::uint32_t crc = 0;
  std::uint64_t done = 0;
  while (done < *length) {
    const std::size_t wanted = static_cast<std::size_t>(std::min<std::uint64_t>(kRead, *length - done));
    const std::size_t got = handle.read(buffer.get(), wanted, at + done);
    crc = crc32c(buffer.get(), got, crc);
    done += got;
    if (got < wanted) break;
  }
  *length = done;
  return crc;
}

}  // namespace

std::vector<std::uint32_t> block_sums(const std::string& path, std::uint64_t block, std::uint64_t* bytes) {
  FileHandle handle(path);
  *bytes = handle.size();
  const std::uint64_t count = (*bytes + block - 1) / block;
  std::vector<std::uint32_t> sums(static_cast<std::size_t>(count));
  const std::uint64_t each = std::max<std::uint64_t>(1, kUnit / block);
  parallel_for(static_cast<std::size_t>((count + each - 1) / each), [&](std::size_t unit) {
    const std::uint64_t end = std::min(count, (unit + 1) * each);
    for (std::uint64_t b = unit * each; b < end; ++b) {
      const std::uint64_t wanted = std::min(block, *bytes - b * block);
      std::uint64_t length = wanted;
      sums[static_cast<std::size_t>(b)] = sum_of(handle, b * block, &length);
      if (length != wanted) throw Damage(path, -1, "expected " + counted(*bytes) + ", it became shorter");
    }
  });
  return sums;
}

CheckedFile::CheckedFile(std::string path, std::uint64_t bytes, std::vector<std::uint32_t> sums, std::uint64_t block,
                         bool mapped)
    : path_(std::move(path)), bytes_(bytes), block_(block), mapped_(mapped), sums_(std::move(sums)) {
  const std::uint64_t count = (bytes_ + block_ - 1) / block_;
  if (sums_.size() != count)
    throw Damage(path_, -1, "expected checksums of " + std::to_string(count) + " blocks, found " +
                                std::to_string(sums_.size()));
  handle_ = std::make_shared<FileHandle>(path_);
  const std::uint64_t found = handle_->size();
  if (found != bytes_)
    throw Damage(path_, -1, "expected " + counted(bytes_) + ", found " + std::to_string(found));
  state_.reset(new std::atomic<std::uint8_t>[static_cast<std::size_t>(count)]);
  for (std::uint64_t b = 0; b < count; ++b) state_[b].store(kUnknown, std::memory_order_relaxed);
  left_.store(count, std::memory_order_release);
  if (!mapped_) {
    handle_.reset();
    return;
  }
#if defined(_WIN32)
  held_.resize(static_cast<std::size_t>(bytes_));
  if (handle_->read(held_.data(), held_.size(), 0) != held_.size())
    throw Damage(path_, -1, "expected " + counted(bytes_) + ", it became shorter");
  data_ = held_.data();
#else
  if (bytes_) {
    void* at = ::mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ, MAP_SHARED, handle_->fd, 0);
    if (at == MAP_FAILED) throw ReadError(path_, errno);
    data_ = static_cast<const unsigned char*>(at);
  }
#endif
  if (!count) handle_.reset();
}

CheckedFile::~CheckedFile() {
#if !defined(_WIN32)
  if (data_) ::munmap(const_cast<unsigned char*>(data_), static_cast<std::size_t>(bytes_));
#endif
}

std::uint64_t CheckedFile::unverified_bytes() const {
  std::uint64_t bytes = 0;
  if (verified()) return bytes;
  for (std::uint64_t b = 0; b < sums_.size(); ++b)
    if (state_[b].load(std::memory_order_relaxed) != kWhole) bytes += length_of(b);
  return bytes;
}

void CheckedFile::damaged(std::uint64_t block) const {
  throw Damage(path_, static_cast<std::int64_t>(block), "block " + std::to_string(block) + " is not as it was written");
}

void CheckedFile::look(std::uint64_t block) {
  const std::uint8_t now = state_[block].load(std::memory_order_acquire);
  if (now == kWhole) return;
  if (now == kDamaged) damaged(block);
  std::shared_ptr<FileHandle> handle;
  if (mapped_) {
    std::lock_guard<std::mutex> lock(mutex_);
    handle = handle_;
  } else {
    handle = std::make_shared<FileHandle>(path_);
  }
  if (!handle) return;  // another thread has just found the last block whole
  std::uint64_t length = length_of(block);
  const std::uint64_t wanted = length;
  const std::uint32_t crc = sum_of(*handle, block * block_, &length);
  if (length != wanted)  // not remembered: a file that is being copied back may be whole again
    throw Damage(path_, static_cast<std::int64_t>(block),
                 "expected " + counted(bytes_) + ", found " + std::to_string(block * block_ + length));
  std::uint8_t unknown = kUnknown;
  if (crc != sums_[static_cast<std::size_t>(block)]) {
    state_[block].compare_exchange_strong(unknown, kDamaged, std::memory_order_acq_rel);
    damaged(block);
  }
  if (!state_[block].compare_exchange_strong(unknown, kWhole, std::memory_order_acq_rel)) return;
  if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    std::lock_guard<std::mutex> lock(mutex_);
    handle_.reset();
  }
}

void CheckedFile::check_all() {
  if (verified()) return;
  const std::uint64_t each = std::max<std::uint64_t>(1, kUnit / block_);
  const std::uint64_t count = sums_.size();
  parallel_for(static_cast<std::size_t>((count + each - 1) / each), [&](std::size_t unit) {
    const std::uint64_t end = std::min(count, (unit + 1) * each);
    for (std::uint64_t b = unit * each; b < end; ++b) look(b);
  });
}

std::uint64_t CheckedFile::check_next(std::uint64_t most, bool parallel) {
  const std::uint64_t count = sums_.size(), wanted = std::max<std::uint64_t>(1, most / block_);
  if (verified() || next_.load(std::memory_order_relaxed) >= count) return 0;
  const std::uint64_t first = next_.fetch_add(wanted, std::memory_order_relaxed);
  if (first >= count) return 0;
  const std::uint64_t blocks = std::min(wanted, count - first);
  if (parallel)
    parallel_for(static_cast<std::size_t>(blocks), [&](std::size_t b) { look(first + b); });
  else
    for (std::uint64_t b = 0; b < blocks; ++b) look(first + b);
  const std::uint64_t end = first + blocks;
  return (end == count ? bytes_ : end * block_) - first * block_;
}

}  // namespace cdr
