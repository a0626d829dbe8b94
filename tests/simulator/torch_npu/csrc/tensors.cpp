// What PyTorch asks of every device: memory, views and copies.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "simulator.h"

namespace simulator {

using at::IntArrayRef;
using at::Tensor;
template <class T>
using Optional = std::optional<T>;

Tensor on_host(const Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  // Resizeable: an op may enlarge its `out` argument; see adopt().
  auto host = at::for_blob(host_address(tensor.const_data_ptr()), tensor.sizes())
                  .strides(tensor.strides())
                  .options(options)
                  .allocator(c10::GetCPUAllocator())
                  .resizeable_storage()
                  .make_tensor();
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

Tensor to_device(const Tensor& host, c10::Device device) {
  const auto source = host.is_non_overlapping_and_dense() ? host : host.contiguous();
  auto result = at::empty_strided(source.sizes(), source.strides(), source.options().device(device));
  if (source.numel()) on_host(result).copy_(source);
  if (host.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

void adopt(const Tensor& tensor, const Tensor& host) {
  const bool moved = host.const_data_ptr() != host_address(tensor.const_data_ptr());
  if (!moved && host.sizes() == tensor.sizes() && host.strides() == tensor.strides()) return;
  const auto bytes = host.storage().nbytes();
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage().unsafeGetStorageImpl(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  if (moved && host.numel()) on_host(tensor).copy_(host);
}

namespace {

void check_layout(Optional<at::Layout> layout, Optional<bool> pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::Layout::Strided, "The simulated NPU has strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
}

Tensor empty(IntArrayRef size, Optional<at::ScalarType> dtype, Optional<at::Layout> layout,
             Optional<c10::Device> device, Optional<bool> pinned, Optional<at::MemoryFormat> format) {
  check_layout(layout, pinned);
  const c10::DeviceGuard guard(with_index(c10::device_or_default(device)));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Optional<at::ScalarType> dtype, Optional<at::Layout> layout,
                     Optional<c10::Device> device, Optional<bool> pinned) {
  check_layout(layout, pinned);
  const c10::DeviceGuard guard(with_index(c10::device_or_default(device)));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void ensure_bytes(const Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) resize_storage(storage, bytes);
}

const Tensor& resize(const Tensor& self, IntArrayRef size, Optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  ensure_bytes(self, at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset()));
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  ensure_bytes(self, at::detail::computeStorageNbytes(size, self.strides(), self.itemsize(), offset));
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t length = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, length, {});
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().is_alias_of(other.storage()) && self.storage_offset() == other.storage_offset() &&
         self.sizes() == other.sizes() && self.strides() == other.strides();
}

Tensor host_side(const Tensor& tensor) { return tensor.is_privateuseone() ? on_host(tensor) : tensor; }

Tensor copy_from(const Tensor& self, const Tensor& to, bool /*non_blocking*/) {
  if (to.is_cpu()) counters().copies_to_host++;
  if (self.is_cpu()) counters().copies_to_device++;
  host_side(to).copy_(host_side(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const Tensor& self) {
  counters().items++;
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

// The device computes without float64: a cast to it gives float32, and these words. float64 that comes from the host
// stays what it is.
Tensor to_copy(const Tensor& self, Optional<at::ScalarType> dtype, Optional<at::Layout> layout,
               Optional<c10::Device> device, Optional<bool> pinned, bool non_blocking,
               Optional<at::MemoryFormat> format) {
  if (dtype == at::kDouble && self.scalar_type() != at::kDouble && (!device || device->is_privateuseone())) {
    TORCH_WARN_ONCE("Device do not support double dtype now, dtype cast replace with float.");
    dtype = at::kFloat;
  }
  return at::native::_to_copy(self, dtype, layout, device, pinned, non_blocking, format);
}

void record_stream(Tensor&, at::Stream) {}

// `cpu_parameter.data = npu_tensor` works, as on the real device.
bool has_compatible_type(const Tensor&, const Tensor&) { return true; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("is_set_to", is_set_to);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(at::native::view));
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("_to_copy", to_copy);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
}

}  // namespace
}  // namespace simulator
