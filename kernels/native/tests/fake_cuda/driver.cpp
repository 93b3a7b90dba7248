// Functions of the CUDA driver that map device memory, to lend it: files in host memory take its
// place.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device.h"
#include "errors.h"

using fake::Device;
using fake::kInvalidDevice;
using fake::kInvalidValue;
using fake::kOutOfMemory;
using fake::kSuccess;
using fake::Range;
using Lock = Device::Lock;

std::size_t fake_free_bytes = std::size_t{1} << 30;

namespace {

constexpr std::size_t kGranularity = 2 << 20;

struct Location {
  int type, id;
};

struct Properties {
  int type, handle_types;
  Location location;
  void* windows;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};

struct Access {
  Location location;
  int flags;
};

int handles = 0;

int failed() {
  Lock lock(Device::get().mutex);
  const int error = Device::get().failures.driver;
  Device::get().failures.driver = 0;
  return error;
}

void count_handles(int more) {
  Lock lock(Device::get().mutex);
  handles += more;
}

bool valid(const Properties& wanted) {
  return wanted.type == 1 && wanted.handle_types == 1 && wanted.location.type == 1 &&
         wanted.windows == nullptr && wanted.usage == 0;
}

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

int fake_reserved() {
  Lock lock(Device::get().mutex);
  return static_cast<int>(Device::get().memory.reserved.count());
}
int fake_mapped() {
  Lock lock(Device::get().mutex);
  return static_cast<int>(Device::get().memory.mapped.count());
}
int fake_handles() {
  Lock lock(Device::get().mutex);
  return handles;
}

int cuInit(unsigned flags) { return flags ? kInvalidValue : kSuccess; }

int cuGetErrorName(int error, const char** name) {
  *name = error == kInvalidValue    ? "CUDA_ERROR_INVALID_VALUE"
          : error == kOutOfMemory   ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == kInvalidDevice ? "CUDA_ERROR_INVALID_DEVICE"
                                    : nullptr;
  return *name ? kSuccess : kInvalidValue;
}

int cuMemGetAllocationGranularity(std::size_t* found, const Properties* wanted, int which) {
  if (!valid(*wanted) || which != 0) return kInvalidValue;
  if (wanted->location.id != 0) return kInvalidDevice;
  *found = kGranularity;
  return kSuccess;
}

int cuMemAddressReserve(std::uint64_t* address, std::size_t size, std::size_t alignment,
                        std::uint64_t wish, unsigned long long flags) {
  if (const int error = failed()) return error;
  if (size % kGranularity || alignment || wish || flags) return kInvalidValue;
  void* found = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<std::uintptr_t>(found);
  Lock lock(Device::get().mutex);
  Device::get().memory.reserved.add(Range(found, size));
  return kSuccess;
}

int cuMemAddressFree(std::uint64_t address, std::size_t size) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  if (device.memory.reserved.bytes_at(pointer(address)) != size ||
      device.memory.mapped.meets(Range(pointer(address), size))) {
    return kInvalidValue;
  }
  device.memory.reserved.remove(pointer(address));
  return ::munmap(pointer(address), size) ? kInvalidValue : kSuccess;
}

int cuMemCreate(std::uint64_t* handle, std::size_t size, const Properties* wanted,
                unsigned long long flags) {
  if (const int error = failed()) return error;
  if (!valid(*wanted) || flags || size % kGranularity) return kInvalidValue;
  if (wanted->location.id != 0) return kInvalidDevice;
  if (size > fake_free_bytes) return kOutOfMemory;
  const int fd = ::memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size))) return kOutOfMemory;
  *handle = static_cast<std::uint64_t>(fd);
  count_handles(1);
  return kSuccess;
}

// What is mapped stays mapped.
int cuMemRelease(std::uint64_t handle) {
  count_handles(-1);
  return ::close(static_cast<int>(handle)) ? kInvalidValue : kSuccess;
}

int cuMemMap(std::uint64_t address, std::size_t size, std::size_t offset, std::uint64_t handle,
             unsigned long long flags) {
  if (const int error = failed()) return error;
  const int fd = static_cast<int>(handle);
  struct stat status;
  if (offset || flags || ::fstat(fd, &status) ||
      static_cast<std::size_t>(status.st_size) != size) {
    return kInvalidValue;
  }
  Device& device = Device::get();
  Lock lock(device.mutex);
  const Range range(pointer(address), size);
  if (!device.memory.reserved.contain(range) || device.memory.mapped.meets(range)) {
    return kInvalidValue;
  }
  // The memory is inaccessible until cuMemSetAccess is called.
  if (::mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    return kInvalidValue;
  }
  device.memory.map(range, status.st_ino);
  return kSuccess;
}

// Unmaps one piece. On a device, a job that accesses it now or later ends the context.
int cuMemUnmap(std::uint64_t address, std::size_t size) {
  if (const int error = failed()) return error;
  Device& device = Device::get();
  Lock lock(device.mutex);
  void* memory = pointer(address);
  if (device.memory.mapped.bytes_at(memory) != size) return kInvalidValue;
  device.invalidate(lock, Range(memory, size), "unmapped: the host unmaps");
  device.memory.unmap(memory);
  const void* found = ::mmap(memory, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                             0);
  return found == MAP_FAILED ? kInvalidValue : kSuccess;
}

int cuMemSetAccess(std::uint64_t address, std::size_t size, const Access* wanted,
                   std::size_t count) {
  if (const int error = failed()) return error;
  if (count != 1 || wanted->location.type != 1 || wanted->location.id != 0 || wanted->flags != 3) {
    return kInvalidValue;
  }
  if (::mprotect(pointer(address), size, PROT_READ | PROT_WRITE)) return kInvalidValue;
  Lock lock(Device::get().mutex);
  Device::get().memory.usable.add(Range(pointer(address), size));
  return kSuccess;
}

int cuMemExportToShareableHandle(int* found, std::uint64_t handle, int type,
                                 unsigned long long flags) {
  if (const int error = failed()) return error;
  if (type != 1 || flags) return kInvalidValue;
  *found = ::dup(static_cast<int>(handle));
  return *found < 0 ? kInvalidValue : kSuccess;
}

int cuMemImportFromShareableHandle(std::uint64_t* handle, void* shared, int type) {
  if (const int error = failed()) return error;
  struct stat status;
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(shared));
  if (type != 1 || ::fstat(fd, &status) || !S_ISREG(status.st_mode)) return kInvalidValue;
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return kInvalidValue;
  *handle = static_cast<std::uint64_t>(copy);
  count_handles(1);
  return kSuccess;
}
}
