// Alignment that direct I/O (O_DIRECT) requires.
#pragma once

#include <cstdint>
#include <optional>

namespace sgl_ext::transfer {

struct DirectIo {
  std::int64_t memory_alignment, offset_alignment;
};

// Returns the alignment that direct I/O on `fd` requires, in bytes, or nullopt if the file system
// does not support direct I/O.
std::optional<DirectIo> direct_io(int fd);

}  // namespace sgl_ext::transfer
