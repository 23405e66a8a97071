"""The order in which what is left of a step runs (planner/closure.py): event-driven list scheduling, compiled.

As for a whole step there is one global order, projected on the workers, so that it can't deadlock. It is made once per
failure for a part of one step, so it takes the plain rule: I before F if memory allows, before W; micro-batches by
index. Every worker finds the same order from the same inventories. Weight gradients of a block
(core/vocabulary/blocks.py) wait for each other.

It keeps to the memory cap, which the plan's own order would not: what survivors hold comes on top of what starts anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.planner.compiled import compiled, inner
from recycle_plugin.planner.greedy import B, F, I, W, pop, push

Array = NDArray[np.int64]

INPUT_THERE = 4  # an event: all that operation ``kind`` of a record needs is there; below it are the operations' ends
FORWARDS, BACKWARDS, WEIGHTS, WEIGHTS_DONE, BUSY = range(5)
"""Rows of ``tally``, per worker: sizes of its queues (of W: all ever queued, and taken), and whether it is busy."""


class RestProblem(NamedTuple):
    """What is left of a step; arrays are int64, times in microseconds. A record is a stage and a column, a worker a
    stage and a replica; kinds of operation as in ``planner.greedy``.
    """

    width: int  # records per stage
    replicas: int  # workers per stage
    worker: Array  # [record]
    missing: Array  # [kind, record] how many of its inputs are still to be made; -1: it does not run
    since: Array  # [kind, record] when an input arrives that travels at the beginning
    forward_lag: Array  # [record] between the end of F one stage up and the earliest start here
    backward_lag: Array  # [record] between the end of I or B one stage down and the earliest start here
    in_turn: Array  # [record] 1: the weight gradient of the next record is added behind this one's
    for_boundary: Array  # [kind, record] 1: it leaves nothing but its boundary tensor
    key: Array  # [record] which is taken first: the least
    spend: Array  # [kind, worker]
    room: Array  # [worker] micro-batches that it may hold beside those that it holds
    loads: Array  # [worker] records that it may work on


@inner
def less(rest, kind, record, now, events, agenda):
    """Record that ``kind`` of ``record`` lacks one input less, there at ``now``; return the number of events."""
    if rest.missing[kind, record] <= 0:
        return agenda
    rest.missing[kind, record] -= 1
    if rest.missing[kind, record]:
        return agenda
    at = max(now, rest.since[kind, record])
    push(events, 0, agenda, (at * 2 * INPUT_THERE + INPUT_THERE + kind) * rest.worker.size + record)
    return agenda + 1


@inner
def settle(rest, kind, record, now, events, agenda):
    """Give memory back at the end of an operation, and record what it has made; return the number of events."""
    if kind == W or kind == B or (kind == I and rest.for_boundary[I, record]):
        rest.room[rest.worker[record]] += 1
    if kind == F:
        agenda = less(rest, I, record, now, events, agenda)
        agenda = less(rest, B, record, now, events, agenda)
        if record + rest.width < rest.worker.size:
            below = record + rest.width
            agenda = less(rest, F, below, now + rest.forward_lag[below], events, agenda)
    if (kind == I or kind == B) and record >= rest.width:
        above = record - rest.width
        for each in (I, B):
            agenda = less(rest, each, above, now + rest.backward_lag[above], events, agenda)
    if kind == I:
        agenda = less(rest, W, record, now, events, agenda)
    if (kind == W or kind == B) and rest.in_turn[record]:
        for each in (W, B):
            agenda = less(rest, each, record + 1, now, events, agenda)
    return agenda


@inner
def choose(rest, tally, here):
    """Return the queue from which an idle worker takes what it begins next, or -1."""
    weights = tally[WEIGHTS, here] - tally[WEIGHTS_DONE, here]
    if tally[BACKWARDS, here] and (rest.room[here] >= 0 or not weights):
        return BACKWARDS
    if tally[FORWARDS, here] and rest.room[here] > 0:
        return FORWARDS
    return WEIGHTS if weights else -1


@inner
def begin(rest, tally, queue, base, here, waiting, now, events, agenda):
    records = rest.worker.size
    tally[BUSY, here] = 1
    if waiting == WEIGHTS:
        tally[WEIGHTS_DONE, here] += 1
        code = W * records + queue[base[WEIGHTS, here] + tally[WEIGHTS_DONE, here] - 1]
    else:
        code = pop(queue, base[waiting, here], tally[waiting, here]) % (INPUT_THERE * records)
        tally[waiting, here] -= 1
    kind, record = code // records, code % records
    if kind == F and not rest.for_boundary[F, record]:
        rest.room[here] -= 1
    push(events, 0, agenda, (now + rest.spend[kind, here]) * 2 * INPUT_THERE * records + code)
    return code


@inner
def force(rest, tally):
    """Return the worker that exceeds the memory cap, if old routes' data and new work don't fit within it."""
    for stage in range(rest.worker.size // rest.width - 1, -1, -1):
        for here in range(stage * rest.replicas, (stage + 1) * rest.replicas):
            if tally[FORWARDS, here]:
                return here
    return -1


@compiled
def order_rest(rest, order):
    """Fill ``order`` with all operations by their starts, each as kind * records + record; return their number. Changes
    ``rest.missing`` and ``rest.room``. Costs n log n for n operations.
    """
    records, workers = rest.worker.size, rest.loads.size
    codes = 2 * INPUT_THERE * records  # an event is time * codes + its number * records + record
    tally, queue, base = (
        np.zeros((5, workers), np.int64),
        np.empty(3 * records, np.int64),
        np.empty((3, workers), np.int64),
    )
    for number in range(3):
        base[number] = number * records + np.cumsum(rest.loads) - rest.loads
    events, agenda = np.empty(8 * records + 1, np.int64), 0
    touched = np.empty(8 * records + 1, np.int64)
    now, left, count = 0, 0, 0
    for kind in range(INPUT_THERE):
        for record in range(records):
            left += rest.missing[kind, record] >= 0
            if rest.missing[kind, record] == 0:
                code = (INPUT_THERE + kind) * records + record
                push(events, 0, agenda, rest.since[kind, record] * codes + code)
                agenda += 1
    while count < left:
        if not agenda:
            here = force(rest, tally)
            order[count] = begin(rest, tally, queue, base, here, FORWARDS, now, events, agenda)
            agenda, count = agenda + 1, count + 1
            continue
        now, touches = events[0] // codes, 0
        while agenda and events[0] // codes == now:
            code = pop(events, 0, agenda) % codes
            agenda -= 1
            kind, record = code // records, code % records
            here = rest.worker[record]
            if kind < INPUT_THERE:
                tally[BUSY, here] = 0
                agenda = settle(rest, kind, record, now, events, agenda)
            elif kind == INPUT_THERE + W:
                queue[base[WEIGHTS, here] + tally[WEIGHTS, here]] = record
                tally[WEIGHTS, here] += 1
            else:
                kind -= INPUT_THERE
                waiting = FORWARDS if kind == F else BACKWARDS
                key = rest.key[record] * INPUT_THERE * records + kind * records + record
                push(queue, base[waiting, here], tally[waiting, here], key)
                tally[waiting, here] += 1
            touched[touches] = here
            touches += 1
        for touch in range(touches):
            here = touched[touch]
            waiting = -1 if tally[BUSY, here] else choose(rest, tally, here)
            if waiting >= 0:
                order[count] = begin(rest, tally, queue, base, here, waiting, now, events, agenda)
                agenda, count = agenda + 1, count + 1
    return count
