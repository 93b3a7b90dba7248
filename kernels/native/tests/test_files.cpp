// Tests of the file lane on both backends, with and without injected faults.
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <set>

#include "file_lane.h"
#include "support.h"

namespace sgl_ext::transfer {
namespace {

// Forwards requests to another backend, shortened to `most` bytes, or makes them fail with EIO.
class FaultyIo final : public IoBackend {
 public:
  FaultyIo(std::unique_ptr<IoBackend> inner, std::int64_t most)
      : inner_(std::move(inner)), most_(most) {}
  // Offset in the file; reads and writes that include it fail.
  std::atomic<std::int64_t> bad_offset{-1};

  const char* name() const override { return "faulty"; }
  void start(Io* io) override {
    const std::int64_t offset = io->offset + io->done, length = io->length - io->done;
    const std::int64_t bad = bad_offset;
    if (bad >= offset && bad < offset + length) {
      failing_.push_back(io);
      inner_->wake();
      return;
    }
    auto* part = new Io(*io);
    part->memory += io->done;
    part->offset = offset;
    part->done = 0;
    part->length = std::min(length, most_);
    whole_[part] = io;
    inner_->start(part);
  }
  void submit() override { inner_->submit(); }
  void reap(std::vector<Completion>& completed) override {
    std::vector<Completion> parts;
    inner_->reap(parts);
    for (Io* io : failing_) completed.push_back({io, -EIO});
    failing_.clear();
    for (const auto& [part, result] : parts) {
      completed.push_back({whole_.at(part), result});
      whole_.erase(part);
      delete part;
    }
  }
  void wake() override { inner_->wake(); }

 private:
  const std::unique_ptr<IoBackend> inner_;
  const std::int64_t most_;
  std::map<Io*, Io*> whole_;
  std::vector<Io*> failing_;
};

constexpr FileLane::Limits kLimits{4, 1 << 20, 64 << 10};

// Returns both backends, or only the threads if this machine has no io_uring.
std::vector<std::unique_ptr<IoBackend>> backends() {
  std::vector<std::unique_ptr<IoBackend>> all;
  std::string reason;
  if (auto uring = make_uring(FileLane::capacity(kLimits), reason)) {
    all.push_back(std::move(uring));
  } else {
    std::fprintf(stderr, "  without io_uring: %s\n", reason.c_str());
  }
  all.push_back(make_thread_io(3));
  return all;
}

std::shared_ptr<Region> open_file(Engine& engine, const Lane& lane, const std::string& path,
                                  std::int64_t length, int flags = O_RDWR | O_CREAT) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
  CHECK(fd >= 0);
  return engine.add_region(file_region(fd, length, lane));
}

TEST(files_hold_what_was_written) {
  for (auto& backend : backends()) {
    for (const int direct : {0, O_DIRECT}) {
      for (const bool pinned : {false, true}) {
        Directory directory;
        Engine engine;
        std::string reason;
        auto own = std::string(backend->name()) == "threads"
                       ? make_thread_io(3)
                       : make_uring(FileLane::capacity(kLimits), reason);
        const auto lane = engine.add_lane<FileLane>(std::move(own), kLimits);
        Memory out(engine, 1 << 20, 5, pinned), back(engine, 1 << 20, 0, pinned);
        const auto file = open_file(engine, *lane, directory.file("data"), 1 << 20,
                                    O_RDWR | O_CREAT | direct);
        const auto write =
            engine.submit({line(out.address(), file->base, 1 << 20)}, lane, Level::normal);
        CHECK(engine.wait(*write, soon()));
        CHECK(write->state() == State::done);
        std::vector<Copy> reads;
        for (std::int64_t at = 0; at < 1 << 20; at += 2 * kPage) {
          reads.push_back(line(file->base + at, back.address(at), 2 * kPage));
        }
        const auto read = engine.submit(reads, lane, Level::urgent);
        CHECK(engine.wait(*read, soon()));
        CHECK(read->state() == State::done);
        CHECK(out.equals(back, 0, 1 << 20));
        engine.remove_region(out.id());
        CHECK(engine.close(soon()));
      }
    }
  }
}

TEST(short_transfers_are_continued) {
  for (auto& backend : backends()) {
    Directory directory;
    Engine engine;
    const auto lane = engine.add_lane<FileLane>(
        std::make_unique<FaultyIo>(std::move(backend), 1000), kLimits);
    Memory out(engine, 300'000, 6), back(engine, 300'000);
    const auto file = open_file(engine, *lane, directory.file("data"), 300'000);
    for (const Copy& copy : {line(out.address(), file->base, 300'000),
                             line(file->base, back.address(), 300'000)}) {
      const auto ticket = engine.submit({copy}, lane, Level::normal);
      CHECK(engine.wait(*ticket, soon()));
      CHECK(ticket->state() == State::done && ticket->bytes_done() == 300'000);
    }
    CHECK(out.equals(back, 0, 300'000));
    CHECK(engine.close(soon()));
  }
}

TEST(an_error_reaches_the_one_ticket_that_touches_the_bad_sector) {
  for (auto& backend : backends()) {
    Directory directory;
    Engine engine;
    auto faulty = std::make_unique<FaultyIo>(std::move(backend), 1 << 20);
    FaultyIo& faults = *faulty;
    const auto lane = engine.add_lane<FileLane>(std::move(faulty), kLimits);
    Memory memory(engine, 64 * kPage, 7);
    const auto file = open_file(engine, *lane, directory.file("data"), 64 * kPage);
    const auto write =
        engine.submit({line(memory.address(), file->base, 64 * kPage)}, lane, Level::normal);
    CHECK(engine.wait(*write, soon()));
    faults.bad_offset = 37 * kPage + 5;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (int i = 0; i < 16; ++i) {
      std::vector<Copy> copies;
      for (int j = 0; j < 4; ++j) {
        const std::int64_t at = (4 * i + j) * kPage;
        copies.push_back(line(file->base + at, memory.address(at), kPage));
      }
      tickets.push_back(engine.submit(copies, lane, Level::normal));
    }
    for (std::size_t i = 0; i < tickets.size(); ++i) {
      CHECK(engine.wait(*tickets[i], soon()));
      if (i != 9) {
        CHECK(tickets[i]->state() == State::done);
        continue;
      }
      CHECK(tickets[i]->state() == State::failed);
      CHECK(tickets[i]->failure().code == EIO && tickets[i]->failure().op == 1);
    }
    CHECK(engine.close(soon()));
  }
}

TEST(the_end_of_a_file_and_a_full_device) {
  for (auto& backend : backends()) {
    Directory directory;
    Engine engine;
    const auto lane = engine.add_lane<FileLane>(std::move(backend), kLimits);
    Memory memory(engine, 8 * kPage, 8);
    const auto file = open_file(engine, *lane, directory.file("data"), 8 * kPage);
    const auto write = engine.submit({line(memory.address(), file->base, 5000)}, lane, Level::bulk);
    CHECK(engine.wait(*write, soon()));
    const auto read =
        engine.submit({line(file->base, memory.address(), 8 * kPage)}, lane, Level::bulk);
    CHECK(engine.wait(*read, soon()));
    CHECK(read->failure().code == ENODATA && read->bytes_done() == 5000);
    const auto full = open_file(engine, *lane, "/dev/full", kPage, O_RDWR);
    const auto lost = engine.submit({line(memory.address(), full->base, kPage)}, lane, Level::bulk);
    CHECK(engine.wait(*lost, soon()));
    CHECK(lost->failure().code == ENOSPC && lost->bytes_done() == 0);
    CHECK(engine.close(soon()));
  }
}

TEST(a_file_size_limit_keeps_what_fitted) {
  std::signal(SIGXFSZ, SIG_IGN);
  for (auto& backend : backends()) {
    Directory directory;
    Engine engine;
    const auto lane = engine.add_lane<FileLane>(std::move(backend), kLimits);
    Memory memory(engine, 8 * kPage, 9);
    const auto file = open_file(engine, *lane, directory.file("data"), 8 * kPage);
    rlimit before;
    CHECK(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    const rlimit small{6000, before.rlim_max};
    CHECK(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    const auto write =
        engine.submit({line(memory.address(), file->base, 8 * kPage)}, lane, Level::bulk);
    CHECK(engine.wait(*write, soon()));
    CHECK(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(write->failure().code == EFBIG && write->bytes_done() == 6000);
    CHECK(engine.close(soon()));
  }
}

TEST(what_has_no_offsets_is_refused) {
  Directory directory;
  Engine engine;
  const auto lane = engine.add_lane<FileLane>(make_thread_io(1), kLimits);
  int ends[2];
  CHECK(::pipe(ends) == 0);
  CHECK_REFUSES(std::invalid_argument, "neither a regular file", file_region(ends[0], kPage, *lane));
  CHECK_REFUSES(std::invalid_argument, "Bad file descriptor", file_region(ends[0], kPage, *lane));
  ::close(ends[1]);
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  CHECK(terminal >= 0);
  CHECK_REFUSES(std::invalid_argument, "nor a device", file_region(terminal, kPage, *lane));
}

TEST(what_would_write_elsewhere_or_not_at_all_is_refused) {
  Directory directory;
  Engine engine;
  const auto lane = engine.add_lane<FileLane>(make_thread_io(1), kLimits);
  const auto open = [&](int flags) {
    const int fd = ::open(directory.file("data").c_str(), flags | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    return file_region(fd, kPage, *lane);
  };
  open(O_RDWR | O_CREAT);
  CHECK_REFUSES(std::invalid_argument, "is open with O_APPEND", open(O_RDWR | O_APPEND));
  CHECK_REFUSES(std::invalid_argument, "is open with O_PATH", open(O_PATH));
}

TEST(an_urgent_request_overtakes_what_waits_for_a_thread) {
  const auto ticket = [](Level level) {
    return std::make_shared<Ticket>(std::vector<Copy>{}, level, nullptr,
                                    std::vector<std::shared_ptr<Region>>{});
  };
  const auto bulk = ticket(Level::bulk), urgent = ticket(Level::urgent);
  const int fd = ::open("/dev/zero", O_RDONLY | O_CLOEXEC);
  CHECK(fd >= 0);
  std::vector<char> memory(1 << 20);
  const auto backend = make_thread_io(1);
  const auto overtakes = [&] {
    std::vector<Io> ios(64);
    for (Io& io : ios) {
      io.piece.ticket = &io == &ios.back() ? urgent.get() : bulk.get();
      io.fd = fd;
      io.memory = memory.data();
      io.length = static_cast<std::int64_t>(memory.size());
      backend->start(&io);
    }
    std::vector<Completion> completed;
    while (completed.size() < ios.size()) backend->reap(completed);
    return completed.back().io != &ios.back();
  };
  // A fast thread may execute all other requests before the urgent one is queued.
  bool overtook = false;
  for (int round = 0; round < 1000 && !overtook; ++round) overtook = overtakes();
  CHECK(overtook);
  ::close(fd);
}

TEST(threads_submit_cancel_and_close_with_io_in_flight) {
  for (auto& backend : backends()) {
    Directory directory;
    Engine engine;
    const auto lane = engine.add_lane<FileLane>(std::move(backend), kLimits);
    Memory memory(engine, 4 << 20, 10);
    const auto file = open_file(engine, *lane, directory.file("data"), 4 << 20);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        for (int turn = 0; turn < 1000; ++turn) {
          const std::int64_t at = std::int64_t{i} << 20;
          std::shared_ptr<Ticket> ticket;
          try {
            ticket = engine.submit({line(memory.address(at), file->base + at, 256 << 10)}, lane,
                                   static_cast<Level>(turn % 3));
          } catch (const Refused&) {
            return;
          }
          if (turn % 2) ticket->cancel();
          CHECK(engine.wait(*ticket, soon()));
          CHECK(ticket->state() != State::failed);
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(engine.close(soon()));
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace sgl_ext::transfer

int main(int count, char** arguments) { return check::run(count, arguments); }
