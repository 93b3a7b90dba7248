// Parallel regions on the OpenMP pool that is already in the process: torch's.
#pragma once

namespace sgl_ext {

// Path of the OpenMP runtime found among the loaded libraries, or "" where none is.
const char *openmp_library();

// Runs `body(data)` on up to `threads` threads, the caller's included, and waits for all. Without
// an OpenMP runtime, and for one thread, only the caller runs it. `body` must not throw.
void parallel(int threads, void (*body)(void *), void *data);

}  // namespace sgl_ext
