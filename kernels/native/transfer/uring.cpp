#include "io_backend.h"

#if defined(SGL_EXT_HAVE_LIBURING)

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

// The kernel refuses larger buffers.
constexpr std::int64_t kMaxBuffer = std::int64_t{1} << 30;
constexpr unsigned kBufferSlots = 1024;
// Until the next attempt where the kernel takes nothing, unless something happens before.
constexpr int kPauseMs = 10;

class Uring final : public IoBackend {
 public:
  ~Uring() override {
    if (wake_fd_ >= 0) ::close(wake_fd_);
    if (ready_) io_uring_queue_exit(&ring_);
  }

  // 0 or an errno.
  int open(std::size_t capacity) {
    io_uring_params parameters{};
    // Completions run when the lane's thread enters the kernel anyway, not by interrupting it.
    parameters.flags = IORING_SETUP_COOP_TASKRUN;
    const auto entries = static_cast<unsigned>(capacity + 1);  // one to be woken
    int result = io_uring_queue_init_params(entries, &ring_, &parameters);
    if (result == -EINVAL) {  // a kernel before 5.19
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

  // Whatever the kernel says against it, it says again at the next reap.
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
    // It fails only when 2^64 - 1 wakes wait to be read.
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

  // Never null: the queue is as long as all that is ever staged.
  io_uring_sqe* stage(Io* io) {
    staged_.push_back(io);
    return io_uring_get_sqe(&ring_);
  }

  // Notes what the kernel has taken out of the queue. 0 or an errno.
  int taken(int result) {
    const std::size_t count = staged_.size() - io_uring_sq_ready(&ring_);
    staged_.erase(staged_.begin(), staged_.begin() + static_cast<std::ptrdiff_t>(count));
    in_flight_ += count;
    return result < 0 ? -result : 0;
  }

  // Fails what the kernel has not taken, and takes it out of the queue, which the kernel reads
  // only when it is entered: no later call may start it, for its memory is then another's.
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

  // What is in flight ends and is found here even where the kernel cannot be entered. What the
  // read of wake_fd_ came to: 0 if it goes on. A wake that it took is told nowhere else.
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

  // Waits in place of the ring: for wake(), for a completion (it interrupts), or a moment.
  void pause() {
    // A read in flight takes the wakes: its completion tells of them.
    const bool reading =
        listening_ && std::find(staged_.begin(), staged_.end(), nullptr) == staged_.end();
    const bool idle = in_flight_ == 0 && staged_.empty();
    pollfd waker{wake_fd_, POLLIN, 0};
    if (::poll(&waker, reading ? 0 : 1, idle ? -1 : kPauseMs) < 1) return;
    if (waker.revents & POLLIN) {
      [[maybe_unused]] const auto count = ::read(wake_fd_, &wakes_, sizeof wakes_);
    } else {  // somebody has closed it
      ::poll(nullptr, 0, kPauseMs);
    }
  }

  io_uring ring_{};
  bool ready_ = false;
  int wake_fd_ = -1;
  bool listening_ = false;  // the read of wake_fd_ is staged or in flight
  std::uint64_t wakes_ = 0;
  std::vector<Io*> staged_;     // what the queue holds, in order; null is the read of wake_fd_
  std::size_t in_flight_ = 0;  // taken by the kernel and not collected
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
