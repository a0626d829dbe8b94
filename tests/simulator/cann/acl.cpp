// The part of AscendCL that torch_npu needs to start, to allocate, to copy and to call operators, on a machine without
// CANN: device memory is host memory, streams and events are numbers, and what is put on a stream runs at once.
// Operators compute nothing: their outputs keep what the memory held, which is zero where it is new.
//
// build.py adds a function that returns success for every other symbol that the wheel needs. All of them are counted,
// operators with the types of their tensors, and tests read the counts.
//
//   BNB_STUB_SOC      chip name, Ascend910B3 by default
//   BNB_STUB_DEVICES  number of devices, 2 by default
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define COUNT() stub_record(__func__)

namespace {

std::mutex mutex;
std::map<std::string, int> calls;
std::condition_variable released;
int hold_ms = 0;

thread_local int32_t current_device = 0;
thread_local std::string tensor_types;  // of the tensors made for the next operator

// Streams, events and contexts are opaque; libtorch_npu only compares them with null and with each other.
void* new_handle() {
  static std::atomic<uintptr_t> last{0x1000};
  return reinterpret_cast<void*>(last += 0x40);
}

const char* setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

aclError allocate(void** pointer, size_t size) {
  if (posix_memalign(pointer, 512, size)) return ACL_ERROR_BAD_ALLOC;
  std::memset(*pointer, 0, size);
  return ACL_SUCCESS;
}

}  // namespace

// --- For the tests ---

EXPORT void stub_record(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  ++calls[name];
}

// An operator is called in two steps, of which this is the first.
EXPORT void stub_record_operator(const char* name) {
  stub_record((name + tensor_types).c_str());
  tensor_types.clear();
}

EXPORT int stub_calls(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = calls.find(name);
  return found == calls.end() ? 0 : found->second;
}

// All names counted so far, one a line; an operator is "aclnnAdd 0 0 0", with the aclDataType of each of its tensors.
// The result lives until the next call.
EXPORT const char* stub_log() {
  static std::string log;
  std::lock_guard<std::mutex> lock(mutex);
  log.clear();
  for (const auto& [name, count] : calls) log += name + "\n";
  return log.c_str();
}

EXPORT void stub_clear() {
  std::lock_guard<std::mutex> lock(mutex);
  calls.clear();
}

// Until stub_release(), every asynchronous copy waits for up to `ms` milliseconds before it starts.
EXPORT void stub_hold_copies(int ms) {
  std::lock_guard<std::mutex> lock(mutex);
  hold_ms = ms;
}

EXPORT void stub_release() {
  std::lock_guard<std::mutex> lock(mutex);
  hold_ms = 0;
  released.notify_all();
}

// --- Devices ---

EXPORT const char* aclrtGetSocName() {
  COUNT();
  return setting("BNB_STUB_SOC", "Ascend910B3");
}

EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
  COUNT();
  *count = std::atoi(setting("BNB_STUB_DEVICES", "2"));
  return ACL_SUCCESS;
}

EXPORT aclError aclrtSetDevice(int32_t device) {
  COUNT();
  current_device = device;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetDevice(int32_t* device) {
  COUNT();
  *device = current_device;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetCurrentContext(aclrtContext* context) {
  COUNT();
  *context = reinterpret_cast<void*>(0x77);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  COUNT();
  *value = 0;
  return ACL_SUCCESS;
}

EXPORT const char* aclGetRecentErrMsg() {
  COUNT();
  return "";
}

// --- Memory ---

EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  COUNT();
  *free = *total = size_t{64} << 30;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) {
  COUNT();
  return allocate(pointer, size);
}

EXPORT aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy) {
  COUNT();
  return allocate(pointer, size);
}

EXPORT aclError aclrtMallocHost(void** pointer, size_t size) {
  COUNT();
  return allocate(pointer, size);
}

EXPORT aclError aclrtFree(void* pointer) {
  COUNT();
  std::free(pointer);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtFreeHost(void* pointer) {
  COUNT();
  std::free(pointer);
  return ACL_SUCCESS;
}

// No virtual memory: libtorch_npu's expandable segments turn themselves off.
EXPORT aclError aclrtReserveMemAddress(void**, size_t, size_t, void*, uint64_t) {
  COUNT();
  return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

EXPORT aclError aclrtMemcpy(void* to, size_t, const void* from, size_t size, aclrtMemcpyKind) {
  COUNT();
  std::memcpy(to, from, size);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t size, aclrtMemcpyKind, aclrtStream) {
  {
    std::unique_lock<std::mutex> lock(mutex);
    released.wait_for(lock, std::chrono::milliseconds(hold_ms), [] { return hold_ms == 0; });
  }
  std::memcpy(to, from, size);
  COUNT();  // once it is done
  return ACL_SUCCESS;
}

EXPORT aclError aclrtMemset(void* pointer, size_t, int32_t value, size_t size) {
  COUNT();
  std::memset(pointer, value, size);
  return ACL_SUCCESS;
}

// --- Streams and events ---

EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  COUNT();
  *stream = new_handle();
  return ACL_SUCCESS;
}

EXPORT aclError aclrtCreateStream(aclrtStream* stream) {
  COUNT();
  *stream = new_handle();
  return ACL_SUCCESS;
}

EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  COUNT();
  *event = new_handle();
  return ACL_SUCCESS;
}

EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) {
  COUNT();
  *event = new_handle();
  return ACL_SUCCESS;
}

EXPORT aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  COUNT();
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtEventElapsedTime(float* ms, aclrtEvent, aclrtEvent) {
  COUNT();
  *ms = 0.01f;
  return ACL_SUCCESS;
}

// --- Operators ---

EXPORT void* aclCreateTensor(const int64_t*, uint64_t, aclDataType type, const int64_t*, int64_t, aclFormat,
                             const int64_t*, uint64_t, void*) {
  tensor_types += " " + std::to_string(type);
  return new_handle();
}

static void record_matmul(const char* name, int cube_math_type) {
  tensor_types += ", precision " + std::to_string(cube_math_type);
  stub_record_operator(name);
}

// Matrix products say how exactly they want to be computed: "aclnnMm 0 0 0, precision 0" is in full fp32.
EXPORT int aclnnMmGetWorkspaceSize(const void*, const void*, void*, int8_t cube_math_type) {
  record_matmul("aclnnMm", cube_math_type);
  return ACL_SUCCESS;
}

EXPORT int aclnnInplaceAddmmGetWorkspaceSize(const void*, const void*, const void*, const void*, const void*,
                                             int8_t cube_math_type) {
  record_matmul("aclnnInplaceAddmm", cube_math_type);
  return ACL_SUCCESS;
}

// The shape of a result that depends on the data, such as the positions that aclnnNonzero finds: none, in one
// dimension. The caller frees it.
EXPORT int aclGetViewShape(const void*, int64_t** sizes, uint64_t* dimensions) {
  COUNT();
  *dimensions = 2;
  *sizes = new int64_t[2]{0, 1};
  return ACL_SUCCESS;
}

// The way of older versions of CANN, which torch_npu still takes for some operators: "aclop Identity".
EXPORT aclError aclopCompileAndExecute(const char* operator_type, int, const aclTensorDesc* const*,
                                       const aclDataBuffer* const*, int, const aclTensorDesc* const*,
                                       aclDataBuffer* const*, const aclopAttr*, aclopEngineType, aclopCompileType,
                                       const char*, aclrtStream) {
  stub_record((std::string("aclop ") + operator_type).c_str());
  return ACL_SUCCESS;
}
