// half and bfloat16_t as the kernels see them, and correct rounding to them in every RoundMode.
#pragma once

#include <cstdint>
#include <cstring>

namespace AscendC {
enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
struct int4b_t {};  // never stored: two share a byte
}  // namespace AscendC

namespace sim {

using AscendC::RoundMode;

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Whether `kept`, of a value of that sign, grows by one for the bits `rest` of weight `2 * half` that are cut off.
inline bool RoundsUp(uint64_t kept, uint64_t rest, uint64_t half, bool negative, RoundMode mode) {
  switch (mode) {
    case RoundMode::CAST_NONE:
    case RoundMode::CAST_RINT:
      return rest > half || (rest == half && (kept & 1) != 0);
    case RoundMode::CAST_ROUND:
      return rest >= half;
    case RoundMode::CAST_FLOOR:
      return rest != 0 && negative;
    case RoundMode::CAST_CEIL:
      return rest != 0 && !negative;
    case RoundMode::CAST_TRUNC:
      return false;
    case RoundMode::CAST_ODD:
      return rest != 0 && (kept & 1) == 0;
  }
  return false;
}

// The bits of `value` in a 16-bit format with `kFraction` fraction bits; subnormals are kept. Beyond the range: an
// infinity, or the largest value if the mode rounds away from infinity.
template <int kFraction>
uint16_t Narrow(float value, RoundMode mode) {
  constexpr int kExponentBits = 15 - kFraction;
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr uint32_t kInfinity = ((1u << kExponentBits) - 1) << kFraction;
  const uint32_t bits = BitCast<uint32_t>(value);
  const bool negative = (bits >> 31) != 0;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = negative ? 0x8000u : 0;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | kInfinity | (1u << (kFraction - 1)));
  if (magnitude == 0x7F800000u) return static_cast<uint16_t>(sign | kInfinity);
  int exponent = static_cast<int>(magnitude >> 23);
  uint64_t fraction = magnitude & 0x7FFFFFu;
  if (exponent == 0) {
    exponent = 1;
  } else {
    fraction |= 0x800000u;
  }
  const int target = exponent - 127 + kBias;  // biased exponent of the result
  int cut = 23 - kFraction;
  if (target < 1) cut += 1 - target;
  if (cut > 40) cut = 40;
  const uint64_t kept = fraction >> cut;
  const uint64_t rest = fraction & ((uint64_t{1} << cut) - 1);
  const uint64_t up = RoundsUp(kept, rest, uint64_t{1} << (cut - 1), negative, mode) ? 1 : 0;
  // The leading bit of `kept` adds one to the exponent; a carry does as well, as it should.
  const uint64_t result = (static_cast<uint64_t>(target < 1 ? 0 : target - 1) << kFraction) + kept + up;
  if (result < kInfinity) return static_cast<uint16_t>(sign | result);
  const bool to_infinity = mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT ||
                           mode == RoundMode::CAST_ROUND || (mode == RoundMode::CAST_CEIL && !negative) ||
                           (mode == RoundMode::CAST_FLOOR && negative);
  return static_cast<uint16_t>(sign | (to_infinity ? kInfinity : kInfinity - 1));
}

inline float WidenHalf(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return BitCast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  const float value =
      magnitude < 0x400u ? static_cast<float>(magnitude) * 0x1p-24f : BitCast<float>((magnitude << 13) + (112u << 23));
  return BitCast<float>(sign | BitCast<uint32_t>(value));
}

// The integer next to `value`, by mode, clamped to [lowest, highest]; 0 for NaN.
inline int64_t ToInteger(float value, RoundMode mode, int64_t lowest, int64_t highest) {
  if (value != value) return 0;
  if (value <= static_cast<float>(lowest)) return lowest;
  if (value >= static_cast<float>(highest)) return highest;
  const bool negative = value < 0;
  const double magnitude = negative ? -static_cast<double>(value) : static_cast<double>(value);
  const uint64_t kept = static_cast<uint64_t>(magnitude);
  const uint64_t rest = magnitude == static_cast<double>(kept)         ? 0
                        : magnitude - static_cast<double>(kept) == 0.5 ? 2
                        : magnitude - static_cast<double>(kept) < 0.5  ? 1
                                                                       : 3;
  const int64_t rounded = static_cast<int64_t>(kept + (RoundsUp(kept, rest, 2, negative, mode) ? 1 : 0));
  return negative ? -rounded : rounded;
}

}  // namespace sim

// On the host half is a class: `constexpr half x = 1.0` does not compile, with CANN's own host headers neither.
struct half {
  half() = default;
  explicit half(float value) : bits(sim::Narrow<10>(value, sim::RoundMode::CAST_RINT)) {}
  explicit operator float() const { return sim::WidenHalf(bits); }
  uint16_t bits;
};

struct bfloat16_t {
  bfloat16_t() = default;
  explicit bfloat16_t(float value) : bits(sim::Narrow<7>(value, sim::RoundMode::CAST_RINT)) {}
  explicit operator float() const { return sim::BitCast<float>(static_cast<uint32_t>(bits) << 16); }
  uint16_t bits;
};
