// Python bindings of the CPU attention. Tensors are passed as addresses and strides, which the
// caller has validated once: a tensor object would cost more than the rest of the call. See
// _attention.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <stdexcept>

#include "attention.h"
#include "openmp.h"

namespace nb = nanobind;
using namespace sgl_ext::attention;

namespace {

using Integers = std::vector<std::int64_t>;

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (int i = 0; i < isa_count; ++i)
    if (isas[i].supported()) names.push_back(isas[i].name);
  return names;
}

const Isa &isa_named(const std::string &name) {
  std::string known;
  for (int i = 0; i < isa_count; ++i) {
    if (isas[i].supported()) {
      if (name.empty() || name == isas[i].name) return isas[i];
      known += std::string(known.empty() ? "" : ", ") + isas[i].name;
    }
  }
  throw std::invalid_argument("instruction set '" + name +
                              "' is not supported on this machine; expected one of " + known);
}

const char *address(std::uintptr_t value) { return reinterpret_cast<const char *>(value); }

void check_slots(const Batch &batch, std::int64_t slots) {
  if (batch.last_slot() >= slots)
    throw std::invalid_argument("the batch has slot " + std::to_string(batch.last_slot()) +
                                "; the pool has " + std::to_string(slots) + " slots");
}

// Location of the slots from `slots` on if they are outside the pool: addresses of the K and V of
// the first of them (0 if all slots are in the pool), and stride between slots in elements.
struct Far {
  std::int64_t slots = 0;
  std::uintptr_t keys = 0;
  std::uintptr_t values = 0;
  std::int64_t stride = 0;
};

// Attention operator: the parameters that its layers share.
class Attention {
 public:
  Attention(const std::string &dtype, int heads, int kv_heads, int head_dim, double scale,
            std::optional<int> window, const std::string &isa)
      : isa_(isa_named(isa)),
        shape_{heads, kv_heads, head_dim, std::min(window.value_or(kUnlimited), kUnlimited)},
        scale_(static_cast<float>(scale)) {
    if (dtype != "bfloat16" && dtype != "float32")
      throw std::invalid_argument("dtype '" + dtype +
                                  "' is not supported; expected bfloat16 or float32");
    if (kv_heads < 1 || heads < kv_heads || heads % kv_heads)
      throw std::invalid_argument(std::to_string(heads) + " heads are not a multiple of " +
                                  std::to_string(kv_heads) + " KV heads");
    if (head_dim < 16 || head_dim % 16 || head_dim > 1024)
      throw std::invalid_argument("head_dim " + std::to_string(head_dim) +
                                  " is not supported; expected a multiple of 16 up to 1024");
    if (!std::isfinite(scale) || scale <= 0)
      throw std::invalid_argument("scale " + std::to_string(scale) +
                                  "; expected a finite number above 0");
    if (window && *window < 0)
      throw std::invalid_argument("window " + std::to_string(*window) + "; expected 0 or more");
    const bool wide = dtype == "float32";
    kernels_ = wide ? isa_.fp32 : isa_.bf16;
    element_ = wide ? 4 : 2;
  }

  void run(Batch &batch, std::uintptr_t query, std::int64_t query_stride, std::uintptr_t keys,
           std::int64_t key_stride, std::uintptr_t values, std::int64_t value_stride,
           std::int64_t slots, std::uintptr_t out, std::int64_t tokens, int threads,
           const Far &far, std::uintptr_t log_sums) const {
    check_slots(batch, slots);
    if (far.slots < 0 || far.slots > slots || far.slots >= INT32_MAX)
      throw std::invalid_argument("far_slots " + std::to_string(far.slots) + "; expected 0 to " +
                                  std::to_string(slots) + ", the slots of the pool");
    if (batch.tokens() > tokens)
      throw std::invalid_argument("the batch has " + std::to_string(batch.tokens()) +
                                  " queries; " + std::to_string(tokens) + " were given");
    const Layer layer{address(query),
                      pool(keys, key_stride, far.keys, far),
                      pool(values, value_stride, far.values, far),
                      reinterpret_cast<char *>(out),
                      query_stride * element_,
                      std::ptrdiff_t(shape_.heads) * shape_.head_dim * element_,
                      shape_.heads,
                      shape_.kv_heads,
                      shape_.head_dim,
                      scale_,
                      shape_.window,
                      reinterpret_cast<float *>(log_sums)};
    batch.plan(shape_).run(layer, *kernels_, threads);
  }

  const char *isa() const { return isa_.name; }

 private:
  Pool pool(std::uintptr_t near, std::int64_t near_stride, std::uintptr_t there,
            const Far &far) const {
    Pool pool{address(near), near_stride * element_};
    if (there) {
      pool.far_stride = far.stride * element_;
      pool.far = address(there - far.slots * pool.far_stride);
      pool.boundary = static_cast<std::int32_t>(far.slots);
    }
    return pool;
  }

  const Isa &isa_;
  Shape shape_;
  float scale_;
  const Kernels *kernels_;
  int element_;
};

std::uint64_t read_kv(const Batch &batch, std::uintptr_t keys, std::int64_t key_stride,
                   std::uintptr_t values, std::int64_t value_stride, std::int64_t slots,
                   int row_bytes, int threads) {
  check_slots(batch, slots);
  Layer layer{};
  layer.keys = {address(keys), key_stride};
  layer.values = {address(values), value_stride};
  return read_for_benchmark(batch, layer, *isa_named("").fp32, row_bytes, threads);
}

}  // namespace

NB_MODULE(_attention, m) {
  m.doc() = "CPU attention in place over a KV pool.";
  m.def("isas", available);
  m.def("openmp_library", sgl_ext::openmp_library);
  m.def("read_for_benchmark", read_kv, nb::arg("batch"), nb::arg("keys"), nb::arg("key_stride"),
        nb::arg("values"), nb::arg("value_stride"), nb::arg("slots"), nb::arg("row_bytes"),
        nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Batch>(m, "Batch")
      .def(
          "__init__",
          [](Batch *self, std::uintptr_t table, std::int64_t height, std::int64_t width,
             std::int64_t pitch, const Integers &requests, const Integers &contexts,
             const Integers &queries, const Integers &extents, const Integers &ends) {
            new (self) Batch(reinterpret_cast<const std::int32_t *>(table), height, width, pitch,
                             requests, contexts, queries, extents, ends);
          },
          nb::arg("table"), nb::arg("height"), nb::arg("width"), nb::arg("pitch"),
          nb::arg("requests"), nb::arg("contexts"), nb::arg("queries"),
          nb::arg("extents") = Integers{}, nb::arg("ends") = Integers{})
      .def_prop_ro("tokens", &Batch::tokens)
      .def_prop_ro("last_slot", &Batch::last_slot);
  nb::class_<Attention>(m, "Attention")
      .def(nb::init<const std::string &, int, int, int, double, std::optional<int>,
                    const std::string &>(),
           nb::arg("dtype"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("scale"), nb::arg("window").none() = nb::none(), nb::arg("isa") = "")
      .def(
          "__call__",
          [](const Attention &self, Batch &batch, std::uintptr_t query, std::int64_t query_stride,
             std::uintptr_t keys, std::int64_t key_stride, std::uintptr_t values,
             std::int64_t value_stride, std::int64_t slots, std::uintptr_t out,
             std::int64_t tokens, int threads, std::int64_t far_slots, std::uintptr_t far_keys,
             std::uintptr_t far_values, std::int64_t far_stride, std::uintptr_t log_sums) {
            self.run(batch, query, query_stride, keys, key_stride, values, value_stride, slots,
                     out, tokens, threads, {far_slots, far_keys, far_values, far_stride},
                     log_sums);
          },
          nb::arg("batch"), nb::arg("query"), nb::arg("query_stride"), nb::arg("keys"),
          nb::arg("key_stride"), nb::arg("values"), nb::arg("value_stride"), nb::arg("slots"),
          nb::arg("out"), nb::arg("tokens"), nb::arg("threads"), nb::arg("far_slots") = 0,
          nb::arg("far_keys") = 0, nb::arg("far_values") = 0, nb::arg("far_stride") = 0, nb::arg("log_sums") = 0,
          nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("isa", &Attention::isa);
}
