// Every conversion between fp32 and a 16-bit type, seen through the 4-bit operators: the absmax of a block that holds
// one value is its magnitude as fp32, and a code of level 1 decodes to absmax in the type of the output.
#include "harness.h"

using namespace bnb_test;

namespace {

constexpr int64_t kBlock = 32;
constexpr int k16Bit[] = {BNB_FP16, BNB_BF16};

void TestOracle() {
  for (const int dtype : k16Bit) {
    const Format& format = kFormats[dtype];
    for (uint32_t bits = 0; bits < 0x10000; ++bits) CHECK(Same(Encode(Decode(bits, format), format), bits, format));
  }
  const Format &half = kFormats[BNB_FP16], &brain = kFormats[BNB_BF16], &single = kFormats[BNB_FP32];
  CHECK(Decode(0x3C00, half) == 1 && Decode(0x7BFF, half) == 65504 && Decode(0x8001, half) == -0x1p-24);
  CHECK(Encode(65519.99, half) == 0x7BFF && Encode(65520, half) == 0x7C00 && Encode(0x1p-25, half) == 0);
  CHECK(Encode(0x1.8p-24, half) == 2 && Encode(0x1.4p-24, half) == 1 && Encode(1 + 0x1p-11, half) == 0x3C00);
  CHECK(Encode(1 + 0x1p-8, brain) == 0x3F80 && Encode(1 + 0x1.8p-7, brain) == 0x3F82 && Decode(1, brain) == 0x1p-133);
  for (const float value : kSpecial) CHECK(Same(Encode(value, single), BitsOf(value), single));
}

// All 16-bit patterns as input.
void TestWiden() {
  constexpr int64_t kBlocks = 0x10000, kCount = kBlocks * kBlock;
  for (const int dtype : k16Bit) {
    Tensor x(dtype, kCount);  // zeros
    // The place within the block varies, to reach all lanes.
    const auto place = [](int64_t bits) { return bits * kBlock + (bits + (bits >> 5)) % kBlock; };
    for (int64_t bits = 0; bits < kBlocks; ++bits) x.SetBits(place(bits), static_cast<uint32_t>(bits));
    std::vector<uint8_t> packed(kCount / 2);
    std::vector<float> absmax(kBlocks);
    ForTargets([&] {
      RUN(bnb_cpu_quantize_4bit(dtype, BNB_NF4, kBlock, kCount, x.bytes.data(), packed.data(), absmax.data(), 1));
      for (int64_t bits = 0; bits < kBlocks; ++bits) {
        Describe("%s %04x", kFormats[dtype].name, static_cast<unsigned>(bits));
        const float value = x.Get(place(bits));
        CHECK(Same(absmax[bits], fabsf(value)));
        if (!isfinite(value) || value == 0) continue;
        const int byte = packed[place(bits) / 2];
        CHECK((place(bits) % 2 == 0 ? byte / 16 : byte % 16) == (value < 0 ? 0 : 15));
      }
    });
  }
}

// fp32 values as absmax: each 16-bit value, the middle between it and the next one with its neighbours, and a sweep.
void TestNarrow() {
  for (const int dtype : k16Bit) {
    const Format& format = kFormats[dtype];
    std::vector<float> values;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const auto value = static_cast<float>(Decode(bits, format));
      values.push_back(value);
      // The magnitude after the largest is the one that would follow if the exponent went on.
      const bool largest = (bits & (format.Sign() - 1)) + 1 == format.Infinity();
      const double next = largest ? copysign(ldexp(1.0, format.Bias() + 1), value) : Decode(bits + 1, format);
      const auto middle = static_cast<float>((value + next) / 2);
      for (const uint32_t step : {0u, 1u, ~0u}) values.push_back(FloatOf(BitsOf(middle) + step));
    }
    for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 65537 / 4 - 1) {
      values.push_back(FloatOf(static_cast<uint32_t>(bits)));
    }
    const auto blocks = static_cast<int64_t>(values.size());
    const std::vector<uint8_t> packed(values.size() * kBlock / 2, 0xFF);
    Tensor out(dtype, blocks * kBlock);
    ForTargets([&] {
      RUN(bnb_cpu_dequantize_4bit(dtype, BNB_NF4, kBlock, blocks * kBlock, packed.data(), values.data(),
                                  out.bytes.data(), 1));
      for (int64_t block = 0; block < blocks; ++block) {
        Describe("%s of %a", format.name, static_cast<double>(values[block]));
        const uint32_t expected = Encode(values[block], format);
        for (const int64_t i : {int64_t{0}, int64_t{1}, block % kBlock}) {
          CHECK(Same(out.GetBits(block * kBlock + i), expected, format));
        }
      }
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv, {{"oracle", TestOracle}, {"widen", TestWiden}, {"narrow", TestNarrow}});
}
