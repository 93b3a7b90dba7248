// How reads and writes of files reach the kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lane.h"

namespace sgl_ext::transfer {

// One read or write on its way. `done` bytes of `length` have been transferred by earlier turns.
struct Io {
  Piece piece;
  int fd = -1;
  bool write = false;
  char* memory = nullptr;
  std::int64_t length = 0;
  std::int64_t offset = 0;
  std::int64_t done = 0;
  std::int64_t alignment = 1;  // of offsets in the file
  int buffer = -1;             // index of the registered buffer that holds `memory`
};

struct Completion {
  Io* io;
  std::int64_t result;  // bytes of this turn, or -errno
};

// One thread starts and reaps; any thread wakes, attaches and detaches.
class IoBackend {
 public:
  virtual ~IoBackend() = default;
  virtual const char* name() const = 0;
  // Asks for bytes [done, length) of `io`; takes effect with the next submit or reap.
  virtual void start(Io* io) = 0;
  virtual void submit() = 0;
  // Waits until something completed or wake() was called since the last reap; it may return
  // earlier. What the kernel refuses to take completes with the kernel's error.
  virtual void reap(std::vector<Completion>& completed) = 0;
  virtual void wake() = 0;

  // Registers memory with the kernel. -1 where that is not possible: it is then used as it is.
  virtual int attach(char*, std::int64_t) { return -1; }
  virtual void detach(int) {}
};

// Whether this build has io_uring; the machine may still refuse it.
bool io_uring_built();
// Null, with the reason, where this machine or build has no io_uring. At most `capacity` Ios are
// started and not completed.
std::unique_ptr<IoBackend> make_uring(std::size_t capacity, std::string& reason);
std::unique_ptr<IoBackend> make_thread_io(std::size_t threads);

}  // namespace sgl_ext::transfer
