"""The verifier's compiled loops over packed programs. Each check returns the place of the first offence."""

from __future__ import annotations

import numpy as np

from recycle_plugin.core.vocabulary import program
from recycle_plugin.planner.compiled import compiled

OP, STAGE_AT, REPLICA_AT = program.OP_SHIFT, program.STAGE_SHIFT, program.REPLICA_SHIFT
STAGES, PLACES = program.STAGE_MASK, program.PLACE_MASK
FINE, TAIL, EARLY, STAGE, ROUTE, ORDER = range(6)


@compiled
def ending(codes, begins, ends, stages, compute, tails):
    """Check that a program ends with its stage's last ops, only computes before them, and stays in one stage. Return
    (rule, row, place).
    ``tails``: [stage, place] the ops that end a program of the stage, then -1.
    """
    for row in range(ends.size):
        tail = tails[stages[row]]
        final = ends[row] - (tail >= 0).sum()
        if final < begins[row]:
            return TAIL, row, np.int64(-1)
        for place in range(ends[row] - final):
            if codes[final + place] >> OP != tail[place]:
                return TAIL, row, ends[row] - 1 - begins[row]
        for at in range(begins[row], final):
            if not compute[codes[at] >> OP]:
                return EARLY, row, at - begins[row]
        for at in range(begins[row], ends[row]):
            if codes[at] >> STAGE_AT & STAGES != stages[row]:
                return STAGE, row, at - begins[row]
    return FINE, -1, np.int64(-1)


@compiled
def once(codes, begins, ends, replicas, stages, route, after, state):
    """Check each op's route and order; leave each micro-batch's progress in ``state``. Return (rule, row, place)."""
    for row in range(ends.size):
        for at in range(begins[row], ends[row]):
            replica, index, op = codes[at] >> REPLICA_AT & PLACES, codes[at] & PLACES, codes[at] >> OP
            if after[0, op] < 0 and not (after[:, op] >= 0).any():
                continue  # the step's end
            stage = stages[row]
            if replica >= route.shape[1] or index >= route.shape[2] or route[stage, replica, index] != replicas[row]:
                return ROUTE, row, at - begins[row]
            reached = after[state[stage, replica, index], op]
            if reached < 0:
                return ORDER, row, at - begins[row]
            state[stage, replica, index] = reached
    return FINE, -1, np.int64(-1)


@compiled
def in_turn(codes, begins, ends, stages, adds, size, latest):
    """Check that the ops in ``adds`` run in ascending order within blocks of ``size``. Return (row, place) of one that
    does not, row -1 if all do. ``latest``: [stage, replica, block] index of the last one, -1 at first.
    """
    for row in range(ends.size):
        for at in range(begins[row], ends[row]):
            if not adds[codes[at] >> OP]:
                continue
            stage, replica, index = stages[row], codes[at] >> REPLICA_AT & PLACES, codes[at] & PLACES
            if index < latest[stage, replica, index // size]:
                return row, at - begins[row]
            latest[stage, replica, index // size] = index
    return -1, np.int64(-1)


@compiled
def memory(codes, begins, ends, stages, change, cap):
    """Return (row, place, held) of the first prefix of a program that holds more than its stage's cap; row -1: none."""
    for row in range(ends.size):
        held = 0
        for at in range(begins[row], ends[row]):
            held += change[codes[at] >> OP]
            if held > cap[stages[row]]:
                return row, at - begins[row], held
    return -1, np.int64(-1), 0


@compiled
def number_of(kind_stage, wide, stages, width, micro_batch):
    """Return the index of a datum in [kind, stage, micro-batch]; data of a whole stage have micro-batch 0.
    ``kind_stage``: kind * stages + stage.
    """
    return kind_stage * width + (0 if wide[kind_stage // stages] else micro_batch)


@compiled
def progress(
    codes, place, ends, replicas, seat_stage, route, micro_batches, live, tie, needs, gives, wide, given, joint
):
    """Advance ``place`` of every row as far as data allow; a row that ends before ``ends`` waits for ever. ``live``:
    [stage] workers; ``tie``: [stage] the first of the stages that it shares weights with, or its own number.
    """
    stages, width = route.shape
    rows = ends.size
    made = np.zeros(wide.size * stages * width, np.bool_)
    for kind in range(wide.size):
        if given[kind]:
            made[kind * stages * width : (kind + 1) * stages * width] = True
    first_waiting, next_waiting = np.full(made.size, -1, np.int32), np.full(rows, -1, np.int32)
    awaited, together = live.copy(), np.zeros(stages, np.int64)  # workers not yet at their stage's REDUCE, or tie's TIE
    for stage in range(stages):
        together[tie[stage]] += live[stage]
    runnable, ready = np.empty(rows + 1, np.int64), rows
    for row in range(rows):
        runnable[row] = rows - 1 - row
    while ready:
        ready -= 1
        row = runnable[ready]
        stage = seat_stage[row]
        while place[row] < ends[row]:
            code = codes[place[row]]
            op = code >> OP
            micro_batch = (code >> REPLICA_AT & PLACES) * micro_batches + (code & PLACES)
            missing = -1
            for nth in range(needs.shape[2]):
                if needs[op, stage, nth] < 0:
                    break
                datum = number_of(needs[op, stage, nth], wide, stages, width, micro_batch)
                if not made[datum]:
                    missing = datum
                    break
            if op == joint[1] and missing < 0:
                for nth in range(2, joint.size):
                    for own in range(width):
                        datum = number_of(joint[nth] * stages + stage, wide, stages, width, own)
                        if route[stage, own] == replicas[row] and not made[datum]:
                            missing = datum
            if missing >= 0:
                next_waiting[row] = first_waiting[missing]
                first_waiting[missing] = row
                break
            place[row] += 1
            if op == joint[1]:
                awaited[stage] -= 1
                if awaited[stage]:
                    continue  # the stage's last REDUCE gives what its STEP waits for
            elif op == joint[0]:
                together[tie[stage]] -= 1
                if together[tie[stage]]:
                    continue
            for giver in range(stages):
                if giver != stage and (op != joint[0] or tie[giver] != tie[stage]):
                    continue  # a TIE gives to all stages of its tie
                for nth in range(gives.shape[2]):
                    if gives[op, giver, nth] < 0:
                        break
                    datum = number_of(gives[op, giver, nth], wide, stages, width, micro_batch)
                    made[datum] = True
                    waiting = first_waiting[datum]
                    first_waiting[datum] = -1
                    while waiting >= 0:
                        runnable[ready] = waiting
                        ready += 1
                        waiting = next_waiting[waiting]
