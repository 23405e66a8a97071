// Attention: where the CPU would take its fused kernel, so does the device, and the numbers are the same.
#include "standin.h"

#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

namespace standin {

int64_t choose(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double p, bool causal, std::optional<double> scale, bool grouped) {
  std::optional<at::Tensor> host_mask;
  if (mask && mask->defined())
    host_mask = host_view(*mask).requires_grad_(mask->requires_grad());
  const auto as_host = [](const at::Tensor& tensor) {
    return host_view(tensor).requires_grad_(tensor.requires_grad());
  };
  const auto of_cpu =
      at::_fused_sdp_choice(as_host(query), as_host(key), as_host(value), host_mask, p, causal, scale, grouped);
  return static_cast<int64_t>(
      of_cpu == static_cast<int64_t>(at::SDPBackend::math) ? at::SDPBackend::math : at::SDPBackend::overrideable);
}

namespace {
using Attended = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

Attended forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double p, bool causal, bool, std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, p, causal, mask, scale);
  const auto none = at::empty({0}, query.options());
  return {output, logsumexp, none, none, query.size(2), key.size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& mask, std::array<bool, 4>, const at::Tensor& output, const at::Tensor& logsumexp,
    const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double p, bool causal, const at::Tensor&,
    const at::Tensor&, std::optional<double> scale) {
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, output, logsumexp, p, causal,
      mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt, scale);
  return {of_query, of_key, of_value, at::Tensor()};
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", choose);
  m.impl("_scaled_dot_product_fused_attention_overrideable", forward);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", backward);
}

}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::choose)
}  // namespace at::native
