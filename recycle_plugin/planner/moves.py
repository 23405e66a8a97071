"""Moves of the local search, compiled: how each changes a state, and how it is undone. ``planner.climb`` chooses them.
A state is a sequence of all operations, each after those that it depends on, and the list of each worker's operations.
Only operations whose start a move changes are timed again, in the sequence's order, and only until the move surely
makes some window too wide.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.planner.compiled import compiled, inner
from recycle_plugin.planner.greedy import pop, push

Array = NDArray[np.int64]

FAR = 1 << 60


class Net(NamedTuple):
    """The part of a local search that stays as it is; arrays are int64, times in microseconds. After the operations
    stand the workers, each the beginning and the end of its own list.
    """

    source: Array  # [operation] whose result it needs, -1: none
    lag: Array  # [operation] from that result to its earliest start
    spend: Array  # [operation or worker]
    change: Array  # [operation] of the memory held
    follows: Array  # [2, operation] who needs its result, -1: nobody
    ahead: Array  # [operation] of its block on its worker, that it may not overtake, -1: none
    behind: Array  # [operation] likewise, that may not overtake it
    cap: Array  # [worker]
    stage_of: Array  # [worker]
    release: Array  # [stage] when its workers begin
    closing: Array  # [stage] from its last end to the end of its window
    joint: int  # 1: windows begin with the step, not with the stage


class SearchState(NamedTuple):
    """The part of a local search that moves change; int64, the last five per operation or worker."""

    order: Array  # all operations, each after what it needs
    place: Array  # [operation] in the order, -1: not in it
    who: Array  # [operation]
    starts: Array
    before: Array  # on the same worker
    after: Array
    held: Array  # memory, once it runs
    done: Array  # time spent in its worker's operations up to its end; of the worker: in all of them


class Scratch(NamedTuple):
    """The arrays of a move, int64. ``heap``: places to time; ``queued``; ``changed``, ``old``: starts to restore."""

    heap: Array
    queued: Array
    changed: Array
    old: Array


@compiled
def opened(net, order, who):
    """Return the search's state at ``order``, with its starts."""
    operations, workers = who.size, net.stage_of.size
    place, starts = np.full(operations, -1, np.int64), np.zeros(operations + workers, np.int64)
    before = np.arange(operations + workers)
    state = SearchState(
        order,
        place,
        who,
        starts,
        before,
        before.copy(),
        np.zeros(operations + workers, np.int64),
        np.zeros(operations + workers, np.int64),
    )
    for here in range(workers):
        starts[operations + here] = net.release[net.stage_of[here]]
    for at in range(order.size):
        operation = order[at]
        place[operation] = at
        enlist(state, operation, before[operations + who[operation]])
        previous, source = before[operation], net.source[operation]
        starts[operation] = starts[previous] + net.spend[previous]
        if source >= 0:
            starts[operation] = max(starts[operation], starts[source] + net.spend[source] + net.lag[operation])
    for here in range(workers):
        fits(net, state, state.after[operations + here], operations + here)
        last = state.before[operations + here]
        state.done[operations + here] = state.done[last] if last < operations else 0
    return state


@inner
def enlist(state, operation, previous):
    """Put ``operation`` behind ``previous`` into the list of its worker."""
    following = state.after[previous]
    state.before[operation], state.after[operation] = previous, following
    state.after[previous] = state.before[following] = operation


@inner
def delist(state, operation):
    """Take ``operation`` out of its worker's list; return the one that follows."""
    previous, following = state.before[operation], state.after[operation]
    state.after[previous], state.before[following] = following, previous
    return following


@inner
def fits(net, state, operation, stop):
    """Count memory and time on one worker from ``operation`` to before ``stop``; return whether memory is enough."""
    enough = True
    while operation != stop:
        previous = state.before[operation]
        state.held[operation] = state.held[previous] + net.change[operation]
        state.done[operation] = net.spend[operation] + (state.done[previous] if previous < state.place.size else 0)
        enough &= state.held[operation] <= net.cap[state.who[operation]]
        operation = state.after[operation]
    return enough


@inner
def enqueue(state, scratch, size, operation):
    """Have ``operation`` timed again; return how many are queued."""
    if operation < 0 or operation >= state.place.size or scratch.queued[operation]:
        return size
    scratch.queued[operation] = 1
    push(scratch.heap, 0, size, state.place[operation])
    return size + 1


@inner
def dismiss(state, scratch, size):
    """Empty the queue without timing anything."""
    for at in range(size):
        scratch.queued[state.order[scratch.heap[at]]] = 0


@inner
def settle(net, state, scratch, size, firsts, limit):
    """Start everything queued, and what that moves, as soon as possible. Return how many starts changed; negative if
    some window is surely wider than ``limit``, and then not all are timed.
    """
    changes, operations = 0, state.place.size
    while size:
        operation = state.order[pop(scratch.heap, 0, size)]
        size -= 1
        scratch.queued[operation] = 0
        previous, source = state.before[operation], net.source[operation]
        start = state.starts[previous] + net.spend[previous]
        if source >= 0:
            start = max(start, state.starts[source] + net.spend[source] + net.lag[operation])
        if start == state.starts[operation]:
            continue
        scratch.changed[changes], scratch.old[changes] = operation, state.starts[operation]
        changes += 1
        state.starts[operation] = start
        here, stage = state.who[operation], net.stage_of[state.who[operation]]
        if previous >= operations:
            limit = FAR  # the window may begin later
        left = state.done[operations + here] - state.done[operation] + net.spend[operation]
        if start + left + net.closing[stage] - firsts[stage] > limit:
            dismiss(state, scratch, size)
            return -changes
        size = enqueue(state, scratch, size, state.after[operation])
        size = enqueue(state, scratch, size, net.follows[0, operation])
        size = enqueue(state, scratch, size, net.follows[1, operation])
    return changes


@inner
def restore(state, scratch, changes):
    """Put back the starts that the last move changed."""
    for at in range(changes):
        state.starts[scratch.changed[at]] = scratch.old[at]


@inner
def shift(state, operation, to):
    order, place = state.order, state.place
    at = place[operation]
    step = 1 if to > at else -1
    while at != to:
        order[at] = order[at + step]
        place[order[at]] = at
        at += step
    order[to] = operation
    place[operation] = to


@inner
def move(net, state, scratch, operation, target, firsts, limit):
    """Move ``operation`` to the position of ``target``. Return the result of :func:`settle`, or -FAR if memory is
    short.
    """
    ahead = state.place[target] < state.place[operation]
    shift(state, operation, state.place[target])
    following = delist(state, operation)
    enlist(state, operation, state.before[target] if ahead else target)
    begin, stop = (operation, following) if ahead else (following, state.after[operation])
    if not fits(net, state, begin, stop):
        return -FAR
    size = enqueue(state, scratch, 0, operation)
    size = enqueue(state, scratch, size, following)
    return settle(net, state, scratch, enqueue(state, scratch, size, state.after[operation]), firsts, limit)


@inner
def unmove(net, state, operation, previous, place):
    """Move ``operation`` back behind ``previous``, where it stood at ``place`` of the order."""
    following = delist(state, operation)
    ahead = place < state.place[operation]
    shift(state, operation, place)
    enlist(state, operation, previous)
    fits(net, state, operation if ahead else following, following if ahead else state.after[operation])
