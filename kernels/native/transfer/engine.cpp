#include "engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "overlap.h"

namespace sgl_ext::transfer {

namespace {

constexpr auto kLastChance = std::chrono::seconds(5);

std::string at(std::size_t op, const std::string& what) {
  return "copy " + std::to_string(op) + ": " + what;
}

// Throws std::invalid_argument unless the sizes and pitches are valid. Later arithmetic relies on
// them regardless of the addresses.
void check_sizes(const Copy& copy, std::size_t op) {
  if (copy.width <= 0 || copy.height <= 0) {
    throw std::invalid_argument(at(op, "width " + std::to_string(copy.width) + ", height " +
                                           std::to_string(copy.height) +
                                           "; expected both to be at least 1"));
  }
  if (copy.height == 1) return;
  for (const auto& [pitch, name] : {std::pair(copy.src_pitch, "src_pitch"),
                                    std::pair(copy.dst_pitch, "dst_pitch")}) {
    if (pitch < copy.width) {
      throw std::invalid_argument(at(op, "width " + std::to_string(copy.width) + " exceeds " +
                                             name + " " + std::to_string(pitch) +
                                             "; rows must not overlap"));
    }
  }
}

// Returns the region that contains all bytes of one side of a copy. Throws
// std::invalid_argument if there is none.
const std::shared_ptr<Region>& resolve(const Regions::Lookup& lookup, std::int64_t address,
                                       std::int64_t pitch, const Copy& copy, std::size_t op,
                                       const char* side) {
  std::int64_t extent;
  const std::shared_ptr<Region>* region = nullptr;
  if (!__builtin_mul_overflow(copy.height - 1, copy.height > 1 ? pitch : 0, &extent) &&
      !__builtin_add_overflow(extent, copy.width, &extent)) {
    region = lookup.find(address);
  }
  if (region && (*region)->contains(address, extent)) return *region;
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  std::string what = std::string(side) + " " + text + ", width " + std::to_string(copy.width) +
                     ", height " + std::to_string(copy.height) + ", pitch " +
                     std::to_string(pitch);
  what += region ? " runs past the end of " + (*region)->describe()
                 : std::string(" is in no registered region; register it first");
  throw std::invalid_argument(at(op, what));
}

// Number of forks between the process that loaded this library and this one. A process ID does not
// identify a process: a child in another PID namespace may have the same ID as its parent.
std::int64_t forks = 0;
[[maybe_unused]] const int counted = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });

}  // namespace

Engine::Engine() : process_(::getpid()), forks_(forks) {}

Engine::~Engine() {
  // A caller of close() has already waited as long as it wanted to.
  if (close(closed_ ? Clock::now() : Clock::now() + kLastChance)) return;
  // Leaks what the threads of the lanes use, because they are still running. In a forked child,
  // threads that do not exist there may hold the locks.
  new auto(std::move(lanes_));
  new auto(hub_);
}

bool Engine::forked() const { return forks != forks_; }

void Engine::check_here() const {
  if (!forked()) return;
  throw Refused("this engine belongs to process " + std::to_string(process_) +
                ", which forked this one (" + std::to_string(::getpid()) +
                "); create an engine in this process");
}

void Engine::check_open() const {
  check_here();
  if (closed_) throw Refused("the transfer engine is closed");
}

std::shared_ptr<Region> Engine::add_region(std::shared_ptr<Region> region) {
  check_open();
  std::lock_guard lock(mutex_);
  region = regions_.add(std::move(region));
  if (!region->pinned) return region;
  try {
    for (const auto& lane : lanes_) lane->attach(*region);
  } catch (...) {
    for (const auto& lane : lanes_) lane->detach(*region);
    regions_.remove(region->id);
    throw;
  }
  return region;
}

void Engine::remove_region(std::int64_t id) {
  check_here();
  std::lock_guard lock(mutex_);
  const auto region = regions_.remove(id);
  if (region->pinned) {
    for (const auto& lane : lanes_) lane->detach(*region);
  }
  region->close_file();  // even if a handle still refers to the region
}

void Engine::start(const std::shared_ptr<Lane>& lane) {
  std::lock_guard lock(mutex_);
  check_open();
  const auto regions = regions_.all();
  try {
    lane->start();
    for (const auto& region : regions) {
      if (region->pinned) lane->attach(*region);
    }
  } catch (...) {
    for (const auto& region : regions) {
      if (region->pinned) lane->detach(*region);
    }
    lane->stop();
    lane->join(Clock::now() + kLastChance);
    throw;
  }
  lanes_.push_back(lane);
}

std::shared_ptr<Ticket> Engine::submit(std::vector<Copy> copies, const std::shared_ptr<Lane>& lane,
                                       Level level, const std::vector<std::uintptr_t>& after) {
  check_open();
  check_own(*lane);
  std::vector<std::shared_ptr<Region>> used;
  {
    const Regions::Lookup lookup(regions_);
    const Region* last_src = nullptr;
    const Region* last_dst = nullptr;
    const auto use = [&](const std::shared_ptr<Region>& region, const Region*& last) {
      if (region.get() == last) return;
      last = region.get();
      used.push_back(region);
    };
    for (std::size_t op = 0; op < copies.size(); ++op) {
      Copy& copy = copies[op];
      check_sizes(copy, op);
      const auto& src = resolve(lookup, copy.src, copy.src_pitch, copy, op, "src");
      const auto& dst = resolve(lookup, copy.dst, copy.dst_pitch, copy, op, "dst");
      if (!dst->writable) {
        throw std::invalid_argument(at(op, "dst lies in read-only " + dst->describe()));
      }
      if (copy.contiguous()) {
        copy.width = copy.src_pitch = copy.dst_pitch = copy.bytes();
        copy.height = 1;
      }
      if (auto reason = lane->refuses(copy, *src, *dst)) {
        throw std::invalid_argument(at(op, *reason));
      }
      use(src, last_src);
      use(dst, last_dst);
    }
    std::sort(used.begin(), used.end(),
              [](const auto& a, const auto& b) { return a->base < b->base; });
    used.erase(std::unique(used.begin(), used.end()), used.end());
    for (const auto& region : used) region->uses.fetch_add(1);
  }
  // From here on the ticket owns the use counts of the regions and releases them in its
  // destructor at the latest.
  const auto ticket =
      std::make_shared<Ticket>(std::move(copies), level, lane, std::move(used));
  if (const auto overlap = find_overlap(ticket->copies())) {
    throw std::invalid_argument(
        at(overlap->writer, "its destination overlaps the " +
                                std::string(overlap->other_is_source ? "source" : "destination") +
                                " of copy " + std::to_string(overlap->other) +
                                "; copies of one batch run in any order, submit dependent ones "
                                "one after the other"));
  }
  ticket->after_ = lane->points(after);
  lane->enqueue(ticket);
  return ticket;
}

bool Engine::fence(const std::shared_ptr<Ticket>& ticket, std::uintptr_t stream,
                   Deadline deadline) {
  check_here();
  check_own(ticket->lane());
  return !ticket->finished() && ticket->lane_->fence(*ticket, stream, deadline);
}

bool Engine::cancel(Ticket& ticket) {
  check_here();
  return ticket.cancel();
}

void Engine::check_own(const Lane& lane) const {
  if (lane.publishes_to(*hub_)) return;
  throw std::invalid_argument("this " + lane.name() + " belongs to another engine");
}

bool Engine::wait_any(const std::vector<std::shared_ptr<Ticket>>& tickets, Deadline deadline) {
  check_here();
  for (const auto& ticket : tickets) check_own(ticket->lane());
  return hub_->wait(
      [&] {
        return std::any_of(tickets.begin(), tickets.end(),
                           [](const auto& ticket) { return ticket->finished(); });
      },
      deadline);
}

bool Engine::wait(const Ticket& ticket, Deadline deadline) {
  check_here();
  check_own(ticket.lane());
  return hub_->wait([&] { return ticket.finished(); }, deadline);
}

bool Engine::close(Deadline deadline) {
  if (forked()) return false;
  closed_ = true;
  std::vector<std::shared_ptr<Lane>> lanes;
  {
    std::lock_guard lock(mutex_);
    lanes = lanes_;
  }
  // Reverse order of creation, because a lane may submit to an earlier one. All lanes stop before
  // any is joined; otherwise they would continue to work while another lane is stuck.
  std::reverse(lanes.begin(), lanes.end());
  for (const auto& lane : lanes) lane->stop();
  bool ended = true;
  for (const auto& lane : lanes) ended &= lane->join(deadline);
  if (ended) {
    std::lock_guard lock(mutex_);
    for (const auto& region : regions_.all()) {
      region->close_file();
      if (region->pinned) {
        for (const auto& lane : lanes_) lane->detach(*region);
      }
    }
  }
  return ended;
}

}  // namespace sgl_ext::transfer
