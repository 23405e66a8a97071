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

INPUT_THERE = 4  # an event: the last that operation ``kind`` of a record needs arrives; below it are operations' ends
FORWARDS, BACKWARDS, WEIGHTS, WEIGHTS_DONE, BUSY = range(5)
"""Columns of ``tally``, per worker: sizes of its queues (of W: all ever queued, and taken), and whether it is busy."""


class RestProblem(NamedTuple):
    """What is left of a step; arrays are int64 if nothing else is said, times in microseconds. A record is a stage and
    a column, a worker a stage and a replica; kinds of operation as in ``planner.greedy``.
    """

    width: int  # records per stage
    replicas: int  # workers per stage
    worker: Array  # [record]
    missing: NDArray[np.int8]  # [kind, record] how many of its inputs are still to be made; -1: it does not run
    since: Array  # [0: activation, 1: gradient; record] when it arrives, at the beginning of those sent then
    forward_lag: Array  # [record] between the end of F one stage up and the earliest start here
    backward_lag: Array  # [record] between the end of I or B one stage down and the earliest start here
    in_turn: NDArray[np.bool_]  # [record] the weight gradient of the next record is added behind this one's
    forward_only: NDArray[np.bool_]  # [record] its F leaves nothing but its boundary tensor
    boundary: NDArray[np.bool_]  # [record] likewise its I
    key: Array  # [column] which is taken first: the least
    spend: Array  # [kind, worker]
    room: Array  # [worker] micro-batches that it may hold beside those that it holds
    loads: Array  # [worker] records that it may work on


@inner
def touch(touched, here):
    """Record that the worker ``here`` may begin something. ``touched``: how many may, then each of them."""
    touched[0] += 1
    touched[touched[0]] = here


@inner
def arrive(rest, tally, queue, base, touched, kind, record):
    """Put an operation that lacks nothing into its worker's queue."""
    here = rest.worker[record]
    touch(touched, here)
    if kind == W:
        queue[base[WEIGHTS, here] + tally[here, WEIGHTS]] = record
        tally[here, WEIGHTS] += 1
        return
    waiting = FORWARDS if kind == F else BACKWARDS
    key = (rest.key[record % rest.width] * INPUT_THERE + kind) * rest.worker.size + record
    push(queue, base[waiting, here], tally[here, waiting], key)
    tally[here, waiting] += 1


@inner
def less(rest, tally, queue, base, touched, kind, record, now, lag, events, agenda):
    """Record that ``kind`` of ``record`` lacks one input less, there ``lag`` after ``now``; return the number of
    events.
    """
    if rest.missing[kind, record] <= 0:
        return agenda
    at = now
    if kind != W:  # which needs nothing that travels
        row = 0 if kind == F else 1
        at = rest.since[row, record] = max(now + lag, rest.since[row, record])
    rest.missing[kind, record] -= 1
    if rest.missing[kind, record]:
        return agenda
    if at == now:
        arrive(rest, tally, queue, base, touched, kind, record)
        return agenda
    push(events, 0, agenda, (at * 2 * INPUT_THERE + INPUT_THERE + kind) * rest.worker.size + record)
    return agenda + 1


@inner
def settle(rest, tally, queue, base, touched, kind, record, now, events, agenda):
    """Free memory at the end of an operation, and record its results; return the number of events."""
    here = rest.worker[record]
    tally[here, BUSY] = 0
    touch(touched, here)
    if kind == W or kind == B or (kind == I and rest.boundary[record]):
        rest.room[here] += 1
    below, above = record + rest.width, record - rest.width
    if kind == F:
        for each in (I, B):
            agenda = less(rest, tally, queue, base, touched, each, record, now, 0, events, agenda)
        if below < rest.worker.size:
            agenda = less(rest, tally, queue, base, touched, F, below, now, rest.forward_lag[below], events, agenda)
    if (kind == I or kind == B) and above >= 0:
        for each in (I, B):
            agenda = less(rest, tally, queue, base, touched, each, above, now, rest.backward_lag[above], events, agenda)
    if kind == I:
        agenda = less(rest, tally, queue, base, touched, W, record, now, 0, events, agenda)
    if (kind == W or kind == B) and rest.in_turn[record]:
        for each in (W, B):
            agenda = less(rest, tally, queue, base, touched, each, record + 1, now, 0, events, agenda)
    return agenda


@inner
def choose(rest, tally, here):
    """Return the queue from which an idle worker takes its next operation, or -1."""
    weights = tally[here, WEIGHTS] - tally[here, WEIGHTS_DONE]
    if tally[here, BACKWARDS] and (rest.room[here] >= 0 or not weights):
        return BACKWARDS
    if tally[here, FORWARDS] and rest.room[here] > 0:
        return FORWARDS
    return WEIGHTS if weights else -1


@inner
def begin(rest, tally, queue, base, here, waiting, now, events, agenda):
    """Begin the next operation of a queue; return its code."""
    records = rest.worker.size
    tally[here, BUSY] = 1
    if waiting == WEIGHTS:
        tally[here, WEIGHTS_DONE] += 1
        code = W * records + queue[base[WEIGHTS, here] + tally[here, WEIGHTS_DONE] - 1]
    else:
        code = pop(queue, base[waiting, here], tally[here, waiting]) % (INPUT_THERE * records)
        tally[here, waiting] -= 1
    kind, record = code // records, code % records
    if kind == F and not rest.forward_only[record]:
        rest.room[here] -= 1
    push(events, 0, agenda, (now + rest.spend[kind, here]) * 2 * INPUT_THERE * records + code)
    return code


@inner
def force(rest, tally):
    """Return the worker that exceeds the memory cap, if old routes' data and new work don't fit within it."""
    for stage in range(rest.worker.size // rest.width - 1, -1, -1):
        for here in range(stage * rest.replicas, (stage + 1) * rest.replicas):
            if tally[here, FORWARDS]:
                return here
    return -1


@compiled
def order_rest(rest, order):
    """Fill ``order`` with all operations by their starts, each as kind * records + record; return their number. Changes
    ``rest.missing``, ``rest.since`` and ``rest.room``. Costs n log w for n operations of w workers.
    """
    records, workers = rest.worker.size, rest.loads.size
    codes = 2 * INPUT_THERE * records  # an event is time * codes + its number * records + record
    tally, queue, base = (
        np.zeros((workers, 5), np.int64),
        np.empty(3 * records, np.int64),
        np.empty((3, workers), np.int64),
    )
    for number in range(3):
        base[number] = number * records + np.cumsum(rest.loads) - rest.loads
    events, agenda = np.empty(8 * records + 1, np.int64), 0
    touched = np.zeros(8 * records + 1, np.int64)
    now, left, count = 0, 0, 0
    for kind in range(INPUT_THERE):
        for record in range(records):
            left += rest.missing[kind, record] >= 0
            if rest.missing[kind, record] == 0:
                rest.missing[kind, record] = 1
                agenda = less(rest, tally, queue, base, touched, kind, record, 0, 0, events, agenda)
    while count < left:
        for place in range(touched[0]):
            here = touched[place + 1]
            waiting = -1 if tally[here, BUSY] else choose(rest, tally, here)
            if waiting >= 0:
                order[count] = begin(rest, tally, queue, base, here, waiting, now, events, agenda)
                agenda, count = agenda + 1, count + 1
        touched[0] = 0
        if not agenda:
            if count < left:
                here = force(rest, tally)
                order[count] = begin(rest, tally, queue, base, here, FORWARDS, now, events, agenda)
                agenda, count = agenda + 1, count + 1
            continue
        now = events[0] // codes
        while agenda and events[0] // codes == now:
            code = pop(events, 0, agenda) % codes
            agenda -= 1
            kind, record = code // records, code % records
            if kind < INPUT_THERE:
                agenda = settle(rest, tally, queue, base, touched, kind, record, now, events, agenda)
            else:
                arrive(rest, tally, queue, base, touched, kind - INPUT_THERE, record)
    return count
