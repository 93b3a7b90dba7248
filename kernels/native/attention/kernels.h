// What a translation unit of one instruction set offers, and the plain data it works on.
//
// A task is a range of keys for some queries of one row of the batch. Its result is either final
// (written to `out`) or a partial softmax that `merge` joins with those of the row's other ranges
// (flash-decoding). A task's arithmetic depends on nothing outside it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_ext::attention {

constexpr int kUnlimited = 1 << 30;  // as a window; past every context

// Keys or values of one layer. Slots from `boundary` on lie elsewhere than those before it: `far` is
// where the first slot of all would lie. Strides are in bytes.
struct Pool {
  const char *near;
  std::ptrdiff_t near_stride;
  const char *far = nullptr;
  std::ptrdiff_t far_stride = 0;
  std::int32_t boundary = INT32_MAX;
};

// One attention layer of one forward. Strides are in bytes; a token's heads, and a slot's, are
// contiguous.
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
  int window;  // a query sees this many keys before its own; kUnlimited sees all
};

struct Task {
  const std::int32_t *slots;      // of the row's tokens, in sequence order
  std::int64_t token;             // index in the batch of the first query
  const std::int32_t *positions;  // of the queries in the sequence, ascending
  int queries;
  int head;   // first query head
  int heads;  // of one KV head (extend) or of several whole groups (decode)
  int first_key;
  int last_key;  // past the end
};

// Kernels of one element type. None allocates, throws or touches anything shared.
struct Kernels {
  // One query. `partial` null writes the final result; otherwise a partial state goes there, for
  // `rows = queries * heads` (query-major): floats max[rows] (the largest logit, scaled),
  // sum[rows] (of the weights relative to it) and acc[rows, head_dim] (the weighted values).
  void (*decode)(const Layer &, const Task &, float *partial, char *scratch);
  // Many queries of one KV head.
  void (*extend)(const Layer &, const Task &, float *partial, char *scratch);
  // Joins `count` consecutive partial states and writes the final result of their rows.
  void (*merge)(const Layer &, const Task &, const float *partials, int count, char *scratch);
  // Bytes of scratch, 64-byte aligned, that tasks of up to so many rows need.
  std::size_t (*scratch)(const Layer &, int decode_rows, int extend_rows);
  // Reads `bytes` of K and of V of the slots [first, last): a benchmark's limit. Gives a checksum.
  std::uint64_t (*read)(const Layer &, const std::int32_t *slots, int first, int last, int bytes);
};

struct Isa {
  const char *name;
  bool (*supported)();
  const Kernels *bf16;
  const Kernels *fp32;
};

// Best first; ends with "portable", which every machine supports.
extern const Isa isas[];
extern const int isa_count;

extern const Kernels portable_bf16, portable_fp32;
#if defined(__x86_64__)
extern const Kernels avx2_bf16, avx2_fp32;
extern const Kernels avx512_bf16, avx512_fp32;
extern const Kernels avx512_dot_bf16;
#endif

}  // namespace sgl_ext::attention
