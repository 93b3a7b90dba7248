// Tests of the CUDA lane on a fake CUDA runtime: threads, groups and completion, under sanitizers.
#include <dlfcn.h>

#include "cuda_lane.h"
#include "support.h"

namespace sgl_ext::transfer {
namespace {

template <class F>
F* control(const char* name) {
  void* library = ::dlopen(FAKE_CUDART, RTLD_NOW);
  CHECK(library != nullptr);
  return reinterpret_cast<F*>(::dlsym(library, name));
}

TEST(cuda_threads_submit_cancel_and_close) {
  for (int round = 0; round < 2; ++round) {
    Engine engine;
    const auto lane = engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0,
                                                CudaLane::Limits{4, 1 << 20});
    Memory src(engine, 1 << 16, 1), dst(engine, 1 << 16);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        const std::int64_t at = i * 16384;
        for (int turn = 0; turn < 60; ++turn) {
          std::vector<Copy> copies;
          for (std::int64_t row = 0; row < 16; ++row) {
            const std::int64_t from = at + row * 1024;
            copies.push_back(line(src.address(from), dst.address(from), 1024));
          }
          std::shared_ptr<Ticket> ticket;
          try {
            ticket = engine.submit(copies, lane, static_cast<Level>(turn % 3));
          } catch (const Refused&) {
            return;
          }
          if (turn % 3 == 0) ticket->cancel();
          CHECK(engine.wait(*ticket, soon()));
          CHECK(ticket->state() != State::failed);
          if (ticket->state() == State::done) CHECK(dst.equals(src, at, at + 16384));
        }
      });
    }
    if (round == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      CHECK(engine.close(soon()));
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(engine.close(soon()));
    CHECK(control<int()>("fake_streams")() == 0);
    CHECK(control<int()>("fake_events")() == 0);
  }
}

TEST(cuda_errors_stay_with_their_ticket) {
  for (const char* where : {"fake_fail_event", "fake_fail_record"}) {
    Engine engine;
    const auto lane = engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0,
                                                CudaLane::Limits{1, 1 << 20});
    Memory memory(engine, 8192, 2);
    control<void(int)>(where)(700);
    const std::vector<Copy> copy = {line(memory.address(), memory.address(4096), 4096)};
    const auto failed = engine.submit(copy, lane, Level::normal);
    CHECK(engine.wait(*failed, soon()));
    CHECK(failed->state() == State::failed && failed->failure().code == 700);
    const auto healthy = engine.submit(copy, lane, Level::normal);
    CHECK(engine.wait(*healthy, soon()));
    CHECK(healthy->state() == State::done);
    CHECK(engine.close(soon()));
  }
}

}  // namespace
}  // namespace sgl_ext::transfer

int main(int count, char** arguments) { return check::run(count, arguments); }
