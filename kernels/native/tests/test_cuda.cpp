// Tests of the CUDA lane on the simulated device: threads, groups, completion and the order with
// other streams, under sanitizers.
#include <dlfcn.h>

#include <algorithm>
#include <vector>

#include "cuda_lane.h"
#include "fake_cuda/fake_cuda.h"
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

// A stream of the test, which the simulated device destroys at the end.
class Stream {
 public:
  Stream() { CHECK(control<int(::CUstream_st**)>("cudaStreamCreate")(&handle_) == 0); }
  ~Stream() { control<int(::CUstream_st*)>("cudaStreamDestroy")(handle_); }
  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(handle_); }
  void kernel(Memory& memory, bool write, std::uint64_t fill = 0) {
    const auto size = static_cast<std::size_t>(memory.size());
    const fake_access access{&memory[0], size, 1, size, write};
    CHECK(control<decltype(fake_kernel)>("fake_kernel")(handle_, &access, 1, fill) > 0);
  }
  void synchronize() {
    CHECK(control<int(::CUstream_st*)>("cudaStreamSynchronize")(handle_) == 0);
  }

 private:
  ::CUstream_st* handle_ = nullptr;
};

std::uint64_t bytes_of(unsigned value) { return 0x0101010101010101u * value; }

bool filled(Memory& memory, unsigned value) {
  return std::all_of(&memory[0], &memory[0] + memory.size(),
                     [&](unsigned char byte) { return byte == value; });
}

std::vector<Copy> rows(const Memory& src, const Memory& dst, std::int64_t width) {
  std::vector<Copy> copies;
  for (std::int64_t at = 0; at < src.size(); at += width) {
    copies.push_back(line(src.address(at), dst.address(at), width));
  }
  return copies;
}

// Each thread has a stream, on which a kernel writes what a copy reads, and a kernel writes what it
// has read when the copy has ended.
TEST(cuda_copies_and_streams_wait_for_each_other) {
  control<void()>("fake_reset")();
  control<void(std::uint64_t)>("fake_seed")(7);
  {
    Engine engine;
    const auto lane = engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0,
                                                CudaLane::Limits{2, 4096});
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        Stream stream;
        Memory src(engine, 8192), dst(engine, 8192);
        for (unsigned turn = 1; turn <= 30; ++turn) {
          stream.kernel(src, true, bytes_of(turn));
          const auto ticket = engine.submit(rows(src, dst, 1024), lane,
                                            static_cast<Level>((turn + i) % 3), {stream.handle()});
          if (turn % 5 == 0) ticket->cancel();
          if (!engine.fence(ticket, stream.handle(), soon())) CHECK(engine.wait(*ticket, soon()));
          stream.kernel(dst, false);
          stream.kernel(src, true, 0);
          CHECK(engine.wait(*ticket, soon()));
          if (turn % 5 != 0) CHECK(ticket->state() == State::done);
          stream.synchronize();
          if (ticket->state() == State::done) CHECK(filled(dst, turn));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(engine.close(soon()));
  }
  CHECK(control<int()>("fake_races")() == 0);
  CHECK(control<int()>("fake_streams")() == 0);
  CHECK(control<int()>("fake_events")() == 0);
  control<void()>("fake_reset")();
}

TEST(cuda_fence_passes_the_limits_and_ends_at_its_deadline) {
  Engine engine;
  const auto lane =
      engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0, CudaLane::Limits{1, 4096});
  Stream stream;
  Memory src(engine, 65536, 3), dst(engine, 65536);
  control<void(int)>("fake_hold")(1);
  const auto outstanding = control<int()>("fake_outstanding");
  const auto ticket = engine.submit(rows(src, dst, 4096), lane, Level::bulk);
  CHECK(eventually([&] { return outstanding() == 2; }));
  CHECK(engine.fence(ticket, stream.handle(), soon()));  // dispatches the other 14 copies
  CHECK(outstanding() == 16);
  CHECK(!ticket->finished());
  CHECK(!engine.wait(*ticket, Clock::now() + std::chrono::milliseconds(5)));
  control<void(int)>("fake_hold")(0);
  stream.synchronize();
  CHECK(dst.equals(src, 0, src.size()));
  CHECK(engine.wait(*ticket, soon()));
  CHECK(!engine.fence(ticket, stream.handle(), soon()));  // it is finished already
  CHECK(engine.close(soon()));
}

TEST(cuda_fence_of_a_copy_that_fails_meanwhile_ends_at_once) {
  Engine engine;
  const auto lane =
      engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0, CudaLane::Limits{1, 4096});
  Memory src(engine, 65536, 3), dst(engine, 65536);
  Stream stream;
  for (int turn = 0; turn < 100; ++turn) {
    control<void(int, int)>("fake_fail_copy")(turn % 16, 700);
    const auto ticket = engine.submit(rows(src, dst, 4096), lane, Level::bulk);
    CHECK(!engine.fence(ticket, stream.handle(), Clock::now() + std::chrono::hours(1)));
    CHECK(engine.wait(*ticket, soon()));
    CHECK(ticket->state() == State::failed && ticket->failure().code == 700);
  }
  stream.synchronize();
  CHECK(engine.close(soon()));
}

TEST(cuda_tickets_are_cancelled_while_threads_fence_them) {
  Engine engine;
  const auto lane =
      engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0, CudaLane::Limits{1, 4096});
  Memory src(engine, 65536, 4), dst(engine, 65536);
  Stream stream;
  for (int turn = 0; turn < 100; ++turn) {
    const auto ticket = engine.submit(rows(src, dst, 1024), lane, static_cast<Level>(turn % 3));
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        if (!engine.fence(ticket, stream.handle(), soon())) CHECK(engine.wait(*ticket, soon()));
      });
    }
    ticket->cancel();
    for (std::thread& thread : threads) thread.join();
    CHECK(engine.wait(*ticket, soon()));
    CHECK(ticket->state() != State::failed);
  }
  stream.synchronize();
  CHECK(engine.close(soon()));
}

TEST(cuda_engine_closes_while_threads_fence) {
  for (int round = 0; round < 10; ++round) {
    Engine engine;
    const auto lane =
        engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0, CudaLane::Limits{1, 4096});
    Memory src(engine, 3 * 16384, 5), dst(engine, 3 * 16384);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        Stream stream;
        const std::vector<Copy> all = rows(src, dst, 1024);
        const std::vector<Copy> mine(all.begin() + i * 16, all.begin() + (i + 1) * 16);
        try {
          for (;;) {
            const auto ticket =
                engine.submit(mine, lane, static_cast<Level>(i), {stream.handle()});
            engine.fence(ticket, stream.handle(), soon());
            CHECK(engine.wait(*ticket, soon()));
            CHECK(ticket->state() != State::failed);
          }
        } catch (const Refused&) {
          stream.synchronize();
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    CHECK(engine.close(soon()));
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(control<int()>("fake_streams")() == 0);
  CHECK(control<int()>("fake_events")() == 0);
}

TEST(cuda_pinned_memory_is_registered_while_it_is_a_region) {
  const auto registered = control<std::size_t()>("fake_registered_bytes");
  {
    Engine engine;
    Memory before(engine, 8192, 0, true);
    Memory pageable(engine, 8192);
    const auto lane =
        engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0, CudaLane::Limits{4, 1 << 20});
    CHECK(registered() == 8192);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int turn = 0; turn < 30; ++turn) {
          Memory memory(engine, 4096, 0, true);
          const auto ticket =
              engine.submit({line(before.address(), memory.address(), 4096)}, lane, Level::normal);
          CHECK(engine.wait(*ticket, soon()));
          CHECK(memory.equals(before, 0, 4096));
          engine.remove_region(memory.id());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(registered() == 8192);
    CHECK(engine.close(soon()));
    CHECK(registered() == 0);
  }
  CHECK(control<int()>("fake_races")() == 0);
}

TEST(cuda_memory_that_cannot_be_pinned_is_no_region) {
  Engine engine;
  Memory before(engine, 8192, 0, true);
  const auto fail = control<void(int)>("fake_fail_register");
  fail(2);
  CHECK_REFUSES(Refused, "cannot pin 8192 bytes of host memory",
                engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0,
                                          CudaLane::Limits{4, 1 << 20}));
  CHECK(control<int()>("fake_streams")() == 0);
  const auto lane =
      engine.add_lane<CudaLane>(std::string(FAKE_CUDART), 0, CudaLane::Limits{4, 1 << 20});
  fail(2);
  CHECK_REFUSES(Refused, "raise the limit of locked memory", Memory(engine, 4096, 0, true));
  Memory after(engine, 4096, 0, true);
  CHECK(control<std::size_t()>("fake_registered_bytes")() == 12288);
  CHECK(engine.close(soon()));
}

}  // namespace
}  // namespace sgl_ext::transfer

int main(int count, char** arguments) { return check::run(count, arguments); }
