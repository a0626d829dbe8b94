// 8-bit blockwise against an oracle that takes one element at a time.
#include <algorithm>

#include "harness.h"

using namespace bnb_test;

namespace {

constexpr int64_t kBlocksizes[] = {1, 2, 3, 7, 31, 32, 64, 100, 256, 4096, int64_t{1} << 40, INT64_MAX};
constexpr int kLevels = 256;

using Map = std::vector<float>;

// Ascending maps: signed and unsigned, even and with an exponent, one that repeats a level, and a random one.
std::vector<Map> Maps() {
  Map even, small, logarithmic, repeated, random;
  Random values(6);
  for (int i = 0; i < kLevels; ++i) {
    even.push_back(static_cast<float>(i - 127) / 128);
    small.push_back(static_cast<float>(i) / 255);
    const int step = i < 128 ? 127 - i : i - 127;
    const auto magnitude = static_cast<float>(step == 0 ? 0 : pow(10, 7.0 * step / 128 - 7));
    logarithmic.push_back(i < 128 ? -magnitude : magnitude);
    repeated.push_back(static_cast<float>((i - 100) / 16) / 8);
    random.push_back(values.Normal() / 3);
  }
  std::sort(random.begin(), random.end());
  return {even, small, logarithmic, repeated, random};
}

float Scaled(float x, float absmax) {
  if (absmax == 0) return 0;
  const float factor = 1 / absmax;
  return isinf(factor) ? x / absmax : x * factor;
}

// The number of points below the value; the middle of two fp32 numbers of these maps is exact in double.
int Code(const Map& levels, float scaled) {
  if (isnan(scaled)) return 0;
  int code = 0;
  while (code < kLevels - 1 && scaled > (static_cast<double>(levels[code]) + levels[code + 1]) / 2) ++code;
  return code;
}

int64_t Blocks(int64_t n, int64_t blocksize) { return n / blocksize + (n % blocksize != 0 ? 1 : 0); }

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<float> absmax;
};

Quantized Quantize(const Map& levels, int64_t blocksize, const Tensor& x) {
  const int64_t n = x.Count();
  Quantized result;
  for (int64_t block = 0; block < Blocks(n, blocksize); ++block) {
    const int64_t first = block * blocksize, last = n - first < blocksize ? n : first + blocksize;
    float absmax = 0;
    for (int64_t i = first; i < last; ++i) {
      const float magnitude = fabsf(x.Get(i));
      if (!(magnitude <= absmax)) absmax = isnan(absmax) ? absmax : magnitude;
    }
    result.absmax.push_back(absmax);
    for (int64_t i = first; i < last; ++i) {
      result.codes.push_back(static_cast<uint8_t>(Code(levels, Scaled(x.Get(i), absmax))));
    }
  }
  return result;
}

void CheckEqual(const uint8_t* codes, const float* absmax, const Quantized& expected) {
  for (size_t i = 0; i < expected.absmax.size(); ++i) CHECK(Same(absmax[i], expected.absmax[i]));
  for (size_t i = 0; i < expected.codes.size(); ++i) CHECK(codes[i] == expected.codes[i]);
}

void TestLengths() {
  const std::vector<Map> maps = Maps();
  Guarded<uint8_t> in(4 * kLongest), codes(kLongest), codes_in(kLongest), out(4 * kLongest);
  Guarded<float> absmax(kLongest), absmax_in(kLongest), levels_in(kLevels);
  Random random(7);
  int turn = 0;
  for (const int64_t n : Lengths()) {
    for (const int dtype : kDtypes) {
      Tensor x(dtype, n);
      Fill(&random, &x);
      for (const int64_t blocksize : kBlocksizes) {
        const Map& map = maps[++turn % maps.size()];
        const int64_t blocks = Blocks(n, blocksize);
        const Quantized expected = Quantize(map, blocksize, x);
        Quantized given = expected;  // all codes and scales, not only those that quantising gives
        for (uint8_t& code : given.codes) code = static_cast<uint8_t>(random.Bits());
        for (float& scale : given.absmax) {
          if (random.Below(8) == 0) scale = kSpecial[random.Below(kSpecials)];
        }
        Tensor decoded(dtype, n);
        for (int64_t i = 0; i < n; ++i) decoded.Set(i, map[given.codes[i]] * given.absmax[i / blocksize]);
        Describe("blockwise, %s, map %d, blocksize %lld, n = %d", x.format().name, turn % static_cast<int>(maps.size()),
                 static_cast<long long>(blocksize), static_cast<int>(n));
        for (const At at : kSides) {
          const uint8_t* values = in.Input(x.bytes.data(), n * x.Bytes(), at);
          const uint8_t* some_codes = codes_in.Input(given.codes.data(), n, at);
          const float* scales = absmax_in.Input(given.absmax.data(), blocks, at);
          const float* levels = levels_in.Input(map.data(), kLevels, at);
          ForTargets([&] {
            uint8_t* codes_out = codes.Output(n, at);
            float* scales_out = absmax.Output(blocks, at);
            RUN(bnb_cpu_quantize_blockwise(dtype, blocksize, n, values, levels, codes_out, scales_out, 1));
            codes.CheckWritten();
            absmax.CheckWritten();
            CheckEqual(codes_out, scales_out, expected);

            uint8_t* values_out = out.Output(n * x.Bytes(), at);
            RUN(bnb_cpu_dequantize_blockwise(dtype, blocksize, n, some_codes, scales, levels, values_out, 1));
            out.CheckWritten();
            CheckSame(values_out, decoded);
          });
        }
      }
    }
  }
}

// The exact middle between two levels goes to the lower one, the next number to the upper one. With many elements, as
// another algorithm may pay there.
void TestTies() {
  for (const Map& map : Maps()) {
    for (const int64_t repeats : {1, 40}) {
      Tensor x(BNB_FP32, 0);
      std::vector<float> values = {1};  // absmax: scaling is exact
      for (int64_t repeat = 0; repeat < repeats; ++repeat) {
        for (int i = 0; i + 1 < kLevels; ++i) {
          const auto middle = static_cast<float>((static_cast<double>(map[i]) + map[i + 1]) / 2);
          for (const float value : {map[i], nextafterf(middle, -2), middle, nextafterf(middle, 2)}) {
            if (fabsf(value) <= 1) values.push_back(value);
          }
        }
      }
      const auto n = static_cast<int64_t>(values.size());
      x.bytes.resize(values.size() * sizeof(float));
      memcpy(x.bytes.data(), values.data(), x.bytes.size());
      const Quantized expected = Quantize(map, n, x);
      std::vector<uint8_t> codes(values.size());
      float absmax;
      ForTargets([&] {
        Describe("blockwise ties");
        RUN(bnb_cpu_quantize_blockwise(BNB_FP32, n, n, x.bytes.data(), map.data(), codes.data(), &absmax, 1));
        CheckEqual(codes.data(), &absmax, expected);
      });
    }
  }
}

void TestThreads() {
  constexpr int64_t kCount = 600011;
  const Map map = Maps()[2];
  Random random(8);
  Tensor x(BNB_FP16, kCount);
  Fill(&random, &x);
  for (const int64_t blocksize : {int64_t{100}, int64_t{4096}, kCount}) {  // long blocks are shared among threads
    CheckThreads([&](int threads) {
      const int64_t blocks = Blocks(kCount, blocksize);
      std::vector<uint8_t> codes(kCount), out(kCount * 2);
      std::vector<float> absmax(static_cast<size_t>(blocks));
      RUN(bnb_cpu_quantize_blockwise(BNB_FP16, blocksize, kCount, x.bytes.data(), map.data(), codes.data(),
                                     absmax.data(), threads));
      RUN(bnb_cpu_dequantize_blockwise(BNB_FP16, blocksize, kCount, codes.data(), absmax.data(), map.data(), out.data(),
                                       threads));
      out.insert(out.end(), codes.begin(), codes.end());
      return out;
    });
  }
}

void TestArguments() {
  const auto refused = [](int dtype, int64_t blocksize, int64_t n) {
    REFUSED(bnb_cpu_quantize_blockwise(dtype, blocksize, n, Nowhere(), Nowhere<float>(), Nowhere<uint8_t>(),
                                       Nowhere<float>(), 1));
    REFUSED(bnb_cpu_dequantize_blockwise(dtype, blocksize, n, Nowhere<uint8_t>(), Nowhere<float>(), Nowhere<float>(),
                                         Nowhere(), 1));
  };
  ForTargets([&] {
    for (const int dtype : {-1, 3, 1 << 30}) refused(dtype, 64, 1000);
    for (const int64_t blocksize : {INT64_MIN, int64_t{-1}, int64_t{0}}) refused(BNB_FP32, blocksize, 1000);
    for (const int64_t n : {int64_t{-1}, INT64_MIN}) refused(BNB_FP32, 64, n);
    CHECK(strcmp(bnb_cpu_last_target(), "") == 0);  // no kernel ran
    const Map map = Maps()[0];
    RUN(bnb_cpu_quantize_blockwise(BNB_FP32, 64, 0, nullptr, map.data(), nullptr, nullptr, 1));
    RUN(bnb_cpu_dequantize_blockwise(BNB_FP32, 64, 0, nullptr, nullptr, map.data(), nullptr, 1));
  });
}

}  // namespace

int main(int argc, char** argv) {
  return RunTests(
      argc, argv,
      {{"arguments", TestArguments}, {"ties", TestTies}, {"lengths", TestLengths}, {"threads", TestThreads}});
}
