#include "plain_memcpy.h"

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "threads.h"

namespace sgl_ext::transfer {

namespace {

class Helpers {
 public:
  explicit Helpers(std::size_t count) : count_(count) {
    for (std::size_t i = 0; i < count; ++i) start_thread([this, i] { help(i); }).detach();
  }
  std::size_t count() const { return count_; }

  void copy(char* dst, const char* src, std::size_t bytes) {
    const std::size_t part = bytes / (count_ + 1);
    {
      std::lock_guard lock(mutex_);
      dst_ = dst, src_ = src, part_ = part, left_ = count_;
      ++round_;
    }
    began_.notify_all();
    std::memcpy(dst + count_ * part, src + count_ * part, bytes - count_ * part);
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  void help(std::size_t index) {
    std::unique_lock lock(mutex_);
    for (std::size_t round = 0;;) {
      began_.wait(lock, [&] { return round_ != round; });
      round = round_;
      lock.unlock();
      std::memcpy(dst_ + index * part_, src_ + index * part_, part_);
      lock.lock();
      if (--left_ == 0) ended_.notify_one();
    }
  }

  const std::size_t count_;
  std::mutex mutex_;
  std::condition_variable began_, ended_;
  char* dst_ = nullptr;
  const char* src_ = nullptr;
  std::size_t part_ = 0, left_ = 0, round_ = 0;
};

}  // namespace

void plain_memcpy(void* dst, const void* src, std::size_t bytes, std::size_t threads) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("expected 1 to 1024 threads");
  static std::mutex mutex;
  static std::vector<Helpers*> kept;  // their threads sleep until the process exits
  std::lock_guard lock(mutex);
  Helpers* helpers = nullptr;
  for (Helpers* candidate : kept) {
    if (candidate->count() == threads - 1) helpers = candidate;
  }
  if (!helpers) helpers = kept.emplace_back(new Helpers(threads - 1));
  helpers->copy(static_cast<char*>(dst), static_cast<const char*>(src), bytes);
}

}  // namespace sgl_ext::transfer
