// Copies: within the device, and between it and the host.
#include "standin.h"

#include <torch/library.h>

namespace standin {

namespace {
struct Copy {
  at::Tensor from, to;
  bool host_is_source, host_is_target, asynchronous;
  std::string name;
};

bool pinned(const at::Tensor& tensor) {
  if (!tensor.has_storage() || !maybe_pinned(tensor.storage().data()))
    return false;
  const auto block = block_at(tensor.storage().data());
  return block && block->pinned;
}

// As CUDA: only a copy of memory as it lies can go on by itself; another goes by a temporary tensor of the host, which
// is not pinned.  What has to be converted is, on the device's side if that is the source.
bool goes_on_by_itself(const at::Tensor& host, const Copy& copy) {
  if (!pinned(host) || !host.is_non_overlapping_and_dense())
    return false;
  const auto& device = copy.host_is_source ? copy.to : copy.from;
  if (copy.host_is_source && host.scalar_type() != device.scalar_type())
    return false;
  return host.is_contiguous() || host.strides() == device.strides();
}

Copy kind_of(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Copy copy{from, to, !on_device(from), !on_device(to), non_blocking, "copy within the device"};
  if (copy.host_is_source || copy.host_is_target) {
    const auto& host = copy.host_is_source ? from : to;
    copy.asynchronous = non_blocking && goes_on_by_itself(host, copy);
    copy.name = std::string(pinned(host) ? "copy " : "copy of unpinned memory ") +
        (copy.host_is_source ? "from the host" : "to the host");
  }
  return copy;
}

std::optional<Conflict> touch_both(const Copy& copy, const WorkPtr& work, std::set<Block*>& blocks) {
  for (const bool writes : {false, true}) {
    const auto& tensor = writes ? copy.to : copy.from;
    const auto block = block_at(tensor.storage().data());
    if (!block)
      continue;
    blocks.insert(block.get());
    if (auto conflict = touch(*block, ranges_of(tensor), writes, work))
      return conflict;
  }
  return std::nullopt;
}

void now(const at::Tensor& from, const at::Tensor& to) {
  InKernel kernel;
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

Agent stream_of(const at::Tensor& tensor) {
  return agent_of(current_stream(tensor.device().index()));
}

std::optional<Conflict> execute(const Copy& copy, const Trace& trace) {
  const auto agent = stream_of(copy.host_is_source ? copy.to : copy.from);
  // As CUDA: between devices it runs on the source's stream, behind the target's, which then waits for it.
  const auto target = copy.host_is_target ? agent : stream_of(copy.to);
  clock_of(agent).join(clock_of(target));
  const auto work = submit(copy.name, agent, trace);
  clock_of(target).join(clock_of(agent));
  std::set<Block*> blocks;
  if (auto conflict = touch_both(copy, work, blocks))
    return conflict;
  if (copy.asynchronous && settings().late) {
    postpone(work, clock_of(agent), blocks, [from = held_view(copy.from), to = held_view(copy.to)] { now(from, to); });
    return std::nullopt;
  }
  settle(clock_of(agent));
  now(host_view(copy.from), host_view(copy.to));
  if ((copy.host_is_source || copy.host_is_target) && !copy.asynchronous)
    host_learns(clock_of(agent));
  return std::nullopt;
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  use();
  raise_remembered();
  if (!to.numel() || to.is_same(from))
    return to;
  const auto copy = kind_of(from.sizes() == to.sizes() ? from : from.expand_as(to), to, non_blocking);
  if ((copy.host_is_source || copy.host_is_target) && !copy.asynchronous) {
    count_synchronisation(copy.name);
    await_held(stream_of(copy.host_is_source ? copy.to : copy.from));
  }
  const auto trace = capture();
  std::optional<Conflict> conflict;
  {
    Lock lock;
    conflict = execute(copy, trace);
  }
  if (conflict)
    raise(*conflict);
  return to;
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", copy_);
}

}  // namespace standin
