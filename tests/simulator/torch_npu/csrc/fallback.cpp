// Every computing op: checked by the rules of the device, then run by the CPU's kernel on the device's memory.
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/histc.h>
#include <torch/library.h>

#include <mutex>
#include <sstream>
#include <unordered_set>

#include "simulator.h"

namespace simulator {
namespace {

using at::IValue;
using at::Tensor;
using c10::OperatorHandle;
using Names = std::unordered_set<std::string>;

Names& refused() {
  static Names names;
  return names;
}

// The shape of the result depends on values, so the host waits for them.
const Names kSynchronising = {
    "aten::nonzero",    "aten::masked_select",      "aten::_unique",  "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::equal",
    "aten::is_nonzero", "aten::repeat_interleave",
};

// Indices may live on the host; they are copied over first.
const Names kTakesHostIndices = {"aten::index",      "aten::_unsafe_index",    "aten::index_put",
                                 "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"};

// Moves bits, computes nothing: works for dtypes that the chip cannot compute with.
const Names kMovesBits = {"aten::fill_", "aten::zero_", "aten::cat", "aten::index_select"};

template <class Function>
void for_each_tensor(const IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) for_each_tensor(element, function);
  }
}

// `value` with `function` applied to every tensor in it.
template <class Function>
IValue map_tensors(const IValue& value, Function function) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
  auto list = value.toList().copy();
  for (size_t i = 0; i < list.size(); i++) list.set(i, map_tensors(list.get(i), function));
  return list;
}

class Call {
 public:
  Call(const OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        schema_(op.schema()),
        name_(schema_.name()),
        full_name_(c10::toString(schema_.operator_name())),
        stack_(stack) {
    arguments_ = torch::jit::pop(*stack, schema_.arguments().size());
  }

  void run() {
    check_kernel();
    check_devices();
    check_dtypes();
    record_launch(full_name_);
    if (kSynchronising.count(name_) || is_masked_write()) counters().synchronisations++;

    torch::jit::Stack host;
    for (size_t i = 0; i < arguments_.size(); i++) host.push_back(host_argument(i));
    const auto written = host;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
    for (size_t i = 0; i < arguments_.size(); i++) adopt_written(i, written[i]);
    for (size_t i = 0; i < host.size(); i++) stack_->push_back(device_result(i, host[i]));
  }

 private:
  void check_kernel() const {
    // The real device runs these on copies in host memory, with a warning. Here nothing may run there unnoticed.
    const bool foreign = name_.rfind("aten::", 0) != 0 && name_.rfind("prims::", 0) != 0;
    TORCH_CHECK_NOT_IMPLEMENTED(!foreign && !refused().count(full_name_), "Could not run '", full_name_,
                                "': it has no kernel for the NPU (device type npu, PrivateUse1)");
  }

  void check_devices() {
    const Tensor* on_the_host = nullptr;
    for (const auto& argument : arguments_) {
      if (argument.isDevice() && argument.toDevice().is_privateuseone()) device_ = with_index(argument.toDevice());
    }
    for (const auto& argument : arguments_) {
      for_each_tensor(argument, [&](const Tensor& tensor) {
        if (tensor.is_privateuseone()) {
          TORCH_CHECK(!device_ || *device_ == tensor.device(), different_devices(*device_, tensor.device()));
          device_ = tensor.device();
        } else if (tensor.dim() > 0 && !kTakesHostIndices.count(name_)) {
          on_the_host = &tensor;
        }
      });
    }
    if (on_the_host && device_) TORCH_CHECK(false, different_devices(*device_, on_the_host->device()));
    if (!device_) device_ = c10::Device(kNpu, current_device());
    if (kTakesHostIndices.count(name_)) {
      TORCH_CHECK(arguments_[0].toTensor().is_privateuseone(),
                  "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
    }
    if (writes_at_indices()) {
      for_each_tensor(arguments_[1], [](const Tensor& index) {
        if (index.is_cpu()) counters().copies_to_device++;
      });
    }
  }

  std::string different_devices(c10::Device one, c10::Device other) const {
    return "Expected all tensors to be on the same device, but found at least two devices, " + one.str() + " and " +
           other.str() + "! (in " + name_ + ")";
  }

  void check_dtypes() const {
    if (has_bfloat16() || kMovesBits.count(name_)) return;
    for (const auto& argument : arguments_) {
      for_each_tensor(argument, [&](const Tensor& tensor) {
        TORCH_CHECK(tensor.scalar_type() != at::kBFloat16, name_, " is not implemented for DT_BFLOAT16 on ",
                    chip_name());
      });
    }
  }

  // Where elements are read, PyTorch has copied indices from the host and turned a mask into indices before.
  bool writes_at_indices() const {
    return kTakesHostIndices.count(name_) && name_ != "aten::index" && name_ != "aten::_unsafe_index";
  }

  bool is_masked_write() const {
    bool masked = false;
    if (writes_at_indices()) {
      for_each_tensor(arguments_[1], [&](const Tensor& index) {
        masked |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      });
    }
    return masked;
  }

  IValue host_argument(size_t i) const {
    const auto& value = arguments_[i];
    if (value.isDevice()) return c10::Device(at::kCPU);
    if (value.isGenerator()) return host_generator(value.toGenerator());
    if (value.isNone() &&
        schema_.arguments()[i].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())))
      return host_generator(default_generator(device_->index()));
    return map_tensors(value, [](const Tensor& t) { return t.is_privateuseone() ? on_host(t) : t; });
  }

  bool is_written(size_t i) const {
    const auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  void adopt_written(size_t i, const IValue& host) const {
    if (!is_written(i)) return;
    std::vector<Tensor> of_device, of_host;
    for_each_tensor(arguments_[i], [&](const Tensor& tensor) { of_device.push_back(tensor); });
    for_each_tensor(host, [&](const Tensor& tensor) { of_host.push_back(tensor); });
    for (size_t k = 0; k < of_device.size(); k++) {
      if (of_device[k].is_privateuseone()) adopt(of_device[k], of_host[k]);
    }
  }

  // A written argument that is returned comes back as itself, everything else as a new tensor.
  IValue device_result(size_t i, const IValue& host) const {
    if (const auto* alias = schema_.returns()[i].alias_info()) {
      for (size_t k = 0; k < arguments_.size(); k++) {
        const auto* other = schema_.arguments()[k].alias_info();
        if (other && other->beforeSets() == alias->beforeSets() && is_written(k)) return arguments_[k];
      }
      TORCH_CHECK_NOT_IMPLEMENTED(false, "The simulated NPU has no kernel for the view '", name_, "'");
    }
    return map_tensors(host, [&](const Tensor& t) { return to_device(t, *device_); });
  }

  const OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  const std::string full_name_;
  torch::jit::Stack* stack_;
  torch::jit::Stack arguments_;
  std::optional<c10::Device> device_;
};

void fallback(const OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// Convolutions reach another device through two ops of their own, which have no CPU kernel.

std::optional<Tensor> optional_host(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional(on_host(*tensor)) : std::nullopt;
}

void check_convolution(const Tensor& input, const Tensor& weight) {
  TORCH_CHECK(input.device() == weight.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", input.device(),
              " and ", weight.device(), "! (in a convolution)");
  TORCH_CHECK(has_bfloat16() || input.scalar_type() != at::kBFloat16,
              "aten::convolution is not implemented for DT_BFLOAT16 on ", chip_name());
  record_launch("aten::convolution_overrideable");
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  check_convolution(input, weight);
  const auto result = at::convolution(on_host(input), on_host(weight), optional_host(bias), stride, padding, dilation,
                                      transposed, output_padding, groups);
  return to_device(result, input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, at::IntArrayRef stride,
                                                        at::IntArrayRef padding, at::IntArrayRef dilation,
                                                        bool transposed, at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  check_convolution(input, weight);
  const std::vector<int64_t> bias_size = {transposed ? weight.size(1) * groups : weight.size(0)};
  const auto [d_input, d_weight, d_bias] =
      at::convolution_backward(on_host(gradient), on_host(input), on_host(weight), bias_size, stride, padding, dilation,
                               transposed, output_padding, groups, mask);
  const auto result = [&](const Tensor& host) { return host.defined() ? to_device(host, input.device()) : host; };
  return {result(d_input), result(d_weight), result(d_bias)};
}

// The CPU counts floating-point numbers only.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  record_launch("aten::histc");
  const auto values = on_host(self);
  const auto counted = at::histc(values.is_floating_point() ? values : values.to(at::kDouble), bins, min, max);
  return to_device(counted.to(self.scalar_type()), self.device());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("histc", histc);
}

}  // namespace

void refuse_ops(std::string names) {
  std::istringstream lines(std::move(names));
  Names families;  // names without the overload
  for (std::string name; lines >> name;) {
    refused().insert(name);
    families.insert(name.substr(0, name.find('.')));
  }
  // PyTorch computes `gelu_backward` by its overload with `out`. Where the device has the one and not the other, the
  // one must come here itself.
  static torch::Library direct(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto name = c10::toString(op);
    if (!families.count(op.name) || refused().count(name)) continue;
    const auto handle = c10::Dispatcher::singleton().findOp(op);
    if (handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      direct.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace simulator
