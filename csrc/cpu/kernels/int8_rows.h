// LLM.int8() rows: quantise and dequantise. The rules are those of docs/numerics.md; results equal the reference's
// bits.
#pragma once

#include <type_traits>

#include "common/status.h"
#include "cpu/kernels/simd.h"

namespace bnb {
namespace {

constexpr float kMaxCode8 = 127.0f;

// Marks the columns of one vector of magnitudes that reach `threshold`. Other threads mark columns too. In the inputs
// of language models nearly all rows have their outliers in the same few columns: the load spares the cache line.
HWY_NOINLINE void MarkOutliers(VF magnitudes, int64_t count, float threshold, uint8_t* outliers) {
  HWY_ALIGN float values[kLanes];
  Store(magnitudes, values);
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] >= threshold && __atomic_load_n(outliers + i, __ATOMIC_RELAXED) == 0) {
      __atomic_store_n(outliers + i, uint8_t{1}, __ATOMIC_RELAXED);
    }
  }
}

// AbsMax of a row without its outliers, whose columns it marks. A NaN is no outlier.
template <typename T>
float AbsMaxBelow(float threshold, const T* row, int64_t columns, uint8_t* outliers) {
  LargestMagnitude largest;
  ForVectors(columns, [&](int64_t i, auto move) {
    const VF magnitudes = hn::Abs(move(row + i));
    const auto outlier = magnitudes >= hn::Set(f32, threshold);
    largest.Add(hn::IfThenZeroElse(outlier, magnitudes));
    if (HWY_UNLIKELY(!hn::AllFalse(f32, outlier))) {
      MarkOutliers(magnitudes, Min(kLanes, columns - i), threshold, outliers + i);
    }
  });
  return largest.Value();
}

// No value is beyond `absmax`, unless its column becomes zero anyway.
template <typename T>
void QuantizeRow8(const T* row, int64_t columns, float absmax, int8_t* codes) {
  if (!IsFinite(absmax)) {
    memset(codes, 0, static_cast<size_t>(columns));
    return;
  }
  Scaler(absmax, kMaxCode8).Run([&](auto scale) {
    ForVectors(columns, [&](int64_t i, auto move) { move(scale(move(row + i)), codes + i); });
  });
}

void QuantizeRows8(int dtype, int64_t rows, int64_t columns, const void* a, float threshold, int8_t* codes,
                   float* stats, uint8_t* outliers, int threads) {
  WithType(dtype, [&](auto* type) {
    const auto* values = static_cast<const std::remove_pointer_t<decltype(type)>*>(a);
    Parallel(rows, kGrain / Max(1, columns) + 1, threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const auto* row = values + i * columns;
        stats[i] = outliers ? AbsMaxBelow(threshold, row, columns, outliers) : AbsMax(row, columns);
        QuantizeRow8(row, columns, stats[i], codes + i * columns);
      }
    });
  });
}

// Decodes the rows `indices`, or, where that is null, the first `count`.
int DequantizeRows8(int dtype, int64_t rows, int64_t columns, const int8_t* codes, const float* stats,
                    const int64_t* indices, int64_t count, void* out, int threads) {
  for (int64_t i = 0; indices != nullptr && i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= rows) return BNB_INDEX_OUT_OF_RANGE;
  }
  WithType(dtype, [&](auto* type) {
    Parallel(count, kGrain / Max(1, columns) + 1, threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t row = indices == nullptr ? i : indices[i];
        const VF stat = hn::Set(f32, stats[row]), step = hn::Set(f32, 1.0f / kMaxCode8);
        const int8_t* in = codes + row * columns;
        auto* values = static_cast<decltype(type)>(out) + i * columns;
        ForVectors(columns, [&](int64_t j, auto move) { move(move(in + j) * stat * step, values + j); });
      }
    });
  });
  return BNB_OK;
}

}  // namespace
}  // namespace bnb
