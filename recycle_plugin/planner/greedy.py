"""Event-driven greedy list scheduling, compiled by numba (planner/compiled.py). ``planner.list_scheduling`` has the
rules that drive it. Everything is int64, so that there is one compiled version of each function.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.planner.compiled import compiled, inner

Array = NDArray[np.int64]

BURST, PAUSE, AHEAD, LEAD, WAIT_W, WAIT_F = range(6)
"""Fields of a rule's array; ``list_scheduling.SchedulingRule`` explains them."""
F, I, W, B, ACTIVATION, GRADIENT, WAKE = range(7)
"""Events: the end of an operation (the four kinds), the arrival of what F or I needs, a worker's beginning."""
FORWARDS, BACKWARDS, WEIGHTS, WEIGHTS_DONE, COMING, IDLE, HELD, LEAD_NOW, REMAINING, GATE = range(10)
"""Rows of ``tally``, per worker: sizes of its queues (of W: all ever queued, and taken), whether it is idle, memory
held, F less I begun, F to come, and whether F waits for several places: 0 open, 1 in its last burst, 2 waiting.
"""


class SchedulingProblem(NamedTuple):
    """The part of the scheduling that stays as it is; arrays are int64, times in microseconds."""

    stages: int
    ranks: int
    split: int
    worker: Array  # [record]
    spend: Array  # [kind, worker]
    forward_lag: Array  # [record]
    backward_lag: Array  # [record]
    loads: Array  # [worker] records
    cap: Array  # [stage] micro-batches that a worker may hold
    forward_key: Array  # [record] least first, -1: in order of arrival
    backward_key: Array  # [record] likewise
    wake: Array  # [stage] when its workers begin
    rule: Array


@inner
def push(heap, base, size, key):
    """Add ``key`` to the binary heap of ``size`` entries that stands at ``base``."""
    place = size
    while place > 0:
        above = (place - 1) >> 1
        if heap[base + above] <= key:
            break
        heap[base + place] = heap[base + above]
        place = above
    heap[base + place] = key


@inner
def pop(heap, base, size):
    """Take the least key out of the heap of ``size`` entries that stands at ``base``."""
    top, last = heap[base], heap[base + size - 1]
    size -= 1
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and heap[base + below + 1] < heap[base + below]:
            below += 1
        if heap[base + below] >= last:
            break
        heap[base + place] = heap[base + below]
        place = below
    heap[base + place] = last
    return top


@inner
def blocked(job, tally, here, cap):
    """Return whether ``here`` waits for several free places before its next F."""
    burst, pause = job.rule[BURST], job.rule[PAUSE]
    held, remaining = tally[HELD, here], tally[REMAINING, here]
    if burst and tally[GATE, here] != 1 and remaining <= burst:
        if held + min(remaining, cap) > cap:
            return True
        tally[GATE, here] = 1
    if pause and tally[GATE, here] != 1:
        if held >= cap:
            tally[GATE, here] = 2
        if tally[GATE, here] == 2:
            if held > cap - min(pause, remaining, cap):
                return True
            tally[GATE, here] = 0
    return False


@inner
def finished(job, tally, queue, base, kind, record, now):
    """Settle the end of an operation; return (event, record, time) of the arrival that it causes, record -1: none."""
    here, width = job.worker[record], job.worker.size // job.stages
    tally[IDLE, here] = 1
    if kind == F:
        if record >= job.worker.size - width:
            return GRADIENT, record, now
        return ACTIVATION, record + width, now + job.forward_lag[record + width]
    if kind == W:
        tally[HELD, here] -= 1
        return GRADIENT, -1, now
    if kind == I:
        queue[base[WEIGHTS, here] + tally[WEIGHTS, here]] = record
        tally[WEIGHTS, here] += 1
    else:
        tally[HELD, here] -= 1
    if record < width:
        return GRADIENT, -1, now
    return GRADIENT, record - width, now + job.backward_lag[record - width]


@inner
def arrive(job, tally, queue, base, event, record, now):
    """Put an F, I or B whose inputs have arrived into its worker's queue."""
    here = job.worker[record]
    if event == GRADIENT:
        key, kind = job.backward_key[record], BACKWARDS
    else:
        key, kind = job.forward_key[record], FORWARDS
    push(queue, base[kind, here], tally[kind, here], (now if key < 0 else key) * job.worker.size + record)
    tally[kind, here] += 1


@inner
def choose(job, tally, here):
    """Return the operation that an idle worker begins, or -1. It depends on the worker's queues, its memory and the
    rule.
    """
    rule, stage = job.rule, here // job.ranks
    ready_f, ready_i, ready_w = (
        tally[FORWARDS, here],
        tally[BACKWARDS, here],
        tally[WEIGHTS, here] - tally[WEIGHTS_DONE, here],
    )
    depth = job.stages - stage
    may_forward = ready_f > 0 and tally[HELD, here] < job.cap[stage]
    if may_forward and rule[AHEAD] and tally[LEAD_NOW, here] >= depth + rule[AHEAD] - 1:
        may_forward = False
    leads = rule[LEAD] and tally[LEAD_NOW, here] < depth + rule[LEAD] - 1
    if ready_f > 0 and (ready_i == 0 or leads):
        holds = blocked(job, tally, here, job.cap[stage])
        if may_forward and not (holds and (ready_i > 0 or ready_w > 0)):
            return F
    if ready_i > 0:
        return I if job.split else B
    return W if ready_w else -1


@inner
def patient(job, tally, queue, base, here, kind, now):
    """Return whether an idle worker rather waits for a gradient than begins an F or a W."""
    first, soon = base[COMING, here], now + job.spend[kind, here] * job.rule[WAIT_F if kind == F else WAIT_W] // 100
    while tally[COMING, here] and queue[first] <= now:
        pop(queue, first, tally[COMING, here])
        tally[COMING, here] -= 1
    return tally[COMING, here] > 0 and queue[first] < soon


@inner
def begin(job, tally, queue, base, here, kind):
    """Take the next record of ``kind`` out of its worker's queue."""
    tally[IDLE, here] = 0
    if kind == W:
        tally[WEIGHTS_DONE, here] += 1
        return queue[base[WEIGHTS, here] + tally[WEIGHTS_DONE, here] - 1]
    waiting = FORWARDS if kind == F else BACKWARDS
    record = pop(queue, base[waiting, here], tally[waiting, here]) % job.worker.size
    tally[waiting, here] -= 1
    if kind == F:
        tally[REMAINING, here] -= 1
        tally[HELD, here] += 1
        tally[LEAD_NOW, here] += 1
    else:
        tally[LEAD_NOW, here] -= 1
    return record


@inner
def announce(job, tally, queue, base, record, end):
    """Tell the worker one stage up when the gradient of a ``record`` whose I or B ends at ``end`` arrives."""
    above = job.worker[record - job.worker.size // job.stages]
    arrival = end + job.backward_lag[record - job.worker.size // job.stages]
    push(queue, base[COMING, above], tally[COMING, above], arrival)
    tally[COMING, above] += 1


@compiled
def greedy(job, order):
    """Fill ``order`` with all operations by their starts; return their number. Costs n log n for n operations."""
    records, workers, rule = job.worker.size, job.loads.size, job.rule
    width = records // job.stages
    tally, queue, base = (
        np.zeros((10, workers), np.int64),
        np.empty(5 * records, np.int64),
        np.empty((5, workers), np.int64),
    )
    for number in range(5):
        base[number] = number * records + np.cumsum(job.loads) - job.loads
    tally[REMAINING] = job.loads
    codes = WAKE * records + workers  # an event is time * codes + its number * records + record; of WAKE the worker
    events, agenda = np.empty(2 * records + 2 * workers + 1, np.int64), 0
    touched = np.empty(2 * records + 2 * workers + 1, np.int64)
    for here in range(workers):
        push(events, 0, agenda, job.wake[here // job.ranks] * codes + WAKE * records + here)
        agenda += 1
    for record in range(width):
        arrive(job, tally, queue, base, ACTIVATION, record, 0)
    count = 0
    while agenda:
        now, touches = events[0] // codes, 0
        while agenda and events[0] // codes == now:
            code = pop(events, 0, agenda) % codes
            agenda -= 1
            if code >= WAKE * records:
                touched[touches] = code - WAKE * records
                tally[IDLE, touched[touches]] = 1
                touches += 1
                continue
            event, record, at = code // records, code % records, now
            if event < ACTIVATION:
                touched[touches] = job.worker[record]
                touches += 1
                event, record, at = finished(job, tally, queue, base, event, record, now)
                if record < 0:
                    continue
            if at > now:
                push(events, 0, agenda, at * codes + event * records + record)
                agenda += 1
                continue
            arrive(job, tally, queue, base, event, record, now)
            touched[touches] = job.worker[record]
            touches += 1
        for touch in range(touches):
            here = touched[touch]
            kind = choose(job, tally, here) if tally[IDLE, here] else -1
            if (kind == F and rule[WAIT_F]) or (kind == W and rule[WAIT_W]):
                kind = -1 if patient(job, tally, queue, base, here, kind, now) else kind
            if kind < 0:
                continue
            record, end = begin(job, tally, queue, base, here, kind), now + job.spend[kind, here]
            if (kind == I or kind == B) and record >= width and (rule[WAIT_W] or rule[WAIT_F]):
                announce(job, tally, queue, base, record, end)
            order[count] = kind * records + record
            count += 1
            push(events, 0, agenda, end * codes + order[count - 1])
            agenda += 1
    return count
