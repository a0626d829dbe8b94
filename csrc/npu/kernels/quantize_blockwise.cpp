// quantize_blockwise: the largest magnitude of every block, and for every element the code of the map's level nearest
// to x * (1 / absmax). The rules are in docs/numerics.md.
//
// A code is the number of the 255 decision points below the value; 0 for NaN, for which no comparison holds. Its upper
// 4 bits come from comparing with every 16th point, as in quantize_4bit, the lower 4 from a binary search, which looks
// the point of each step up.
#include "npu/kernels/common.h"

namespace bnb {
namespace npu {

template <typename T>
class QuantizeBlockwise {
 public:
  __aicore__ inline QuantizeBlockwise(TPipe* pipe, const QuantizeBlockwiseTiling& tiling)
      : pipe_(pipe), tiling_(tiling), layout_{{tiling.blocksize, sizeof(T)}} {}

  __aicore__ inline void Init(GM_ADDR values, GM_ADDR points, GM_ADDR codes, GM_ADDR absmax) {
    const int64_t n = tiling_.shares.n;
    values_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(values), n);
    points_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(points), kMapSize - 1);
    codes_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(codes), n);
    absmax_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(absmax), CeilDiv(n, tiling_.blocksize));
    const uint32_t tile = tiling_.tile;
    pipe_->InitBuffer(values_queue_, kBuffers, layout_.In(tile));
    pipe_->InitBuffer(codes_queue_, kBuffers, layout_.Codes(tile));
    pipe_->InitBuffer(absmax_queue_, kBuffers, layout_.Statistic(tile));
    pipe_->InitBuffer(points_queue_, 1, kMapSize * sizeof(float));
    if constexpr (sizeof(T) != sizeof(float)) pipe_->InitBuffer(wide_, layout_.Values(tile));
    pipe_->InitBuffer(scratch_, layout_.Scratch(tile));
    pipe_->InitBuffer(masks_, layout_.kMasks * layout_.Mask(tile));
    pipe_->InitBuffer(statistics_, layout_.kStatistics * layout_.Statistic(tile));
    pipe_->InitBuffer(magnitude_, kBlockBytes);
    Duplicate(magnitude_.Get<uint32_t>(), static_cast<uint32_t>(0x7FFFFFFF), kBlockBytes / sizeof(uint32_t));
    Then();
  }

  __aicore__ inline void Process() {
    for (uint32_t i = 0; i < kPoints4; ++i) coarse_[i] = points_.GetValue(kStep * (i + 1) - 1);
    Fetch(points_queue_, points_, kMapSize - 1);
    points_local_ = points_queue_.DeQue<float>();
    const int64_t end = tiling_.shares.End(GetBlockIdx());
    int64_t begin = tiling_.shares.Begin(GetBlockIdx());
    while (begin < end) {
      const int64_t next = TileEnd(begin, end, tiling_.tile);
      Tile(begin, static_cast<uint32_t>(next - begin));
      begin = next;
    }
    points_queue_.FreeTensor(points_local_);
  }

 private:
  static constexpr uint32_t kStep = 16;  // points between two that all values are compared with

  __aicore__ inline void Tile(int64_t begin, uint32_t count) {
    const uint32_t blocksize = tiling_.blocksize, whole = RoundUp(count, layout_.Granule());
    const Masks masks{masks_.Get<int16_t>(), layout_.Mask(tiling_.tile) / static_cast<uint32_t>(sizeof(int16_t))};
    Fetch(values_queue_, values_[begin], count);
    LocalTensor<T> in = values_queue_.DeQue<T>();
    LocalTensor<float> values = Widen(in, wide_, count, whole);
    LocalTensor<float> absmax = absmax_queue_.AllocTensor<float>();
    ScaleBlocks(values, absmax, statistics_.Get<float>(), layout_.Statistic(tiling_.tile) / sizeof(float),
                scratch_.Get<int32_t>(), magnitude_.Get<uint16_t>(), masks.Bits(0), masks.Bits(1), blocksize,
                whole / blocksize);
    absmax_queue_.EnQue(absmax);

    LocalTensor<uint8_t> codes = codes_queue_.AllocTensor<uint8_t>();
    Search(codes, masks, values, whole);
    values_queue_.FreeTensor(in);
    codes_queue_.EnQue(codes);

    absmax = absmax_queue_.DeQue<float>();
    CopyOut(absmax_[begin / blocksize], absmax, static_cast<uint32_t>(CeilDiv(count, blocksize)));
    absmax_queue_.FreeTensor(absmax);
    codes = codes_queue_.DeQue<uint8_t>();
    CopyOut(codes_[begin], codes, count);
    codes_queue_.FreeTensor(codes);
  }

  // `found` is 4 times the number of points that are known to lie below: the byte offset of the next one. At most 1020,
  // so half holds it.
  __aicore__ inline void Search(const LocalTensor<uint8_t>& codes, const Masks& masks, const LocalTensor<float>& values,
                                uint32_t whole) {
    const int32_t count = static_cast<int32_t>(whole);
    LocalTensor<half> found = scratch_.Get<half>(), next = found[tiling_.tile];
    LocalTensor<float> points = scratch_.Get<float>()[tiling_.tile];
    LocalTensor<half> looked = points.ReinterpretCast<half>();  // room that the points need only later
    LocalTensor<int32_t> offsets = scratch_.Get<int32_t>()[2 * tiling_.tile];
    for (uint32_t i = 0; i < kPoints4; ++i) CompareScalar(masks.Bits(i + 1), values, coarse_[i], CMPMODE::GT, whole);
    Then();
    masks.Count15(whole);
    masks.Sum(found, next, 4.0f * kStep, 4.0f * kStep * 8, whole);
    for (uint32_t step = kStep / 2; step > 0; step /= 2) {
      const float bytes = 4.0f * static_cast<float>(step);
      Adds(looked, found, static_cast<half>(bytes - 4.0f), count);
      Adds(next, found, static_cast<half>(bytes), count);
      Then();
      Cast(offsets, looked, RoundMode::CAST_RINT, whole);
      Then();
      Gather(points, points_local_, offsets.ReinterpretCast<uint32_t>(), 0, whole);
      Then();
      Compare(masks.Bits(0), values, points, CMPMODE::GT, whole);
      Then();
      Select(found, masks.Bits(0), next, found, SELMODE::VSEL_TENSOR_TENSOR_MODE, whole);
      Then();
    }
    Muls(found, found, static_cast<half>(0.25f), count);
    Then();
    Cast(codes, found, RoundMode::CAST_RINT, whole);
    Then();
  }

  TPipe* pipe_;
  const QuantizeBlockwiseTiling tiling_;
  const QuantizeBlockwiseLayout layout_;
  GlobalTensor<T> values_;
  GlobalTensor<float> points_, absmax_;
  GlobalTensor<uint8_t> codes_;
  InQueue values_queue_, points_queue_;
  OutQueue codes_queue_, absmax_queue_;
  Scratch wide_, scratch_, masks_, statistics_, magnitude_;
  LocalTensor<float> points_local_;
  float coarse_[kPoints4];
};

}  // namespace npu
}  // namespace bnb

// `points` are 255 ascending decision points between the levels of the map.
#define BNB_ENTRY(dtype, T)                                                                                      \
  extern "C" __global__ __aicore__ void bnb_quantize_blockwise_##dtype(                                          \
      GM_ADDR values, GM_ADDR points, GM_ADDR codes, GM_ADDR absmax, bnb::npu::QuantizeBlockwiseTiling tiling) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                              \
    AscendC::TPipe pipe;                                                                                         \
    bnb::npu::QuantizeBlockwise<T> kernel(&pipe, tiling);                                                        \
    kernel.Init(values, points, codes, absmax);                                                                  \
    kernel.Process();                                                                                            \
  }
BNB_ENTRY(fp32, float)
BNB_ENTRY(fp16, half)
BNB_ENTRY(bf16, bfloat16_t)
