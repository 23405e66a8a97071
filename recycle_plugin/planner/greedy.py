"""Event-driven greedy list scheduling, compiled.  See ``planner.schedule`` for the rules that drive it.

Compiled by numba on the first call on a machine and cached on disk; ``planner.warm`` does it before a
failure can pay for it.  Everything is int64, so that there is one compiled version of each function.
"""

from __future__ import annotations

import numpy as np
from numba import njit

BURST, PAUSE, AHEAD, LEAD, EAGER, COUPLE, WAIT_W, WAIT_F = range(8)
"""Fields of a rule's array; ``schedule.Rule`` explains them."""


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def blocked(here, held, cap, need, rule, remaining, state):
    """Whether ``here`` waits for several free places before its next F (``need``: what one F takes).

    ``state``: 0 open, 1 its last burst has begun, 2 waiting for free places.
    """
    burst, pause = rule[BURST], rule[PAUSE]
    if burst and state[here] != 1 and remaining[here] <= burst:
        if held + min(remaining[here] * need, cap) > cap:
            return True
        state[here] = 1
    if pause and state[here] != 1:
        if held + need > cap:
            state[here] = 2
        if state[here] == 2:
            if held > cap - min(min(pause, remaining[here]) * need, cap):
                return True
            state[here] = 0
    return False


@njit(cache=True, nogil=True)
def greedy(stages, ranks, split, worker, spend, forward_lag, backward_lag, loads, cap, activation, pending,
           forward_key, backward_key, wake, rule, order):  # fmt: skip
    """Write all operations into ``order`` by their starts; returns how many there are.

    ``cap``: what a worker may hold, ``activation`` and ``pending``: what an F takes and a pending W keeps, per stage.  Keys per record:
    least first, -1: in order of arrival.  ``wake``: when each stage's workers begin.
    """
    records, workers = worker.size, stages * ranks
    width = records // stages
    last = records - width
    base = np.zeros(workers + 1, np.int64)
    base[1:] = np.cumsum(loads)
    forward, backward, weight = np.empty(records + 1, np.int64), np.empty(records + 1, np.int64), np.empty(records + 1, np.int64)
    forwards, backwards = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    weight_in, weight_out = base[:-1].copy(), base[:-1].copy()
    coming, comings = np.empty(records + 1, np.int64), np.zeros(workers, np.int64)  # when known gradients will be there
    idle, held, ahead = np.zeros(workers, np.int64), np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    waits = rule[WAIT_W] or rule[WAIT_F]
    remaining, state = loads.copy(), np.zeros(workers, np.int64)
    size = 6 * records + workers  # event: time * size + code; codes: end of F, I, W, B; arrival of F, I's inputs; a worker wakes
    events, agenda = np.empty(2 * records + 2 * workers + 1, np.int64), 0
    touched = np.empty(2 * records + 2 * workers + 1, np.int64)
    for here in range(workers):
        push(events, 0, agenda, wake[here // ranks] * size + 6 * records + here)
        agenda += 1
    for record in range(width):
        here = worker[record]
        push(forward, base[here], forwards[here], max(0, forward_key[record]) * records + record)
        forwards[here] += 1
    count = 0
    while agenda:
        now = events[0] // size
        touches = 0
        while agenda and events[0] // size == now:
            code = pop(events, 0, agenda) % size
            agenda -= 1
            if code >= 6 * records:  # a worker wakes
                here = code - 6 * records
                idle[here] = 1
                touched[touches] = here
                touches += 1
                continue
            kind, record = code // records, code % records
            here = worker[record]
            if kind < 4:
                idle[here] = 1
                touched[touches] = here
                touches += 1
            stage = record // width
            arrives, gradient, at = -1, False, now
            if kind == 0:
                gradient = record >= last
                arrives = record if gradient else record + width
                at += 0 if gradient else forward_lag[arrives]
            elif kind == 1 or kind == 3:
                if kind == 1:
                    weight[weight_in[here]] = record
                    weight_in[here] += 1
                    held[here] += min(0, pending[stage] - activation[stage])
                else:
                    held[here] -= activation[stage]
                gradient = True
                if record >= width:
                    arrives = record - width
                    at += backward_lag[arrives]
            elif kind == 2:
                held[here] -= pending[stage]
            else:
                arrives, gradient = record, kind == 5
            if arrives < 0:
                continue
            if at > now:
                push(events, 0, agenda, at * size + (5 if gradient else 4) * records + arrives)
                agenda += 1
                continue
            here = worker[arrives]
            touched[touches] = here
            touches += 1
            if gradient:
                key = now if backward_key[arrives] < 0 else backward_key[arrives]
                push(backward, base[here], backwards[here], key * records + arrives)
                backwards[here] += 1
            else:
                key = now if forward_key[arrives] < 0 else forward_key[arrives]
                push(forward, base[here], forwards[here], key * records + arrives)
                forwards[here] += 1
        for touch in range(touches):
            here = touched[touch]
            if not idle[here]:
                continue
            stage = here // ranks
            waiting = weight_in[here] - weight_out[here]
            depth = stages - stage
            kind = -1
            need, room = activation[stage], cap[stage] - held[here]
            grows = max(0, pending[stage] - activation[stage]) if split else 0
            may_forward = forwards[here] > 0 and need <= room
            may_split = split and grows <= room
            may_backward = backwards[here] > 0 and (may_split or not split or rule[COUPLE] > 0)
            if may_forward and grows > 0 and rule[COUPLE] == 0 and need + grows > room:
                may_forward = False  # keep room in which one I can end
            if may_forward and rule[AHEAD] and ahead[here] >= depth + rule[AHEAD] - 1:
                may_forward = False
            if may_forward and rule[EAGER] and waiting >= rule[EAGER]:
                may_forward = False
            leads = rule[LEAD] and ahead[here] < depth + rule[LEAD] - 1
            if forwards[here] > 0 and (backwards[here] == 0 or leads):
                busy = may_backward or waiting > 0
                holds = blocked(here, held[here], cap[stage], need, rule, remaining, state)
                if may_forward and not (holds and busy):
                    kind = 0
            if kind < 0 and may_backward:
                kind = 1 if may_split else 3
                if not split or (rule[COUPLE] > 1 and stage < rule[COUPLE] - 1):
                    kind = 3
                elif kind == 3 and waiting and rule[COUPLE] == 1:
                    kind = 2
            if kind < 0 and waiting:
                kind = 2
            if (kind == 0 and rule[WAIT_F]) or (kind == 2 and rule[WAIT_W]):
                while comings[here] and coming[base[here]] <= now:
                    pop(coming, base[here], comings[here])
                    comings[here] -= 1
                patience = spend[kind, here] * rule[WAIT_F if kind == 0 else WAIT_W] // 100
                if comings[here] and coming[base[here]] < now + patience:
                    kind = -1
            if kind < 0:
                continue
            if kind == 0:
                record = pop(forward, base[here], forwards[here]) % records
                forwards[here] -= 1
                remaining[here] -= 1
                held[here] += need
                ahead[here] += 1
            elif kind == 2:
                record = weight[weight_out[here]]
                weight_out[here] += 1
            else:
                record = pop(backward, base[here], backwards[here]) % records
                backwards[here] -= 1
                ahead[here] -= 1
                if kind == 1:
                    held[here] += grows
            if (kind == 1 or kind == 3) and stage > 0 and waits:
                above = worker[record - width]
                push(coming, base[above], comings[above], now + spend[kind, here] + backward_lag[record - width])
                comings[above] += 1
            idle[here] = 0
            order[count] = kind * records + record
            count += 1
            push(events, 0, agenda, (now + spend[kind, here]) * size + kind * records + record)
            agenda += 1
    return count
