// Words that every part of the transfer engine shares.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace sgl_ext::transfer {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// `height` rows of `width` bytes; row i goes from `src + i * src_pitch` to `dst + i * dst_pitch`.
// An address is a place in memory or, above kFileSpace, in a registered file.
struct Copy {
  std::int64_t src, dst, width, height, src_pitch, dst_pitch;

  std::int64_t bytes() const { return width * height; }
  bool contiguous() const { return height == 1 || (width == src_pitch && width == dst_pitch); }
};
static_assert(sizeof(Copy) == 6 * sizeof(std::int64_t), "a Copy is a row of the caller's array");

// Files are given addresses from here up: no pointer of a process is this large.
constexpr std::int64_t kFileSpace = std::int64_t{1} << 62;

// A more urgent ticket overtakes those below it in its lane.
enum class Level : std::uint8_t { bulk = 0, normal = 1, urgent = 2 };
constexpr std::size_t kLevels = 3;

enum class State : std::uint8_t { pending, done, failed, cancelled };

// Why a ticket failed. `code` is an errno, or an error number of the CUDA runtime.
struct Failure {
  int code = 0;
  std::size_t op = 0;
  std::string message;
};

// A request that the engine cannot carry out in the state that it, or the machine, is in.
// (Bad arguments are std::invalid_argument.)
class Refused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace sgl_ext::transfer
