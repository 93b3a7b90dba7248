#include "file_lane.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "direct_io.h"

namespace sgl_ext::transfer {

namespace {

std::string misaligned(const char* what, std::int64_t value, std::int64_t alignment) {
  return std::string(what) + " " + std::to_string(value) + " is not a multiple of " +
         std::to_string(alignment) + ", which direct I/O on this file requires";
}

}  // namespace

void FileLane::check(const Limits& limits) {
  constexpr std::int64_t kSector = 4096, kLargest = std::int64_t{1} << 30;
  if (limits.depth < 1 || limits.depth > 4096) {
    throw std::invalid_argument("a queue depth of " + std::to_string(limits.depth) +
                                "; expected 1 to 4096");
  }
  if (limits.request < kSector || limits.request > kLargest || limits.request % kSector != 0) {
    throw std::invalid_argument("requests of " + std::to_string(limits.request) +
                                " bytes; expected a multiple of 4096 up to 1 GiB");
  }
  if (limits.bytes < 1) {
    throw std::invalid_argument(std::to_string(limits.bytes) +
                                " bytes in flight; expected at least 1");
  }
}

FileLane::FileLane(std::shared_ptr<Hub> hub, std::unique_ptr<IoBackend> backend,
                   const Limits& limits)
    : Lane("file lane", std::move(hub)), limits_(limits), backend_(std::move(backend)) {
  check(limits);
  ios_.resize(capacity(limits));
  for (Io& io : ios_) idle_.push_back(&io);
}

std::optional<std::string> FileLane::refuses(const Copy& copy, const Region& src,
                                             const Region& dst) const {
  const bool write = dst.kind == Kind::file;
  const Region& file = write ? dst : src;
  const Region& memory = write ? src : dst;
  if (file.kind != Kind::file || memory.kind != Kind::host) {
    return "it copies from " + src.describe() + " to " + dst.describe() +
           "; a file lane copies between host memory and a file";
  }
  if (file.lane != this) return file.describe() + " was opened by another lane";

  const std::int64_t file_first = (write ? copy.dst : copy.src) - file.base;
  const std::int64_t memory_first = write ? copy.src : copy.dst;
  const std::int64_t file_pitch = write ? copy.dst_pitch : copy.src_pitch;
  const std::int64_t memory_pitch = write ? copy.src_pitch : copy.dst_pitch;
  const std::int64_t in_file = file.offset_alignment, in_memory = file.memory_alignment;
  if (copy.width % in_file != 0) return misaligned("width", copy.width, in_file);
  if (file_first % in_file != 0) return misaligned("file offset", file_first, in_file);
  if (memory_first % in_memory != 0) {
    return misaligned("memory address", memory_first, in_memory);
  }
  if (copy.height > 1 && file_pitch % in_file != 0) {
    return misaligned("pitch in the file", file_pitch, in_file);
  }
  if (copy.height > 1 && memory_pitch % in_memory != 0) {
    return misaligned("pitch in memory", memory_pitch, in_memory);
  }
  return std::nullopt;
}

void FileLane::attach(const Region& region) {
  constexpr std::int64_t kPart = std::int64_t{1} << 30;
  for (std::int64_t done = 0; done < region.length; done += kPart) {
    const std::int64_t begin = region.base + done;
    const std::int64_t length = std::min(kPart, region.length - done);
    const int slot = backend_->attach(reinterpret_cast<char*>(begin), length);
    if (slot < 0) return;
    std::lock_guard lock(mutex_);
    buffers_[begin] = {region.id, begin + length, slot};
  }
}

void FileLane::detach(const Region& region) {
  std::vector<int> slots;
  {
    std::lock_guard lock(mutex_);
    for (auto it = buffers_.begin(); it != buffers_.end();) {
      if (it->second.region != region.id) {
        ++it;
      } else {
        slots.push_back(it->second.slot);
        it = buffers_.erase(it);
      }
    }
  }
  for (const int slot : slots) backend_->detach(slot);
}

std::int64_t FileLane::registered_bytes() const {
  std::lock_guard lock(mutex_);
  std::int64_t bytes = 0;
  for (const auto& [begin, buffer] : buffers_) bytes += buffer.end - begin;
  return bytes;
}

void FileLane::work_came(const Ticket&) {
  if (asleep_) backend_->wake();
  asleep_ = false;
}

unsigned FileLane::admitted() const {
  unsigned levels = 0;
  for (std::size_t level = 0; level < kLevels; ++level) {
    const Load& load = in_flight(level);
    if (load.pieces < limits_.depth && load.bytes < limits_.bytes) levels |= 1u << level;
  }
  return levels;
}

void FileLane::prepare(Io& io) const {
  each_run(io.piece, [&](const Copy& run, std::size_t) {
    const bool write = run.dst >= kFileSpace;
    const Region& file = io.piece.ticket->region_at(write ? run.dst : run.src);
    io.fd = file.fd;
    io.write = write;
    io.alignment = file.offset_alignment;
    io.memory = reinterpret_cast<char*>(write ? run.src : run.dst);
    io.length = run.width;
    io.offset = (write ? run.dst : run.src) - file.base;
    io.done = 0;
  });
  io.buffer = -1;
  const auto address = reinterpret_cast<std::int64_t>(io.memory);
  auto after = buffers_.upper_bound(address);
  if (after == buffers_.begin()) return;
  const Buffer& buffer = std::prev(after)->second;
  if (address + io.length <= buffer.end) io.buffer = buffer.slot;
}

// Starts as many pieces as the limits admit. Returns false once the lane is closing
// and nothing is in flight.
bool FileLane::refill() {
  const Cut cut{limits_.request, 1, 1};
  Lock lock(mutex_);
  Piece piece;
  while (!idle_.empty() && take(piece, cut, admitted())) {
    Io* io = idle_.back();
    idle_.pop_back();
    io->piece = piece;
    prepare(*io);
    backend_->start(io);
  }
  asleep_ = true;
  return !closing() || idle_.size() < ios_.size();
}

void FileLane::work(std::size_t) {
  std::vector<Completion> completed;
  while (refill()) {
    completed.clear();
    backend_->reap(completed);
    for (const auto& [io, result] : completed) {
      if (settle(*io, result)) {
        idle_.push_back(io);
      } else {
        backend_->start(io);
      }
      // Completions come in bursts. Refilling the queue after each completion keeps the
      // device busy while the others are processed, which is several per cent faster than
      // refilling it after the burst.
      refill();
      backend_->submit();
    }
  }
}

// Returns whether the request is finished; if not, the rest of it must be started.
bool FileLane::settle(Io& io, std::int64_t result) {
  if (result == -EINTR) return false;
  int code = 0;
  std::string what;
  if (result > 0) {
    io.done += result;
    // A direct read that stops at an unaligned offset has reached the end of the file.
    if (io.done < io.length && (io.write || io.done % io.alignment == 0)) return false;
  }
  if (result < 0) {
    code = static_cast<int>(-result);
    what = std::strerror(code);
  } else if (io.done < io.length) {
    code = io.write ? EIO : ENODATA;
    what = io.write ? "the file accepted no more data" : "the file ended";
  }
  if (code != 0) {
    what = std::string(io.write ? "writing " : "reading ") + std::to_string(io.length) +
           " bytes at offset " + std::to_string(io.offset) + ": " + what + " after " +
           std::to_string(io.done) + " bytes";
  }
  finish(io.piece, {io.done, code, std::move(what)});
  return true;
}

std::shared_ptr<Region> file_region(int fd, std::int64_t length, const Lane& lane) {
  const auto refuse = [fd](const std::string& what) -> void {
    throw std::invalid_argument("file descriptor " + std::to_string(fd) + what);
  };
  auto region = std::make_shared<Region>();
  region->fd = fd;
  region->kind = Kind::file;
  region->lane = &lane;
  region->length = length;
  struct stat status;
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fstat(fd, &status) != 0) {
    refuse(std::string(": ") + std::strerror(errno));
  }
  if (flags & O_PATH) refuse(" is open with O_PATH; open it for reading");
  // A terminal is a character device too, but a read of it may block forever; lseek() rejects it.
  const bool device = S_ISBLK(status.st_mode) || S_ISCHR(status.st_mode);
  if ((!S_ISREG(status.st_mode) && !device) || ::lseek(fd, 0, SEEK_CUR) < 0) {
    refuse(" is neither a regular file nor a device that can be read at an offset");
  }
  if ((flags & O_ACCMODE) == O_WRONLY) {
    refuse(" is open for writing only; open it for reading and writing");
  }
  if (flags & O_APPEND) {
    refuse(" is open with O_APPEND: writes would all go to its end; open it without");
  }
  region->writable = (flags & O_ACCMODE) == O_RDWR;
  if (flags & O_DIRECT) {
    const auto direct = direct_io(fd);
    const auto page = DirectIo{4096, 4096};
    region->memory_alignment = direct.value_or(page).memory_alignment;
    region->offset_alignment = direct.value_or(page).offset_alignment;
  }
  return region;
}

}  // namespace sgl_ext::transfer
