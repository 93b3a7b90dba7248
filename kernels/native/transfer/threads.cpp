#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

namespace sgl_ext::transfer {

std::thread start_thread(std::function<void()> work) {
  // The thread inherits the signal mask. If it set the mask itself, a signal could arrive before.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(work));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), "sglx-transfer");
  return thread;
}

}  // namespace sgl_ext::transfer
