"""Local search on an order, compiled: move an operation of the critical path past its neighbours on its worker.

The classic neighbourhood of job shops (van Laarhoven, Aarts, Lenstra 1992; insertion moves after Dell'Amico and Trubian
1993): only a change on a critical path can shorten a schedule. Here the path is that of the stage with the widest
window. Unlike the greedy rules it may leave a worker idle on purpose, which pays if costs are unequal. Changes that
lengthen a little are accepted too, less and less (threshold accepting), from a seeded generator: orders are
reproducible.
"""

from __future__ import annotations

import numpy as np

from recycle_plugin.planner.compiled import compiled, inner
from recycle_plugin.planner.moves import FAR, Scratch, move, opened, restore, unmove

TRACED_AFTER = 8  # moves, after which another critical path is drawn
SORTED_AFTER = 64  # accepted moves, after which the order is sorted by starts again, so that it forbids few moves


@inner
def draw(random, below):
    """Return a random number from 0 to ``below`` - 1 (Knuth's MMIX generator). ``random``: its state, one uint64."""
    random[0] = random[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return np.int64(random[0] >> np.uint64(33)) % below


@inner
def measure(net, state, least, firsts, lasts):
    """Return the widest window in microseconds, and by how much all workers together end later than ``least`` allows.
    Fill ``firsts`` and ``lasts`` with each stage's first start and last end.
    """
    firsts[:] = FAR
    lasts[:] = 0
    operations = state.place.size
    for here in range(net.stage_of.size):
        stage, first, last = net.stage_of[here], state.after[operations + here], state.before[operations + here]
        if first < operations:
            firsts[stage] = min(firsts[stage], state.starts[first])
            lasts[stage] = max(lasts[stage], state.starts[last] + net.spend[last])
    if net.joint:
        firsts[:] = 0
    widest, excess = 0, 0
    for stage in range(firsts.size):
        widest = max(widest, lasts[stage] + net.closing[stage] - firsts[stage])
    for here in range(net.stage_of.size):
        stage, last = net.stage_of[here], state.before[operations + here]
        if last < operations:
            excess += max(0, state.starts[last] + net.spend[last] + net.closing[stage] - firsts[stage] - least)
    return widest, excess


@inner
def critical(net, state, firsts, lasts, random, path):
    """Fill ``path`` with the widest stage's critical operations that start at another's end; return their number."""
    worst, ties, operations = 0, 0, state.place.size
    for stage in range(firsts.size):
        window, most = (
            lasts[stage] + net.closing[stage] - firsts[stage],
            lasts[worst] + net.closing[worst] - firsts[worst],
        )
        if window > most:
            worst, ties = stage, 1
        elif window == most:
            ties += 1
            if draw(random, ties) == 0:
                worst = stage
    operation, found = -1, 0
    for here in range(net.stage_of.size):
        last = state.before[operations + here]
        if net.stage_of[here] == worst and last < operations and state.starts[last] + net.spend[last] == lasts[worst]:
            found += 1
            if draw(random, found) == 0:
                operation = last
    count = 0
    while operation >= 0 and state.starts[operation] > firsts[worst]:
        previous, needed, start = state.before[operation], net.source[operation], state.starts[operation]
        by_worker = previous < operations and state.starts[previous] + net.spend[previous] == start
        by_data = needed >= 0 and state.starts[needed] + net.spend[needed] + net.lag[operation] == start
        if by_worker:
            path[count] = operation
            count += 1
        if by_worker and by_data:
            by_data = draw(random, 2) == 0
        operation = needed if by_data else (previous if by_worker else -1)
    return count


@inner
def limit_later(net, state, operation):
    """Return the last place at which ``operation`` stands before all that need it and what may not overtake it."""
    last = state.order.size - 1
    for nth in range(2):
        if net.follows[nth, operation] >= 0:
            last = min(last, state.place[net.follows[nth, operation]] - 1)
    if net.behind[operation] >= 0:
        last = min(last, state.place[net.behind[operation]] - 1)
    return last


@inner
def choose(net, state, path, count, random):
    """Return a random move of one of a critical pair: (operation, the one on its worker whose place it takes); the
    operation is -1 if the move breaks a dependency.
    """
    later, operations = path[draw(random, count)], state.place.size
    earlier = state.before[later]
    hops = draw(random, 4) if draw(random, 3) == 0 else 0
    if draw(random, 2) == 0:  # the later one further ahead
        target = earlier
        while hops and state.before[target] < operations:
            target = state.before[target]
            hops -= 1
        needed, ahead = net.source[later], net.ahead[later]
        free = (needed < 0 or state.place[needed] < state.place[target]) and (
            ahead < 0 or state.place[ahead] < state.place[target]
        )
        return later if free else -1, target
    target, most = later, limit_later(net, state, earlier)
    while hops and state.after[target] < operations and state.place[state.after[target]] <= most:
        target = state.after[target]
        hops -= 1
    return earlier if state.place[target] <= most else -1, target


@compiled
def tidy(state):
    """Sort the order by starts, so that it forbids few moves."""
    state.order[:] = state.order[np.argsort(state.starts[state.order], kind="mergesort")]
    for at in range(state.order.size):
        state.place[state.order[at]] = at


@compiled
def climb(net, order, who, least, rounds, heat, seed):
    """Make ``rounds`` moves from ``order``, run by the workers ``who``. Leave the best order in ``order`` and return
    what it measures. ``heat``: microseconds by which an accepted order may be longer at first.
    """
    workers, stages, size, random = net.stage_of.size, net.closing.size, order.size, np.array([seed * 2 + 1], np.uint64)
    state, path = opened(net, order.copy(), who), np.empty(size, np.int64)
    scratch = Scratch(
        np.empty(size, np.int64), np.zeros(who.size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    )
    firsts, lasts = np.empty(stages, np.int64), np.empty(stages, np.int64)
    firsts_then, lasts_then = firsts.copy(), lasts.copy()
    widest, excess = measure(net, state, least, firsts, lasts)
    best, best_excess, accepted, count = widest, excess, 0, -1
    for turn in range(rounds):
        if count < 0 or turn % TRACED_AFTER == 0:
            measure(net, state, least, firsts, lasts)
            count = critical(net, state, firsts, lasts, random, path)
        if count == 0 or best <= least:
            break
        one, other = choose(net, state, path, count, random)
        if one < 0:
            continue
        previous, place = state.before[one], state.place[one]
        most = (widest + draw(random, heat * (rounds - turn) // rounds + 1)) * workers + excess
        limit = (most + least) // (workers + 1)
        changes = move(net, state, scratch, one, other, firsts, limit)
        wide, over = measure(net, state, least, firsts_then, lasts_then) if changes >= 0 else (FAR, 0)
        if changes < 0 or wide * workers + over > most:
            restore(state, scratch, 0 if changes == -FAR else abs(changes))
            unmove(net, state, one, previous, place)
            continue
        widest, excess, count = wide, over, -1
        if wide < best or (wide == best and over < best_excess):
            best, best_excess = wide, over
            order[:] = state.order
        accepted += 1
        if accepted % SORTED_AFTER == 0:
            tidy(state)
    return best, best_excess
