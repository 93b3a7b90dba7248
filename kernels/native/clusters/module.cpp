// Python face of clusters, blocks and codes of KV entries. See _clusters.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "coactivation.h"
#include "checksum.h"
#include "codes.h"

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

template <std::size_t dims>
using Floats = nb::ndarray<const float, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
using CodesOf = nb::ndarray<const std::uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

auto mass_of(const CodesOf &codes, const Floats<4> &tables, const Floats<2> &beside, int threads) {
  const sgl_ext::codes::Shape shape{codes.shape(1), tables.shape(1), codes.shape(0),
                                    codes.shape(2)};
  const std::size_t queries = tables.shape(0);
  if (!shape.kv_heads || !shape.entries || !shape.subspaces || !shape.heads ||
      shape.heads % shape.kv_heads || tables.shape(2) != shape.subspaces ||
      tables.shape(3) != sgl_ext::codes::centroids || beside.shape(0) != queries ||
      beside.shape(1) != shape.heads)
    throw std::invalid_argument("codes, tables and beside are of different shapes");
  auto *out = new float[queries * shape.entries];
  nb::capsule owner(out, [](void *p) noexcept { delete[] static_cast<float *>(p); });
  {
    nb::gil_scoped_release release;
    sgl_ext::codes::mass(shape, codes.data(), queries, tables.data(), beside.data(), threads, out);
  }
  return nb::ndarray<nb::numpy, float>(out, {queries, shape.entries}, owner);
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
  m.def("mass", &mass_of, nb::arg("codes"), nb::arg("tables"), nb::arg("beside"),
        nb::arg("threads"));
}
