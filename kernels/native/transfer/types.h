// Types and constants shared by all parts of the transfer engine.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace sgl_ext::transfer {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Strided copy of `height` rows of `width` bytes: row i is copied from `src + i * src_pitch` to
// `dst + i * dst_pitch`. Addresses below kFileSpace are memory addresses; addresses from kFileSpace
// up lie in registered files.
struct Copy {
  std::int64_t src, dst, width, height, src_pitch, dst_pitch;

  std::int64_t bytes() const { return width * height; }
  bool contiguous() const { return height == 1 || (width == src_pitch && width == dst_pitch); }
};
static_assert(sizeof(Copy) == 6 * sizeof(std::int64_t), "a Copy is a row of the caller's array");

// Start of the address range assigned to registered files. No pointer of a process is this large.
constexpr std::int64_t kFileSpace = std::int64_t{1} << 62;

// Priority of a ticket. Within a lane, a ticket overtakes the tickets of lower levels.
enum class Level : std::uint8_t { bulk = 0, normal = 1, urgent = 2 };
constexpr std::size_t kLevels = 3;

enum class State : std::uint8_t { pending, done, failed, cancelled };

// Cause of a ticket's failure. `code` is an errno or an error number of the CUDA runtime; `op` is
// the index of the failed copy.
struct Failure {
  int code = 0;
  std::size_t op = 0;
  std::string message;
};

// Thrown when the state of the engine or of the machine does not permit a request. Invalid
// arguments throw std::invalid_argument instead.
class Refused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace sgl_ext::transfer
