// What the memory of the process is to the simulated device.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "range.h"

namespace fake {

// Disjoint areas of memory.
class Areas {
 public:
  void add(const Range& area) { ends_[area.base] = area.end(); }
  // Removes the area that begins at `memory`.
  void remove(const void* memory) { ends_.erase(Range(memory, 1).base); }
  // Returns the size of the area that begins at `memory`, or 0.
  std::size_t bytes_at(const void* memory) const;
  // Returns the first byte and the end of the area that contains a byte; or 0 and 0.
  std::pair<std::int64_t, std::int64_t> around(std::int64_t byte) const;
  bool meets(const Range& range) const;
  // Returns whether adjacent areas contain all bytes from the first row to the last.
  bool contain(const Range& range) const;
  std::size_t bytes() const;
  std::size_t count() const { return ends_.size(); }

 private:
  std::map<std::int64_t, std::int64_t> ends_;  // by first byte
};

// The device's mutex protects it.
class Memory {
 public:
  Areas registered;  // host memory, by cudaHostRegister
  Areas declared;    // host memory that takes the place of device memory
  Areas reserved;    // addresses, by the driver, and the pieces that are mapped there
  Areas mapped;
  Areas usable;      // mapped pieces that the device may access

  bool on_device(const Range& range) const {
    return declared.meets(range) || reserved.meets(range);
  }
  // Returns whether a copy from or to the range is asynchronous on a device.
  bool accessible(const Range& range) const {
    return registered.contain(range) || declared.contain(range) || reserved.contain(range);
  }
  // Returns whether a job that accesses the range would end the context of a device.
  bool unmapped(const Range& range) const;
  // Maps a piece, of which `file` is the number, at addresses that the driver has reserved.
  void map(const Range& range, std::uint64_t file);
  void unmap(const void* memory);
  // Returns the parts of the range in pieces, which may be mapped at several addresses.
  std::vector<Range> physical(Range range) const;

  void name(const Range& range, const std::string& text) {
    names_.insert({range.width, {range, text}});
  }
  void clear_names() { names_.clear(); }
  std::string describe(const Range& range) const;

 private:
  std::map<std::uint64_t, std::int64_t> pieces_;   // address that nothing else has, by file
  std::map<std::int64_t, std::int64_t> piece_at_;  // the same by first byte of a mapping
  std::int64_t next_piece_ = std::int64_t{1} << 60;
  // By size: the description of a page precedes that of its arena.
  std::multimap<std::int64_t, std::pair<Range, std::string>> names_;
};

}  // namespace fake
