// Decoding a run of 4-bit codes to T in UB: level[code i] * scale[block of i], with one rounding for the product and
// one for the cast, for NF4, FP4 or any 16 levels. Scales are fp32, or nested: 8-bit codes of a map, times an fp32
// value for every 256 of them, plus an offset.
//
// Looking up costs the same for 2 and for 4 bytes, and more than all else together, so every element is looked up once
// and is then done: for each block of a tile the 16 products are computed and rounded first, and the table holds them.
#pragma once

#include "npu/kernels/common.h"

namespace bnb {
namespace npu {

// The arguments in GM. `codes`, `map` and `offset` are null unless the statistics are nested.
struct Packed4 {
  GM_ADDR packed, absmax, codes, map, offset;
};

template <typename T>
class Decoder4bit {
 public:
  __aicore__ inline explicit Decoder4bit(const Decode4bitTiling& tiling)
      : tiling_(tiling), layout_{tiling.blocksize, sizeof(T), tiling.nested != 0} {}

  __aicore__ inline void Init(TPipe* pipe, const Packed4& from, int64_t n) {
    const int64_t blocks = CeilDiv(n, tiling_.blocksize);
    packed_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(from.packed), CeilDiv(n, 2));
    absmax_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(from.absmax),
                            layout_.nested ? CeilDiv(blocks, kNestedBlock) : blocks);
    const uint32_t tile = tiling_.tile;
    pipe->InitBuffer(packed_queue_, kBuffers, layout_.Packed(tile));
    pipe->InitBuffer(absmax_queue_, kBuffers, layout_.Absmax(tile));
    pipe->InitBuffer(scratch_, layout_.Scratch(tile));
    pipe->InitBuffer(rows_, layout_.Group(tile) * sizeof(half));
    pipe->InitBuffer(table_, layout_.Table(tile));
    pipe->InitBuffer(levels_, kLevels4 * sizeof(float));
    pipe->InitBuffer(low_, kBlockBytes);
    pipe->InitBuffer(high_, kBlockBytes);
    pipe->InitBuffer(step_, kBlockBytes);
    if (layout_.nested) {
      codes_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(from.codes), blocks);
      map_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(from.map), kMapSize);
      offset_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(from.offset), 1);
      pipe->InitBuffer(codes_queue_, kBuffers, layout_.Codes(tile));
      pipe->InitBuffer(map_queue_, 1, kMapSize * sizeof(float));
      pipe->InitBuffer(scales_, layout_.Scales(tile));
      pipe->InitBuffer(zeros_, kBlockBytes);
      pipe->InitBuffer(second_, kBlockBytes);
    }
    InitConstants();
    if (layout_.nested) {
      bnb::npu::Fetch(map_queue_, map_, kMapSize);
      map_local_ = map_queue_.DeQue<float>();
      offset_value_ = offset_.GetValue(0);
    }
  }

  __aicore__ inline void Finish() {
    if (layout_.nested) map_queue_.FreeTensor(map_local_);
  }

  // Starts the transfers for `count` elements from the block that `begin` starts on; they lie within a tile.
  __aicore__ inline void Fetch(int64_t begin, uint32_t count) {
    const int64_t block = begin / tiling_.blocksize;
    const uint32_t blocks = static_cast<uint32_t>(CeilDiv(count, tiling_.blocksize));
    bnb::npu::Fetch(packed_queue_, packed_[begin / 2], (count + 1) / 2);
    if (layout_.nested) {
      bnb::npu::Fetch(codes_queue_, codes_[block], blocks);
      bnb::npu::Fetch(absmax_queue_, absmax_[block / kNestedBlock], 1);
    } else {
      bnb::npu::Fetch(absmax_queue_, absmax_[block], blocks);
    }
  }

  // Decodes what was fetched: `count` elements, one more if that is odd.
  __aicore__ inline void Decode(const LocalTensor<T>& out, uint32_t count) {
    const uint32_t blocks = static_cast<uint32_t>(CeilDiv(count, tiling_.blocksize));
    LocalTensor<float> absmax = absmax_queue_.DeQue<float>();
    if (layout_.nested) {
      DecodeScales(absmax, blocks);
      FillTable(scales_.Get<float>(), blocks);
    } else {
      FillTable(absmax, blocks);
    }
    absmax_queue_.FreeTensor(absmax);
    LookUp(out, (count + 1) / 2);
  }

 private:
  __aicore__ inline void InitConstants() {
    // int4b_t is signed, so the table begins with the level of code 8.
    LocalTensor<float> levels = levels_.Get<float>();
    for (uint32_t i = 0; i < kLevels4; ++i) levels.SetValue(i, tiling_.levels[(i + kLevels4 / 2) % kLevels4]);
    ScalarThenVector();
    Duplicate(low_.Get<uint16_t>(), static_cast<uint16_t>(0x0F0F), kBlockBytes / sizeof(uint16_t));
    Duplicate(high_.Get<uint16_t>(), static_cast<uint16_t>(0xF0F0), kBlockBytes / sizeof(uint16_t));
    Duplicate(step_.Get<half>(), static_cast<half>(static_cast<float>(sizeof(T))), kBlockBytes / sizeof(half));
    if (layout_.nested) Duplicate(zeros_.Get<uint32_t>(), static_cast<uint32_t>(0), kBlockBytes / sizeof(uint32_t));

    // For every element of a group the byte offset of its block's row in the table, from code 0 of int4b_t on.
    LocalTensor<half> rows = rows_.Get<half>();
    const uint32_t row = kLevels4 * sizeof(T), group = layout_.Group(tiling_.tile);
    Duplicate(rows, static_cast<half>(static_cast<float>(row / 2)), static_cast<int32_t>(tiling_.blocksize));
    for (uint32_t done = tiling_.blocksize; done < group; done *= 2) {
      Then();
      Adds(rows[done], rows, static_cast<half>(static_cast<float>(done / tiling_.blocksize * row)),
           static_cast<int32_t>(done));
    }
    Then();
  }

  // scales = map[code] * absmax + offset, each rounded. Counts are multiples of 8: the codes are followed by zeros.
  __aicore__ inline void DecodeScales(const LocalTensor<float>& absmax, uint32_t blocks) {
    const uint32_t count = RoundUp(blocks, 8);
    LocalTensor<uint8_t> codes = codes_queue_.DeQue<uint8_t>();
    LocalTensor<half> index = scratch_.Get<half>();
    LocalTensor<int32_t> offsets = scratch_.Get<int32_t>()[kNestedBlock];
    LocalTensor<float> scales = scales_.Get<float>(), second = second_.Get<float>();
    Cast(index, codes, RoundMode::CAST_NONE, count);
    Gather(second, absmax, zeros_.Get<uint32_t>(), 0, kBlockBytes / sizeof(float));
    Then();
    codes_queue_.FreeTensor(codes);
    Muls(index, index, static_cast<half>(4.0f), static_cast<int32_t>(count));
    Then();
    Cast(offsets, index, RoundMode::CAST_RINT, count);
    Then();
    Gather(scales, map_local_, offsets.template ReinterpretCast<uint32_t>(), 0, count);
    Then();
    MulBlock(scales, scales, second, count);
    Then();
    Adds(scales, scales, offset_value_, static_cast<int32_t>(count));
    Then();
  }

  // table[block][i] = cast(levels[i] * scales[block])
  __aicore__ inline void FillTable(const LocalTensor<float>& scales, uint32_t blocks) {
    const uint8_t repeats = static_cast<uint8_t>(RoundUp(blocks, 8) / 8);
    LocalTensor<float> levels = levels_.Get<float>(), copies = scratch_.Get<float>();
    LocalTensor<float> products = copies[repeats * 64];
    if constexpr (sizeof(T) == sizeof(float)) products = table_.Get<float>();
    Brcb(copies, scales, repeats, BrcbRepeatParams{1, 8});
    Then();
    // A repeat computes 8 levels for 8 blocks: one data block of the levels for all, one of the copies for each.
    const BinaryRepeatParams strides{2, 0, 1, 16, 0, 8};
    Mul(products, levels, copies, static_cast<uint64_t>(64), repeats, strides);
    Mul(products[8], levels[8], copies, static_cast<uint64_t>(64), repeats, strides);
    Then();
    if constexpr (sizeof(T) != sizeof(float)) {
      Cast(table_.Get<T>(), products, RoundMode::CAST_RINT, repeats * 8 * kLevels4);
      Then();
    }
  }

  __aicore__ inline void LookUp(const LocalTensor<T>& out, uint32_t bytes) {
    const uint32_t words = (bytes + 1) / 2, count = 2 * bytes, group = layout_.Group(tiling_.tile);
    LocalTensor<uint16_t> packed = packed_queue_.DeQue<uint16_t>(), swapped = scratch_.Get<uint16_t>();
    SwapNibbles(swapped, packed, low_.Get<uint16_t>(), high_.Get<uint16_t>(), words);
    packed_queue_.FreeTensor(packed);
    LocalTensor<half> index = out.template ReinterpretCast<half>();  // room that the results need only later
    Cast(index, swapped.ReinterpretCast<int4b_t>(), RoundMode::CAST_NONE, count);
    Then();
    for (uint32_t i = 0; i < count; i += group) {
      MulBlockAdd(index[i], step_.Get<half>(), rows_.Get<half>(), count - i < group ? count - i : group);
    }
    Then();
    LocalTensor<int32_t> offsets = scratch_.Get<int32_t>();
    Cast(offsets, index, RoundMode::CAST_RINT, count);
    Then();
    const uint32_t rows = layout_.kGroup * kLevels4;
    for (uint32_t i = 0; i < count; i += group) {
      Gather(out[i], table_.Get<T>()[i / group * rows], offsets[i].template ReinterpretCast<uint32_t>(), 0,
             count - i < group ? count - i : group);
    }
    Then();
  }

  const Decode4bitTiling tiling_;
  const Decode4bitLayout layout_;
  GlobalTensor<uint8_t> packed_, codes_;
  GlobalTensor<float> absmax_, map_, offset_;
  InQueue packed_queue_, absmax_queue_, codes_queue_, map_queue_;
  Scratch scratch_, rows_, table_, levels_, low_, high_, step_, scales_, zeros_, second_;
  LocalTensor<float> map_local_;
  float offset_value_ = 0;
};

}  // namespace npu
}  // namespace bnb
