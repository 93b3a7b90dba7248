// Controls of the simulated CUDA device, beside the functions of CUDA's runtime and driver that
// the library implements. Host memory takes the place of device memory.
//
// What the simulation leaves out: the legacy stream is not ordered with others implicitly; the race
// checker does not see what other processes do; the memory of a job must be mapped when the job is
// enqueued; copies of pageable memory are asynchronous too.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

extern "C" {

// Rows of `width` bytes that a simulated kernel reads (`write` 0) or fills (1), `pitch` bytes apart.
// With 2 the kernel only counts as writing them; the test writes them itself.
struct fake_access {
  void* base;
  std::size_t width, height, pitch;
  int write;
};

// --- Work ---

// Launches a kernel that reads and writes the ranges, and returns its number, or -1 if there is no
// such stream. It fills what it writes with the 8 bytes of `fill`, repeated from the beginning of
// each row.
std::int64_t fake_kernel(CUstream_st* stream, const fake_access* accesses, std::size_t count,
                         std::uint64_t fill);
// Returns the CRC-32 of the bytes that a complete kernel read, in the order of its accesses.
std::uint32_t fake_result(std::int64_t kernel);
// Names the jobs that this thread will enqueue.
void fake_tag(const char* text);

// --- Schedules ---

// Draws the schedules of later jobs from `seed`: each starts after a delay, poisons what it writes,
// and writes its bytes after another delay. 0: jobs run at once.
void fake_seed(std::uint64_t seed);
// Holds jobs that have not started: 1 copies, 2 kernels, 3 both, 0 none.
void fake_hold(int what);

// --- Order ---

// Number of pairs of accesses that are not ordered, whatever the schedule was, and of other misuses
// of memory. fake_race(i) describes one of the first 1,000.
int fake_races();
const char* fake_race(int index);
// Waits until a stream has nothing to do, and orders nothing: the host only plays the device.
void fake_drain(CUstream_st* stream);
// Declares that the host accesses memory.
void fake_host_access(const void* memory, std::size_t bytes, int write);
// Declares that the host frees or unmaps memory. Jobs that are not known to be complete no longer
// access memory.
void fake_free(void* memory, std::size_t bytes);
// Synchronizes the device, and forgets all races, names, counts, failures and schedules.
void fake_reset();

// --- Memory ---

// Declares that host memory takes the place of device memory. fake_free() ends this.
void fake_device_memory(void* memory, std::size_t bytes);
// Number of copies from or to host memory that is not registered, which a device would execute
// synchronously.
int fake_pageable_copies();
std::size_t fake_registered_bytes();
// Names memory in descriptions of races; the smallest named range counts.
void fake_name(const void* memory, std::size_t bytes, const char* text);

// --- Failures ---

void fake_fail_copy(int copies, int error);  // of the dispatch of a copy, after `copies` more
void fake_fail_event(int error);             // of the next synchronization with an event
void fake_fail_record(int error);            // of the next record of an event
void fake_fail_register(int error);          // of the next registration of host memory
void fake_fail(int error);                   // of the next driver call that can fail

// --- Counts ---

int fake_outstanding();  // copies that are not complete
int fake_most_outstanding();
int fake_batched_copies();  // copies of batched calls
int fake_streams();
int fake_events();
int fake_executed_count();
void* fake_executed(int index);  // destination of the copy that was executed as number `index`
int fake_reserved();
int fake_mapped();
int fake_handles();

// --- Facts that a test may change ---

extern int fake_devices, fake_version, fake_host_pointers;
extern std::size_t fake_free_bytes;
}
