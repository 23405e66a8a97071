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

int64_t hold(const c10::Stream& stream, std::string name) {
  use();
  const auto trace = capture();
  Lock lock;
  const auto work = submit(std::move(name), agent_of(stream), trace);
  held[++last] = {work->agent, work->epoch};
  return last;
}

void let_go(int64_t kernel) {
  {
    Lock lock;
    held.erase(kernel);
  }
  ended.notify_all();
}

bool held_before(const Clock& clock) {
  for (const auto& [kernel, each] : held)
    if (clock.of(each.agent) >= each.epoch)
      return true;
  return false;
}

void await_held(const std::function<Clock()>& clock) {
  wait_until([&] { return !held_before(clock()); });
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
