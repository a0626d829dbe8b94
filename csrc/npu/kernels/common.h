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

constexpr float kLargest = 3.4028234663852886e38f;  // of fp32
constexpr float kInfinity = __builtin_inff();

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

// --- One data block as the second operand ----------------------------------------------------------------------------

// The block is read again for every block of the first operand: its strides are 0. `op` is a name of the API, since a
// device function cannot be passed.
#define BNB_WITH_BLOCK(op, dst, src, block, count)                                                             \
  do {                                                                                                         \
    const uint32_t lanes = kRepeatBytes / sizeof(T);                                                           \
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

// values[b][i] = values[b][i] op scales[b], for `blocks` blocks of `blocksize` fp32 values. `copies` has a data block
// of equal values for each block, as Brcb makes it. A repeat takes 64 values of one block; strides between blocks fit
// in their 8 bits up to a blocksize of 1024.
#define BNB_BY_BLOCK(op, values, copies, blocksize, blocks)                                                      \
  do {                                                                                                           \
    const uint32_t lanes = (blocksize) < 64 ? (blocksize) : 64;                                                  \
    if ((blocksize) <= 1024) {                                                                                   \
      const uint8_t stride = static_cast<uint8_t>((blocksize) / 8);                                              \
      for (uint32_t b = 0; b < (blocks); b += kMaxRepeats) {                                                     \
        const uint8_t times = static_cast<uint8_t>((blocks) - b < kMaxRepeats ? (blocks) - b : kMaxRepeats);     \
        for (uint32_t i = 0; i < (blocksize); i += lanes) {                                                      \
          LocalTensor<float> part = (values)[b * (blocksize) + i];                                               \
          op(part, part, (copies)[b * 8], static_cast<uint64_t>(lanes), times,                                   \
             BinaryRepeatParams{1, 1, 0, stride, stride, 1});                                                    \
        }                                                                                                        \
      }                                                                                                          \
    } else {                                                                                                     \
      for (uint32_t b = 0; b < (blocks); ++b) {                                                                  \
        LocalTensor<float> part = (values)[b * (blocksize)];                                                     \
        op(part, part, (copies)[b * 8], static_cast<uint64_t>(lanes), static_cast<uint8_t>((blocksize) / lanes), \
           BinaryRepeatParams{1, 1, 0, 8, 8, 0});                                                                \
      }                                                                                                          \
    }                                                                                                            \
  } while (false)

__aicore__ inline void MulByBlock(const LocalTensor<float>& values, const LocalTensor<float>& copies,
                                  uint32_t blocksize, uint32_t blocks) {
  BNB_BY_BLOCK(Mul, values, copies, blocksize, blocks);
}
__aicore__ inline void DivByBlock(const LocalTensor<float>& values, const LocalTensor<float>& copies,
                                  uint32_t blocksize, uint32_t blocks) {
  BNB_BY_BLOCK(Div, values, copies, blocksize, blocks);
}
#undef BNB_BY_BLOCK

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

// And the other way round.
__aicore__ inline void VectorThenScalar() {
  const TEventID event = GetTPipePtr()->FetchEventID(HardEvent::V_S);
  SetFlag<HardEvent::V_S>(event);
  WaitFlag<HardEvent::V_S>(event);
}

// --- Statistics ------------------------------------------------------------------------------------------------------

// The largest magnitude of each of `blocks` blocks, NaN if the block holds one. What the fp32 reductions make of NaN is
// not documented. So magnitudes are compared as integers, among which NaN is largest, down to 8 values a block; of
// these the sum is NaN if one is. `scratch` begins with the magnitudes and has room for half as many values after them;
// `absmax` and `sums` have room for `blocks` values in whole repeats. Leaves zeros after the last block.
__aicore__ inline void BlockMaxima(const LocalTensor<float>& absmax, const LocalTensor<float>& sums,
                                   const LocalTensor<int32_t>& scratch, const LocalTensor<uint8_t>& mask,
                                   uint32_t blocksize, uint32_t blocks) {
  LocalTensor<int32_t> from = scratch, to = scratch[blocks * blocksize];
  for (uint32_t width = blocksize; width > 8; width /= 2) {
    // Data block d is the maximum of data blocks 2d and 2d + 1.
    const uint32_t count = blocks * width / 2, repeats = count / 64;  // at most kMaxTile / 128
    const BinaryRepeatParams strides{1, 2, 2, 8, 16, 16};
    if (repeats != 0) Max(to, from, from[8], static_cast<uint64_t>(64), static_cast<uint8_t>(repeats), strides);
    if (count % 64 != 0) {
      Max(to[repeats * 64], from[repeats * 128], from[repeats * 128 + 8], static_cast<uint64_t>(count % 64),
          static_cast<uint8_t>(1), strides);
    }
    Then();
    const LocalTensor<int32_t> next = from;
    from = to;
    to = next;
  }
  const uint32_t rows = RoundUp(blocks, 8), count = RoundUp(blocks, 64);
  if (rows != blocks) Duplicate(from[blocks * 8], 0, static_cast<int32_t>((rows - blocks) * 8));
  Duplicate(absmax, 0.0f, static_cast<int32_t>(count));
  Duplicate(sums, 0.0f, static_cast<int32_t>(count));
  Then();
  const LocalTensor<float> rest = from.ReinterpretCast<float>();
  BlockReduceMax(absmax, rest, static_cast<int32_t>(rows / 8), 64, 1, 1, 8);
  BlockReduceSum(sums, rest, static_cast<int32_t>(rows / 8), 64, 1, 1, 8);
  Then();
  CompareScalar(mask, sums, kInfinity, CMPMODE::LE, count);
  Then();
  Select(absmax, mask, absmax, sums, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
  Then();
}

// For blocks with these maxima, what a value is multiplied with and then divided by: (1 / absmax, 1), or (1, absmax)
// where that reciprocal is not finite, or (1, 1) where absmax is 0. `count` is a multiple of 64.
__aicore__ inline void Scaling(const LocalTensor<float>& factor, const LocalTensor<float>& divisor,
                               const LocalTensor<float>& ones, const LocalTensor<float>& absmax,
                               const LocalTensor<uint8_t>& usable, const LocalTensor<uint8_t>& zero, uint32_t count) {
  Duplicate(ones, 1.0f, static_cast<int32_t>(count));
  CompareScalar(zero, absmax, 0.0f, CMPMODE::EQ, count);
  Then();
  Div(factor, ones, absmax, static_cast<int32_t>(count));
  Then();
  CompareScalar(usable, factor, kLargest, CMPMODE::LE, count);
  Then();
  Select(factor, usable, factor, 1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
  Select(divisor, usable, ones, absmax, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
  Then();
  Select(divisor, zero, ones, divisor, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
  Then();
}

// Scales `blocks` blocks of `values` in place and gives their `absmax`. `statistics` has room for three times as many
// as `absmax`, in distances of `room` values; `scratch` one and a half times as many as `values`; `magnitude` is a data
// block of 0x7FFFFFFF. Overwrites masks 1 and 2.
__aicore__ inline void ScaleBlocks(const LocalTensor<float>& values, const LocalTensor<float>& absmax,
                                   const LocalTensor<float>& statistics, uint32_t room,
                                   const LocalTensor<int32_t>& scratch, const LocalTensor<uint16_t>& magnitude,
                                   const LocalTensor<uint8_t>& mask1, const LocalTensor<uint8_t>& mask2,
                                   uint32_t blocksize, uint32_t blocks) {
  const LocalTensor<float> sums = statistics, factor = statistics, divisor = statistics[room],
                           ones = statistics[2 * room];
  AndBlock(scratch.ReinterpretCast<uint16_t>(), values.ReinterpretCast<uint16_t>(), magnitude, 2 * blocks * blocksize);
  Then();
  BlockMaxima(absmax, sums, scratch, mask1, blocksize, blocks);
  Scaling(factor, divisor, ones, absmax, mask1, mask2, RoundUp(blocks, 64));
  const uint32_t rows = RoundUp(blocks, 8);
  const LocalTensor<float> factors = scratch.ReinterpretCast<float>(), divisors = factors[rows * 8];
  Brcb(factors, factor, static_cast<uint8_t>(rows / 8), BrcbRepeatParams{1, 8});
  Brcb(divisors, divisor, static_cast<uint8_t>(rows / 8), BrcbRepeatParams{1, 8});
  Then();
  MulByBlock(values, factors, blocksize, blocks);
  Then();
  DivByBlock(values, divisors, blocksize, blocks);
  Then();
}

// fp32 values of the `count` elements that lie in `in`, and zeros up to `whole`: `in` itself, or `wide`.
template <typename T>
__aicore__ inline LocalTensor<float> Widen(const LocalTensor<T>& in, Scratch& wide, uint32_t count, uint32_t whole) {
  const uint32_t filled = RoundUp(count, kBlockBytes / sizeof(T));  // by CopyIn
  if (filled != whole) {
    if constexpr (sizeof(T) == sizeof(float)) {
      Duplicate(in[filled], 0.0f, static_cast<int32_t>(whole - filled));
    } else {  // the bits of zero: bf16 has no scalars on the chip
      Duplicate(in[filled].template ReinterpretCast<uint16_t>(), static_cast<uint16_t>(0),
                static_cast<int32_t>(whole - filled));
    }
    Then();
  }
  if constexpr (sizeof(T) == sizeof(float)) {
    return in;
  } else {
    LocalTensor<float> values = wide.Get<float>();
    Cast(values, in, RoundMode::CAST_NONE, whole);
    Then();
    return values;
  }
}

// --- Counting on masks -----------------------------------------------------------------------------------------------

// Masks of one bit an element, at a distance of `stride` words. Mask k, from 1 on, holds the elements above the k-th of
// some ascending points. So mask k is a subset of mask j < k, `mask j - mask k` as integers is "between the two", and
// disjoint masks add up; neither overflows.
struct Masks {
  LocalTensor<int16_t> all;
  uint32_t stride;

  __aicore__ inline LocalTensor<int16_t> Words(uint32_t k) const { return all[k * stride]; }
  __aicore__ inline LocalTensor<uint8_t> Bits(uint32_t k) const { return Words(k).ReinterpretCast<uint8_t>(); }

  // Mask `first` becomes mask first - mask (first + step) + mask (first + 2 step) - ..., below `end`, for `count`
  // elements: bit `first` of the number of points below.
  __aicore__ inline void Alternate(uint32_t first, uint32_t step, uint32_t end, uint32_t count) const {
    const int32_t words = static_cast<int32_t>(count / 16);
    for (uint32_t k = first + step; k < end; k += step) {
      if ((k - first) / step % 2 != 0) {
        Sub(Words(first), Words(first), Words(k), words);
      } else {
        Add(Words(first), Words(first), Words(k), words);
      }
      Then();
    }
  }
  // Of the number of 15 points below, bit b goes to mask 2^b.
  __aicore__ inline void Count15(uint32_t count) const {
    Alternate(1, 1, 16, count);
    Alternate(2, 2, 16, count);
    Alternate(4, 4, 16, count);
  }
  // sums = unit * (bits in masks 1, 2 and 4) + highest * (bit in mask 8), for `count` elements. Overwrites `more`.
  __aicore__ inline void Sum(const LocalTensor<half>& sums, const LocalTensor<half>& more, float unit, float highest,
                             uint32_t count) const {
    Duplicate(more, static_cast<half>(highest), static_cast<int32_t>(count));
    Then();
    Select(sums, Bits(8), more, static_cast<half>(0.0f), SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
    Then();
    for (uint32_t bit = 1; bit <= 4; bit *= 2) {
      Adds(more, sums, static_cast<half>(unit * static_cast<float>(bit)), static_cast<int32_t>(count));
      Then();
      Select(sums, Bits(bit), more, sums, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
      Then();
    }
  }
};

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
