#include "device.h"

#include <sys/prctl.h>

#include <algorithm>
#include <thread>

#include "bytes.h"
#include "errors.h"

namespace fake {

Device& Device::get() {
  static Device* device = new Device;
  return *device;
}

std::shared_ptr<Stream> Device::start_stream(int priority) {
  auto stream = std::make_shared<Stream>();
  stream->priority = priority;
  stream->index = checker.add_stream();
  stream->last = stream->completed = checker.clock(stream->index)[stream->index];
  reseed(*stream);
  running_.push_back(stream);
  std::thread([this, stream] { run(stream); }).detach();
  return stream;
}

Stream* Device::create_stream(int priority) {
  Lock lock(mutex);
  const auto stream = start_stream(priority);
  handles_[stream.get()] = stream;
  return stream.get();
}

int Device::destroy_stream(Stream* handle) {
  Lock lock(mutex);
  const auto place = handles_.find(handle);
  if (place == handles_.end()) return kInvalidHandle;
  const auto stream = place->second;
  handles_.erase(place);
  stream->ending = true;
  stream->came.notify_all();
  checker.end_stream(stream->index);
  return kSuccess;
}

std::shared_ptr<Stream> Device::find(const void* handle) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number <= 1) {  // 1 is cudaStreamLegacy
    if (!legacy_) legacy_ = start_stream(0);
    return legacy_;
  }
  const auto place = handles_.find(handle);
  return place == handles_.end() ? nullptr : place->second;
}

void Device::push(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Job>& job) {
  job->id = ++jobs_;
  job->stream = stream->index;
  checker.enqueue(*job);
  stream->last = job->tick;
  if (job->kind == Kind::copy) {
    outstanding += static_cast<int>(job->copies.size());
    most_outstanding = std::max(most_outstanding, outstanding);
  }
  if (seed_ && (job->kind == Kind::copy || job->kind == Kind::kernel)) schedule(*stream, *job);
  stream->queue.push_back(job);
  stream->came.notify_all();
}

// As on a device, a copy of a stream with a higher priority goes first.
bool Device::blocked(const Stream& stream) const {
  const Job& job = *stream.queue.front();
  if (job.kind == Kind::kernel) return held & 2;
  if (job.kind == Kind::wait) return !job.record->done;
  if (job.kind != Kind::copy) return false;
  return (held & 1) || std::any_of(running_.begin(), running_.end(), [&](const auto& other) {
           return other->priority < stream.priority && !other->queue.empty() &&
                  other->queue.front()->kind == Kind::copy;
         });
}

void Device::run(const std::shared_ptr<Stream>& stream) {
  ::prctl(PR_SET_TIMERSLACK, 1);
  Lock lock(mutex);
  for (;;) {
    stream->came.wait(lock, [&] { return !stream->queue.empty() || stream->ending; });
    if (stream->queue.empty()) break;
    changed.wait(lock, [&] { return !blocked(*stream); });
    const auto job = stream->queue.front();
    stream->queue.pop_front();
    if (job->kind == Kind::record) {
      job->record->done = true;
      job->record->time = std::chrono::steady_clock::now();
    } else if (job->kind != Kind::wait) {
      execute(lock, *job);
    }
    stream->completed = job->tick;
    changed.notify_all();
  }
  running_.erase(std::find(running_.begin(), running_.end(), stream));
}

template <class Use>
void Device::touch(Lock& lock, Job& job, Use use) {
  if (job.dead) return;
  job.touching = true;
  lock.unlock();
  use();
  lock.lock();
  job.touching = false;
  changed.notify_all();
}

void Device::execute(Lock& lock, Job& job) {
  const auto pause = [&](unsigned microseconds) {
    if (microseconds == 0) return;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    lock.lock();
  };
  for (const Copy& copy : job.copies) executed.push_back(copy.dst);
  std::uint32_t read = 0;
  pause(job.start);
  touch(lock, job, [&] {
    if (!job.reads_late) read = checksum(job);
    if (job.scheduled) poison(job);
  });
  pause(job.length);
  touch(lock, job, [&] {
    if (job.reads_late) read = checksum(job);
    write(job);
  });
  if (job.kind == Kind::kernel) results[job.id] = read;
  outstanding -= static_cast<int>(job.copies.size());
}

void Device::schedule(Stream& stream, Job& job) {
  const auto draw = [&](unsigned most, unsigned rare) -> unsigned {
    const std::uint64_t number = stream.random();
    if (number % 256 == 0) return rare;
    return number % 2 ? static_cast<unsigned>(number / 256 % (most + 1)) : 0;
  };
  job.scheduled = true;
  job.start = draw(200, 2000);
  job.length = draw(50, 500);
  job.reads_late =
      job.kind == Kind::kernel && stream.random() % 2 && !overwrites_what_it_reads(job);
}

void Device::reseed(Stream& stream) const {
  std::seed_seq sequence{seed_, seed_ >> 32, static_cast<std::uint64_t>(stream.index)};
  stream.random.seed(sequence);
}

void Device::seed(std::uint64_t seed) {
  Lock lock(mutex);
  seed_ = seed;
  for (const auto& stream : running_) reseed(*stream);
}

void Device::wait(Lock& lock, const std::shared_ptr<Stream>& stream) {
  const Clock clock = checker.clock(stream->index);
  changed.wait(lock, [&, last = stream->last] { return stream->completed >= last; });
  checker.host_waits(clock);
}

void Device::wait_all(Lock& lock) {
  const Clock clock = checker.everything();
  for (const auto& stream : std::vector(running_)) {
    changed.wait(lock, [&, last = stream->last] { return stream->completed >= last; });
  }
  checker.host_waits(clock);
}

void Device::invalidate(Lock& lock, const Range& range, const char* does) {
  const auto jobs = checker.invalidate(range, does);
  for (const auto& job : jobs) job->dead = true;
  for (const auto& job : jobs) changed.wait(lock, [&] { return !job->touching; });
}

void Device::reset() {
  Lock lock(mutex);
  held = 0;
  failures = {};
  changed.notify_all();
  wait_all(lock);
  checker.clear();
  memory.clear_names();
  results.clear();
  executed.clear();
  most_outstanding = outstanding;
  pageable_copies = batched_copies = 0;
  seed_ = 0;
}

}  // namespace fake
