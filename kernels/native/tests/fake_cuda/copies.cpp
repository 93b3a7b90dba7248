// Copies of the CUDA runtime.
#include <algorithm>

#include "bytes.h"
#include "device.h"
#include "errors.h"

using fake::Copy;
using fake::Device;
using fake::Job;
using fake::Kind;
using fake::Range;
using fake::Stream;

// cudaMemcpyAttributes of CUDA 13.
struct Attributes {
  int source_order;
  int source_location[2], destination_location[2];
  unsigned flags;
};

namespace {

constexpr int kStreamOrder = 1, kAnyOrder = 3;

int failing_copy(Device& device) {
  if (!device.failures.copy || device.failures.copies-- > 0) return fake::kSuccess;
  const int error = device.failures.copy;
  device.failures.copy = 0;
  return error;
}

// Appends one job with these copies; those from `any_order` on may read before earlier work ends.
int push(Device& device, const std::shared_ptr<Stream>& stream, std::vector<Copy> copies,
         const std::vector<bool>& any_order = {}) {
  auto job = std::make_shared<Job>(Job{Kind::copy, std::move(copies)});
  job->name = fake::tag();
  device.push(stream, job);
  for (std::size_t i = 0; i < job->copies.size(); ++i) {
    const Range src = source(job->copies[i]), dst = destination(job->copies[i]);
    const bool in_order = any_order.empty() || !any_order[i];
    device.checker.access(job, src, false, in_order);
    device.checker.access(job, dst, true);
    if (!device.memory.accessible(src) || !device.memory.accessible(dst)) ++device.pageable_copies;
  }
  return fake::kSuccess;
}

int push_one(const Copy& copy, Stream* handle) {
  Device& device = Device::get();
  Device::Lock lock(device.mutex);
  const auto stream = device.find(handle);
  if (!stream) return fake::kInvalidHandle;
  if (const int error = failing_copy(device)) return error;
  return push(device, stream, {copy});
}

// The copies of a batch are not ordered among themselves.
void check_batch(Device& device, const std::vector<Copy>& copies) {
  for (std::size_t i = 0; i < copies.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const Range to = destination(copies[i]), other = destination(copies[j]);
      if (to.overlaps(other) || to.overlaps(source(copies[j])) ||
          other.overlaps(source(copies[i]))) {
        device.checker.report("race: copies " + std::to_string(j) + " and " + std::to_string(i) +
                              " of a batch access " + device.memory.describe(to));
      }
    }
  }
}

}  // namespace

extern "C" {

int cudaMemcpyAsync(void* dst, const void* src, std::size_t bytes, int, Stream* stream) {
  return push_one({static_cast<char*>(dst), static_cast<const char*>(src), bytes, bytes, bytes, 1},
                  stream);
}
int cudaMemcpy2DAsync(void* dst, std::size_t dst_pitch, const void* src, std::size_t src_pitch,
                      std::size_t width, std::size_t height, int, Stream* stream) {
  if (width > dst_pitch || width > src_pitch) return 12;  // cudaErrorInvalidPitchValue
  return push_one({static_cast<char*>(dst), static_cast<const char*>(src), dst_pitch, src_pitch,
                   width, height},
                  stream);
}
// In CUDA 12 the place of a failed copy comes before the stream.
int cudaMemcpyBatchAsync(void* const* dsts, const void* const* srcs, const std::size_t* sizes,
                         std::size_t count, const Attributes* attributes,
                         const std::size_t* first, std::size_t attribute_count, void* eighth,
                         Stream* ninth) {
  auto* handle = fake_version < 13000 ? ninth : static_cast<Stream*>(eighth);
  Device& device = Device::get();
  Device::Lock lock(device.mutex);
  const auto stream = device.find(handle);
  if (!stream) return fake::kInvalidHandle;
  if (reinterpret_cast<std::uintptr_t>(handle) <= 1 || count == 0 || attribute_count == 0 ||
      attribute_count > count || first[0] != 0) {
    return fake::kInvalidValue;
  }
  std::vector<bool> any_order(count);
  for (std::size_t k = 0; k < attribute_count; ++k) {
    const std::size_t end = k + 1 < attribute_count ? first[k + 1] : count;
    const int order = attributes[k].source_order;
    if (first[k] >= end || end > count || (order != kStreamOrder && order != kAnyOrder)) {
      return fake::kInvalidValue;
    }
    for (std::size_t i = first[k]; i < end; ++i) any_order[i] = order == kAnyOrder;
  }
  if (const int error = failing_copy(device)) return error;
  device.batched_copies += static_cast<int>(count);
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < count; ++i) {
    copies.push_back({static_cast<char*>(dsts[i]), static_cast<const char*>(srcs[i]), sizes[i],
                      sizes[i], sizes[i], 1});
  }
  check_batch(device, copies);
  return push(device, stream, std::move(copies), any_order);
}
}
