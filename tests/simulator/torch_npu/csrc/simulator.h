// What the files of the simulated device share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <map>
#include <string>
#include <utility>

namespace simulator {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// --- runtime.cpp: the machine and what happened on it ---

struct Counters {
  std::atomic<int64_t> copies_to_host{0};
  std::atomic<int64_t> copies_to_device{0};
  std::atomic<int64_t> items{0};
  std::atomic<int64_t> synchronisations{0};
  std::atomic<int64_t> stream_reads{0};
  std::atomic<int64_t> launches{0};
};
Counters& counters();
void record_launch(const std::string& op);
std::map<std::string, int64_t> launched_ops();
void reset_counters();

int device_count();
int64_t device_memory();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
c10::Device with_index(c10::Device device);

// Called by whatever needs the device; raises where the chip is unknown and in a forked child.
void initialise();
bool is_initialised();
bool is_forked_child();
const std::string& chip_name();
int chip_version();
bool has_bfloat16();

// --- memory.cpp ---

// Device addresses have bits set that no address of a host process has, so host code that follows one faults at once.
void* host_address(const void* device_address);
int device_of_address(const void* address);  // -1: not an address of a device
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void resize_storage(c10::StorageImpl* storage, size_t bytes);

struct MemoryStatistics {
  int64_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0, allocations = 0;
};
MemoryStatistics memory_statistics(c10::DeviceIndex device);
void reset_peak_memory(c10::DeviceIndex device);
void empty_cache();

// --- generator.cpp ---

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
// The generator of the host that produces a device generator's numbers.
at::Generator host_generator(const at::Generator& generator);

// --- tensors.cpp ---

// A CPU tensor over the same memory.
at::Tensor on_host(const at::Tensor& tensor);
// A copy on the device that counts as no transfer: a result of something the device is said to have computed.
at::Tensor to_device(const at::Tensor& host, c10::Device device);
// Gives `tensor` what was written into its `host` alias, also where writing has resized the alias.
void adopt(const at::Tensor& tensor, const at::Tensor& host);

// --- fallback.cpp ---

// Ops ("aten::name.overload", "aten::name" where it has no overload) without a kernel for the device.
void refuse_ops(std::string names);

}  // namespace simulator
