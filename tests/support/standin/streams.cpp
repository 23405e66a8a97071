// Devices, streams and events, as the generic parts of torch ask for them.
#include "standin.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

namespace standin {

namespace {
thread_local c10::DeviceIndex device_now = 0;
thread_local c10::StreamId stream_now[kMostDevices] = {};  // 0 is the device's default stream
std::vector<c10::DeviceIndex> device_of_agent(1 + kMostDevices);

struct Event {
  Clock clock;
  std::set<int64_t> in_front;  // kernels of the stream's queue
  std::chrono::steady_clock::time_point at;
  bool timed = false;
  int polls = 0;  // how often it still looks unfinished
  bool seen = false;  // a query has found it over: nobody waits for it any more
};

// torch has so many streams of a device and of a priority, and then gives the first one again (c10/cuda/CUDAStream.cpp).
constexpr size_t kStreamsPerPool = 32;

c10::Stream new_stream(c10::DeviceIndex device, bool high) {
  use();
  Lock lock;
  static std::vector<Agent> pools[kMostDevices][2];
  static size_t given[kMostDevices][2];
  auto& pool = pools[device][high];
  if (pool.size() < kStreamsPerPool) {
    pool.push_back(new_agent());
    device_of_agent.push_back(device);
  }
  const auto agent = pool[given[device][high]++ % kStreamsPerPool];
  return c10::Stream(c10::Stream::UNSAFE, {kDevice, device}, static_cast<c10::StreamId>(agent));
}

// Whether all that `clock` knows is over, as a poll of the host sees it.  A poll orders nothing, as for torch's own
// torch.cuda._sanitizer: whoever reads what is over has to synchronise with it.
bool over(const Clock& clock, const std::set<int64_t>& in_front, int& polls) {
  if (held_before(clock) || any_held(in_front))
    return false;
  if (pending_before(clock) && polls > 0) {
    --polls;
    let_some_happen();
    return false;
  }
  settle(clock);
  return true;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  c10::DeviceType type() const override { return kDevice; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kDevice, device_now);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, device_now}; }
  void setDevice(c10::Device device) const override {
    check_index(device.index());
    device_now = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kDevice, device.has_index() ? device.index() : device_now});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return new_stream(device.has_index() ? device.index() : device_now, high);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return new_stream(device.has_index() ? device.index() : device_now, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    stream_now[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    int polls = settings().late ? static_cast<int>(draw() % 2) : 0;
    return over(clock_of(agent_of(stream)), in_front(agent_of(stream)), polls);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    raise_remembered();
    count_synchronisation("stream.synchronize");
    await_held(agent_of(stream));
    Lock lock;
    host_learns(clock_of(agent_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    raise_remembered();
    count_synchronisation("device synchronize");
    const auto all = [&] {
      Clock found = clock_of(1 + device);
      for (Agent agent = 1 + kMostDevices; agent < device_of_agent.size(); ++agent)
        if (device_of_agent[agent] == device)
          found.join(clock_of(agent));
      return found;
    };
    await_held(all, {});
    Lock lock;
    host_learns(all());
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    use();
    Lock lock;
    if (!*event)
      *event = new Event;
    auto& found = *static_cast<Event*>(*event);
    let_some_happen();
    // What the host has done before is before whatever waits for the event, too.
    clock_of(agent_of(stream)).join(clock_of(kHost));
    found.clock = clock_of(agent_of(stream));
    found.in_front = in_front(agent_of(stream));
    found.at = std::chrono::steady_clock::now();
    found.timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    found.polls = settings().late ? static_cast<int>(draw() % 4) : 0;
    found.seen = false;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event)
      return;
    Lock lock;
    const auto& found = *static_cast<Event*>(event);
    stand_behind(agent_of(stream), found.clock, found.in_front);
    clock_of(agent_of(stream)).join(found.clock);
  }
  bool queryEvent(void* event) const override {
    if (!event)
      return true;
    Lock lock;
    auto& found = *static_cast<Event*>(event);
    return found.seen = over(found.clock, found.in_front, found.polls);
  }
  void synchronizeEvent(void* event) const override {
    raise_remembered();
    if (!event || !static_cast<Event*>(event)->seen)
      count_synchronisation("event.synchronize");
    if (!event)
      return;
    const auto& found = *static_cast<Event*>(event);
    await_held([&] { return found.clock; }, found.in_front);
    Lock lock;
    host_learns(found.clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
    const auto &first = *static_cast<Event*>(from), &second = *static_cast<Event*>(to);
    TORCH_CHECK(first.timed && second.timed, "Both events must be created with argument 'enable_timing=True'.");
    return std::chrono::duration<double, std::milli>(second.at - first.at).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer.get(), agent_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}  // namespace

Agent agent_of(const c10::Stream& stream) {
  return stream.id() ? static_cast<Agent>(stream.id()) : 1 + stream.device_index();
}

std::string agent_name(Agent agent) {
  if (agent == kHost)
    return "the host";
  if (agent <= kMostDevices)
    return "the default stream of standin:" + std::to_string(agent - 1);
  return "stream " + std::to_string(agent) + " of standin:" + std::to_string(device_of_agent.at(agent));
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device == -1)
    device = device_now;
  return c10::Stream(c10::Stream::UNSAFE, {kDevice, device}, stream_now[device]);
}

c10::DeviceIndex current_device() {
  return device_now;
}

c10::DeviceIndex device_count() {
  static const auto count = [] {
    const char* given = std::getenv("RECYCLE_TEST_STANDIN_DEVICES");
    return static_cast<c10::DeviceIndex>(std::min(given ? std::atoi(given) : 1, kMostDevices));
  }();
  return count;
}

void check_index(c10::DeviceIndex device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(), "standin error: invalid device ordinal ", static_cast<int>(device),
      ", there are ", static_cast<int>(device_count()));
}

}  // namespace standin
