// Parallel regions on the OpenMP thread pool of torch, which is already in the process.
#pragma once

namespace sgl_ext {

// Returns the path of the OpenMP runtime found among the loaded libraries, or "" if there is none.
const char *openmp_library();

// Runs `body(data)` on up to `threads` threads, including the calling thread, and waits for all of
// them. Without an OpenMP runtime, or if `threads` is at most 1, only the calling thread runs it.
// `body` must not throw.
void parallel(int threads, void (*body)(void *), void *data);

}  // namespace sgl_ext
