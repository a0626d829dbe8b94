// Vector instructions: the ones our kernels use, for the types that A2 has them for. Others do not compile.
//
// Arithmetic is IEEE: one fp32 operation, or for half the exact result of one operation, rounded once to nearest even.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "transfer.h"

namespace AscendC {

template <typename T, typename... Types>
constexpr bool kOneOf = (std::is_same_v<T, Types> || ...);

template <typename T>
constexpr uint32_t Bytes(uint64_t count) {
  return static_cast<uint32_t>((count * kBits<T> + 7) / 8);
}

// --- Operands --------------------------------------------------------------------------------------------------------

// "General notes and restrictions": a source and the destination are identical or have no byte in common.
inline void CheckOverlap(uint32_t dst, uint32_t dst_bytes, uint32_t src, uint32_t src_bytes, bool may_be_identical) {
  if (src + src_bytes <= dst || dst + dst_bytes <= src) return;
  if (may_be_identical && dst == src && dst_bytes == src_bytes) return;
  sim::Here().Fail("general notes and restrictions", "dst at UB 0x%x and src at UB 0x%x overlap", dst, src);
}

// An operand of a count form: checked, its access noted.
template <typename T>
uint32_t Source(const LocalTensor<T>& tensor, uint64_t count) {
  const uint32_t address = tensor.Operand(Bytes<T>(count));
  sim::Here().Read(address, Bytes<T>(count));
  return address;
}
template <typename T>
uint32_t Destination(const LocalTensor<T>& tensor, uint64_t count) {
  const uint32_t address = tensor.Operand(Bytes<T>(count));
  sim::Here().Write(address, Bytes<T>(count));
  return address;
}

inline double Cycles(double count, double rate) { return sim::cost::kVectorStart + std::ceil(count / rate); }

// dst[i] = f(src[i]...) over `count` elements.
template <typename D, typename F, typename... S, size_t... kIndex>
void Elementwise(std::index_sequence<kIndex...>, const char* name, double rate, uint32_t count, const F& f,
                 const LocalTensor<D>& dst, const LocalTensor<S>&... src) {
  sim::Core& core = sim::Here();
  core.Begin(sim::kV, name);
  [[maybe_unused]] const std::array<uint32_t, sizeof...(S)> from{Source(src, count)...};
  const uint32_t to = Destination(dst, count);
  (CheckOverlap(to, Bytes<D>(count), from[kIndex], Bytes<S>(count), sizeof(S) == sizeof(D)), ...);
  for (uint32_t i = 0; i < count; ++i) {
    core.Store<D>(to + i * static_cast<uint32_t>(sizeof(D)),
                  f(core.Load<S>(from[kIndex] + i * static_cast<uint32_t>(sizeof(S)))...));
  }
  core.End(Cycles(count, rate));
}
template <typename D, typename F, typename... S>
void Elementwise(const char* name, double rate, uint32_t count, const F& f, const LocalTensor<D>& dst,
                 const LocalTensor<S>&... src) {
  Elementwise(std::index_sequence_for<S...>{}, name, rate, count, f, dst, src...);
}

// --- Arithmetic of one element ---------------------------------------------------------------------------------------

// Half operations are computed in fp32 or double, which hold enough digits that the second rounding changes nothing
// (S. Figueroa, "When is double rounding innocuous?", 1995).
template <typename T, typename F>
T InFloat(T a, T b, const F& f) {
  if constexpr (std::is_same_v<T, half>) {
    return half(f(static_cast<float>(a), static_cast<float>(b)));
  } else {
    return f(a, b);
  }
}
// Integers wrap.
template <typename T>
T AddOne(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  } else {
    return InFloat(a, b, [](float x, float y) { return x + y; });
  }
}
template <typename T>
T SubOne(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
  } else {
    return InFloat(a, b, [](float x, float y) { return x - y; });
  }
}
template <typename T>
T MulOne(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
  } else {
    return InFloat(a, b, [](float x, float y) { return x * y; });
  }
}

// --- Binary ----------------------------------------------------------------------------------------------------------

// Strides in data blocks: between the blocks of a repeat, and between repeats.
struct BinaryRepeatParams {
  BinaryRepeatParams(int64_t dst_block, int64_t src0_block, int64_t src1_block, int64_t dst_repeat, int64_t src0_repeat,
                     int64_t src1_repeat)
      : dstBlkStride(Narrowed<uint8_t>(dst_block, 0, 255, "dstBlkStride")),
        src0BlkStride(Narrowed<uint8_t>(src0_block, 0, 255, "src0BlkStride")),
        src1BlkStride(Narrowed<uint8_t>(src1_block, 0, 255, "src1BlkStride")),
        dstRepStride(Narrowed<uint8_t>(dst_repeat, 0, 255, "dstRepStride")),
        src0RepStride(Narrowed<uint8_t>(src0_repeat, 0, 255, "src0RepStride")),
        src1RepStride(Narrowed<uint8_t>(src1_repeat, 0, 255, "src1RepStride")) {}
  uint8_t dstBlkStride, src0BlkStride, src1BlkStride, dstRepStride, src0RepStride, src1RepStride;
};

// One operand of a repeat form.
struct Strided {
  uint32_t address, block_stride, repeat_stride;
  uint32_t At(uint32_t repeat, uint32_t block) const {
    return address + (repeat * repeat_stride + block * block_stride) * 32;
  }
};

template <typename T>
Strided StridedOperand(const LocalTensor<T>& tensor, uint32_t mask, uint32_t repeats, uint32_t block, uint32_t repeat) {
  constexpr uint32_t kLanes = 32 / sizeof(T);
  const uint32_t blocks = (mask + kLanes - 1) / kLanes, last = mask - (blocks - 1) * kLanes;
  uint64_t end = 0;
  if (repeats > 0) end = ((repeats - 1) * repeat + (blocks - 1) * block) * 32 + last * sizeof(T);
  return {tensor.Operand(end), block, repeat};
}

// dst = f(src0, src1), or f(src0, src1, dst), in repeats of at most 256 B of which the first `mask` elements take part.
template <bool kReadsDst, typename T, typename F>
void Repeated(const char* name, double rate, const F& f, const LocalTensor<T>& dst, const LocalTensor<T>& src0,
              const LocalTensor<T>& src1, int64_t mask, int64_t repeats, const BinaryRepeatParams& p) {
  constexpr uint32_t kLanes = 32 / sizeof(T);
  sim::Core& core = sim::Here();
  core.Begin(sim::kV, name);
  const uint32_t active = Narrowed<uint32_t>(mask, 1, 8 * kLanes, "mask");
  const uint32_t times = Narrowed<uint32_t>(repeats, 0, 255, "repeatTime");
  const Strided to = StridedOperand(dst, active, times, p.dstBlkStride, p.dstRepStride);
  const Strided a = StridedOperand(src0, active, times, p.src0BlkStride, p.src0RepStride);
  const Strided b = StridedOperand(src1, active, times, p.src1BlkStride, p.src1RepStride);
  for (const Strided& from : {a, b}) {
    if (from.address == to.address && from.block_stride == to.block_stride && from.repeat_stride == to.repeat_stride) {
      continue;
    }
    const uint32_t blocks = (active + kLanes - 1) / kLanes;
    if (times == 0) continue;
    CheckOverlap(to.address, to.At(times - 1, blocks - 1) + 32 - to.address, from.address,
                 from.At(times - 1, blocks - 1) + 32 - from.address, false);
  }
  for (uint32_t repeat = 0; repeat < times; ++repeat) {
    for (uint32_t lane = 0; lane < active; lane += kLanes) {
      const uint32_t block = lane / kLanes, count = active - lane < kLanes ? active - lane : kLanes;
      const uint32_t x = a.At(repeat, block), y = b.At(repeat, block), z = to.At(repeat, block);
      core.Read(x, count * sizeof(T));
      core.Read(y, count * sizeof(T));
      if (kReadsDst) core.Read(z, count * sizeof(T));
      core.Write(z, count * sizeof(T));
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t byte = i * static_cast<uint32_t>(sizeof(T));
        if constexpr (kReadsDst) {
          core.Store<T>(z + byte, f(core.Load<T>(x + byte), core.Load<T>(y + byte), core.Load<T>(z + byte)));
        } else {
          core.Store<T>(z + byte, f(core.Load<T>(x + byte), core.Load<T>(y + byte)));
        }
      }
    }
  }
  // A repeat costs the same whatever its mask is.
  core.End(Cycles(static_cast<double>(times) * 8 * kLanes, rate));
}

// `one` of one element, for the types in the list, in the count form and in the repeat form.
#define SIM_BINARY(name, rate, one, ...)                                                                        \
  template <typename T>                                                                                         \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count) { \
    static_assert(kOneOf<T, __VA_ARGS__>, "A2 has no " #name " of this type");                                  \
    Elementwise(#name, rate, Narrowed<uint32_t>(count, 0, INT32_MAX, "count"), one<T>, dst, src0, src1);        \
  }                                                                                                             \
  template <typename T>                                                                                         \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,   \
            int64_t repeatTime, const BinaryRepeatParams& params) {                                             \
    static_assert(kOneOf<T, __VA_ARGS__>, "A2 has no " #name " of this type");                                  \
    Repeated<false>(#name, rate, one<T>, dst, src0, src1, static_cast<int64_t>(mask), repeatTime, params);      \
  }

template <typename T>
T DivOne(T a, T b) {
  return InFloat(a, b, [](float x, float y) { return x / y; });
}
// Whether a NaN wins is not documented: here it loses, so that a kernel which counts on it fails. Integers are exact.
template <typename T>
T MaxOne(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a > b ? a : b;
  } else {
    return InFloat(a, b, [](float x, float y) { return x != x ? y : y != y ? x : x > y ? x : y; });
  }
}
template <typename T>
T AndOne(T a, T b) {
  return static_cast<T>(a & b);
}
template <typename T>
T OrOne(T a, T b) {
  return static_cast<T>(a | b);
}

// "Add", "Sub", "Mul", "Div", "Max", "And", "Or": types on A2. The count forms of And and Or also compile for 32-bit
// types, on a chip, and then process half of the data.
SIM_BINARY(Add, sim::cost::Rate(sizeof(T)), AddOne, int16_t, half, int32_t, float)
SIM_BINARY(Sub, sim::cost::Rate(sizeof(T)), SubOne, int16_t, half, int32_t, float)
SIM_BINARY(Mul, sim::cost::Rate(sizeof(T)), MulOne, int16_t, half, int32_t, float)
SIM_BINARY(Div, sim::cost::kDivRate, DivOne, half, float)
SIM_BINARY(Max, sim::cost::Rate(sizeof(T)), MaxOne, int16_t, half, int32_t, float)
SIM_BINARY(And, sim::cost::Rate(sizeof(T)), AndOne, int16_t, uint16_t)
SIM_BINARY(Or, sim::cost::Rate(sizeof(T)), OrOne, int16_t, uint16_t)
#undef SIM_BINARY

// dst = src0 * dst + src1
template <typename T>
void FusedMulAdd(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,
                 int64_t repeatTime, const BinaryRepeatParams& params) {
  static_assert(kOneOf<T, half, float>, "A2 has no FusedMulAdd of this type");
  const auto one = [](T a, T b, T c) {
    if constexpr (std::is_same_v<T, half>) {
      // Exact in double for what fits; kernels here use it for small integers only.
      return half(static_cast<float>(static_cast<double>(static_cast<float>(a)) * static_cast<float>(c) +
                                     static_cast<float>(b)));
    } else {
      return std::fma(a, c, b);
    }
  };
  Repeated<true>("FusedMulAdd", sim::cost::Rate(sizeof(T)), one, dst, src0, src1, static_cast<int64_t>(mask),
                 repeatTime, params);
}

// --- With a scalar ---------------------------------------------------------------------------------------------------

// The scalar has exactly the type of the elements, as in the API: a literal of another type does not compile.
template <typename T>
void Adds(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, int32_t count) {
  static_assert(kOneOf<T, int16_t, half, int32_t, float>, "A2 has no Adds of this type");
  Elementwise(
      "Adds", sim::cost::Rate(sizeof(T)), Narrowed<uint32_t>(count, 0, INT32_MAX, "count"),
      [&](T value) { return AddOne(value, scalar); }, dst, src);
}
template <typename T>
void Muls(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, int32_t count) {
  static_assert(kOneOf<T, int16_t, half, int32_t, float>, "A2 has no Muls of this type");
  Elementwise(
      "Muls", sim::cost::Rate(sizeof(T)), Narrowed<uint32_t>(count, 0, INT32_MAX, "count"),
      [&](T value) { return MulOne(value, scalar); }, dst, src);
}
template <typename T>
void CheckShift(const T& bits) {
  static_assert(kOneOf<T, uint16_t, uint32_t>, "A2 shifts 16 and 32 bits only; the kernels here shift unsigned ones");
  if (bits > 8 * sizeof(T)) sim::Here().Fail("ShiftLeft/ShiftRight", "a shift by %u bits", static_cast<unsigned>(bits));
}
template <typename T>
void ShiftLeft(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& bits, int32_t count) {
  CheckShift<T>(bits);
  Elementwise(
      "ShiftLeft", sim::cost::Rate(sizeof(T)), Narrowed<uint32_t>(count, 0, INT32_MAX, "count"),
      [&](T value) { return static_cast<T>(static_cast<uint64_t>(value) << bits); }, dst, src);
}
template <typename T>
void ShiftRight(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& bits, int32_t count) {
  CheckShift<T>(bits);
  Elementwise(
      "ShiftRight", sim::cost::Rate(sizeof(T)), Narrowed<uint32_t>(count, 0, INT32_MAX, "count"),
      [&](T value) { return static_cast<T>(static_cast<uint64_t>(value) >> bits); }, dst, src);
}
template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalar, int32_t count) {
  static_assert(kOneOf<T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>,
                "A2 has no Duplicate of this type");
  Elementwise(
      "Duplicate", sim::cost::Rate(sizeof(T)), Narrowed<uint32_t>(count, 0, INT32_MAX, "count"), [&] { return scalar; },
      dst);
}

// --- Cast ------------------------------------------------------------------------------------------------------------

constexpr unsigned Modes(std::initializer_list<RoundMode> modes) {
  unsigned bits = 0;
  for (const RoundMode mode : modes) bits |= 1u << static_cast<unsigned>(mode);
  return bits;
}
constexpr unsigned kNone = Modes({RoundMode::CAST_NONE});
constexpr unsigned kAll = Modes(
    {RoundMode::CAST_RINT, RoundMode::CAST_FLOOR, RoundMode::CAST_CEIL, RoundMode::CAST_ROUND, RoundMode::CAST_TRUNC});
constexpr unsigned kOdd = Modes({RoundMode::CAST_ODD});

// The modes of a pair of types, by the table of "Cast" for A2; no entry, no such instruction.
template <typename D, typename S>
constexpr unsigned kCastModes = 0;
template <>
inline constexpr unsigned kCastModes<half, int4b_t> = kNone;
template <>
inline constexpr unsigned kCastModes<half, uint8_t> = kNone;
template <>
inline constexpr unsigned kCastModes<half, int8_t> = kNone;
template <>
inline constexpr unsigned kCastModes<int4b_t, half> = kAll | kNone;
template <>
inline constexpr unsigned kCastModes<uint8_t, half> = kAll | kNone;
template <>
inline constexpr unsigned kCastModes<int8_t, half> = kAll | kNone;
template <>
inline constexpr unsigned kCastModes<int32_t, half> = kAll;
template <>
inline constexpr unsigned kCastModes<float, half> = kNone;
template <>
inline constexpr unsigned kCastModes<float, bfloat16_t> = kNone;
template <>
inline constexpr unsigned kCastModes<half, float> = kAll | kNone | kOdd;
template <>
inline constexpr unsigned kCastModes<bfloat16_t, float> = kAll;
template <>
inline constexpr unsigned kCastModes<int32_t, float> = kAll;
template <>
inline constexpr unsigned kCastModes<float, int32_t> = kAll | kNone;

template <typename D, typename S>
D CastOne(S value, RoundMode mode) {
  if constexpr (kOneOf<D, half>) {
    half result;
    result.bits = sim::Narrow<10>(static_cast<float>(value), mode);
    return result;
  } else if constexpr (kOneOf<D, bfloat16_t>) {
    bfloat16_t result;
    result.bits = sim::Narrow<7>(static_cast<float>(value), mode);
    return result;
  } else if constexpr (kOneOf<D, float>) {
    return static_cast<float>(value);  // int32 beyond 2^24: to nearest; the kernels have none
  } else {
    return static_cast<D>(
        sim::ToInteger(static_cast<float>(value), mode, std::numeric_limits<D>::min(), std::numeric_limits<D>::max()));
  }
}

template <typename D, typename S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode, uint32_t count) {
  static_assert(kCastModes<D, S> != 0, "A2 has no Cast between these types");
  sim::Core& core = sim::Here();
  core.SetCall("Cast");
  if ((kCastModes<D, S> >> static_cast<unsigned>(mode) & 1u) == 0) {
    core.Fail("Cast", "these types have no round mode %u", static_cast<unsigned>(mode));
  }
  constexpr uint32_t kWider = kBits<D> > kBits<S> ? kBits<D> : kBits<S>;
  const double rate = kWider >= 32 ? 64 : 128;
  if constexpr (kOneOf<S, int4b_t> || kOneOf<D, int4b_t>) {
    core.Begin(sim::kV, "Cast");
    if (count % 2 != 0) core.Fail("Cast", "an odd number of int4b_t");
    const uint32_t from = Source(src, count), to = Destination(dst, count);
    CheckOverlap(to, Bytes<D>(count), from, Bytes<S>(count), false);
    for (uint32_t i = 0; i < count; ++i) {  // element 2k is the low half of byte k
      if constexpr (kOneOf<S, int4b_t>) {
        const int nibble = core.Load<uint8_t>(from + i / 2) >> (i % 2 * 4) & 15;
        core.Store(to + i * 2, half(static_cast<float>(nibble < 8 ? nibble : nibble - 16)));
      } else {
        const int64_t value = sim::ToInteger(static_cast<float>(core.Load<half>(from + i * 2)), mode, -8, 7) & 15;
        const int64_t low = core.Load<uint8_t>(to + i / 2) & 15;
        core.Store(to + i / 2, static_cast<uint8_t>(i % 2 == 0 ? value : low | value << 4));
      }
    }
    core.End(Cycles(count, rate));
  } else {
    Elementwise("Cast", rate, count, [&](S value) { return CastOne<D, S>(value, mode); }, dst, src);
  }
}

// --- Compare and select ----------------------------------------------------------------------------------------------

enum class CMPMODE { LT, GT, EQ, LE, GE, NE };
enum class SELMODE { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

// Bit k of byte j is element 8 j + k. `other` gives what element i is compared with.
template <typename U, typename T, typename F>
void CompareWith(const LocalTensor<U>& dst, const LocalTensor<T>& src, CMPMODE mode, uint32_t count, const F& other) {
  static_assert(kOneOf<T, half, float> && kOneOf<U, uint8_t>, "A2 has no comparison of these types");
  sim::Core& core = sim::Here();
  if (count * sizeof(T) % 256 != 0) {
    core.Fail("Compares", "%u elements are no multiple of 256 B: the rest is left out silently", count);
  }
  const uint32_t from = Source(src, count), to = Destination(dst, count / 8);
  CheckOverlap(to, count / 8, from, Bytes<T>(count), false);
  for (uint32_t i = 0; i < count; i += 8) {
    unsigned byte = 0;
    for (uint32_t k = 0; k < 8; ++k) {
      const float a = static_cast<float>(core.Load<T>(from + (i + k) * static_cast<uint32_t>(sizeof(T))));
      const float b = static_cast<float>(other(i + k));
      const bool result = mode == CMPMODE::LT   ? a < b
                          : mode == CMPMODE::GT ? a > b
                          : mode == CMPMODE::EQ ? a == b
                          : mode == CMPMODE::LE ? a <= b
                          : mode == CMPMODE::GE ? a >= b
                                                : a != b;
      byte |= (result ? 1u : 0u) << k;
    }
    core.Store(to + i / 8, static_cast<uint8_t>(byte));
  }
  core.End(Cycles(count, sim::cost::Rate(sizeof(T))));
}
template <typename U, typename T>
void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src, const T& scalar, CMPMODE mode,
                   uint32_t count) {
  sim::Here().Begin(sim::kV, "CompareScalar");
  CompareWith(dst, src, mode, count, [&](uint32_t) { return scalar; });
}
template <typename U, typename T>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE mode,
             uint32_t count) {
  sim::Here().Begin(sim::kV, "Compare");
  const uint32_t second = Source(src1, count);
  CheckOverlap(dst.Operand(count / 8), count / 8, second, Bytes<T>(count), false);
  CompareWith(dst, src0, mode, count,
              [&](uint32_t i) { return sim::Here().Load<T>(second + i * static_cast<uint32_t>(sizeof(T))); });
}

// A 1 takes src0, a 0 the other.
template <typename T, typename U, typename F>
void SelectBy(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& src0, uint32_t count,
              const F& other) {
  static_assert(kOneOf<T, half, float> && kOneOf<U, uint8_t, uint16_t, uint32_t>, "A2 has no Select of these types");
  sim::Core& core = sim::Here();
  const uint32_t bits = mask.Operand((count + 7) / 8);
  core.Read(bits, (count + 7) / 8);
  const uint32_t from = Source(src0, count), to = Destination(dst, count);
  CheckOverlap(to, Bytes<T>(count), from, Bytes<T>(count), true);
  CheckOverlap(to, Bytes<T>(count), bits, (count + 7) / 8, false);
  for (uint32_t i = 0; i < count; ++i) {
    const bool first = (core.Load<uint8_t>(bits + i / 8) >> i % 8 & 1) != 0;
    const uint32_t byte = i * static_cast<uint32_t>(sizeof(T));
    core.Store<T>(to + byte, first ? core.Load<T>(from + byte) : other(byte));
  }
  core.End(Cycles(count, sim::cost::Rate(sizeof(T))));
}
template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& src0, const T& scalar,
            SELMODE mode, uint32_t count) {
  sim::Here().Begin(sim::kV, "Select");
  if (mode != SELMODE::VSEL_TENSOR_SCALAR_MODE) sim::Here().Fail("Select", "a scalar needs VSEL_TENSOR_SCALAR_MODE");
  SelectBy(dst, mask, src0, count, [&](uint32_t) { return scalar; });
}
template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE mode, uint32_t count) {
  sim::Here().Begin(sim::kV, "Select");
  if (mode != SELMODE::VSEL_TENSOR_TENSOR_MODE) sim::Here().Fail("Select", "two tensors need VSEL_TENSOR_TENSOR_MODE");
  const uint32_t second = Source(src1, count);
  CheckOverlap(dst.Operand(Bytes<T>(count)), Bytes<T>(count), second, Bytes<T>(count), true);
  SelectBy(dst, mask, src0, count, [&](uint32_t byte) { return sim::Here().Load<T>(second + byte); });
}

// --- Gather, broadcast, reduce ---------------------------------------------------------------------------------------

template <typename T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& offsets, uint32_t base,
            uint32_t count) {
  static_assert(kOneOf<T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>,
                "A2 has no Gather of this type");
  sim::Core& core = sim::Here();
  core.Begin(sim::kV, "Gather");
  const uint32_t from = Source(offsets, count), to = Destination(dst, count), table = src.Operand(0);
  CheckOverlap(to, Bytes<T>(count), from, Bytes<uint32_t>(count), false);
  CheckOverlap(to, Bytes<T>(count), table, src.GetSize() * sizeof(T), false);
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t offset = uint64_t{base} + core.Load<uint32_t>(from + i * 4);
    if (offset % sizeof(T) != 0)
      core.Fail("Gather", "offset %llu cuts an element", static_cast<unsigned long long>(offset));
    const uint32_t address = src.Span(offset, sizeof(T));
    core.Read(address, sizeof(T));
    core.Store(to + i * static_cast<uint32_t>(sizeof(T)), core.Load<T>(address));
  }
  core.End(Cycles(count, sim::cost::kGatherRate));
}

struct BrcbRepeatParams {
  BrcbRepeatParams(int64_t block, int64_t repeat)
      : dstBlkStride(Narrowed<uint16_t>(block, 0, 65535, "dstBlkStride")),
        dstRepStride(Narrowed<uint16_t>(repeat, 0, 65535, "dstRepStride")) {}
  uint16_t dstBlkStride, dstRepStride;
};

// Every repeat fills 8 data blocks, each with one of 8 elements.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t repeatTime, const BrcbRepeatParams& params) {
  static_assert(kOneOf<T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>,
                "A2 has no Brcb of this type");
  sim::Core& core = sim::Here();
  core.Begin(sim::kV, "Brcb");
  const uint32_t repeats = Narrowed<uint32_t>(repeatTime, 0, 255, "repeatTime");
  const uint32_t from = Source(src, repeats * 8);
  const uint64_t extent =
      repeats == 0 ? 0 : ((repeats - 1) * uint64_t{params.dstRepStride} + 7 * params.dstBlkStride + 1) * 32;
  const uint32_t to = dst.Operand(extent);
  CheckOverlap(to, static_cast<uint32_t>(extent), from, Bytes<T>(repeats * 8), false);
  for (uint32_t i = 0; i < repeats * 8; ++i) {
    const uint32_t block = to + (i / 8 * params.dstRepStride + i % 8 * params.dstBlkStride) * 32;
    const T value = core.Load<T>(from + i * static_cast<uint32_t>(sizeof(T)));
    core.Write(block, 32);
    for (uint32_t byte = 0; byte < 32; byte += sizeof(T)) core.Store(block + byte, value);
  }
  core.End(Cycles(repeats * 8, sim::cost::kBrcbRate));
}

// One result for every data block; 8 results a repeat, for fp32, in one data block.
template <typename F>
void BlockReduce(const char* name, const F& f, const LocalTensor<float>& dst, const LocalTensor<float>& src,
                 int32_t repeatTime, int32_t mask, int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride) {
  sim::Core& core = sim::Here();
  core.Begin(sim::kV, name);
  const uint32_t repeats = Narrowed<uint32_t>(repeatTime, 0, 255, "repeatTime");
  Narrowed<uint32_t>(mask, 64, 64, "mask (part of a repeat is not simulated)");
  const uint32_t rep = Narrowed<uint32_t>(srcRepStride, 0, 65535, "srcRepStride");
  const uint32_t blk = Narrowed<uint32_t>(srcBlkStride, 0, 65535, "srcBlkStride");
  const uint32_t step = Narrowed<uint32_t>(dstRepStride, 0, 65535, "dstRepStride");
  const Strided from = StridedOperand(src, 64, repeats, blk, rep);
  const uint32_t to = dst.Operand(repeats == 0 ? 0 : ((repeats - 1) * step + 1) * 32);
  for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
    for (uint32_t block = 0; block < 8; ++block) {
      const uint32_t address = from.At(repeat, block);
      core.Read(address, 32);
      float values[8];
      for (uint32_t i = 0; i < 8; ++i) values[i] = core.Load<float>(address + 4 * i);
      for (uint32_t n = 4; n > 0; n /= 2) {  // a tree of neighbours ("BlockReduceSum")
        for (uint32_t i = 0; i < n; ++i) values[i] = f(values[2 * i], values[2 * i + 1]);
      }
      core.Write(to + (repeat * step) * 32 + block * 4, 4);
      core.Store(to + (repeat * step) * 32 + block * 4, values[0]);
    }
  }
  core.End(Cycles(repeats * 64, 64));
}
inline void BlockReduceMax(const LocalTensor<float>& dst, const LocalTensor<float>& src, int32_t repeatTime,
                           int32_t mask, int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride) {
  BlockReduce("BlockReduceMax", MaxOne<float>, dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride);
}
inline void BlockReduceSum(const LocalTensor<float>& dst, const LocalTensor<float>& src, int32_t repeatTime,
                           int32_t mask, int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride) {
  BlockReduce("BlockReduceSum", AddOne<float>, dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride);
}

}  // namespace AscendC
