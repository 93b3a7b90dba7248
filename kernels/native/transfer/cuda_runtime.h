// Functions of the CUDA runtime that copies need. The library is loaded at run time and never
// unloaded.
#pragma once

#include <cstddef>
#include <string>

namespace sgl_ext::transfer {

// Function pointers and constants as in cuda_runtime_api.h. Errors are cudaError_t; 0 is success.
struct CudaRuntime {
  using Stream = struct CUstream_st*;
  using Event = struct CUevent_st*;
  static constexpr int kMemcpyDefault = 4;         // infers the direction from the addresses
  static constexpr unsigned kStreamNonBlocking = 1;
  static constexpr unsigned kEventBlockingSync = 1;  // the waiting thread sleeps
  static constexpr unsigned kEventDisableTiming = 2;

  // Loads `library` or, if it is empty, the runtime that the process has already loaded or else the
  // one that the dynamic linker finds. Throws Refused if there is no runtime or no device `device`.
  CudaRuntime(const std::string& library, int device);
  CudaRuntime(const CudaRuntime&) = delete;
  CudaRuntime& operator=(const CudaRuntime&) = delete;

  std::string library;
  int (*get_device_count)(int*);
  int (*set_device)(int);
  int (*stream_priority_range)(int* least, int* greatest);
  int (*stream_create)(Stream*, unsigned flags, int priority);
  int (*stream_synchronize)(Stream);
  int (*stream_destroy)(Stream);
  int (*memcpy_async)(void* dst, const void* src, std::size_t, int kind, Stream);
  int (*memcpy_2d_async)(void* dst, std::size_t dst_pitch, const void* src, std::size_t src_pitch,
                         std::size_t width, std::size_t height, int kind, Stream);
  int (*event_create)(Event*, unsigned flags);
  int (*event_record)(Event, Stream);
  int (*event_synchronize)(Event);
  int (*event_destroy)(Event);
  const char* (*error_string)(int);
  int (*get_last_error)();

 private:
  void load(void* handle);
};

}  // namespace sgl_ext::transfer
