// Python face of clusters, blocks and codes of KV entries. See _clusters.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "best_blocks.h"
#include "coactivation.h"
#include "checksum.h"
#include "codes.h"
#include "log_sum.h"

namespace nb = nanobind;
using namespace sgl_ext::coactivation;

namespace {

using Bits = nb::ndarray<const std::uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
nb::ndarray<nb::numpy, T> array(std::vector<T> &&values) {
  auto *kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void *p) noexcept { delete static_cast<std::vector<T> *>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), {kept->size()}, owner);
}

Activations of(const Bits &bits) { return {bits.data(), bits.shape(0), bits.shape(1)}; }

auto density_of(const Bits &bits, float radius, int threads) {
  std::vector<std::int32_t> out(bits.shape(0));
  {
    nb::gil_scoped_release release;
    density(of(bits), radius, threads, out.data());
  }
  return array(std::move(out));
}

auto distances_from(const Bits &bits, std::size_t entry) {
  if (entry >= bits.shape(0))
    throw std::invalid_argument("entry " + std::to_string(entry) + " of " +
                                std::to_string(bits.shape(0)));
  std::vector<float> out(bits.shape(0));
  {
    nb::gil_scoped_release release;
    distances(of(bits), entry, out.data());
  }
  return array(std::move(out));
}

auto clusters_of(const Bits &bits, const Order &order, float radius, std::size_t most,
                 std::size_t copies, bool pairwise) {
  if (!most || !copies) throw std::invalid_argument("a cluster has a member, which is in one");
  for (std::size_t i = 0; i < order.shape(0); ++i)
    if (order.data()[i] < 0 || std::size_t(order.data()[i]) >= bits.shape(0))
      throw std::invalid_argument("entry " + std::to_string(order.data()[i]) + " of " +
                                  std::to_string(bits.shape(0)));
  Clusters found;
  {
    nb::gil_scoped_release release;
    found = cluster(of(bits), order.data(), order.shape(0), {radius, most, copies, pairwise});
  }
  return std::make_pair(array(std::move(found.starts)), array(std::move(found.members)));
}

auto blocks_of(const Bits &bits, std::size_t block, std::size_t window) {
  if (!block || window < block)
    throw std::invalid_argument("a block has an entry, and is looked for among as many at least");
  std::vector<std::int32_t> order;
  {
    nb::gil_scoped_release release;
    order = blocks(of(bits), block, window);
  }
  return array(std::move(order));
}

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

auto checksums_of(const Bytes &rows) {
  std::vector<std::uint64_t> out(rows.shape(0));
  {
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = sgl_ext::checksum(rows.data() + i * rows.shape(1), rows.shape(1));
  }
  return array(std::move(out));
}

template <class T, int dims>
using Of = nb::ndarray<const T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

auto mass_of(const Of<std::uint8_t, 3> &codes, const Of<std::uint16_t, 3> &centroids,
             const Of<float, 3> &projection, const Of<float, 2> &mean,
             const Of<float, 3> &queries, float scale, const Of<float, 2> &beside, int threads) {
  const std::size_t count = queries.shape(0), heads = queries.shape(1), dim = queries.shape(2);
  const sgl_ext::codes::Shape shape{codes.shape(1), heads, codes.shape(0), codes.shape(2), dim};
  const std::size_t kv_heads = shape.kv_heads;
  if (!kv_heads || !shape.entries || !shape.subspaces || !heads || !dim || heads % kv_heads ||
      dim % shape.subspaces || centroids.shape(0) != kv_heads || centroids.shape(1) != dim ||
      centroids.shape(2) != sgl_ext::codes::centroids || projection.shape(0) != kv_heads ||
      projection.shape(1) != dim || projection.shape(2) != dim || mean.shape(0) != kv_heads ||
      mean.shape(1) != dim || beside.shape(0) != count || beside.shape(1) != heads)
    throw std::invalid_argument("codes, centroids and queries are of different shapes");
  const sgl_ext::codes::Keys keys{codes.data(), centroids.data(), projection.data(), mean.data()};
  auto *out = new float[count * shape.entries];
  nb::capsule owner(out, [](void *p) noexcept { delete[] static_cast<float *>(p); });
  {
    nb::gil_scoped_release release;
    sgl_ext::codes::mass(shape, keys, count, queries.data(), scale, beside.data(), threads, out);
  }
  return nb::ndarray<nb::numpy, float>(out, {count, shape.entries}, owner);
}

auto best_blocks_of(const Of<float, 2> &scores, std::size_t block, std::size_t devices,
                    std::size_t each) {
  if (!block || !devices || !each)
    throw std::invalid_argument("a block has an entry, and a device gives a block");
  const std::size_t rows = scores.shape(0);
  const sgl_ext::Dealt dealt{scores.shape(1), block, devices, each};
  const std::size_t chosen = dealt.chosen();
  auto *out = new std::int64_t[rows * chosen];
  nb::capsule owner(out, [](void *p) noexcept { delete[] static_cast<std::int64_t *>(p); });
  {
    nb::gil_scoped_release release;
    sgl_ext::best_blocks(dealt, scores.data(), rows, out);
  }
  return nb::ndarray<nb::numpy, std::int64_t>(out, {rows, chosen}, owner);
}

auto log_sum_of(const Of<float, 3> &queries, float scale, std::uintptr_t near,
                std::size_t near_stride, std::size_t count, std::uintptr_t own,
                std::size_t own_stride, const Of<std::int64_t, 1> &slots,
                const Of<std::int64_t, 1> &lengths, std::size_t kv_heads, bool bfloat16,
                int threads) {
  const std::size_t rows = queries.shape(0), heads = queries.shape(1), dim = queries.shape(2);
  if (!kv_heads || heads % kv_heads || dim % 16 || lengths.shape(0) != rows)
    throw std::invalid_argument("queries, heads and lengths do not fit each other");
  for (std::size_t row = 0; row < rows; ++row)
    if (lengths.data()[row] < 0 || std::size_t(lengths.data()[row]) > slots.shape(0))
      throw std::invalid_argument("a row sees more slots than there are");
  auto *out = new float[rows * heads];
  nb::capsule owner(out, [](void *p) noexcept { delete[] static_cast<float *>(p); });
  {
    nb::gil_scoped_release release;
    sgl_ext::log_sum({heads, kv_heads, dim, bfloat16, scale}, queries.data(), rows,
                     {reinterpret_cast<const void *>(near), near_stride}, count,
                     {reinterpret_cast<const void *>(own), own_stride}, slots.data(),
                     lengths.data(), threads, out);
  }
  return nb::ndarray<nb::numpy, float>(out, {rows, heads}, owner);
}

}  // namespace

NB_MODULE(_clusters, m) {
  m.doc() = "Clusters and blocks of KV entries that are activated together, and codes of keys.";
  m.def("density", &density_of, nb::arg("bits"), nb::arg("radius"), nb::arg("threads"));
  m.def("distances", &distances_from, nb::arg("bits"), nb::arg("entry"));
  m.def("cluster", &clusters_of, nb::arg("bits"), nb::arg("order"), nb::arg("radius"),
        nb::arg("most"), nb::arg("copies"), nb::arg("pairwise"));
  m.def("blocks", &blocks_of, nb::arg("bits"), nb::arg("block"), nb::arg("window"));
  m.def("checksums", &checksums_of, nb::arg("rows"));
  m.def("mass", &mass_of, nb::arg("codes"), nb::arg("centroids"), nb::arg("projection"),
        nb::arg("mean"), nb::arg("queries"), nb::arg("scale"), nb::arg("beside"),
        nb::arg("threads"));
  m.def("best_blocks", &best_blocks_of, nb::arg("scores"), nb::arg("block"), nb::arg("devices"),
        nb::arg("each"));
  m.def("log_sum", &log_sum_of, nb::arg("queries"), nb::arg("scale"), nb::arg("near"),
        nb::arg("near_stride"), nb::arg("count"), nb::arg("own"), nb::arg("own_stride"),
        nb::arg("slots"), nb::arg("lengths"), nb::arg("kv_heads"), nb::arg("bfloat16"),
        nb::arg("threads"));
}
