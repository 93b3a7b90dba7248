// Multi-threaded memcpy, the baseline in benchmarks of the host lane.
#pragma once

#include <cstddef>

namespace sgl_ext::transfer {

// Copies in `threads` equal parts: the caller copies one part and the remainder, and threads that
// persist across calls copy the others. Concurrent calls are serialized.
void plain_memcpy(void* dst, const void* src, std::size_t bytes, std::size_t threads);

}  // namespace sgl_ext::transfer
