// Threads of the engine's own.
#pragma once

#include <functional>
#include <thread>

namespace sgl_ext::transfer {

// A thread that takes no signals (they belong to the threads of the program) and has the engine's
// name. Throws std::system_error.
std::thread start_thread(std::function<void()> work);

}  // namespace sgl_ext::transfer
