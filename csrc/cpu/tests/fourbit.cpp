// NF4 and FP4 against an oracle that takes one element at a time.
#include "fourbit_oracle.h"

using namespace bnb_test;

namespace {

float Scaled(float x, float absmax) {
  if (absmax == 0) return 0;
  const float factor = 1 / absmax;
  return isinf(factor) ? x / absmax : x * factor;
}

int Code(int quant_type, float x, float absmax) {
  const float scaled = Scaled(x, absmax);
  if (isnan(scaled)) return 0;
  if (quant_type == BNB_NF4) {
    int code = 0;
    while (code < 15 && scaled > (kNF4[code] + kNF4[code + 1]) / 2) ++code;
    return code;
  }
  // From one magnitude to the next larger one, as long as the value is above their midpoint.
  int code = 0;
  for (;;) {
    int next = -1;
    for (int i = 0; i < 8; ++i) {
      if (Level(BNB_FP4, i) > Level(BNB_FP4, code) && (next < 0 || Level(BNB_FP4, i) < Level(BNB_FP4, next))) next = i;
    }
    if (next < 0 || !(fabsf(scaled) > (Level(BNB_FP4, code) + Level(BNB_FP4, next)) / 2)) break;
    code = next;
  }
  return code + (x < 0 ? 8 : 0);
}

struct Quantized {
  std::vector<uint8_t> packed;
  std::vector<float> absmax;
};

Quantized Quantize(int quant_type, int64_t blocksize, const Tensor& x) {
  const int64_t n = x.Count();
  Quantized result;
  for (int64_t first = 0; first < n; first += blocksize) {
    float absmax = 0;
    for (int64_t i = first; i < n && i < first + blocksize; ++i) {
      const float magnitude = fabsf(x.Get(i));
      if (!(magnitude <= absmax)) absmax = isnan(absmax) ? absmax : magnitude;
    }
    result.absmax.push_back(absmax);
  }
  for (int64_t i = 0; i < n; i += 2) {
    int code[2];
    for (int64_t k = 0; k < 2; ++k) {
      const bool exists = i + k < n;
      code[k] = Code(quant_type, exists ? x.Get(i + k) : 0.0f, exists ? result.absmax[(i + k) / blocksize] : 1.0f);
    }
    result.packed.push_back(static_cast<uint8_t>(code[0] * 16 + code[1]));
  }
  return result;
}

Tensor Dequantize(int dtype, int quant_type, int64_t blocksize, int64_t n, const Quantized& quantized) {
  Tensor out(dtype, n);
  for (int64_t i = 0; i < n; ++i) {
    out.Set(i, Level(quant_type, CodeAt(quantized.packed, i)) * quantized.absmax[i / blocksize]);
  }
  return out;
}

void CheckEqual(const uint8_t* packed, const float* absmax, const Quantized& expected) {
  for (size_t i = 0; i < expected.absmax.size(); ++i) CHECK(Same(absmax[i], expected.absmax[i]));
  for (size_t i = 0; i < expected.packed.size(); ++i) CHECK(packed[i] == expected.packed[i]);
}

// The oracle itself: no other level is nearer, but for the rounding of the midpoints.
void TestOracle() {
  for (const int quant_type : kQuantTypes) {
    for (int step = -4000; step <= 4000; ++step) {
      const float x = static_cast<float>(step) / 4000;
      const double error = fabs(Level(quant_type, Code(quant_type, x, 1)) - static_cast<double>(x));
      for (int code = 0; code < 16; ++code) CHECK(error <= fabs(Level(quant_type, code) - x) + 1e-7);
    }
  }
}

void TestCodebook() {
  for (const int quant_type : kQuantTypes) {
    float levels[16];
    CHECK(bnb_cpu_codebook(quant_type, levels) == BNB_OK);
    for (int code = 0; code < 16; ++code) CHECK(BitsOf(levels[code]) == BitsOf(Level(quant_type, code)));
  }
  REFUSED(bnb_cpu_codebook(2, Nowhere<float>()));
  REFUSED(bnb_cpu_codebook(-1, Nowhere<float>()));
}

// The middle between two levels goes to the lower one (FP4: towards zero), the next number to the upper one.
void TestTies() {
  std::vector<float> values;
  for (const int quant_type : kQuantTypes) {
    for (int a = 0; a < 16; ++a) {
      for (int b = 0; b < 16; ++b) {
        const float middle = (Level(quant_type, a) + Level(quant_type, b)) / 2;
        for (const uint32_t step : {0u, 1u, ~0u}) values.push_back(FloatOf(BitsOf(middle) + step));
      }
    }
  }
  for (const float scale : {1.0f, 0x1p-20f, 0x1p100f}) {  // powers of 2: scaling is exact
    Tensor x(BNB_FP32, 0);
    for (const float value : values) {
      const float pair[] = {scale, isnan(value) ? 0.0f : value * scale};  // NaN: the number before 0
      const auto* bytes = reinterpret_cast<const uint8_t*>(pair);
      x.bytes.insert(x.bytes.end(), bytes, bytes + sizeof(pair));
    }
    const int64_t n = x.Count();
    std::vector<uint8_t> packed(n / 2);
    std::vector<float> absmax(n / 32);
    for (const int quant_type : kQuantTypes) {
      const Quantized expected = Quantize(quant_type, 32, x);
      ForTargets([&] {
        Describe("4-bit type %d, scale %a", quant_type, static_cast<double>(scale));
        RUN(bnb_cpu_quantize_4bit(BNB_FP32, quant_type, 32, n, x.bytes.data(), packed.data(), absmax.data(), 1));
        CheckEqual(packed.data(), absmax.data(), expected);
      });
    }
  }
}

void TestLengths() {
  Guarded<uint8_t> in(4 * kLongest), packed(kLongest), packed_in(kLongest), out(4 * kLongest);
  Guarded<float> absmax(kLongest), absmax_in(kLongest);
  Random random(1);
  for (const int64_t n : Lengths()) {
    for (const int dtype : kDtypes) {
      Tensor x(dtype, n);
      Fill(&random, &x);
      for (const int quant_type : kQuantTypes) {
        for (const int64_t blocksize : kBlocksizes) {
          const int64_t bytes = (n + 1) / 2, blocks = (n + blocksize - 1) / blocksize;
          const Quantized expected = Quantize(quant_type, blocksize, x);
          Quantized given = expected;  // all codes and scales, not only those that quantising gives
          for (uint8_t& byte : given.packed) byte = static_cast<uint8_t>(random.Bits());
          for (float& scale : given.absmax) {
            if (random.Below(8) == 0) scale = kSpecial[random.Below(kSpecials)];
          }
          const Tensor decoded = Dequantize(dtype, quant_type, blocksize, n, given);
          Describe("4-bit type %d, %s, blocksize %d, n = %d", quant_type, kFormats[dtype].name,
                   static_cast<int>(blocksize), static_cast<int>(n));
          for (const At at : kSides) {
            const uint8_t* values = in.Input(x.bytes.data(), n * x.Bytes(), at);
            const uint8_t* codes = packed_in.Input(given.packed.data(), bytes, at);
            const float* scales = absmax_in.Input(given.absmax.data(), blocks, at);
            ForTargets([&] {
              uint8_t* codes_out = packed.Output(bytes, at);
              float* scales_out = absmax.Output(blocks, at);
              RUN(bnb_cpu_quantize_4bit(dtype, quant_type, blocksize, n, values, codes_out, scales_out, 1));
              packed.CheckWritten();
              absmax.CheckWritten();
              CheckEqual(codes_out, scales_out, expected);

              uint8_t* values_out = out.Output(n * x.Bytes(), at);
              RUN(bnb_cpu_dequantize_4bit(dtype, quant_type, blocksize, n, codes, scales, values_out, 1));
              out.CheckWritten();
              CheckSame(values_out, decoded);
            });
          }
        }
      }
    }
  }
}

void TestThreads() {
  constexpr int64_t kCount = 300007, kBlocksize = 64, kBytes = (kCount + 1) / 2,
                    kBlocks = (kCount + kBlocksize - 1) / kBlocksize;
  Random random(2);
  Tensor x(BNB_BF16, kCount);
  Fill(&random, &x);
  CheckThreads([&](int threads) {
    std::vector<uint8_t> packed(kBytes), out(kCount * 2);
    std::vector<float> absmax(kBlocks);
    RUN(bnb_cpu_quantize_4bit(BNB_BF16, BNB_NF4, kBlocksize, kCount, x.bytes.data(), packed.data(), absmax.data(),
                              threads));
    RUN(bnb_cpu_dequantize_4bit(BNB_BF16, BNB_NF4, kBlocksize, kCount, packed.data(), absmax.data(), out.data(),
                                threads));
    out.insert(out.end(), packed.begin(), packed.end());
    return out;
  });
}

void TestArguments() {
  const auto refused = [](int dtype, int quant_type, int64_t blocksize, int64_t n) {
    REFUSED(bnb_cpu_quantize_4bit(dtype, quant_type, blocksize, n, Nowhere(), Nowhere<uint8_t>(), Nowhere<float>(), 1));
    REFUSED(
        bnb_cpu_dequantize_4bit(dtype, quant_type, blocksize, n, Nowhere<uint8_t>(), Nowhere<float>(), Nowhere(), 1));
  };
  ForTargets([&] {
    for (const int dtype : {-1, 3, 1 << 30}) refused(dtype, BNB_NF4, 64, 1000);
    for (const int quant_type : {-1, 2, 1 << 30}) refused(BNB_FP32, quant_type, 64, 1000);
    for (const int64_t blocksize : {INT64_MIN, int64_t{-64}, int64_t{0}, int64_t{1}, int64_t{16}, int64_t{48},
                                    int64_t{96}, int64_t{8192}, INT64_MAX}) {
      refused(BNB_FP32, BNB_NF4, blocksize, 1000);
    }
    for (const int64_t n : {int64_t{-1}, INT64_MIN}) refused(BNB_FP32, BNB_NF4, 64, n);
    CHECK(strcmp(bnb_cpu_last_target(), "") == 0);  // no kernel ran
    RUN(bnb_cpu_quantize_4bit(BNB_FP32, BNB_NF4, 64, 0, nullptr, nullptr, nullptr, 1));
    RUN(bnb_cpu_dequantize_4bit(BNB_FP32, BNB_NF4, 64, 0, nullptr, nullptr, nullptr, 1));
  });
}

}  // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {{"oracle", TestOracle},
                   {"codebook", TestCodebook},
                   {"arguments", TestArguments},
                   {"ties", TestTies},
                   {"lengths", TestLengths},
                   {"threads", TestThreads}});
}
