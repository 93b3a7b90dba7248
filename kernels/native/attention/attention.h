// Attention of a batch over a pool of K and V: the partition into tasks and their execution.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"

namespace sgl_ext::attention {

// One row of the batch: the last `queries` tokens of a sequence of `context`.
struct Row {
  const std::int32_t *slots;  // [context]
  std::int64_t token;         // index in the batch of its first query
  int context;
  int queries;
  const std::int32_t *positions;  // [queries]: of the queries in the sequence
  // Of the sequence of queries that this row is a part of: how many they are and where they end.
  // The partition of the keys follows from these, so that the parts give what the whole gives.
  int extent;
  int end;
};

// What the partition depends on besides the rows.
struct Shape {
  int heads;
  int kv_heads;
  int head_dim;
  int window;  // kUnlimited sees all

  bool operator==(const Shape &other) const {
    return heads == other.heads && kv_heads == other.kv_heads && head_dim == other.head_dim &&
           window == other.window;
  }
};

// The tasks of a batch for one shape. Key ranges begin at multiples of a size that follows from
// the row alone, so a row's result depends neither on its neighbours nor on the threads.
class Plan {
 public:
  Plan(const std::vector<Row> &rows, const Shape &shape);

  // Computes one layer on up to `threads` threads.
  void run(const Layer &layer, const Kernels &kernels, int threads) const;

  const Shape &shape() const { return shape_; }

 private:
  // Tasks with the same queries and successive keys, whose states are merged by the last of them.
  struct Group {
    int tasks;
    std::size_t partials;  // offset in floats of the first state
  };
  struct Item {
    Task task;
    bool decode;
    int group;
    std::size_t partial;  // offset in floats; unused where the group has one task
  };
  struct Execution;

  static void work(void *execution);

  Shape shape_;
  std::vector<Group> groups_;
  std::vector<Item> items_;
  std::size_t partial_floats_ = 0;
  double products_ = 0;  // multiplications and additions, an estimate
  int decode_rows_ = 0;  // most rows of a task
  int extend_rows_ = 0;
};

// The rows of one forward, and its plans: one for every shape that its layers have. Threads may
// share it.
class Batch {
 public:
  // Row i attends with its last queries[i] tokens over table[requests[i], :contexts[i]]; `table` is
  // [height, width] with `pitch` elements from row to row. Without extents and ends each row is a
  // whole of its own. Throws std::invalid_argument.
  Batch(const std::int32_t *table, std::int64_t height, std::int64_t width, std::int64_t pitch,
        const std::vector<std::int64_t> &requests, const std::vector<std::int64_t> &contexts,
        const std::vector<std::int64_t> &queries,
        const std::vector<std::int64_t> &extents = {},
        const std::vector<std::int64_t> &ends = {});

  // Made at the first call for a shape; valid as long as the batch.
  const Plan &plan(const Shape &shape);

  const std::vector<Row> &rows() const { return rows_; }
  std::int64_t tokens() const { return tokens_; }
  // Largest slot of all rows; -1 without any.
  std::int64_t last_slot() const { return last_slot_; }

 private:
  std::vector<Row> rows_;
  std::vector<std::int32_t> positions_;  // [tokens]
  std::mutex plans_mutex_;
  std::deque<Plan> plans_;  // a plan in use stays where it is when another is made
  std::int64_t tokens_ = 0;
  std::int64_t last_slot_ = -1;
};

// Reads `bytes` of K and of V of every slot of the rows once, in order and in the ranges of decode:
// what any attention must do at least, for benchmarks. Returns a checksum.
std::uint64_t read_for_benchmark(const Batch &batch, const Layer &layer, const Kernels &kernels,
                                 int bytes, int threads);

}  // namespace sgl_ext::attention
