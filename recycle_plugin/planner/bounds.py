"""Lower bounds: no schedule of this routing and memory has a shorter period.

For a worker of stage p with N micro-batches, A of which fit before its first backward, and RT the round trip from the
start of a micro-batch's F at p to the arrival of its gradient:

* load: N (F + I + W);
* head: before its first I a worker can run nothing but F, and at most min(A, N) of them;
* tail: when the last I of stage p ends, at most min(A, N) of its W are still to come. The last gradient also
  has to travel up to stage q <= p, whose first F started that much earlier;
* memory: every micro-batch occupies its place for RT + I + W. The places can't all be taken at the start nor given back
  at the end: the F that take them, and the W or B that give them back, follow each other on one worker;
* ties: a stage that shares weights steps when the last of them has reduced. After the first F of stage p, the last W of
  a stage q below comes at least the fill and q's own window later; of a stage q above, p's last I, the gradient's way
  and q's backward;
* stages that step together: between two barriers, each steps, then waits for its first activation, then has its window.

Without a split backward, I stands for the whole backward and W is nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recycle_plugin.planner.flat import Array, Problem


class StageCosts(NamedTuple):
    """The costs per stage, int64 in microseconds: F, the least time to a gradient, the W after it, both backwards."""

    forward: Array
    gradient: Array
    weight: Array
    backward: Array


class _Reached(NamedTuple):
    """The least microseconds per stage from its first F's start to the end of its last I, and to the end of all."""

    quick: StageCosts
    before: Array
    windows: Array


def _reached(problem: Problem) -> _Reached:
    quick = _quickest(problem)
    trips = round_trips(problem, quick)
    befores, least = np.zeros((2, problem.stages), np.int64)
    hop = 2 * problem.communication[0]
    for stage in range(problem.stages):
        before, window = _busiest(problem, stage, int(trips[stage]))
        befores[stage], least[stage] = before, max(least[stage], window)
        travel = 0
        for above in range(stage - 1, -1, -1):
            arrival = before + travel + int(quick.forward[above]) + hop
            least[above] = max(least[above], arrival + int(quick.backward[above]))
            travel += int(quick.forward[above] + quick.gradient[above]) + hop
    return _Reached(quick, befores, least)


def bound(problem: Problem) -> int:
    """Return the least period in microseconds. Costs time in proportion to the stages squared, and to the workers."""
    reached = _reached(problem)
    if problem.synchronous:
        return _together(problem, reached)
    return max(int((reached.windows + problem.closing).max()), _tied(problem, reached))


def _tied(problem: Problem, reached: _Reached) -> int:
    """Return the least time from the first F of a stage to its step, over all stages that it waits for in a tie."""
    (forward, gradient, _, backward), hop, found = reached.quick, problem.communication[0], 0
    for waits in range(problem.stages):
        for other in np.flatnonzero(problem.tie == problem.tie[waits]).tolist():
            if other > waits:
                last = forward[waits:other].sum() + reached.windows[other]
            elif other < waits:
                last = reached.before[waits] + gradient[other + 1 : waits].sum() + backward[other]
            else:
                continue
            found = max(found, int(last + abs(other - waits) * hop + problem.reduce[other] + problem.after[waits]))
    return found


def _together(problem: Problem, reached: _Reached) -> int:
    """Return the least time from one barrier of all stages to the next."""
    lasts, first = np.zeros(problem.stages, np.int64), 0
    for stage, window in enumerate(reached.windows):
        first = max(first, int(problem.step[stage]))
        lasts[stage] = first + window
        first += int(reached.quick.forward[stage]) + problem.communication[0]
    return int(problem.summed(lasts).max())


def round_trips(problem: Problem, quick: StageCosts) -> Array:
    """Return the least microseconds per stage from a micro-batch's F's start to its gradient's arrival; int64."""
    below = np.cumsum((quick.forward + quick.gradient)[::-1])[::-1] - quick.gradient
    return below + 2 * problem.communication[0] * np.arange(problem.stages - 1, -1, -1)


def _busiest(problem: Problem, stage: int, trip: int) -> tuple[int, int]:
    """Return the least time to the end of the last I, and to the end of all, over the stage's workers."""
    before = window = 0
    cap = int(problem.cap[stage])
    here = slice(stage * problem.ranks, (stage + 1) * problem.ranks)
    kinds = np.concatenate([problem.spend[:, here].T, problem.loads[here, None]], axis=1)
    for forward, split, weight, joint, load in sorted(set(map(tuple, kinds[problem.loads[here] > 0].tolist()))):
        _, weight, backward = _backward(problem, split, weight, joint)
        places = min(cap, load)
        busy = load * (forward + backward) + max(0, trip - places * forward)
        before = max(before, busy - places * weight)
        corners = sum(range(cap)) if cap <= load else 0
        ending = weight if problem.split else joint
        window = max(window, busy, -(-(load * (trip + backward) + corners * (forward + ending)) // cap))
    return before, window


def _backward(problem: Problem, split: int, weight: int, joint: int) -> tuple[int, int, int]:
    """Return the least time to the gradient, the W that may come later, and both together."""
    return (split, weight, split + weight) if problem.split else (joint, 0, joint)


def _quickest(problem: Problem) -> StageCosts:
    """Return the costs on the fastest worker of each stage that has anything to do."""
    working = (
        np.where(problem.loads > 0, problem.spend, np.int64(1) << 40)
        .reshape(4, problem.stages, problem.ranks)
        .min(axis=2)
    )
    rows = [_backward(problem, *map(int, column)) for column in working[1:].T]
    gradient, weight, backward = (np.array(column, np.int64) for column in zip(*rows))
    return StageCosts(working[0], gradient, weight, backward)
