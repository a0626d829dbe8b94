// gemv_4bit: out[b][r] = sum over k of a[b][k] * weight[r][k], for a few rows of `a` and a packed 4-bit weight.
// Products and sums are fp32; the sum is a tree, and there is one cast at the end. The decoded weight never leaves the
// UB.
#include "npu/kernels/decode_4bit.h"

namespace bnb {
namespace npu {

template <typename T>
class Gemv4bit {
 public:
  __aicore__ inline explicit Gemv4bit(const Gemv4bitTiling& tiling)
      : tiling_(tiling),
        layout_{{tiling.decode.blocksize, sizeof(float), tiling.decode.nested != 0},
                sizeof(T),
                tiling.batch,
                tiling.resident},
        decoder_(tiling.decode) {}

  __aicore__ inline void Init(TPipe* pipe, GM_ADDR a, const Packed4& weight, GM_ADDR out) {
    const int64_t rows = tiling_.shares.n;
    a_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a), tiling_.batch * tiling_.columns);
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(out), tiling_.batch * rows);
    const uint32_t tile = tiling_.decode.tile;
    pipe->InitBuffer(a_queue_, layout_.InputBuffers(), layout_.Inputs(tile));
    pipe->InitBuffer(out_queue_, kBuffers, layout_.Out());
    pipe->InitBuffer(weight_, layout_.Weight(tile));
    pipe->InitBuffer(products_, layout_.Products(tile));
    pipe->InitBuffer(sums_, layout_.Sums(tile));
    pipe->InitBuffer(results_, layout_.Results());
    decoder_.Init(pipe, weight, rows * tiling_.columns);
  }

  __aicore__ inline void Process() {
    if (tiling_.resident != 0) {
      Fetch(a_queue_, a_, tiling_.batch * tiling_.resident);
      a_local_ = a_queue_.DeQue<T>();
    }
    const int64_t end = tiling_.shares.End(GetBlockIdx());
    for (int64_t row = tiling_.shares.Begin(GetBlockIdx()); row < end; row += kGemvRows) {
      Rows(row, end - row < kGemvRows ? static_cast<uint32_t>(end - row) : kGemvRows);
    }
    if (tiling_.resident != 0) a_queue_.FreeTensor(a_local_);
    decoder_.Finish();
  }

 private:
  __aicore__ inline void Rows(int64_t first, uint32_t rows) {
    // A data block of partial sums for each result.
    LocalTensor<float> results = results_.Get<float>();
    Duplicate(results, 0.0f, static_cast<int32_t>(tiling_.batch * kGemvRows * 8));
    Then();
    for (uint32_t row = 0; row < rows; ++row) {
      const int64_t start = (first + row) * tiling_.columns, end = start + tiling_.columns;
      int64_t begin = start;
      while (begin < end) {
        const int64_t next = TileEnd(begin, end, tiling_.decode.tile);
        Part(begin, begin - start, static_cast<uint32_t>(next - begin), row);
        begin = next;
      }
    }
    LocalTensor<float> sums = sums_.Get<float>();
    BlockReduceSum(sums, results, static_cast<int32_t>(tiling_.batch * kGemvRows / 8), 64, 1, 1, 8);
    Then();
    LocalTensor<T> out = out_queue_.AllocTensor<T>();
    const uint32_t count = tiling_.batch * kGemvRows;
    if constexpr (sizeof(T) == sizeof(float)) {
      Adds(out, sums, 0.0f, static_cast<int32_t>(count));
    } else {
      Cast(out, sums, RoundMode::CAST_RINT, count);
    }
    Then();
    out_queue_.EnQue(out);
    out = out_queue_.DeQue<T>();
    for (uint32_t b = 0; b < tiling_.batch; ++b) {
      CopyOut(out_[b * tiling_.shares.n + first], out[b * kGemvRows], rows);
    }
    out_queue_.FreeTensor(out);
  }

  // Adds `count` columns from `column` on, whose first weight is element `begin`.
  __aicore__ inline void Part(int64_t begin, int64_t column, uint32_t count, uint32_t row) {
    decoder_.Fetch(begin, count);
    if (tiling_.resident == 0) {
      LocalTensor<T> a = a_queue_.AllocTensor<T>();
      for (uint32_t b = 0; b < tiling_.batch; ++b) {
        CopyIn(a[b * tiling_.decode.tile], a_[b * tiling_.columns + column], count);
      }
      a_queue_.EnQue(a);
    }
    LocalTensor<float> weight = weight_.Get<float>();
    decoder_.Decode(weight, count);
    if (tiling_.resident == 0) a_local_ = a_queue_.DeQue<T>();
    for (uint32_t b = 0; b < tiling_.batch; ++b) {
      LocalTensor<float> products = products_.Get<float>();
      LocalTensor<T> input = tiling_.resident != 0 ? a_local_[b * tiling_.resident + static_cast<uint32_t>(column)]
                                                   : a_local_[b * tiling_.decode.tile];
      if constexpr (sizeof(T) == sizeof(float)) {
        Mul(products, input, weight, static_cast<int32_t>(count));
      } else {
        Cast(products, input, RoundMode::CAST_NONE, count);
        Then();
        Mul(products, products, weight, static_cast<int32_t>(count));
      }
      Then();
      LocalTensor<float> result = results_.Get<float>()[(b * kGemvRows + row) * 8];
      Add(result, result, SumToBlock(products, count), 8);
      Then();
    }
    if (tiling_.resident == 0) a_queue_.FreeTensor(a_local_);
  }

  // Sums `count` values, a multiple of 8, to the 8 of a data block; overwrites them.
  __aicore__ inline LocalTensor<float> SumToBlock(const LocalTensor<float>& values, uint32_t count) {
    LocalTensor<float> from = values, to = sums_.Get<float>();
    while (count > 8) {
      const uint32_t whole = RoundUp(count, 64);
      if (whole != count) {
        Duplicate(from[count], 0.0f, static_cast<int32_t>(whole - count));
        Then();
      }
      BlockReduceSum(to, from, static_cast<int32_t>(whole / 64), 64, 1, 1, 8);
      Then();
      count = whole / 8;
      const LocalTensor<float> next = from;
      from = to;
      to = next;
    }
    return from;
  }

  const Gemv4bitTiling tiling_;
  const Gemv4bitLayout layout_;
  Decoder4bit<float> decoder_;
  GlobalTensor<T> a_, out_;
  LocalTensor<T> a_local_;  // the input, or its part for the tile
  InQueue a_queue_;
  OutQueue out_queue_;
  Scratch weight_, products_, sums_, results_;
};

}  // namespace npu
}  // namespace bnb

#define BNB_ENTRY(dtype, T)                                                                                            \
  extern "C" __global__ __aicore__ void bnb_gemv_4bit_##dtype(GM_ADDR a, GM_ADDR packed, GM_ADDR absmax,               \
                                                              GM_ADDR codes, GM_ADDR map, GM_ADDR offset, GM_ADDR out, \
                                                              bnb::npu::Gemv4bitTiling tiling) {                       \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                    \
    AscendC::TPipe pipe;                                                                                               \
    bnb::npu::Gemv4bit<T> kernel(tiling);                                                                              \
    kernel.Init(&pipe, a, {packed, absmax, codes, map, offset}, out);                                                  \
    kernel.Process();                                                                                                  \
  }
BNB_ENTRY(fp32, float)
BNB_ENTRY(fp16, half)
BNB_ENTRY(bf16, bfloat16_t)
