// Memory, waits and temporary directories for the tests of the transfer engine.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "check.h"
#include "engine.h"

namespace sgl_ext::transfer {

constexpr std::int64_t kPage = 4096;

inline Deadline soon(int seconds = 60) { return Clock::now() + std::chrono::seconds(seconds); }

// Page-aligned memory, registered with an engine.
class Memory {
 public:
  Memory(Engine& engine, std::int64_t size, unsigned seed = 0, bool pinned = false)
      : size_(size) {
    const auto pages = static_cast<std::size_t>((size + kPage - 1) / kPage);
    bytes_.reset(static_cast<unsigned char*>(std::aligned_alloc(kPage, pages * kPage)));
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < size; ++i) {
      bytes_.get()[i] = seed ? static_cast<unsigned char>(random()) : 0;
    }
    auto region = std::make_shared<Region>();
    region->base = address();
    region->length = size;
    region->pinned = pinned;
    id_ = engine.add_region(std::move(region))->id;
  }
  std::int64_t address(std::int64_t offset = 0) const {
    return reinterpret_cast<std::int64_t>(bytes_.get()) + offset;
  }
  unsigned char& operator[](std::int64_t index) { return bytes_.get()[index]; }
  std::int64_t size() const { return size_; }
  std::int64_t id() const { return id_; }
  bool equals(const Memory& other, std::int64_t begin, std::int64_t end) const {
    return std::memcmp(bytes_.get() + begin, other.bytes_.get() + begin,
                       static_cast<std::size_t>(end - begin)) == 0;
  }

 private:
  struct Free {
    void operator()(unsigned char* bytes) const { std::free(bytes); }
  };
  std::unique_ptr<unsigned char, Free> bytes_;
  std::int64_t size_;
  std::int64_t id_ = 0;
};

inline Copy line(std::int64_t src, std::int64_t dst, std::int64_t size) {
  return {src, dst, size, 1, size, size};
}

inline bool eventually(const std::function<bool()>& condition) {
  for (const Deadline deadline = soon(); Clock::now() < deadline;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

class Directory {
 public:
  Directory() {
    char name[] = "/tmp/sgl-ext-test-XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~Directory() {
    if (std::system(("rm -rf " + path_).c_str()) != 0) std::abort();
  }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace sgl_ext::transfer
