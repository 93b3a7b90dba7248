// Regions, lanes, and the way from a batch of copies to a ticket.
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
  // Closes within a few seconds, or at once if that was tried before; what is in flight even then
  // lives until the process ends.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::shared_ptr<Region> add_region(std::shared_ptr<Region> region);
  // Throws Refused while unfinished tickets use it.
  void remove_region(std::int64_t id);

  // Makes a lane that publishes to this engine's hub, and starts it.
  template <class L, class... Arguments>
  std::shared_ptr<L> add_lane(Arguments&&... arguments) {
    check_open();
    auto lane = std::make_shared<L>(hub_, std::forward<Arguments>(arguments)...);
    start(lane);
    return lane;
  }

  // Validates the whole batch before any byte moves; an invalid one throws and changes nothing.
  std::shared_ptr<Ticket> submit(std::vector<Copy> copies, const std::shared_ptr<Lane>& lane,
                                 Level level);

  // Whether anything of the ticket that had not started was cancelled by this call.
  bool cancel(Ticket& ticket);
  // True once one of them is finished. Throws std::invalid_argument if one is another engine's.
  bool wait_any(const std::vector<std::shared_ptr<Ticket>>& tickets, Deadline deadline);
  bool wait(const Ticket& ticket, Deadline deadline);

  // Refuses work, cancels what has not started and waits for the rest; false if that took longer.
  bool close(Deadline deadline);
  bool closed() const { return closed_; }
  // A child of fork has the memory of an engine but not its threads.
  bool forked() const;
  // Throws Refused if closed or forked.
  void check_open() const;
  // Throws Refused if forked: locks of the engine may be held by threads that are not here.
  void check_here() const;

 private:
  void start(const std::shared_ptr<Lane>& lane);
  void check_own(const Lane& lane) const;

  const std::int64_t process_, forks_;
  const std::shared_ptr<Hub> hub_ = std::make_shared<Hub>();
  Regions regions_;
  std::atomic<bool> closed_{false};
  std::mutex mutex_;  // of lanes_, and for what lanes and regions do with each other
  std::vector<std::shared_ptr<Lane>> lanes_;
};

}  // namespace sgl_ext::transfer
