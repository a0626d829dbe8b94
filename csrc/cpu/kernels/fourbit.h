// NF4 and FP4: quantise and dequantise. The rules are those of docs/numerics.md; results equal the reference's bits.
#pragma once

#include <type_traits>

#include "common/codebooks.h"
#include "cpu/kernels/simd.h"

namespace bnb {
namespace {

constexpr int64_t kMaxBlock4 = 4096;

// --- Quantise --------------------------------------------------------------------------------------------------------

// The number of ascending points below a value, of 15 or 7: a search by halves. It looks the points up in the same
// instructions as levels, and takes a third of those that comparing with each would.
template <int log2_points>
class Search {
 public:
  // `point(i)` gives point i.
  template <typename Point>
  explicit Search(const Point& point) : middle_(point((1 << (log2_points - 1)) - 1)), tables_(Tables(point)) {}

  // NaN is above no point.
  HWY_INLINE hn::Vec<I32> operator()(VF v) const {
    auto below =
        hn::IfThenElseZero(hn::RebindMask(i32, v > hn::Set(f32, middle_)), hn::Set(i32, 1 << (log2_points - 1)));
    for (int step = log2_points - 2; step >= 0; --step) {
      const VF point = tables_.table[step](hn::BitCast(u32, below));
      below = hn::IfThenElse(hn::RebindMask(i32, v > point), below + hn::Set(i32, 1 << step), below);
    }
    return below;
  }

 private:
  // table[s] holds, for the number of points known to be below, the middle of the next 2^(s + 1) - 1 points.
  struct Steps {
    Table16 table[log2_points - 1];
  };
  template <typename Point>
  static Table16 TableOf(const Point& point, int step) {
    HWY_ALIGN float entries[16];
    const int last = (1 << log2_points) - 2;
    for (int i = 0; i < 16; ++i) entries[i] = point(i + (1 << step) - 1 < last ? i + (1 << step) - 1 : last);
    return Table16([&](int i) { return Load(entries + i); });
  }
  template <typename Point>
  static Steps Tables(const Point& point) {
    if constexpr (log2_points == 4) {
      return {{TableOf(point, 0), TableOf(point, 1), TableOf(point, 2)}};
    } else {
      return {{TableOf(point, 0), TableOf(point, 1)}};
    }
  }

  float middle_;
  Steps tables_;
};

struct EncodeNF4 {
  static constexpr int kZero = kZeroNF4;
  EncodeNF4() : search_(PointNF4) {}
  HWY_INLINE hn::Vec<I32> operator()(VF, VF scaled) const { return search_(scaled); }

 private:
  Search<4> search_;
};

struct EncodeFP4 {
  static constexpr int kZero = kZeroFP4;
  EncodeFP4() : search_(PointFP4), codes_([](int i) { return hn::BitCast(f32, hn::LoadU(i32, kCodes + i)); }) {}
  HWY_INLINE hn::Vec<I32> operator()(VF x, VF scaled) const {
    const auto code = hn::BitCast(i32, codes_(hn::BitCast(u32, search_(hn::Abs(scaled)))));
    // The sign is that of the input, as scaling may round a tiny negative value to -0; NaN has code 0 without sign.
    const auto negative = hn::And(x < hn::Zero(f32), scaled == scaled);
    return code + hn::IfThenElseZero(hn::RebindMask(i32, negative), hn::Set(i32, kSignFP4));
  }

 private:
  static constexpr int32_t kCodes[kLevels] = {
      kMagnitudesFP4[0], kMagnitudesFP4[1], kMagnitudesFP4[2], kMagnitudesFP4[3],
      kMagnitudesFP4[4], kMagnitudesFP4[5], kMagnitudesFP4[6], kMagnitudesFP4[7],
  };
  Search<3> search_;
  Table16 codes_;
};

// Joins `count` codes (even), one a byte, two to a byte, the first in the high nibble.
inline void Pack(const uint8_t* codes, int64_t count, uint8_t* packed) {
  constexpr hn::ScalableTag<uint16_t> pair;
  constexpr hn::Rebind<uint8_t, hn::ScalableTag<uint16_t>> byte;
  constexpr int64_t kPairs = HWY_LANES(uint16_t);
  const int64_t bytes = count / 2;
  int64_t i = 0;
  for (; i + kPairs <= bytes; i += kPairs) {
    const auto both = hn::LoadU(pair, reinterpret_cast<const uint16_t*>(codes + 2 * i));  // first | second << 8
    const auto joined = hn::And(hn::Or(hn::ShiftLeft<4>(both), hn::ShiftRight<8>(both)), hn::Set(pair, 0xFF));
    hn::StoreU(hn::TruncateTo(byte, joined), byte, packed + i);
  }
  for (; i < bytes; ++i) packed[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
}

template <typename T, typename Encode>
void QuantizeBlocks4(const T* a, int64_t blocksize, int64_t n, int64_t first, int64_t last, uint8_t* packed,
                     float* absmax) {
  const Encode encode;
  HWY_ALIGN uint8_t codes[kMaxBlock4 + kLanes];
  for (int64_t block = first; block < last; ++block) {
    const T* x = a + block * blocksize;
    const int64_t count = Min(blocksize, n - block * blocksize);
    absmax[block] = AbsMax(x, count);
    Scaler(absmax[block]).Run([&](auto scale) {
      ForVectors(count, [&](int64_t i, auto move) {
        const VF v = move(x + i);
        hn::StoreU(hn::DemoteTo(u8, encode(v, scale(v))), u8, codes + i);
      });
    });
    codes[count] = Encode::kZero;
    Pack(codes, count + count % 2, packed + block * blocksize / 2);
  }
}

void Quantize4(int dtype, int quant_type, int64_t blocksize, int64_t n, const void* a, uint8_t* packed, float* absmax,
               int threads) {
  WithType(dtype, [&](auto* type) {
    const auto* x = static_cast<const std::remove_pointer_t<decltype(type)>*>(a);
    using T = std::remove_pointer_t<decltype(type)>;
    Parallel(CeilDiv(n, blocksize), Max(1, kGrain / blocksize), threads, [&](int64_t first, int64_t last) {
      if (quant_type == BNB_NF4) {
        QuantizeBlocks4<T, EncodeNF4>(x, blocksize, n, first, last, packed, absmax);
      } else {
        QuantizeBlocks4<T, EncodeFP4>(x, blocksize, n, first, last, packed, absmax);
      }
    });
  });
}

// --- Dequantise ------------------------------------------------------------------------------------------------------

// Decodes a block. A block has at least 32 elements, so it pays to make the 16 values its codes stand for, in the
// output's type (level * absmax, cast once), instead of a product and a cast for every element.
template <typename T>
class BlockDecoder {
 public:
  BlockDecoder(const float* levels, float absmax)
      : even_([&](int i) { return Entries(levels + i, absmax); }), odd_([&](int i) {
          return hn::BitCast(f32, hn::ShiftLeft<16>(hn::BitCast(u32, Entries(levels + i, absmax))));
        }) {}
  // kLanes bytes to 2 * kLanes elements.
  HWY_INLINE void operator()(const uint8_t* packed, T* out) const {
    const VU bytes = hn::PromoteTo(u32, hn::LoadU(u8, packed));
    const VF first = even_(hn::ShiftRight<4>(bytes)), second = odd_(LowNibble(bytes));
    hn::StoreU(hn::BitCast(u32, hn::Or(first, second)), u32, reinterpret_cast<uint32_t*>(out));
  }

 private:
  static HWY_INLINE VF Entries(const float* levels, float absmax) {
    return hn::BitCast(f32, Bits16(Load(levels) * hn::Set(f32, absmax), static_cast<const T*>(nullptr)));
  }
  Table16 even_, odd_;
};

template <>
class BlockDecoder<float> {
 public:
  BlockDecoder(const float* levels, float absmax)
      : values_([&](int i) { return Load(levels + i) * hn::Set(f32, absmax); }) {}
  HWY_INLINE void operator()(const uint8_t* packed, float* out) const {
    const VU bytes = hn::PromoteTo(u32, hn::LoadU(u8, packed));
    hn::StoreInterleaved2(values_(hn::ShiftRight<4>(bytes)), values_(LowNibble(bytes)), f32, out);
  }

 private:
  Table16 values_;
};

// Decodes `count` elements of one block, the first of which is in the high nibble of `packed`.
template <typename T>
HWY_INLINE void DecodeBlock4(const float* levels, float absmax, const uint8_t* packed, int64_t count, T* out) {
  const BlockDecoder<T> decode(levels, absmax);
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) decode(packed + i / 2, out + i);
  if (i < count) {
    HWY_ALIGN uint8_t bytes[kLanes] = {};
    HWY_ALIGN T values[2 * kLanes];
    memcpy(bytes, packed + i / 2, static_cast<size_t>(CeilDiv(count - i, 2)));
    decode(bytes, values);
    memcpy(out + i, values, static_cast<size_t>(count - i) * sizeof(T));
  }
}

void Dequantize4(int dtype, const float* levels, int64_t blocksize, int64_t n, const uint8_t* packed,
                 const float* absmax, void* out, int threads) {
  WithType(dtype, [&](auto* type) {
    auto* values = static_cast<decltype(type)>(out);
    Parallel(CeilDiv(n, blocksize), Max(1, kGrain / blocksize), threads, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * blocksize;
        DecodeBlock4(levels, absmax[block], packed + begin / 2, Min(blocksize, n - begin), values + begin);
      }
    });
  });
}

}  // namespace
}  // namespace bnb
