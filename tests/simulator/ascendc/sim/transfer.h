// Transfers between GM and UB. Only DataCopyPad: it takes every size, and no kernel here needs another.
#pragma once

#include "tensor.h"

namespace AscendC {

// A parameter of a narrow field: a larger value would be cut off silently on the chip.
template <typename Field>
Field Narrowed(int64_t value, int64_t lowest, int64_t highest, const char* name) {
  if (value < lowest || value > highest) {
    sim::Here().Fail("parameter ranges", "%s is %lld, not in [%lld, %lld]", name, static_cast<long long>(value),
                     static_cast<long long>(lowest), static_cast<long long>(highest));
  }
  return static_cast<Field>(value);
}

// blockLen in bytes; a stride in bytes on the side of GM and in data blocks on the side of the UB.
struct DataCopyExtParams {
  DataCopyExtParams(int64_t count, int64_t length, int64_t src, int64_t dst, uint32_t)
      : blockCount(Narrowed<uint16_t>(count, 1, 4095, "blockCount")),
        blockLen(Narrowed<uint32_t>(length, 1, 2097151, "blockLen")),
        srcStride(Narrowed<uint32_t>(src, 0, UINT32_MAX, "srcStride")),
        dstStride(Narrowed<uint32_t>(dst, 0, UINT32_MAX, "dstStride")) {}
  uint16_t blockCount;
  uint32_t blockLen, srcStride, dstStride;
};

template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams(bool pad, int64_t left, int64_t right, T value)
      : isPad(pad),
        leftPadding(Narrowed<uint8_t>(left * sizeof(T), 0, 32, "leftPadding")),
        rightPadding(Narrowed<uint8_t>(right * sizeof(T), 0, 32, "rightPadding")),
        paddingValue(value) {}
  bool isPad;
  uint8_t leftPadding, rightPadding;  // kept in bytes
  T paddingValue;
};

// "DataCopyPad": the types on A2.
template <typename T>
constexpr bool kTransfers = std::is_same_v<T, int8_t> || std::is_same_v<T, uint8_t> || std::is_same_v<T, int16_t> ||
                            std::is_same_v<T, uint16_t> || std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t> ||
                            std::is_same_v<T, int32_t> || std::is_same_v<T, uint32_t> || std::is_same_v<T, float>;

template <typename T>
void CheckTransfer(const LocalTensor<T>& tensor, const DataCopyExtParams& params) {
  static_assert(kTransfers<T>, "A2 has no DataCopyPad of this type");
  if (tensor.position() != TPosition::VECIN && tensor.position() != TPosition::VECOUT) {
    sim::Here().Fail("DataCopyPad", "on A2 the local tensor is a VECIN or VECOUT");
  }
  if (params.blockLen % sizeof(T) != 0) sim::Here().Fail("DataCopyPad", "blockLen %u cuts an element", params.blockLen);
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& pad) {
  sim::Core& core = sim::Here();
  core.Begin(sim::kMte2, "DataCopyPad to UB");
  CheckTransfer(dst, params);
  // Without isPad the bytes up to the next data block are not defined by us: reading them is a fault of the kernel.
  const uint32_t left = pad.isPad ? pad.leftPadding : 0, right = pad.isPad ? pad.rightPadding : 0;
  const uint32_t length = left + params.blockLen + right;
  const uint32_t step = (length + 31) / 32 * 32 + params.dstStride * 32;
  if (right != 0 && (params.blockLen + left + 31) / 32 * 32 < length) {
    core.Fail("DataCopyPad", "the padding reaches beyond the last data block");
  }
  const uint64_t extent = uint64_t{params.blockCount - 1u} * step + (length + 31) / 32 * 32;
  const uint32_t address = dst.Operand(extent);
  const uint64_t src_step = uint64_t{params.blockLen} + params.srcStride;
  for (uint32_t i = 0; i < params.blockCount; ++i) {
    const uint64_t offset = i * src_step / sizeof(T);
    const T* from = src.Check(offset, params.blockLen / sizeof(T));
    const uint32_t to = address + i * step;
    core.Write(to, length);
    for (uint32_t byte = 0; byte < left; byte += sizeof(T)) core.Store(to + byte, pad.paddingValue);
    std::memcpy(core.At(to + left), from, params.blockLen);
    for (uint32_t byte = 0; byte < right; byte += sizeof(T)) {
      core.Store(to + left + params.blockLen + byte, pad.paddingValue);
    }
  }
  const uint64_t bytes = uint64_t{params.blockCount} * params.blockLen;
  core.ReadGm(bytes);
  core.End(sim::cost::kTransferStart + static_cast<double>(bytes) / core.load_rate());
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params) {
  sim::Core& core = sim::Here();
  core.Begin(sim::kMte3, "DataCopyPad to GM");
  CheckTransfer(src, params);
  const uint32_t step = (params.blockLen + 31) / 32 * 32 + params.srcStride * 32;
  const uint32_t address = src.Operand(uint64_t{params.blockCount - 1u} * step + params.blockLen);
  const uint64_t dst_step = uint64_t{params.blockLen} + params.dstStride;
  for (uint32_t i = 0; i < params.blockCount; ++i) {
    T* to = dst.Check(i * dst_step / sizeof(T), params.blockLen / sizeof(T));
    core.Read(address + i * step, params.blockLen);
    core.WriteGm(reinterpret_cast<const uint8_t*>(to), params.blockLen);
    std::memcpy(static_cast<void*>(to), core.At(address + i * step), params.blockLen);
  }
  const uint64_t bytes = uint64_t{params.blockCount} * params.blockLen;
  core.End(sim::cost::kTransferStart + static_cast<double>(bytes) / core.store_rate());
}

}  // namespace AscendC
