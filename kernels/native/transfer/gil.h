// Releasing the GIL so that no thread asks for it when there is none any more.
#pragma once

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "types.h"

namespace sgl_ext::transfer {

// A thread that takes the GIL back from an interpreter that ends is unwound through C++ frames,
// which aborts the process. So whoever is without it is counted, and at the interpreter's exit
// nobody releases it any more and all are waited for.
class Gil {
 public:
  // Releases the GIL while it lives.
  class Released {
   public:
    Released() {
      if (ending_) return;
      ++count_;
      thread_ = PyEval_SaveThread();
    }
    ~Released() {
      if (!thread_) return;
      while (gone_) ::pause();  // for the rest of the process
      PyEval_RestoreThread(thread_);
      --count_;
    }
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

   private:
    PyThreadState* thread_ = nullptr;
  };

  static std::int64_t count() { return count_; }
  static bool ending() { return ending_; }

  // For the interpreter's exit, with the GIL. After the deadline, who is not back never will be.
  static bool end(Deadline deadline) {
    ending_ = true;
    PyThreadState* thread = PyEval_SaveThread();
    while (count_ > 0 && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    PyEval_RestoreThread(thread);
    gone_ = count_ > 0;
    return !gone_;
  }

  // In a child of fork there is one thread, and it has the GIL.
  static void watch_forks() {
    ::pthread_atfork(nullptr, nullptr, [] { count_ = 0; });
  }

 private:
  inline static std::atomic<std::int64_t> count_{0};
  inline static std::atomic<bool> ending_{false}, gone_{false};
};

}  // namespace sgl_ext::transfer
