#include "coactivation.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "openmp.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// One clone per instruction set, chosen when the module is loaded. Not by `arch=`, which compares the
// model of the CPU: a virtual machine may hide some of its instructions.
#define SGLEXT_CLONES __attribute__((target_clones("popcnt", "default")))
#else
#define SGLEXT_CLONES
#endif

namespace sgl_ext::coactivation {
namespace {

inline std::int32_t bits_of(const std::uint64_t *row, std::size_t words) {
  std::int32_t count = 0;
  for (std::size_t i = 0; i < words; ++i) count += __builtin_popcountll(row[i]);
  return count;
}

inline std::int32_t common(const std::uint64_t *a, const std::uint64_t *b, std::size_t words) {
  std::int32_t count = 0;
  for (std::size_t i = 0; i < words; ++i) count += __builtin_popcountll(a[i] & b[i]);
  return count;
}

inline float distance(std::int32_t shared, std::int32_t a, std::int32_t b) {
  const std::int32_t either = a + b - shared;
  return either ? 1.0f - float(shared) / float(either) : 1.0f;
}

std::vector<std::int32_t> frequencies(const Activations &activations) {
  std::vector<std::int32_t> counts(activations.entries);
  for (std::size_t i = 0; i < activations.entries; ++i)
    counts[i] = bits_of(activations.bits + i * activations.words, activations.words);
  return counts;
}

SGLEXT_CLONES
void row(const Activations &activations, const std::int32_t *counts, std::size_t from,
         float *out) {
  const std::uint64_t *own = activations.bits + from * activations.words;
  for (std::size_t j = 0; j < activations.entries; ++j)
    out[j] = distance(common(own, activations.bits + j * activations.words, activations.words),
                      counts[from], counts[j]);
}

SGLEXT_CLONES
std::int32_t nearer(const Activations &activations, const std::int32_t *counts, std::size_t from,
                    float radius) {
  const std::uint64_t *own = activations.bits + from * activations.words;
  std::int32_t found = 0;
  for (std::size_t j = 0; j < activations.entries; ++j)
    found += distance(common(own, activations.bits + j * activations.words, activations.words),
                      counts[from], counts[j]) < radius;
  return found - 1;  // without the entry itself
}

SGLEXT_CLONES
float mean_distance(const Activations &activations, const std::int32_t *counts, std::size_t from,
                    const std::int32_t *members, std::size_t count) {
  const std::uint64_t *own = activations.bits + from * activations.words;
  float sum = 0.0f;
  for (std::size_t m = 0; m < count; ++m) {
    const auto other = std::size_t(members[m]);
    sum += distance(common(own, activations.bits + other * activations.words, activations.words),
                    counts[from], counts[other]);
  }
  return sum / float(count);
}

struct Job {
  const Activations &activations;
  const std::int32_t *counts;
  float radius;
  std::int32_t *out;
  std::atomic<std::size_t> next{0};
};

constexpr std::size_t piece = 64;  // entries per work item

void work(void *data) {
  Job &job = *static_cast<Job *>(data);
  const std::size_t entries = job.activations.entries;
  for (std::size_t first; (first = job.next.fetch_add(piece)) < entries;)
    for (std::size_t i = first; i < std::min(first + piece, entries); ++i)
      job.out[i] = job.counts[i] ? nearer(job.activations, job.counts, i, job.radius) : 0;
}

}  // namespace

void density(const Activations &activations, float radius, int threads, std::int32_t *out) {
  const auto counts = frequencies(activations);
  Job job{activations, counts.data(), radius, out};
  sgl_ext::parallel(activations.entries > piece ? threads : 1, work, &job);
}

void distances(const Activations &activations, std::size_t from, float *out) {
  row(activations, frequencies(activations).data(), from, out);
}

Clusters cluster(const Activations &activations, const std::int32_t *order, std::size_t count,
                 float radius) {
  const auto counts = frequencies(activations);
  std::vector<bool> taken(activations.entries, false);
  std::vector<float> far(activations.entries);
  std::vector<std::int32_t> near;
  Clusters clusters;
  clusters.starts.push_back(0);
  for (std::size_t turn = 0; turn < count; ++turn) {
    const std::int32_t medoid = order[turn];
    if (taken[std::size_t(medoid)]) continue;
    row(activations, counts.data(), std::size_t(medoid), far.data());
    near.clear();
    for (std::size_t j = 0; j < activations.entries; ++j)
      if (far[j] < radius && j != std::size_t(medoid))
        near.push_back(std::int32_t(j));
    std::sort(near.begin(), near.end(), [&far](std::int32_t a, std::int32_t b) {
      const float x = far[std::size_t(a)], y = far[std::size_t(b)];
      return x < y || (x == y && a < b);
    });
    const std::size_t begin = clusters.members.size();
    clusters.members.push_back(medoid);
    for (const std::int32_t candidate : near) {
      const std::size_t size = clusters.members.size() - begin;
      if (mean_distance(activations, counts.data(), std::size_t(candidate),
                        clusters.members.data() + begin, size) < radius)
        clusters.members.push_back(candidate);
    }
    for (std::size_t m = begin; m < clusters.members.size(); ++m)
      taken[std::size_t(clusters.members[m])] = true;
    clusters.starts.push_back(std::int64_t(clusters.members.size()));
  }
  return clusters;
}

namespace {

constexpr float gone = 3.0e38f;  // sum of an entry that is already in a block

// Adds the distance from `from` to the sum of distances of each entry of `near`.
SGLEXT_CLONES
void add_distances(const Activations &activations, const std::int32_t *counts, std::size_t from,
                   const std::vector<std::int32_t> &near, float *sums) {
  const std::uint64_t *own = activations.bits + from * activations.words;
  for (std::size_t i = 0; i < near.size(); ++i) {
    const auto j = std::size_t(near[i]);
    sums[i] += distance(common(own, activations.bits + j * activations.words, activations.words),
                        counts[from], counts[j]);
  }
}

}  // namespace

std::vector<std::int32_t> blocks(const Activations &given, std::size_t block, std::size_t window) {
  std::vector<std::int32_t> counts = frequencies(given), left(given.entries);
  std::iota(left.begin(), left.end(), 0);
  std::stable_sort(left.begin(), left.end(), [&counts](std::int32_t a, std::int32_t b) {
    return counts[std::size_t(a)] > counts[std::size_t(b)];
  });
  // The most frequently activated entries come first in memory as well, so that the entries of
  // `near` are read from front to back.
  std::vector<std::uint64_t> bits(given.entries * given.words);
  for (std::size_t i = 0; i < given.entries; ++i)
    std::copy_n(given.bits + std::size_t(left[i]) * given.words, given.words,
                bits.data() + i * given.words);
  const Activations activations{bits.data(), given.entries, given.words};
  counts = frequencies(activations);
  std::size_t taken = 0;  // number of entries that were moved to `near`
  std::vector<std::int32_t> near;
  std::vector<float> sums;
  std::vector<std::int32_t> order;
  order.reserve(activations.entries);
  while (order.size() < activations.entries) {
    // The entries that were placed are replaced by the next most frequently activated ones; `near`
    // stays sorted by activation count.
    std::size_t kept = 0;
    for (std::size_t i = 0; i < near.size(); ++i)
      if (sums[i] < gone) near[kept++] = near[i];
    near.resize(kept);
    while (near.size() < window && taken < left.size()) near.push_back(std::int32_t(taken++));
    sums.assign(near.size(), 0.0f);

    std::size_t members = 0;
    if (!order.empty()) {
      add_distances(activations, counts.data(), std::size_t(order.back()), near, sums.data());
      members = 1;
    }
    const std::size_t size = std::min(block, near.size());
    for (std::size_t place = 0; place < size; ++place) {
      // Selects the first of equal sums. The sum of an entry that shares no query with any member
      // is `members`, so that such an entry is not preferred to the first one.
      std::size_t best = 0;
      while (sums[best] >= gone) ++best;
      float lowest = float(members);
      for (std::size_t i = best; i < near.size(); ++i) {
        if (sums[i] < lowest) {
          lowest = sums[i];
          best = i;
        }
      }
      order.push_back(near[best]);
      if (place == 0) {  // from here on, distances are to this block, not to the previous one
        for (std::size_t i = 0; i < near.size(); ++i)
          if (sums[i] < gone) sums[i] = 0.0f;
        members = 0;
      }
      sums[best] = gone;
      ++members;
      if (members < size)  // else nothing is added to this block
        add_distances(activations, counts.data(), std::size_t(order.back()), near, sums.data());
    }
  }
  for (std::int32_t &entry : order) entry = left[std::size_t(entry)];
  return order;
}

}  // namespace sgl_ext::coactivation
