"""The verifier, which checks a plan before anybody runs it. It shares no code with the scheduler: it reads programs and
``requires``/``provides``.

* Every (micro-batch, stage) runs F < I < W, or F < B, exactly once, on the one live worker that the route names.
* Blocks of micro-batches that stay together have one worker on a stage, and their weight gradients run in order.
* Activations and pending weight gradients stay under the cap at every prefix of a program.
* Every program ends with REDUCE, TIE if its stage shares weights, VALIDATE if stages step together, STEP.
* Data edges and program order have no cycle, a REDUCE being one joint event of its stage's live workers, and a TIE one
  of its tie's. That covers the step boundary too: nothing of a step waits for a later one, so one step runs to its end,
  and with it every stage has the parameters that the next step requires.

The order of messages in a channel is not checked: our transport names each tensor. The loops are compiled
(``planner.verify_loops``); their tables of data are made from ``requires`` and ``provides`` for every op and stage.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.core.vocabulary.dataflow import Datum, provides, requires
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.instruction import COMPUTE, STAGE_WIDE, Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.program import OPS, decode
from recycle_plugin.planner import verify_loops as loops
from recycle_plugin.planner.plan_error import VerificationError

ORDERS = ([Op.F, Op.I, Op.W], [Op.F, Op.B])
INPUTS = ("data", "params")
"""What a step finds when it begins."""


class Rows(NamedTuple):
    """The programs of a plan as int64 arrays: codes, and each seat's row: its beginning, its end, and the seat."""

    codes: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    replicas: NDArray[np.int64]
    stages: NDArray[np.int64]


def verify(plan: Plan) -> None:
    """Raise VerificationError at the first rule that ``plan`` breaks."""
    rows = _rows(plan)
    _check_end(plan, rows)
    _check_once(plan, rows)
    _check_blocks(plan, rows)
    _check_memory(plan, rows)
    _check_progress(plan, rows)


def _rows(plan: Plan) -> Rows:
    ends = np.array(plan.programs.ends, np.int64)
    seats = np.array(plan.programs.seats, np.int64).reshape(-1, 2)
    return Rows(
        np.frombuffer(plan.programs.data, np.int64),
        ends - np.diff(ends, prepend=0),
        ends,
        *np.ascontiguousarray(seats.T),
    )


def _refuse(rule: str, plan: Plan, row: int, place: int) -> None:
    seat = plan.programs.seats[row]
    program = plan.programs[seat]
    raise VerificationError(rule, seat, program[place] if 0 <= place < len(program) else None)


def _check_end(plan: Plan, rows: Rows) -> None:
    # repeated here, so that the planner's own closing is checked
    validate = (Op.VALIDATE,) if plan.policy.together else ()
    tails = [
        (Op.REDUCE, *([Op.TIE] if plan.view.topology.tie(stage) else []), *validate, Op.STEP)
        for stage in range(plan.stages)
    ]
    compute, numbers = np.array([op in COMPUTE for op in OPS]), np.full((plan.stages, max(map(len, tails))), -1)
    for stage, tail in enumerate(tails):
        numbers[stage, : len(tail)] = [OPS.index(op) for op in tail]
    rule, row, place = loops.ending(rows.codes, rows.begins, rows.ends, rows.stages, compute, numbers)
    if rule == loops.TAIL:
        names = ", ".join(op.name for op in tails[rows.stages[row]])
        _refuse(f"the program does not end with {names}", plan, row, rows.ends[row] - rows.begins[row] - 1)
    if rule == loops.EARLY:
        _refuse(
            f"{plan.programs[plan.programs.seats[row]][place].op.name} before the end of the program", plan, row, place
        )
    if rule == loops.STAGE:
        _refuse(f"an instruction of stage {plan.programs[plan.programs.seats[row]][place].stage}", plan, row, place)


def _check_once(plan: Plan, rows: Rows) -> None:
    topology = plan.view.topology
    route = np.frombuffer(plan.route.data, np.int32).reshape(topology.stages, topology.replicas, topology.micro_batches)
    after, done = _progressions()
    state = np.zeros(route.shape, np.int64)
    rule, row, place = loops.once(rows.codes, rows.begins, rows.ends, rows.replicas, rows.stages, route, after, state)
    if rule:
        seat = plan.programs.seats[row]
        instruction = plan.programs[seat][place]
        if rule == loops.ROUTE:
            _refuse(
                f"the route gives this to {plan.route.get((seat.stage, instruction.micro_batch))}", plan, row, place
            )
        before = [one.op for one in plan.programs[seat][:place] if one.micro_batch == instruction.micro_batch]
        _refuse(f"runs after {' '.join(map(str, before)) or 'nothing'}", plan, row, place)
    unfinished = np.flatnonzero(~done[state.reshape(-1)])
    if len(unfinished):
        stage, replica, index = map(int, np.unravel_index(unfinished[0], route.shape))
        names = {number: " ".join(map(str, ran)) or "nothing" for ran, number in _states().items()}
        ran, micro_batch = names[int(state[stage, replica, index])], MicroBatch(replica, index)
        raise VerificationError(
            f"of micro-batch {micro_batch} stage {stage} runs {ran}", plan.route.get((stage, micro_batch))
        )


def _check_blocks(plan: Plan, rows: Rows) -> None:
    topology, size = plan.view.topology, plan.policy.blocks(plan.view.topology).size
    if size == 1:
        return
    route = np.frombuffer(plan.route.data, np.int32).reshape(topology.stages, topology.replicas, topology.micro_batches)
    apart = np.argwhere(route != route[:, :, np.arange(topology.micro_batches) // size * size])
    if len(apart):
        stage, replica, index = map(int, apart[0])
        micro_batch, first = MicroBatch(replica, index), MicroBatch(replica, index // size * size)
        raise VerificationError(
            f"micro-batches {first} and {micro_batch} of one block have different workers on stage {stage}",
            plan.route[stage, micro_batch],
        )
    adds = np.array([op in (Op.W, Op.B) for op in OPS])
    row, place = loops.in_turn(
        rows.codes,
        rows.begins,
        rows.ends,
        rows.stages,
        adds,
        size,
        np.full((*route.shape[:2], topology.micro_batches), -1),
    )
    if row >= 0:
        _refuse("runs after a later one of its block", plan, row, place)


def _check_memory(plan: Plan, rows: Rows) -> None:
    cap = np.array([plan.policy.cap(stage, plan.stages) for stage in range(plan.stages)], np.int64)
    change = np.array([{Op.F: 1, Op.W: -1, Op.B: -1}.get(op, 0) for op in OPS], np.int64)
    row, place, held = loops.memory(rows.codes, rows.begins, rows.ends, rows.stages, change, cap)
    if row >= 0:
        _refuse(f"{held} micro-batches held, the cap is {cap[rows.stages[row]]}", plan, row, place)


def _check_progress(plan: Plan, rows: Rows) -> None:
    """Run the step without time: each seat goes on until it lacks data."""
    topology = plan.view.topology
    tie = np.array([min(topology.tie(stage), default=stage) for stage in range(topology.stages)])
    tables = _tables(topology.stages, topology.ties)
    route = np.frombuffer(plan.route.data, np.int32).reshape(topology.stages, -1)
    place = rows.begins.copy()
    live = np.array([len(plan.view.live_replicas(stage)) for stage in range(topology.stages)])
    loops.progress(
        rows.codes, place, rows.ends, rows.replicas, rows.stages, route, topology.micro_batches, live, tie, *tables
    )
    stuck = np.flatnonzero(place < rows.ends)
    if len(stuck):
        waits = "; ".join(
            f"{plan.programs.seats[row]} waits before {decode(int(rows.codes[place[row]]))}" for row in stuck
        )
        _refuse(
            f"the programs wait for each other: {waits}", plan, stuck[0], int(place[stuck[0]] - rows.begins[stuck[0]])
        )


@lru_cache(maxsize=1)
def _states() -> dict[tuple[Op, ...], int]:
    """Return the beginnings of all allowed orders, numbered; 0 is nothing."""
    beginnings = {tuple(order[:length]) for order in ORDERS for length in range(len(order) + 1)}
    return {ran: number for number, ran in enumerate(sorted(beginnings, key=lambda ran: (len(ran), ran)))}


@lru_cache(maxsize=1)
def _progressions() -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return ``after[state, op]``, the state that running op leads to or -1; and which states are complete."""
    states = _states()
    after = np.array([[states.get((*ran, op), -1) for op in OPS] for ran in states])
    return after, np.array([list(ran) in ORDERS for ran in states])


@lru_cache(maxsize=8)
def _tables(stages: int, ties: tuple[tuple[int, ...], ...]) -> tuple[NDArray[np.int64], ...]:
    """Return the tables of what each op on each stage needs and gives, from ``requires`` and ``provides``.

    ``needs``, ``gives``: [op, stage, place] = kind * stages + stage of the datum, -1: no more. ``wide``: [kind] whether
    there is one for the whole stage; ``given``: [kind] whether it is there from the start. ``joint``: the numbers of
    TIE's op and of REDUCE's, and the kind of what REDUCE needs of each own micro-batch.
    """
    shared = {stage for tie in ties for stage in tie}
    kinds: dict[tuple[str, int], int] = {}
    wide: list[bool] = []

    def number(datum: Datum) -> int:
        kind = datum.kind, datum.step
        if kind not in kinds:
            kinds[kind] = len(kinds)
            wide.append(datum.micro_batch is None)
        return kinds[kind] * stages + datum.stage

    any_micro_batch = MicroBatch(0, 0)
    needs, gives = np.full((len(OPS), stages, 5), -1), np.full((len(OPS), stages, 3), -1)
    for op in COMPUTE | STAGE_WIDE:
        for stage in range(stages):
            one = Instruction(op, stage, None if op in STAGE_WIDE else any_micro_batch)
            for table, data in ((needs, requires(one, stages, tied=stage in shared)), (gives, provides(one))):
                table[OPS.index(op), stage, : len(data)] = list(map(number, data))
    reduce = requires(Instruction(Op.REDUCE, 0), stages, (any_micro_batch,))
    joint = np.array([OPS.index(Op.TIE), OPS.index(Op.REDUCE)] + [number(datum) // stages for datum in reduce])
    given = np.array([kind in INPUTS and step == 0 for kind, step in kinds])
    return needs, gives, np.array(wide), given, joint
