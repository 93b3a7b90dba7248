// Fake of the CUDA driver's functions that map device memory, to lend it: files in host memory take
// its place. A test can count the remaining objects and make the functions fail.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { kInvalid = 1, kMemory = 2, kDevice = 101, kGranularity = 2 << 20 };

struct location {
  int type, id;
};

struct properties {
  int type, handle_types;
  struct location location;
  void *windows;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};

struct access {
  struct location location;
  int flags;
};

static int next_error;
static int reserved_, mapped, handles;

__attribute__((visibility("default"))) size_t fake_free = (size_t)1 << 30;

int fake_reserved(void) { return reserved_; }
int fake_mapped(void) { return mapped; }
int fake_handles(void) { return handles; }
// Makes the next call that can fail return `error`.
void fake_fail(int error) { next_error = error; }

static int failed(void) {
  const int error = next_error;
  next_error = 0;
  return error;
}

static int valid(const struct properties *wanted) {
  return wanted->type == 1 && wanted->handle_types == 1 && wanted->location.type == 1 &&
         wanted->windows == NULL && wanted->usage == 0;
}

int cuInit(unsigned flags) { return flags ? kInvalid : 0; }

int cuGetErrorName(int error, const char **name) {
  *name = error == kInvalid  ? "CUDA_ERROR_INVALID_VALUE"
          : error == kMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == kDevice ? "CUDA_ERROR_INVALID_DEVICE"
                             : NULL;
  return *name ? 0 : kInvalid;
}

int cuMemGetAllocationGranularity(size_t *found, const struct properties *wanted, int which) {
  if (!valid(wanted) || which != 0) return kInvalid;
  if (wanted->location.id != 0) return kDevice;
  *found = kGranularity;
  return 0;
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wish,
                        unsigned long long flags) {
  const int error = failed();
  if (error) return error;
  if (size % kGranularity || alignment || wish || flags) return kInvalid;
  void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return kMemory;
  *address = (uint64_t)(uintptr_t)found;
  ++reserved_;
  return 0;
}

int cuMemAddressFree(uint64_t address, size_t size) {
  --reserved_;
  return munmap((void *)(uintptr_t)address, size) ? kInvalid : 0;
}

int cuMemCreate(uint64_t *handle, size_t size, const struct properties *wanted,
                unsigned long long flags) {
  const int error = failed();
  if (error) return error;
  if (!valid(wanted) || flags || size % kGranularity) return kInvalid;
  if (wanted->location.id != 0) return kDevice;
  if (size > fake_free) return kMemory;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size)) return kMemory;
  *handle = (uint64_t)fd;
  ++handles;
  return 0;
}

int cuMemRelease(uint64_t handle) {
  --handles;
  return close((int)handle) ? kInvalid : 0;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle,
             unsigned long long flags) {
  const int error = failed();
  if (error) return error;
  struct stat status;
  if (offset || flags || fstat((int)handle, &status) || (size_t)status.st_size != size) {
    return kInvalid;
  }
  // The memory is inaccessible until cuMemSetAccess is called.
  void *found = mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED,
                     (int)handle, 0);
  if (found == MAP_FAILED) return kInvalid;
  ++mapped;
  return 0;
}

int cuMemUnmap(uint64_t address, size_t size) {
  const int error = failed();
  if (error) return error;
  --mapped;
  return mmap((void *)(uintptr_t)address, size, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED
             ? kInvalid
             : 0;
}

int cuMemSetAccess(uint64_t address, size_t size, const struct access *wanted, size_t count) {
  const int error = failed();
  if (error) return error;
  if (count != 1 || wanted->location.type != 1 || wanted->location.id != 0 || wanted->flags != 3) {
    return kInvalid;
  }
  return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE) ? kInvalid : 0;
}

int cuMemExportToShareableHandle(int *found, uint64_t handle, int type, unsigned long long flags) {
  const int error = failed();
  if (error) return error;
  if (type != 1 || flags) return kInvalid;
  *found = dup((int)handle);
  return *found < 0 ? kInvalid : 0;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *shared, int type) {
  const int error = failed();
  if (error) return error;
  struct stat status;
  const int fd = (int)(intptr_t)shared;
  if (type != 1 || fstat(fd, &status) || !S_ISREG(status.st_mode)) return kInvalid;
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return kInvalid;
  *handle = (uint64_t)copy;
  ++handles;
  return 0;
}
