// The choice of a target.
#include <sys/wait.h>

#include "harness.h"

using namespace bnb_test;

namespace {

void Quantize() {
  const float one = 1;
  uint8_t packed;
  float absmax;
  RUN(bnb_cpu_quantize_4bit(BNB_FP32, BNB_NF4, 64, 1, &one, &packed, &absmax, 1));
  CHECK(packed == 0xF7 && absmax == 1);
}

// Without a selection, and with an empty name, the first of the list.
void TestBest() {
  const char* best = bnb_cpu_runnable_target(0);
  CHECK(strcmp(bnb_cpu_last_target(), "") == 0);
  CHECK(strcmp(bnb_cpu_target(), best) == 0);
  Quantize();
  CHECK(bnb_cpu_select_target("scalar") == BNB_OK && strcmp(bnb_cpu_target(), "scalar") == 0);
  CHECK(bnb_cpu_select_target("") == BNB_OK && strcmp(bnb_cpu_target(), best) == 0);
}

void TestList() {
  int count = 0;
  for (const char* name; (name = bnb_cpu_runnable_target(count)) != nullptr; ++count) {
    for (int i = 0; i < count; ++i) CHECK(strcmp(name, bnb_cpu_runnable_target(i)) != 0);
    printf("  %s\n", name);
  }
  CHECK(count > 0 && strcmp(bnb_cpu_runnable_target(count - 1), "scalar") == 0);
  CHECK(bnb_cpu_runnable_target(count + 1) == nullptr);
#ifdef __aarch64__
  CHECK(count >= 2);  // NEON is part of the architecture
#endif
  // An emulator that lacks an instruction set must not make the tests pass without it.
  if (const char* must_run = getenv("BNB_TEST_TARGET")) CHECK(bnb_cpu_select_target(must_run) == BNB_OK);
}

void TestUnknown() {
  ForTargets([] {
    const char* before = bnb_cpu_target();
    for (const char* name : {"doesnotexist", "scalar ", "SCALAR", "avx", " "}) {
      CHECK(bnb_cpu_select_target(name) == BNB_UNKNOWN_TARGET);
      CHECK(strcmp(bnb_cpu_target(), before) == 0);
    }
#ifdef __aarch64__
    CHECK(bnb_cpu_select_target("avx2") == BNB_UNKNOWN_TARGET);
#else
    CHECK(bnb_cpu_select_target("neon") == BNB_UNKNOWN_TARGET);
#endif
  });
}

// The last target is that of this thread's last operator since the selection.
void TestLast() {
  ForTargets([] {
    CHECK(strcmp(bnb_cpu_last_target(), "") == 0);
    std::thread([] { Quantize(); }).join();
    CHECK(strcmp(bnb_cpu_last_target(), "") == 0);
    Quantize();
    CHECK(strcmp(bnb_cpu_last_target(), bnb_cpu_target()) == 0);
    std::thread([] { CHECK(strcmp(bnb_cpu_last_target(), "") == 0); }).join();
  });
}

// A child process has none of its parent's threads.
void TestThreads() {
#ifndef BNB_EMULATED  // QEMU's user mode fails an assertion where such a child starts a thread
  constexpr int64_t kCount = 1 << 20;
  const std::vector<float> values(kCount, 1);
  std::vector<uint8_t> packed(kCount / 2);
  std::vector<float> absmax(kCount / 64);
  const auto quantize = [&] {
    RUN(bnb_cpu_quantize_4bit(BNB_FP32, BNB_NF4, 64, kCount, values.data(), packed.data(), absmax.data(), 4));
    for (const uint8_t byte : packed) CHECK(byte == 0xFF);
  };
  // CTest preloads an OpenMP runtime, and nothing else. A child cannot use its parent's.
  const auto uses_openmp = [] { return strstr(bnb_cpu_threading(), "OpenMP") != nullptr; };
  CHECK(uses_openmp() == (getenv("LD_PRELOAD") != nullptr));
  quantize();
  const pid_t child = fork();
  if (child == 0) {
    CHECK(!uses_openmp());
    packed.assign(packed.size(), 0);
    alarm(60);
    quantize();
    _exit(0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  quantize();
#endif
}

}  // namespace

int main(int argc, char** argv) {
  return RunTests(
      argc, argv,
      {{"best", TestBest}, {"list", TestList}, {"unknown", TestUnknown}, {"last", TestLast}, {"threads", TestThreads}});
}
