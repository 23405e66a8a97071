// The stand-in accelerator: what its files share.
//
// Its memory is host memory and its kernels are the CPU's, run at once by the thread that submits them.  What a real
// device does at its own pace is kept in clocks: each stream and the host have one, and who touches memory unordered
// with an earlier toucher is told so.
//
// One lock (`Lock`) covers all state and every running kernel, so that kernels of one stream never overlap.  Who holds
// it never waits for Python's lock: stacks are captured before it is taken, and texts are made after it is given back.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch {
struct CapturedTraceback;
}

namespace standin {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;

struct Lock {
  Lock();

 private:
  std::unique_lock<std::recursive_mutex> held_;
};

// ---- clocks.cpp: what is ordered before what ----

using Agent = size_t;  // 0 is the host, the others are streams
constexpr Agent kHost = 0;

struct Clock {
  std::vector<uint64_t> at;  // by agent: how much of its work is known to be over
  uint64_t of(Agent agent) const { return agent < at.size() ? at[agent] : 0; }
  void join(const Clock& other);
  uint64_t tick(Agent agent);
};

using Trace = std::shared_ptr<torch::CapturedTraceback>;

// A kernel, a copy, an allocation or an access of the host.
struct Work {
  std::string name;
  Agent agent = kHost;
  uint64_t epoch = 0;
  Trace trace;
};
using WorkPtr = std::shared_ptr<const Work>;

// Who last wrote to a range of bytes, and who has read it since.
struct Segment {
  size_t end = 0;
  WorkPtr writer;
  std::vector<WorkPtr> readers;
};

struct Block;
struct Range {
  size_t begin, end;
};

struct Conflict {
  WorkPtr earlier, later;
  bool earlier_writes, later_writes;
  Range bytes;
  size_t block_bytes;
  bool pinned;
};

struct Settings {
  bool clocks = true;                // judge accesses
  bool stacks = true;                // capture where work was submitted
  std::optional<uint64_t> late;      // the seed of the moments at which asynchronous copies take effect
};
Settings& settings();

Clock& clock_of(Agent agent);
Agent new_agent();
Agent last_agent();
// Counts one more work of the agent; work on a stream comes after all that the host knows.
WorkPtr submit(std::string name, Agent agent, Trace trace);
// The host has seen everything that `clock` knows.
void host_learns(const Clock& clock);
std::optional<Conflict> touch(Block& block, const std::vector<Range>& ranges, bool write, const WorkPtr& work);
std::optional<Conflict> touch_all(Block& block, const Clock& clock, const WorkPtr& work);

// Conflicts that could not be raised where they were found.
void remember(Conflict conflict);
void raise_remembered();
[[noreturn]] void raise(const Conflict& conflict);
std::vector<std::string> take_violations();

// ---- late.cpp: copies that take effect later ----

void postpone(const WorkPtr& work, const Clock& clock, std::set<Block*> blocks, std::function<void()> run);
void settle(const Clock& clock);  // run what is ordered before
bool pending_use(const Block& block, const Clock* clock);  // of those ordered before, or of all
bool pending_before(const Clock& clock);
void let_some_happen();
uint64_t draw();

// ---- held.cpp: kernels of collectives, which last until `let_go` ----

// The kernel's number, and those of the kernels that have to end before it begins.
std::pair<int64_t, std::set<int64_t>> hold(const c10::Stream& stream, std::string name);
void let_go(int64_t kernel);
bool held_before(const Clock& clock);
bool any_held(const std::set<int64_t>& kernels);
// Both are called without the lock; the former waits for what the stream has to do.
void await_held(Agent agent);
void await_held(const std::function<Clock()>& clock, const std::set<int64_t>& kernels);
// With `share_queues` streams stand in so many queues, as with CUDA_DEVICE_MAX_CONNECTIONS: what stands in a queue waits
// for all that came into it before, also from other streams, and for what that waits for.
void share_queues(size_t connections);
std::set<int64_t> in_front(Agent agent);  // kernels that what the stream gets now waits for, for its queue alone
void stand_behind(Agent agent, const Clock& clock, const std::set<int64_t>& kernels);  // a wait comes into the queue
// With `load_lazily` a kernel that runs for the first time waits until no other is held, as CUDA's loading does.
void load_lazily(bool on);
void load(const std::string& kernel);  // called without the lock

// ---- host.cpp: Python's stacks, places, and what the host touches ----

Trace capture();
std::string describe(const Trace& trace);
void watch_host();
void count_synchronisation(const std::string& kind);  // before the lock is taken
std::map<std::pair<std::string, std::string>, int64_t> synchronisations();
void reset_synchronisations();
struct InKernel {  // operations of the host under it are a kernel's
  InKernel();
  ~InKernel();
  static bool active();
};

// ---- memory.cpp ----

struct Block {
  char* memory = nullptr;
  size_t bytes = 0;
  bool pinned = false;
  c10::DeviceIndex device = 0;
  Agent allocator = kHost;       // the stream it was allocated on
  std::set<Agent> recorded;      // by record_stream
  std::map<size_t, Segment> segments;
  ~Block();
};
using BlockPtr = std::shared_ptr<Block>;

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
c10::Allocator* host_labelled_allocator();  // device memory in storages that kernels of the CPU may resize
c10::DataPtr as_device(c10::DataPtr&& host_labelled);
BlockPtr block_at(const void* address);     // of device or pinned memory, nullptr for other
bool maybe_pinned(const void* address);     // false is sure, and needs no lock
void record_stream(const void* address, Agent agent);
int64_t allocated(c10::DeviceIndex device);
int64_t most_allocated(c10::DeviceIndex device);
void reset_most_allocated(c10::DeviceIndex device);
int64_t capacity();
int64_t pinned_bytes();
extern thread_local WorkPtr running;        // the kernel that this thread executes

// ---- streams.cpp ----

Agent agent_of(const c10::Stream& stream);
std::string agent_name(Agent agent);
c10::Stream current_stream(c10::DeviceIndex device);
c10::DeviceIndex current_device();
c10::DeviceIndex device_count();
void check_index(c10::DeviceIndex device);

// ---- generator.cpp ----

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
at::Generator host_generator(const at::Generator& generator);  // what kernels of the CPU draw from

// ---- hooks.cpp ----

void use();               // the process uses the device from now on; raises in a forked child
bool in_use();
bool in_bad_fork();
void register_hooks();

// ---- views.cpp: tensors of the device as tensors of the CPU, and back ----

bool on_device(const at::Tensor& tensor);
at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like);
at::Tensor host_view(const at::Tensor& tensor);
at::Tensor held_view(const at::Tensor& tensor);  // without a reference to the storage: its block's memory stays
std::vector<Range> ranges_of(const at::Tensor& tensor);

}  // namespace standin
