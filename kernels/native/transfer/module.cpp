// Python bindings of the transfer engine. They hold no engine state.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>

#include "cuda_lane.h"
#include "direct_io.h"
#include "engine.h"
#include "file_lane.h"
#include "gil.h"
#include "host_lane.h"
#include "plain_memcpy.h"
#include "throttled_lane.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sgl_ext::transfer;

namespace {

using Batch = nb::ndarray<const std::int64_t, nb::shape<-1, 6>, nb::c_contig, nb::device::cpu>;
using Tickets = std::vector<std::shared_ptr<Ticket>>;

Deadline in_seconds(double timeout) {
  if (std::isnan(timeout) || timeout < 0) {
    throw std::invalid_argument("a timeout of " + std::to_string(timeout) +
                                " s; expected 0 or more");
  }
  constexpr double kYear = 3.2e7;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(std::min(timeout, kYear)));
}

// Waits in slices and runs Python's signal handlers between them.
template <class Wait>
bool wait_sliced(Deadline deadline, Wait wait) {
  constexpr auto kSlice = std::chrono::milliseconds(100);
  for (;;) {
    const Clock::time_point now = Clock::now();
    const Deadline until = Gil::ending() ? now : std::min(deadline, now + kSlice);
    bool over;
    {
      const Gil::Released released;
      over = wait(until);
    }
    if (over || until >= deadline) return over;
    if (Gil::ending()) throw Refused("the interpreter is shutting down; cannot wait");
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

struct PyEngine : Engine {
  ~PyEngine() {
    // Closes here and not in the base class, so that the GIL is released while it waits.
    if (!closed() && !forked()) {
      const Gil::Released released;
      close(in_seconds(5));
    }
  }
};

std::shared_ptr<Ticket> submit(PyEngine& engine, const Batch& batch,
                               const std::shared_ptr<Lane>& lane, int level,
                               const std::vector<std::uintptr_t>& after) {
  if (level < 0 || level >= static_cast<int>(kLevels)) {
    throw std::invalid_argument("priority " + std::to_string(level) + "; expected 0 to " +
                                std::to_string(kLevels - 1));
  }
  const auto* rows = reinterpret_cast<const Copy*>(batch.data());
  std::vector<Copy> copies(rows, rows + batch.shape(0));
  const Gil::Released released;
  return engine.submit(std::move(copies), lane, static_cast<Level>(level), after);
}

std::shared_ptr<Region> add_memory(PyEngine& engine, std::int64_t address, std::int64_t length,
                                   bool device, bool writable, bool pinned) {
  auto region = std::make_shared<Region>();
  region->kind = device ? Kind::device : Kind::host;
  region->base = address;
  region->length = length;
  region->writable = writable;
  region->pinned = pinned && !device;
  return engine.add_region(std::move(region));
}

// `backend` is "io_uring", "threads", or "auto" for the first of the two that is available. Returns
// the lane and the reason if io_uring was tried and is not available.
std::pair<std::shared_ptr<FileLane>, std::string> add_file_lane(PyEngine& engine,
                                                                const std::string& backend,
                                                                std::size_t depth,
                                                                std::int64_t bytes,
                                                                std::int64_t request) {
  const FileLane::Limits limits{depth, bytes, request};
  FileLane::check(limits);
  std::string reason;
  std::unique_ptr<IoBackend> io;
  if (backend != "threads") io = make_uring(FileLane::capacity(limits), reason);
  if (!io && backend == "io_uring") throw Refused(reason);
  constexpr std::size_t kMaxThreads = 16;
  if (!io) io = make_thread_io(std::min(depth, kMaxThreads));
  return {engine.add_lane<FileLane>(std::move(io), limits), reason};
}

std::shared_ptr<Region> add_file(PyEngine& engine, const FileLane& lane, int fd,
                                 std::int64_t length) {
  engine.check_open();
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) {
    const std::string what = "file descriptor " + std::to_string(fd);
    if (errno == EBADF) throw std::invalid_argument(what + ": " + std::strerror(errno));
    throw std::system_error(errno, std::generic_category(), what);
  }
  return engine.add_region(file_region(own, length, lane));
}

}  // namespace

NB_MODULE(_transfer, m) {
  m.doc() = "Native transfer engine, used through sgl_ext.memory.transfer.";
  // A ticket in a global variable of a program lives until the process exits.
  nb::set_leak_warnings(false);

  // Lives as long as the process, like every exception class of a module.
  static PyObject* refused =
      nb::object(nb::module_::import_("sgl_ext.errors").attr("ExtError")).release().ptr();
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const Refused& problem) {
      PyErr_SetString(refused, problem.what());
    } catch (const std::system_error& problem) {
      const nb::object error = nb::make_tuple(problem.code().value(), problem.what());
      PyErr_SetObject(PyExc_OSError, error.ptr());
    }
  });

  nb::class_<Region>(m, "Region")
      .def_ro("id", &Region::id)
      .def_ro("base", &Region::base)
      .def_ro("length", &Region::length)
      .def_ro("memory_alignment", &Region::memory_alignment)
      .def_ro("offset_alignment", &Region::offset_alignment);

  nb::class_<Lane>(m, "Lane").def_prop_ro("name", &Lane::name);
  nb::class_<HostLane, Lane>(m, "HostLane").def_prop_ro("threads", &HostLane::threads);

  nb::class_<FileLane, Lane>(m, "FileLane")
      .def_prop_ro("backend", &FileLane::backend)
      .def_prop_ro("registered_bytes", &FileLane::registered_bytes);
  nb::class_<ThrottledLane, Lane>(m, "ThrottledLane");
  nb::class_<CudaLane, Lane>(m, "CudaLane").def_prop_ro("library", &CudaLane::library);

  nb::class_<Ticket>(m, "Ticket")
      .def_prop_ro("state", [](const Ticket& t) { return static_cast<int>(t.state()); })
      .def_prop_ro("level", [](const Ticket& t) { return static_cast<int>(t.level); })
      .def_prop_ro("bytes_total", [](const Ticket& t) { return t.bytes_total; })
      .def_prop_ro("bytes_done", &Ticket::bytes_done)
      .def_prop_ro("seconds", &Ticket::seconds)
      .def_prop_ro("failure",
                   [](const Ticket& t) -> nb::object {
                     if (t.state() != State::failed) return nb::none();
                     const Failure& f = t.failure();
                     return nb::make_tuple(f.code, f.op, f.message);
                   });

  nb::class_<PyEngine>(m, "Engine")
      .def(nb::init<>())
      .def("register", add_memory, "address"_a, "length"_a, "device"_a, "writable"_a, "pinned"_a,
           nb::call_guard<Gil::Released>())
      .def("unregister", &PyEngine::remove_region, "region"_a,
           nb::call_guard<Gil::Released>())
      .def("host_lane",
           [](PyEngine& engine, std::size_t threads, std::int64_t piece_bytes) {
             return engine.add_lane<HostLane>(threads, piece_bytes);
           },
           "threads"_a, "piece_bytes"_a, nb::call_guard<Gil::Released>())
      .def("file_lane", add_file_lane, "backend"_a, "depth"_a, "bytes_in_flight"_a,
           "request_bytes"_a, nb::call_guard<Gil::Released>())
      .def("file", add_file, "lane"_a, "fd"_a, "length"_a, nb::call_guard<Gil::Released>())
      .def("throttled_lane",
           [](PyEngine& engine, const std::shared_ptr<Lane>& inner, double bytes_per_second,
              double operations_per_second, double latency, std::size_t depth,
              std::int64_t piece_bytes) {
             const ThrottledLane::Device device{bytes_per_second, operations_per_second, latency};
             return engine.add_lane<ThrottledLane>(inner, device, depth, piece_bytes);
           },
           "inner"_a, "bytes_per_second"_a, "operations_per_second"_a, "latency"_a, "depth"_a,
           "piece_bytes"_a, nb::call_guard<Gil::Released>())
      .def("cuda_lane",
           [](PyEngine& engine, const std::string& library, int device, std::size_t dispatches,
              std::int64_t bytes) {
             return engine.add_lane<CudaLane>(library, device,
                                              CudaLane::Limits{dispatches, bytes});
           },
           "library"_a, "device"_a, "dispatches"_a, "group_bytes"_a, nb::call_guard<Gil::Released>())
      .def("submit", submit, "copies"_a, "lane"_a, "level"_a,
           "after"_a = std::vector<std::uintptr_t>())
      .def("cancel", &PyEngine::cancel, "ticket"_a, nb::call_guard<Gil::Released>())
      .def("wait",
           [](PyEngine& engine, const Ticket& ticket, double timeout) {
             const Deadline deadline = in_seconds(timeout);
             if (ticket.finished()) return true;
             return wait_sliced(deadline,
                                [&](Deadline until) { return engine.wait(ticket, until); });
           },
           "ticket"_a, "timeout"_a)
      .def("fence",
           [](PyEngine& engine, const std::shared_ptr<Ticket>& ticket, std::uintptr_t stream,
              double timeout) {
             const Deadline deadline = in_seconds(timeout);
             const Gil::Released released;
             return engine.fence(ticket, stream, deadline);
           },
           "ticket"_a, "stream"_a, "timeout"_a)
      .def("wait_any",
           [](PyEngine& engine, const Tickets& tickets, double timeout) {
             return wait_sliced(in_seconds(timeout),
                                [&](Deadline until) { return engine.wait_any(tickets, until); });
           },
           "tickets"_a, "timeout"_a)
      .def("close",
           [](PyEngine& engine, double timeout) {
             const Deadline deadline = in_seconds(timeout);
             // In a forked child there is nothing to wait for.
             return !engine.forked() && wait_sliced(deadline, [&](Deadline until) {
               return engine.close(until);
             });
           },
           "timeout"_a)
      .def_prop_ro("closed", &PyEngine::closed)
      .def_prop_ro("forked", &PyEngine::forked);

  m.def("direct_io", [](int fd) -> nb::object {
    const auto direct = direct_io(fd);
    if (!direct) return nb::none();
    return nb::make_tuple(direct->memory_alignment, direct->offset_alignment);
  }, "fd"_a);
  m.def("io_uring_built", io_uring_built);
  Gil::watch_forks();
  m.def("no_waits", [] { return Gil::count() == 0; });
  m.def("end", [](double timeout) { return Gil::end(in_seconds(timeout)); }, "timeout"_a);
  m.def("leak", [](nb::object owner) { owner.release(); }, "owner"_a);
  m.def("plain_memcpy",
        [](std::uintptr_t dst, std::uintptr_t src, std::size_t bytes, std::size_t threads) {
          plain_memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes,
                       threads);
        },
        "dst"_a, "src"_a, "length"_a, "threads"_a, nb::call_guard<Gil::Released>());
}
