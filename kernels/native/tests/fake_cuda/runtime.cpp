// Functions of the CUDA runtime: devices, streams, events and registered host memory.
#include "device.h"
#include "errors.h"

using fake::Device;
using fake::Event;
using fake::Job;
using fake::Kind;
using fake::Range;
using fake::Record;
using fake::Stream;
using Lock = Device::Lock;

int fake_devices = 1, fake_version = 13000, fake_host_pointers = 1;

namespace {

constexpr unsigned kDisableTiming = 2;

int taken(int& failure) {
  const int error = failure;
  failure = 0;
  return error;
}

std::shared_ptr<Event> find(const void* handle) {
  const auto& events = Device::get().events;
  const auto place = events.find(handle);
  return place == events.end() ? nullptr : place->second;
}

}  // namespace

extern "C" {

int cudaRuntimeGetVersion(int* version) {
  *version = fake_version;
  return fake::kSuccess;
}
int cudaGetDeviceCount(int* count) {
  *count = fake_devices;
  return fake_devices ? fake::kSuccess : fake::kNoDevice;
}
int cudaSetDevice(int device) {
  return device < fake_devices ? fake::kSuccess : fake::kInvalidDevice;
}
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  constexpr int kCanUseHostPointerForRegisteredMem = 91;
  if (device < 0 || device >= fake_devices) return fake::kInvalidDevice;
  if (attribute != kCanUseHostPointerForRegisteredMem) return fake::kInvalidValue;
  *value = fake_host_pointers;
  return fake::kSuccess;
}
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return fake::kSuccess;
}
int cudaDeviceSynchronize() {
  Lock lock(Device::get().mutex);
  Device::get().wait_all(lock);
  return fake::kSuccess;
}
const char* cudaGetErrorString(int error) {
  switch (error) {
    case fake::kSuccess: return "no error";
    case fake::kInvalidValue: return "invalid argument";
    case fake::kNoDevice: return "no CUDA-capable device is detected";
    case fake::kInvalidDevice: return "invalid device ordinal";
    case fake::kInvalidHandle: return "invalid resource handle";
    case fake::kNotReady: return "device not ready";
    case fake::kIllegalAddress: return "an illegal memory access was encountered";
    case fake::kAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case fake::kNotRegistered: return "pointer does not correspond to a registered memory region";
    default: return "out of memory";
  }
}
int cudaGetLastError() { return fake::kSuccess; }

int cudaStreamCreateWithPriority(Stream** out, unsigned, int priority) {
  *out = Device::get().create_stream(priority);
  return fake::kSuccess;
}
int cudaStreamCreateWithFlags(Stream** out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
int cudaStreamCreate(Stream** out) { return cudaStreamCreateWithPriority(out, 0, 0); }
int cudaStreamDestroy(Stream* stream) { return Device::get().destroy_stream(stream); }
int cudaStreamSynchronize(Stream* handle) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  const auto stream = device.find(handle);
  if (!stream) return fake::kInvalidHandle;
  device.wait(lock, stream);
  return fake::kSuccess;
}
int cudaStreamQuery(Stream* handle) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  const auto stream = device.find(handle);
  if (!stream) return fake::kInvalidHandle;
  if (stream->completed < stream->last) return fake::kNotReady;
  device.wait(lock, stream);
  return fake::kSuccess;
}
// An event that was never recorded is complete.
int cudaStreamWaitEvent(Stream* handle, Event* event_handle, unsigned flags) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  const auto stream = device.find(handle);
  const auto event = find(event_handle);
  if (!stream || !event) return fake::kInvalidHandle;
  if (flags) return fake::kInvalidValue;
  if (!event->record) return fake::kSuccess;
  auto job = std::make_shared<Job>(Job{Kind::wait});
  job->record = event->record;
  device.push(stream, job);
  device.checker.wait(stream->index, event->record->clock);
  return fake::kSuccess;
}

int cudaEventCreateWithFlags(Event** out, unsigned flags) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  const auto event = std::make_shared<Event>();
  event->timing = !(flags & kDisableTiming);
  device.events[event.get()] = event;
  *out = event.get();
  return fake::kSuccess;
}
int cudaEventCreate(Event** out) { return cudaEventCreateWithFlags(out, 0); }
int cudaEventDestroy(Event* handle) {
  Lock lock(Device::get().mutex);
  return Device::get().events.erase(handle) ? fake::kSuccess : fake::kInvalidHandle;
}
int cudaEventRecord(Event* handle, Stream* stream_handle) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  const auto stream = device.find(stream_handle);
  const auto event = find(handle);
  if (!stream || !event) return fake::kInvalidHandle;
  if (const int error = taken(device.failures.record)) return error;
  auto job = std::make_shared<Job>(Job{Kind::record});
  event->record = job->record = std::make_shared<Record>();
  device.push(stream, job);
  job->record->clock = device.checker.clock(stream->index);
  return fake::kSuccess;
}
int cudaEventSynchronize(Event* handle) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  const auto event = find(handle);
  if (!event) return fake::kInvalidHandle;
  if (const auto record = event->record) {
    device.changed.wait(lock, [&] { return record->done; });
    device.checker.host_waits(record->clock);
  }
  return taken(device.failures.event);
}
int cudaEventQuery(Event* handle) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  const auto event = find(handle);
  if (!event) return fake::kInvalidHandle;
  if (!event->record) return fake::kSuccess;
  if (!event->record->done) return fake::kNotReady;
  device.checker.host_waits(event->record->clock);
  return taken(device.failures.event);
}
int cudaEventElapsedTime(float* milliseconds, Event* start_handle, Event* end_handle) {
  Lock lock(Device::get().mutex);
  const auto start = find(start_handle), end = find(end_handle);
  for (const auto& event : {start, end}) {
    if (!event || !event->timing || !event->record) return fake::kInvalidHandle;
  }
  if (!start->record->done || !end->record->done) return fake::kNotReady;
  *milliseconds =
      std::chrono::duration<float, std::milli>(end->record->time - start->record->time).count();
  return fake::kSuccess;
}

int cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  if (const int error = taken(device.failures.registration)) return error;
  const Range range(memory, bytes);
  if (!memory || range.empty()) return fake::kInvalidValue;
  if (device.memory.registered.meets(range)) return fake::kAlreadyRegistered;
  if (device.memory.on_device(range)) return fake::kInvalidValue;
  device.memory.registered.add(range);
  return fake::kSuccess;
}
int cudaHostUnregister(void* memory) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  const std::size_t bytes = device.memory.registered.bytes_at(memory);
  if (bytes == 0) return fake::kNotRegistered;
  device.invalidate(lock, Range(memory, bytes), "unregistered: the host unregisters");
  device.memory.registered.remove(memory);
  return fake::kSuccess;
}
}
