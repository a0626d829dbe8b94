// Element types of the C interfaces, and the conversions between them and fp32 for one element.
//
// Vector code must give the same bits: rounding to nearest, ties to even; a NaN becomes a quiet one.
#pragma once

#include <stdint.h>
#include <string.h>

enum bnb_dtype { BNB_FP32 = 0, BNB_FP16 = 1, BNB_BF16 = 2 };
enum bnb_quant_type { BNB_NF4 = 0, BNB_FP4 = 1 };

namespace bnb {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

static inline uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline bool IsFinite(float value) { return (BitsOf(value) & 0x7F800000u) != 0x7F800000u; }

static inline float ToFloat(float value) { return value; }
static inline float ToFloat(BFloat16 value) { return FloatOf(static_cast<uint32_t>(value.bits) << 16); }
static inline float ToFloat(Half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  const uint32_t magnitude = half.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // inf, NaN
    const uint32_t quiet = magnitude > 0x7C00u ? 0x400000u : 0u;
    return FloatOf(sign | 0x7F800000u | quiet | ((magnitude & 0x3FFu) << 13));
  }
  // Subnormals are multiples of 2^-24; the exponent biases differ by 112.
  const float value =
      magnitude < 0x400u ? static_cast<float>(magnitude) * 0x1p-24f : FloatOf((magnitude << 13) + (112u << 23));
  return FloatOf(sign | BitsOf(value));
}

static inline void FromFloat(float value, float* out) { *out = value; }
static inline void FromFloat(float value, BFloat16* out) {
  const uint32_t bits = BitsOf(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    out->bits = 0x7FC0u;
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
}
static inline void FromFloat(float value, Half* out) {
  const uint32_t bits = BitsOf(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    magnitude = 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {  // 65520 and above round to infinity
    magnitude = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 leaves the rounded subnormal in the low bits
    magnitude = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
  } else {
    magnitude = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | magnitude);
}

}  // namespace bnb
