// Uses the OpenMP runtime of torch: with a second thread pool, the threads of both would spin on
// the same cores. torch ships its runtime under a mangled library name, so the runtime is looked up
// among the loaded libraries instead of linked.
#include "openmp.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <string>

namespace sgl_ext {
namespace {

using GompParallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

struct Runtime {
  std::string library;
  GompParallel run = nullptr;
};

bool is_openmp(const char *path) {
  const char *slash = std::strrchr(path, '/');
  const char *name = slash ? slash + 1 : path;
  // GCC's, Intel's and LLVM's runtimes all export GOMP_parallel.
  return std::strncmp(name, "libgomp", 7) == 0 || std::strncmp(name, "libiomp5", 8) == 0 ||
         std::strncmp(name, "libomp", 6) == 0;
}

int visit(dl_phdr_info *info, std::size_t, void *found) {
  const char *path = info->dlpi_name;
  if (!path || !is_openmp(path)) return 0;
  auto &library = *static_cast<std::string *>(found);
  library = path;
  // Other packages may load a runtime too; the runtime of torch takes precedence.
  return std::strstr(path, "/torch/") != nullptr;
}

Runtime find() {
  Runtime runtime;
  dl_iterate_phdr(visit, &runtime.library);
  if (runtime.library.empty()) return runtime;
  void *handle = dlopen(runtime.library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle) runtime.run = reinterpret_cast<GompParallel>(dlsym(handle, "GOMP_parallel"));
  if (!runtime.run) runtime.library.clear();
  return runtime;
}

// Looked up at the first use, because torch has been imported by then.
const Runtime &runtime() {
  static const Runtime found = find();
  return found;
}

}  // namespace

const char *openmp_library() { return runtime().library.c_str(); }

void parallel(int threads, void (*body)(void *), void *data) {
  if (threads > 1 && runtime().run) {
    runtime().run(body, data, static_cast<unsigned>(threads), 0);
  } else {
    body(data);
  }
}

}  // namespace sgl_ext
