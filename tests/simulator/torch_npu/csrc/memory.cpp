// Device memory, which host code cannot touch, and pinned host memory.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "simulator.h"

namespace simulator {
namespace {

// Bit 52 lies outside the user half of every address space of x86-64 and AArch64 (48 to 56 bits), and below the byte
// that AArch64 ignores. The bits above it hold the device.
constexpr int kMark = 52;
constexpr int kDeviceBits = 3;
constexpr int kDevices = 1 << kDeviceBits;
constexpr size_t kAlignment = 512;               // as on the device
constexpr size_t kQuarantine = size_t{8} << 20;  // freed bytes that keep their poison for a while

constexpr int kFresh = 0xFF;  // NaN in every floating-point type, -1 in every integer
constexpr int kFreed = 0xDD;

void* device_address(void* host, int device) {
  const auto mark = (uint64_t{1} | uint64_t(device) << 1) << kMark;
  return reinterpret_cast<void*>(reinterpret_cast<uint64_t>(host) | mark);
}

void* aligned(size_t bytes) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, kAlignment, bytes) == 0, "The simulator has no host memory for ", bytes,
              " bytes");
  return memory;
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  static DeviceMemory& get() {
    static auto* memory = new DeviceMemory;  // never destroyed: tensors may outlive every static
    return *memory;
  }

  at::DataPtr allocate(size_t bytes) override {
    initialise();
    const auto device = current_device();
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(kNpu, device)};
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    std::lock_guard<std::mutex> lock(mutex_);
    auto& now = statistics_[device];
    TORCH_CHECK_WITH(OutOfMemoryError, now.allocated + int64_t(bytes) <= device_memory(),
                     "NPU out of memory. Tried to allocate ", bytes, " bytes (NPU ", int{device}, "; ", device_memory(),
                     " bytes total capacity; ", now.allocated, " bytes already allocated)");
    void* host = aligned(bytes);
    std::memset(host, kFresh, bytes);
    void* address = device_address(host, device);
    sizes_[address] = bytes;
    now.allocations++;
    now.allocated += bytes;
    now.allocated_peak = std::max(now.allocated_peak, now.allocated);
    now.reserved = std::max(now.reserved, now.allocated);
    now.reserved_peak = std::max(now.reserved_peak, now.reserved);
    return {address, address, &release, c10::Device(kNpu, device)};
  }

  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(host_address(to), host_address(from), bytes);
  }

  bool initialized() override { return is_initialised(); }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& device : statistics_) device.reserved = device.allocated;
  }
  void recordStream(const at::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto now = statistics(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes})
      (*bytes)[0].current = now.allocated, (*bytes)[0].peak = now.allocated_peak;
    stats.reserved_bytes[0].current = now.reserved;
    stats.reserved_bytes[0].peak = now.reserved_peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    statistics_.at(device).allocations = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& now = statistics_.at(device);
    now.allocated_peak = now.allocated;
    now.reserved_peak = now.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {device_memory() - statistics(device).reserved, device_memory()};
  }

  MemoryStatistics statistics(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return statistics_.at(device);
  }

 private:
  static void release(void* address) {
    if (!address) return;
    auto& memory = get();
    std::lock_guard<std::mutex> lock(memory.mutex_);
    const auto found = memory.sizes_.find(address);
    TORCH_CHECK(found != memory.sizes_.end(), "The simulator was asked to free memory that it did not allocate");
    const size_t bytes = found->second;
    memory.sizes_.erase(found);
    memory.statistics_[device_of_address(address)].allocated -= bytes;
    std::memset(host_address(address), kFreed, bytes);
    memory.freed_.emplace_back(host_address(address), bytes);
    memory.freed_bytes_ += bytes;
    while (memory.freed_bytes_ > kQuarantine) {
      std::free(memory.freed_.front().first);
      memory.freed_bytes_ -= memory.freed_.front().second;
      memory.freed_.pop_front();
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
  std::array<MemoryStatistics, kDevices> statistics_;
  std::deque<std::pair<void*, size_t>> freed_;
  size_t freed_bytes_ = 0;
};

class PinnedMemory final : public c10::Allocator {
 public:
  static PinnedMemory& get() {
    static auto* memory = new PinnedMemory;
    return *memory;
  }
  at::DataPtr allocate(size_t bytes) override {
    void* address = aligned(bytes + 1);  // so that an empty tensor has an address, too
    std::lock_guard<std::mutex> lock(mutex_);
    ends_[static_cast<char*>(address)] = static_cast<char*>(address) + bytes + 1;
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool holds(const char* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto after = ends_.upper_bound(address);
    return after != ends_.begin() && address < std::prev(after)->second;
  }

 private:
  static void release(void* address) {
    {
      std::lock_guard<std::mutex> lock(get().mutex_);
      get().ends_.erase(static_cast<char*>(address));
    }
    std::free(address);
  }
  std::mutex mutex_;
  std::map<const char*, const char*> ends_;
};

}  // namespace

void* host_address(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<uint64_t>(address) & ((uint64_t{1} << kMark) - 1));
}

int device_of_address(const void* address) {
  const auto mark = reinterpret_cast<uint64_t>(address) >> kMark;
  return mark & 1 ? int(mark >> 1 & (kDevices - 1)) : -1;
}

c10::Allocator* device_allocator() { return &DeviceMemory::get(); }
c10::Allocator* pinned_allocator() { return &PinnedMemory::get(); }
bool is_pinned(const void* address) { return PinnedMemory::get().holds(static_cast<const char*>(address)); }

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const c10::DeviceGuard guard(storage->device());
  auto memory = device_allocator()->allocate(bytes);
  const auto kept = std::min(bytes, storage->nbytes());
  if (kept) device_allocator()->copy_data(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

MemoryStatistics memory_statistics(c10::DeviceIndex device) { return DeviceMemory::get().statistics(device); }
void reset_peak_memory(c10::DeviceIndex device) { DeviceMemory::get().resetPeakStats(device); }
void empty_cache() { DeviceMemory::get().emptyCache(); }

}  // namespace simulator
