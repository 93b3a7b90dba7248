// Tests of queueing, urgency, cancellation and completion on a lane whose pieces the test permits.
#include <atomic>
#include <limits>

#include "gate.h"
#include "host_lane.h"
#include "throttled_lane.h"

namespace sgl_ext::transfer {
namespace {

TEST(urgent_pieces_overtake_bulk_ones) {
  Gated g;
  const auto bulk = g.submit(100, Level::bulk);
  CHECK(eventually([&] { return g.lane->taken().size() == 1; }));
  const auto normal = g.submit(20, Level::normal);
  const auto urgent = g.submit(20, Level::urgent);
  g.lane->permit(100);
  for (const auto& ticket : {bulk, normal, urgent}) CHECK(g.engine.wait(*ticket, soon()));
  const std::vector<const Ticket*> start = {bulk.get(),   urgent.get(), urgent.get(),
                                            normal.get(), normal.get(), bulk.get()};
  const auto taken = g.lane->taken();
  CHECK(taken.size() == 14);
  CHECK(std::equal(start.begin(), start.end(), taken.begin()));
}

TEST(a_later_ticket_is_reported_after_an_earlier_one) {
  Gated g(2);
  const auto first = g.submit(20);  // two pieces, one on each thread
  CHECK(eventually([&] { return g.lane->taken().size() == 2; }));
  const auto second = g.submit(10);
  const auto empty = g.engine.submit({}, g.lane, Level::normal);
  g.lane->permit_one_of(*first);
  CHECK(eventually([&] { return g.lane->taken().size() == 3; }));  // the second has started
  g.lane->permit_one_of(*second);
  CHECK(eventually([&] { return second->bytes_done() == 10; }));
  // The second ticket is copied, but a piece of the first is still in flight.
  CHECK(!g.engine.wait_any({first, second, empty}, Clock::now() + std::chrono::milliseconds(20)));
  g.lane->permit_one_of(*first);
  CHECK(g.engine.wait(*empty, soon()));
  CHECK(first->state() == State::done && second->state() == State::done);
}

TEST(cancelling_keeps_pieces_in_flight_and_drops_the_others) {
  Gated g;
  const auto running = g.submit(100);
  const auto queued = g.submit(100);
  CHECK(eventually([&] { return g.lane->taken().size() == 1; }));
  CHECK(queued->cancel());
  CHECK(queued->state() == State::cancelled && queued->bytes_done() == 0);
  CHECK(running->cancel());
  CHECK(!running->finished());  // a piece of it is in flight
  CHECK(!running->cancel());
  CHECK_REFUSES(Refused, "in use by 1 unfinished", g.engine.remove_region(g.memory.id()));
  g.lane->permit(1);
  CHECK(g.engine.wait(*running, soon()));
  CHECK(running->state() == State::cancelled && running->bytes_done() == 10);
  g.engine.remove_region(g.memory.id());
}

TEST(a_failure_drops_the_rest_of_its_ticket_only) {
  Gated g;
  const auto failing = g.submit(100);
  const auto healthy = g.submit(30);
  g.lane->fail_next(5);
  g.lane->permit(1);
  CHECK(g.engine.wait(*failing, soon()));
  CHECK(failing->state() == State::failed);
  CHECK(failing->failure().code == 5 && failing->failure().op == 0);
  CHECK(failing->failure().message == "as told");
  g.lane->permit(3);
  CHECK(g.engine.wait(*healthy, soon()));
  CHECK(healthy->state() == State::done && healthy->bytes_done() == 30);
}

TEST(close_waits_for_pieces_in_flight_up_to_its_deadline) {
  Gated g;
  const auto running = g.submit(100);
  const auto queued = g.submit(10);
  const auto empty = g.engine.submit({}, g.lane, Level::normal);
  CHECK(eventually([&] { return g.lane->taken().size() == 1; }));
  CHECK(!g.engine.close(Clock::now() + std::chrono::milliseconds(5)));
  CHECK(queued->state() == State::cancelled);
  CHECK(!running->finished());
  CHECK_REFUSES(Refused, "is closed", g.submit(1));
  g.lane->permit(1);
  CHECK(g.engine.close(soon()));
  CHECK(running->state() == State::cancelled && running->bytes_done() == 10);
  CHECK(empty->state() == State::done);
}

TEST(a_wait_ends_at_its_deadline) {
  Gated g;
  const auto ticket = g.submit(10);
  CHECK(!g.engine.wait(*ticket, Clock::now() + std::chrono::milliseconds(5)));
  CHECK(!g.engine.wait_any({ticket}, Clock::now()));
  g.lane->permit(1);
  CHECK(g.engine.wait_any({ticket}, soon()));
}

TEST(who_sees_a_ticket_finished_sees_those_before_it_finished) {
  constexpr std::int64_t kCopies = 1'000'000;  // enough that freeing them takes a while
  Gated g(2, Cut{1 << 30, std::size_t{1} << 30});
  for (int round = 0; round < 4; ++round) {
    const std::size_t before = g.lane->taken().size();
    const auto first = std::make_shared<Ticket>(std::vector<Copy>(kCopies, line(0, 0, 1)),
                                                Level::normal, g.lane,
                                                std::vector<std::shared_ptr<Region>>{});
    g.lane->enqueue(first);
    const auto second = g.submit(10);
    CHECK(eventually([&] { return g.lane->taken().size() == before + 2; }));
    g.lane->permit_one_of(*first);
    while (first->bytes_done() < kCopies) continue;
    g.lane->permit_one_of(*second);
    while (!second->finished()) continue;
    CHECK(first->finished());
  }
}

TEST(a_piece_that_the_lane_below_cancelled_is_no_failure) {
  Gated g;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto slow = g.engine.add_lane<ThrottledLane>(
      g.lane, ThrottledLane::Device{kInfinity, kInfinity, 0}, std::size_t{4}, std::int64_t{4096});
  const auto ticket = g.engine.submit({line(g.memory.address(), g.memory.address(500), 100)}, slow,
                                      Level::normal);
  CHECK(eventually([&] { return g.lane->taken().size() == 1; }));  // one of its ten pieces
  CHECK(!g.engine.close(Clock::now() + std::chrono::milliseconds(5)));
  g.lane->permit(1);
  CHECK(g.engine.close(soon()));
  CHECK(ticket->state() == State::cancelled && ticket->bytes_done() == 10);
}

TEST(all_lanes_stop_while_one_is_waited_for) {
  Gated g;
  const auto other = g.engine.add_lane<GateLane>(std::size_t{1}, Cut{10});
  const auto stuck = g.engine.submit({line(g.memory.address(), g.memory.address(500), 10)}, other,
                                     Level::normal);
  const auto running = g.submit(100), queued = g.submit(10);
  CHECK(eventually([&] { return other->taken().size() + g.lane->taken().size() == 2; }));
  std::thread closing([&] { CHECK(g.engine.close(soon())); });
  CHECK(eventually([&] { return queued->state() == State::cancelled; }));
  g.lane->permit(1);
  CHECK(g.engine.wait(*running, soon()));
  CHECK(running->bytes_done() == 10 && !stuck->finished());
  other->permit(1);
  closing.join();
}

TEST(a_time_beyond_the_clock_is_long) {
  Gated g(1, Cut{std::int64_t{1} << 40});
  auto region = std::make_shared<Region>();  // the lane accesses no memory
  region->base = std::int64_t{1} << 50;
  region->length = std::int64_t{1} << 40;
  const std::int64_t base = g.engine.add_region(std::move(region))->base;
  constexpr std::int64_t kBytes = std::int64_t{1} << 35;  // 3.7 times the clock's range at 1 byte/s
  const auto slow = g.engine.add_lane<ThrottledLane>(
      g.lane, ThrottledLane::Device{1, 1e9, 0}, std::size_t{4}, kBytes);
  g.lane->permit(2);
  const auto ticket =
      g.engine.submit({line(base, base + kBytes, kBytes)}, slow, Level::normal);
  CHECK(eventually([&] { return g.lane->taken().size() == 1; }));
  CHECK(!g.engine.wait(*ticket, Clock::now() + std::chrono::milliseconds(50)));
}

void fill(Memory& memory, const std::vector<Copy>& copies, Memory& src,
          std::vector<unsigned char>& want) {
  for (const Copy& c : copies) {
    for (std::int64_t row = 0; row < c.height; ++row) {
      std::memcpy(&want[static_cast<std::size_t>(c.dst - memory.address() + row * c.dst_pitch)],
                  &src[c.src - src.address() + row * c.src_pitch],
                  static_cast<std::size_t>(c.width));
    }
  }
}

TEST(strided_copies_of_every_cut) {
  for (const std::int64_t piece : {4096, 10000, 1 << 20}) {
    Engine engine;
    Memory src(engine, 1 << 20, 1), dst(engine, 1 << 20);
    const auto lane = engine.add_lane<HostLane>(std::size_t{3}, piece);
    std::vector<Copy> copies = {
        {src.address(), dst.address(), 768, 100, 768 * 3, 768 * 2},
        {src.address(5), dst.address(768), 768, 100, 900, 768 * 2},
        {src.address(7), dst.address(200'000), 5000, 20, 6000, 5000},
        line(src.address(), dst.address(400'001), 333'333),
        {src.address(), dst.address(800'000), 1, 1000, 3, 2},
    };
    std::vector<unsigned char> want(1 << 20, 0);
    fill(dst, copies, src, want);
    const auto ticket = engine.submit(copies, lane, Level::normal);
    CHECK(engine.wait(*ticket, soon()));
    CHECK(ticket->state() == State::done);
    CHECK(std::memcmp(want.data(), &dst[0], want.size()) == 0);
    CHECK(engine.close(soon()));
  }
}

TEST(many_threads_submit_cancel_wait_and_close) {
  for (int round = 0; round < 3; ++round) {
    Engine engine;
    Memory src(engine, 1 << 16, 3);
    const auto host = engine.add_lane<HostLane>(std::size_t{2}, std::int64_t{4096});
    const auto slow = engine.add_lane<ThrottledLane>(
        host, ThrottledLane::Device{1e9, 1e6, 1e-5}, std::size_t{4}, std::int64_t{4096});
    std::vector<std::unique_ptr<Memory>> targets;
    for (int i = 0; i < 6; ++i) targets.push_back(std::make_unique<Memory>(engine, 1 << 16));
    std::atomic<int> refused{0};
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 6; ++i) {
      threads.emplace_back([&, i] {
        std::mt19937 random(i);
        Memory& dst = *targets[i];
        for (int turn = 0; turn < 150; ++turn) {
          const std::int64_t at = random() % 32768;
          std::shared_ptr<Ticket> ticket;
          try {
            ticket = engine.submit({line(src.address(at), dst.address(at), 32768)},
                                   i % 2 ? std::shared_ptr<Lane>(host) : slow,
                                   static_cast<Level>(random() % 3));
          } catch (const Refused&) {
            ++refused;
            return;
          }
          if (turn % 3 == 0) ticket->cancel();
          CHECK(engine.wait(*ticket, soon()));
          CHECK(ticket->state() != State::failed);
          if (ticket->state() == State::done) CHECK(dst.equals(src, at, at + 32768));
        }
      });
    }
    if (round > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(round * 5));
      CHECK(engine.close(soon()));
      CHECK(engine.close(soon()));
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(round > 0 || refused == 0);
    CHECK(engine.close(soon()));
  }
}

TEST(regions_come_and_go_while_others_are_used) {
  Engine engine;
  const auto lane = engine.add_lane<HostLane>(std::size_t{2}, std::int64_t{4096});
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < 100; ++turn) {
        Memory memory(engine, 8192, i + 1);
        const auto ticket =
            engine.submit({line(memory.address(), memory.address(4096), 4096)}, lane, Level::bulk);
        CHECK(engine.wait(*ticket, soon()));
        engine.remove_region(memory.id());
        CHECK(std::memcmp(&memory[0], &memory[4096], 4096) == 0);
        CHECK_REFUSES(std::invalid_argument, "is not registered",
                      engine.remove_region(memory.id()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(engine.close(soon()));
}

}  // namespace
}  // namespace sgl_ext::transfer

int main(int count, char** arguments) { return check::run(count, arguments); }
