#include "cuda_runtime.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <vector>

#include "types.h"

namespace sgl_ext::transfer {

namespace {

// Returns the path of the runtime that the process has already loaded (with torch, for
// example), or an empty string. Two runtimes in one process work, but copies of one do not
// see an error of the other.
std::string loaded_runtime() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        const char* name = std::strrchr(info->dlpi_name, '/');
        if (!name || std::strncmp(name, "/libcudart", 10) != 0) return 0;
        *static_cast<std::string*>(out) = info->dlpi_name;
        return 1;
      },
      &found);
  return found;
}

}  // namespace

CudaRuntime::CudaRuntime(const std::string& path, int device) {
  std::vector<std::string> names = {path};
  if (path.empty()) {
    names = {"libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"};
    if (const std::string loaded = loaded_runtime(); !loaded.empty()) {
      names.insert(names.begin(), loaded);
    }
  }
  std::string tried;
  void* handle = nullptr;
  for (const std::string& name : names) {
    handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle) {
      library = name;
      break;
    }
    tried += (tried.empty() ? "" : "; ") + std::string(::dlerror());
  }
  if (!handle) {
    throw Refused("no CUDA runtime could be opened (" + tried +
                  "); install it or name its library");
  }
  load(handle);
  int devices = 0;
  if (const int error = get_device_count(&devices); error != 0) {
    throw Refused("the CUDA runtime " + library + " finds no device: " + error_string(error));
  }
  if (device < 0 || device >= devices) {
    throw Refused("there is no CUDA device " + std::to_string(device) + "; " + library +
                  " finds " + std::to_string(devices) + " devices");
  }
  find_batches(handle, device);
}

void CudaRuntime::load(void* handle) {
  const auto find = [&](auto& function, const char* name) {
    void* symbol = ::dlsym(handle, name);
    if (!symbol) throw Refused(library + " is not a CUDA runtime: it lacks " + name);
    std::memcpy(&function, &symbol, sizeof function);
  };
  find(get_device_count, "cudaGetDeviceCount");
  find(set_device, "cudaSetDevice");
  find(stream_priority_range, "cudaDeviceGetStreamPriorityRange");
  find(stream_create, "cudaStreamCreateWithPriority");
  find(stream_synchronize, "cudaStreamSynchronize");
  find(stream_destroy, "cudaStreamDestroy");
  find(stream_wait_event, "cudaStreamWaitEvent");
  find(memcpy_async, "cudaMemcpyAsync");
  find(memcpy_2d_async, "cudaMemcpy2DAsync");
  find(event_create, "cudaEventCreateWithFlags");
  find(event_record, "cudaEventRecord");
  find(event_synchronize, "cudaEventSynchronize");
  find(event_destroy, "cudaEventDestroy");
  find(host_register, "cudaHostRegister");
  find(host_unregister, "cudaHostUnregister");
  find(error_string, "cudaGetErrorString");
  find(get_last_error, "cudaGetLastError");
}

void CudaRuntime::find_batches(void* handle, int device) {
  const auto find = [&](auto& function, const char* name) {
    void* symbol = ::dlsym(handle, name);
    std::memcpy(&function, &symbol, sizeof function);
    return symbol != nullptr;
  };
  int (*runtime_version)(int*);
  int (*device_attribute)(int*, int attribute, int device);
  if (!find(runtime_version, "cudaRuntimeGetVersion") ||
      !find(device_attribute, "cudaDeviceGetAttribute")) {
    return;
  }
  int version = 0, usable = 0;
  const int error = device_attribute(&usable, kCanUseHostPointerForRegisteredMem, device);
  if (error != 0) get_last_error();
  if (error != 0 || usable == 0 || runtime_version(&version) != 0) return;
  if (version >= 12080 && version < 13000) find(batch_12_, "cudaMemcpyBatchAsync");
  if (version >= 13000 && version < 14000) find(batch_13_, "cudaMemcpyBatchAsync");
}

int CudaRuntime::copy_all(void* const* dsts, const void* const* srcs, const std::size_t* sizes,
                          std::size_t count, Stream stream) const {
  CopyAttributes attributes;
  std::size_t first = 0, failed = 0;
  if (batch_13_) return batch_13_(dsts, srcs, sizes, count, &attributes, &first, 1, stream);
  return batch_12_(dsts, srcs, sizes, count, &attributes, &first, 1, &failed, stream);
}

int CudaEvent::record(CudaRuntime::Stream stream) {
  if (!event_) {
    const int error = runtime_.event_create(
        &event_, CudaRuntime::kEventBlockingSync | CudaRuntime::kEventDisableTiming);
    if (error != 0) return error;
  }
  return runtime_.event_record(event_, stream);
}

}  // namespace sgl_ext::transfer
