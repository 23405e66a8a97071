"""Timing, compiled: when a global order runs, and the shortest period at which it can repeat.

With staggered stages a step is a *template*: its starts, shifted by the period T, have to satisfy every dependency of
the next step. Steps touch only at a stage's own reduce-and-step. So T is valid exactly if for each stage the last end
plus reduce and step, less the first start, is at most T; a stage that shares weights steps once the last of its tie has
reduced. The least T of an order is found by bisection: at a given T, a stage that is too wide has its first start moved
later, until nothing moves (T is valid) or it goes on for ever (T is too short).

If stages step together, all wait for each other once a step, when the last has its gradients, and each begins the next
step when it has stepped: T is the time from one such barrier to the next.
"""

from __future__ import annotations

import numpy as np

from recycle_plugin.planner.compiled import compiled

OPERATIONS_SETTLED = 4_000_000  # in one evaluation: bounds its time


@compiled
def run(order, stages, ranks, worker, spend, forward_lag, backward_lag, release, starts, ends):
    """Start every operation as soon as inputs, worker and its stage's ``release`` allow. Return the first start and the
    last end per stage. ``ends``: [F, gradient, W] x records, overwritten.
    """
    records = worker.size
    width = records // stages
    last = records - width
    free = np.empty(stages * ranks, np.int64)
    for here in range(stages * ranks):
        free[here] = release[here // ranks]
    firsts, lasts = np.full(stages, np.int64(1) << 60), np.zeros(stages, np.int64)
    for place in range(order.size):
        kind, record = order[place] // records, order[place] % records
        here, stage = worker[record], record // width
        start = free[here]
        if kind == 0:
            if record >= width:
                start = max(start, ends[0, record - width] + forward_lag[record])
        elif kind == 2:
            start = max(start, ends[1, record])
        elif record >= last:
            start = max(start, ends[0, record])
        else:
            start = max(start, ends[1, record + width] + backward_lag[record])
        end = start + spend[kind, here]
        starts[place] = start
        free[here] = end
        ends[1 if kind == 3 else kind, record] = end
        firsts[stage] = min(firsts[stage], start)
        lasts[stage] = max(lasts[stage], end)
    return firsts, lasts


@compiled
def settle(
    order,
    stages,
    ranks,
    worker,
    spend,
    forward_lag,
    backward_lag,
    reduce,
    tie,
    after,
    period,
    release,
    starts,
    ends,
    left,
):
    """Return the period of a template no longer than ``period``, with its ``starts``; -1 if there is none.

    ``reduce``, ``tie``, ``after``: planner.flat.Problem's. ``release``: lower bounds of the stages' first starts,
    raised to those starts. A path visits each stage's barrier once at most, so stages + 1 rounds settle it.
    ``left[0]``: rounds that may still be made; if they run out there is no template.
    """
    reduced = np.empty(stages, np.int64)
    for _ in range(stages + 2):
        if left[0] == 0:
            break
        left[0] -= 1
        firsts, lasts = run(order, stages, ranks, worker, spend, forward_lag, backward_lag, release, starts, ends)
        widest, moved = 0, False
        reduced[:] = 0
        for stage in range(stages):
            reduced[tie[stage]] = max(reduced[tie[stage]], lasts[stage] + reduce[stage])
        for stage in range(stages):
            through = reduced[tie[stage]] + after[stage]
            widest = max(widest, through - firsts[stage])
            if through - firsts[stage] > period:
                release[stage] = through - period
                moved = True
        if not moved:
            return widest
    return -1


@compiled
def flushed(lasts, reduce, tie, after, step):
    """Return the period of steps that begin once all stages have stepped; ``lasts``: when each has computed."""
    reduced, period = np.zeros(lasts.size, np.int64), 0
    for stage in range(lasts.size):
        reduced[tie[stage]] = max(reduced[tie[stage]], lasts[stage] + reduce[stage])
    for stage in range(lasts.size):
        period = max(period, reduced[tie[stage]] + after[stage] - step[stage])
    return period


@compiled
def evaluate(
    order,
    stages,
    ranks,
    synchronous,
    worker,
    spend,
    forward_lag,
    backward_lag,
    reduce,
    tie,
    after,
    step,
    least,
    below,
    starts,
):
    """Return the least period of an order (to half a per mille of ``least``), with its ``starts``; -1 if it isn't less
    than ``below``. ``synchronous``, ``step``: planner.flat.Problem's.
    """
    ends = np.empty((3, worker.size), np.int64)
    release = np.zeros(stages, np.int64)
    how = (order, stages, ranks, worker, spend, forward_lag, backward_lag)
    if synchronous:
        release[:] = step
        _, lasts = run(*how, release, starts, ends)
        period = flushed(lasts, reduce, tie, after, step)
        return period if period < below else -1
    left = np.array([max(8, OPERATIONS_SETTLED // max(1, order.size))])  # less than needed only for very large orders
    best = settle(*how, reduce, tie, after, below - 1, release, starts, ends, left)
    return best if best <= least else shortened(how, (reduce, tie, after), least, best, release, starts, ends, left)


@compiled
def shortened(how, barriers, least, best, release, starts, ends, left):
    """Return the least period of an order whose template of period ``best`` has these ``starts``, which are
    overwritten, and this ``release``. ``how``: the first arguments of :func:`run`; ``barriers``: ``reduce``, ``tie``
    and ``after`` of :func:`settle`.
    """
    trial = np.empty(starts.size, np.int64)
    low, probe = least - 1, least  # low: too short
    while best - low > 1 + (least >> 11) and left[0]:
        further = release.copy()
        found = settle(*how, *barriers, probe, further, trial, ends, left)
        if found < 0:
            low = probe
        else:
            best = found
            starts[:] = trial
            release = further
        probe = (low + best) // 2
        if probe <= low:
            break
    return best


@compiled
def extent(order, starts, stages, ranks, worker, spend):
    """Return the first start and the last end per stage."""
    records = worker.size
    width = records // stages
    firsts, lasts = np.full(stages, np.int64(1) << 60), np.zeros(stages, np.int64)
    for place in range(order.size):
        kind, record = order[place] // records, order[place] % records
        stage = record // width
        firsts[stage] = min(firsts[stage], starts[place])
        lasts[stage] = max(lasts[stage], starts[place] + spend[kind, worker[record]])
    return firsts, lasts


@compiled
def project(
    order, starts, stages, ranks, worker, row, ends, kinds, closing, closing_at, codes, times, names, micro_batches
):
    """Write each worker's program into its row of ``codes`` and planned starts into ``times``.

    ``row[worker]``: its row, -1 for none; rows end before ``ends``. ``kinds``: codes of F, I, W and B of stage 0 (the
    stage is added). ``closing``: [stage, place] codes of a program's last instructions, -1 for none, and ``closing_at``
    their starts. ``names[rank]``: replica number. ``codes`` as in ``core.vocabulary.program``.
    """
    records = worker.size
    width = records // stages
    place = np.zeros(row.size, np.int64)
    for here in range(row.size):
        if row[here] > 0:
            place[here] = ends[row[here] - 1]
    for at in range(order.size):
        kind, record = order[at] // records, order[at] % records
        here, stage = worker[record], record // width
        replica, index = names[record % width // micro_batches], record % micro_batches
        codes[place[here]] = kinds[kind] | stage << 40 | replica << 20 | index
        times[place[here]] = starts[at]
        place[here] += 1
    for here in range(row.size):
        if row[here] < 0:
            continue
        stage = here // ranks
        for nth in range(closing.shape[1]):
            if closing[stage, nth] >= 0:
                codes[place[here]] = closing[stage, nth]
                times[place[here]] = closing_at[stage, nth]
                place[here] += 1
