// Tests of the file lane on an io_uring that at times fails to enter the kernel.
#include <liburing.h>

#include <cerrno>
#include <functional>
#include <future>
#include <utility>

#include "file_lane.h"
#include "support.h"

namespace {

std::atomic<int> refusal{0};              // if not 0: errno of the entries into the kernel ...
std::atomic<int> refusals_left{0};        // ... of which this many fail
std::atomic<std::int64_t> refused{0};
std::atomic<int> awaited_fd{-1};          // reset to -1 when the kernel is given a request for it
std::function<void()> on_refusal;         // called once, after the next failed entry

// Enters the kernel, or makes the entry really fail on an invalid ring: the queue that liburing has
// prepared for the kernel is then as after any failure. The test chooses the error.
template <class Enter>
int entered(io_uring* ring, Enter enter) {
  const int error = refusal;
  if (error == 0 || refusals_left.fetch_sub(1) <= 0) {
    for (unsigned i = *ring->sq.khead; i != ring->sq.sqe_tail; ++i) {
      int fd = ring->sq.sqes[i & *ring->sq.kring_mask].fd;
      awaited_fd.compare_exchange_strong(fd, -1);
    }
    return enter(ring);
  }
  const int fd = ring->enter_ring_fd;
  ring->enter_ring_fd = -1;
  const int result = enter(ring);
  ring->enter_ring_fd = fd;
  if (result >= 0) return result;  // there was no reason to enter the kernel
  ++refused;
  if (on_refusal) std::exchange(on_refusal, nullptr)();
  return -error;
}

void refuse(int error, int times = 1 << 30) {
  refusals_left = times;
  refusal = error;
}

}  // namespace

extern "C" {
int __real_io_uring_submit(io_uring* ring);
int __real_io_uring_submit_and_wait(io_uring* ring, unsigned count);
int __wrap_io_uring_submit(io_uring* ring) { return entered(ring, __real_io_uring_submit); }
int __wrap_io_uring_submit_and_wait(io_uring* ring, unsigned count) {
  return entered(ring, [count](io_uring* r) { return __real_io_uring_submit_and_wait(r, count); });
}
}

namespace sgl_ext::transfer {
namespace {

constexpr FileLane::Limits kLimits{4, 1 << 20, 64 << 10};

// Engine with a file lane on io_uring and a file that contains `before`.
struct Fixture {
  Fixture() {
    std::string reason;
    auto uring = make_uring(FileLane::capacity(kLimits), reason);
    if (!uring) {
      std::fprintf(stderr, "  without io_uring: %s\n", reason.c_str());
      std::exit(0);
    }
    lane = engine.add_lane<FileLane>(std::move(uring), kLimits);
    const int fd = ::open(directory.file("data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    file = engine.add_region(file_region(fd, kSize, *lane));
    write_all(before);
  }
  ~Fixture() { refuse(0); }

  std::shared_ptr<Ticket> submit(const Copy& copy, Level level = Level::normal) {
    return engine.submit({copy}, lane, level);
  }
  // Submits a read that completes when the test writes to the pipe.
  std::shared_ptr<Ticket> submit_read_of_pipe(int fd, const Memory& into) {
    auto pipe = std::make_shared<Region>();
    pipe->fd = fd;
    pipe->kind = Kind::file;
    pipe->lane = lane.get();
    pipe->length = kPage;
    pipe = engine.add_region(std::move(pipe));
    awaited_fd = fd;
    const auto ticket = submit(line(pipe->base, into.address(), 100));
    CHECK(eventually([] { return awaited_fd == -1; }));
    return ticket;
  }
  Copy page_to_file(const Memory& memory, std::int64_t page) const {
    return line(memory.address(page * kPage), file->base + page * kPage, kPage);
  }
  void write_all(const Memory& memory) {
    const auto ticket = submit(line(memory.address(), file->base, kSize));
    CHECK(engine.wait(*ticket, soon()));
    CHECK(ticket->state() == State::done);
  }
  void check_file_equals(const Memory& expected) {
    Memory found(engine, kSize);
    const auto ticket = submit(line(file->base, found.address(), kSize));
    CHECK(engine.wait(*ticket, soon()));
    CHECK(ticket->state() == State::done);
    CHECK(expected.equals(found, 0, kSize));
    engine.remove_region(found.id());
  }

  static constexpr std::int64_t kSize = 32 * kPage;
  Directory directory;
  Engine engine;
  std::shared_ptr<FileLane> lane;
  std::shared_ptr<Region> file;
  Memory before{engine, kSize, 1}, after{engine, kSize, 2};
};

TEST(what_the_kernel_refuses_fails_and_is_never_started) {
  for (const int error : {EBADF, ENOMEM, EPERM}) {
    Fixture f;
    refuse(error);
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (int page = 0; page < 32; ++page) {
      tickets.push_back(f.submit(f.page_to_file(f.after, page)));
    }
    for (const auto& ticket : tickets) {
      CHECK(f.engine.wait(*ticket, soon()));
      CHECK(ticket->state() == State::failed && ticket->bytes_done() == 0);
      CHECK(ticket->failure().code == error);
    }
    // An idle lane in this state neither spins nor misses new tickets.
    const std::int64_t calls = refused;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(refused - calls < 1000);
    const auto late = f.submit(f.page_to_file(f.after, 0));
    CHECK(f.engine.wait(*late, soon()));
    CHECK(late->failure().code == error);
    refuse(0);
    f.check_file_equals(f.before);
    f.write_all(f.after);
    f.check_file_equals(f.after);
    CHECK(f.engine.close(soon()));
  }
}

TEST(what_is_in_flight_ends_though_the_kernel_refuses_more) {
  Fixture f;
  int ends[2];
  CHECK(::pipe(ends) == 0);
  Memory into(f.engine, kPage);
  const auto read = f.submit_read_of_pipe(ends[0], into);
  refuse(ENOMEM);
  const auto write = f.submit(f.page_to_file(f.after, 3), Level::urgent);
  CHECK(f.engine.wait(*write, soon()));
  CHECK(write->failure().code == ENOMEM);
  CHECK(!read->finished());
  CHECK(!f.engine.close(Clock::now() + std::chrono::milliseconds(30)));  // the read is in flight
  CHECK(::write(ends[1], &f.before[0], 100) == 100);
  CHECK(f.engine.wait(*read, soon()));
  CHECK(read->state() == State::done && read->bytes_done() == 100);
  CHECK(into.equals(f.before, 0, 100));
  CHECK(f.engine.close(soon()));
  ::close(ends[1]);
}

// The read of the wake-up completes while the ring cannot be entered and nothing else is in flight.
TEST(work_that_comes_in_a_refusal_is_started) {
  for (const int error : {ENOMEM, EAGAIN}) {
    Fixture f;
    int ends[2];
    CHECK(::pipe(ends) == 0);
    Memory into(f.engine, kPage);
    const auto read = f.submit_read_of_pipe(ends[0], into);
    std::promise<std::shared_ptr<Ticket>> late;
    on_refusal = [&] {
      refuse(0);
      late.set_value(f.submit(f.page_to_file(f.after, 3)));
    };
    refuse(error);
    CHECK(::write(ends[1], &f.before[0], 100) == 100);
    const auto write = late.get_future().get();
    CHECK(f.engine.wait(*write, soon()));
    CHECK(write->state() == State::done);
    CHECK(f.engine.wait(*read, soon()));
    CHECK(read->state() == State::done);
    CHECK(f.engine.close(soon()));
    ::close(ends[1]);
  }
}

TEST(a_passing_refusal_is_waited_out) {
  for (const int error : {EINTR, EAGAIN, EBUSY}) {
    Fixture f;
    refuse(error, 5);
    f.write_all(f.after);
    refuse(error, 5);
    f.check_file_equals(f.after);
    refuse(error, 5);
    CHECK(f.engine.close(soon()));
  }
}

TEST(threads_meet_refusals_that_come_and_go) {
  Fixture f;
  std::atomic<bool> over{false};
  std::thread refuser([&] {
    for (int turn = 0; !over; ++turn) {
      refuse(turn % 2 ? ENOMEM : EAGAIN, 1 + turn % 3);
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
    refuse(0);
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < 300; ++turn) {
        const auto ticket = f.submit(f.page_to_file(turn % 2 ? f.before : f.after, i));
        CHECK(f.engine.wait(*ticket, soon()));
        CHECK(ticket->state() == State::done || ticket->failure().code == ENOMEM);
        CHECK((ticket->bytes_done() == kPage) == (ticket->state() == State::done));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  over = true;
  refuser.join();
  f.write_all(f.after);
  f.check_file_equals(f.after);
  CHECK(f.engine.close(soon()));
}

}  // namespace
}  // namespace sgl_ext::transfer

int main(int count, char** arguments) { return check::run(count, arguments); }
