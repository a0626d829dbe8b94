// quantize_4bit: the largest magnitude of every block, and for every element the code of the level nearest to
// x * (1 / absmax), two in a byte. The rules, with those for zeros, NaN and infinities, are in docs/numerics.md.
//
// A code is the number of decision points below the value. One comparison gives 128 of its answers in 16 bytes, so
// counting is done on those bits (`Masks`).
#include "npu/kernels/common.h"

namespace bnb {
namespace npu {

template <typename T>
class Quantize4bit {
 public:
  __aicore__ inline Quantize4bit(TPipe* pipe, const Quantize4bitTiling& tiling)
      : pipe_(pipe), tiling_(tiling), layout_{{tiling.blocksize, sizeof(T)}} {}

  __aicore__ inline void Init(GM_ADDR values, GM_ADDR packed, GM_ADDR absmax) {
    const int64_t n = tiling_.shares.n;
    values_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(values), n);
    packed_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(packed), CeilDiv(n, 2));
    absmax_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(absmax), CeilDiv(n, tiling_.blocksize));
    const uint32_t tile = tiling_.tile;
    pipe_->InitBuffer(values_queue_, kBuffers, layout_.In(tile));
    pipe_->InitBuffer(packed_queue_, kBuffers, layout_.Packed(tile));
    pipe_->InitBuffer(absmax_queue_, kBuffers, layout_.Statistic(tile));
    if constexpr (sizeof(T) != sizeof(float)) pipe_->InitBuffer(wide_, layout_.Values(tile));
    pipe_->InitBuffer(scratch_, layout_.Scratch(tile));
    pipe_->InitBuffer(masks_, layout_.kMasks * layout_.Mask(tile));
    pipe_->InitBuffer(statistics_, layout_.kStatistics * layout_.Statistic(tile));
    pipe_->InitBuffer(small_, 3 * kBlockBytes);
    Duplicate(Small(0).template ReinterpretCast<uint32_t>(), static_cast<uint32_t>(0x7FFFFFFF),
              kBlockBytes / sizeof(uint32_t));
    Duplicate(Small(1), static_cast<uint16_t>(0x0F0F), kBlockBytes / sizeof(uint16_t));
    Duplicate(Small(2), static_cast<uint16_t>(0xF0F0), kBlockBytes / sizeof(uint16_t));
    Then();
  }

  __aicore__ inline void Process() {
    const int64_t end = tiling_.shares.End(GetBlockIdx());
    int64_t begin = tiling_.shares.Begin(GetBlockIdx());
    while (begin < end) {
      const int64_t next = TileEnd(begin, end, tiling_.tile);
      Tile(begin, static_cast<uint32_t>(next - begin));
      begin = next;
    }
  }

 private:
  // Data blocks of constants.
  __aicore__ inline LocalTensor<uint16_t> Small(uint32_t i) {
    return small_.Get<uint16_t>()[i * kBlockBytes / sizeof(uint16_t)];
  }

  __aicore__ inline void Tile(int64_t begin, uint32_t count) {
    const uint32_t blocksize = tiling_.blocksize, whole = RoundUp(count, layout_.Granule());
    const Masks masks{masks_.Get<int16_t>(), layout_.Mask(tiling_.tile) / static_cast<uint32_t>(sizeof(int16_t))};
    Fetch(values_queue_, values_[begin], count);
    LocalTensor<T> in = values_queue_.DeQue<T>();
    LocalTensor<float> values = Widen(in, wide_, count, whole);
    LocalTensor<float> absmax = absmax_queue_.AllocTensor<float>();
    // The sign is the input's: scaling may round a tiny negative value to -0.
    if (tiling_.fp4 != 0) CompareScalar(masks.Bits(0), values, 0.0f, CMPMODE::LT, whole);
    ScaleBlocks(values, absmax, statistics_.Get<float>(), layout_.Statistic(tiling_.tile) / sizeof(float),
                scratch_.Get<int32_t>(), Small(0), masks.Bits(1), masks.Bits(2), blocksize, whole / blocksize);
    absmax_queue_.EnQue(absmax);
    if (count % 2 != 0) {
      // The last half of a byte is the code of 0, in a block with a NaN too.
      VectorThenScalar();
      values.SetValue(count, 0.0f);
      ScalarThenVector();
    }

    LocalTensor<uint8_t> packed = packed_queue_.AllocTensor<uint8_t>();
    if (tiling_.fp4 != 0) {
      CodesFP4(masks, values, whole);
    } else {
      Compare15(masks, values, kPoints4, whole);
      masks.Count15(whole);
    }
    values_queue_.FreeTensor(in);
    Pack(packed, masks, whole);
    packed_queue_.EnQue(packed);

    absmax = absmax_queue_.DeQue<float>();
    CopyOut(absmax_[begin / blocksize], absmax, static_cast<uint32_t>(CeilDiv(count, blocksize)));
    absmax_queue_.FreeTensor(absmax);
    packed = packed_queue_.DeQue<uint8_t>();
    CopyOut(packed_[begin / 2], packed, (count + 1) / 2);
    packed_queue_.FreeTensor(packed);
  }

  __aicore__ inline void Compare15(const Masks& masks, const LocalTensor<float>& values, uint32_t points,
                                   uint32_t whole) {
    for (uint32_t i = 0; i < points; ++i) {
      CompareScalar(masks.Bits(i + 1), values, tiling_.points[i], CMPMODE::GT, whole);
    }
    Then();
  }

  // Bit b of the code goes to mask 2^b. The codes of the magnitudes, from small to large, are 0, 1, 6, 7, 4, 5, 2, 3:
  // bits 0 and 1 are those of the rank, bit 2 is set for ranks 2 to 5. Mask 0 holds the signs.
  __aicore__ inline void CodesFP4(const Masks& masks, const LocalTensor<float>& values, uint32_t whole) {
    const int32_t words = static_cast<int32_t>(whole / 16);
    LocalTensor<float> magnitudes = scratch_.Get<float>();
    AndBlock(magnitudes.ReinterpretCast<uint16_t>(), values.ReinterpretCast<uint16_t>(), Small(0), 2 * whole);
    Then();
    CompareScalar(masks.Bits(8), magnitudes, kInfinity, CMPMODE::LE, whole);  // NaN has code 0, without sign
    Compare15(masks, magnitudes, kPoints4 / 2, whole);
    And(masks.Words(8), masks.Words(8), masks.Words(0), words);
    masks.Alternate(1, 1, 8, whole);
    Sub(masks.Words(3), masks.Words(2), masks.Words(6), words);
    Then();
    masks.Alternate(2, 2, 8, whole);
    Or(masks.Words(4), masks.Words(3), masks.Words(3), words);
    Then();
  }

  // Codes as the signed halves of bytes, so bit 3 counts -8.
  __aicore__ inline void Pack(const LocalTensor<uint8_t>& packed, const Masks& masks, uint32_t whole) {
    LocalTensor<half> codes = scratch_.Get<half>(), more = codes[tiling_.tile];
    LocalTensor<uint16_t> low_first = more[tiling_.tile].template ReinterpretCast<uint16_t>();
    masks.Sum(codes, more, 1.0f, -8.0f, whole);
    Cast(low_first.ReinterpretCast<int4b_t>(), codes, RoundMode::CAST_RINT, whole);
    Then();
    SwapNibbles(packed.ReinterpretCast<uint16_t>(), low_first, Small(1), Small(2), whole / 4);
  }

  TPipe* pipe_;
  const Quantize4bitTiling tiling_;
  const Quantize4bitLayout layout_;
  GlobalTensor<T> values_;
  GlobalTensor<uint8_t> packed_;
  GlobalTensor<float> absmax_;
  InQueue values_queue_;
  OutQueue packed_queue_, absmax_queue_;
  Scratch wide_, scratch_, masks_, statistics_, small_;
};

}  // namespace npu
}  // namespace bnb

#define BNB_ENTRY(dtype, T)                                                                                       \
  extern "C" __global__ __aicore__ void bnb_quantize_4bit_##dtype(GM_ADDR values, GM_ADDR packed, GM_ADDR absmax, \
                                                                  bnb::npu::Quantize4bitTiling tiling) {          \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                               \
    AscendC::TPipe pipe;                                                                                          \
    bnb::npu::Quantize4bit<T> kernel(&pipe, tiling);                                                              \
    kernel.Init(values, packed, absmax);                                                                          \
    kernel.Process();                                                                                             \
  }
BNB_ENTRY(fp32, float)
BNB_ENTRY(fp16, half)
BNB_ENTRY(bf16, bfloat16_t)
