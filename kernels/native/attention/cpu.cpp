// Kernels of each instruction set, and detection of the sets that the CPU supports.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace sgl_ext::attention {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Linux grants the tile registers to processes that ask for them (arch/x86/xstate). clang 18 does
// not know the names of these features.
bool has_amx_bf16() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  static const bool granted = [] {
    unsigned a, b, c, d;
    return has_avx512_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) &&
           (d & kTile) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
}
#endif

}  // namespace

const Isa isas[] = {
#if defined(__x86_64__)
    {"amx_bf16", has_amx_bf16, &amx_bf16, &avx512_fp32},
    {"avx512_bf16", has_avx512_bf16, &avx512_dot_bf16, &avx512_fp32},
    {"avx512", has_avx512, &avx512_bf16, &avx512_fp32},
    {"avx2", has_avx2, &avx2_bf16, &avx2_fp32},
#endif
    {"portable", always, &portable_bf16, &portable_fp32},
};
const int isa_count = sizeof(isas) / sizeof(isas[0]);

}  // namespace sgl_ext::attention
