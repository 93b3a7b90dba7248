#include "host_lane.h"

#include "copy.h"

namespace sgl_ext::transfer {

namespace {

// Size from which a batch bypasses the caches, in bytes. A smaller batch fits in the L2 cache,
// where its reader finds it; a larger batch would only evict other data.
constexpr std::int64_t kStreamTicket = 4 << 20;

// Runs per piece. Bounds the time that the lock is held to build a piece of many small copies.
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
