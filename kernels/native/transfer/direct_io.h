// What O_DIRECT asks for.
#pragma once

#include <cstdint>
#include <optional>

namespace sgl_ext::transfer {

struct DirectIo {
  std::int64_t memory_alignment, offset_alignment;
};

// What direct I/O on `fd` demands; nothing if its file system has none.
std::optional<DirectIo> direct_io(int fd);

}  // namespace sgl_ext::transfer
