// Kernels that something outside of the device ends: those of collectives, which wait for other processes.
#include "standin.h"

#include <atomic>
#include <condition_variable>

namespace standin {

namespace {
struct Held {
  Agent agent;
  uint64_t epoch;
};
auto& held = *new std::map<int64_t, Held>;
auto& loaded = *new std::set<std::string>;
auto& ended = *new std::condition_variable_any;
auto& waiting = *new std::mutex;
std::atomic<int64_t> last{0};
std::atomic<bool> lazy{false};
size_t queues = 0;  // of the hardware, in which streams stand; 0: one for each stream
auto& heads = *new std::map<size_t, std::set<int64_t>>;  // by queue the kernels that its work waits for

std::set<int64_t> still(const std::set<int64_t>& kernels) {
  std::set<int64_t> found;
  for (const auto kernel : kernels)
    if (held.count(kernel))
      found.insert(kernel);
  return found;
}

std::set<int64_t> before(const Clock& clock) {
  std::set<int64_t> found;
  for (const auto& [kernel, each] : held)
    if (clock.of(each.agent) >= each.epoch)
      found.insert(kernel);
  return found;
}

// Whoever waits gives the device's lock away meanwhile, and looks again when a kernel has ended.
template <class Over>
void wait_until(const Over& over) {
  std::unique_lock<std::mutex> turn(waiting);
  while (true) {
    {
      Lock lock;
      if (over())
        return;
    }
    ended.wait_for(turn, std::chrono::milliseconds(5));
  }
}
}  // namespace

std::pair<int64_t, std::set<int64_t>> hold(const c10::Stream& stream, std::string name) {
  use();
  const auto trace = capture();
  Lock lock;
  const auto agent = agent_of(stream);
  auto behind = before(clock_of(agent));
  behind.merge(in_front(agent));
  const auto work = submit(std::move(name), agent, trace);
  held[++last] = {work->agent, work->epoch};
  if (queues)
    heads[agent % queues].insert(last);
  return {last, behind};
}

void share_queues(size_t connections) {
  Lock lock;
  queues = connections;
  heads.clear();
}

std::set<int64_t> in_front(Agent agent) {
  if (!queues)
    return {};
  auto& head = heads[agent % queues];
  return head = still(head);
}

void stand_behind(Agent agent, const Clock& clock, const std::set<int64_t>& kernels) {
  if (!queues)
    return;
  auto& head = heads[agent % queues];
  head.merge(before(clock));
  head.merge(still(kernels));
}

bool any_held(const std::set<int64_t>& kernels) {
  return !still(kernels).empty();
}

void let_go(int64_t kernel) {
  {
    Lock lock;
    held.erase(kernel);
  }
  ended.notify_all();
}

bool held_before(const Clock& clock) {
  return !before(clock).empty();
}

void await_held(Agent agent) {
  wait_until([&] { return !held_before(clock_of(agent)) && in_front(agent).empty(); });
}

void await_held(const std::function<Clock()>& clock, const std::set<int64_t>& kernels) {
  wait_until([&] { return !held_before(clock()) && !any_held(kernels); });
}

void load_lazily(bool on) {
  lazy = on;
}

void load(const std::string& kernel) {
  if (!lazy)
    return;
  wait_until([&] { return loaded.count(kernel) || held.empty(); });
  Lock lock;
  loaded.insert(kernel);
}

}  // namespace standin
