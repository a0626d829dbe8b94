// Random numbers: a generator of the device is a shell around one of the host.
#include <ATen/CPUGeneratorImpl.h>

#include <vector>

#include "simulator.h"

namespace simulator {
namespace {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl({kNpu, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}

  static c10::DeviceType device_type() { return kNpu; }
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
    offset = 0;
  }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t value) override { offset = value; }
  uint64_t get_offset() const override { return offset; }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->host = host.clone();
    copy->offset = offset;
    return copy;
  }

  at::Generator host;
  uint64_t offset = 0;  // kept for callers that save it; the host's numbers have none
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kNpu, "Expected a 'npu' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

}  // namespace simulator
