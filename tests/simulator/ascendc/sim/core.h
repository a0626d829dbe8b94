// One simulated vector core: its UB with a shadow of who touched what, the order that is known between its pipes, and a
// timeline. Every rule that a kernel breaks ends in Core::Fail.
#pragma once

#include <array>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "chip.h"
#include "memory.h"
#include "number.h"

namespace sim {

enum Pipe { kS, kV, kMte2, kMte3, kPipes };
constexpr const char* kPipeNames[kPipes] = {"S", "V", "MTE2", "MTE3"};

// What is known to have finished: for every pipe the number of its last finished instruction, and the time of that.
struct Known {
  std::array<int64_t, kPipes> done{};
  double time = 0;
};

// A piece of UB that a queue or a TBuf owns.
struct Buffer {
  enum State { kFree, kAllocated, kQueued, kDequeued, kPlain };
  uint32_t address, bytes;
  State state;
  uint32_t generation = 0;  // tensors of an earlier allocation are dead
  Known handover;           // by EnQue to DeQue, by FreeTensor to AllocTensor
};

class Core {
 public:
  Core(const Chip& chip, Memory* memory, const char* kernel, uint32_t block, uint32_t blocks)
      : chip_(chip), memory_(memory), kernel_(kernel), block_(block), blocks_(blocks) {
    ub_.assign(chip.ub_bytes, 0);
    written_.assign(chip.ub_bytes, false);
    shadow_.assign(chip.ub_bytes / kGranule, Granule{});
    const double share = chip.hbm / chip.hertz / (blocks < chip.cores ? blocks : chip.cores);
    load_rate_ = share < chip.load_bytes ? share : chip.load_bytes;
    store_rate_ = share < chip.store_bytes ? share : chip.store_bytes;
  }

  static Core*& Current() {
    static thread_local Core* core = nullptr;
    return core;
  }

  uint32_t block() const { return block_; }
  uint32_t blocks() const { return blocks_; }
  uint32_t Usable() const { return chip_.ub_bytes - kReserved; }

  // --- Violations ---

  // `rule` names the document that states it.
  [[noreturn]] __attribute__((format(printf, 3, 4))) void Fail(const char* rule, const char* format, ...) const {
    char what[256], text[640];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof(what), format, arguments);
    va_end(arguments);
    snprintf(text, sizeof(text), "kernel %s, block %u of %u, call %lld (%s): %s [%s]", kernel_, block_, blocks_,
             static_cast<long long>(calls_), call_, what, rule);
    throw Violation(text);
  }

  // --- Instructions ---

  // Starts the next instruction of a pipe. Every access until the next Begin is its own.
  void Begin(Pipe pipe, const char* name) {
    call_ = name;
    pipe_ = pipe;
    ++calls_;
    ++issued_[pipe];
  }
  // Ends it: the pipe was busy for `cycles`.
  void End(double cycles) {
    if (pipe_ != kS) {
      time_[kS] += cost::kIssue;
      busy_[kS] += cost::kIssue;
      if (time_[pipe_] < time_[kS]) time_[pipe_] = time_[kS];
    }
    time_[pipe_] += cycles;
    busy_[pipe_] += cycles;
    if (pipe_ == kS) known_[kS].done[kS] = issued_[kS];  // the scalar unit goes on when it has the result
  }

  void Read(uint32_t address, uint32_t bytes) { Touch(address, bytes, false); }
  void Write(uint32_t address, uint32_t bytes) { Touch(address, bytes, true); }

  uint8_t* At(uint32_t address) { return ub_.data() + address; }
  template <typename T>
  T Load(uint32_t address) const {
    T value;
    std::memcpy(&value, ub_.data() + address, sizeof(T));
    return value;
  }
  template <typename T>
  void Store(uint32_t address, T value) {
    std::memcpy(ub_.data() + address, &value, sizeof(T));
  }

  // --- Order ---

  Known Signal(Pipe from) const {
    Known known = known_[from];
    known.done[from] = issued_[from];
    known.time = time_[from];
    return known;
  }
  void Await(Pipe to, const Known& known) {
    for (int pipe = 0; pipe < kPipes; ++pipe) {
      if (known_[to].done[pipe] < known.done[pipe]) known_[to].done[pipe] = known.done[pipe];
    }
    if (time_[to] < known.time) time_[to] = known.time;
  }
  void Barrier(Pipe pipe) { Await(pipe, Signal(pipe)); }
  void BarrierAll() {
    for (int from = 0; from < kPipes; ++from) {
      for (int to = 0; to < kPipes; ++to) Await(static_cast<Pipe>(to), Signal(static_cast<Pipe>(from)));
    }
  }

  void SetFlag(Pipe from, Pipe to, int id) {
    call_ = "SetFlag";
    auto& flag = flags_[from][to][CheckId(id)];
    if (flag.set) Fail("SetFlag/WaitFlag", "flag %d of %s to %s is set twice", id, kPipeNames[from], kPipeNames[to]);
    flag = {true, Signal(from)};
  }
  void WaitFlag(Pipe from, Pipe to, int id) {
    call_ = "WaitFlag";
    auto& flag = flags_[from][to][CheckId(id)];
    if (!flag.set)
      Fail("SetFlag/WaitFlag", "flag %d of %s to %s was not set: the core hangs", id, kPipeNames[from], kPipeNames[to]);
    flag.set = false;
    Await(to, flag.known);
  }

  // --- UB ---

  Buffer* Allocate(uint32_t bytes, Buffer::State state) {
    call_ = "InitBuffer";
    const uint32_t rounded = (bytes + 31) / 32 * 32;
    if (bytes == 0) Fail("InitBuffer", "the buffer has no bytes");
    if (buffers_.size() == 64) Fail("InitBuffer", "more than 64 buffers");
    if (rounded > Usable() - used_) {
      Fail("NPU architecture 2201", "%u bytes of UB and %u more: %u are usable, the rest is reserved", used_, rounded,
           Usable());
    }
    buffers_.push_back({used_, rounded, state, 0, {}});
    used_ += rounded;
    return &buffers_.back();
  }
  // What a buffer held is gone for its next owner.
  void Forget(const Buffer& buffer) {
    std::fill(written_.begin() + buffer.address, written_.begin() + buffer.address + buffer.bytes, false);
  }

  // --- GM ---

  const Region& FindRegion(const uint8_t* pointer, uint64_t bytes) const {
    const Region* region = memory_->Find(pointer, bytes);
    if (region == nullptr) {
      Fail("SetGlobalBuffer", "GM %p and %llu bytes are no live argument of this launch",
           static_cast<const void*>(pointer), static_cast<unsigned long long>(bytes));
    }
    return *region;
  }
  void ReadGm(uint64_t bytes) { gm_bytes_ += bytes; }
  void WriteGm(const uint8_t* pointer, uint64_t bytes) {
    gm_bytes_ += bytes;
    if (!memory_->Record(pointer, bytes, block_)) {
      Fail("kernel contract", "GM %p and %llu bytes: written, but not an output, or written before",
           static_cast<const void*>(pointer), static_cast<unsigned long long>(bytes));
    }
  }
  double load_rate() const { return load_rate_; }
  double store_rate() const { return store_rate_; }

  // --- The end of a block ---

  void Finish() {
    call_ = "the end";
    for (int from = 0; from < kPipes; ++from) {
      for (int to = 0; to < kPipes; ++to) {
        for (const Flag& flag : flags_[from][to]) {
          if (flag.set) Fail("SetFlag/WaitFlag", "a flag of %s to %s is still set", kPipeNames[from], kPipeNames[to]);
        }
      }
    }
    for (const Buffer& buffer : buffers_) {
      if (buffer.state != Buffer::kFree && buffer.state != Buffer::kPlain) {
        Fail("TQue", "a tensor at UB 0x%x was not freed", buffer.address);
      }
    }
  }
  double Cycles() const { return *std::max_element(time_.begin(), time_.end()); }
  const std::array<double, kPipes>& busy() const { return busy_; }
  uint64_t gm_bytes() const { return gm_bytes_; }
  void SetCall(const char* name) { call_ = name; }

 private:
  static constexpr uint32_t kGranule = 32;  // bytes whose order is watched together: a data block
  struct Granule {
    int64_t write = 0;
    int write_pipe = 0;
    std::array<int64_t, kPipes> read{};
  };
  struct Flag {
    bool set = false;
    Known known;
  };

  int CheckId(int id) const {
    if (id < 0 || id > 5) Fail("AllocEventID/FetchEventID", "event id %d: 0 to 5 are free, 6 and 7 reserved", id);
    return id;
  }

  void Touch(uint32_t address, uint32_t bytes, bool write) {
    if (bytes == 0) return;
    if (address + bytes > used_) Fail("NPU architecture 2201", "UB 0x%x and %u bytes are no buffer", address, bytes);
    const auto& done = known_[pipe_].done;
    const int64_t self = issued_[pipe_];
    for (uint32_t i = address / kGranule; i <= (address + bytes - 1) / kGranule; ++i) {
      Granule& granule = shadow_[i];
      Ordered(done, self, granule.write_pipe, granule.write, i * kGranule, write ? "written" : "read", "written");
      if (!write) {
        granule.read[pipe_] = self;
        continue;
      }
      for (int pipe = 0; pipe < kPipes; ++pipe) {
        Ordered(done, self, pipe, granule.read[pipe], i * kGranule, "written", "read");
      }
      granule.write = self;
      granule.write_pipe = pipe_;
    }
    if (write) {
      std::fill(written_.begin() + address, written_.begin() + address + bytes, true);
      return;
    }
    for (uint32_t i = address; i < address + bytes; ++i) {
      if (!written_[i]) Fail("uninitialised read", "UB 0x%x was never written", i);
    }
  }
  void Ordered(const std::array<int64_t, kPipes>& done, int64_t self, int pipe, int64_t number, uint32_t address,
               const char* now, const char* before) const {
    if (number <= done[pipe] || (pipe == pipe_ && number == self)) return;
    Fail("synchronisation within a core", "UB 0x%x is %s by %s without waiting until %s has %s it", address, now,
         kPipeNames[pipe_], kPipeNames[pipe], before);
  }

  const Chip chip_;
  Memory* memory_;
  const char* kernel_;
  const uint32_t block_, blocks_;
  const char* call_ = "the start";
  Pipe pipe_ = kS;
  int64_t calls_ = 0;
  std::vector<uint8_t> ub_, written_;
  std::vector<Granule> shadow_;
  std::deque<Buffer> buffers_;
  uint32_t used_ = 0;
  std::array<Known, kPipes> known_{};
  std::array<int64_t, kPipes> issued_{};
  std::array<double, kPipes> time_{}, busy_{};
  std::array<std::array<std::array<Flag, 6>, kPipes>, kPipes> flags_{};
  double load_rate_, store_rate_;
  uint64_t gm_bytes_ = 0;
};

inline Core& Here() { return *Core::Current(); }

}  // namespace sim
