// dequantize_4bit: decodes a whole tensor to GM.
#include "npu/kernels/decode_4bit.h"

namespace bnb {
namespace npu {

template <typename T>
class Dequantize4bit {
 public:
  __aicore__ inline explicit Dequantize4bit(const Dequantize4bitTiling& tiling)
      : tiling_(tiling), decoder_(tiling.decode) {}

  __aicore__ inline void Init(TPipe* pipe, const Packed4& from, GM_ADDR out) {
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(out), tiling_.shares.n);
    pipe->InitBuffer(out_queue_, kBuffers, tiling_.decode.tile * sizeof(T));
    decoder_.Init(pipe, from, tiling_.shares.n);
  }

  __aicore__ inline void Process() {
    const int64_t end = tiling_.shares.End(GetBlockIdx());
    int64_t begin = tiling_.shares.Begin(GetBlockIdx());
    while (begin < end) {
      const int64_t next = TileEnd(begin, end, tiling_.decode.tile);
      const uint32_t count = static_cast<uint32_t>(next - begin);
      decoder_.Fetch(begin, count);
      LocalTensor<T> out = out_queue_.AllocTensor<T>();
      decoder_.Decode(out, count);
      out_queue_.EnQue(out);
      out = out_queue_.DeQue<T>();
      CopyOut(out_[begin], out, count);
      out_queue_.FreeTensor(out);
      begin = next;
    }
    decoder_.Finish();
  }

 private:
  const Dequantize4bitTiling tiling_;
  Decoder4bit<T> decoder_;
  GlobalTensor<T> out_;
  OutQueue out_queue_;
};

}  // namespace npu
}  // namespace bnb

#define BNB_ENTRY(dtype, T)                                                                                        \
  extern "C" __global__ __aicore__ void bnb_dequantize_4bit_##dtype(GM_ADDR packed, GM_ADDR absmax, GM_ADDR codes, \
                                                                    GM_ADDR map, GM_ADDR offset, GM_ADDR out,      \
                                                                    bnb::npu::Dequantize4bitTiling tiling) {       \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                \
    AscendC::TPipe pipe;                                                                                           \
    bnb::npu::Dequantize4bit<T> kernel(tiling);                                                                    \
    kernel.Init(&pipe, {packed, absmax, codes, map, offset}, out);                                                 \
    kernel.Process();                                                                                              \
  }
BNB_ENTRY(fp32, float)
BNB_ENTRY(fp16, half)
BNB_ENTRY(bf16, bfloat16_t)
