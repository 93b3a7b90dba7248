// GIL release that is safe at interpreter exit: no thread reacquires the GIL afterwards.
#pragma once

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "types.h"

namespace sgl_ext::transfer {

// A thread that reacquires the GIL while the interpreter is finalizing is unwound through C++
// frames, which aborts the process. The threads that have released the GIL are therefore counted.
// At interpreter exit, end() stops further releases and waits for these threads.
class Gil {
 public:
  // Releases the GIL for the lifetime of the object. Has no effect once end() has been called.
  class Released {
   public:
    Released() {
      if (ending_) return;
      ++count_;
      thread_ = PyEval_SaveThread();
    }
    ~Released() {
      if (!thread_) return;
      // Counted before the check, so that end() either sees this thread or stops it.
      ++returning_;
      if (gone_) {
        --returning_;
        for (;;) ::pause();  // until the process exits
      }
      PyEval_RestoreThread(thread_);
      --returning_;
      --count_;
    }
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

   private:
    PyThreadState* thread_ = nullptr;
  };

  static std::int64_t count() { return count_; }
  static bool ending() { return ending_; }

  // Called at interpreter exit with the GIL held. Waits until all threads have
  // reacquired the GIL. Returns false if the deadline passes first; the threads that then
  // still work block until the process exits.
  static bool end(Deadline deadline) {
    ending_ = true;
    PyThreadState* thread = PyEval_SaveThread();
    constexpr auto kPause = std::chrono::milliseconds(1);
    while (count_ > 0 && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
    gone_ = count_ > 0;
    // These threads only wait for the GIL, which this thread needs as well.
    while (returning_ > 0) std::this_thread::sleep_for(kPause);
    PyEval_RestoreThread(thread);
    return !gone_;
  }

  // Resets the count in a forked child, which has a single thread that holds the GIL.
  static void watch_forks() {
    ::pthread_atfork(nullptr, nullptr, [] { count_ = returning_ = 0; });
  }

 private:
  inline static std::atomic<std::int64_t> count_{0}, returning_{0};
  inline static std::atomic<bool> ending_{false}, gone_{false};
};

}  // namespace sgl_ext::transfer
