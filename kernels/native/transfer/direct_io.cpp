#include "direct_io.h"

// <linux/stat.h> instead of <sys/stat.h>: the C library's struct statx may lack the fields for
// direct I/O.
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace sgl_ext::transfer {

std::optional<DirectIo> direct_io(int fd) {
#if defined(STATX_DIOALIGN) && defined(SYS_statx)
  struct statx status = {};
  constexpr int kEmptyPath = 0x1000;  // AT_EMPTY_PATH
  if (::syscall(SYS_statx, fd, "", kEmptyPath, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN)) {
    if (status.stx_dio_offset_align == 0) return std::nullopt;
    return DirectIo{status.stx_dio_mem_align, status.stx_dio_offset_align};
  }
#endif
  // Kernels before 6.1 and some file systems do not report the alignment. Page
  // alignment satisfies every device.
  (void)fd;
  const long page = ::sysconf(_SC_PAGESIZE);
  return DirectIo{page, page};
}

}  // namespace sgl_ext::transfer
