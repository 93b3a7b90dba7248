// Which KV entries are activated together, from one bit for each entry and query, and clusters of
// those that are (Swarm, section 5.1, Algorithm 1). No matrix of all pairs is ever made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sgl_ext::coactivation {

// The queries that activate each entry: `words` words of bits for each of `entries` rows.
struct Activations {
  const std::uint64_t *bits;
  std::size_t entries;
  std::size_t words;
};

struct Rules {
  float radius;         // members are nearer than this
  std::size_t most;     // members of a cluster, with its medoid
  std::size_t copies;   // clusters that an entry is in
  bool pairwise;        // nearer than the radius to the members on average, not to the medoid only
};

struct Clusters {
  std::vector<std::int64_t> starts;   // of each cluster in `members`, and the end
  std::vector<std::int32_t> members;  // the medoid first, then from the nearest on
};

// Of each entry, how many others are nearer than the radius, by the Jaccard distance of the queries
// that activate them; an entry that no query activates is near to none. `threads` share the work.
void density(const Activations &activations, float radius, int threads, std::int32_t *out);

// One distance for each entry, from entry `from`.
void distances(const Activations &activations, std::size_t from, float *out);

// Clusters around the entries of `order` that are in none when their turn comes.
Clusters cluster(const Activations &activations, const std::int32_t *order, std::size_t count,
                 const Rules &rules);

// All entries once, so that `block` of them that follow each other are activated together as far as
// can be: each block begins with the entry nearest to the last of the one before, and takes those
// nearest to its members on average. Where none is near, what is activated most often comes next.
// Of what is left when a block begins only the `window` entries that are activated most often are
// looked at, which bounds the time to entries * window.
std::vector<std::int32_t> blocks(const Activations &activations, std::size_t block,
                                 std::size_t window);

}  // namespace sgl_ext::coactivation
