// Tensors of the device as tensors of the CPU over the same memory, and the bytes that a tensor covers.
#include "standin.h"

#include <algorithm>

namespace standin {

namespace {
constexpr size_t kMostRanges = 256;  // of a tensor with gaps; beyond that it counts as one range without

struct Dimension {
  int64_t size, stride;
};
}  // namespace

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return made;
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (!on_device(tensor))
    return tensor;
  const auto& storage = tensor.storage();
  void* memory = storage.mutable_data();
  auto host = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), c10::DataPtr(memory, c10::kCPU), nullptr, false);
  return over(c10::Storage(std::move(host)), c10::DispatchKey::CPU, tensor);
}

at::Tensor held_view(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto* memory = storage.mutable_data();
  auto* holder = new BlockPtr(block_at(memory));
  auto host = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(memory, holder, [](void* held) { delete static_cast<BlockPtr*>(held); }, c10::kCPU), nullptr, false);
  return over(c10::Storage(std::move(host)), c10::DispatchKey::CPU, tensor);
}

std::vector<Range> ranges_of(const at::Tensor& tensor) {
  if (!tensor.numel())
    return {};
  const size_t item = tensor.itemsize();
  const auto block = block_at(tensor.storage().data());
  // A storage may lie within a block, as one made over pinned memory does.
  const size_t base = block ? static_cast<const char*>(tensor.storage().data()) - block->memory : 0;
  const size_t begin = base + tensor.storage_offset() * item;
  std::vector<Dimension> dimensions;
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.size(i) > 1 && tensor.stride(i) != 0)
      dimensions.push_back({tensor.size(i), tensor.stride(i)});
  std::sort(dimensions.begin(), dimensions.end(), [](auto& a, auto& b) { return a.stride < b.stride; });
  size_t run = 1, outer = 0;  // elements without a gap, and the dimensions that they cover
  while (outer < dimensions.size() && dimensions[outer].stride <= int64_t(run)) {
    run += (dimensions[outer].size - 1) * dimensions[outer].stride;
    ++outer;
  }
  size_t count = 1, span = run;
  for (size_t i = outer; i < dimensions.size(); ++i) {
    count *= dimensions[i].size;
    span += (dimensions[i].size - 1) * dimensions[i].stride;
  }
  if (count > kMostRanges)
    return {{begin, begin + span * item}};
  std::vector<Range> ranges{{begin, begin + run * item}};
  for (size_t i = outer; i < dimensions.size(); ++i) {
    const auto before = ranges;
    for (int64_t j = 1; j < dimensions[i].size; ++j)
      for (const auto& each : before)
        ranges.push_back({each.begin + j * dimensions[i].stride * item, each.end + j * dimensions[i].stride * item});
  }
  return ranges;
}

}  // namespace standin
