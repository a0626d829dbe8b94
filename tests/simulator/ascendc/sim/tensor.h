// GlobalTensor, LocalTensor, queues, TPipe, events and barriers.
#pragma once

#include <queue>

#include "core.h"

#define __aicore__
#define __global__
#define __gm__
using GM_ADDR = uint8_t*;
#define KERNEL_TASK_TYPE_DEFAULT(type) static_cast<void>(AscendC::type)

namespace AscendC {

enum KernelType { KERNEL_TYPE_AIV_ONLY };
enum class TPosition { GM, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;

inline int64_t GetBlockIdx() { return sim::Here().block(); }
inline int64_t GetBlockNum() { return sim::Here().blocks(); }

// --- Tensors ---------------------------------------------------------------------------------------------------------

template <typename T>
class GlobalTensor {
 public:
  // The size is optional in the API; here it is what every access is held against.
  void SetGlobalBuffer(T* data, uint64_t elements) {
    sim::Here().SetCall("SetGlobalBuffer");
    if (reinterpret_cast<uintptr_t>(data) % sizeof(T) != 0) {
      sim::Here().Fail("DataCopy", "GM %p is not aligned to its elements", static_cast<const void*>(data));
    }
    sim::Here().FindRegion(reinterpret_cast<const uint8_t*>(data), elements * sizeof(T));
    data_ = data;
    elements_ = elements;
  }
  GlobalTensor operator[](uint64_t offset) const {
    if (offset > elements_) {
      sim::Here().Fail("GlobalTensor", "element %llu of %llu", static_cast<unsigned long long>(offset),
                       static_cast<unsigned long long>(elements_));
    }
    GlobalTensor part;
    part.data_ = data_ + offset;
    part.elements_ = elements_ - offset;
    return part;
  }
  T GetValue(uint64_t offset) const {
    sim::Here().Begin(sim::kS, "GlobalTensor::GetValue");
    const T* pointer = Check(offset, 1);
    sim::Here().ReadGm(sizeof(T));
    sim::Here().End(sim::cost::kScalarGm);
    T value;
    std::memcpy(&value, pointer, sizeof(T));
    return value;
  }

  // For the simulator: the address of `count` elements, which must be there.
  T* Check(uint64_t offset, uint64_t count) const {
    if (offset > elements_ || count > elements_ - offset) {
      sim::Here().Fail("GlobalTensor", "GM %p: %llu elements from %llu on, of %llu", static_cast<const void*>(data_),
                       static_cast<unsigned long long>(count), static_cast<unsigned long long>(offset),
                       static_cast<unsigned long long>(elements_));
    }
    sim::Here().FindRegion(reinterpret_cast<const uint8_t*>(data_ + offset), count * sizeof(T));
    return data_ + offset;
  }

 private:
  T* data_ = nullptr;
  uint64_t elements_ = 0;
};

// Bits of an element; int4b_t has no byte of its own.
template <typename T>
constexpr uint32_t kBits = 8 * sizeof(T);
template <>
inline constexpr uint32_t kBits<int4b_t> = 4;

template <typename T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(sim::Buffer* buffer, TPosition position)
      : buffer_(buffer),
        address_(buffer->address),
        bytes_(buffer->bytes),
        generation_(buffer->generation),
        position_(position) {}

  LocalTensor operator[](uint32_t offset) const {
    const uint64_t begin = uint64_t{offset} * kBits<T> / 8;
    if (begin > bytes_)
      sim::Here().Fail("LocalTensor", "element %u lies outside the tensor at UB 0x%x", offset, address_);
    LocalTensor part = *this;
    part.address_ += static_cast<uint32_t>(begin);
    part.bytes_ -= static_cast<uint32_t>(begin);
    return part;
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    LocalTensor<U> other;
    other.buffer_ = buffer_;
    other.address_ = address_;
    other.bytes_ = bytes_;
    other.generation_ = generation_;
    other.position_ = position_;
    return other;
  }
  uint32_t GetSize() const { return static_cast<uint32_t>(uint64_t{bytes_} * 8 / kBits<T>); }

  T GetValue(uint32_t offset) const {
    sim::Here().Begin(sim::kS, "GetValue");
    const uint32_t address = Span(offset * sizeof(T), sizeof(T));
    sim::Here().Read(address, sizeof(T));
    sim::Here().End(sim::cost::kScalarUb);
    return sim::Here().Load<T>(address);
  }
  void SetValue(uint32_t offset, T value) const {
    sim::Here().Begin(sim::kS, "SetValue");
    const uint32_t address = Span(offset * sizeof(T), sizeof(T));
    sim::Here().Write(address, sizeof(T));
    sim::Here().Store(address, value);
    sim::Here().End(sim::cost::kScalarUb);
  }

  // For the simulator: the address of bytes that must lie in the tensor, which must still be its owner's.
  uint32_t Span(uint64_t offset, uint64_t bytes) const {
    if (buffer_ == nullptr) sim::Here().Fail("LocalTensor", "the tensor has no buffer");
    if (buffer_->generation != generation_ || buffer_->state == sim::Buffer::kFree) {
      sim::Here().Fail("TQue", "the tensor at UB 0x%x was freed", address_);
    }
    if (buffer_->state == sim::Buffer::kQueued) {
      sim::Here().Fail("TQue", "the tensor at UB 0x%x is in its queue: DeQue comes first", address_);
    }
    if (offset + bytes > bytes_) {
      sim::Here().Fail("LocalTensor", "%llu bytes from %llu on, of the %u at UB 0x%x",
                       static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset), bytes_,
                       address_);
    }
    return address_ + static_cast<uint32_t>(offset);
  }
  // The same for an operand of a vector instruction or a transfer, which begins at a data block.
  uint32_t Operand(uint64_t bytes) const {
    if (address_ % 32 != 0)
      sim::Here().Fail("general notes and restrictions", "UB 0x%x is not aligned to 32 B", address_);
    return Span(0, bytes);
  }
  TPosition position() const { return position_; }
  sim::Buffer* buffer() const { return buffer_; }

 private:
  template <typename>
  friend class LocalTensor;
  sim::Buffer* buffer_ = nullptr;
  uint32_t address_ = 0, bytes_ = 0, generation_ = 0;
  TPosition position_ = TPosition::VECCALC;
};

// --- Events and barriers ---------------------------------------------------------------------------------------------

enum class HardEvent { MTE2_V, V_MTE2, V_MTE3, MTE3_V, S_V, V_S, MTE2_S, S_MTE2, MTE3_MTE2 };
using TEventID = int8_t;
enum pipe_t { PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

constexpr sim::Pipe From(HardEvent event) {
  switch (event) {
    case HardEvent::MTE2_V:
    case HardEvent::MTE2_S:
      return sim::kMte2;
    case HardEvent::V_MTE2:
    case HardEvent::V_MTE3:
    case HardEvent::V_S:
      return sim::kV;
    case HardEvent::MTE3_V:
    case HardEvent::MTE3_MTE2:
      return sim::kMte3;
    default:
      return sim::kS;
  }
}
constexpr sim::Pipe To(HardEvent event) {
  switch (event) {
    case HardEvent::MTE2_V:
    case HardEvent::MTE3_V:
    case HardEvent::S_V:
      return sim::kV;
    case HardEvent::V_MTE2:
    case HardEvent::S_MTE2:
    case HardEvent::MTE3_MTE2:
      return sim::kMte2;
    case HardEvent::V_MTE3:
      return sim::kMte3;
    default:
      return sim::kS;
  }
}

template <HardEvent kEvent>
void SetFlag(TEventID id) {
  sim::Here().SetFlag(From(kEvent), To(kEvent), id);
}
template <HardEvent kEvent>
void WaitFlag(TEventID id) {
  sim::Here().WaitFlag(From(kEvent), To(kEvent), id);
}

template <pipe_t kPipe>
void PipeBarrier() {
  if constexpr (kPipe == PIPE_ALL) {
    sim::Here().BarrierAll();
  } else {
    sim::Here().Barrier(kPipe == PIPE_V ? sim::kV : kPipe == PIPE_MTE2 ? sim::kMte2 : sim::kMte3);
  }
}

// --- Queues ----------------------------------------------------------------------------------------------------------

// VECIN hands from MTE2 to V, VECOUT from V to MTE3; a freed buffer goes back the other way.
template <TPosition kPosition, int kDepth>
class TQue {
  static_assert(kPosition == TPosition::VECIN || kPosition == TPosition::VECOUT);
  static constexpr sim::Pipe kFills = kPosition == TPosition::VECIN ? sim::kMte2 : sim::kV;
  static constexpr sim::Pipe kEmpties = kPosition == TPosition::VECIN ? sim::kV : sim::kMte3;

 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    sim::Here().SetCall("AllocTensor");
    for (size_t i = 0; i < buffers_.size(); ++i) {
      sim::Buffer* buffer = buffers_[(next_ + i) % buffers_.size()];
      if (buffer->state != sim::Buffer::kFree) continue;
      next_ = (next_ + i + 1) % buffers_.size();
      buffer->state = sim::Buffer::kAllocated;
      ++buffer->generation;
      sim::Here().Await(kFills, buffer->handover);
      sim::Here().Forget(*buffer);
      return LocalTensor<T>(buffer, kPosition);
    }
    sim::Here().Fail("TQue", "no buffer of the queue is free: the core hangs");
  }
  template <typename T>
  void EnQue(const LocalTensor<T>& tensor) {
    sim::Here().SetCall("EnQue");
    tensor.Span(0, 0);
    Own(tensor.buffer(), sim::Buffer::kAllocated, "was not just allocated");
    if (queued_.size() == kDepth) sim::Here().Fail("TQue", "more tensors in the queue than its depth, %d", kDepth);
    tensor.buffer()->state = sim::Buffer::kQueued;
    tensor.buffer()->handover = sim::Here().Signal(kFills);
    queued_.push(tensor.buffer());
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    sim::Here().SetCall("DeQue");
    if (queued_.empty()) sim::Here().Fail("TQue", "the queue is empty");
    sim::Buffer* buffer = queued_.front();
    queued_.pop();
    buffer->state = sim::Buffer::kDequeued;
    sim::Here().Await(kEmpties, buffer->handover);
    return LocalTensor<T>(buffer, kPosition);
  }
  template <typename T>
  void FreeTensor(const LocalTensor<T>& tensor) {
    sim::Here().SetCall("FreeTensor");
    tensor.Span(0, 0);
    Own(tensor.buffer(), sim::Buffer::kDequeued, "was not dequeued");
    tensor.buffer()->state = sim::Buffer::kFree;
    tensor.buffer()->handover = sim::Here().Signal(kEmpties);
  }

 private:
  friend class TPipe;
  void Own(sim::Buffer* buffer, sim::Buffer::State state, const char* otherwise) const {
    if (std::find(buffers_.begin(), buffers_.end(), buffer) == buffers_.end()) {
      sim::Here().Fail("TQue", "the tensor at UB 0x%x is another queue's", buffer->address);
    }
    if (buffer->state != state) sim::Here().Fail("TQue", "the tensor at UB 0x%x %s", buffer->address, otherwise);
  }
  std::vector<sim::Buffer*> buffers_;
  std::queue<sim::Buffer*> queued_;
  size_t next_ = 0;
};

template <TPosition kPosition>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() const {
    sim::Here().SetCall("Get");
    if (buffer_ == nullptr) sim::Here().Fail("TBuf", "InitBuffer comes first");
    return LocalTensor<T>(buffer_, kPosition);
  }

 private:
  friend class TPipe;
  sim::Buffer* buffer_ = nullptr;
};

class TPipe {
 public:
  TPipe() { Current() = this; }
  ~TPipe() { Current() = nullptr; }
  static TPipe*& Current() {
    static thread_local TPipe* pipe = nullptr;
    return pipe;
  }

  template <TPosition kPosition, int kDepth>
  void InitBuffer(TQue<kPosition, kDepth>& queue, uint8_t number, uint32_t bytes) {
    if (!queue.buffers_.empty()) sim::Here().Fail("InitBuffer", "the queue has its buffers already");
    for (int i = 0; i < number; ++i) queue.buffers_.push_back(sim::Here().Allocate(bytes, sim::Buffer::kFree));
  }
  template <TPosition kPosition>
  void InitBuffer(TBuf<kPosition>& buffer, uint32_t bytes) {
    if (buffer.buffer_ != nullptr) sim::Here().Fail("InitBuffer", "the buffer has its memory already");
    buffer.buffer_ = sim::Here().Allocate(bytes, sim::Buffer::kPlain);
  }
  // The same id for an event every time: a kernel here has one flag of a kind up at a time.
  TEventID FetchEventID(HardEvent) { return 0; }
};

inline TPipe* GetTPipePtr() { return TPipe::Current(); }

}  // namespace AscendC
