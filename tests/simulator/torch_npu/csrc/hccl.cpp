// The process group "hccl": gloo, on the memory of the devices. A collective has ended when its call returns;
// sending and receiving, when it is waited for.
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "simulator.h"

namespace simulator {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors host;
  for (const auto& tensor : tensors) host.push_back(simulator::on_host(tensor));
  return host;
}

TensorLists on_host(const TensorLists& lists) {
  TensorLists host;
  for (const auto& tensors : lists) host.push_back(on_host(tensors));
  return host;
}

class Hccl final : public c10d::Backend {
 public:
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "hccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = on_host(tensors);
    return finish(gloo_->broadcast(host, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = on_host(tensors);
    return average(gloo_->allreduce(host, summing(options)), tensors, host, options.reduceOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = on_host(tensors);
    return average(gloo_->allreduce_coalesced(host, summing(options)), tensors, host, options.reduceOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = on_host(tensors);
    return average(gloo_->reduce(host, summing(options)), tensors, host, options.reduceOp);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host = on_host(outputs);
    auto sources = on_host(inputs);
    return finish(gloo_->allgather(host, sources, options), outputs);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto host = simulator::on_host(output), source = simulator::on_host(input);
    return finish(gloo_->_allgather_base(host, source, options), Tensors{output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) _allgather_base(outputs[i], inputs[i], options);
    return finish(nullptr, outputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto host = on_host(outputs);
    auto sources = on_host(inputs);
    return finish(gloo_->gather(host, sources, options), outputs);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    auto host = on_host(outputs);
    auto sources = on_host(inputs);
    return finish(gloo_->scatter(host, sources, options), outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto host = on_host(outputs);
    auto sources = on_host(inputs);
    return average(gloo_->reduce_scatter(host, sources, summing(options)), outputs, host, options.reduceOp);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto host = simulator::on_host(output), source = simulator::on_host(input);
    return average(gloo_->_reduce_scatter_base(host, source, summing(options)), {output}, {host}, options.reduceOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], options);
    return finish(nullptr, outputs);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto host = simulator::on_host(output), source = simulator::on_host(input);
    return finish(gloo_->alltoall_base(host, source, output_sizes, input_sizes, options), Tensors{output});
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto host = on_host(tensors);
    return gloo_->send(host, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto host = on_host(tensors);
    return gloo_->recv(host, from, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto on_gloo = options;
    on_gloo.device_ids.clear();
    return finish(gloo_->barrier(on_gloo), Tensors{});
  }

 private:
  // Gloo has no average.
  template <class Options>
  static Options summing(Options options) {
    if (options.reduceOp == c10d::ReduceOp::AVG) options.reduceOp = c10d::ReduceOp::SUM;
    return options;
  }
  WorkPtr average(const WorkPtr& work, const Tensors& results, const Tensors& host, const c10d::ReduceOp& op) const {
    if (work) work->wait();
    if (op == c10d::ReduceOp::AVG) {
      for (auto tensor : host) tensor.div_(getSize());
    }
    return finish(nullptr, results);
  }

  // Work that is done and whose value is `results`.
  template <class Results>
  static WorkPtr finish(const WorkPtr& work, const Results& results) {
    if (work) work->wait();
    const c10::IValue value(results);
    const auto future = c10::make_intrusive<c10::ivalue::Future>(value.type());
    future->markCompleted(value);
    return c10d::Work::create_from_future(future);
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

TORCH_LIBRARY_FRAGMENT(simulator, m) {
  m.def("add_hccl(__torch__.torch.classes.c10d.ProcessGroup group) -> ()",
        [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
          const auto hccl = c10::make_intrusive<Hccl>(group->getBackend(c10::DeviceType::CPU));
          group->setBackend(kNpu, c10d::ProcessGroup::BackendType::CUSTOM, c10::intrusive_ptr<c10d::Backend>(hccl));
        });
}

}  // namespace
}  // namespace simulator
