// Python bindings of the KV copy with key rotation. See _rotation.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "openmp.h"
#include "rotation.h"

namespace nb = nanobind;
using namespace sgl_ext::rotation;

namespace {

constexpr std::int64_t columns = 5;
// Tokens per work item. A token has tens of KiB, so that copying an item takes much longer than
// claiming it.
constexpr std::int64_t piece = 16;

struct Job {
  const std::vector<Run> &runs;
  std::int64_t tokens;
  const Shape &shape;
  Element element;
  const float *cosines;
  const float *sines;
  std::atomic<std::int64_t> next{0};
};

void work(void *data) {
  Job &job = *static_cast<Job *>(data);
  for (std::int64_t first; (first = job.next.fetch_add(piece)) < job.tokens;) {
    copy(job.runs.data(), job.runs.size(), first, std::min(first + piece, job.tokens), job.shape,
         job.element, job.cosines, job.sines);
  }
}

class Rotation {
 public:
  Rotation(const std::string &dtype, int layers, int heads, int head_dim, int rotary_dim,
           bool interleaved)
      : shape_{layers, heads, head_dim, rotary_dim, interleaved} {
    if (dtype != "bfloat16" && dtype != "float32")
      throw std::invalid_argument("dtype '" + dtype +
                                  "' is not supported; expected bfloat16 or float32");
    if (layers < 1 || heads < 1 || head_dim < 1)
      throw std::invalid_argument("layers, heads and head_dim must be at least 1");
    if (rotary_dim < 2 || rotary_dim % 2 || rotary_dim > head_dim)
      throw std::invalid_argument("rotary_dim " + std::to_string(rotary_dim) +
                                  " is not an even number from 2 to head_dim " +
                                  std::to_string(head_dim));
    element_ = dtype == "bfloat16" ? Element::bf16 : Element::fp32;
    token_bytes_ = std::int64_t(shape_.elements()) * (element_ == Element::bf16 ? 2 : 4);
  }

  // `table` is int64 [count, 5]: from, to, tokens, from_pitch, to_pitch. `cosines` and `sines` of
  // the angles are float32 [rotary_dim / 2].
  void operator()(std::uintptr_t table, std::int64_t count, std::uintptr_t cosines,
                  std::uintptr_t sines, int threads) const {
    const auto *row = reinterpret_cast<const std::int64_t *>(table);
    std::vector<Run> runs;
    runs.reserve(static_cast<std::size_t>(count));
    std::int64_t tokens = 0;
    for (std::int64_t i = 0; i < count; ++i, row += columns) {
      if (row[2] < 0 || (row[2] > 1 && std::min(row[3], row[4]) < token_bytes_))
        throw std::invalid_argument("run " + std::to_string(i) + ": " + std::to_string(row[2]) +
                                    " tokens of " + std::to_string(token_bytes_) +
                                    " bytes, pitches " + std::to_string(row[3]) + " and " +
                                    std::to_string(row[4]) +
                                    "; expected pitches of at least a token's bytes");
      runs.push_back({reinterpret_cast<const char *>(row[0]), reinterpret_cast<char *>(row[1]),
                      row[2], row[3], row[4]});
      tokens += row[2];
    }
    Job job{runs, tokens, shape_, element_, reinterpret_cast<const float *>(cosines),
            reinterpret_cast<const float *>(sines)};
    sgl_ext::parallel(tokens > piece ? threads : 1, work, &job);
  }

  std::int64_t token_bytes() const { return token_bytes_; }

 private:
  Shape shape_;
  Element element_;
  std::int64_t token_bytes_;
};

}  // namespace

NB_MODULE(_rotation, m) {
  m.doc() = "Copies of KV that rotate the keys.";
  nb::class_<Rotation>(m, "Rotation")
      .def(nb::init<const std::string &, int, int, int, int, bool>(), nb::arg("dtype"),
           nb::arg("layers"), nb::arg("heads"), nb::arg("head_dim"), nb::arg("rotary_dim"),
           nb::arg("interleaved") = false)
      .def("__call__", &Rotation::operator(), nb::arg("table"), nb::arg("count"),
           nb::arg("cosines"), nb::arg("sines"), nb::arg("threads"),
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("token_bytes", &Rotation::token_bytes);
}
