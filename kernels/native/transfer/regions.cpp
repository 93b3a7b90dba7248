#include "regions.h"

#include <unistd.h>

#include <limits>

namespace sgl_ext::transfer {

namespace {

// Minimum gap between the addresses of two files, in bytes: an offset past the end of one file
// does not lie in the next.
constexpr std::int64_t kGuard = std::int64_t{1} << 20;

std::string hex(std::int64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

void Region::close_file() {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

std::string Region::describe() const {
  const char* what = kind == Kind::file     ? "file"
                     : kind == Kind::device ? "device memory"
                                            : "memory";
  return std::string(what) + " region " + std::to_string(id) + " (" + std::to_string(length) +
         " bytes at " + hex(base) + ")";
}

std::shared_ptr<Region> Regions::add(std::shared_ptr<Region> region) {
  if (region->length <= 0) {
    throw std::invalid_argument("a region of " + std::to_string(region->length) +
                                " bytes; expected at least 1");
  }
  std::lock_guard lock(mutex_);
  if (region->kind == Kind::file) {
    if (region->length > std::numeric_limits<std::int64_t>::max() - next_file_ - 2 * kGuard) {
      throw std::invalid_argument("a file region of " + std::to_string(region->length) +
                                  " bytes; the address space for files is smaller");
    }
    region->base = next_file_;
    next_file_ += (region->length + 2 * kGuard - 1) / kGuard * kGuard;
  } else if (region->base <= 0 || region->base >= kFileSpace ||
             region->length > kFileSpace - region->base) {
    throw std::invalid_argument("there is no memory at " + hex(region->base) + " for " +
                                std::to_string(region->length) + " bytes");
  }
  auto next = by_base_.lower_bound(region->base);
  const Region* other = nullptr;
  if (next != by_base_.end() && next->first < region->base + region->length) {
    other = next->second.get();
  }
  if (next != by_base_.begin()) {
    const Region& before = *std::prev(next)->second;
    if (before.base + before.length > region->base) other = &before;
  }
  if (other) {
    throw std::invalid_argument(std::to_string(region->length) + " bytes at " + hex(region->base) +
                                " overlap " + other->describe() + "; unregister that first");
  }
  region->id = next_id_++;
  base_of_.emplace(region->id, region->base);
  by_base_.emplace(region->base, region);
  return region;
}

std::shared_ptr<Region> Regions::remove(std::int64_t id) {
  std::lock_guard lock(mutex_);
  auto known = base_of_.find(id);
  if (known == base_of_.end()) {
    throw std::invalid_argument("region " + std::to_string(id) +
                                " is not registered (unregistered before?)");
  }
  auto found = by_base_.find(known->second);
  std::shared_ptr<Region> region = found->second;
  // submit() increments the count under this lock, so that no new ticket can use the region here.
  if (const auto uses = region->uses.load(); uses > 0) {
    throw Refused(region->describe() + " is in use by " + std::to_string(uses) +
                  " unfinished tickets; wait for them or cancel them first");
  }
  by_base_.erase(found);
  base_of_.erase(known);
  return region;
}

std::vector<std::shared_ptr<Region>> Regions::all() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Region>> found;
  for (const auto& [base, region] : by_base_) found.push_back(region);
  return found;
}

const std::shared_ptr<Region>* Regions::Lookup::find(std::int64_t address) const {
  auto after = regions_.by_base_.upper_bound(address);
  if (after == regions_.by_base_.begin()) return nullptr;
  const auto& region = std::prev(after)->second;
  return address - region->base < region->length ? &region : nullptr;
}

}  // namespace sgl_ext::transfer
