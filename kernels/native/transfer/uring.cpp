#include "io_backend.h"

#if defined(SGLEXT_HAVE_LIBURING)

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

namespace sgl_ext::transfer {

namespace {

// Largest buffer that the kernel registers, in bytes.
constexpr std::int64_t kMaxBuffer = std::int64_t{1} << 30;
constexpr unsigned kBufferSlots = 1024;
// Time until the next submission after the kernel has accepted nothing, in milliseconds. A wake-up
// or a completion ends it early.
constexpr int kPauseMs = 10;

class Uring final : public IoBackend {
 public:
  ~Uring() override {
    if (wake_fd_ >= 0) ::close(wake_fd_);
    if (ready_) io_uring_queue_exit(&ring_);
  }

  // Returns 0 or an errno.
  int open(std::size_t capacity) {
    io_uring_params parameters{};
    // Processes completions when the lane's thread next enters the kernel, without interrupting it.
    parameters.flags = IORING_SETUP_COOP_TASKRUN;
    const auto entries = static_cast<unsigned>(capacity + 1);  // one for the read of wake_fd_
    int result = io_uring_queue_init_params(entries, &ring_, &parameters);
    if (result == -EINVAL) {  // kernels before 5.19 lack the flag
      parameters = {};
      result = io_uring_queue_init_params(entries, &ring_, &parameters);
    }
    if (result < 0) return -result;
    ready_ = true;
    wake_fd_ = ::eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return errno;
    slots_ = io_uring_register_buffers_sparse(&ring_, kBufferSlots) == 0 ? kBufferSlots : 0;
    used_.resize(slots_);
    return 0;
  }

  const char* name() const override { return "io_uring"; }

  void start(Io* io) override {
    io_uring_sqe* sqe = stage(io);
    char* memory = io->memory + io->done;
    const auto length = static_cast<unsigned>(io->length - io->done);
    const auto offset = static_cast<std::uint64_t>(io->offset + io->done);
    if (io->buffer >= 0) {
      io->write ? io_uring_prep_write_fixed(sqe, io->fd, memory, length, offset, io->buffer)
                : io_uring_prep_read_fixed(sqe, io->fd, memory, length, offset, io->buffer);
    } else {
      io->write ? io_uring_prep_write(sqe, io->fd, memory, length, offset)
                : io_uring_prep_read(sqe, io->fd, memory, length, offset);
    }
    io_uring_sqe_set_data(sqe, io);
  }

  // Ignores errors: the kernel reports them again at the next reap().
  void submit() override { taken(io_uring_submit(&ring_)); }

  void reap(std::vector<Completion>& completed) override {
    if (!listening_) {
      io_uring_sqe* sqe = stage(nullptr);
      io_uring_prep_read(sqe, wake_fd_, &wakes_, sizeof wakes_, 0);
      io_uring_sqe_set_data(sqe, nullptr);
      listening_ = true;
    }
    const int error = taken(io_uring_submit_and_wait(&ring_, 1));
    const bool passing = error == EINTR || error == EAGAIN || error == EBUSY;
    if (error != 0 && !passing) withdraw(error, completed);
    const int heard = collect(completed);
    if (heard > 0 || !completed.empty() || (error == 0 && heard == 0)) return;
    pause();
    collect(completed);
  }

  void wake() override {
    const std::uint64_t one = 1;
    // Fails only if something else has closed wake_fd_; blocks only if 2^64 - 2 wake-ups are
    // unread.
    [[maybe_unused]] const auto written = ::write(wake_fd_, &one, sizeof one);
  }

  int attach(char* memory, std::int64_t length) override {
    if (length > kMaxBuffer) return -1;
    std::lock_guard lock(slots_mutex_);
    for (unsigned slot = 0; slot < slots_; ++slot) {
      if (used_[slot]) continue;
      const iovec buffer{memory, static_cast<std::size_t>(length)};
      if (update(slot, buffer) < 0) return -1;
      used_[slot] = true;
      return static_cast<int>(slot);
    }
    return -1;
  }

  void detach(int slot) override {
    std::lock_guard lock(slots_mutex_);
    update(static_cast<unsigned>(slot), iovec{nullptr, 0});
    used_[static_cast<unsigned>(slot)] = false;
  }

 private:
  int update(unsigned slot, const iovec& buffer) {
    const __u64 tag = 0;
    return io_uring_register_buffers_update_tag(&ring_, slot, &buffer, &tag, 1);
  }

  // Never returns null: the submission queue has an entry for every request that may be staged.
  io_uring_sqe* stage(Io* io) {
    staged_.push_back(io);
    return io_uring_get_sqe(&ring_);
  }

  // Accounts for the entries that the kernel has consumed from the submission queue. Returns 0 or
  // an errno.
  int taken(int result) {
    const std::size_t count = staged_.size() - io_uring_sq_ready(&ring_);
    staged_.erase(staged_.begin(), staged_.begin() + static_cast<std::ptrdiff_t>(count));
    in_flight_ += count;
    return result < 0 ? -result : 0;
  }

  // Fails the requests that the kernel has not consumed and removes them from the submission queue;
  // the kernel reads the queue only during io_uring_enter(). A later call must not start them,
  // because their memory may be in use for something else by then.
  void withdraw(int error, std::vector<Completion>& completed) {
    for (Io* io : staged_) {
      if (io) {
        completed.push_back({io, -error});
      } else {
        listening_ = false;
      }
    }
    staged_.clear();
    const unsigned head = *ring_.sq.khead;
    ring_.sq.sqe_head = ring_.sq.sqe_tail = head;
    *ring_.sq.ktail = head;
  }

  // Collects completions. Requests in flight complete and are found here even if io_uring_enter()
  // fails. Returns the result of the read of wake_fd_, or 0 if the read is still pending. This is
  // the only report of a wake-up that the read has consumed.
  int collect(std::vector<Completion>& completed) {
    int heard = 0;
    unsigned head, count = 0;
    io_uring_cqe* cqe;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++count;
      if (auto* io = static_cast<Io*>(io_uring_cqe_get_data(cqe))) {
        completed.push_back({io, cqe->res});
      } else {
        listening_ = false;
        heard = cqe->res;
      }
    }
    io_uring_cq_advance(&ring_, count);
    in_flight_ -= count;
    return heard;
  }

  // Waits with poll() instead of the ring: for wake(), for a completion (which interrupts poll()),
  // or for kPauseMs unless nothing is staged or in flight.
  void pause() {
    // A read in flight consumes the wake-ups, and its completion reports them.
    const bool reading =
        listening_ && std::find(staged_.begin(), staged_.end(), nullptr) == staged_.end();
    const bool idle = in_flight_ == 0 && staged_.empty();
    pollfd waker{wake_fd_, POLLIN, 0};
    if (::poll(&waker, reading ? 0 : 1, idle ? -1 : kPauseMs) < 1) return;
    if (waker.revents & POLLIN) {
      [[maybe_unused]] const auto count = ::read(wake_fd_, &wakes_, sizeof wakes_);
    } else {  // something else has closed wake_fd_
      ::poll(nullptr, 0, kPauseMs);
    }
  }

  io_uring ring_{};
  bool ready_ = false;
  int wake_fd_ = -1;
  bool listening_ = false;  // the read of wake_fd_ is staged or in flight
  std::uint64_t wakes_ = 0;
  std::vector<Io*> staged_;     // submission queue in order; null stands for the read of wake_fd_
  std::size_t in_flight_ = 0;  // consumed by the kernel and not yet collected
  std::mutex slots_mutex_;
  unsigned slots_ = 0;
  std::vector<bool> used_;
};

}  // namespace

bool io_uring_built() { return true; }

std::unique_ptr<IoBackend> make_uring(std::size_t capacity, std::string& reason) {
  auto ring = std::make_unique<Uring>();
  const int error = ring->open(capacity);
  if (error == 0) return ring;
  reason = std::string("the kernel refused io_uring: ") + std::strerror(error);
  if (error == EPERM || error == ENOSYS) {
    reason += "; allow it in the container's seccomp profile and in kernel.io_uring_disabled";
  }
  if (error == ENOMEM) reason += "; it may be the limit on locked memory (RLIMIT_MEMLOCK): raise it";
  return nullptr;
}

}  // namespace sgl_ext::transfer

#else

namespace sgl_ext::transfer {

bool io_uring_built() { return false; }

std::unique_ptr<IoBackend> make_uring(std::size_t, std::string& reason) {
  reason = "this build has no io_uring: liburing was not found when it was built";
  return nullptr;
}

}  // namespace sgl_ext::transfer

#endif
