// Device memory and pinned host memory: blocks, allocators, accounting.
#include "standin.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace standin {

thread_local WorkPtr running;

namespace {
constexpr int kPoison = 0xff;  // NaN in every floating type, -1 in every integer

auto& blocks = *new std::map<const char*, BlockPtr>;  // by the beginning of their memory
int64_t live[kMostDevices], most[kMostDevices], live_pinned;
std::atomic<uintptr_t> pinned_from{UINTPTR_MAX}, pinned_to{0};

int64_t bytes_from_environment() {
  const char* given = std::getenv("RECYCLE_TEST_STANDIN_BYTES");
  return given ? std::atoll(given) : int64_t(16) << 30;
}

BlockPtr make_block(size_t bytes) {
  auto block = std::make_shared<Block>();
  block->memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  TORCH_CHECK(block->memory, "standin: the host has no ", bytes, " bytes");
  block->bytes = bytes;
  std::memset(block->memory, kPoison, bytes);
  return block;
}

Trace trace_here() {
  return running ? running->trace : capture();
}

void* allocate_device(size_t bytes) {
  use();
  if (!bytes)
    return nullptr;
  const auto trace = trace_here();
  Lock lock;
  const auto device = current_device();
  TORCH_CHECK_WITH(
      OutOfMemoryError, live[device] + int64_t(bytes) <= capacity(), "standin out of memory. Tried to allocate ", bytes,
      " bytes; ", live[device], " of ", capacity(), " are allocated.");
  auto block = make_block(bytes);
  block->device = device;
  block->allocator = agent_of(current_stream(device));
  // The memory may be one that work before this on the stream still used: others have to come after that.
  const auto epoch = clock_of(block->allocator).of(block->allocator);
  block->segments[0] =
      Segment{bytes, std::make_shared<Work>(Work{"allocation", block->allocator, epoch, trace}), {}};
  live[device] += bytes;
  most[device] = std::max(most[device], live[device]);
  char* memory = block->memory;
  blocks.emplace(memory, std::move(block));
  return memory;
}

// To free is an access by the stream that the block was allocated on, whose next work may be given the memory, once the
// recorded streams have come so far.
Clock clock_of_free(const Block& block) {
  Clock clock = clock_of(block.allocator);
  clock.join(clock_of(kHost));
  for (const auto agent : block.recorded)
    clock.join(clock_of(agent));
  return clock;
}

// Work that is ordered before the free still finds what was in the block, whenever it takes effect.
void poison(const Block& block, const Clock* freed) {
  if (!pending_use(block, freed))
    std::memset(block.memory, kPoison, block.bytes);
}

void release_device(void* memory) {
  if (!memory || in_bad_fork())
    return;
  std::optional<Conflict> conflict;
  {
    Lock lock;
    const auto found = blocks.find(static_cast<char*>(memory));
    TORCH_INTERNAL_ASSERT(found != blocks.end());
    const auto block = found->second;
    const auto clock = clock_of_free(*block);
    conflict = touch_all(
        *block, clock, std::make_shared<Work>(Work{"free of the block", block->allocator, 0, nullptr}));
    poison(*block, &clock);
    live[block->device] -= block->bytes;
    blocks.erase(found);
  }
  if (!conflict)
    return;
  auto work = *conflict->later;
  work.trace = trace_here();
  conflict->later = std::make_shared<Work>(work);
  remember(*conflict);
}

// As CUDA's allocator: the memory is given to nobody before the copies that use it are over.
void release_pinned(void* memory) {
  if (!memory || in_bad_fork())
    return;
  Lock lock;
  const auto found = blocks.find(static_cast<char*>(memory));
  TORCH_INTERNAL_ASSERT(found != blocks.end());
  poison(*found->second, nullptr);
  live_pinned -= found->second->bytes;
  blocks.erase(found);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    use();
    if (!bytes)
      return {nullptr, nullptr, &release_pinned, c10::kCPU};
    watch_host();
    Lock lock;
    auto block = make_block(bytes);
    block->pinned = true;
    live_pinned += bytes;
    const auto from = reinterpret_cast<uintptr_t>(block->memory);
    pinned_from = std::min(pinned_from.load(), from);
    pinned_to = std::max(pinned_to.load(), from + bytes);
    char* memory = block->memory;
    blocks.emplace(memory, std::move(block));
    return {memory, memory, &release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies are known without
  void empty_cache() override {}
  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.allocated_bytes.current = pinned_bytes();
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

struct HostLabelledAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = allocate_device(bytes);
    return {memory, memory, &release_device, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

void fill(c10::CachingAllocator::StatArray& stats, int64_t current, int64_t peak) {
  auto& all = stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  all.current = current;
  all.peak = peak;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = allocate_device(bytes);
    return {memory, memory, &release_device, c10::Device(kDevice, current_device())};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return in_use(); }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is kept
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer.get(), agent_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      fill(*each, allocated(device), most_allocated(device));
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_most_allocated(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {capacity() - allocated(device), capacity()};
  }
};

DeviceAllocator device_memory;
PinnedAllocator pinned_memory;
HostLabelledAllocator host_labelled;
REGISTER_ALLOCATOR(kDevice, &device_memory)
REGISTER_HOST_ALLOCATOR(kDevice, &pinned_memory)
}  // namespace

Block::~Block() {
  std::free(memory);
}

c10::Allocator* device_allocator() {
  return &device_memory;
}

c10::Allocator* pinned_allocator() {
  return &pinned_memory;
}

c10::Allocator* host_labelled_allocator() {
  return &host_labelled;
}

c10::DataPtr as_device(c10::DataPtr&& given) {
  void* memory = given.release_context();
  return {memory, memory, &release_device, c10::Device(kDevice, current_device())};
}

BlockPtr block_at(const void* address) {
  const auto* wanted = static_cast<const char*>(address);
  Lock lock;
  auto found = blocks.upper_bound(wanted);
  if (found == blocks.begin())
    return nullptr;
  --found;
  return wanted < found->first + found->second->bytes ? found->second : nullptr;
}

bool maybe_pinned(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at >= pinned_from && at < pinned_to;
}

void record_stream(const void* address, Agent agent) {
  Lock lock;
  if (const auto block = block_at(address))
    block->recorded.insert(agent);
}

int64_t allocated(c10::DeviceIndex device) {
  Lock lock;
  return live[device];
}

int64_t most_allocated(c10::DeviceIndex device) {
  Lock lock;
  return most[device];
}

void reset_most_allocated(c10::DeviceIndex device) {
  Lock lock;
  most[device] = live[device];
}

int64_t capacity() {
  static const int64_t bytes = bytes_from_environment();
  return bytes;
}

int64_t pinned_bytes() {
  Lock lock;
  return live_pinned;
}

}  // namespace standin
