// Products with a 4-bit weight: out[m, n] = sum_k a[m, k] * w[n, k] + bias[n], and rows of w looked up.
//
// The weight is decoded a few rows at a time into scratch memory that stays in cache, or, for one or two input rows,
// not stored at all. Sums are fp32. Where the processor has a bf16 dot product, bf16 inputs of more rows use it: each
// weight is then rounded once to bf16, as dequantize_4bit would; products and sums are fp32.
#pragma once

#include <hwy/cache_control.h>
#include <stdlib.h>

#include <utility>

#include "common/status.h"
#include "cpu/kernels/fourbit.h"

namespace bnb {
namespace {

// A register tile: kTileN weight rows times at most kTileM input rows, of dot products. One vector of sums each, one of
// every weight row and one of an input row must fit the registers: 16 on AVX2, 32 elsewhere.
#if HWY_TARGET == HWY_AVX2
constexpr int kTileN = 2, kTileM = 5;
#else
constexpr int kTileN = 4, kTileM = 6;
#endif

#if defined(__AVX512BF16__)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

// A multiple of every vector, in elements; rows of scratch memory are padded to it with zeros.
constexpr int kLog2Group = 3;
constexpr int64_t kGroup = 1 << kLog2Group;  // 4-bit elements in 32 bits
constexpr int64_t kChunk = kGroup * kLanes;

inline int64_t Padded(int64_t count) { return CeilDiv(count, kChunk) * kChunk; }

class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    if (posix_memalign(&data_, 64, static_cast<size_t>(bytes)) != 0) data_ = nullptr;
  }
  ~Scratch() { free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <typename T>
  T* As() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
};

// --- The weight ------------------------------------------------------------------------------------------------------

struct Weight4 {
  const float* levels;
  const uint8_t* packed;
  const float* absmax;
  int64_t blocks;
  int log2_blocksize;  // shifts, as a division a block would take longer than decoding the block

  int64_t BlockOf(int64_t element) const { return element >> log2_blocksize; }
  int64_t BlockStart(int64_t block) const { return block << log2_blocksize; }
};

// Elements `begin` to `end` of the flattened weight, in order.
template <typename T>
void DecodeRange4(const Weight4& w, int64_t begin, int64_t end, T* out) {
  int64_t at = begin;
  if (at < end && at % 2 != 0) {
    FromFloat(w.levels[w.packed[at / 2] & 15] * w.absmax[w.BlockOf(at)], out++);
    ++at;
  }
  while (at < end) {
    const int64_t block = w.BlockOf(at);
    const int64_t count = Min(end, w.BlockStart(block + 1)) - at;
    DecodeBlock4(w.levels, w.absmax[block], w.packed + at / 2, count, out);
    at += count;
    out += count;
  }
}

// If rows start at multiples of kGroup elements, 32-bit words of packed codes never cross a block. Then decoding needs
// no interleaving: nibble j of kLanes words is a vector of elements kGroup * lane + ElementOf(j), and the inputs are
// laid out in the same order, chunk by chunk.
inline bool InGroups(int64_t k) { return k % kGroup == 0; }
constexpr int64_t ElementOf(int64_t nibble) { return nibble ^ 1; }  // the high nibble holds the first of two elements

// The chunks of rows of k elements: their packed words, and the scales of their groups, one a lane. `element` is the
// first of a chunk, counted from the start of the weight.
class Chunks {
 public:
  Chunks(const Weight4& w, int64_t k)
      : absmax_(w.absmax),
        blocks_(w.blocks),
        shift_(w.log2_blocksize - kLog2Group),
        aligned_(k % w.BlockStart(1) == 0),
        lanes_(hn::ShiftRightSame(hn::Iota(u32, 0), shift_)),
        whole_(FirstBlocks(kLanes)),
        rest_(k % kChunk / kGroup),
        rest_blocks_(FirstBlocks(rest_)),
        rest_groups_(hn::FirstN(f32, static_cast<size_t>(rest_))) {}

  // Asks for the scales of elements `begin` to `end`, which may lie past the weight: their stream is too thin for the
  // processor to notice. Without, one row took 0.68 ms where they had to come from memory, with 0.33 in cache.
  void Prefetch(int64_t begin, int64_t end) const {
    constexpr int64_t kLine = 64 / sizeof(float);
    const int shift = shift_ + kLog2Group;
    for (int64_t block = begin >> shift; block < end >> shift && block < blocks_; block += kLine) {
      hwy::Prefetch(absmax_ + block);
    }
  }

  // Calls `body(c, chunk)` for the first element c of every chunk of a row of k elements.
  template <typename Body>
  HWY_INLINE void ForEach(int64_t k, const Body& body) const {
    int64_t c = 0;
    for (; c + kChunk <= k; c += kChunk) body(c, Whole{*this});
    if (c < k) body(c, Rest{*this});
  }

 private:
  struct Whole {
    const Chunks& all;
    // Asks for what is needed `ahead` bytes later: rows are too short for the processor's own prefetching.
    HWY_INLINE VU Words(const uint8_t* p, int64_t ahead) const {
      hwy::Prefetch(reinterpret_cast<const uint8_t*>(reinterpret_cast<intptr_t>(p) + ahead));
      return hn::LoadU(u32, reinterpret_cast<const uint32_t*>(p));
    }
    HWY_INLINE VF Scales(int64_t element) const { return all.Scales(element, all.whole_); }
  };
  // What is left of a row; zeros past its end, whose neighbour may not be finite.
  struct Rest {
    const Chunks& all;
    HWY_INLINE VU Words(const uint8_t* p, int64_t) const { return LoadPart32(u32, p, all.rest_); }
    HWY_INLINE VF Scales(int64_t element) const {
      return hn::IfThenElseZero(all.rest_groups_, all.Scales(element, all.rest_blocks_));
    }
  };

  hn::Mask<F32> FirstBlocks(int64_t groups) const {
    return hn::FirstN(f32, static_cast<size_t>(CeilDiv(groups, int64_t{1} << shift_)));
  }

  // Of a chunk that has the `blocks` of its row, as fast as it goes.
  HWY_INLINE VF Scales(int64_t element, hn::Mask<F32> blocks) const {
    if (HWY_UNLIKELY(!aligned_)) return AnyScales(element);
    const float* scales = absmax_ + (element >> (shift_ + kLog2Group));
    if constexpr (kLanes <= 32 / kGroup) return hn::Set(f32, *scales);  // the smallest block fills a vector
    return hn::TableLookupLanes(hn::MaskedLoad(blocks, f32, scales), hn::IndicesFromVec(f32, lanes_));
  }

  // Of any chunk. Groups past the end of its row have some scale or 0.
  HWY_NOINLINE VF AnyScales(int64_t element) const {
    const int64_t block = element >> (shift_ + kLog2Group);
    const auto offset = static_cast<uint32_t>((element >> kLog2Group) - (block << shift_));
    const VU lanes = hn::ShiftRightSame(hn::Iota(u32, offset), shift_);
    const VF scales = LoadPart(absmax_ + block, Min(kLanes, blocks_ - block));
    return hn::TableLookupLanes(scales, hn::IndicesFromVec(f32, lanes));
  }

  const float* absmax_;
  int64_t blocks_;
  int shift_;            // log2 of the groups in a block
  bool aligned_;         // rows start at blocks
  VU lanes_;             // if so, the block of each lane, counted from that of the first,
  hn::Mask<F32> whole_;  // and as many lanes as a chunk has blocks
  int64_t rest_;         // groups in the last chunk of a row, where that is not whole,
  hn::Mask<F32> rest_blocks_, rest_groups_;  // and as many lanes as it has blocks, and groups
};

// Calls `body` with the constants 0 to kGroup - 1.
template <typename Body, int64_t... j>
HWY_INLINE void ForNibbles(const Body& body, std::integer_sequence<int64_t, j...>) {
  (body(std::integral_constant<int64_t, j>()), ...);
}
template <typename Body>
HWY_INLINE void ForNibbles(const Body& body) {
  ForNibbles(body, std::make_integer_sequence<int64_t, kGroup>());
}

template <int64_t j>
HWY_INLINE VF LevelsAt(const Table16& table, VU words) {
  const VU nibble = hn::ShiftRight<4 * j>(words);
  return table(j == kGroup - 1 ? nibble : LowNibble(nibble));
}

// --- Inputs ----------------------------------------------------------------------------------------------------------

template <typename T>
inline void Convert(T from, T* to) {
  *to = from;
}
template <typename T>
inline void Convert(T from, float* to) {
  *to = ToFloat(from);
}
inline void Convert(float from, float* to) { *to = from; }

// A row of k inputs as `To`, padded with zeros, in the order of the elements or in that of the groups.
template <typename To, typename T>
void LayOut(const T* x, int64_t k, bool grouped, To* out) {
  memset(static_cast<void*>(out + k / kChunk * kChunk), 0,
         static_cast<size_t>(Padded(k) - k / kChunk * kChunk) * sizeof(To));
  if (!grouped) {
    for (int64_t i = 0; i < k; ++i) Convert(x[i], out + i);
    return;
  }
  // All nibbles of a lane in one go: a loop that compilers turn into vector loads and shuffles.
  for (int64_t c = 0; c < k; c += kChunk) {
    const T* HWY_RESTRICT from = x + c;
    To* HWY_RESTRICT to = out + c;
    const int64_t lanes = Min(kLanes, (k - c) / kGroup);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      ForNibbles([&](auto j) { Convert(from[lane * kGroup + ElementOf(j.value)], to + j.value * kLanes + lane); });
    }
  }
}

// --- Sums ------------------------------------------------------------------------------------------------------------

// The sum of the lanes of each of `count` vectors.
template <int count>
HWY_INLINE void SumLanes(const VF* v, float* sums) {
  for (int i = 0; i < count; ++i) sums[i] = hn::GetLane(hn::SumOfLanes(f32, v[i]));
}

#if HWY_TARGET != HWY_SCALAR
// Adds the upper half of a vector to the lower one until four lanes are left.
template <int64_t lanes, typename D>
HWY_INLINE auto Fold(D d, hn::Vec<D> v) {
  if constexpr (lanes > 4) {
    const hn::Half<D> half;
    return Fold<lanes / 2>(half, hn::LowerHalf(half, v) + hn::UpperHalf(half, v));
  } else {
    (void)d;
    return v;
  }
}
// Four at once share the last steps: half the instructions.
template <>
HWY_INLINE void SumLanes<4>(const VF* v, float* sums) {
  const hn::CappedTag<float, 4> four;
  const auto a = Fold<kLanes>(f32, v[0]), b = Fold<kLanes>(f32, v[1]);
  const auto c = Fold<kLanes>(f32, v[2]), d = Fold<kLanes>(f32, v[3]);
  const auto ab = hn::InterleaveLower(four, a, b) + hn::InterleaveUpper(four, a, b);
  const auto cd = hn::InterleaveLower(four, c, d) + hn::InterleaveUpper(four, c, d);
  hn::StoreU(hn::ConcatLowerLower(four, cd, ab) + hn::ConcatUpperUpper(four, cd, ab), four, sums);
}
#endif

// --- A few input rows ------------------------------------------------------------------------------------------------

// Up to here the decoded weight stays in registers.
constexpr int kFewInputs = 2;
inline bool IsFew(int64_t m, int64_t k) { return m <= kFewInputs && InGroups(k); }

// sums[i * kTileN + r] = dot(x row i, w row `row` + r); rows of x are `stride` elements apart.
template <int rows, int inputs>
void Dot(const Weight4& w, const Chunks& chunks, const Table16& table, int64_t row, int64_t k, const float* x,
         int64_t stride, float* sums) {
  const uint8_t* packed = w.packed + row * k / 2;
  chunks.Prefetch((row + rows) * k, (row + 2 * rows) * k);
  VF total[inputs][rows];
  for (int i = 0; i < inputs; ++i) {
    for (int r = 0; r < rows; ++r) total[i][r] = hn::Zero(f32);
  }
  chunks.ForEach(k, [&](int64_t c, auto chunk) HWY_ATTR {
    VU words[rows];
    VF sum[rows][inputs];
    for (int r = 0; r < rows; ++r) words[r] = chunk.Words(packed + ((r * k + c) >> 1), (rows * k) >> 1);
    ForNibbles([&](auto nibble) HWY_ATTR {
      VF xj[inputs];
      for (int i = 0; i < inputs; ++i) xj[i] = hn::LoadU(f32, x + i * stride + c + nibble.value * kLanes);
      for (int r = 0; r < rows; ++r) {
        const VF level = LevelsAt<nibble.value>(table, words[r]);
        for (int i = 0; i < inputs; ++i) {
          sum[r][i] = nibble.value == 0 ? level * xj[i] : hn::MulAdd(level, xj[i], sum[r][i]);
        }
      }
    });
    for (int r = 0; r < rows; ++r) {
      const VF scale = chunk.Scales((row + r) * k + c);
      for (int i = 0; i < inputs; ++i) total[i][r] = hn::MulAdd(sum[r][i], scale, total[i][r]);
    }
  });
  for (int i = 0; i < inputs; ++i) SumLanes<rows>(total[i], sums + i * kTileN);
}

template <int rows, int inputs>
void DotOf(int64_t m, const Weight4& w, const Chunks& chunks, const Table16& table, int64_t row, int64_t k,
           const float* x, int64_t stride, float* sums) {
  if constexpr (inputs > 1) {
    if (m < inputs) return DotOf<rows, inputs - 1>(m, w, chunks, table, row, k, x, stride, sums);
  }
  Dot<rows, inputs>(w, chunks, table, row, k, x, stride, sums);
}

// --- More input rows -------------------------------------------------------------------------------------------------

// What is multiplied: the elements of a T that one step of a tile takes, how weights become T, and the step itself.
template <typename T>
struct DotStep;
template <>
struct DotStep<float> {
  static constexpr int64_t kElements = kLanes;
  using V = VF;
  static HWY_INLINE V Load(const float* p) { return hn::LoadU(f32, p); }
  static HWY_INLINE void Store(VF first, VF second, float* p) {
    hn::StoreU(first, f32, p);
    hn::StoreU(second, f32, p + kLanes);
  }
  static HWY_INLINE VF Add(V a, V b, VF sum) { return hn::MulAdd(a, b, sum); }
};
#if defined(__AVX512BF16__)
template <>
struct DotStep<BFloat16> {
  static constexpr int64_t kElements = 2 * kLanes;
  using V = __m512bh;
  static HWY_INLINE V Load(const BFloat16* p) { return (V)_mm512_loadu_si512(p); }
  // Flushes subnormals, as the product does.
  static HWY_INLINE void Store(VF first, VF second, BFloat16* p) {
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second.raw, first.raw));
  }
  static HWY_INLINE VF Add(V a, V b, VF sum) { return VF{_mm512_dpbf16_ps(sum.raw, a, b)}; }
};
#endif

// One row of the weight in the order of LayOut, padded with zeros.
template <typename T>
void DecodeRow4(const Weight4& w, const Chunks& chunks, const Table16& table, int64_t row, int64_t k, T* out) {
  if (!InGroups(k)) {
    DecodeRange4(w, row * k, (row + 1) * k, out);
    memset(static_cast<void*>(out + k), 0, static_cast<size_t>(Padded(k) - k) * sizeof(T));
    return;
  }
  chunks.Prefetch((row + kTileN) * k, (row + kTileN + 1) * k);
  chunks.ForEach(k, [&](int64_t c, auto chunk) HWY_ATTR {
    const VU words = chunk.Words(w.packed + ((row * k + c) >> 1), (kTileN * k) >> 1);
    const VF scale = chunk.Scales(row * k + c);
    ForNibbles([&](auto nibble) HWY_ATTR {
      if constexpr (nibble.value % 2 == 0) {
        DotStep<T>::Store(LevelsAt<nibble.value>(table, words) * scale,
                          LevelsAt<nibble.value + 1>(table, words) * scale, out + c + nibble.value * kLanes);
      }
    });
  });
}

// sums[i * kTileN + r] = dot(x row i, w row r); rows are `stride` elements apart.
template <int rows_n, int rows_m, typename T>
void Tile(const T* x, const T* w, int64_t stride, float* sums) {
  using Step = DotStep<T>;
  VF sum[rows_m][rows_n];
  for (int i = 0; i < rows_m; ++i) {
    for (int r = 0; r < rows_n; ++r) sum[i][r] = hn::Zero(f32);
  }
  for (int64_t k = 0; k < stride; k += Step::kElements) {
    typename Step::V wk[rows_n];
    for (int r = 0; r < rows_n; ++r) wk[r] = Step::Load(w + r * stride + k);
    for (int i = 0; i < rows_m; ++i) {
      const typename Step::V xk = Step::Load(x + i * stride + k);
      for (int r = 0; r < rows_n; ++r) sum[i][r] = Step::Add(xk, wk[r], sum[i][r]);
    }
  }
  for (int i = 0; i < rows_m; ++i) SumLanes<rows_n>(sum[i], sums + i * kTileN);
}

template <int rows_n, int rows_m, typename T>
void TileOf(int64_t count_m, const T* x, const T* w, int64_t stride, float* sums) {
  if constexpr (rows_m > 1) {
    if (count_m < rows_m) return TileOf<rows_n, rows_m - 1>(count_m, x, w, stride, sums);
  }
  Tile<rows_n, rows_m>(x, w, stride, sums);
}

// --- The operator ----------------------------------------------------------------------------------------------------

// T: inputs and outputs; Operand: what is multiplied.
template <typename T, typename Operand>
int Gemm4Typed(const Weight4& w, int64_t m, int64_t n, int64_t k, const T* a, const T* bias, T* out, int threads) {
  const int64_t stride = Padded(k);
  const bool grouped = InGroups(k);
  const bool few = IsFew(m, k);
  const Scratch inputs(m * stride * static_cast<int64_t>(sizeof(Operand)));
  auto* x = inputs.As<Operand>();
  if (x == nullptr) return BNB_OUT_OF_MEMORY;
  Parallel(m, Max(1, kGrain / Max(k, 1)), threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) LayOut(a + i * k, k, grouped, x + i * stride);
  });

  const Table16 table([&](int i) { return Load(w.levels + i); });
  const Chunks chunks(w, k);
  bool failed = false;
  const int64_t grain = CeilDiv(Max(1, 2 * kGrain / Max(k, 1)), kTileN) * kTileN;
  Parallel(n, grain, threads, [&](int64_t first, int64_t last) {
    const Scratch decoded(few ? 1 : kTileN * stride * static_cast<int64_t>(sizeof(Operand)));
    auto* rows = decoded.As<Operand>();
    if (rows == nullptr) return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    float sums[kTileM * kTileN];
    const auto write = [&](int64_t i, int64_t count, int64_t row, int count_n) {
      for (int64_t j = 0; j < count; ++j) {
        for (int r = 0; r < count_n; ++r) {
          const float sum = sums[j * kTileN + r];
          FromFloat(bias == nullptr ? sum : sum + ToFloat(bias[row + r]), out + (i + j) * n + row + r);
        }
      }
    };
    const auto step = [&](int64_t row, auto count) {
      constexpr int kRows = decltype(count)::value;
      if constexpr (std::is_same_v<Operand, float>) {
        if (few) {
          DotOf<kRows, kFewInputs>(m, w, chunks, table, row, k, x, stride, sums);
          return write(0, m, row, kRows);
        }
      }
      for (int r = 0; r < kRows; ++r) DecodeRow4(w, chunks, table, row + r, k, rows + r * stride);
      for (int64_t i = 0; i < m; i += kTileM) {
        const int64_t count_m = Min(kTileM, m - i);
        TileOf<kRows, kTileM>(count_m, x + i * stride, rows, stride, sums);
        write(i, count_m, row, kRows);
      }
    };
    int64_t row = first;
    for (; row + kTileN <= last; row += kTileN) step(row, std::integral_constant<int, kTileN>());
    for (; row < last; ++row) step(row, std::integral_constant<int, 1>());
  });
  return failed ? BNB_OUT_OF_MEMORY : BNB_OK;
}

// The scales of blocks `first` to `last` that nested statistics stand for.
void NestedScales(const uint8_t* codes, const float* absmax, const float* map, float offset, int64_t first,
                  int64_t last, float* out) {
  constexpr int64_t kNestedBlock = 256;
  for (int64_t i = first; i < last; ++i) out[i - first] = map[codes[i]] * absmax[i / kNestedBlock] + offset;
}

int Gemm4(int dtype, const float* levels, int64_t blocksize, int64_t m, int64_t n, int64_t k, const void* a,
          const uint8_t* packed, const float* absmax, const uint8_t* absmax_8bit, const float* absmax_code,
          float absmax_offset, const void* bias, void* out, int threads) {
  const int64_t blocks = CeilDiv(n * k, blocksize);
  const Scratch nested(absmax_8bit == nullptr ? 0 : blocks * static_cast<int64_t>(sizeof(float)));
  if (absmax_8bit != nullptr) {
    if (nested.As<float>() == nullptr) return BNB_OUT_OF_MEMORY;
    Parallel(blocks, kGrain, threads, [&](int64_t first, int64_t last) {
      NestedScales(absmax_8bit, absmax, absmax_code, absmax_offset, first, last, nested.As<float>() + first);
    });
    absmax = nested.As<float>();
  }
  const Weight4 w{levels, packed, absmax, blocks, __builtin_ctzll(static_cast<uint64_t>(blocksize))};
  int status = BNB_OK;
  WithType(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto run = [&](auto* operand) {
      using Operand = std::remove_pointer_t<decltype(operand)>;
      status = Gemm4Typed<T, Operand>(w, m, n, k, static_cast<const T*>(a), static_cast<const T*>(bias),
                                      static_cast<T*>(out), threads);
    };
    if constexpr (kHasBf16Dot && std::is_same_v<T, BFloat16>) {
      if (m > kFewInputs) return run(static_cast<BFloat16*>(nullptr));
    }
    run(static_cast<float*>(nullptr));
  });
  return status;
}

// Rows of a table of `width` columns, decoded: those of `indices`, or, where that is null, `count` rows from `first`
// on.
int DecodeRows4(int dtype, const float* levels, int64_t blocksize, int64_t rows, int64_t width, const uint8_t* packed,
                const float* absmax, const uint8_t* absmax_8bit, const float* absmax_code, float absmax_offset,
                const int64_t* indices, int64_t first_row, int64_t count, void* out, int threads) {
  for (int64_t i = 0; indices != nullptr && i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= rows) return BNB_INDEX_OUT_OF_RANGE;
  }
  const int log2_blocksize = __builtin_ctzll(static_cast<uint64_t>(blocksize));
  const int64_t blocks = CeilDiv(rows * width, blocksize);
  bool failed = false;
  WithType(dtype, [&](auto* type) {
    auto* values = static_cast<decltype(type)>(out);
    Parallel(count, Max(1, kGrain / Max(width, 1)), threads, [&](int64_t first, int64_t last) {
      const bool nested = absmax_8bit != nullptr;
      const Scratch decoded(nested ? (width / blocksize + 2) * static_cast<int64_t>(sizeof(float)) : 1);
      auto* scales = decoded.As<float>();
      if (scales == nullptr) return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      for (int64_t i = first; i < last; ++i) {
        const int64_t begin = (indices == nullptr ? first_row + i : indices[i]) * width;
        Weight4 w{levels, packed, absmax, blocks, log2_blocksize};
        if (nested) {
          const int64_t block = w.BlockOf(begin);
          NestedScales(absmax_8bit, absmax, absmax_code, absmax_offset, block, CeilDiv(begin + width, blocksize),
                       scales);
          w.absmax = scales - block;
        }
        DecodeRange4(w, begin, begin + width, values + i * width);
      }
    });
  });
  return failed ? BNB_OUT_OF_MEMORY : BNB_OK;
}

}  // namespace
}  // namespace bnb
