"""Local search on an order, compiled: move an operation of the critical path past its neighbours on its worker.

The classic neighbourhood of job shops (van Laarhoven, Aarts, Lenstra 1992; insertion moves after Dell'Amico
and Trubian 1993): only a change on a critical path can shorten a schedule.  Here the path is that of the
stage whose window is the widest.  Unlike the greedy rules it may leave a worker idle on purpose,
which pays where costs are unequal.  Changes that lengthen a little are accepted too, less and less
(threshold accepting), from a generator with a seed: the same arguments give the same order anywhere.
"""

from __future__ import annotations

import numpy as np
from numba import njit

FAR = 1 << 60


@njit(cache=True, nogil=True)
def draw(state, below):
    """A number from 0 to ``below`` - 1 (Knuth's MMIX generator)."""
    state[0] = state[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return np.int64(state[0] >> np.uint64(33)) % below


@njit(cache=True, nogil=True)
def measure(order, source, lag, slot, who, spend, change, cap, stage_of, release, closing, joint, least, starts, ends, before, firsts, lasts):
    """Times of all operations; (widest window, and by how much all workers together end later than ``least`` allows), FAR where memory is short.

    ``before``: per operation, the one before it on its worker, or -1.  ``joint``: windows begin with the step, not with the stage.
    """
    workers = stage_of.size
    free, held, previous = np.empty(workers, np.int64), np.zeros(workers, np.int64), np.full(workers, -1, np.int64)
    for here in range(workers):
        free[here] = release[stage_of[here]]
    firsts[:] = FAR
    lasts[:] = 0
    for place in range(order.size):
        operation = order[place]
        here = who[operation]
        held[here] += change[operation]
        if held[here] > cap[here]:
            return FAR, FAR
        start = free[here]
        if source[operation] >= 0:
            start = max(start, ends[source[operation]] + lag[operation])
        starts[operation] = start
        before[operation] = previous[here]
        previous[here] = operation
        free[here] = ends[slot[operation]] = start + spend[operation]
        stage = stage_of[here]
        firsts[stage] = min(firsts[stage], start)
        lasts[stage] = max(lasts[stage], free[here])
    if joint:
        firsts[:] = 0
    widest, excess = 0, 0
    for stage in range(release.size):
        widest = max(widest, lasts[stage] + closing[stage] - firsts[stage])
    for here in range(workers):
        stage = stage_of[here]
        excess += max(0, free[here] + closing[stage] - firsts[stage] - least)
    return widest, excess


@njit(cache=True, nogil=True)
def critical(order, source, lag, slot, who, stage_of, closing, starts, ends, before, firsts, lasts, state, path):
    """Pairs on the critical path of the widest stage: operations that start when their worker's previous one ends."""
    worst, ties = 0, 0
    for stage in range(closing.size):
        window, most = lasts[stage] + closing[stage] - firsts[stage], lasts[worst] + closing[worst] - firsts[worst]
        if window > most:
            worst, ties = stage, 1
        elif window == most:
            ties += 1
            if draw(state, ties) == 0:
                worst = stage
    operation, met = -1, 0
    for place in range(order.size):
        one = order[place]
        if stage_of[who[one]] == worst and ends[slot[one]] == lasts[worst]:
            met += 1
            if draw(state, met) == 0:
                operation = one
    count = 0
    while operation >= 0 and starts[operation] > firsts[worst]:
        previous, needed = before[operation], source[operation]
        by_worker = previous >= 0 and ends[slot[previous]] == starts[operation]
        by_data = needed >= 0 and ends[needed] + lag[operation] == starts[operation]
        if by_worker:
            path[count] = operation
            count += 1
        if by_worker and by_data:
            by_data = draw(state, 2) == 0
        operation = maker(needed, slot) if by_data else (previous if by_worker else -1)
    return count


@njit(cache=True, nogil=True)
def maker(needed, slot):
    """The operation that fills a slot: for a gradient, the I or the B that the order has (marked in ``slot``'s second half)."""
    return slot[slot.size // 2 + needed]


@njit(cache=True, nogil=True)
def shift(order, place, from_, to):
    """Take the entry at ``from_`` out and put it in at ``to``."""
    operation = order[from_]
    step = 1 if to > from_ else -1
    at = from_
    while at != to:
        order[at] = order[at + step]
        place[order[at]] = at
        at += step
    order[to] = operation
    place[operation] = to


@njit(cache=True, nogil=True)
def limit_later(operation, place, follows, size):
    """The last position at which ``operation`` still stands before all that need it."""
    last = size - 1
    for nth in range(2):
        if follows[nth, operation] >= 0:
            last = min(last, place[follows[nth, operation]] - 1)
    return last


@njit(cache=True, nogil=True)
def choose(order, place, source, slot, who, before, follows, path, count, state):
    """A random move (from, to) of a critical pair; to < 0 where it would break a dependency."""
    later = path[draw(state, count)]
    earlier = before[later]
    hops = 1 + (draw(state, 4) if draw(state, 3) == 0 else 0)
    if draw(state, 2) == 0:  # the later one further ahead
        target = earlier
        for _ in range(hops - 1):
            if before[target] >= 0:
                target = before[target]
        to = place[target]
        if source[later] >= 0 and place[maker(source[later], slot)] >= to:
            return place[later], -1
        return place[later], to
    to, most = place[later], limit_later(earlier, place, follows, order.size)
    at = to
    while hops > 1 and at + 1 < order.size and at + 1 <= most:
        at += 1
        if who[order[at]] == who[later]:
            to = at
            hops -= 1
    return place[earlier], to if to <= most else -1


@njit(cache=True, nogil=True)
def climb(order, source, lag, slot, who, spend, change, cap, stage_of, follows, release, closing, joint, least, rounds, heat, seed):
    """``rounds`` moves from ``order``; returns the best order's widest window and leaves it in ``order``.

    ``heat``: how much longer than the present one an order may be to be accepted at first, in microseconds.
    """
    operations, stages, workers = who.size, closing.size, stage_of.size
    starts, ends, before = np.zeros(operations, np.int64), np.zeros(operations, np.int64), np.full(operations, -1, np.int64)
    firsts, lasts = np.empty(stages, np.int64), np.empty(stages, np.int64)
    starts_, ends_, before_, firsts_, lasts_ = starts.copy(), ends.copy(), before.copy(), firsts.copy(), lasts.copy()
    path, place = np.empty(order.size, np.int64), np.empty(operations, np.int64)
    state, best_order = np.array([seed * 2 + 1], np.uint64), order.copy()
    for at in range(order.size):
        place[order[at]] = at
    widest, excess = measure(
        order, source, lag, slot, who, spend, change, cap, stage_of, release, closing, joint, least, starts, ends, before, firsts, lasts
    )
    best, best_excess, accepted, count = widest, excess, 0, -1
    for turn in range(rounds):
        if count < 0 or turn % 8 == 0:
            count = critical(order, source, lag, slot, who, stage_of, closing, starts, ends, before, firsts, lasts, state, path)
        if count == 0 or best <= least:
            break
        from_, to = choose(order, place, source, slot, who, before, follows, path, count, state)
        if to < 0:
            continue
        shift(order, place, from_, to)
        wide, over = measure(
            order, source, lag, slot, who, spend, change, cap, stage_of, release, closing, joint, least,
            starts_, ends_, before_, firsts_, lasts_,
        )  # fmt: skip
        allowed = draw(state, heat * (rounds - turn) // rounds + 1)
        if wide == FAR or (wide - widest) * workers + over - excess > allowed * workers:
            shift(order, place, to, from_)
            continue
        starts, ends, before, firsts, lasts, starts_, ends_, before_, firsts_, lasts_ = (
            starts_, ends_, before_, firsts_, lasts_, starts, ends, before, firsts, lasts
        )  # fmt: skip
        widest, excess, count = wide, over, -1
        accepted += 1
        if wide < best or (wide == best and over < best_excess):
            best, best_excess = wide, over
            best_order[:] = order
        if accepted % 64 == 0:
            order[:] = order[np.argsort(starts[order], kind="mergesort")]
            for at in range(order.size):
                place[order[at]] = at
    order[:] = best_order
    return best
