// Attention of a batch over a pool of K and V: partition into tasks, and their execution.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"

namespace sgl_ext::attention {

// Row of the batch: the last `queries` tokens of a sequence of `context` tokens.
struct Row {
  const std::int32_t *slots;  // [context]
  std::int64_t token;         // index of its first query in the batch
  int context;
  int queries;
  const std::int32_t *positions;  // [queries]: position of each query in the sequence
  // Length of the sequence of queries that this row is a part of, and the position after its last
  // query. These alone determine how the keys are partitioned, so that the parts of a sequence give
  // the same results as the whole sequence.
  int extent;
  int end;
};

// Parameters of the partition besides the rows.
struct Shape {
  int heads;
  int kv_heads;
  int head_dim;
  int window;  // see Layer::window

  bool operator==(const Shape &other) const {
    return heads == other.heads && kv_heads == other.kv_heads && head_dim == other.head_dim &&
           window == other.window;
  }
};

// Tasks of a batch for one shape. Key ranges begin at multiples of a size that is determined by the
// row alone, so the result of a row depends neither on the other rows nor on the number of threads.
class Plan {
 public:
  Plan(const std::vector<Row> &rows, const Shape &shape);

  // Computes one layer on up to `threads` threads.
  void run(const Layer &layer, const Kernels &kernels, int threads) const;

  const Shape &shape() const { return shape_; }

 private:
  // Tasks with the same queries and consecutive key ranges. The last one to finish merges their
  // partial states.
  struct Group {
    int tasks;
    std::size_t partials;  // offset of the first partial state, in floats
  };
  struct Item {
    Task task;
    bool decode;
    int group;
    std::size_t partial;  // offset in floats; unused if the group has one task
  };
  struct Execution;

  static void work(void *execution);

  Shape shape_;
  std::vector<Group> groups_;
  std::vector<Item> items_;
  std::size_t partial_floats_ = 0;
  double products_ = 0;  // estimated number of multiply-adds
  int decode_rows_ = 0;  // maximum number of rows of a task
  int extend_rows_ = 0;
};

// Rows of one forward, and its plans: one for every shape of its layers. Threads may share a batch.
class Batch {
 public:
  // The last queries[i] tokens of row i attend to the slots table[requests[i], :contexts[i]];
  // `table` is [height, width] with a stride of `pitch` elements between rows. If extents and ends
  // are empty, each row is a whole sequence of queries. Throws std::invalid_argument.
  Batch(const std::int32_t *table, std::int64_t height, std::int64_t width, std::int64_t pitch,
        const std::vector<std::int64_t> &requests, const std::vector<std::int64_t> &contexts,
        const std::vector<std::int64_t> &queries,
        const std::vector<std::int64_t> &extents = {},
        const std::vector<std::int64_t> &ends = {});

  // Returns the plan for a shape, which the first call creates; valid as long as the batch.
  const Plan &plan(const Shape &shape);

  const std::vector<Row> &rows() const { return rows_; }
  std::int64_t tokens() const { return tokens_; }
  // Largest slot of all rows; -1 if there are no slots.
  std::int64_t last_slot() const { return last_slot_; }

 private:
  std::vector<Row> rows_;
  std::vector<std::int32_t> positions_;  // [tokens]
  std::mutex plans_mutex_;
  std::deque<Plan> plans_;  // a deque: a plan in use keeps its address when another is added
  std::int64_t tokens_ = 0;
  std::int64_t last_slot_ = -1;
};

// Reads the first `bytes` bytes of K and of V of every slot of the rows once, in order and in
// ranges of the size of a decode task: the lower bound of any attention, for benchmarks. Returns a
// checksum.
std::uint64_t read_for_benchmark(const Batch &batch, const Layer &layer, const Kernels &kernels,
                                 int bytes, int threads);

}  // namespace sgl_ext::attention
