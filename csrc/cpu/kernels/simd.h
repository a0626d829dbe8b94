// The vector vocabulary of the kernels: typed loads and stores as fp32, a 16-entry table, parallel loops.
//
// Compiled once per target with that target's instructions, so nothing here may have external linkage: the linker
// would keep one copy for all targets. A test checks the object files.
#pragma once

#include <hwy/highway.h>

#include "common/dtype.h"
#include "cpu/parallel.h"

namespace bnb {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;  // as many lanes as F32, for each of these
using U8 = hn::Rebind<uint8_t, F32>;
using I8 = hn::Rebind<int8_t, F32>;
using VF = hn::Vec<F32>;
using VU = hn::Vec<U32>;
constexpr F32 f32;
constexpr U32 u32;
constexpr I32 i32;
constexpr U16 u16;
constexpr U8 u8;
constexpr I8 i8;

constexpr int64_t kLanes = HWY_LANES(float);

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- Elements as fp32 ------------------------------------------------------------------------------------------------

inline VF Load(const float* p) { return hn::LoadU(f32, p); }
inline VF Load(const BFloat16* p) {
  const auto bits = hn::LoadU(u16, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(f32, hn::ShiftLeft<16>(hn::PromoteTo(u32, bits)));
}
inline void Store(VF v, float* p) { hn::StoreU(v, f32, p); }
inline void Store(hn::Vec<U8> v, uint8_t* p) { hn::StoreU(v, u8, p); }

// The 16 bits that `v` has as a T, in the low half of each lane.
inline VU Bits16(VF v, const BFloat16*) {
  // Not AVX-512's own conversion, which flushes subnormals.
  const VU bits = hn::BitCast(u32, v);
  const VU even = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 1));
  const VU rounded = hn::ShiftRight<16>(bits + even + hn::Set(u32, 0x7FFF));
  return hn::IfThenElse(hn::RebindMask(u32, hn::IsNaN(v)), hn::Set(u32, 0x7FC0), rounded);
}
inline void Store(VF v, BFloat16* p) {
  hn::StoreU(hn::TruncateTo(u16, Bits16(v, p)), u16, reinterpret_cast<uint16_t*>(p));
}

#if HWY_TARGET == HWY_SCALAR
inline VF Load(const Half* p) { return hn::Set(f32, ToFloat(*p)); }
inline void Store(VF v, Half* p) { FromFloat(hn::GetLane(v), p); }
inline VU Bits16(VF v, const Half*) {
  Half half;
  Store(v, &half);
  return hn::Set(u32, half.bits);
}
#else
using F16 = hn::Rebind<hwy::float16_t, F32>;
constexpr F16 f16;
inline VF Load(const Half* p) { return hn::PromoteTo(f32, hn::LoadU(f16, reinterpret_cast<const hwy::float16_t*>(p))); }
inline void Store(VF v, Half* p) { hn::StoreU(hn::DemoteTo(f16, v), f16, reinterpret_cast<hwy::float16_t*>(p)); }
inline VU Bits16(VF v, const Half*) { return hn::PromoteTo(u32, hn::BitCast(u16, hn::DemoteTo(f16, v))); }
#endif

// Integers count as elements too: int32, and int8 codes, which are stored rounded, ties to even.
inline VF Load(const int8_t* p) { return hn::ConvertTo(f32, hn::PromoteTo(i32, hn::LoadU(i8, p))); }
inline VF Load(const int32_t* p) { return hn::ConvertTo(f32, hn::LoadU(i32, p)); }
inline void Store(VF v, int8_t* p) { hn::StoreU(hn::DemoteTo(i8, hn::NearestInt(v)), i8, p); }

// The first `count` (at most kLanes) elements; the others are 0. Never touches memory past them.
template <typename T>
inline VF LoadPart(const T* p, int64_t count) {
  HWY_ALIGN T buffer[kLanes] = {};
  memcpy(buffer, p, static_cast<size_t>(count) * sizeof(T));
  return Load(buffer);
}

// The same for 32-bit lanes, for which x86 has loads that do not fault where the mask is off.
template <typename D>
HWY_INLINE hn::Vec<D> LoadPart32(D d, const void* p, int64_t count) {
  using T = hn::TFromD<D>;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::MaskedLoad(hn::FirstN(d, static_cast<size_t>(count)), d, static_cast<const T*>(p));
#else
  HWY_ALIGN T buffer[kLanes] = {};
  memcpy(buffer, p, static_cast<size_t>(count) * sizeof(T));
  return hn::Load(d, buffer);
#endif
}
inline VF LoadPart(const float* p, int64_t count) { return LoadPart32(f32, p, count); }

template <typename V, typename T>
inline void StorePart(V v, T* p, int64_t count) {
  HWY_ALIGN T buffer[kLanes];
  Store(v, buffer);
  memcpy(p, buffer, static_cast<size_t>(count) * sizeof(T));
}

// Calls `body(offset, move)` for every full vector of `count` elements and once for the rest: `move(p)` loads and
// `move(v, p)` stores the elements of one vector.
struct Whole {
  template <typename T>
  VF operator()(const T* p) const {
    return Load(p);
  }
  template <typename V, typename T>
  void operator()(V v, T* p) const {
    Store(v, p);
  }
};
struct Part {
  int64_t count;
  template <typename T>
  VF operator()(const T* p) const {
    return LoadPart(p, count);
  }
  template <typename V, typename T>
  void operator()(V v, T* p) const {
    StorePart(v, p, count);
  }
};

template <typename Body>
HWY_INLINE void ForVectors(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, Whole());
  if (i < count) body(i, Part{count - i});
}

// `count` with 1 added where `mask` is set.
template <typename M>
inline hn::Vec<I32> CountIf(hn::Vec<I32> count, M mask) {
#if HWY_TARGET <= HWY_AVX3 && !HWY_ARCH_ARM
  return hn::IfThenElse(hn::RebindMask(i32, mask), count + hn::Set(i32, 1), count);  // one masked addition
#else
  return count - hn::VecFromMask(i32, hn::RebindMask(i32, mask));  // a set mask is -1
#endif
}

// The largest of the magnitudes added; NaN if there is one, 0 if there is none. The bits of magnitudes, taken as
// integers, are in the order of the magnitudes, and NaN is the largest.
class LargestMagnitude {
 public:
  HWY_INLINE void Add(VF magnitudes) { bits_ = hn::Max(bits_, hn::BitCast(i32, magnitudes)); }
  float Value() const { return FloatOf(static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(i32, bits_)))); }

 private:
  hn::Vec<I32> bits_ = hn::Zero(i32);
};

template <typename T>
inline float AbsMax(const T* p, int64_t count) {
  LargestMagnitude largest;
  ForVectors(count, [&](int64_t i, auto move) { largest.Add(hn::Abs(move(p + i))); });
  return largest.Value();
}

// --- Scaling ---------------------------------------------------------------------------------------------------------

// `x * (target / absmax)`, or `x / absmax * target` where that reciprocal is not finite; 0 stays 0 in a block of zeros.
class Scaler {
 public:
  explicit Scaler(float absmax, float target = 1.0f) : divide_(false), target_(target) {
    factor_ = target / absmax;
    if (IsFinite(factor_)) return;
    divide_ = absmax != 0.0f;
    factor_ = divide_ ? absmax : 1.0f;
  }
  // Sets `scaled(v)` going: one branch for a whole block.
  template <typename Body>
  HWY_INLINE void Run(const Body& body) const {
    const VF factor = hn::Set(f32, factor_);
    if (HWY_LIKELY(!divide_)) {
      body([factor](VF v) HWY_ATTR { return v * factor; });
    } else {
      const VF target = hn::Set(f32, target_);
      body([factor, target](VF v) HWY_ATTR { return v / factor * target; });
    }
  }

 private:
  bool divide_;
  float target_, factor_;
};

// --- A table of 16 fp32 entries --------------------------------------------------------------------------------------

// Looks up each lane of an index below 16. With kIgnoresHighBits the index may be anything: its low four bits count.
// `entries(i)` gives the vector of entries i, i + 1, ...
class Table16 {
#if HWY_TARGET == HWY_SCALAR
 public:
  static constexpr bool kIgnoresHighBits = false;
  template <typename Entries>
  explicit Table16(const Entries& entries) {
    for (int i = 0; i < 16; ++i) entries_[i] = hn::GetLane(entries(i));
  }
  VF operator()(VU index) const { return hn::Set(f32, entries_[hn::GetLane(index)]); }

 private:
  float entries_[16];
#elif HWY_TARGET == HWY_NEON
 public:
  static constexpr bool kIgnoresHighBits = false;
  template <typename Entries>
  HWY_INLINE explicit Table16(const Entries& entries) {
    for (int i = 0; i < 4; ++i) table_.val[i] = vreinterpretq_u8_f32(entries(4 * i).raw);
  }
  HWY_INLINE VF operator()(VU index) const {
    // Byte k of an entry is at 4 * index + k.
    const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100u), index.raw, 0x04040404u);
    return VF(vreinterpretq_f32_u8(vqtbl4q_u8(table_, vreinterpretq_u8_u32(bytes))));
  }

 private:
  uint8x16x4_t table_;
#elif HWY_TARGET == HWY_AVX2
 public:
  static constexpr bool kIgnoresHighBits = true;
  template <typename Entries>
  HWY_INLINE explicit Table16(const Entries& entries) : low_(entries(0)), high_(entries(8)) {}
  HWY_INLINE VF operator()(VU index) const {
    // vpermps looks at three bits; bit 3, moved to the sign, chooses the half.
    const __m256 half = _mm256_castsi256_ps(hn::ShiftLeft<28>(index).raw);
    return VF{_mm256_blendv_ps(_mm256_permutevar8x32_ps(low_.raw, index.raw),
                               _mm256_permutevar8x32_ps(high_.raw, index.raw), half)};
  }

 private:
  VF low_, high_;
#else
 public:
  static constexpr bool kIgnoresHighBits = true;
  template <typename Entries>
  HWY_INLINE explicit Table16(const Entries& entries) : table_(entries(0)) {}
  HWY_INLINE VF operator()(VU index) const { return VF{_mm512_permutexvar_ps(index.raw, table_.raw)}; }

 private:
  VF table_;
#endif
};

// The low four bits of each lane, as far as Table16 needs them cleared.
HWY_INLINE VU LowNibble(VU bytes) { return Table16::kIgnoresHighBits ? bytes : hn::And(bytes, hn::Set(u32, 15)); }

// --- Parallel loops --------------------------------------------------------------------------------------------------

constexpr int64_t kGrain = 1 << 15;  // elements; below this, waking a thread costs more than it saves

// `body(begin, end)` over ranges that cover [0, total).
template <typename Body>
inline void Parallel(int64_t total, int64_t grain, int threads, const Body& body) {
  ParallelFor(
      total, grain, threads,
      [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); }, &body);
}

// `body(begin, end)` over ranges of elements that begin on multiples of a cache line, whatever their type.
template <typename Body>
inline void ParallelElements(int64_t n, int threads, const Body& body) {
  constexpr int64_t kLine = 64;
  Parallel(CeilDiv(n, kLine), kGrain / kLine, threads,
           [&](int64_t begin, int64_t end) { body(begin * kLine, Min(end * kLine, n)); });
}

// Calls `body` with a null pointer of the element type.
template <typename Body>
inline void WithType(int dtype, const Body& body) {
  switch (dtype) {
    case BNB_FP32:
      return body(static_cast<float*>(nullptr));
    case BNB_FP16:
      return body(static_cast<Half*>(nullptr));
    default:
      return body(static_cast<BFloat16*>(nullptr));
  }
}

}  // namespace
}  // namespace bnb
