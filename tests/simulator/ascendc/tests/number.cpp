// Rounding to half and bfloat16_t, for one of every 977 fp32 values and what surrounds every 16-bit value and midpoint.
#include "sim/number.h"

#include <cmath>
#include <cstdlib>
#include <initializer_list>

#include "check.h"
#include "common/dtype.h"

namespace {

using sim::RoundMode;

float Widen(half value) { return static_cast<float>(value); }
float Widen(bfloat16_t value) { return static_cast<float>(value); }

template <typename T, int kFraction>
T Round(float value, RoundMode mode) {
  T result;
  result.bits = sim::Narrow<kFraction>(value, mode);
  return result;
}

template <typename T, typename Other, int kFraction>
void Check(float value) {
  const auto round = [&](RoundMode mode) { return Widen(Round<T, kFraction>(value, mode)); };
  Other nearest;
  bnb::FromFloat(value, &nearest);
  const float rint = round(RoundMode::CAST_RINT);
  if (value != value) {
    CHECK(rint != rint);
    return;
  }
  CHECK(sim::BitCast<uint32_t>(rint) == sim::BitCast<uint32_t>(bnb::ToFloat(nearest)));
  const float low = round(RoundMode::CAST_FLOOR), high = round(RoundMode::CAST_CEIL);
  CHECK(low <= value && value <= high);
  CHECK(round(RoundMode::CAST_TRUNC) == (value < 0 ? high : low));
  const float away = round(RoundMode::CAST_ROUND);
  if (low == high) {
    CHECK(rint == value && away == value && round(RoundMode::CAST_ODD) == value);
    return;
  }
  // Neighbours: one bit pattern apart.
  const int apart =
      Round<T, kFraction>(value, RoundMode::CAST_FLOOR).bits - Round<T, kFraction>(value, RoundMode::CAST_CEIL).bits;
  CHECK(std::abs(apart) == 1);
  CHECK((Round<T, kFraction>(value, RoundMode::CAST_ODD).bits & 1) == 1 || std::isinf(low) || std::isinf(high));
  if (std::isinf(low) || std::isinf(high)) return;
  const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;
  CHECK(away == (value > middle || (value == middle && value > 0) ? high : low));
}

void CheckBoth(uint32_t bits) {
  const float value = sim::BitCast<float>(bits);
  Check<half, bnb::Half, 10>(value);
  Check<bfloat16_t, bnb::BFloat16, 7>(value);
}

}  // namespace

int main() {
  for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 977) CheckBoth(static_cast<uint32_t>(bits));
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    half narrow;
    narrow.bits = static_cast<uint16_t>(bits);
    const uint32_t wide[] = {sim::BitCast<uint32_t>(Widen(narrow)), bits << 16};
    for (const uint32_t centre : wide) {
      for (const uint32_t half_step : {0u, 0x800u, 0x1000u, 0x8000u}) {
        for (int d = -1; d <= 1; ++d) CheckBoth(centre + half_step + static_cast<uint32_t>(d));
      }
    }
    if (std::isfinite(Widen(narrow))) CHECK(half(Widen(narrow)).bits == bits);
  }
  const struct {
    float value;
    RoundMode mode;
    int64_t integer;
  } integers[] = {
      {2.5f, RoundMode::CAST_RINT, 2},    {3.5f, RoundMode::CAST_RINT, 4},     {2.5f, RoundMode::CAST_ROUND, 3},
      {-2.5f, RoundMode::CAST_ROUND, -3}, {-2.5f, RoundMode::CAST_FLOOR, -3},  {-2.5f, RoundMode::CAST_CEIL, -2},
      {-2.7f, RoundMode::CAST_TRUNC, -2}, {300.0f, RoundMode::CAST_RINT, 127}, {-300.0f, RoundMode::CAST_RINT, -128}};
  for (const auto& i : integers) CHECK(sim::ToInteger(i.value, i.mode, -128, 127) == i.integer);
  return 0;
}
