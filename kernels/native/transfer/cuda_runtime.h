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
  static constexpr unsigned kHostRegisterPortable = 1;  // pinned for all devices
  static constexpr int kInvalidValue = 1, kNewerDriver = 36, kNotSupported = 801;  // errors

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
  int (*stream_wait_event)(Stream, Event, unsigned flags);
  int (*memcpy_async)(void* dst, const void* src, std::size_t, int kind, Stream);
  int (*memcpy_2d_async)(void* dst, std::size_t dst_pitch, const void* src, std::size_t src_pitch,
                         std::size_t width, std::size_t height, int kind, Stream);
  // Whether copy_all() is available: from CUDA 12.8 on, where the device uses the addresses of
  // registered host memory. Elsewhere only the older calls translate them.
  bool copies_batches() const { return batch_12_ || batch_13_; }
  // Has `stream`, which is not the legacy stream, copy sizes[i] bytes from srcs[i] to dsts[i], in
  // any order among themselves.
  int copy_all(void* const* dsts, const void* const* srcs, const std::size_t* sizes,
               std::size_t count, Stream stream) const;
  int (*event_create)(Event*, unsigned flags);
  int (*event_record)(Event, Stream);
  int (*event_synchronize)(Event);
  int (*event_destroy)(Event);
  int (*host_register)(void*, std::size_t, unsigned flags);
  int (*host_unregister)(void*);
  const char* (*error_string)(int);
  int (*get_last_error)();

 private:
  struct Location {
    int type, id;
  };
  // cudaMemcpyAttributes. The hints only concern memory that CUDA may move.
  struct CopyAttributes {
    int source_order = 1;  // the source is read in the order of the stream
    Location source_hint{}, destination_hint{};
    unsigned flags = 0;
  };

  static constexpr int kCanUseHostPointerForRegisteredMem = 91;  // cudaDeviceAttr

  void load(void* handle);
  void find_batches(void* handle, int device);

  // cudaMemcpyBatchAsync of CUDA 12 and of CUDA 13; at most one is not null.
  int (*batch_12_)(void* const* dsts, const void* const* srcs, const std::size_t* sizes,
                   std::size_t count, CopyAttributes*, std::size_t* first_of_attributes,
                   std::size_t attributes, std::size_t* failed, Stream) = nullptr;
  int (*batch_13_)(void* const* dsts, const void* const* srcs, const std::size_t* sizes,
                   std::size_t count, CopyAttributes*, std::size_t* first_of_attributes,
                   std::size_t attributes, Stream) = nullptr;
};

// Point in the work of a CUDA stream. The runtime outlives the event.
class CudaEvent {
 public:
  explicit CudaEvent(const CudaRuntime& runtime) : runtime_(runtime) {}
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  ~CudaEvent() {
    if (event_) runtime_.event_destroy(event_);
  }
  // Marks the end of the work that has been submitted to `stream`. Returns a cudaError_t, as the
  // other functions do.
  int record(CudaRuntime::Stream stream);
  // Makes work that is submitted to `stream` from now on wait for the point.
  int fence(CudaRuntime::Stream stream) const {
    return runtime_.stream_wait_event(stream, event_, 0);
  }
  // Waits on the calling thread until the work before the point has ended.
  int synchronize() const { return runtime_.event_synchronize(event_); }

 private:
  const CudaRuntime& runtime_;
  CudaRuntime::Event event_ = nullptr;
};

}  // namespace sgl_ext::transfer
