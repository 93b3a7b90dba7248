// Registered memory and files that copies may access.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "types.h"

namespace sgl_ext::transfer {

class Lane;

enum class Kind : std::uint8_t { host, device, file };

struct Region {
  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { close_file(); }

  bool contains(std::int64_t first, std::int64_t extent) const {
    return first >= base && extent <= length && first - base <= length - extent;
  }
  std::string describe() const;
  // Closes the file, if any. Nothing may use the region during the call or afterwards.
  void close_file();

  std::int64_t id = 0;
  std::int64_t base = 0;
  std::int64_t length = 0;
  Kind kind = Kind::host;
  bool writable = true;
  // Host memory: the physical pages never change while the region is registered, so that the kernel
  // may keep references to them.
  bool pinned = false;
  // File: the descriptor, which the region owns; the lane that reads and writes the file; and the
  // alignment that O_DIRECT requires of addresses in memory and of offsets and lengths in the
  // file, in bytes (1: none).
  int fd = -1;
  const Lane* lane = nullptr;
  std::int64_t memory_alignment = 1;
  std::int64_t offset_alignment = 1;
  // Unfinished tickets that use the region. Incremented under the lock of Regions, or without it by
  // Ticket::share_regions() while the count is positive; decremented without it.
  std::atomic<std::int64_t> uses{0};
};

// Disjoint regions, ordered by address. Thread-safe.
class Regions {
 public:
  // Adds the region and assigns it an ID and, if it is a file, an address.
  std::shared_ptr<Region> add(std::shared_ptr<Region> region);
  // Throws Refused while unfinished tickets use the region.
  std::shared_ptr<Region> remove(std::int64_t id);
  std::vector<std::shared_ptr<Region>> all() const;

  // Locks the regions while a batch is resolved against them.
  class Lookup {
   public:
    explicit Lookup(const Regions& regions) : regions_(regions), lock_(regions.mutex_) {}
    // Returns the region that contains `address`, or null.
    const std::shared_ptr<Region>* find(std::int64_t address) const;

   private:
    const Regions& regions_;
    std::lock_guard<std::mutex> lock_;
  };

 private:
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<Region>> by_base_;
  std::map<std::int64_t, std::int64_t> base_of_;
  std::int64_t next_id_ = 1;
  std::int64_t next_file_ = kFileSpace;
};

}  // namespace sgl_ext::transfer
