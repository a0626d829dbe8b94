// 8-bit blockwise: quantise and dequantise with a map of 256 ascending levels. The rules are those of docs/numerics.md;
// results equal the reference's bits.
//
// Times in comments are those of one thread of an AMD EPYC (Zen 5) on 32768 elements, the best of many runs.
#pragma once

#include <type_traits>

#include "cpu/kernels/simd.h"

namespace bnb {
namespace {

constexpr int kMapSize = 256;
constexpr int kPoints = kMapSize - 1;
constexpr int64_t kBuffer = 256;  // elements that go from loop to loop through buffers on the stack

constexpr int64_t kSharedBlock = 1 << 18;  // elements; longer blocks are shared among the threads
constexpr int64_t kTableGrain = 1 << 11;   // elements; below this, a search is faster than making a table

// --- Quantise --------------------------------------------------------------------------------------------------------

// The exact (a + b) / 2, rounded down; formats.exact_midpoints has the reasons.
inline float ExactMidpoint(float a, float b) {
  const float sum = a + b, t = sum - a;
  const float error = (a - (sum - t)) + (b - t);
  const float middle = sum / 2;
  if (!(error < 0)) return middle;
  return FloatOf(middle > 0 ? BitsOf(middle) - 1 : BitsOf(middle) + 1);  // an inexact sum is not 0
}

// Two ways to the codes of scaled values: the number of decision points below each. `scaled(i, move)` gives the vector
// of values from i on.

// For any map: the points as 16 rows of 16, the last of which has 15. The points at the ends of rows that are below the
// value give the row, and those below it in the row the column. With AVX-512 0.72 ns an element; a binary search in
// memory took 9.7.
class SearchedCodes {
 public:
  explicit SearchedCodes(const float* points) {
    for (int i = 0; i < kPoints; ++i) columns_[i % 16][i / 16] = points[i];
  }
  template <typename Scaled>
  HWY_INLINE void operator()(const Scaled& scaled, int64_t count, uint8_t* codes) const {
    ForVectors(count, [&](int64_t i, auto move) {
      const VF v = scaled(i, move);
      auto row = hn::Zero(i32);
      for (int r = 0; r < 15; ++r) row = CountIf(row, v > hn::Set(f32, columns_[15][r]));
      auto code = hn::ShiftLeft<4>(row);
      for (int c = 0; c < 15; ++c) {
        const Table16 column([&](int r) { return Load(columns_[c] + r); });
        code = CountIf(code, v > column(hn::BitCast(u32, row)));
      }
      move(hn::TruncateTo(u8, hn::BitCast(u32, code)), codes + i);
    });
  }

 private:
  HWY_ALIGN float columns_[16][16];
};

// A table, for maps whose points are distinct and not too close. A value becomes a key, an integer that grows with it.
// The key's high bits choose a cell that holds one point at most. Adding the cell's entry to the key turns the high
// bits into the code, and carries a 1 into it if the low bits are above the point. 0.31 ns an element.
class TabulatedCodes {
 public:
  // Returns whether the map has a table of this size.
  bool Build(const float* points) {
    int32_t smallest = kAbove;
    for (int i = 0; i < kPoints; ++i) {
      const int32_t magnitude = static_cast<int32_t>(BitsOf(points[i]) & 0x7FFFFFFFu);
      if (magnitude != 0 && magnitude < smallest) smallest = magnitude;
    }
    nearest_ = smallest > kOctave ? smallest - kOctave : 0;
    HWY_ALIGN int32_t keys[kMapSize];
    ForVectors(kPoints, [&](int64_t i, auto move) { hn::StoreU(Keys(move(points + i)), i32, keys + i); });

    shift_ = 24;  // leaves a code the 8 high bits
    for (int i = 1; i < kPoints; ++i) {
      if (keys[i - 1] >= keys[i]) return false;
      const int differ = 31 - __builtin_clz(static_cast<uint32_t>(keys[i - 1] ^ keys[i]));
      if (differ < shift_) shift_ = differ;
    }
    const int32_t last = (kAbove - nearest_) >> shift_;
    if (last >= kHalf) return false;

    int32_t cell = ~last;
    const auto fill = [&](int32_t end, int32_t code) {
      for (; cell < end; ++cell) entries_[kHalf + cell] = static_cast<uint32_t>(code - cell) << shift_;
    };
    for (int32_t code = 0; code < kPoints; ++code) {
      fill(keys[code] >> shift_, code);
      const uint32_t next = static_cast<uint32_t>(code + 1) << shift_;
      entries_[kHalf + cell++] = next - 1 - static_cast<uint32_t>(keys[code]);
    }
    fill(last + 1, kPoints);
    return true;
  }

  template <typename Scaled>
  HWY_INLINE void operator()(const Scaled& scaled, int64_t count, uint8_t* codes) const {
    HWY_ALIGN int32_t keys[kBuffer];
    HWY_ALIGN uint32_t entries[kBuffer];  // at first their places
    ForVectors(count, [&](int64_t i, auto move) {
      const auto key = Keys(scaled(i, move));
      hn::Store(key, i32, keys + i);
      hn::Store(hn::BitCast(u32, hn::ShiftRightSame(key, shift_) + hn::Set(i32, kHalf)), u32, entries + i);
    });
    // A load for two places and one for each entry. In a trial that was 0.22 ns an element with the vector loops around
    // it, and 0.36 with AVX-512's gather.
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      for (int64_t two = i; two < i + 8; two += 2) {
        uint64_t places;
        memcpy(&places, entries + two, sizeof(places));
        entries[two] = entries_[static_cast<uint32_t>(places)];
        entries[two + 1] = entries_[places >> 32];
      }
    }
    for (; i < count; ++i) entries[i] = entries_[entries[i]];
    ForVectors(count, [&](int64_t i, auto move) {
      const VU sum = hn::Load(u32, entries + i) + hn::BitCast(u32, hn::Load(i32, keys + i));
      move(hn::TruncateTo(u8, hn::ShiftRightSame(sum, shift_)), codes + i);
    });
  }

 private:
  static constexpr int32_t kAbove = 0x40000000;  // the bits of 2
  static constexpr int32_t kOctave = 1 << 23;
  static constexpr int32_t kHalf = 4096;  // cells of each sign: 32 KiB in all; the dynamic maps use 12 and 25

  // Magnitudes count from half the smallest point's, as all below lie between the same two points, or at a point 0; and
  // up to 2, as scaled values end at 1. Values that are not positive have ~magnitude: 0 has -1, just below the positive
  // ones, as a point 0 needs, and NaN comes below all.
  HWY_INLINE hn::Vec<I32> Keys(VF scaled) const {
    const auto nearest = hn::Set(i32, nearest_);
    const auto bounded = hn::Min(hn::Max(hn::BitCast(i32, hn::Abs(scaled)), nearest), hn::Set(i32, kAbove));
    const auto magnitude = bounded - nearest;
    const auto positive = hn::RebindMask(i32, scaled > hn::Zero(f32));
    return hn::IfThenElse(positive, magnitude, hn::Not(magnitude));
  }

  int32_t nearest_;
  int shift_;
  uint32_t entries_[2 * kHalf];
};

// The codes of `count` elements of one block.
template <typename T, typename Codes>
void EncodeBlock8(const Codes& map, const T* x, int64_t count, float absmax, uint8_t* codes) {
  Scaler(absmax).Run([&](auto scale) {
    for (int64_t start = 0; start < count; start += kBuffer) {
      const T* part = x + start;
      map([&](int64_t i, auto move) { return scale(move(part + i)); }, Min(kBuffer, count - start), codes + start);
    }
  });
}

// AbsMax on several threads. The bits of magnitudes are in the order of the magnitudes, with NaN last.
template <typename T>
float ParallelAbsMax(const T* x, int64_t count, int threads) {
  uint32_t largest = 0;
  ParallelElements(count, threads, [&](int64_t begin, int64_t end) {
    const uint32_t found = BitsOf(AbsMax(x + begin, end - begin));
    uint32_t seen = __atomic_load_n(&largest, __ATOMIC_RELAXED);
    while (seen < found &&
           !__atomic_compare_exchange_n(&largest, &seen, found, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  });
  return FloatOf(largest);
}

template <typename T, typename Codes>
void QuantizeBlocks8(const Codes& map, int64_t blocksize, int64_t n, const T* a, uint8_t* codes, float* absmax,
                     int threads) {
  if (blocksize <= kSharedBlock) {
    Parallel(CeilDiv(n, blocksize), Max(1, kGrain / blocksize), threads, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * blocksize, count = Min(blocksize, n - begin);
        absmax[block] = AbsMax(a + begin, count);
        EncodeBlock8(map, a + begin, count, absmax[block], codes + begin);
      }
    });
    return;
  }
  for (int64_t begin = 0; begin < n; begin += blocksize) {
    const int64_t count = Min(blocksize, n - begin);
    const float largest = ParallelAbsMax(a + begin, count, threads);
    absmax[begin / blocksize] = largest;
    ParallelElements(count, threads, [&](int64_t first, int64_t last) {
      EncodeBlock8(map, a + begin + first, last - first, largest, codes + begin + first);
    });
  }
}

void QuantizeBlockwise(int dtype, int64_t blocksize, int64_t n, const void* a, const float* levels, uint8_t* codes,
                       float* absmax, int threads) {
  blocksize = Min(blocksize, Max(n, 1));  // so that no sum of the two overflows
  float points[kPoints];
  for (int i = 0; i < kPoints; ++i) points[i] = ExactMidpoint(levels[i], levels[i + 1]);
  TabulatedCodes table;
  const bool tabulated = n >= kTableGrain && table.Build(points);
  WithType(dtype, [&](auto* type) {
    const auto* x = static_cast<const std::remove_pointer_t<decltype(type)>*>(a);
    if (tabulated) {
      QuantizeBlocks8(table, blocksize, n, x, codes, absmax, threads);
    } else {
      QuantizeBlocks8(SearchedCodes(points), blocksize, n, x, codes, absmax, threads);
    }
  });
}

// --- Dequantise ------------------------------------------------------------------------------------------------------

// Looks up the levels of up to kStep codes.
class Levels {
#if HWY_TARGET <= HWY_AVX3 && !HWY_ARCH_ARM
 public:
  static constexpr int64_t kStep = 32;
  // The high and the low halves of the levels are two tables of 16-bit numbers, as one instruction looks up 32 indices
  // among 64 of those, but only 16 among 32 numbers of 32 bits (0.07 and 0.29 ns an element; gather 0.35).
  explicit Levels(const float* levels) {
    HWY_ALIGN uint16_t high[kMapSize], low[kMapSize];
    for (int i = 0; i < kMapSize; ++i) {
      high[i] = static_cast<uint16_t>(BitsOf(levels[i]) >> 16);
      low[i] = static_cast<uint16_t>(BitsOf(levels[i]));
    }
    for (int i = 0; i < 8; ++i) {
      high_[i] = _mm512_load_si512(high + 32 * i);
      low_[i] = _mm512_load_si512(low + 32 * i);
    }
  }
  HWY_INLINE void operator()(const uint8_t* codes, int64_t count, float* values) const {
    HWY_ALIGN uint8_t whole[kStep] = {};
    if (count < kStep) codes = static_cast<uint8_t*>(memcpy(whole, codes, static_cast<size_t>(count)));
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    // Unpacking interleaves within each quarter of a register; this order of the indices makes up for it.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i index = _mm512_permutexvar_epi64(order, _mm512_cvtepu8_epi16(bytes));
    const __mmask32 bit6 = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
    const __mmask32 bit7 = _mm512_test_epi16_mask(index, _mm512_set1_epi16(128));
    const auto look_up = [&](const __m512i* table) {
      const auto quarter = [&](int i) { return _mm512_permutex2var_epi16(table[2 * i], index, table[2 * i + 1]); };
      return _mm512_mask_blend_epi16(bit7, _mm512_mask_blend_epi16(bit6, quarter(0), quarter(1)),
                                     _mm512_mask_blend_epi16(bit6, quarter(2), quarter(3)));
    };
    const __m512i high = look_up(high_), low = look_up(low_);
    _mm512_store_si512(values, _mm512_unpacklo_epi16(low, high));
    _mm512_store_si512(values + 16, _mm512_unpackhi_epi16(low, high));
  }

 private:
  __m512i high_[8], low_[8];
#else
 public:
  static constexpr int64_t kStep = kBuffer;
  explicit Levels(const float* levels) : levels_(levels) {}
  HWY_INLINE void operator()(const uint8_t* codes, int64_t count, float* values) const {
    for (int64_t i = 0; i < count; ++i) values[i] = levels_[codes[i]];
  }

 private:
  const float* levels_;
#endif
};

// Decodes `count` elements of one block.
template <typename T>
HWY_INLINE void DecodeBlock8(const Levels& map, const uint8_t* codes, int64_t count, float absmax, T* out) {
  const VF factor = hn::Set(f32, absmax);
  HWY_ALIGN float levels[Levels::kStep];
  for (int64_t start = 0; start < count; start += Levels::kStep) {
    const int64_t part = Min(Levels::kStep, count - start);
    map(codes + start, part, levels);
    ForVectors(part, [&](int64_t i, auto move) { move(move(levels + i) * factor, out + start + i); });
  }
}

void DequantizeBlockwise(int dtype, int64_t blocksize, int64_t n, const uint8_t* codes, const float* absmax,
                         const float* levels, void* out, int threads) {
  blocksize = Min(blocksize, Max(n, 1));
  WithType(dtype, [&](auto* type) {
    auto* values = static_cast<decltype(type)>(out);
    ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
      const Levels map(levels);
      for (int64_t i = begin; i < end;) {
        const int64_t block = i / blocksize, count = Min(end, (block + 1) * blocksize) - i;
        DecodeBlock8(map, codes + i, count, absmax[block], values + i);
        i += count;
      }
    });
  });
}

}  // namespace
}  // namespace bnb
