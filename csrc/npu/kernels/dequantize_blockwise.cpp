// dequantize_blockwise: out[i] = cast(map[code i] * absmax[block of i]), with one rounding for the product and one for
// the cast. The map has 256 entries, too many to multiply them for every block first.
#include "npu/kernels/common.h"

namespace bnb {
namespace npu {

template <typename T>
class DequantizeBlockwise {
 public:
  __aicore__ inline DequantizeBlockwise(TPipe* pipe, const DequantizeBlockwiseTiling& tiling)
      : pipe_(pipe), tiling_(tiling), layout_{tiling.blocksize, sizeof(T)} {}

  __aicore__ inline void Init(GM_ADDR codes, GM_ADDR absmax, GM_ADDR map, GM_ADDR out) {
    const int64_t n = tiling_.shares.n;
    codes_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(codes), n);
    absmax_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(absmax), CeilDiv(n, tiling_.blocksize));
    map_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(map), kMapSize);
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(out), n);
    const uint32_t tile = tiling_.tile;
    pipe_->InitBuffer(codes_queue_, kBuffers, layout_.Codes(tile));
    pipe_->InitBuffer(absmax_queue_, kBuffers, layout_.Absmax(tile));
    pipe_->InitBuffer(out_queue_, kBuffers, layout_.Out(tile));
    pipe_->InitBuffer(map_queue_, 1, kMapSize * sizeof(float));
    pipe_->InitBuffer(offsets_, layout_.Offsets(tile));
    pipe_->InitBuffer(copies_, layout_.Copies(tile));
    if constexpr (sizeof(T) != sizeof(float)) pipe_->InitBuffer(products_, layout_.Products(tile));
  }

  __aicore__ inline void Process() {
    Fetch(map_queue_, map_, kMapSize);
    map_local_ = map_queue_.DeQue<float>();
    const int64_t end = tiling_.shares.End(GetBlockIdx());
    int64_t begin = tiling_.shares.Begin(GetBlockIdx());
    while (begin < end) {
      const int64_t next = TileEnd(begin, end, tiling_.tile);
      Tile(begin, static_cast<uint32_t>(next - begin));
      begin = next;
    }
    map_queue_.FreeTensor(map_local_);
  }

 private:
  __aicore__ inline void Tile(int64_t begin, uint32_t count) {
    // A block that is larger than a tile is, for the tile, a block of its size.
    const uint32_t blocksize = layout_.InTile(tiling_.tile);
    const uint32_t blocks = static_cast<uint32_t>(CeilDiv(count, blocksize)), whole = blocks * blocksize;
    Fetch(codes_queue_, codes_[begin], count);
    Fetch(absmax_queue_, absmax_[begin / tiling_.blocksize], blocks);

    LocalTensor<T> out = out_queue_.AllocTensor<T>();
    LocalTensor<float> products;
    if constexpr (sizeof(T) == sizeof(float)) {
      products = out;
    } else {
      products = products_.Get<float>();
    }
    LookUp(products, count, whole);
    LocalTensor<float> absmax = absmax_queue_.DeQue<float>(), copies = copies_.Get<float>();
    Brcb(copies, absmax, static_cast<uint8_t>(RoundUp(blocks, 8) / 8), BrcbRepeatParams{1, 8});
    Then();
    absmax_queue_.FreeTensor(absmax);
    MulByBlock(products, copies, blocksize, blocks);
    Then();
    if constexpr (sizeof(T) != sizeof(float)) {
      Cast(out, products, RoundMode::CAST_RINT, count);
      Then();
    }
    out_queue_.EnQue(out);

    out = out_queue_.DeQue<T>();
    CopyOut(out_[begin], out, count);
    out_queue_.FreeTensor(out);
  }

  // levels[i] = map[code i]; zeros up to the end of the last block.
  __aicore__ inline void LookUp(const LocalTensor<float>& levels, uint32_t count, uint32_t whole) {
    LocalTensor<uint8_t> codes = codes_queue_.DeQue<uint8_t>();
    LocalTensor<half> index = levels.ReinterpretCast<half>();  // room that the levels need only later
    LocalTensor<int32_t> offsets = offsets_.Get<int32_t>();
    const uint32_t filled = RoundUp(count, 8);
    Cast(index, codes, RoundMode::CAST_NONE, filled);
    Then();
    codes_queue_.FreeTensor(codes);
    Muls(index, index, static_cast<half>(4.0f), static_cast<int32_t>(filled));  // bytes: at most 1020, exact in half
    Then();
    Cast(offsets, index, RoundMode::CAST_RINT, filled);
    Then();
    Gather(levels, map_local_, offsets.ReinterpretCast<uint32_t>(), 0, filled);
    if (filled != whole) Duplicate(levels[filled], 0.0f, static_cast<int32_t>(whole - filled));
    Then();
  }

  TPipe* pipe_;
  const DequantizeBlockwiseTiling tiling_;
  const DequantizeBlockwiseLayout layout_;
  GlobalTensor<uint8_t> codes_;
  GlobalTensor<float> absmax_, map_;
  GlobalTensor<T> out_;
  InQueue codes_queue_, absmax_queue_, map_queue_;
  OutQueue out_queue_;
  Scratch offsets_, copies_, products_;
  LocalTensor<float> map_local_;
};

}  // namespace npu
}  // namespace bnb

#define BNB_ENTRY(dtype, T)                                                                                  \
  extern "C" __global__ __aicore__ void bnb_dequantize_blockwise_##dtype(                                    \
      GM_ADDR codes, GM_ADDR absmax, GM_ADDR map, GM_ADDR out, bnb::npu::DequantizeBlockwiseTiling tiling) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                          \
    AscendC::TPipe pipe;                                                                                     \
    bnb::npu::DequantizeBlockwise<T> kernel(&pipe, tiling);                                                  \
    kernel.Init(codes, absmax, map, out);                                                                    \
    kernel.Process();                                                                                        \
  }
BNB_ENTRY(fp32, float)
BNB_ENTRY(fp16, half)
BNB_ENTRY(bf16, bfloat16_t)
