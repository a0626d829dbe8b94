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

// Weight rows whose sums are kept until they are written, in vectors.
constexpr int64_t kSumRows = 64;

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
    if (posix_memalign(&data_, 64, static_cast<size_t>(Max(1, bytes))) != 0) data_ = nullptr;
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

// The scales of blocks as they are stored: plain, or nested, where codes and a map stand for them.
struct Statistics4 {
  const float* absmax;   // of the blocks, or of the codes
  const uint8_t* codes;  // null if plain
  const float* map;
  float offset;

  static constexpr int64_t kBlock = 256;  // codes with one absmax

  // The floats of scratch memory that Decode needs for `count` blocks.
  int64_t ScratchSize(int64_t count) const { return codes == nullptr ? 0 : count; }

  // The scales, to be indexed by block; those of blocks `first` to `last` are there.
  const float* Decode(int64_t first, int64_t last, float* scratch) const {
    if (codes == nullptr) return absmax;
    float* scales = scratch - first;
    for (int64_t i = first; i < last;) {
      const float scale = absmax[i / kBlock];
      const int64_t begin = i, end = Min(last, (i / kBlock + 1) * kBlock);
      for (; i < end; ++i) scales[i] = map[codes[i]];
      for (i = begin; i < end; ++i) scales[i] = scales[i] * scale + offset;
    }
    return scales;
  }

  // Asks for the scales of blocks `first` to `last`: their stream is too thin for the processor to notice. Without, one
  // row took 0.68 ms where they had to come from memory, with 0.33 in cache.
  void Prefetch(int64_t first, int64_t last) const {
    constexpr int64_t kLine = 64;
    const auto* p = codes == nullptr ? reinterpret_cast<const uint8_t*>(absmax + first) : codes + first;
    const int64_t bytes = (last - first) * static_cast<int64_t>(codes == nullptr ? sizeof(float) : 1);
    for (int64_t i = 0; i < bytes; i += kLine) hwy::Prefetch(p + i);
  }
};

struct Weight4 {
  const float* levels;
  const uint8_t* packed;
  const float* absmax;  // to be indexed by block
  int64_t blocks;
  int log2_blocksize;  // shifts, as a division a block would take longer than decoding the block

  int64_t BlockOf(int64_t element) const { return element >> log2_blocksize; }
  int64_t BlockStart(int64_t block) const { return block << log2_blocksize; }
  // The block behind the last that has elements before `end`.
  int64_t BlockEnd(int64_t end) const { return (end + BlockStart(1) - 1) >> log2_blocksize; }
  bool RowsStartBlocks(int64_t k) const { return k % BlockStart(1) == 0; }
  // The most blocks that `count` elements of a row of k have, from a multiple of `count` on.
  int64_t MostBlocks(int64_t k, int64_t count) const {
    return RowsStartBlocks(k) ? BlockEnd(count) : BlockEnd(count - 1) + 1;
  }
};

// A weight of `elements` elements, without its scales.
inline Weight4 TheWeight(const float* levels, const uint8_t* packed, int64_t elements, int64_t blocksize) {
  return {levels, packed, nullptr, CeilDiv(elements, blocksize), __builtin_ctzll(static_cast<uint64_t>(blocksize))};
}

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
// no interleaving: nibble j of a vector of words is a vector of elements kGroup * lane + ElementOf(j), and the inputs
// are laid out in the same order, chunk by chunk. The words have as many bits as the elements of a vector: for bf16,
// half of kGroup.
template <typename T>
inline bool InGroups(const Weight4& w, int64_t k) {
  // DecodeGroups to bf16 takes chunks of up to four blocks.
  return k % kGroup == 0 && (sizeof(T) == sizeof(float) || w.MostBlocks(k, kChunk) <= 4);
}
constexpr int64_t ElementOf(int64_t nibble) { return nibble ^ 1; }  // the high nibble holds the first of two elements
template <typename T>
constexpr int64_t kNibbles = 2 * sizeof(T);  // in a word

// The chunks of rows of k elements: their packed words, and the scales of their groups, one a lane. `element` is the
// first of a chunk, counted from the start of the weight.
class Chunks {
 public:
  Chunks(const Weight4& w, int64_t k)
      : blocks_(w.blocks),
        shift_(w.log2_blocksize - kLog2Group),
        aligned_(w.RowsStartBlocks(k)),
        lanes_(hn::ShiftRightSame(hn::Iota(u32, 0), shift_)),
        whole_(FirstBlocks(kLanes)),
        rest_(k % kChunk / kGroup),
        rest_blocks_(FirstBlocks(rest_)),
        rest_groups_(hn::FirstN(f32, static_cast<size_t>(rest_))) {}

  // Takes the scales from here on from `absmax`, which is indexed by block.
  void UseScales(const float* absmax) { absmax_ = absmax; }

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
    HWY_INLINE VU InRow(VU words) const { return words; }
  };
  // What is left of a row; zeros past its end, whose neighbour may not be finite.
  struct Rest {
    const Chunks& all;
    HWY_INLINE VU Words(const uint8_t* p, int64_t) const { return LoadPart32(u32, p, all.rest_); }
    HWY_INLINE VF Scales(int64_t element) const {
      return hn::IfThenElseZero(all.rest_groups_, all.Scales(element, all.rest_blocks_));
    }
    HWY_INLINE VU InRow(VU words) const { return hn::IfThenElseZero(hn::RebindMask(u32, all.rest_groups_), words); }
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

  const float* absmax_ = nullptr;
  int64_t blocks_;
  int shift_;                                // log2 of the groups in a block
  bool aligned_;                             // rows start at blocks
  VU lanes_;                                 // if so, the block of each lane, counted from that of the first,
  hn::Mask<F32> whole_;                      // and as many lanes as a chunk has blocks
  int64_t rest_;                             // groups in the last chunk of a row, where that is not whole,
  hn::Mask<F32> rest_blocks_, rest_groups_;  // and as many lanes as it has blocks, and groups
};

// Calls `body` with the constants 0 to count - 1.
template <typename Body, int64_t... j>
HWY_INLINE void ForNibbles(const Body& body, std::integer_sequence<int64_t, j...>) {
  (body(std::integral_constant<int64_t, j>()), ...);
}
template <int64_t count, typename Body>
HWY_INLINE void ForNibbles(const Body& body) {
  ForNibbles(body, std::make_integer_sequence<int64_t, count>());
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
  constexpr int64_t kWords = kChunk / kNibbles<To>;
  for (int64_t c = 0; c < k; c += kChunk) {
    const T* HWY_RESTRICT from = x + c;
    To* HWY_RESTRICT to = out + c;
    const int64_t words = Min(kWords, (k - c) / kNibbles<To>);
    for (int64_t word = 0; word < words; ++word) {
      ForNibbles<kNibbles<To>>(
          [&](auto j) { Convert(from[word * kNibbles<To> + ElementOf(j.value)], to + j.value * kWords + word); });
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
// Four at once: pairs of sums of two vectors each, then of four.
template <>
HWY_INLINE void SumLanes<4>(const VF* v, float* sums) {
  constexpr hn::RepartitionToWide<F32> pairs;
  const auto add = [](auto d, auto a, auto b) HWY_ATTR {
    const auto x = hn::BitCast(d, a), y = hn::BitCast(d, b);
    return hn::BitCast(f32, hn::InterleaveLower(d, x, y)) + hn::BitCast(f32, hn::InterleaveUpper(d, x, y));
  };
  const VF all = add(pairs, add(f32, v[0], v[1]), add(f32, v[2], v[3]));  // per 128 bits, one lane each
  hn::StoreU(Fold<kLanes>(f32, all), hn::CappedTag<float, 4>(), sums);
}
#endif

// --- A few input rows ------------------------------------------------------------------------------------------------

// Up to here the decoded weight stays in registers.
constexpr int kFewInputs = 2;

// sums[i * kSumRows + r] = dot(x row i, w row `row` + r); rows of x are `stride` elements apart.
template <int rows, int inputs>
void Dot(const Weight4& w, const Chunks& chunks, const Table16& table, int64_t row, int64_t k, const float* x,
         int64_t stride, float* sums) {
  const uint8_t* packed = w.packed + row * k / 2;
  VF total[inputs][rows];
  for (int i = 0; i < inputs; ++i) {
    for (int r = 0; r < rows; ++r) total[i][r] = hn::Zero(f32);
  }
  chunks.ForEach(k, [&](int64_t c, auto chunk) HWY_ATTR {
    VU words[rows];
    VF sum[rows][inputs];
    for (int r = 0; r < rows; ++r) words[r] = chunk.Words(packed + ((r * k + c) >> 1), (rows * k) >> 1);
    ForNibbles<kGroup>([&](auto nibble) HWY_ATTR {
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
  for (int i = 0; i < inputs; ++i) SumLanes<rows>(total[i], sums + i * kSumRows);
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

// What is multiplied: the elements of a T that one step of a tile takes, and the step itself.
template <typename T>
struct DotStep;
template <>
struct DotStep<float> {
  static constexpr int64_t kElements = kLanes;
  using V = VF;
  static HWY_INLINE V Load(const float* p) { return hn::LoadU(f32, p); }
  static HWY_INLINE VF Add(V a, V b, VF sum) { return hn::MulAdd(a, b, sum); }
};

// One row of the weight, in the order of LayOut and padded with zeros.
inline void DecodeGroups(const Weight4& w, const Chunks& chunks, const Table16& table, int64_t row, int64_t k,
                         float* out) {
  chunks.ForEach(k, [&](int64_t c, auto chunk) HWY_ATTR {
    const VU words = chunk.Words(w.packed + ((row * k + c) >> 1), (kTileN * k) >> 1);
    const VF scale = chunk.Scales(row * k + c);
    ForNibbles<kGroup>([&](auto nibble) HWY_ATTR {
      hn::StoreU(LevelsAt<nibble.value>(table, words) * scale, f32, out + c + nibble.value * kLanes);
    });
  });
}

#if defined(__AVX512BF16__)
template <>
struct DotStep<BFloat16> {
  static constexpr int64_t kElements = 2 * kLanes;
  using V = __m512bh;
  static HWY_INLINE V Load(const BFloat16* p) { return (V)_mm512_loadu_si512(p); }
  static HWY_INLINE VF Add(V a, V b, VF sum) { return VF{_mm512_dpbf16_ps(sum.raw, a, b)}; }
};

// Makes the 16 values that the codes of a block stand for, rounds them, and looks up 32 elements at once, in tables of
// two blocks. 16 rows of 4096 x 4096 took one thread 1.63 ms so, and 1.70 with a product and a rounding an element.
template <int tables>
void LookUpRow(const Weight4& w, const Chunks& chunks, int64_t row, int64_t k, BFloat16* out) {
  constexpr hn::ScalableTag<uint16_t> d;
  const VF levels = Load(w.levels);
  const auto elements = hn::ShiftLeft<2>(hn::Iota(d, 0));  // the first of each word
  chunks.ForEach(k, [&](int64_t c, auto chunk) HWY_ATTR {
    const int64_t element = row * k + c;
    const int64_t block = w.BlockOf(element);
    const auto table = [&](int64_t i) HWY_ATTR {
      const VF first = levels * hn::Set(f32, w.absmax[Min(block + i, w.blocks - 1)]);
      const VF second = levels * hn::Set(f32, w.absmax[Min(block + i + 1, w.blocks - 1)]);
      return (__m512i)_mm512_cvtne2ps_pbh(second.raw, first.raw);  // flushes subnormals, as the product does
    };
    const __m512i values = table(0), more = tables > 1 ? table(2) : values;
    const auto offset = hn::Set(d, static_cast<uint16_t>(element - w.BlockStart(block)));
    const auto start = hn::ShiftLeft<4>(hn::ShiftRightSame(elements + offset, w.log2_blocksize));
    const auto words = hn::BitCast(d, chunk.Words(w.packed + (element >> 1), (kTileN * k) >> 1));
    ForNibbles<kNibbles<BFloat16>>([&](auto nibble) HWY_ATTR {
      const auto index = hn::OrAnd(start, hn::ShiftRight<4 * nibble.value>(words), hn::Set(d, 15));
      const VU found{tables > 1 ? _mm512_permutex2var_epi16(values, index.raw, more)
                                : _mm512_permutexvar_epi16(index.raw, values)};
      hn::StoreU(chunk.InRow(found), u32, reinterpret_cast<uint32_t*>(out + c) + nibble.value * kLanes);
    });
  });
}

inline void DecodeGroups(const Weight4& w, const Chunks& chunks, const Table16&, int64_t row, int64_t k,
                         BFloat16* out) {
  if (w.MostBlocks(k, kChunk) <= 2) return LookUpRow<1>(w, chunks, row, k, out);
  LookUpRow<2>(w, chunks, row, k, out);
}
#endif

// sums[i * kSumRows + r] = dot(x row i, w row r); rows are `stride` elements apart.
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
  for (int i = 0; i < rows_m; ++i) SumLanes<rows_n>(sum[i], sums + i * kSumRows);
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
int Gemm4Typed(const Weight4& weight, const Statistics4& statistics, int64_t m, int64_t n, int64_t k, const T* a,
               const T* bias, T* out, int threads) {
  if (m == 0) return BNB_OK;
  const int64_t stride = Padded(k);
  const bool grouped = InGroups<Operand>(weight, k);
  const bool few = m <= kFewInputs && std::is_same_v<Operand, float> && grouped;
  const Scratch inputs(m * stride * static_cast<int64_t>(sizeof(Operand)));
  auto* x = inputs.As<Operand>();
  if (x == nullptr) return BNB_OUT_OF_MEMORY;
  Parallel(m, Max(1, kGrain / Max(k, 1)), threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) LayOut(a + i * k, k, grouped, x + i * stride);
  });

  const Table16 table([&](int i) { return Load(weight.levels + i); });
  const Chunks all(weight, k);
  bool failed = false;
  const int64_t grain = CeilDiv(Max(1, 2 * kGrain / Max(k, 1)), kTileN) * kTileN;
  Parallel(n, grain, threads, [&](int64_t first, int64_t last) {
    const Scratch decoded(few ? 0 : kTileN * stride * static_cast<int64_t>(sizeof(Operand)));
    const Scratch results(m * kSumRows * static_cast<int64_t>(sizeof(float)));
    const Scratch scales(statistics.ScratchSize(weight.BlockOf(kTileN * k) + 2 + kLanes) *
                         static_cast<int64_t>(sizeof(float)));
    auto* rows = decoded.As<Operand>();
    auto* sums = results.As<float>();
    if (rows == nullptr || sums == nullptr || scales.As<float>() == nullptr)
      return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    Weight4 w = weight;
    Chunks chunks = all;
    const auto multiply = [&](int64_t row, auto count, float* sums) {
      constexpr int kRows = decltype(count)::value;
      const int64_t end = w.BlockEnd((row + kRows) * k);
      w.absmax = statistics.Decode(w.BlockOf(row * k), end, scales.As<float>());
      chunks.UseScales(w.absmax);
      statistics.Prefetch(end, Min(w.BlockEnd((row + 2 * kRows) * k), w.blocks));
      if constexpr (std::is_same_v<Operand, float>) {
        if (few) {
          return DotOf<kRows, kFewInputs>(m, w, chunks, table, row, k, x, stride, sums);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        if (grouped) {
          DecodeGroups(w, chunks, table, row + r, k, rows + r * stride);
        } else {
          DecodeRange4(w, (row + r) * k, (row + r + 1) * k, rows + r * stride);
          memset(static_cast<void*>(rows + r * stride + k), 0, static_cast<size_t>(stride - k) * sizeof(Operand));
        }
      }
      for (int64_t i = 0; i < m; i += kTileM) {
        TileOf<kRows, kTileM>(Min(kTileM, m - i), x + i * stride, rows, stride, sums + i * kSumRows);
      }
    };
    for (int64_t begin = first; begin < last; begin += kSumRows) {
      const int64_t end = Min(begin + kSumRows, last);
      int64_t row = begin;
      for (; row + kTileN <= end; row += kTileN) {
        multiply(row, std::integral_constant<int, kTileN>(), sums + row - begin);
      }
      for (; row < end; ++row) multiply(row, std::integral_constant<int, 1>(), sums + row - begin);
      for (int64_t i = 0; i < m; ++i) {
        ForVectors(end - begin, [&](int64_t j, auto move) {
          const VF sum = move(sums + i * kSumRows + j);
          move(bias == nullptr ? sum : sum + move(bias + begin + j), out + i * n + begin + j);
        });
      }
    }
  });
  return failed ? BNB_OUT_OF_MEMORY : BNB_OK;
}

int Gemm4(int dtype, const float* levels, int64_t blocksize, int64_t m, int64_t n, int64_t k, const void* a,
          const uint8_t* packed, const float* absmax, const uint8_t* absmax_8bit, const float* absmax_code,
          float absmax_offset, const void* bias, void* out, int threads) {
  const Statistics4 statistics{absmax, absmax_8bit, absmax_code, absmax_offset};
  const Weight4 w = TheWeight(levels, packed, n * k, blocksize);
  int status = BNB_OK;
  WithType(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto run = [&](auto* operand) {
      using Operand = std::remove_pointer_t<decltype(operand)>;
      status = Gemm4Typed<T, Operand>(w, statistics, m, n, k, static_cast<const T*>(a), static_cast<const T*>(bias),
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
  const Statistics4 statistics{absmax, absmax_8bit, absmax_code, absmax_offset};
  const Weight4 weight = TheWeight(levels, packed, rows * width, blocksize);
  bool failed = false;
  WithType(dtype, [&](auto* type) {
    auto* values = static_cast<decltype(type)>(out);
    Parallel(count, Max(1, kGrain / Max(width, 1)), threads, [&](int64_t first, int64_t last) {
      const Scratch decoded(statistics.ScratchSize(weight.BlockOf(width) + 2) * static_cast<int64_t>(sizeof(float)));
      if (decoded.As<float>() == nullptr) return __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      Weight4 w = weight;
      for (int64_t i = first; i < last; ++i) {
        const int64_t begin = (indices == nullptr ? first_row + i : indices[i]) * width;
        w.absmax = statistics.Decode(w.BlockOf(begin), w.BlockEnd(begin + width), decoded.As<float>());
        DecodeRange4(w, begin, begin + width, values + i * width);
      }
    });
  });
  return failed ? BNB_OUT_OF_MEMORY : BNB_OK;
}

}  // namespace
}  // namespace bnb
