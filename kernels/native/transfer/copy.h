// Copying memory at the speed of memory.
#pragma once

#include "types.h"

namespace sgl_ext::transfer {

// memcpy whose stores go around the caches, where the processor can: no line of the destination
// is read first, and nothing is evicted for it.
void stream_copy(char* dst, const char* src, std::size_t bytes);

// Copies the rows of a run whose sides do not overlap. `stream`: wide rows go around the caches.
void copy_rows(const Copy& run, bool stream);

}  // namespace sgl_ext::transfer
