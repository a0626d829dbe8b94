// Results that docs/numerics.md gives up to a bound: what a correct one may be.
#pragma once

#include "harness.h"

namespace bnb_test {

struct Interval {
  double low, high;  // NaN: the result must show that it is not finite
};

// `value`, computed with an error of at most `error` and then rounded to `format`. Rounding keeps the order, so it is
// enough to round the ends.
inline Interval Around(double value, double error, const Format& format) {
  if (!isfinite(value)) return {NAN, NAN};
  return {Decode(Encode(value - error, format), format), Decode(Encode(value + error, format), format)};
}

inline void CheckWithin(const void* actual, int64_t count, const Interval* expected, const Format& format) {
  const auto* bytes = static_cast<const uint8_t*>(actual);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    memcpy(&bits, bytes + i * format.bytes, static_cast<size_t>(format.bytes));
    const double value = Decode(bits, format);
    const Interval& range = expected[i];
    if (isnan(range.low) ? !isfinite(value) : range.low <= value && value <= range.high) continue;
    fprintf(stderr, "element %lld: %.9g, expected %.9g to %.9g\n", static_cast<long long>(i), value, range.low,
            range.high);
    CHECK(!"the value is out of bounds");
  }
}

}  // namespace bnb_test
