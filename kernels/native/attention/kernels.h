// Interface of the kernels, implemented by one translation unit per instruction set, and the plain
// data that they work on.
//
// A task is a range of keys for some queries of one sequence. Its result is either final (written
// to `out`) or a partial softmax state, which `merge` combines with those of the other key ranges
// of the same queries (flash-decoding). The arithmetic of a task depends on nothing outside the
// task.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_ext::attention {

constexpr int kUnlimited = 1 << 30;  // value of a window without a limit; exceeds every context

// Keys or values of one layer. Slots from `boundary` on are in a different memory region than those
// before it; `far` is the address that slot 0 would have in that region. Strides are in bytes.
struct Pool {
  const char *near;
  std::ptrdiff_t near_stride;
  const char *far = nullptr;
  std::ptrdiff_t far_stride = 0;
  std::int32_t boundary = INT32_MAX;
};

// Attention layer of one forward. Strides are in bytes; the heads of a token, and those of a slot,
// are contiguous.
struct Layer {
  const char *query;
  Pool keys;
  Pool values;
  char *out;
  std::ptrdiff_t query_stride;  // per token of the batch
  std::ptrdiff_t out_stride;
  int heads;
  int kv_heads;
  int head_dim;  // of keys and values; a multiple of 16
  float scale;
  int window;  // keys before its own that a query sees; kUnlimited: all of them
  // Log-sum-exp of the scaled logits of each query, [tokens, heads]; null if it is not wanted.
  float *log_sums = nullptr;
};

struct Task {
  const std::int32_t *slots;      // slots of the tokens, in sequence order
  std::int64_t token;             // index of the first query in the batch
  const std::int32_t *positions;  // positions of the queries in the sequence, ascending
  int queries;
  int head;   // first query head
  int heads;  // all heads of one KV head (extend) or of several KV heads (decode)
  int first_key;
  int last_key;  // exclusive
};

// Kernels of one element type. None of them allocates, throws or modifies shared state.
struct Kernels {
  // Computes a task of one query. Writes the final result if `partial` is null, otherwise a partial
  // state of `rows = queries * heads` (query-major) to `partial`. The state consists of floats:
  // max[rows] (the largest scaled logit), sum[rows] (sum of the weights relative to it) and
  // acc[rows, head_dim] (sum of the weighted values).
  void (*decode)(const Layer &, const Task &, float *partial, char *scratch);
  // Computes a task of many queries of one KV head; `partial` as for decode.
  void (*extend)(const Layer &, const Task &, float *partial, char *scratch);
  // Combines `count` consecutive partial states and writes the final result of their rows.
  void (*merge)(const Layer &, const Task &, const float *partials, int count, char *scratch);
  // Returns the bytes of 64-byte aligned scratch memory for tasks of up to this many rows.
  std::size_t (*scratch)(const Layer &, int decode_rows, int extend_rows);
  // Reads the first `bytes` bytes of K and of V of the slots [first, last), as the lower bound of a
  // benchmark. Returns a checksum.
  std::uint64_t (*read)(const Layer &, const std::int32_t *slots, int first, int last, int bytes);
};

struct Isa {
  const char *name;
  bool (*supported)();
  const Kernels *bf16;
  const Kernels *fp32;
};

// Ordered from best to worst; the last is "portable", which every machine supports.
extern const Isa isas[];
extern const int isa_count;

extern const Kernels portable_bf16, portable_fp32;
#if defined(__x86_64__)
extern const Kernels avx2_bf16, avx2_fp32;
extern const Kernels avx512_bf16, avx512_fp32;
extern const Kernels avx512_dot_bf16;
extern const Kernels amx_bf16;
#endif

}  // namespace sgl_ext::attention
