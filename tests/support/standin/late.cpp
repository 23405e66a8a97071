// Asynchronous copies that take effect some time between their submission and what is ordered behind them.
#include "standin.h"

#include <list>
#include <random>

namespace standin {

namespace {
struct Pending {
  WorkPtr work;
  Clock clock;  // all that it comes after
  std::set<Block*> blocks;
  std::function<void()> run;
};
// In the order of submission, in which one that comes after another stands behind it.
auto& pending = *new std::list<Pending>;
std::mt19937_64 moments;
std::optional<uint64_t> seeded;

bool before(const Pending& each, const Clock& clock) {
  return clock.of(each.work->agent) >= each.work->epoch;
}
}  // namespace

uint64_t draw() {
  if (seeded != settings().late) {
    seeded = settings().late;
    moments.seed(seeded.value_or(0));
  }
  return moments();
}

void postpone(const WorkPtr& work, const Clock& clock, std::set<Block*> blocks, std::function<void()> run) {
  pending.push_back({work, clock, std::move(blocks), std::move(run)});
}

void settle(const Clock& clock) {
  while (true) {
    std::vector<std::list<Pending>::iterator> ready;
    for (auto at = pending.begin(); at != pending.end(); ++at)
      if (before(*at, clock))
        ready.push_back(at);
    if (ready.empty())
      return;
    // Any that nothing stands before may be the first.
    auto chosen = ready[draw() % ready.size()];
    for (const auto& at : ready)
      if (before(*at, chosen->clock)) {
        chosen = at;
        break;
      }
    Pending taken;
    std::swap(taken, *chosen);
    pending.erase(chosen);
    taken.run();
  }
}

bool pending_use(const Block& block, const Clock* clock) {
  for (const auto& each : pending)
    if (each.blocks.count(const_cast<Block*>(&block)) && (!clock || before(each, *clock)))
      return true;
  return false;
}

bool pending_before(const Clock& clock) {
  for (const auto& each : pending)
    if (before(each, clock))
      return true;
  return false;
}

void let_some_happen() {
  if (pending.empty() || draw() % 4)
    return;
  auto chosen = pending.begin();
  std::advance(chosen, draw() % pending.size());
  const Clock clock = chosen->clock;
  settle(clock);
}

}  // namespace standin
