#include "copy.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sgl_ext::transfer {

namespace {

// Narrowest row for which non-temporal stores are used, in bytes. The unaligned ends and the fence
// of a narrower row cost more than the caches.
constexpr std::int64_t kStreamRow = 64 << 10;

#if defined(__x86_64__)

__attribute__((target("avx"))) void stream_avx(char* dst, const char* src, std::size_t bytes) {
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(dst) & 63;
  if (bytes < head + 128) {
    std::memcpy(dst, src, bytes);
    return;
  }
  std::memcpy(dst, src, head);
  dst += head, src += head, bytes -= head;
  for (; bytes >= 128; dst += 128, src += 128, bytes -= 128) {
    // A prefetch never faults, not even past the end of the source.
    _mm_prefetch(src + 1024, _MM_HINT_T0);
    _mm_prefetch(src + 1088, _MM_HINT_T0);
    const auto* from = reinterpret_cast<const __m256i*>(src);
    auto* to = reinterpret_cast<__m256i*>(dst);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    const __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
    _mm256_stream_si256(to + 2, c);
    _mm256_stream_si256(to + 3, d);
  }
  // Non-temporal stores are weakly ordered. Without the fence, the lock operation that publishes
  // the completion of the piece could become visible before them.
  _mm_sfence();
  std::memcpy(dst, src, bytes);
}

const bool has_avx = __builtin_cpu_supports("avx");

#endif

}  // namespace

void stream_copy(char* dst, const char* src, std::size_t bytes) {
#if defined(__x86_64__)
  if (has_avx) return stream_avx(dst, src, bytes);
#endif
  std::memcpy(dst, src, bytes);
}

void copy_rows(const Copy& run, bool stream) {
  auto* dst = reinterpret_cast<char*>(run.dst);
  const auto* src = reinterpret_cast<const char*>(run.src);
  const auto width = static_cast<std::size_t>(run.width);
  stream = stream && run.width >= kStreamRow;
  for (std::int64_t row = 0; row < run.height; ++row) {
    stream ? stream_copy(dst, src, width) : (void)std::memcpy(dst, src, width);
    dst += run.dst_pitch;
    src += run.src_pitch;
  }
}

}  // namespace sgl_ext::transfer
