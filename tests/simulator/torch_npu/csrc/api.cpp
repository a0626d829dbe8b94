// What the Python side calls: plain C functions through ctypes, and operators where tensors are involved.
#include <torch/library.h>

#include <cstring>

#include "simulator.h"

using namespace simulator;

namespace {

// Functions that may raise return the message for Python to raise; it stays valid until the next call.
template <class Function>
const char* message_of(Function function) {
  static thread_local std::string message;
  try {
    function();
    return nullptr;
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
    return message.c_str();
  }
}

TORCH_LIBRARY(simulator, m) {
  m.def("default_generator(int device) -> Generator?", [](int64_t device) -> std::optional<at::Generator> {
    return default_generator(static_cast<c10::DeviceIndex>(device));
  });
  m.def("on_host(Tensor tensor) -> Tensor", torch::dispatch(c10::DispatchKey::PrivateUse1, on_host));
  m.def("to_device(Tensor host, Device device) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, to_device));
}

}  // namespace

extern "C" {

const char* simulator_initialise() { return message_of(initialise); }
const char* simulator_set_device(int device) {
  return message_of([&] { set_current_device(static_cast<c10::DeviceIndex>(device)); });
}
int simulator_is_initialised() { return is_initialised(); }
int simulator_is_forked_child() { return is_forked_child(); }
int simulator_device_count() { return device_count(); }
int simulator_current_device() { return current_device(); }
int64_t simulator_device_memory() { return device_memory(); }
int simulator_chip_version() { return chip_version(); }
const char* simulator_chip_name() { return chip_name().c_str(); }

void* simulator_host_address(void* address) { return host_address(address); }
int simulator_device_of_address(void* address) { return device_of_address(address); }

// Fills five numbers: allocated, its peak, reserved, its peak, allocations.
void simulator_memory_statistics(int device, int64_t* numbers) {
  const auto now = memory_statistics(static_cast<c10::DeviceIndex>(device));
  const int64_t all[] = {now.allocated, now.allocated_peak, now.reserved, now.reserved_peak, now.allocations};
  std::memcpy(numbers, all, sizeof all);
}
void simulator_reset_peak_memory(int device) { reset_peak_memory(static_cast<c10::DeviceIndex>(device)); }
void simulator_empty_cache() { empty_cache(); }

void simulator_refuse_ops(const char* names) { refuse_ops(names); }
void simulator_record_launch(const char* op) { record_launch(op); }
void simulator_reset_counters() { reset_counters(); }

// Fills six numbers, in the order of the members of Counters.
void simulator_counters(int64_t* numbers) {
  const auto& now = counters();
  const int64_t all[] = {now.copies_to_host,   now.copies_to_device, now.items,
                         now.synchronisations, now.stream_reads,     now.launches};
  std::memcpy(numbers, all, sizeof all);
}

// "name count" lines; valid until the next call.
const char* simulator_launched_ops() {
  static thread_local std::string text;
  text.clear();
  for (const auto& [op, count] : launched_ops()) text += op + " " + std::to_string(count) + "\n";
  return text.c_str();
}

}  // extern "C"
