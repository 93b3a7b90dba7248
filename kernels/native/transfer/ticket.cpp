#include "ticket.h"

#include <algorithm>

#include "cuda_runtime.h"
#include "lane.h"

namespace sgl_ext::transfer {

namespace {

std::int64_t total(const std::vector<Copy>& copies) {
  std::int64_t bytes = 0;
  for (const Copy& copy : copies) bytes += copy.bytes();
  return bytes;
}

}  // namespace

Ticket::Ticket(std::vector<Copy> batch, Level urgency, std::shared_ptr<Lane> lane,
               std::vector<std::shared_ptr<Region>> used)
    : level(urgency),
      op_count(batch.size()),
      bytes_total(total(batch)),
      copies_(std::move(batch)),
      regions_(std::move(used)),
      lane_(std::move(lane)) {}

Ticket::~Ticket() { release(); }

void Ticket::forget() {
  std::vector<Copy>().swap(copies_);
  after_.clear();
  marked_.reset();
}

void Ticket::release() {
  for (const auto& region : regions_) region->uses.fetch_sub(1);
  regions_.clear();
}

const std::shared_ptr<Region>& Ticket::shared_region_at(std::int64_t address) const {
  const auto after = std::upper_bound(
      regions_.begin(), regions_.end(), address,
      [](std::int64_t value, const auto& region) { return value < region->base; });
  return *std::prev(after);
}

std::vector<std::shared_ptr<Region>> Ticket::share_regions(std::size_t op) const {
  std::vector<std::shared_ptr<Region>> shared = {shared_region_at(copies_[op].src)};
  const auto& dst = shared_region_at(copies_[op].dst);
  if (dst != shared.front()) shared.push_back(dst);
  if (shared.size() == 2 && shared[1]->base < shared[0]->base) std::swap(shared[0], shared[1]);
  for (const auto& region : shared) region->uses.fetch_add(1);
  return shared;
}

bool Ticket::cancel() { return !finished() && lane_->cancel(*this); }

void Hub::publish(const std::vector<std::shared_ptr<Ticket>>& tickets) {
  if (tickets.empty()) return;
  // Releases the regions before the state is published: a thread that sees a ticket finished
  // may unregister its regions.
  for (const auto& ticket : tickets) ticket->release();
  const auto now = std::chrono::steady_clock::now();
  std::lock_guard lock(mutex_);
  for (const auto& ticket : tickets) {
    ticket->ended_ = now;
    const State state = ticket->failure_     ? State::failed
                        : ticket->cancelled_ ? State::cancelled
                                             : State::done;
    ticket->state_.store(state, std::memory_order_release);
  }
  if (waiters_ > 0) finished_.notify_all();
}

}  // namespace sgl_ext::transfer
