#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "io_backend.h"
#include "threads.h"

namespace sgl_ext::transfer {

namespace {

class ThreadIo final : public IoBackend {
 public:
  explicit ThreadIo(std::size_t threads) {
    try {
      for (std::size_t i = 0; i < threads; ++i) threads_.push_back(start_thread([this] { work(); }));
    } catch (const std::system_error& error) {
      stop();
      throw Refused(std::string("no thread for file I/O could be started: ") + error.what());
    }
  }
  ~ThreadIo() override { stop(); }

  const char* name() const override { return "threads"; }

  void start(Io* io) override {
    {
      std::lock_guard lock(mutex_);
      asked_.emplace(io->piece.ticket->level, io);
    }
    came_.notify_one();
  }

  void submit() override {}

  void reap(std::vector<Completion>& completed) override {
    std::unique_lock lock(mutex_);
    reapable_.wait(lock, [this] { return woken_ || !completed_.empty(); });
    woken_ = false;
    completed.insert(completed.end(), completed_.begin(), completed_.end());
    completed_.clear();
  }

  void wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    reapable_.notify_one();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      came_.wait(lock, [this] { return stopping_ || !asked_.empty(); });
      if (asked_.empty()) return;
      Io* io = asked_.begin()->second;
      asked_.erase(asked_.begin());
      lock.unlock();
      char* memory = io->memory + io->done;
      const auto length = static_cast<std::size_t>(io->length - io->done);
      const off_t offset = io->offset + io->done;
      const ssize_t result = io->write ? ::pwrite(io->fd, memory, length, offset)
                                       : ::pread(io->fd, memory, length, offset);
      const std::int64_t outcome = result < 0 ? -errno : result;
      lock.lock();
      completed_.push_back({io, outcome});
      reapable_.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    came_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::mutex mutex_;
  std::condition_variable came_, reapable_;
  std::multimap<Level, Io*, std::greater<>> asked_;  // most urgent first, FIFO within a level
  std::vector<Completion> completed_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoBackend> make_thread_io(std::size_t threads) {
  return std::make_unique<ThreadIo>(threads);
}

}  // namespace sgl_ext::transfer
