#include "attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <stdexcept>

#include "openmp.h"

namespace sgl_ext::attention {
namespace {

// Keys per decode task. One row can then occupy context / 256 threads, and the size of its partial
// states is about one percent of the K and V that it reads.
constexpr int kDecodeKeys = 256;
// Keys per extend task of a sequence with few queries.
constexpr int kExtendKeys = 1024;
// Query rows per extend task: enough to amortise the packing of the keys, few enough for the L2
// cache.
constexpr int kExtendRows = 192;
// Maximum number of key ranges per row, which bounds the memory of the partial states; longer
// contexts get larger ranges.
constexpr int kMostDecodeRanges = 64;
constexpr int kMostExtendRanges = 16;
// Sequences of at most this many query blocks also partition their keys; longer ones have enough
// tasks.
constexpr int kFewBlocks = 4;
// Number of multiply-adds below which one thread is used: they take less time than waking another
// thread.
constexpr double kSerialProducts = 4e5;

constexpr std::size_t kLine = 64;

int range_size(int context, int size, int most) {
  const int ranges = (context + size - 1) / size;
  return size * ((ranges + most - 1) / most);
}

// Memory of one thread, 64-byte aligned and reused by its next call.
class Workspace {
 public:
  char *at_least(std::size_t bytes) {
    if (bytes > size_) {
      size_ = 0;
      memory_.reset();
      memory_.reset(static_cast<char *>(::operator new(bytes, std::align_val_t(kLine))));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char *p) const { ::operator delete(p, std::align_val_t(kLine)); }
  };
  std::unique_ptr<char, Free> memory_;
  std::size_t size_ = 0;
};

// Returns whether `next` is a later part of the sequence that `row` is a part of.
bool follows(const Row &row, const Row &next) {
  return next.slots == row.slots && next.extent == row.extent && next.end == row.end &&
         next.context - next.queries >= row.context;
}

std::size_t rounded(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

Plan::Plan(const std::vector<Row> &rows, const Shape &shape) : shape_(shape) {
  const int group = shape.heads / shape.kv_heads;
  const int block = std::clamp(kExtendRows / group, 8, 128);
  for (std::size_t i = 0; i < rows.size();) {
    const Row &row = rows[i];
    const bool decode = row.extent == 1;
    int queries = row.queries;
    // Consecutive parts of one sequence are merged, so that the keys they share are read once.
    while (++i < rows.size() && !decode && follows(rows[i - 1], rows[i])) queries += rows[i].queries;
    if (queries == 0) continue;
    const int blocks = (queries + block - 1) / block;
    int range = row.end;
    if (decode) {
      range = range_size(row.end, kDecodeKeys, kMostDecodeRanges);
    } else if ((row.extent + block - 1) / block <= kFewBlocks) {
      range = range_size(row.end, kExtendKeys, kMostExtendRanges);
    }
    // The last block sees the most keys, so that the longest tasks start first.
    for (int b = blocks - 1; b >= 0; --b) {
      Task task{};
      task.slots = row.slots;
      task.token = row.token + b * block;
      task.positions = row.positions + b * block;
      task.queries = std::min(block, queries - b * block);
      const int first = std::max(0, task.positions[0] - shape.window);
      const int last = task.positions[task.queries - 1] + 1;
      task.heads = decode ? shape.heads : group;
      const int task_rows = task.queries * task.heads;
      const int ranges = (last - 1) / range - first / range + 1;
      const std::size_t state =
          ranges > 1 ? std::size_t(task_rows) * (shape.head_dim + 2) : 0;
      const int first_group = static_cast<int>(groups_.size());
      for (int head = 0; head < shape.heads; head += task.heads) {
        groups_.push_back({ranges, partial_floats_});
        partial_floats_ += ranges * state;
      }
      // The heads of one key range are consecutive, because their K and V share pages.
      for (int r = 0; r < ranges; ++r) {
        const int begin = (first / range + r) * range;
        task.first_key = std::max(first, begin);
        task.last_key = std::min(last, begin + range);
        for (int head = 0; head < shape.heads; head += task.heads) {
          task.head = head;
          const int index = first_group + head / task.heads;
          items_.push_back({task, decode, index, groups_[index].partials + r * state});
        }
        products_ += 2.0 * (task.last_key - task.first_key) * task.queries * shape.heads *
                     shape.head_dim;
      }
      (decode ? decode_rows_ : extend_rows_) =
          std::max(decode ? decode_rows_ : extend_rows_, task_rows);
    }
  }
}

struct Plan::Execution {
  const Plan &plan;
  const Layer &layer;
  const Kernels &kernels;
  float *partials;
  char *scratch;
  std::size_t scratch_size;
  std::atomic<int> *missing;  // unfinished tasks of each group
  std::atomic<std::size_t> next{0};
  std::atomic<int> busy_threads{0};
};

void Plan::work(void *data) {
  auto &execution = *static_cast<Execution *>(data);
  const Plan &plan = execution.plan;
  char *scratch = nullptr;
  for (std::size_t i; (i = execution.next.fetch_add(1, std::memory_order_relaxed)) <
                      plan.items_.size();) {
    if (!scratch)
      scratch = execution.scratch + execution.scratch_size * execution.busy_threads++;
    const Item &item = plan.items_[i];
    const Group &group = plan.groups_[item.group];
    const auto kernel = item.decode ? execution.kernels.decode : execution.kernels.extend;
    if (group.tasks == 1) {
      kernel(execution.layer, item.task, nullptr, scratch);
      continue;
    }
    kernel(execution.layer, item.task, execution.partials + item.partial, scratch);
    // acq_rel: each task releases its partial state, and the last one acquires all of them.
    if (execution.missing[item.group].fetch_sub(1, std::memory_order_acq_rel) == 1)
      execution.kernels.merge(execution.layer, item.task, execution.partials + group.partials,
                              group.tasks, scratch);
  }
}

void Plan::run(const Layer &layer, const Kernels &kernels, int threads) const {
  if (items_.empty()) return;
  // One thread or all: an OpenMP pool terminates the threads that a smaller region leaves unused.
  if (products_ < kSerialProducts || items_.size() == 1 || threads < 1) threads = 1;
  const std::size_t busy = std::min<std::size_t>(threads, items_.size());

  const std::size_t scratch = rounded(
      std::max(kernels.scratch(layer, decode_rows_, extend_rows_), sizeof(float) * layer.head_dim));
  const std::size_t partials = rounded(partial_floats_ * sizeof(float));
  const std::size_t missing = groups_.size() * sizeof(std::atomic<int>);
  static thread_local Workspace workspace;
  char *memory = workspace.at_least(scratch * busy + partials + missing);

  auto *counters = reinterpret_cast<std::atomic<int> *>(memory + scratch * busy + partials);
  for (std::size_t g = 0; g < groups_.size(); ++g)
    new (counters + g) std::atomic<int>(groups_[g].tasks);
  Execution execution{*this,
                      layer,
                      kernels,
                      reinterpret_cast<float *>(memory + scratch * busy),
                      memory,
                      scratch,
                      counters};
  parallel(threads, work, &execution);
}

Batch::Batch(const std::int32_t *table, std::int64_t height, std::int64_t width,
             std::int64_t pitch, const std::vector<std::int64_t> &requests,
             const std::vector<std::int64_t> &contexts,
             const std::vector<std::int64_t> &queries, const std::vector<std::int64_t> &extents,
             const std::vector<std::int64_t> &ends) {
  const auto refuse = [](std::size_t row, const std::string &what) {
    throw std::invalid_argument("row " + std::to_string(row) + " of the batch " + what);
  };
  if (extents.size() != ends.size() || (!extents.empty() && extents.size() != requests.size()))
    throw std::invalid_argument("the batch has " + std::to_string(requests.size()) +
                                " requests, " + std::to_string(extents.size()) + " extents and " +
                                std::to_string(ends.size()) + " ends; expected equal numbers");
  if (contexts.size() != requests.size() || queries.size() != requests.size())
    throw std::invalid_argument("the batch has " + std::to_string(requests.size()) +
                                " requests, " + std::to_string(contexts.size()) +
                                " contexts and " + std::to_string(queries.size()) +
                                " query counts; expected equal numbers");
  rows_.reserve(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (requests[i] < 0 || requests[i] >= height)
      refuse(i, "references request " + std::to_string(requests[i]) + " of a table of " +
                    std::to_string(height) + " requests");
    if (contexts[i] < 0 || contexts[i] > width || contexts[i] >= kUnlimited)
      refuse(i, "has a context of " + std::to_string(contexts[i]) + " tokens; the table holds " +
                    std::to_string(width) + " per request");
    if (queries[i] < 0 || queries[i] > contexts[i])
      refuse(i, "has " + std::to_string(queries[i]) + " queries in a context of " +
                    std::to_string(contexts[i]) + " tokens");
    const std::int64_t extent = extents.empty() ? queries[i] : extents[i];
    const std::int64_t end = ends.empty() ? contexts[i] : ends[i];
    if (extent < queries[i] || end < contexts[i] || end > width || extent > end)
      refuse(i, "is not a part of " + std::to_string(extent) + " queries that end at " +
                    std::to_string(end));
    const std::int32_t *slots = table + requests[i] * pitch;
    rows_.push_back({slots, tokens_, static_cast<int>(contexts[i]), static_cast<int>(queries[i]),
                     nullptr, static_cast<int>(extent), static_cast<int>(end)});
    tokens_ += queries[i];
    for (std::int64_t position = contexts[i] - queries[i]; position < contexts[i]; ++position)
      positions_.push_back(static_cast<std::int32_t>(position));
    std::int32_t least = 0, most = -1;
    for (std::int64_t k = 0; k < contexts[i]; ++k) {
      least = std::min(least, slots[k]);
      most = std::max(most, slots[k]);
    }
    if (least < 0) refuse(i, "has slot " + std::to_string(least) + " in its context");
    last_slot_ = std::max<std::int64_t>(last_slot_, most);
  }
  for (Row &row : rows_) row.positions = positions_.data() + row.token;
}

const Plan &Batch::plan(const Shape &shape) {
  std::lock_guard lock(plans_mutex_);
  for (const Plan &plan : plans_)
    if (plan.shape() == shape) return plan;
  return plans_.emplace_back(rows_, shape);
}

namespace {

struct Reading {
  const std::vector<Row> &rows;
  const Layer &layer;
  const Kernels &kernels;
  int bytes;
  std::atomic<int> next{0};
  std::atomic<std::uint64_t> checksum{0};
};

void read_ranges(void *data) {
  auto &reading = *static_cast<Reading *>(data);
  for (;;) {
    int range = reading.next++;
    const Row *row = nullptr;
    for (const Row &candidate : reading.rows) {
      const int ranges = (candidate.context + kDecodeKeys - 1) / kDecodeKeys;
      if (range < ranges) {
        row = &candidate;
        break;
      }
      range -= ranges;
    }
    if (!row) return;
    const int first = range * kDecodeKeys;
    reading.checksum += reading.kernels.read(reading.layer, row->slots, first,
                                             std::min(row->context, first + kDecodeKeys),
                                             reading.bytes);
  }
}

}  // namespace

std::uint64_t read_for_benchmark(const Batch &batch, const Layer &layer, const Kernels &kernels,
                                 int bytes, int threads) {
  Reading reading{batch.rows(), layer, kernels, bytes};
  parallel(threads, read_ranges, &reading);
  return reading.checksum;
}

}  // namespace sgl_ext::attention
