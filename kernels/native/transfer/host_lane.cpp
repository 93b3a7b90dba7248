#include "host_lane.h"

#include "copy.h"

namespace sgl_ext::transfer {

namespace {

// A smaller batch fits the second-level cache, where its reader finds it; a larger one would only
// push other data out.
constexpr std::int64_t kStreamTicket = 4 << 20;

// Bounds the time under the lock that cutting a piece of many small copies takes.
constexpr std::size_t kRuns = 256;

}  // namespace

HostLane::HostLane(std::shared_ptr<Hub> hub, std::size_t threads, std::int64_t piece_bytes)
    : Lane("host lane", std::move(hub)), threads_(threads), cut_{piece_bytes, kRuns} {
  if (threads < 1 || threads > 1024) {
    throw std::invalid_argument("a host lane of " + std::to_string(threads) +
                                " threads; expected 1 to 1024");
  }
  if (piece_bytes < 4096) {
    throw std::invalid_argument("pieces of " + std::to_string(piece_bytes) +
                                " bytes; expected at least 4096");
  }
}

std::optional<std::string> HostLane::refuses(const Copy&, const Region& src,
                                             const Region& dst) const {
  for (const Region* region : {&src, &dst}) {
    if (region->kind != Kind::host) {
      return region->describe() + " cannot be accessed by a host lane, which copies host memory";
    }
  }
  return std::nullopt;
}

void HostLane::work_came(const Ticket& ticket) {
  const bool shared = ticket.bytes_total > cut_.bytes || ticket.op_count > cut_.runs;
  shared ? came_.notify_all() : came_.notify_one();
}

void HostLane::work(std::size_t) {
  for (;;) {
    Piece piece;
    {
      Lock lock(mutex_);
      while (!take(piece, cut_)) {
        if (closing()) return;
        came_.wait(lock);
      }
    }
    const bool stream = piece.ticket->bytes_total >= kStreamTicket;
    each_run(piece, [&](const Copy& run, std::size_t) { copy_rows(run, stream); });
    finish(piece, {piece.bytes, 0, {}});
  }
}

}  // namespace sgl_ext::transfer
