// Transfer engine: owns regions and lanes, and validates and submits batches of copies.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lane.h"
#include "regions.h"

namespace sgl_ext::transfer {

class Engine {
 public:
  Engine();
  // Closes the engine and waits a few seconds, or not at all if close() was called before. If
  // copies are still in flight then, the lanes are leaked until the process exits.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::shared_ptr<Region> add_region(std::shared_ptr<Region> region);
  // Throws Refused while unfinished tickets use the region.
  void remove_region(std::int64_t id);

  // Creates and starts a lane that publishes to this engine's hub.
  template <class L, class... Arguments>
  std::shared_ptr<L> add_lane(Arguments&&... arguments) {
    check_open();
    auto lane = std::make_shared<L>(hub_, std::forward<Arguments>(arguments)...);
    start(lane);
    return lane;
  }

  // Validates the whole batch before any byte is copied. An invalid batch throws and has no effect.
  // The copies wait for the work that has been submitted to the CUDA streams `after`.
  std::shared_ptr<Ticket> submit(std::vector<Copy> copies, const std::shared_ptr<Lane>& lane,
                                 Level level, const std::vector<std::uintptr_t>& after = {});

  // Cancels the pieces of the ticket that have not started. Returns false if there are none.
  bool cancel(Ticket& ticket);
  // Waits until one of the tickets is finished. Returns false if the deadline passes first. Throws
  // std::invalid_argument if a ticket belongs to another engine.
  bool wait_any(const std::vector<std::shared_ptr<Ticket>>& tickets, Deadline deadline);
  bool wait(const Ticket& ticket, Deadline deadline);
  // See Lane::fence().
  bool fence(const std::shared_ptr<Ticket>& ticket, std::uintptr_t stream, Deadline deadline);

  // Rejects new work, cancels the pieces that have not started and waits for the pieces in flight.
  // Returns false if the deadline passes first.
  bool close(Deadline deadline);
  bool closed() const { return closed_; }
  // Returns whether this process is a forked child of the process that created the engine. A child
  // has the memory of the engine but not its threads.
  bool forked() const;
  // Throws Refused if closed or forked.
  void check_open() const;
  // Throws Refused if forked: threads that do not exist in the child may hold locks of the engine.
  void check_here() const;

 private:
  void start(const std::shared_ptr<Lane>& lane);
  void check_own(const Lane& lane) const;

  const std::int64_t process_, forks_;
  const std::shared_ptr<Hub> hub_ = std::make_shared<Hub>();
  Regions regions_;
  std::atomic<bool> closed_{false};
  std::mutex mutex_;  // guards lanes_ and serializes attaching regions to lanes and detaching them
  std::vector<std::shared_ptr<Lane>> lanes_;
};

}  // namespace sgl_ext::transfer
