// Vector clocks, and the history of each range of memory.
#include "standin.h"

#include <algorithm>
#include <sstream>

namespace standin {

namespace {
// Never destroyed, as other state here: tensors outlive what is destroyed when a process ends.
auto& mutex = *new std::recursive_mutex;
auto& clocks = *new std::vector<Clock>(1 + kMostDevices);  // the host's, then the devices' default streams'
auto& remembered = *new std::vector<Conflict>;

// Makes `offset` the beginning of a segment, if it is inside of one.
void split(std::map<size_t, Segment>& segments, size_t offset) {
  auto found = segments.upper_bound(offset);
  if (found == segments.begin())
    return;
  --found;
  if (found->first == offset || found->second.end <= offset)
    return;
  Segment rest = found->second;
  found->second.end = offset;
  segments.emplace(offset, std::move(rest));
}

bool ordered(const WorkPtr& earlier, const Clock& clock) {
  return clock.of(earlier->agent) >= earlier->epoch;
}

// The first earlier access of a segment that is not ordered before the clock.
WorkPtr unordered(const Segment& segment, const Clock& clock, bool write, bool& earlier_writes) {
  if (segment.writer && !ordered(segment.writer, clock)) {
    earlier_writes = true;
    return segment.writer;
  }
  earlier_writes = false;
  if (write)
    for (const auto& reader : segment.readers)
      if (!ordered(reader, clock))
        return reader;
  return nullptr;
}

// Enters an access of [begin, end) whose beginning and end are segments' already.
void enter(std::map<size_t, Segment>& segments, Range range, bool write, const WorkPtr& work, const Clock& clock) {
  auto first = segments.lower_bound(range.begin);
  auto last = segments.lower_bound(range.end);
  if (write) {
    segments.erase(first, last);
    segments[range.begin] = Segment{range.end, work, {}};
    return;
  }
  size_t covered = range.begin;
  std::vector<Range> gaps;
  for (auto at = first; at != last; ++at) {
    if (at->first > covered)
      gaps.push_back({covered, at->first});
    covered = at->second.end;
    // What is ordered before this reader is ordered before whatever is ordered after it.
    auto& readers = at->second.readers;
    readers.erase(
        std::remove_if(readers.begin(), readers.end(), [&](const WorkPtr& each) { return ordered(each, clock); }),
        readers.end());
    readers.push_back(work);
  }
  if (covered < range.end)
    gaps.push_back({covered, range.end});
  for (const auto& gap : gaps)
    segments[gap.begin] = Segment{gap.end, nullptr, {work}};
}

std::string text(const Conflict& conflict) {
  std::ostringstream out;
  const auto say = [&](const WorkPtr& work, bool writes) {
    out << work->name << " on " << agent_name(work->agent) << " (" << (writes ? "writes" : "reads") << "), from\n"
        << describe(work->trace);
  };
  out << "standin: two accesses of " << (conflict.pinned ? "pinned host" : "device")
      << " memory are not ordered: bytes " << conflict.bytes.begin << " to " << conflict.bytes.end << " of a block of "
      << conflict.block_bytes << "\n  first: ";
  say(conflict.earlier, conflict.earlier_writes);
  out << "  then: ";
  say(conflict.later, conflict.later_writes);
  out << "  Nothing makes the second wait for the first: an event, a synchronisation, or record_stream is missing.";
  return out.str();
}
}  // namespace

Lock::Lock() : held_(mutex) {}

Settings& settings() {
  static Settings chosen;
  return chosen;
}

void Clock::join(const Clock& other) {
  if (at.size() < other.at.size())
    at.resize(other.at.size());
  for (size_t i = 0; i < other.at.size(); ++i)
    at[i] = std::max(at[i], other.at[i]);
}

uint64_t Clock::tick(Agent agent) {
  if (at.size() <= agent)
    at.resize(agent + 1);
  return ++at[agent];
}

Clock& clock_of(Agent agent) {
  return clocks.at(agent);
}

Agent new_agent() {
  clocks.emplace_back();
  return clocks.size() - 1;
}

Agent last_agent() {
  return clocks.size() - 1;
}

WorkPtr submit(std::string name, Agent agent, Trace trace) {
  let_some_happen();
  auto& clock = clocks.at(agent);
  clock.join(clocks[kHost]);
  const auto epoch = clock.tick(agent);
  return std::make_shared<Work>(Work{std::move(name), agent, epoch, std::move(trace)});
}

void host_learns(const Clock& clock) {
  clocks[kHost].join(clock);
  settle(clocks[kHost]);
}

std::optional<Conflict> touch(Block& block, const std::vector<Range>& ranges, bool write, const WorkPtr& work) {
  if (!settings().clocks)
    return std::nullopt;
  const auto& clock = clocks.at(work->agent);
  for (const auto& range : ranges) {
    split(block.segments, range.begin);
    split(block.segments, range.end);
    const auto last = block.segments.lower_bound(range.end);
    for (auto at = block.segments.lower_bound(range.begin); at != last; ++at) {
      bool earlier_writes = false;
      if (const auto earlier = unordered(at->second, clock, write, earlier_writes))
        return Conflict{earlier, work, earlier_writes, write, {at->first, at->second.end}, block.bytes, block.pinned};
    }
    enter(block.segments, range, write, work, clock);
  }
  return std::nullopt;
}

std::optional<Conflict> touch_all(Block& block, const Clock& clock, const WorkPtr& work) {
  if (!settings().clocks)
    return std::nullopt;
  for (const auto& [begin, segment] : block.segments) {
    bool earlier_writes = false;
    if (const auto earlier = unordered(segment, clock, true, earlier_writes))
      return Conflict{earlier, work, earlier_writes, true, {begin, segment.end}, block.bytes, block.pinned};
  }
  return std::nullopt;
}

void remember(Conflict conflict) {
  Lock lock;
  if (remembered.size() < 100)
    remembered.push_back(std::move(conflict));
}

void raise(const Conflict& conflict) {
  TORCH_CHECK(false, text(conflict));
}

void raise_remembered() {
  std::optional<Conflict> first;
  {
    Lock lock;
    if (remembered.empty())
      return;
    first = remembered.front();
    remembered.erase(remembered.begin());
  }
  raise(*first);
}

std::vector<std::string> take_violations() {
  std::vector<Conflict> taken;
  {
    Lock lock;
    taken.swap(remembered);
  }
  std::vector<std::string> texts;
  for (const auto& each : taken)
    texts.push_back(text(each));
  return texts;
}

}  // namespace standin
