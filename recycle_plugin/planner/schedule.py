"""One global order of a step's operations, by event-driven greedy list scheduling.

Programs are projections of this one order, so they can't deadlock.  A free worker takes I before F
(if its memory allows) before W: I unblocks others, W is filler.  The key of F is the micro-batch
index, because taking them in order of arrival is 25-70% worse.  A fixed portfolio of variations of
that rule is tried and stops at the lower bound; no clock decides, so that all workers find the same plan.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

from recycle_plugin.planner.bounds import bound
from recycle_plugin.planner.flat import Problem


class Rule(NamedTuple):
    """How a worker chooses.

    ``forward``: ties between an own and a rerouted micro-batch of one index: 0 own first, 1 rerouted
    first; 2: order of arrival.  ``backward``: 0 index, 1 arrival.  ``ahead``: how far the F of a worker
    may run ahead of its I, beyond 1F1B's depth, plus one (0: no limit).  ``burst``: hold the last so many F until
    memory fits all of them.  ``pause``: once memory is full, wait until so many places are free.
    ``lead``: F goes before I while fewer than 1F1B's depth plus so many, less one, are ahead (0: never); that
    is the steady state of the zero-bubble paper's ZB-H1 (Qi et al., ICLR'24), which needs no more memory than 1F1B.
    """

    forward: int = 0
    backward: int = 0
    ahead: int = 0
    burst: int = 0
    pause: int = 0
    lead: int = 0


class Timing(NamedTuple):
    """When an order runs.  Microseconds; ``starts`` per operation, from 0."""

    period: int
    span: int
    starts: list[int]


TRIALS_AT_LEAST = 4
OPERATIONS_TRIED = 30_000  # in all trials together: bounds the time of planning without looking at a clock


def portfolio(stages: int) -> tuple[Rule, ...]:
    """The rules to try, in an order found by greedy cover over 90 jobs: each adds most to those before it."""
    return (
        Rule(forward=1, lead=1),
        Rule(forward=1, burst=stages, lead=2),
        Rule(forward=1, pause=2, lead=1),
        Rule(forward=2, backward=1, burst=stages, lead=1),
        Rule(ahead=3, lead=2),
        Rule(burst=stages),
        Rule(lead=2),
        Rule(),
        Rule(pause=2, lead=1),
        Rule(forward=1, pause=2),
        Rule(forward=1, pause=stages),
        Rule(forward=2, backward=1, burst=stages),
        Rule(forward=1, ahead=1),
        Rule(forward=2),
    )


def best_order(problem: Problem) -> tuple[list[int], Timing]:
    """The best order that the portfolio finds, with its timing."""
    least, best = bound(problem), None
    trials = max(TRIALS_AT_LEAST, OPERATIONS_TRIED // (problem.kinds * problem.records))
    for rule in portfolio(problem.stages)[:trials]:
        order = greedy(problem, rule)
        timing = replay(problem, order, least)
        if best is None or timing[:2] < best[1][:2]:
            best = order, timing
        if best[1].period <= least:
            break
    assert best is not None
    return best


def greedy(problem: Problem, rule: Rule) -> list[int]:
    """All operations in the order of their starts under ``rule``."""
    records, width, worker, duration = problem.records, problem.width, problem.worker, problem.duration
    workers, communication = problem.stages * len(problem.replicas), problem.communication
    lead = [problem.stages - here // len(problem.replicas) + rule.lead - 1 if rule.lead else 0 for here in range(workers)]
    split, last, operations = problem.kinds == 3, records - width, problem.kinds * problem.records
    forward_key, backward_key = _keys(problem, rule)
    may_forward = _memory_rule(problem, rule)
    forward: list[list[int]] = [[] for _ in range(workers)]
    backward: list[list[int]] = [[] for _ in range(workers)]
    weight: list[deque[int]] = [deque() for _ in range(workers)]
    idle, held, ahead = [True] * workers, [0] * workers, [0] * workers
    size = 2 * operations  # an event is time * size + operation, plus `operations` where it arrives instead of ending
    events = [operations + record for record in range(width)]
    order: list[int] = []
    while events:
        now = events[0] // size
        base, horizon, touched = now * size, (now + 1) * size, []
        while events and events[0] < horizon:
            operation = heappop(events) - base
            if operation >= operations:  # its inputs have arrived
                operation -= operations
                here = worker[operation]
                if operation < records:
                    heappush(forward[here], (forward_key[operation] or now) * records + operation)
                else:
                    record = operation - records
                    heappush(backward[here], (backward_key[record] or now) * records + record)
            else:  # it has ended
                here = worker[operation]
                idle[here] = True
                if operation < last:
                    heappush(events, (now + communication) * size + operations + operation + width)
                elif operation < records:
                    heappush(backward[here], (backward_key[operation] or now) * records + operation)
                elif operation < 2 * records:
                    if operation >= records + width:
                        heappush(events, (now + communication) * size + operations + operation - width)
                    if split:
                        weight[here].append(operation + records)
                    else:
                        held[here] -= 1
                else:
                    held[here] -= 1
            touched.append(here)
        for here in touched:
            if not idle[here]:
                continue
            ready, gradients, waiting = forward[here], backward[here], weight[here]
            leads = ready and (not gradients or ahead[here] < lead[here])
            if leads and may_forward(here, held[here], ahead[here], bool(gradients or waiting)):
                chosen = heappop(ready) % records
                held[here] += 1
                ahead[here] += 1
            elif gradients:
                chosen = records + heappop(gradients) % records
                ahead[here] -= 1
            elif waiting:
                chosen = waiting.popleft()
            else:
                continue
            idle[here] = False
            order.append(chosen)
            heappush(events, (now + duration[chosen]) * size + chosen)
    return order


def replay(problem: Problem, order: list[int], least: int = 0) -> Timing:
    """Run ``order`` as soon as its inputs allow, several steps in a row, and take the tightest step.

    Each step's starts are a valid template: shifted by the longest of its windows (with reduce and
    step) they satisfy every dependency of the next step.  From rest the first step is loose, because
    later stages' first F wait for nothing but the pipeline to fill.
    """
    free = [0] * (problem.stages * len(problem.replicas))
    best = None
    for _ in range(1 if problem.synchronous else 5):
        starts, ends = _run(problem, order, free)
        timing, lasts = _measure(problem, starts, ends)
        if best is None or timing[:2] < best[:2]:
            best = timing
        if best.period <= least:
            break
        free = [lasts[here // len(problem.replicas)] for here in range(len(free))]
    assert best is not None
    return best


def _run(problem: Problem, order: list[int], free: list[int]) -> tuple[list[int], list[int]]:
    worker, duration, source, lag = problem.worker, problem.duration, problem.source, problem.lag
    starts, ends, free = [0] * len(duration), [0] * (len(duration) + 1), list(free)
    for operation in order:
        here, start = worker[operation], ends[source[operation]] + lag[operation]  # source -1: the entry that stays 0
        if free[here] > start:
            start = free[here]
        starts[operation] = start
        free[here] = ends[operation] = start + duration[operation]
    return starts, ends


def _measure(problem: Problem, starts: list[int], ends: list[int]) -> tuple[Timing, list[int]]:
    """The timing of a step, and when each stage has stepped."""
    width, final = problem.width, (problem.kinds - 1) * problem.records
    firsts = [min(starts[stage * width : (stage + 1) * width]) for stage in range(problem.stages)]
    lasts = [max(ends[final + stage * width : final + (stage + 1) * width]) for stage in range(problem.stages)]
    begin, span = min(firsts), max(lasts) - min(firsts)
    stepped = [last + closing for last, closing in zip(lasts, problem.closing)]
    period = span + problem.joint_closing if problem.synchronous else max(end - first for end, first in zip(stepped, firsts))
    return Timing(period, span, [start - begin for start in starts] if begin else starts), stepped


def _keys(problem: Problem, rule: Rule) -> tuple[list[int], list[int]]:
    """Keys of F and of I per record, at least 1; 0: the time of arrival."""
    micro_batches, keys = problem.micro_batches, []
    for record in range(problem.records):
        rerouted = problem.worker[record] != record // micro_batches
        keys.append(2 * (record % micro_batches) + (rerouted != (rule.forward == 1)) + 1)
    return [0] * problem.records if rule.forward == 2 else keys, [0] * problem.records if rule.backward else keys


def _memory_rule(problem: Problem, rule: Rule):
    """Whether a worker may take a forward: ``(worker, held, ahead, has other work) -> bool``."""
    ranks = len(problem.replicas)
    caps = [problem.caps[here // ranks] for here in range(problem.stages * ranks)]
    depth = [problem.stages - here // ranks + rule.ahead - 1 for here in range(problem.stages * ranks)]
    if not (rule.burst or rule.pause):
        if not rule.ahead:
            return lambda here, held, ahead, busy: held < caps[here]
        return lambda here, held, ahead, busy: held < caps[here] and ahead < depth[here]
    return _holding_rule(problem, rule, caps)


def _holding_rule(problem: Problem, rule: Rule, caps: list[int]):
    """Rules that wait for several free places.  They never keep a worker idle that could run a forward."""
    remaining = [0] * len(caps)
    for record in range(problem.records):
        remaining[problem.worker[record]] += 1
    state = [0] * len(caps)  # 0 open, 1 last burst has begun, 2 waiting for free places

    def blocked(here: int, held: int) -> bool:
        if rule.burst and state[here] != 1 and remaining[here] <= rule.burst:
            if held + min(remaining[here], caps[here]) > caps[here]:
                return True
            state[here] = 1
        if rule.pause and state[here] != 1:
            if held >= caps[here]:
                state[here] = 2
            if state[here] == 2:
                if held > caps[here] - min(rule.pause, remaining[here], caps[here]):
                    return True
                state[here] = 0
        return False

    def may_forward(here: int, held: int, ahead: int, busy: bool) -> bool:
        if held >= caps[here]:
            blocked(here, held)
            return False
        if blocked(here, held) and busy:
            return False
        remaining[here] -= 1
        return True

    return may_forward
