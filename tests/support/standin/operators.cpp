// Operators: every one that has no kernel here runs as the CPU's, on the same memory.
#include "standin.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <set>

namespace standin {

namespace {
const std::set<std::string> kWaitsForItsResult = {  // CUDA's kernels of these wait for the device
    "aten::nonzero",   "aten::masked_select", "aten::_unique2",           "aten::unique_dim",
    "aten::equal",     "aten::bincount",      "aten::unique_consecutive", "aten::_local_scalar_dense",
    "aten::_unique"};
const std::set<std::string> kTakesIndicesOfTheHost = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

// One operator's arguments as the CPU's kernel gets them, and its results as the device has them.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()), stack_(*stack) {}

  void run() {
    use();
    raise_remembered();
    const auto count = schema_.arguments().size();
    at_ = stack_.size() - count;
    for (size_t i = 0; i < count; ++i)
      look_at(schema_.arguments()[i], stack_[at_ + i]);
    choose_device();
    const bool waits = kWaitsForItsResult.count(schema_.name()) > 0;
    if (waits)
      count_synchronisation(schema_.name() == "aten::_local_scalar_dense" ? "item" : schema_.name());
    load(schema_.name());
    if (waits)
      await_held(agent_of(current_stream(device_->index())));
    const auto trace = capture();
    const auto name = called();  // takes Python's lock: whoever holds that may wait for ours
    std::optional<Conflict> conflict;
    {
      Lock lock;
      conflict = execute(name, trace, waits);
    }
    if (conflict)
      raise(*conflict);
  }

 private:
  struct Given {
    at::Tensor tensor;
    bool writes, looks;  // it is written to; only its shape is of use, as for a view
    bool index;
  };

  void look_at(const c10::Argument& argument, const c10::IValue& value) {
    const auto* alias = argument.alias_info();
    const bool writes = alias && alias->isWrite();
    const auto add = [&](const at::Tensor& tensor) {
      if (tensor.defined())
        given_.push_back({tensor, writes, alias && !writes, argument.name() == "indices"});
    };
    if (value.isTensor())
      add(value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& each : value.toTensorVector())
        add(each);
    else if (value.isList() && argument.type()->str().find("Tensor") != std::string::npos)
      for (const c10::IValue& each : value.toListRef())
        if (each.isTensor())
          add(each.toTensor());
    if (value.isDevice() && value.toDevice().type() == kDevice)
      device_ = value.toDevice();
    view_ = view_ || (alias && !writes);
  }

  // As CUDA: a tensor of the host beside one of the device is an error, but for a scalar that is read, and an index.
  void choose_device() {
    for (const auto& each : given_)
      if (on_device(each.tensor)) {
        TORCH_CHECK(
            !device_ || *device_ == each.tensor.device(), "Expected all tensors to be on the same device, but found at "
            "least two devices, ", *device_, " and ", each.tensor.device(), "! (", schema_.name(), ")");
        device_ = each.tensor.device();
      }
    if (!device_)
      device_ = c10::Device(kDevice, current_device());
    if (device_->index() == -1)
      device_ = c10::Device(kDevice, current_device());
    for (const auto& each : given_) {
      const bool index = each.index && kTakesIndicesOfTheHost.count(schema_.name());
      if (on_device(each.tensor) || index || (each.tensor.dim() == 0 && !each.writes))
        continue;
      TORCH_CHECK(
          false, "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
          each.tensor.device(), "! (", schema_.name(), ")");
    }
  }

  std::optional<Conflict> execute(const std::string& name, const Trace& trace, bool waits) {
    const auto agent = agent_of(current_stream(device_->index()));
    if (view_) {
      convert_and_call();
      return std::nullopt;
    }
    const auto work = submit(name, agent, trace);
    for (const auto& each : given_) {
      if (each.looks)
        continue;
      if (on_device(each.tensor)) {
        if (auto conflict = touch_tensor(each.tensor, each.writes, work))
          return conflict;
      } else if (maybe_pinned(each.tensor.storage().data())) {
        // A scalar of the host is read when the kernel is submitted.
        if (auto conflict = touch_tensor(each.tensor, false, submit(schema_.name(), kHost, trace)))
          return conflict;
      }
    }
    settle(clock_of(agent));
    running = work;
    try {
      convert_and_call();
    } catch (...) {
      running = nullptr;
      throw;
    }
    running = nullptr;
    if (waits)
      host_learns(clock_of(agent));
    return std::nullopt;
  }

  // In a backward pass, whose thread has no stack to show, with the node that runs it.
  std::string called() const {
    const auto node = torch::autograd::get_current_node();
    return node ? schema_.name() + " of " + node->name() : schema_.name();
  }

  static std::optional<Conflict> touch_tensor(const at::Tensor& tensor, bool writes, const WorkPtr& work) {
    if (!tensor.has_storage())
      return std::nullopt;
    const auto block = block_at(tensor.storage().data());
    return block ? touch(*block, ranges_of(tensor), writes, work) : std::nullopt;
  }

  void convert_and_call() {
    InKernel kernel;
    c10::OptionalDeviceGuard guard(device_);
    for (size_t i = at_; i < stack_.size(); ++i)
      stack_[i] = to_host(schema_.arguments()[i - at_], stack_[i]);
    {
      at::AutoDispatchBelowADInplaceOrView below;
      c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    for (auto& [host, device] : tensors_)
      take_over_shape(host, device);
    const auto results = schema_.returns().size();
    for (size_t i = stack_.size() - results; i < stack_.size(); ++i)
      stack_[i] = to_device(stack_[i]);
  }

  c10::IValue to_host(const c10::Argument& argument, const c10::IValue& value) {
    if (value.isTensor())
      return to_host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector())
        all.push_back(to_host(each));
      return all;
    }
    if (value.isList() && argument.type()->str().find("Tensor") != std::string::npos) {
      c10::List<std::optional<at::Tensor>> all;
      for (const c10::IValue& each : value.toListRef())
        all.push_back(each.isTensor() ? std::optional<at::Tensor>(to_host(each.toTensor())) : std::nullopt);
      return all;
    }
    if (value.isDevice() && value.toDevice().type() == kDevice)
      return c10::Device(c10::kCPU);
    if (argument.name() == "generator")
      return host_generator(value.isNone() ? default_generator(device_->index()) : value.toGenerator());
    return value;
  }

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!on_device(tensor))
      return tensor;
    for (const auto& [host, device] : tensors_)
      if (device.is_same(tensor))
        return host;
    auto host = over(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
    tensors_.emplace_back(host, tensor);
    return host;
  }

  // Tensors that share a storage share it on the CPU too, where kernels look for overlaps.
  c10::Storage host_storage(const c10::Storage& storage) {
    for (const auto& [host, device] : storages_)
      if (device.is_alias_of(storage))
        return host;
    auto made = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.nbytes(), c10::DataPtr(storage.mutable_data(), c10::kCPU),
        host_labelled_allocator(), true);
    storages_.emplace_back(c10::Storage(made), storage);
    return storages_.back().first;
  }

  // An output that the kernel has resized, or a tensor whose shape it has changed in place.
  static void take_over_shape(const at::Tensor& host, const at::Tensor& device) {
    const auto from = host.storage();
    const auto to = device.storage();
    if (from.nbytes() != to.nbytes()) {
      auto memory = from.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, c10::kCPU));
      to.unsafeGetStorageImpl()->set_data_ptr_noswap(as_device(std::move(memory)));
      to.set_nbytes(from.nbytes());
    }
    if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
        host.storage_offset() != device.storage_offset())
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor())
      return to_device(value.toTensor());
    if (!value.isTensorList())
      return value;
    c10::List<at::Tensor> all;
    for (const at::Tensor& each : value.toTensorVector())
      all.push_back(to_device(each));
    return all;
  }

  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined())
      return result;
    for (const auto& [host, device] : tensors_)
      if (host.is_same(result))
        return device;
    for (const auto& [host, device] : storages_)
      if (host.is_alias_of(result.storage()))
        return over(device, c10::DispatchKey::PrivateUse1, result);
    at::Tensor made = at::detail::empty_strided_generic(
        result.sizes(), dense_strides(result), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        result.scalar_type());
    at::AutoDispatchBelowADInplaceOrView below;
    host_view(made).copy_(result);
    return made;
  }

  static std::vector<int64_t> dense_strides(const at::Tensor& tensor) {
    if (tensor.is_non_overlapping_and_dense())
      return tensor.strides().vec();
    return at::empty(tensor.sizes(), at::TensorOptions(c10::kMeta)).strides().vec();
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  size_t at_ = 0;
  bool view_ = false;
  std::optional<c10::Device> device_;
  std::vector<Given> given_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;      // of the CPU, of the device
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // likewise
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

// torch leaves convolutions of a device that it does not know to these, with the arguments of its own operators.
void convolve(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Call(op, stack).run();
}

void convolve_backward(const c10::OperatorHandle& given, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto first = stack->end() - given.schema().arguments().size();
  const auto grad = first->toTensor();
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{grad.size(1)}));  // the bias's size
  Call(op, stack).run();
}

c10::Device chosen(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kDevice, current_device());
}

void refuse_to_pin(std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  refuse_to_pin(pin);
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type),
      format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin) {
  refuse_to_pin(pin);
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(type));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  const auto at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_nothing(at::Tensor& self) {
  at::Storage none(
      at::Storage::use_byte_size_t(), 0, device_allocator(), /*resizable=*/true);
  return at::native::set_storage_cpu_(self, std::move(none), 0, {0}, {});
}

void mark_used_by(at::Tensor& self, at::Stream stream) {
  record_stream(self.storage().data(), agent_of(stream));
}

// The CPU's dropout, whose numbers these are with a generator in the same state.  (The CPU has no fused one.)
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true))
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  if (p == 1)
    return {at::zeros_like(input), mask};
  return {input * mask.to(input.scalar_type()).div_(1 - p), mask};
}

at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  return scale == 0 ? at::zeros_like(grad) : grad * mask.to(grad.scalar_type()).div_(1 / scale);
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", mark_used_by);
  m.impl("native_dropout", dropout);
  m.impl("native_dropout_backward", dropout_backward);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve_backward>());
  // Operators that torch composes of others where a device has no kernel, though the CPU has one.
  for (const auto* name :
       {"native_layer_norm", "native_group_norm", "_stack", "_stack.out", "addr", "addr.out", "any.dims",
        "any.dims_out", "all.dims", "all.dims_out", "linalg__powsum", "silu_backward", "mish_backward",
        "native_channel_shuffle"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace standin
