// Lane that waits for the permission of the test before it finishes a piece.
#pragma once

#include <condition_variable>
#include <set>

#include "support.h"

namespace sgl_ext::transfer {

// Holds each piece until the test permits it, and records the order in which pieces are taken. It
// copies nothing.
class GateLane final : public Lane {
 public:
  GateLane(std::shared_ptr<Hub> hub, std::size_t threads, const Cut& cut)
      : Lane("gate", hub), threads_(threads), cut_(cut) {}
  std::optional<std::string> refuses(const Copy&, const Region&, const Region&) const override {
    return std::nullopt;
  }
  void start() override { start_threads(threads_); }
  void permit(std::size_t pieces) {
    std::lock_guard lock(gate_);
    permits_ += pieces;
    changed_.notify_all();
  }
  void permit_one_of(const Ticket& ticket) {
    std::lock_guard lock(gate_);
    own_permits_.insert(&ticket);
    changed_.notify_all();
  }
  // Makes the next permitted piece fail with `code`.
  void fail_next(int code) {
    std::lock_guard lock(gate_);
    fail_ = code;
  }
  std::vector<const Ticket*> taken() {
    std::lock_guard lock(gate_);
    return taken_;
  }

 protected:
  void work(std::size_t) override {
    for (;;) {
      Piece piece;
      {
        Lock lock(mutex_);
        while (!take(piece, cut_)) {
          if (closing()) return;
          came_.wait(lock);
        }
      }
      int code;
      {
        std::unique_lock lock(gate_);
        taken_.push_back(piece.ticket);
        changed_.notify_all();
        changed_.wait(lock, [&] { return permits_ > 0 || own_permits_.count(piece.ticket) > 0; });
        if (own_permits_.erase(piece.ticket) == 0) --permits_;
        code = std::exchange(fail_, 0);
      }
      finish(piece, {code ? 0 : piece.bytes, code, code ? "as told" : ""});
    }
  }
  void work_came(const Ticket&) override { came_.notify_all(); }
  void wake_all() override { came_.notify_all(); }

 private:
  const std::size_t threads_;
  const Cut cut_;
  std::condition_variable came_;
  std::mutex gate_;
  std::condition_variable changed_;
  std::size_t permits_ = 0;
  std::set<const Ticket*> own_permits_;
  int fail_ = 0;
  std::vector<const Ticket*> taken_;
};

struct Gated {
  explicit Gated(std::size_t threads = 1, const Cut& cut = Cut{10})
      : memory(engine, 1000), lane(engine.add_lane<GateLane>(threads, cut)) {}
  ~Gated() {
    lane->permit(1'000'000);
    CHECK(engine.close(soon()));
  }
  std::shared_ptr<Ticket> submit(std::int64_t bytes, Level level = Level::normal) {
    return engine.submit({line(memory.address(), memory.address(500), bytes)}, lane, level);
  }
  Engine engine;
  Memory memory;
  std::shared_ptr<GateLane> lane;
};

}  // namespace sgl_ext::transfer
