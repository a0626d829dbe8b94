#include "cpu/targets.h"

#include <string.h>

#include <atomic>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace bnb {

extern const Kernels scalar, avx2, avx512, avx512_vnni, avx512_bf16, neon, neon_dotprod;

namespace {

struct Target {
  const Kernels* kernels;
  bool (*runs)();
};

bool Always() { return true; }

#if defined(__x86_64__)
// The compiler's run-time support asks CPUID and, for AVX and AVX-512, whether the operating system saves the
// registers. The lists are those of the compiler options in CMakeLists.txt.
bool Avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("pclmul") &&
         __builtin_cpu_supports("aes");
}
bool Avx512() {
  return Avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool Avx512Vnni() { return Avx512() && __builtin_cpu_supports("avx512vnni"); }
bool Avx512Bf16() { return Avx512Vnni() && __builtin_cpu_supports("avx512bf16"); }
#elif defined(__aarch64__)
bool Dotprod() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return true;  // every Apple processor has it
#endif
}
#endif

// Best first.
constexpr Target kTargets[] = {
#if defined(__x86_64__)
    {&avx512_bf16, Avx512Bf16}, {&avx512_vnni, Avx512Vnni}, {&avx512, Avx512}, {&avx2, Avx2},
#elif defined(__aarch64__)
    {&neon_dotprod, Dotprod},
    {&neon, Always},
#endif
    {&scalar, Always},
};

std::atomic<const Kernels*> active{nullptr};

}  // namespace

const char* RunnableTarget(int i) {
  for (const Target& target : kTargets) {
    if (target.runs() && i-- == 0) return target.kernels->name;
  }
  return nullptr;
}

bool SelectTarget(const char* name) {
  for (const Target& target : kTargets) {
    if (target.runs() && (*name == '\0' || strcmp(name, target.kernels->name) == 0)) {
      active.store(target.kernels, std::memory_order_release);
      return true;
    }
  }
  return false;
}

const Kernels& ActiveKernels() {
  const Kernels* kernels = active.load(std::memory_order_acquire);
  if (kernels == nullptr) {
    SelectTarget("");
    kernels = active.load(std::memory_order_acquire);
  }
  return *kernels;
}

}  // namespace bnb
