// Co-activation of KV entries, from one bit per entry and query, and clusters of the entries that
// are activated together (Swarm, section 5.1, Algorithm 1). The matrix of all pairs is never
// materialised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sgl_ext::coactivation {

// Queries that activate each entry: `entries` rows of `words` words, one bit per query.
struct Activations {
  const std::uint64_t *bits;
  std::size_t entries;
  std::size_t words;
};

struct Clusters {
  std::vector<std::int64_t> starts;   // start of each cluster in `members`, then the end
  std::vector<std::int32_t> members;  // the medoid, then the others, nearest first
};

// Counts for each entry the other entries that are nearer than the radius, by the Jaccard distance
// of the sets of queries that activate them. An entry that no query activates is near to none. Runs
// on up to `threads` threads.
void density(const Activations &activations, float radius, int threads, std::int32_t *out);

// Computes the distance of each entry from entry `from`.
void distances(const Activations &activations, std::size_t from, float *out);

// Builds a cluster around each entry of `order`, in this order, that is not yet in a cluster. Its
// members are nearer than the radius to the medoid, and on average to the members before them.
Clusters cluster(const Activations &activations, const std::int32_t *order, std::size_t count,
                 float radius);

// Orders all entries so that each `block` consecutive entries are activated together as far as
// possible. Each block begins with the entry nearest to the last entry of the previous block, and
// continues with the entries nearest to its members on average. If none is near, the most
// frequently activated entry is next. The candidates of a block are only the `window` most
// frequently activated of the entries that are left when it begins, which bounds the time to
// entries * window distances.
std::vector<std::int32_t> blocks(const Activations &activations, std::size_t block,
                                 std::size_t window);

}  // namespace sgl_ext::coactivation
