// What the kernels share. Written for A2 (dav-2201) with the public Ascend C API.
#pragma once

#include "kernel_operator.h"

#define BNB_AICORE __aicore__ inline
#include "npu/tiling.h"

namespace bnb {
namespace npu {

using namespace AscendC;

constexpr uint32_t kRepeatBytes = 256;  // what a vector instruction processes in one repeat
constexpr uint32_t kMaxRepeats = 255;
constexpr int kBuffers = 2;  // one is transferred while the other is computed with

using InQueue = TQue<TPosition::VECIN, kBuffers>;
using OutQueue = TQue<TPosition::VECOUT, kBuffers>;
using Scratch = TBuf<TPosition::VECCALC>;

// --- Transfers -------------------------------------------------------------------------------------------------------

// `count` elements; zeros fill the last data block.
template <typename T>
__aicore__ inline void CopyIn(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count) {
  const uint32_t bytes = count * sizeof(T);
  const uint8_t fill = static_cast<uint8_t>((RoundUp(bytes, kBlockBytes) - bytes) / sizeof(T));
  DataCopyPad(dst, src, DataCopyExtParams{1, bytes, 0, 0, 0},
              DataCopyPadExtParams<T>{true, 0, fill, static_cast<T>(0)});
}

template <typename T>
__aicore__ inline void CopyOut(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count) {
  DataCopyPad(dst, src, DataCopyExtParams{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0});
}

// CopyIn into a buffer of `queue`, which is then ready to be dequeued.
template <typename T>
__aicore__ inline void Fetch(InQueue& queue, const GlobalTensor<T>& src, uint32_t count) {
  LocalTensor<T> tensor = queue.AllocTensor<T>();
  CopyIn(tensor, src, count);
  queue.EnQue(tensor);
}

// --- Operations with one data block as the second operand
// -------------------------------------------------------------

// The block is read again for every block of the first operand: its strides are 0. `op` is a name of the API, since a
// device function cannot be passed.
#define BNB_WITH_BLOCK(op, dst, src, block, count)                                                             \
  do {                                                                                                         \
    const uint32_t lanes = kRepeatBytes / sizeof(decltype((dst).GetValue(0)));                                 \
    const uint32_t repeats = (count) / lanes;                                                                  \
    const BinaryRepeatParams strides{1, 1, 0, 8, 8, 0};                                                        \
    for (uint32_t i = 0; i < repeats; i += kMaxRepeats) {                                                      \
      const uint32_t times = repeats - i < kMaxRepeats ? repeats - i : kMaxRepeats;                            \
      op((dst)[i * lanes], (src)[i * lanes], block, static_cast<uint64_t>(lanes), static_cast<uint8_t>(times), \
         strides);                                                                                             \
    }                                                                                                          \
    if ((count) % lanes != 0) {                                                                                \
      op((dst)[repeats * lanes], (src)[repeats * lanes], block, static_cast<uint64_t>((count) % lanes),        \
         static_cast<uint8_t>(1), strides);                                                                    \
    }                                                                                                          \
  } while (false)

template <typename T>
__aicore__ inline void AndBlock(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& block,
                                uint32_t count) {
  BNB_WITH_BLOCK(And, dst, src, block, count);
}
template <typename T>
__aicore__ inline void MulBlock(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& block,
                                uint32_t count) {
  BNB_WITH_BLOCK(Mul, dst, src, block, count);
}
#undef BNB_WITH_BLOCK

// values = values * block + added
__aicore__ inline void MulBlockAdd(const LocalTensor<half>& values, const LocalTensor<half>& block,
                                   const LocalTensor<half>& added, uint32_t count) {
  const uint32_t lanes = kRepeatBytes / sizeof(half);
  const uint32_t repeats = count / lanes;  // at most kMaxTile / 128 = 128
  const BinaryRepeatParams strides{1, 0, 1, 8, 0, 8};
  if (repeats != 0) {
    FusedMulAdd(values, block, added, static_cast<uint64_t>(lanes), static_cast<uint8_t>(repeats), strides);
  }
  if (count % lanes != 0) {
    FusedMulAdd(values[repeats * lanes], block, added[repeats * lanes], static_cast<uint64_t>(count % lanes),
                static_cast<uint8_t>(1), strides);
  }
}

// --- Order -----------------------------------------------------------------------------------------------------------

// Vector instructions that depend on each other need it between them on A2.
__aicore__ inline void Then() { PipeBarrier<PIPE_V>(); }

// The vector unit waits for what the scalar unit has written.
__aicore__ inline void ScalarThenVector() {
  const TEventID event = GetTPipePtr()->FetchEventID(HardEvent::S_V);
  SetFlag<HardEvent::S_V>(event);
  WaitFlag<HardEvent::S_V>(event);
}

// --- Pieces of the 4-bit kernels -------------------------------------------------------------------------------------

// Exchanges the halves of every byte: element 2i is in the high half on disk and in the low half for int4b_t.
// `to` and `from` differ; `from` is overwritten.
__aicore__ inline void SwapNibbles(const LocalTensor<uint16_t>& to, const LocalTensor<uint16_t>& from,
                                   const LocalTensor<uint16_t>& low, const LocalTensor<uint16_t>& high,
                                   uint32_t words) {
  ShiftRight(to, from, static_cast<uint16_t>(4), static_cast<int32_t>(words));
  Then();
  ShiftLeft(from, from, static_cast<uint16_t>(4), static_cast<int32_t>(words));
  AndBlock(to, to, low, words);
  Then();
  AndBlock(from, from, high, words);
  Then();
  Or(to, to, from, static_cast<int32_t>(words));
  Then();
}

}  // namespace npu
}  // namespace bnb
