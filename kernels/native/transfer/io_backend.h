// Interface of the backends that submit file reads and writes to the kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lane.h"

namespace sgl_ext::transfer {

// A read or write request. Earlier submissions have transferred `done` of its `length` bytes.
struct Io {
  Piece piece;
  int fd = -1;
  bool write = false;
  char* memory = nullptr;
  std::int64_t length = 0;
  std::int64_t offset = 0;
  std::int64_t done = 0;
  std::int64_t alignment = 1;  // of offsets in the file, in bytes
  int buffer = -1;             // index of the registered buffer that contains `memory`, or -1
};

struct Completion {
  Io* io;
  std::int64_t result;  // bytes transferred by this submission, or -errno
};

// One thread calls start(), submit() and reap(); any thread may call wake(), attach() and detach().
class IoBackend {
 public:
  virtual ~IoBackend() = default;
  virtual const char* name() const = 0;
  // Queues bytes [done, length) of `io`, which the next submit() or reap() submits at the latest.
  virtual void start(Io* io) = 0;
  virtual void submit() = 0;
  // Blocks until a request has completed or wake() has been called since the last reap(); may
  // return earlier. A request that the kernel does not accept completes with the kernel's error.
  virtual void reap(std::vector<Completion>& completed) = 0;
  virtual void wake() = 0;

  // Registers a buffer with the kernel and returns its index. Returns -1 if that is not possible;
  // the memory is then used without registration.
  virtual int attach(char*, std::int64_t) { return -1; }
  virtual void detach(int) {}
};

// Returns whether this build supports io_uring; the kernel may still refuse it.
bool io_uring_built();
// Returns null and sets `reason` if this build or this machine does not support io_uring. At most
// `capacity` requests may be started and not completed.
std::unique_ptr<IoBackend> make_uring(std::size_t capacity, std::string& reason);
std::unique_ptr<IoBackend> make_thread_io(std::size_t threads);

}  // namespace sgl_ext::transfer
