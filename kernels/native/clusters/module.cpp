// Python bindings of clusters, blocks and codes of KV entries. See _clusters.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "best_blocks.h"
#include "coactivation.h"
#include "checksum.h"
#include "codes.h"
#include "hot_blocks.h"
#include "log_sum.h"
#include "nearest.h"

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
    throw std::invalid_argument("entry " + std::to_string(entry) + " is not one of " +
                                std::to_string(bits.shape(0)) + " entries");
  std::vector<float> out(bits.shape(0));
  {
    nb::gil_scoped_release release;
    distances(of(bits), entry, out.data());
  }
  return array(std::move(out));
}

auto clusters_of(const Bits &bits, const Order &order, float radius) {
  for (std::size_t i = 0; i < order.shape(0); ++i)
    if (order.data()[i] < 0 || std::size_t(order.data()[i]) >= bits.shape(0))
      throw std::invalid_argument("entry " + std::to_string(order.data()[i]) +
                                  " is not one of " + std::to_string(bits.shape(0)) + " entries");
  Clusters found;
  {
    nb::gil_scoped_release release;
    found = cluster(of(bits), order.data(), order.shape(0), radius);
  }
  return std::make_pair(array(std::move(found.starts)), array(std::move(found.members)));
}

auto blocks_of(const Bits &bits, std::size_t block, std::size_t window) {
  if (!block || window < block)
    throw std::invalid_argument("block must be at least 1, and window at least block");
  std::vector<std::int32_t> order;
  {
    nb::gil_scoped_release release;
    order = blocks(of(bits), block, window);
  }
  return array(std::move(order));
}

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T, int dims>
using Of = nb::ndarray<const T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

auto checksums_of(const Bytes &rows, const std::optional<Of<std::int64_t, 1>> &only) {
  std::vector<std::uint64_t> out(only ? only->shape(0) : rows.shape(0));
  const auto count = static_cast<std::int64_t>(rows.shape(0));
  for (std::size_t i = 0; only && i < out.size(); ++i)
    if (only->data()[i] < 0 || only->data()[i] >= count)
      throw std::invalid_argument("there is no row " + std::to_string(only->data()[i]));
  {
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::size_t row = only ? static_cast<std::size_t>(only->data()[i]) : i;
      out[i] = sgl_ext::checksum(rows.data() + row * rows.shape(1), rows.shape(1));
    }
  }
  return array(std::move(out));
}

using Floats = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using Numbers = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<2>>;

// Returns an uninitialised NumPy array [rows, columns].
template <class Array>
Array empty(std::size_t rows, std::size_t columns) {
  using T = typename Array::Scalar;
  auto *values = new T[rows * columns];
  nb::capsule owner(values, [](void *p) noexcept { delete[] static_cast<T *>(p); });
  return Array(values, {rows, columns}, owner);
}

using Slots = Of<std::int64_t, 1>;

auto nearest_of(const Of<float, 3> &points, const Of<float, 3> &centroids) {
  const std::size_t subspaces = points.shape(0), count = points.shape(1), width = points.shape(2);
  const std::size_t size = centroids.shape(1);
  if (centroids.shape(0) != subspaces || centroids.shape(2) != width || !size)
    throw std::invalid_argument("the shapes of points and centroids do not match");
  auto out = empty<Numbers>(subspaces, count);
  nb::gil_scoped_release release;
  for (std::size_t s = 0; s < subspaces; ++s)
    sgl_ext::nearest(points.data() + s * count * width, count, centroids.data() + s * size * width,
                     size, width, out.data() + s * count);
  return out;
}

// Codes of the keys of one layer; keeps the Python arrays alive.
struct Codes {
  Of<std::uint8_t, 3> codes;
  Of<std::uint16_t, 3> centroids;
  Of<float, 3> projection;
  Of<float, 2> mean;

  sgl_ext::codes::Keys keys() const {
    return {codes.data(), centroids.data(), projection.data(), mean.data()};
  }

  // Raises ValueError if the shapes of the arrays and the queries do not match.
  sgl_ext::codes::Shape shape(const Of<float, 3> &queries) const {
    const std::size_t heads = queries.shape(1), dim = queries.shape(2);
    const sgl_ext::codes::Shape found{codes.shape(1), heads, codes.shape(0), codes.shape(2), dim};
    const std::size_t kv_heads = found.kv_heads;
    if (!kv_heads || !found.entries || !found.subspaces || !heads || !dim || heads % kv_heads ||
        dim % found.subspaces || centroids.shape(0) != kv_heads || centroids.shape(1) != dim ||
        centroids.shape(2) != sgl_ext::codes::centroids || projection.shape(0) != kv_heads ||
        projection.shape(1) != dim || projection.shape(2) != dim || mean.shape(0) != kv_heads ||
        mean.shape(1) != dim)
      throw std::invalid_argument("the shapes of codes, centroids and queries do not match");
    return found;
  }
};

// Keys without codes that the rows see, by address and stride in elements.
struct Visible {
  std::uintptr_t near;
  std::size_t near_stride;
  std::size_t count;
  std::uintptr_t own;
  std::size_t own_stride;
  bool bfloat16;
  Slots slots, starts, lengths;
  std::optional<Of<float, 2>> sums;
};

struct Deal {
  std::size_t block, devices, each;

  sgl_ext::Dealt of(std::size_t entries) const {
    if (!block || !devices || !each)
      throw std::invalid_argument("block, devices and each must be at least 1");
    return {entries, block, devices, each};
  }
};

auto mass_of(const Codes &codes, const Of<float, 3> &queries, float scale,
             const Of<float, 2> &beside, int threads) {
  const auto shape = codes.shape(queries);
  const auto keys = codes.keys();
  const std::size_t count = queries.shape(0);
  if (beside.shape(0) != count || beside.shape(1) != shape.heads)
    throw std::invalid_argument("the shapes of codes, centroids and queries do not match");
  auto out = empty<Floats>(count, shape.entries);
  nb::gil_scoped_release release;
  sgl_ext::codes::mass(shape, keys, count, queries.data(), scale, beside.data(), threads,
                       out.data());
  return out;
}

// Raises ValueError if there is not one range of slots per row, or a range exceeds `slots`.
void require_seen(const Slots &slots, const Slots &starts, const Slots &lengths,
                  std::size_t rows) {
  if (starts.shape(0) != rows || lengths.shape(0) != rows)
    throw std::invalid_argument("expected one start and one length per row");
  const std::int64_t all = std::int64_t(slots.shape(0));
  for (std::size_t row = 0; row < rows; ++row)
    if (starts.data()[row] < 0 || lengths.data()[row] < 0 ||
        starts.data()[row] > all - lengths.data()[row])
      throw std::invalid_argument("a row references slots that do not exist");
}

auto choose(const Codes &codes, const Of<float, 3> &queries, float scale, const Visible &visible,
            const Deal &deal, int threads) {
  const auto shape = codes.shape(queries);
  const auto keys = codes.keys();
  const std::size_t rows = queries.shape(0);
  if (shape.head_dim % 16) throw std::invalid_argument("head_dim must be a multiple of 16");
  const sgl_ext::Dealt dealt = deal.of(shape.entries);
  require_seen(visible.slots, visible.starts, visible.lengths, rows);
  const sgl_ext::Seen seen{shape.head_dim, visible.bfloat16,
                           {reinterpret_cast<const void *>(visible.near), visible.near_stride},
                           visible.count,
                           {reinterpret_cast<const void *>(visible.own), visible.own_stride},
                           visible.slots.data(), visible.starts.data(), visible.lengths.data()};
  if (visible.sums && (visible.sums->shape(0) != rows || visible.sums->shape(1) != shape.heads))
    throw std::invalid_argument("expected one log-sum-exp per row and head");
  const float *sums = visible.sums ? visible.sums->data() : nullptr;
  auto out = empty<Numbers>(rows, dealt.chosen());
  nb::gil_scoped_release release;
  const std::unique_ptr<float[]> scores(new float[rows * dealt.entries]);
  sgl_ext::codes::mass(shape, keys, rows, queries.data(), scale, seen, sums, threads,
                       scores.get());
  sgl_ext::best_blocks(dealt, scores.get(), rows, out.data());
  return out;
}

template <class T>
using Kept = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

auto step_of(const Kept<double> &frequency, const Kept<std::int64_t> &place,
             const Kept<std::int64_t> &held, double decay, const Slots &activated,
             const Slots &there) {
  const sgl_ext::Hot hot{frequency.data(), place.data(), frequency.shape(0), held.data(),
                         held.shape(0)};
  if (place.shape(0) != hot.blocks || hot.capacity > hot.blocks)
    throw std::invalid_argument("frequency, place and held do not match in length");
  for (const Slots &numbers : {activated, there})
    for (std::size_t i = 0; i < numbers.shape(0); ++i)
      if (numbers.data()[i] < 0 || std::size_t(numbers.data()[i]) >= hot.blocks)
        throw std::invalid_argument("block " + std::to_string(numbers.data()[i]) +
                                    " is not one of " + std::to_string(hot.blocks) + " blocks");
  return array(sgl_ext::step(hot, decay, activated.data(), activated.shape(0), there.data(),
                             there.shape(0)));
}

auto table_of(const Of<std::int64_t, 2> &first, std::size_t block, std::int32_t pool,
              std::int32_t near, std::size_t sinks, std::size_t window,
              std::optional<Slots> text, const Slots &slots, const Slots &starts,
              const Slots &lengths) {
  const std::size_t rows = first.shape(0), blocks = first.shape(1), middle = blocks * block;
  require_seen(slots, starts, lengths, rows);
  if (text && text->shape(0) != middle)
    throw std::invalid_argument("text must have one valid index per entry that a row is given");
  for (std::size_t i = 0; text && i < middle; ++i)
    if (text->data()[i] < 0 || std::size_t(text->data()[i]) >= middle)
      throw std::invalid_argument("text must have one valid index per entry that a row is given");
  const std::size_t begin = sinks + middle + window;
  const auto *longest = std::max_element(lengths.data(), lengths.data() + rows);
  const std::size_t width = begin + (rows ? std::size_t(*longest) : 0);
  auto out = empty<nb::ndarray<nb::numpy, std::int32_t, nb::ndim<2>>>(rows, width);
  for (std::size_t row = 0; row < rows; ++row) {
    const std::int64_t *from = first.data() + row * blocks;
    std::int32_t *at = out.data() + row * width, *const end = at + width;
    for (std::size_t i = 0; i < sinks; ++i) *at++ = near + std::int32_t(i);
    if (text)
      for (std::size_t i = 0; i < middle; ++i) {
        const std::size_t place = std::size_t(text->data()[i]);
        *at++ = pool + std::int32_t(from[place / block] + std::int64_t(place % block));
      }
    else
      for (std::size_t b = 0; b < blocks; ++b)
        for (std::size_t e = 0; e < block; ++e) *at++ = pool + std::int32_t(from[b] + std::int64_t(e));
    for (std::size_t i = sinks; i < sinks + window; ++i) *at++ = near + std::int32_t(i);
    const std::int64_t *own = slots.data() + starts.data()[row];
    for (std::int64_t i = 0; i < lengths.data()[row]; ++i) *at++ = std::int32_t(own[i]);
    std::fill(at, end, 0);  // padding after the slots that the row sees
  }
  return out;
}

auto best_blocks_of(const Of<float, 2> &scores, const Deal &deal) {
  const std::size_t rows = scores.shape(0);
  const sgl_ext::Dealt dealt = deal.of(scores.shape(1));
  auto out = empty<Numbers>(rows, dealt.chosen());
  nb::gil_scoped_release release;
  sgl_ext::best_blocks(dealt, scores.data(), rows, out.data());
  return out;
}

}  // namespace

NB_MODULE(_clusters, m) {
  // Python keeps the codes of open contexts until the process ends.
  nb::set_leak_warnings(false);
  m.doc() = "Clusters and blocks of KV entries that are activated together, and codes of keys.";
  m.def("density", &density_of, nb::arg("bits"), nb::arg("radius"), nb::arg("threads"));
  m.def("distances", &distances_from, nb::arg("bits"), nb::arg("entry"));
  m.def("cluster", &clusters_of, nb::arg("bits"), nb::arg("order"), nb::arg("radius"));
  m.def("blocks", &blocks_of, nb::arg("bits"), nb::arg("block"), nb::arg("window"));
  m.def("checksums", &checksums_of, nb::arg("rows"), nb::arg("only").none() = nb::none());
  m.def("nearest", &nearest_of, nb::arg("points"), nb::arg("centroids"));
  nb::class_<Codes>(m, "Codes")
      .def(nb::init<Of<std::uint8_t, 3>, Of<std::uint16_t, 3>, Of<float, 3>, Of<float, 2>>(),
           nb::arg("codes"), nb::arg("centroids"), nb::arg("projection"), nb::arg("mean"));
  nb::class_<Visible>(m, "Visible")
      .def(nb::init<std::uintptr_t, std::size_t, std::size_t, std::uintptr_t, std::size_t, bool,
                    Slots, Slots, Slots, std::optional<Of<float, 2>>>(),
           nb::arg("near"), nb::arg("near_stride"), nb::arg("count"), nb::arg("own"),
           nb::arg("own_stride"), nb::arg("bfloat16"), nb::arg("slots"), nb::arg("starts"),
           nb::arg("lengths"), nb::arg("sums").none() = nb::none());
  nb::class_<Deal>(m, "Deal")
      .def(nb::init<std::size_t, std::size_t, std::size_t>(), nb::arg("block"),
           nb::arg("devices"), nb::arg("each"));
  m.def("mass", &mass_of, nb::arg("codes"), nb::arg("queries"), nb::arg("scale"),
        nb::arg("beside"), nb::arg("threads"));
  m.def("best_blocks", &best_blocks_of, nb::arg("scores"), nb::arg("deal"));
  m.def("choose", &choose, nb::arg("codes"), nb::arg("queries"), nb::arg("scale"),
        nb::arg("visible"), nb::arg("deal"), nb::arg("threads"));
  m.def("step", &step_of, nb::arg("frequency"), nb::arg("place"), nb::arg("held"),
        nb::arg("decay"), nb::arg("activated"), nb::arg("there"));
  m.def("table", &table_of, nb::arg("first"), nb::arg("block"), nb::arg("pool"), nb::arg("near"),
        nb::arg("sinks"), nb::arg("window"), nb::arg("text").none(), nb::arg("slots"),
        nb::arg("starts"), nb::arg("lengths"));
}
