// Lane that copies between host memory and files.
#pragma once

#include <map>

#include "io_backend.h"
#include "lane.h"

namespace sgl_ext::transfer {

class FileLane final : public Lane {
 public:
  struct Limits {
    std::size_t depth;          // reads and writes in flight, per level
    std::int64_t bytes;         // bytes in flight, per level; the last request may exceed it
    std::int64_t request;       // largest read or write, in bytes
  };

  // Each level has its own budget of `limits.depth` requests and `limits.bytes` bytes in flight. An
  // urgent request therefore never waits for a slot that a lower level holds, only for the backend
  // and the device to complete the requests in flight.
  FileLane(std::shared_ptr<Hub> hub, std::unique_ptr<IoBackend> backend, const Limits& limits);

  // Throws std::invalid_argument if the depth or the request size is out of range.
  static void check(const Limits& limits);
  // Returns the number of requests that the backend of a lane with these limits must hold.
  static std::size_t capacity(const Limits& limits) { return kLevels * limits.depth; }

  const char* backend() const { return backend_->name(); }
  const Limits& limits() const { return limits_; }
  std::int64_t registered_bytes() const;

  std::optional<std::string> refuses(const Copy& copy, const Region& src,
                                     const Region& dst) const override;
  void attach(const Region& region) override;
  void detach(const Region& region) override;
  void start() override { start_threads(1); }

 protected:
  void work(std::size_t thread) override;
  void work_came(const Ticket& ticket) override;
  void wake_all() override { backend_->wake(); }

 private:
  struct Buffer {
    std::int64_t region, end;
    int slot;
  };

  unsigned admitted() const;
  bool refill();
  void prepare(Io& io) const;
  bool settle(Io& io, std::int64_t result);

  const Limits limits_;
  const std::unique_ptr<IoBackend> backend_;
  std::vector<Io> ios_;
  std::vector<Io*> idle_;
  bool asleep_ = false;                     // new work must wake the thread; guarded by mutex_
  std::map<std::int64_t, Buffer> buffers_;  // registered buffers by address; guarded by mutex_
};

// Creates a region for the first `length` bytes of `fd`, a regular file or a device that can
// be read at an offset, and takes ownership of `fd`. Offsets and addresses must be aligned
// if the file is open with O_DIRECT. Throws std::invalid_argument if the file is not
// suitable; `fd` is then closed.
std::shared_ptr<Region> file_region(int fd, std::int64_t length, const Lane& lane);

}  // namespace sgl_ext::transfer
