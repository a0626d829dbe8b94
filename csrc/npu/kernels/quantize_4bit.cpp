// quantize_4bit: the largest magnitude of every block, and for every element the code of the level nearest to
// x * (1 / absmax), two in a byte. The rules, with those for zeros, NaN and infinities, are in docs/numerics.md.
//
// A code is the number of decision points below the value. One comparison gives 128 of its answers in 16 bytes, so
// counting is done on those bits: point k lies above point j < k, so mask k is a subset of mask j, `mask j - mask k` as
// integers is "between the two", and disjoint masks add up.
#include "npu/kernels/common.h"

namespace bnb {
namespace npu {

template <typename T>
class Quantize4bit {
 public:
  __aicore__ inline Quantize4bit(TPipe* pipe, const Quantize4bitTiling& tiling)
      : pipe_(pipe), tiling_(tiling), layout_{tiling.blocksize, sizeof(T)} {}

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
    pipe_->InitBuffer(small_, 4 * kBlockBytes);
    Duplicate(Magnitude(), static_cast<uint32_t>(0x7FFFFFFF), kBlockBytes / sizeof(uint32_t));
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
  // Four data blocks of constants and masks.
  __aicore__ inline LocalTensor<uint16_t> Small(uint32_t i) {
    return small_.Get<uint16_t>()[i * kBlockBytes / sizeof(uint16_t)];
  }
  __aicore__ inline LocalTensor<uint32_t> Magnitude() { return Small(0).template ReinterpretCast<uint32_t>(); }
  __aicore__ inline LocalTensor<float> Statistic(uint32_t i) {
    return statistics_.Get<float>()[i * layout_.Statistic(tiling_.tile) / sizeof(float)];
  }
  // Mask k: the values above decision point k, counted from 1. Mask 0: the signs of FP4.
  __aicore__ inline LocalTensor<int16_t> Mask(uint32_t k) {
    return masks_.Get<int16_t>()[k * layout_.Mask(tiling_.tile) / sizeof(int16_t)];
  }
  __aicore__ inline LocalTensor<uint8_t> MaskBits(uint32_t k) { return Mask(k).template ReinterpretCast<uint8_t>(); }

  __aicore__ inline void Tile(int64_t begin, uint32_t count) {
    const uint32_t whole = RoundUp(count, layout_.Granule());
    Fetch(values_queue_, values_[begin], count);
    LocalTensor<T> in = values_queue_.DeQue<T>();
    const uint32_t filled = RoundUp(count, kBlockBytes / sizeof(T));
    if (filled != whole) {
      Duplicate(in[filled], static_cast<T>(0.0f), static_cast<int32_t>(whole - filled));
      Then();
    }
    LocalTensor<float> values;
    if constexpr (sizeof(T) == sizeof(float)) {
      values = in;
    } else {
      values = wide_.Get<float>();
      Cast(values, in, RoundMode::CAST_NONE, whole);
      Then();
    }
    LocalTensor<float> absmax = absmax_queue_.AllocTensor<float>();
    Scale(values, absmax, count, whole);
    absmax_queue_.EnQue(absmax);

    LocalTensor<uint8_t> packed = packed_queue_.AllocTensor<uint8_t>();
    if (tiling_.fp4 != 0) {
      CodesFP4(values, whole);
    } else {
      CodesNF4(values, whole);
    }
    values_queue_.FreeTensor(in);
    Pack(packed, whole);
    packed_queue_.EnQue(packed);

    absmax = absmax_queue_.DeQue<float>();
    CopyOut(absmax_[begin / tiling_.blocksize], absmax, static_cast<uint32_t>(CeilDiv(count, tiling_.blocksize)));
    absmax_queue_.FreeTensor(absmax);
    packed = packed_queue_.DeQue<uint8_t>();
    CopyOut(packed_[begin / 2], packed, (count + 1) / 2);
    packed_queue_.FreeTensor(packed);
  }

  // Scales the values in place.
  __aicore__ inline void Scale(const LocalTensor<float>& values, const LocalTensor<float>& absmax, uint32_t count,
                               uint32_t whole) {
    const uint32_t blocksize = tiling_.blocksize, blocks = whole / blocksize;
    LocalTensor<int32_t> magnitudes = scratch_.Get<int32_t>();
    AndBlock(magnitudes.ReinterpretCast<uint16_t>(), values.ReinterpretCast<uint16_t>(), Small(0), 2 * whole);
    if (tiling_.fp4 != 0) CompareScalar(MaskBits(0), values, 0.0f, CMPMODE::LT, whole);
    Then();
    const LocalTensor<uint8_t> usable = MaskBits(1), zero = MaskBits(2);
    BlockMaxima(absmax, Statistic(0), magnitudes, usable, blocksize, blocks);
    Scaling(Statistic(0), Statistic(1), Statistic(2), absmax, usable, zero, RoundUp(blocks, 64));
    LocalTensor<float> factors = scratch_.Get<float>(), divisors = factors[RoundUp(blocks, 8) * 8];
    const uint8_t repeats = static_cast<uint8_t>(RoundUp(blocks, 8) / 8);
    Brcb(factors, Statistic(0), repeats, BrcbRepeatParams{1, 8});
    Brcb(divisors, Statistic(1), repeats, BrcbRepeatParams{1, 8});
    Then();
    MulByBlock(values, factors, blocksize, blocks);
    Then();
    DivByBlock(values, divisors, blocksize, blocks);
    Then();
    if (count % 2 != 0) {
      // The last half of a byte is the code of 0, in a block with a NaN too.
      VectorThenScalar();
      values.SetValue(count, 0.0f);
      ScalarThenVector();
    }
  }

  __aicore__ inline void Compare(const LocalTensor<float>& values, uint32_t points, uint32_t whole) {
    for (uint32_t i = 0; i < points; ++i) {
      CompareScalar(MaskBits(i + 1), values, tiling_.points[i], CMPMODE::GT, whole);
    }
    Then();
  }

  // Mask `first` becomes mask first - mask (first + step) + mask (first + 2 step) - ..., below `end`.
  __aicore__ inline void Alternate(uint32_t first, uint32_t step, uint32_t end, uint32_t whole) {
    const int32_t words = static_cast<int32_t>(whole / 16);
    for (uint32_t k = first + step, i = 0; k < end; k += step, ++i) {
      if (i % 2 == 0) {
        Sub(Mask(first), Mask(first), Mask(k), words);
      } else {
        Add(Mask(first), Mask(first), Mask(k), words);
      }
      Then();
    }
  }

  // Bit b of the code goes to mask 2^b.
  __aicore__ inline void CodesNF4(const LocalTensor<float>& values, uint32_t whole) {
    Compare(values, kPoints4, whole);
    Alternate(1, 1, 16, whole);
    Alternate(2, 2, 16, whole);
    Alternate(4, 4, 16, whole);
  }

  // The codes of the magnitudes, from small to large, are 0, 1, 6, 7, 4, 5, 2, 3: bits 0 and 1 are those of the rank.
  __aicore__ inline void CodesFP4(const LocalTensor<float>& values, uint32_t whole) {
    LocalTensor<float> magnitudes = scratch_.Get<float>();
    AndBlock(magnitudes.ReinterpretCast<uint16_t>(), values.ReinterpretCast<uint16_t>(), Small(0), 2 * whole);
    Then();
    Compare(magnitudes, kPoints4 / 2, whole);
    CompareScalar(MaskBits(8), magnitudes, kInfinity, CMPMODE::LE, whole);  // not NaN
    Then();
    const int32_t words = static_cast<int32_t>(whole / 16);
    And(Mask(8), Mask(8), Mask(0), words);
    Alternate(1, 1, 8, whole);
    Sub(Mask(3), Mask(2), Mask(6), words);  // bit 2: ranks 2 to 5
    Then();
    Alternate(2, 2, 8, whole);
    Or(Mask(4), Mask(3), Mask(3), words);
    Then();
  }

  // Codes as the signed halves of bytes, so bit 3 counts -8.
  __aicore__ inline void Pack(const LocalTensor<uint8_t>& packed, uint32_t whole) {
    LocalTensor<half> codes = scratch_.Get<half>(), more = codes[tiling_.tile];
    LocalTensor<uint16_t> low_first = more[tiling_.tile].template ReinterpretCast<uint16_t>();
    Duplicate(more, static_cast<half>(-8.0f), static_cast<int32_t>(whole));
    Then();
    Select(codes, MaskBits(8), more, static_cast<half>(0.0f), SELMODE::VSEL_TENSOR_SCALAR_MODE, whole);
    Then();
    for (uint32_t bit = 1; bit <= 4; bit *= 2) {
      Adds(more, codes, static_cast<half>(static_cast<float>(bit)), static_cast<int32_t>(whole));
      Then();
      Select(codes, MaskBits(bit), more, codes, SELMODE::VSEL_TENSOR_TENSOR_MODE, whole);
      Then();
    }
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
