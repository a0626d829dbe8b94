// The simulated machine: its chips, its state, and the counters that tests read.
#include <c10/util/Exception.h>
#include <pthread.h>

#include <cstdlib>
#include <mutex>

#include "simulator.h"

namespace simulator {
namespace {

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoll(text, nullptr, 0) : otherwise;
}

// The names of aclrtGetSocName and the numbers of torch_npu's get_soc_version.
const std::map<std::string, int> kChips = {
    {"Ascend910A", 100},     {"Ascend910PremiumA", 100}, {"Ascend910ProA", 101},   {"Ascend910B", 102},
    {"Ascend910ProB", 103},  {"Ascend310P1", 200},       {"Ascend310P2", 201},     {"Ascend310P3", 202},
    {"Ascend910B1", 220},    {"Ascend910B2", 221},       {"Ascend910B2C", 222},    {"Ascend910B3", 223},
    {"Ascend910B4", 224},    {"Ascend910B4-1", 225},     {"Ascend310B1", 240},     {"Ascend910_9391", 250},
    {"Ascend910_9392", 251}, {"Ascend910_9381", 252},    {"Ascend910_9382", 253},  {"Ascend910_9372", 254},
    {"Ascend910_9362", 255}, {"Ascend950", 260},         {"Ascend950PR_9599", 260}};

std::mutex ops_mutex;
std::map<std::string, int64_t> ops;
std::atomic<bool> initialised{false};
std::atomic<bool> forked{false};
thread_local c10::DeviceIndex device = 0;

}  // namespace

Counters& counters() {
  static Counters all;
  return all;
}

void record_launch(const std::string& op) {
  counters().launches++;
  std::lock_guard<std::mutex> lock(ops_mutex);
  ops[op]++;
}

std::map<std::string, int64_t> launched_ops() {
  std::lock_guard<std::mutex> lock(ops_mutex);
  return ops;
}

void reset_counters() {
  auto& all = counters();
  for (auto* counter : {&all.copies_to_host, &all.copies_to_device, &all.items, &all.synchronisations,
                        &all.stream_reads, &all.launches})
    *counter = 0;
  std::lock_guard<std::mutex> lock(ops_mutex);
  ops.clear();
}

int device_count() {
  static const int count = static_cast<int>(setting("BNB_SIMULATOR_DEVICES", 2));
  return count;
}

int64_t device_memory() {
  static const int64_t bytes = setting("BNB_SIMULATOR_MEMORY", int64_t{64} << 30);
  return bytes;
}

c10::DeviceIndex current_device() { return device; }

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "Invalid NPU device id ", int{index}, ": there are ",
              device_count(), " devices");
  initialise();
  device = index;
}

c10::Device with_index(c10::Device d) { return d.has_index() ? d : c10::Device(kNpu, device); }

const std::string& chip_name() {
  static const std::string name = [] {
    const char* text = std::getenv("BNB_SIMULATOR_CHIP");
    return std::string(text && *text ? text : "Ascend910B3");
  }();
  return name;
}

int chip_version() {
  initialise();
  return kChips.at(chip_name());
}

bool has_bfloat16() { return chip_version() >= 220; }

void initialise() {
  TORCH_CHECK(!forked,
              "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the "
              "'spawn' start method");
  if (initialised) return;
  TORCH_CHECK(device_count() > 0, "No NPU is available: BNB_SIMULATOR_DEVICES is ", device_count());
  TORCH_CHECK(kChips.count(chip_name()), "Unsupported soc version: ", chip_name());
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  initialised = true;
}

bool is_initialised() { return initialised; }
bool is_forked_child() { return forked; }

}  // namespace simulator
