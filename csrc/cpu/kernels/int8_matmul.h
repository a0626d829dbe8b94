// LLM.int8() products: A (m, k) times the transpose of B (n, k), both int8, exact modulo 2^32, and what follows them.
//
// Both matrices are read where they are: rows of A and rows of B are multiplied along k, a few of each at a time, and
// lanes are summed at the end. With 6 x 4 rows that is one load for 2.4 multiplications of whole vectors. One Zen 5
// core makes 400e9 multiplications a second of 512 x 4096 codes with 4096 rows of B (VNNI), and 80e9 with AVX2.
#pragma once

#include <type_traits>

#include "cpu/kernels/int8_rows.h"
#include "cpu/kernels/simd.h"

namespace bnb {
namespace {

// --- Vectors of codes ------------------------------------------------------------------------------------------------

using VI = hn::Vec<I32>;

// Lanes of sums. The same register as a VI, but GCC 12 keeps a loop's array of these in registers. Intel's type, which
// is one of 64-bit integers, it copies to memory and back in each round, which halves the speed.
#if HWY_TARGET == HWY_SCALAR
using Sums = int32_t;
#else
using Sums = int32_t __attribute__((vector_size(sizeof(VI))));
#endif
HWY_INLINE VI ToVector(Sums sums) { return VI{reinterpret_cast<decltype(VI::raw)>(sums)}; }
HWY_INLINE Sums FromVector(VI v) { return reinterpret_cast<Sums>(v.raw); }

// Codes is a vector of kCodes codes. Dot adds products of codes of A and encoded codes of B to the lanes.
#if defined(__AVX512VNNI__) || HWY_TARGET == HWY_NEON
constexpr hn::ScalableTag<int8_t> narrow;
using Codes = hn::Vec<decltype(narrow)>;
HWY_INLINE Codes LoadCodes(const int8_t* p) { return hn::LoadU(narrow, p); }
#else
constexpr hn::ScalableTag<int16_t> wide;
constexpr hn::Rebind<int8_t, decltype(wide)> narrow;
using Codes = hn::Vec<decltype(wide)>;
HWY_INLINE Codes LoadCodes(const int8_t* p) { return hn::PromoteTo(wide, hn::LoadU(narrow, p)); }
#endif

#if defined(__AVX512VNNI__)
// vpdpbusd multiplies unsigned by signed bytes: B is moved up by 128. Its sums wrap around, unlike those of vpdpbusds.
constexpr bool kMovesB = true;
HWY_INLINE Codes Encode(Codes b) { return hn::Xor(b, hn::Set(narrow, -128)); }
#else
constexpr bool kMovesB = false;
HWY_INLINE Codes Encode(Codes b) { return b; }
#endif

HWY_INLINE Sums Dot(Sums sums, Codes a, Codes b) {
  VI v = ToVector(sums);
#if defined(__AVX512VNNI__)
  v.raw = _mm512_dpbusd_epi32(v.raw, b.raw, a.raw);
#elif defined(__ARM_FEATURE_DOTPROD)
  v.raw = vdotq_s32(v.raw, a.raw, b.raw);
#elif HWY_TARGET == HWY_NEON
  v.raw = vpadalq_s16(v.raw, vmull_s8(vget_low_s8(a.raw), vget_low_s8(b.raw)));
  v.raw = vpadalq_s16(v.raw, vmull_high_s8(a.raw, b.raw));
#else
  v = hn::ReorderWidenMulAccumulate(i32, a, b, v, v);
#endif
  return FromVector(v);
}
constexpr int64_t kCodes = hn::MaxLanes(narrow);

#if HWY_TARGET != HWY_SCALAR
// The 128-bit blocks of a vector added up.
template <size_t kLanesLeft>
HWY_INLINE auto SumOfBlocks(hn::Vec<hn::Simd<int32_t, kLanesLeft, 0>> v) {
  if constexpr (kLanesLeft == 4) {
    return v;
  } else {
    constexpr hn::Simd<int32_t, kLanesLeft / 2, 0> half;
    return SumOfBlocks<kLanesLeft / 2>(hn::LowerHalf(half, v) + hn::UpperHalf(half, v));
  }
}
#endif

// Sums wrap around, which signed integers must not do on their own.
HWY_INLINE int32_t Add(int32_t sum, uint32_t more) { return static_cast<int32_t>(static_cast<uint32_t>(sum) + more); }

// Adds the total of the lanes of dots[i] to sums[i].
HWY_INLINE void AddTotals4(const Sums* dots, int32_t* sums) {
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < 4; ++i) sums[i] = Add(sums[i], static_cast<uint32_t>(dots[i]));
#else
  constexpr hn::RepartitionToWide<I32> i64;
  constexpr hn::Simd<int32_t, 4, 0> four;
  const VI a = ToVector(dots[0]), b = ToVector(dots[1]), c = ToVector(dots[2]), d = ToVector(dots[3]);
  const auto ab = hn::BitCast(i64, hn::InterleaveLower(i32, a, b) + hn::InterleaveUpper(i32, a, b));  // a b a b
  const auto cd = hn::BitCast(i64, hn::InterleaveLower(i32, c, d) + hn::InterleaveUpper(i32, c, d));  // c d c d
  const VI abcd =
      hn::BitCast(i32, hn::InterleaveLower(i64, ab, cd)) + hn::BitCast(i32, hn::InterleaveUpper(i64, ab, cd));
  hn::StoreU(hn::LoadU(four, sums) + SumOfBlocks<kLanes>(abcd), four, sums);
#endif
}

// --- Product ---------------------------------------------------------------------------------------------------------

// Rows of A and of B that are multiplied at a time: their sums, the rows of A and one row of B fill the registers. Of
// those, AVX2 has 16; NEON without dot products needs several for 16-bit products on their way.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SCALAR
constexpr int kRowsA = 2;
#elif HWY_TARGET == HWY_NEON && !defined(__ARM_FEATURE_DOTPROD)
constexpr int kRowsA = 4;
#else
constexpr int kRowsA = 6;
#endif
constexpr int kRowsB = 4;

// The part of the product that a thread makes at a time, kStrip x kPanel, kDepth codes deep: kPanel rows of B (256 KiB)
// stay in the second-level cache while the rows of A pass, each few of which (24 KiB) stay in the first.
constexpr int64_t kStrip = 96;
constexpr int64_t kPanel = 64;
constexpr int64_t kDepth = 4096;
constexpr int64_t kGrain8 = 1 << 20;  // multiplications, about as long as kGrain elements take

// Rows of codes in memory, `stride` apart.
struct Rows8 {
  const int8_t* first;
  int64_t stride;
  HWY_INLINE const int8_t* operator[](int64_t row) const { return first + row * stride; }
};

// Adds the products of the first kRows rows of A with kRowsB rows of B to `sums`; `depth` is a multiple of kCodes.
template <int kRows>
HWY_NOINLINE void MultiplyRows(Rows8 a, const int8_t* const* b, int64_t depth, int32_t* sums) {
  Sums dots[kRows][kRowsB] = {};
  for (int64_t i = 0; i < depth; i += kCodes) {
    Codes x[kRows];
    for (int r = 0; r < kRows; ++r) x[r] = LoadCodes(a[r] + i);
    for (int c = 0; c < kRowsB; ++c) {
      const Codes y = Encode(LoadCodes(b[c] + i));
      for (int r = 0; r < kRows; ++r) dots[r][c] = Dot(dots[r][c], x[r], y);
    }
  }
  for (int r = 0; r < kRows; ++r) AddTotals4(dots[r], sums + r * kPanel);
}

// The same for `rows` rows, at most kRows.
template <int kRows = kRowsA>
HWY_INLINE void MultiplyRows(int64_t rows, Rows8 a, const int8_t* const* b, int64_t depth, int32_t* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return MultiplyRows<kRows - 1>(rows, a, b, depth, sums);
  }
  MultiplyRows<kRows>(a, b, depth, sums);
}

// What moving B adds to the products with a row of A.
HWY_INLINE uint32_t Excess(const int8_t* a, int64_t depth) {
  const Codes zeros = Encode(hn::Zero(hn::DFromV<Codes>()));
  Sums dots = {};
  for (int64_t i = 0; i < depth; i += kCodes) dots = Dot(dots, LoadCodes(a + i), zeros);
  return static_cast<uint32_t>(hn::GetLane(hn::SumOfLanes(i32, ToVector(dots))));
}

// Adds row r of A times row c of B to sums[r * kPanel + c]; `depth` is a multiple of kCodes.
inline void AddProducts(Rows8 a, int64_t rows, Rows8 b, int64_t columns, int64_t depth, int32_t* sums) {
  if (kMovesB) {
    for (int64_t r = 0; r < rows; ++r) {
      const uint32_t excess = Excess(a[r], depth);
      for (int64_t c = 0; c < columns; ++c) sums[r * kPanel + c] = Add(sums[r * kPanel + c], 0 - excess);
    }
  }
  const int64_t height = CeilDiv(rows, CeilDiv(rows, kRowsA));  // 8 rows: 4 + 4 rather than 6 + 2
  for (int64_t r = 0; r < rows; r += height) {
    for (int64_t c = 0; c < columns; c += kRowsB) {
      // Past the last row of B the last one counts again, for sums that nobody reads.
      const int8_t* y[kRowsB];
      for (int j = 0; j < kRowsB; ++j) y[j] = b[Min(c + j, columns - 1)];
      MultiplyRows(Min(height, rows - r), {a[r], a.stride}, y, depth, sums + r * kPanel + c);
    }
  }
}

// Copies `count` codes of each of `rows` rows of `from` to rows of kCodes, filled up with zeros.
inline Rows8 Padded(Rows8 from, int64_t rows, int64_t count, int8_t* to) {
  for (int64_t r = 0; r < rows; ++r) {
    memset(to + r * kCodes, 0, kCodes);
    memcpy(to + r * kCodes, from[r], static_cast<size_t>(count));
  }
  return {to, kCodes};
}

// The product of at most kStrip rows of A and kPanel rows of B, all k codes deep.
inline void MultiplyBlock(const int8_t* a, int64_t rows, const int8_t* b, int64_t columns, int64_t k, int32_t* sums) {
  memset(sums, 0, static_cast<size_t>(rows * kPanel) * sizeof(int32_t));
  const int64_t rest = k % kCodes, whole = k - rest;
  for (int64_t i = 0; i < whole; i += kDepth) {
    AddProducts({a + i, k}, rows, {b + i, k}, columns, Min(kDepth, whole - i), sums);
  }
  if (rest != 0) {
    HWY_ALIGN int8_t x[kStrip * kCodes], y[kPanel * kCodes];
    AddProducts(Padded({a + whole, k}, rows, rest, x), rows, Padded({b + whole, k}, columns, rest, y), columns, kCodes,
                sums);
  }
}

// Calls `finish(row, rows, column, columns, sums)` for blocks of the product, whose rows are kPanel apart.
template <typename Finish>
void MultiplyAll(int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b, int threads, const Finish& finish) {
  const int64_t strips = CeilDiv(m, kStrip), panels = CeilDiv(n, kPanel);
  const int64_t grain = kGrain8 / Max(1, Min(m, kStrip) * Min(n, kPanel) * k) + 1;
  Parallel(strips * panels, grain, threads, [&](int64_t first, int64_t last) {
    HWY_ALIGN int32_t sums[kStrip * kPanel];
    for (int64_t block = first; block < last; ++block) {
      const int64_t row = block % strips * kStrip, column = block / strips * kPanel;
      const int64_t rows = Min(kStrip, m - row), columns = Min(kPanel, n - column);
      MultiplyBlock(a + row * k, rows, b + column * k, columns, k, sums);
      finish(row, rows, column, columns, sums);
    }
  });
}

void Multiply8(int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b, int32_t* out, int threads) {
  MultiplyAll(m, n, k, a, b, threads,
              [&](int64_t row, int64_t rows, int64_t column, int64_t columns, const int32_t* sums) {
                for (int64_t r = 0; r < rows; ++r) {
                  memcpy(out + (row + r) * n + column, sums + r * kPanel, static_cast<size_t>(columns) * sizeof(*out));
                }
              });
}

// --- Dequantise ------------------------------------------------------------------------------------------------------

// Turns pieces of rows of a product into values, in the reference's order of operations. `more` is null or added.
template <typename T>
struct ProductDecoder {
  int64_t n;
  const float *row_stats, *col_stats, *bias;
  T* out;
  void operator()(int64_t row, int64_t column, int64_t count, const int32_t* sums, const float* more) const {
    const VF row_stat = hn::Set(f32, row_stats[row]);
    T* values = out + row * n + column;
    ForVectors(count, [&](int64_t i, auto move) {
      VF v = row_stat * move(col_stats + column + i) * move(sums + i) * hn::Set(f32, 1.0f / (kMaxCode8 * kMaxCode8));
      if (more) v = v + move(more + i);
      if (bias) v = v + move(bias + column + i);
      move(v, values + i);
    });
  }
};

void DequantizeProduct8(int dtype, int64_t m, int64_t n, const int32_t* product, const float* row_stats,
                        const float* col_stats, const float* bias, void* out, int threads) {
  WithType(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const ProductDecoder<T> decode{n, row_stats, col_stats, bias, static_cast<T*>(out)};
    Parallel(m, kGrain / Max(1, n) + 1, threads, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) decode(row, 0, n, product + row * n, nullptr);
    });
  });
}

// Columns of A that are multiplied in fp32 with those of the decoded B, while B is in the cache.
struct Outliers8 {
  int64_t count;
  const int64_t* columns;
  const float* values;  // (m, count)

  // The product of `rows` rows of the values, from row `row` on, with rows of B, whose statistics are `stats`.
  void Multiply(int64_t row, int64_t rows, Rows8 b, const float* stats, int64_t columns_b, float* sums) const {
    constexpr int64_t kGroup = 32, kVectors = kPanel / kLanes;
    memset(sums, 0, static_cast<size_t>(rows * kPanel) * sizeof(float));
    HWY_ALIGN int8_t codes[kGroup * kPanel];
    HWY_ALIGN float weight[kGroup * kPanel] = {};
    for (int64_t first = 0; first < count; first += kGroup) {
      const int64_t group = Min(kGroup, count - first);
      for (int64_t c = 0; c < columns_b; ++c) {
        for (int64_t j = 0; j < group; ++j) codes[j * kPanel + c] = b[c][columns[first + j]];
      }
      for (int64_t j = 0; j < group; ++j) {
        ForVectors(columns_b, [&](int64_t i, auto move) {
          move(move(codes + j * kPanel + i) * move(stats + i) * hn::Set(f32, 1.0f / kMaxCode8),
               weight + j * kPanel + i);
        });
      }
      for (int64_t r = 0; r < rows; ++r) {
        const float* x = values + (row + r) * count + first;
        VF sum[kVectors];
        for (int64_t v = 0; v < kVectors; ++v) sum[v] = Load(sums + r * kPanel + v * kLanes);
        for (int64_t j = 0; j < group; ++j) {
          for (int64_t v = 0; v < kVectors; ++v) {
            sum[v] = hn::MulAdd(hn::Set(f32, x[j]), Load(weight + j * kPanel + v * kLanes), sum[v]);
          }
        }
        for (int64_t v = 0; v < kVectors; ++v) Store(sum[v], sums + r * kPanel + v * kLanes);
      }
    }
  }
};

void ScaledMultiply8(int dtype, int64_t m, int64_t n, int64_t k, const int8_t* a, const int8_t* b,
                     const float* row_stats, const float* col_stats, const float* bias, int64_t outliers,
                     const int64_t* outlier_cols, const float* outlier_values, void* out, int threads) {
  const Outliers8 extra{outliers, outlier_cols, outlier_values};
  WithType(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const ProductDecoder<T> decode{n, row_stats, col_stats, bias, static_cast<T*>(out)};
    MultiplyAll(m, n, k, a, b, threads,
                [&](int64_t row, int64_t rows, int64_t column, int64_t columns, const int32_t* sums) {
                  HWY_ALIGN float more[kStrip * kPanel];
                  if (outliers) extra.Multiply(row, rows, {b + column * k, k}, col_stats + column, columns, more);
                  for (int64_t r = 0; r < rows; ++r) {
                    decode(row + r, column, columns, sums + r * kPanel, outliers ? more + r * kPanel : nullptr);
                  }
                });
  });
}

}  // namespace
}  // namespace bnb
