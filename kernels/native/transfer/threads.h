// Creation of the engine's threads.
#pragma once

#include <functional>
#include <thread>

namespace sgl_ext::transfer {

// Starts a thread that has the engine's name and blocks all signals, so that the threads of the
// program receive them. Throws std::system_error.
std::thread start_thread(std::function<void()> work);

}  // namespace sgl_ext::transfer
