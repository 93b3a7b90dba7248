// What the host lane is measured against.
#pragma once

#include <cstddef>

namespace sgl_ext::transfer {

// memcpy in `threads` equal parts: one by the caller, the others by threads that are kept from
// call to call. One caller at a time.
void plain_memcpy(void* dst, const void* src, std::size_t bytes, std::size_t threads);

}  // namespace sgl_ext::transfer
