"""Lower bounds: no schedule of this routing and memory has a shorter period.

For stage p with N micro-batches on its busiest worker, A the activation cap, and RT the round trip
from the start of a micro-batch's F at p to the arrival of its gradient:

* load: N (F + I + W);
* head: before its first I a worker can run nothing but F, and at most min(A, N) of them;
* tail: when the last I of stage p ends, at most min(N, A) of its W are still to come, and the last
  gradient has to travel up to stage q <= p, whose first F started that much earlier;
* memory: every micro-batch occupies one of A places for RT + I + W.

Without a split backward, I stands for the whole backward and W is nothing.
"""

from __future__ import annotations

from recycle_plugin.planner.flat import Problem


def windows(problem: Problem) -> tuple[int, ...]:
    """Per stage, the least microseconds from its first F's start to its last instruction's end."""
    forward, backward, weight = _costs(problem)
    least = [0] * problem.stages
    for stage in range(problem.stages):
        load, places = problem.loads[stage], problem.caps[stage]
        trip = _round_trip(problem, stage)
        work = load * (forward[stage] + backward[stage] + weight[stage])
        busy = work + max(0, trip - min(places, load) * forward[stage])
        held = load * (trip + backward[stage] + weight[stage])
        least[stage] = max(least[stage], busy, -(-held // places))
        last_backward, travel = busy - min(load, places) * weight[stage], 0
        for above in range(stage, -1, -1):
            if above < stage:
                travel += forward[above] + backward[above] + 2 * problem.communication
            least[above] = max(least[above], last_backward + travel + weight[above])
    return tuple(least)


def bound(problem: Problem) -> int:
    """The least period in microseconds: stages couple at their own reduce-and-step, or all at once if synchronous."""
    least = windows(problem)
    if not problem.synchronous:
        return max(window + closing for window, closing in zip(least, problem.closing))
    return span_bound(problem) + problem.joint_closing


def span_bound(problem: Problem) -> int:
    """The least microseconds from the first start to the last end of one step that starts from rest."""
    arrival, least = 0, 0
    for stage, window in enumerate(windows(problem)):
        least = max(least, arrival + window)
        arrival += problem.cost[0][stage] + problem.communication
    return least


def _costs(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    weight = problem.cost[2] if problem.kinds == 3 else (0,) * problem.stages
    return problem.cost[0], problem.cost[1], weight


def _round_trip(problem: Problem, stage: int) -> int:
    forward, backward = problem.cost[0], problem.cost[1]
    return sum(forward[stage:]) + sum(backward[stage + 1 :]) + 2 * problem.communication * (problem.stages - 1 - stage)
