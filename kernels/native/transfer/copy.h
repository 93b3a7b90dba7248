// Memory copies, optionally with non-temporal stores.
#pragma once

#include "types.h"

namespace sgl_ext::transfer {

// memcpy with non-temporal stores where the processor supports them: no cache line of the
// destination is read first, and none is evicted for it.
void stream_copy(char* dst, const char* src, std::size_t bytes);

// Copies the rows of a run whose source and destination do not overlap. If `stream` is set, the
// stores of wide rows bypass the caches.
void copy_rows(const Copy& run, bool stream);

}  // namespace sgl_ext::transfer
