// Controls of the simulated device.
#include "bytes.h"
#include "device.h"

using fake::Device;
using fake::Job;
using fake::Kind;
using fake::Range;
using Lock = Device::Lock;

namespace {

thread_local std::string tag_of_thread;

template <class Use>
auto locked(Use use) {
  Lock lock(Device::get().mutex);
  return use(Device::get());
}

}  // namespace

const std::string& fake::tag() { return tag_of_thread; }

extern "C" {

std::int64_t fake_kernel(CUstream_st* handle, const fake_access* accesses, std::size_t count,
                         std::uint64_t fill) {
  return locked([&](Device& device) -> std::int64_t {
    const auto stream = device.find(handle);
    if (!stream) return -1;
    auto job = std::make_shared<Job>(Job{Kind::kernel, {}, {accesses, accesses + count}, fill});
    job->name = tag_of_thread;
    device.push(stream, job);
    fake::each_access(*job, [&](const Range& range, bool write) {
      device.checker.access(job, range, write);
    });
    return job->id;
  });
}
std::uint32_t fake_result(std::int64_t kernel) {
  return locked([&](Device& device) { return device.results[kernel]; });
}
void fake_tag(const char* text) { tag_of_thread = text; }

void fake_seed(std::uint64_t seed) { Device::get().seed(seed); }
void fake_hold(int what) {
  locked([&](Device& device) {
    device.held = what;
    device.changed.notify_all();
  });
}

int fake_races() {
  return locked([](Device& device) { return static_cast<int>(device.checker.count()); });
}
const char* fake_race(int index) {
  return locked([&](Device& device) -> const char* {
    const auto& reports = device.checker.reports();
    const auto i = static_cast<std::size_t>(index);
    return index >= 0 && i < reports.size() ? reports[i].c_str() : nullptr;
  });
}
void fake_drain(CUstream_st* handle) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  if (const auto stream = device.find(handle)) {
    device.changed.wait(lock, [&, last = stream->last] { return stream->completed >= last; });
  }
}
void fake_host_access(const void* memory, std::size_t bytes, int write) {
  locked([&](Device& device) {
    device.checker.host_access(Range(memory, bytes), write != 0);
  });
}
void fake_free(void* memory, std::size_t bytes) {
  Device& device = Device::get();
  Lock lock(device.mutex);
  device.invalidate(lock, Range(memory, bytes), "freed: the host frees");
  device.memory.declared.remove(memory);
  if (device.memory.registered.meets(Range(memory, bytes))) {
    device.checker.report("freed: the host frees " + device.memory.describe(Range(memory, bytes)) +
                          ", which is still registered");
  }
}
void fake_reset() { Device::get().reset(); }

void fake_device_memory(void* memory, std::size_t bytes) {
  const Range range(memory, bytes);
  locked([&](Device& device) { device.memory.declared.add(range); });
}
int fake_batched_copies() {
  return locked([](Device& device) { return device.batched_copies; });
}
int fake_pageable_copies() {
  return locked([](Device& device) { return device.pageable_copies; });
}
std::size_t fake_registered_bytes() {
  return locked([](Device& device) { return device.memory.registered.bytes(); });
}
void fake_name(const void* memory, std::size_t bytes, const char* text) {
  locked([&](Device& device) { device.memory.name(Range(memory, bytes), text); });
}

void fake_fail_copy(int copies, int error) {
  locked([&](Device& device) {
    device.failures.copies = copies;
    device.failures.copy = error;
  });
}
void fake_fail_event(int error) {
  locked([&](Device& device) { device.failures.event = error; });
}
void fake_fail_record(int error) {
  locked([&](Device& device) { device.failures.record = error; });
}
void fake_fail_register(int error) {
  locked([&](Device& device) { device.failures.registration = error; });
}
void fake_fail(int error) {
  locked([&](Device& device) { device.failures.driver = error; });
}

int fake_outstanding() {
  return locked([](Device& device) { return device.outstanding; });
}
int fake_most_outstanding() {
  return locked([](Device& device) { return device.most_outstanding; });
}
int fake_streams() {
  return locked([](Device& device) { return device.streams(); });
}
int fake_events() {
  return locked([](Device& device) { return static_cast<int>(device.events.size()); });
}
int fake_executed_count() {
  return locked([](Device& device) { return static_cast<int>(device.executed.size()); });
}
void* fake_executed(int index) {
  const auto i = static_cast<std::size_t>(index);
  return locked([&](Device& device) { return device.executed.at(i); });
}
}
