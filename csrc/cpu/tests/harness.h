// What the C++ tests share: checks, one run for each target, memory between inaccessible pages, random values, and the
// number formats.
//
// The tests see the library through api.h alone. Their oracles restate docs/numerics.md and share no code with it.
#pragma once

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <initializer_list>
#include <thread>
#include <vector>

#include "common/dtype.h"  // the enumerations
#include "common/status.h"
#include "cpu/api.h"

namespace bnb_test {

// --- Checks ----------------------------------------------------------------------------------------------------------

// What is being tested; each failure prints it, a fault as well.
inline char& Context() {
  static thread_local char text[256];
  return text[0];
}

__attribute__((format(printf, 1, 2))) inline void Describe(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(&Context(), 256, format, arguments);
  va_end(arguments);
}

[[noreturn]] inline void Fail(const char* file, int line, const char* what) {
  fprintf(stderr, "%s:%d: %s\n  in: %s, target %s\n", file, line, what, &Context(), bnb_cpu_target());
  _exit(1);
}

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) ::bnb_test::Fail(__FILE__, __LINE__, "failed: " #condition); \
  } while (false)

inline void OnFault(int) { Fail("?", 0, "memory was touched that is not the operator's"); }

// --- Targets ---------------------------------------------------------------------------------------------------------

// Runs `body` once for each target that this machine runs, with that target selected.
template <typename Body>
void ForTargets(const Body& body) {
  const char* name;
  for (int i = 0; (name = bnb_cpu_runnable_target(i)) != nullptr; ++i) {
    CHECK(bnb_cpu_select_target(name) == BNB_OK);
    CHECK(strcmp(bnb_cpu_target(), name) == 0);
    body();
  }
}

// `call` is an operator with valid arguments: it must have run, on the target selected.
#define RUN(call)                                                \
  do {                                                           \
    CHECK((call) == BNB_OK);                                     \
    CHECK(strcmp(bnb_cpu_last_target(), bnb_cpu_target()) == 0); \
  } while (false)

// `call` has an invalid argument: it must be refused before it touches memory. Its pointers should be `Nowhere()`.
#define REFUSED(call) CHECK((call) == BNB_INVALID_ARGUMENT)

template <typename T = void>
T* Nowhere() {
  return reinterpret_cast<T*>(uintptr_t{8});
}

// `run(threads)` gives the bytes of an operator's results. They must not depend on the number of threads, nor on calls
// from other threads at the same time.
template <typename Run>
void CheckThreads(const Run& run) {
  ForTargets([&] {
    const std::vector<uint8_t> expected = run(1);
    for (const int threads : {-1, 0, 2, 3, 8}) CHECK(run(threads) == expected);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
      callers.emplace_back([&] {
        for (int repeat = 0; repeat < 3; ++repeat) CHECK(run(2) == expected);
      });
    }
    for (std::thread& caller : callers) caller.join();
  });
}

// --- Memory ----------------------------------------------------------------------------------------------------------

// Where the data lies: it ends where an inaccessible page begins, or begins where one ends.
enum class At { kEnd, kBegin };
constexpr At kSides[] = {At::kEnd, At::kBegin};

// Room for up to `capacity` elements between two inaccessible pages.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t capacity) {
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (static_cast<size_t>(capacity) * sizeof(T) / page_ + 1) * page_;
    void* all = mmap(nullptr, size_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED);
    begin_ = static_cast<uint8_t*>(all) + page_;
    Protect(PROT_READ | PROT_WRITE);
  }
  ~Guarded() { munmap(begin_ - page_, size_ + 2 * page_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  // Room for `count` elements at one side, for output. CheckWritten() finds what was written beside it.
  T* Output(int64_t count, At at) {
    Place(count, at);
    memset(data_ - BytesBefore(), kPoison, bytes_ + BytesBefore() + BytesAfter());
    return reinterpret_cast<T*>(data_);
  }
  void CheckWritten() const {
    for (size_t i = 1; i <= BytesBefore(); ++i) CHECK(*(data_ - i) == kPoison);
    for (size_t i = 0; i < BytesAfter(); ++i) CHECK(data_[bytes_ + i] == kPoison);
  }

  // A copy of `count` elements, for input: a write to it is a fault.
  const T* Input(const T* values, int64_t count, At at) {
    Protect(PROT_READ | PROT_WRITE);
    Place(count, at);
    if (bytes_ != 0) memcpy(data_, values, bytes_);
    Protect(PROT_READ);
    return reinterpret_cast<const T*>(data_);
  }

 private:
  static constexpr uint8_t kPoison = 0xA5;
  static constexpr size_t kMargin = 256;

  void Protect(int protection) { CHECK(mprotect(begin_, size_, protection) == 0); }
  void Place(int64_t count, At at) {
    bytes_ = static_cast<size_t>(count) * sizeof(T);
    CHECK(bytes_ <= size_);
    data_ = at == At::kEnd ? begin_ + size_ - bytes_ : begin_;
  }
  // Bytes beside the data, up to the page that no one can touch.
  size_t BytesBefore() const { return AtMost(static_cast<size_t>(data_ - begin_)); }
  size_t BytesAfter() const { return AtMost(size_ - static_cast<size_t>(data_ - begin_) - bytes_); }
  static size_t AtMost(size_t bytes) { return bytes < kMargin ? bytes : kMargin; }

  size_t page_, size_, bytes_ = 0;
  uint8_t *begin_, *data_ = nullptr;
};

// --- Number formats --------------------------------------------------------------------------------------------------

// An IEEE format, by its widths. `bnb_dtype` is the index.
struct Format {
  const char* name;
  int64_t bytes;
  int exponent_bits, fraction_bits;

  uint32_t Infinity() const { return ((uint32_t{1} << exponent_bits) - 1) << fraction_bits; }
  uint32_t Sign() const { return uint32_t{1} << (exponent_bits + fraction_bits); }
  int Bias() const { return (1 << (exponent_bits - 1)) - 1; }
};
constexpr Format kFormats[] = {{"fp32", 4, 8, 23}, {"fp16", 2, 5, 10}, {"bf16", 2, 8, 7}};
constexpr int kDtypes[] = {BNB_FP32, BNB_FP16, BNB_BF16};

// The value of a bit pattern. Every finite one is exact.
inline double Decode(uint32_t bits, const Format& format) {
  const uint32_t magnitude = bits & (format.Sign() - 1);
  const uint32_t fraction = magnitude & ((uint32_t{1} << format.fraction_bits) - 1);
  const int exponent = static_cast<int>(magnitude >> format.fraction_bits);
  double value;
  if (magnitude >= format.Infinity()) {
    value = magnitude == format.Infinity() ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = ldexp(fraction, 1 - format.Bias() - format.fraction_bits);
  } else {
    value = ldexp(1.0 + ldexp(fraction, -format.fraction_bits), exponent - format.Bias());
  }
  return (bits & format.Sign()) != 0 ? -value : value;
}

// The nearest bit pattern, ties to even.
inline uint32_t Encode(double value, const Format& format) {
  const uint32_t sign = signbit(value) ? format.Sign() : 0;
  const double magnitude = fabs(value);
  if (isnan(value)) return format.Infinity() + (uint32_t{1} << (format.fraction_bits - 1));
  if (magnitude == 0 || isinf(magnitude)) return sign | (magnitude == 0 ? 0 : format.Infinity());
  int exponent = ilogb(magnitude);
  if (exponent < 1 - format.Bias()) exponent = 1 - format.Bias();  // subnormal
  if (exponent > format.Bias()) return sign | format.Infinity();
  // In units of the last place; nearbyint rounds ties to even. A carry moves into the exponent as it should.
  const uint32_t units = static_cast<uint32_t>(nearbyint(ldexp(magnitude, format.fraction_bits - exponent)));
  return sign | ((static_cast<uint32_t>(exponent + format.Bias() - 1) << format.fraction_bits) + units);
}

inline float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// A tensor of one of the three formats, as bytes.
struct Tensor {
  Tensor(int dtype, int64_t count) : dtype(dtype), bytes(static_cast<size_t>(count * Bytes())) {}

  const Format& format() const { return kFormats[dtype]; }
  int64_t Bytes() const { return kFormats[dtype].bytes; }
  int64_t Count() const { return static_cast<int64_t>(bytes.size()) / Bytes(); }

  void SetBits(int64_t i, uint32_t bits) { memcpy(bytes.data() + i * Bytes(), &bits, static_cast<size_t>(Bytes())); }
  uint32_t GetBits(int64_t i) const {
    uint32_t bits = 0;
    memcpy(&bits, bytes.data() + i * Bytes(), static_cast<size_t>(Bytes()));
    return bits;
  }
  void Set(int64_t i, float value) { SetBits(i, Encode(value, format())); }
  float Get(int64_t i) const { return static_cast<float>(Decode(GetBits(i), format())); }

  int dtype;
  std::vector<uint8_t> bytes;
};

// Same bits; all NaNs are one value.
inline bool Same(uint32_t a, uint32_t b, const Format& format) {
  const uint32_t magnitude = format.Sign() - 1;
  return a == b || ((a & magnitude) > format.Infinity() && (b & magnitude) > format.Infinity());
}
inline bool Same(float a, float b) { return Same(BitsOf(a), BitsOf(b), kFormats[BNB_FP32]); }

inline void CheckSame(const void* actual, const Tensor& expected) {
  const auto* bytes = static_cast<const uint8_t*>(actual);
  for (int64_t i = 0; i < expected.Count(); ++i) {
    uint32_t bits = 0;
    memcpy(&bits, bytes + i * expected.Bytes(), static_cast<size_t>(expected.Bytes()));
    if (Same(bits, expected.GetBits(i), expected.format())) continue;
    fprintf(stderr, "element %lld: %08x, expected %08x\n", static_cast<long long>(i), bits, expected.GetBits(i));
    CHECK(!"the values differ");
  }
}

// --- Values ----------------------------------------------------------------------------------------------------------

// SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int64_t Below(int64_t limit) { return static_cast<int64_t>(Bits() % static_cast<uint64_t>(limit)); }
  // About normal: the sum of four uniform values.
  float Normal() {
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(Bits() >> 40) * 0x1p-24f - 0.5f;
    return sum * 1.7320508f;
  }

 private:
  uint64_t state_;
};

// Values that take other ways through the code than normal ones do: zeros, subnormals, where 1 / x overflows, the
// largest, infinities, NaN.
constexpr float kSpecial[] = {0.0f,        -0.0f,           0x1p-149f, -0x1p-149f, 0x1.8p-140f, 0x1p-128f,
                              0x1.1p-128f, 0x1p-126f,       -0x1p-24f, 0x1p-14f,   65504.0f,    65520.0f,
                              -3e38f,      0x1.fffffep127f, INFINITY,  -INFINITY,  NAN};
constexpr int64_t kSpecials = sizeof(kSpecial) / sizeof(kSpecial[0]);

// One run of values in 32 is of a scale of its own, and some of them hold special values.
inline void Fill(Random* random, Tensor* tensor) {
  float scale = 1;
  bool special = false;
  for (int64_t i = 0; i < tensor->Count(); ++i) {
    if (i % 32 == 0) {
      scale = random->Below(4) != 0 ? 1.0f : ldexpf(1.0f, static_cast<int>(random->Below(270)) - 140);
      special = random->Below(8) == 0;
    }
    tensor->Set(i, special && random->Below(4) == 0 ? kSpecial[random->Below(kSpecials)] : random->Normal() * scale);
  }
}

// Every length of a tail, lengths around the sizes of blocks, and primes.
inline std::vector<int64_t> Lengths() {
  std::vector<int64_t> lengths;
  for (int64_t n = 0; n <= 300; ++n) lengths.push_back(n);
  for (const int64_t n : {511, 512, 513, 1009, 2048, 4095, 4096, 4097, 8209}) lengths.push_back(n);
  return lengths;
}
constexpr int64_t kLongest = 8209;

// --- Programs --------------------------------------------------------------------------------------------------------

struct Test {
  const char* name;
  void (*run)();
};

// A program's main: runs its tests, or only the one whose name is given.
inline int RunTests(int argc, char** argv, std::initializer_list<Test> tests) {
#ifndef BNB_SANITIZE  // a sanitizer reports more
  signal(SIGSEGV, OnFault);
  signal(SIGBUS, OnFault);
#endif
  int found = 0;
  for (const Test& test : tests) {
    if (argc > 1 && strcmp(argv[1], test.name) != 0) continue;
    const auto start = std::chrono::steady_clock::now();
    test.run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    printf("%-12s ok, %.1f s\n", test.name, seconds.count());
    ++found;
  }
  return found > 0 ? 0 : 1;
}

}  // namespace bnb_test
