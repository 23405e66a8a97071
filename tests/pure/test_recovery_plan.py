"""What is run again after a failure: all that is missing, and nothing that a live worker still has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import TRAVELS, Datum, consumes, provides, requires
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction, Op
from recycle_plugin.core.vocabulary.packed_data import PackedData, pack
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.recovery_plan import Torn, counted, unfinished
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.planner.machine_costs import by_name
from recycle_plugin.lab.simulator.simulated_job import SimulatedJob
from recycle_plugin.planner import lowered, plan, recover
from recycle_plugin.planner.closure import Rows
from recycle_plugin.planner.greedy import F, I
from recycle_plugin.planner.recovery_order import RestProblem, order_rest
from tests.support.planned import costs, jobs, policies, wide_jobs

SHAPE = Topology(3, 4, 6)
COSTS = CostModel.uniform(4)
STEP = 7

data = st.builds(
    Datum,
    st.sampled_from(["act", "grad", "stash", "inner", "wgrad"]),
    st.integers(0, 40),
    st.builds(MicroBatch, st.integers(0, 50), st.integers(0, 99)),
    st.integers(0, 10**6),
) | st.builds(
    Datum, st.sampled_from(["reduced", "tied", "params"]), st.integers(0, 40), st.none(), st.integers(0, 10**6)
)


@given(st.frozensets(data, max_size=30))
def test_what_a_worker_holds_travels_as_text(held) -> None:
    assert PackedData(pack(held)) == held


@pytest.mark.parametrize(
    ("stage", "ranges"), [(4, "0.0:0"), (-1, "0.0:0"), (0, "3.0:1"), (0, "0.6:6"), (0, "0.6:9 3.0:0 -1.9:9")]
)
def test_what_can_t_be_of_the_job_is_in_no_array(stage, ranges) -> None:
    """Of 3 replicas with 4 stages and 6 micro-batches each."""
    rows = Rows()
    rows.add(0, 1, stage, ranges)
    rows.add(1, 1, 3, f"2.3:5 0.1:1 {ranges}" if stage == 0 else "2.3:5 0.1:1")
    found = rows.arrays(np.array([(1, 2), (3, 1)]), SHAPE)
    assert [each.tolist() for each in found] == [[3] * 4, [1] * 4, [3] * 4, [15, 16, 17, 1]]


def test_what_workers_hold_alike_is_of_each_of_them() -> None:
    rows = Rows()
    rows.add(1, 2, 3, ".1:2 0.5:5")
    found = rows.arrays(np.array([(0, 0), (3, 1), (3, 2)]), SHAPE)
    assert [each.tolist() for each in found] == [[3] * 6, [1] * 3 + [2] * 3, [3] * 6, [7, 8, 5, 13, 14, 5]]


def test_an_operation_waits_for_the_last_of_its_inputs_to_arrive() -> None:
    """Two stages of a worker each: the gradient of micro-batch 0 is made before its activation, and travels for longer
    than a forward takes.
    """
    missing = np.full((4, 4), -1, np.int8)
    missing[I, 2] = missing[F, 0] = missing[F, 1] = 0
    missing[I, 0] = 2
    none, lag = np.zeros(4, bool), np.full(4, 100)
    rest = RestProblem(
        2, 1, np.array([0, 0, 1, 1]), missing, np.zeros((2, 4), np.int64), lag, lag, none, none, none,
        np.arange(2), np.full((4, 2), (10, 5)), np.full(2, 9), np.full(2, 2),
    )  # fmt: skip
    order = np.empty(4, np.int64)
    assert order_rest(rest, order) == 4
    assert [divmod(each, 4) for each in order.tolist() if each % 4 < 2] == [(F, 0), (F, 1), (I, 0)]


def start(planned) -> dict[Seat, set[Datum]]:
    return {seat: {Datum("params", seat.stage, None, STEP)} for seat in planned.programs}


@given(jobs())
@settings(max_examples=60)
def test_where_nothing_has_survived_the_whole_step_is_left(job) -> None:
    view, costs, policy = job
    planned = plan(view, costs, policy)
    assert unfinished(partial(recover, planned, costs), STEP - 1, start(planned)) == ()
    recovery = recover(planned, costs, STEP, start(planned))
    assert not recovery.undo and not recovery.holders
    split = (
        lambda one: {one}
        if one.op is not Op.B or not policy.split_backward
        else {Instruction(op, one.stage, one.micro_batch, STEP) for op in (Op.I, Op.W)}
    )
    for seat, program in planned.programs.items():
        expected = {part for one in program if one.op in COMPUTE for part in split(one.at(STEP))}
        assert set(recovery.computed(seat)) == expected and not recovery.boundary_only(seat)
        assert [one.op for one in recovery.closing[seat]] == [one.op for one in program if one.op not in COMPUTE]


def strange(shape: Topology) -> st.SearchStrategy[frozenset[Datum]]:
    """Data of this step that there can't be in the job, but for ints that a message may have, and some of the next."""
    beyond = st.integers(-3, -1) | st.integers(9, 40)
    within = st.integers(0, shape.micro_batches - 1)
    micro_batches = st.builds(MicroBatch, beyond, within) | st.builds(MicroBatch, st.just(0), beyond)
    kinds = st.sampled_from(["act", "grad", "stash", "inner", "wgrad"])
    wrong = st.builds(Datum, kinds, st.integers(0, shape.stages - 1), micro_batches, st.just(STEP))
    of_no_stage = st.builds(Datum, kinds, beyond, st.just(MicroBatch(0, 0)), st.just(STEP))
    later = st.builds(Datum, kinds, st.integers(0, shape.stages - 1), st.sampled_from(shape.batch), st.just(STEP + 1))
    return st.frozensets(wrong | of_no_stage | later, max_size=3)


@st.composite
def wide_full_jobs(draw: st.DrawFn):
    """Nobody is lost yet, and losses change who is dealt what."""
    shape = Topology(draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    return shape.full(), draw(costs(shape.stages)), draw(policies(shape.stages))


@given(jobs() | wide_jobs() | wide_full_jobs(), st.data())
@settings(max_examples=200)
def test_what_is_left_is_all_that_is_missing_and_nothing_else(job, drawn) -> None:
    """All workers stop at any instruction, and some are lost, several times, each while what is left of the step runs;
    some keep nothing that they have sent.  In any order that the waits allow, that ends with every gradient once, those
    of a block added on one worker and in order (``_perform`` looks).
    """
    view, model, policy = job
    shape, blocks = view.topology, policy.blocks(view.topology)
    planned = plan(view, model, policy)
    held, programs = start(planned), {seat: list(lowered(planned, seat, STEP)) for seat in planned.programs}
    for _ in range(drawn.draw(st.integers(1, 4))):
        most = drawn.draw(st.sampled_from((4, max(map(len, programs.values())))))  # that they may have left
        alike = drawn.draw(st.booleans())  # those of a stage
        left = {at.stage if alike else at: drawn.draw(st.integers(0, most)) for at in programs}
        wanted = {at: max(0, len(one) - left[at.stage if alike else at]) for at, one in programs.items()}
        _run(programs, held, shape, wanted, defaultdict(int), blocks)
        for _ in range(drawn.draw(st.integers(0, 3))):
            able = sorted(seat for seat in view.live if len(view.live_replicas(seat.stage)) > 1)
            view = view.without(*drawn.draw(st.sampled_from([[one] for one in able] or [[]])))
        planned, held = plan(view, model, policy), {seat: held[seat] for seat in view.live}
        for seat in drawn.draw(st.sets(st.sampled_from(sorted(held)))):  # has no room for what it has sent
            held[seat] = {datum for datum in held[seat] if datum.kind not in TRAVELS or datum.stage != seat.stage}
        recovery = recover(planned, model, STEP, held)
        _check_least(recovery, held, view)
        confused = drawn.draw(st.sampled_from(sorted(held)))
        said = recover(planned, model, STEP, {**held, confused: held[confused] | drawn.draw(strange(shape))})
        programs = {seat: list(recovery.program(seat)) for seat in view.live}
        assert programs == {seat: list(said.program(seat)) for seat in view.live}
        for seat in recovery.undo:
            held[seat] ^= {Datum("params", seat.stage, None, step) for step in (STEP, STEP + 1)}
    counted = defaultdict(
        int, {(datum.stage, datum.micro_batch): 1 for have in held.values() for datum in have if datum.kind == "wgrad"}
    )
    whole = {seat.stage for seat, have in held.items() if Datum("reduced", seat.stage, None, STEP) in have}
    _run(programs, held, shape, None, counted, blocks)
    assert all(Datum("params", seat.stage, None, STEP + 1) in have for seat, have in held.items())
    assert all(
        counted[stage, micro_batch] == 1 for stage in set(range(shape.stages)) - whole for micro_batch in shape.batch
    )


def _check_least(recovery, held, view) -> None:
    """Each instruction makes something that what is left uses and nobody has who could give it, or a weight gradient
    that is in no sum; who has to step back has stepped, and is asked for what needs the parameters before that.
    """
    stages, ops = view.topology.stages, recovery.plan.policy.closing(tied=True)
    work = [(seat, one) for seat in view.live for one in recovery.computed(seat)]
    used = {seat: {datum for at, one in work if at == seat for datum in requires(one, stages)} for seat in view.live}
    lacking = {datum for seat, data in used.items() for datum in data - held[seat]}
    given = {datum for seat, have in held.items() for datum in have if datum.stage == seat.stage}
    boundary_only = frozenset().union(*map(recovery.boundary_only, view.live))
    for seat, one in work:
        made = [datum for datum in provides(one) if datum.kind in TRAVELS and datum in lacking - given]
        of_weights = [datum for datum in provides(one) if datum.kind not in TRAVELS]
        kept = of_weights[0] in (used[seat] if one.op is Op.F else lacking) or of_weights[0].kind == "wgrad"
        assert made or (kept and of_weights[0] not in held[seat]), f"nobody needs {one} of {seat}"
        assert (one in boundary_only) == (not kept), one
        assert of_weights[0].kind != "wgrad" or of_weights[0] not in given, f"{one} is counted twice"
    for stage in range(stages):
        runs = {one.micro_batch: seat for seat, one in work if one.op is Op.F and one.stage == stage}
        assert recovery.forwards(stage) == runs
        counts = counted([have for seat, have in held.items() if seat.stage == stage], STEP, stage)
        anew = {one for one in runs if Instruction(Op.F, stage, one, STEP) not in boundary_only}
        lost = set() if counts is None else set(view.topology.batch) - counts
        assert lost <= anew, "a loss that is dropped is found again"
    lacks = {
        kind: {seat for seat, have in held.items() if Datum(kind, seat.stage, None, step) not in have}
        for kind, step in (("reduced", STEP), ("tied", STEP), ("params", STEP + 1))
    }
    assert recovery.undo == {seat for seat, one in work if one.op is not Op.W} - lacks["params"]
    stages_lacking = {seat.stage for seat in lacks["reduced"]}
    having = sorted(held.keys() - lacks["reduced"], reverse=True)
    assert recovery.holders == {seat.stage: seat for seat in having if seat.stage in stages_lacking}
    behind = lacks["params"] | recovery.undo
    untied = {stage for seat in lacks["tied"] for stage in view.topology.tie(seat.stage)}
    for seat in held:
        runs = {
            Op.REDUCE: seat.stage in stages_lacking,
            Op.TIE: seat.stage in untied,
            Op.VALIDATE: bool(behind),
            Op.STEP: seat in behind,
        }
        assert [one.op for one in recovery.closing[seat]] == [op for op in ops if runs[op]]


UNEQUAL = CostModel((2, 1, 3), (1, 2, 1), (3, 1, 1), 1, communication_across=9)
SLOW = {"slowness": ((Seat(0, 1), 200),)}
# costs, techniques, where each worker has got to, of so many instructions, and whether replica 1 has kept what it sent
ORDERS = {
    "free": (UNEQUAL, Policy(), lambda seat, count: count * (seat.replica + 1) // 4, False),
    "past_the_cap": (UNEQUAL, Policy(activation_cap=1), lambda seat, count: count * 2 // 3 - seat.replica, False),
    "blocks": (
        UNEQUAL,
        Policy(activation_cap=2, block=2),
        lambda seat, count: (5 * seat.replica + 7 * seat.stage + 6) % count,
        True,
    ),
    "fused": (
        replace(UNEQUAL, **SLOW),
        Policy(split_backward=False, activation_cap=2),
        lambda seat, count: count * (seat.replica + 1) // 4,
        True,
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_order_of_what_is_left(name, golden) -> None:
    """Where 1.1 of 3 x 3 is lost: within the memory cap, but where nobody could go on, input gradients come before
    forwards, and these before weight gradients.
    """
    costs, policy, reached, kept = ORDERS[name]
    view = Topology(3, 3, 4).full()
    planned = plan(view, costs, policy)
    held, programs = start(planned), {seat: list(lowered(planned, seat, STEP)) for seat in planned.programs}
    wanted = {seat: reached(seat, len(program)) for seat, program in programs.items()}
    _run(programs, held, view.topology, wanted, defaultdict(int), policy.blocks(view.topology))
    view = view.without(Seat(1, 1))
    held = {
        seat: {datum for datum in held[seat] if kept or seat.replica != 1 or datum.kind not in TRAVELS}
        for seat in view.live
    }
    recovery = recover(plan(view, costs, policy), costs, STEP, held)
    lines = (f"{seat}: {' '.join(map(str, recovery.program(seat)))}" for seat in sorted(view.live))
    golden(f"rest_{name}.txt", "\n".join(lines).replace(f"@{STEP}", ""))


def test_a_weight_gradient_that_is_ready_waits_for_those_before_it_in_its_block() -> None:
    """Also for one whose input gradient was overtaken, and beyond ten, which text sorts before two."""
    planned = plan(Topology(2, 2, 12).full(), CostModel.uniform(2), Policy(block=None))
    held, home = start(planned), Seat(0, 1)
    held[home] |= {Datum("stash", 1, MicroBatch(0, 0), STEP)} | {
        Datum(kind, 1, MicroBatch(0, index), STEP) for index in range(1, 12) for kind in ("inner", "grad")
    }
    program = recover(planned, CostModel.uniform(2), STEP, held).program(home)
    assert [one.micro_batch for one in program if one.op is Op.W] == [MicroBatch(0, index) for index in range(12)]


@pytest.mark.parametrize("wrong", (((0, 0, 1), (1, 0, 2)), ((0, 0, 2),)), ids=("on two workers", "out of order"))
def test_a_block_that_is_not_added_in_order_by_one_worker_is_refused(wrong) -> None:
    planned = plan(SHAPE.full(), COSTS, Policy(block=None))
    held = start(planned)
    for replica, home, index in wrong:
        held[Seat(replica, 2)].add(Datum("wgrad", 2, MicroBatch(home, index), STEP))
    held[Seat(0, 2)].add(Datum("wgrad", 2, MicroBatch(0, 0), STEP))
    with pytest.raises(
        Torn,
        match=r"micro-batch 0\.2 on stage 2, step 7, is in the sum of seat [01]\.2, but the micro-batches before it "
        r"in its block are not",
    ):
        recover(planned, COSTS, STEP, held)


def _run(programs, held, shape, wanted, counted, blocks):
    """Let workers run until nobody can, each at most ``wanted`` instructions; REDUCE waits for its stage, TIE for those
    of its tie.
    """
    done = dict.fromkeys(programs, 0)
    moved = True
    while moved:
        moved = False
        for seat, program in programs.items():
            while (
                done[seat] < len(program)
                and (wanted is None or done[seat] < wanted[seat])
                and _able(seat, program[done[seat]], programs, done, held, shape)
            ):
                _perform(seat, program[done[seat]], programs, held, shape.stages, counted, blocks)
                done[seat] += 1
                moved = True
    if wanted is None:
        assert all(done[seat] == len(program) for seat, program in programs.items()), "somebody waits for ever"
    return counted


def _able(seat, one, programs, done, held, shape) -> bool:
    if one.op in (Op.REDUCE, Op.TIE):
        group = (seat.stage,) if one.op is Op.REDUCE else shape.tie(seat.stage)
        return all(
            replace(one, stage=peer.stage) in programs[peer][: done[peer] + 1]
            for peer in programs
            if peer.stage in group
        )
    return one.op is Op.VALIDATE or all(
        datum in held[seat] for datum in requires(one, shape.stages, (), bool(shape.tie(seat.stage)))
    )


def _perform(seat, one, programs, held, stages, counted, blocks) -> None:
    if one.op in (Op.SEND_ACT, Op.SEND_GRAD):
        sent = set(requires(one, stages))
        assert not sent & held[one.peer], f"{one.peer} has what {one} sends"
        held[one.peer] |= sent
        return
    own = tuple(datum.micro_batch for datum in held[seat] if datum.kind == "wgrad")
    held[seat] -= set(consumes(one, stages, own))
    held[seat] |= set(provides(one))
    if one.op in (Op.W, Op.B):
        counted[one.stage, one.micro_batch] += 1
        members = blocks.members()[blocks.of(one.micro_batch)]
        for before in members[: members.index(one.micro_batch)][-1:]:
            assert Datum("wgrad", one.stage, before, one.step) in held[seat], f"{one} is not in its block's turn"
    if one.op is Op.STEP:
        held[seat].discard(Datum("params", seat.stage, None, STEP))


def test_the_same_gradient_in_two_sums_is_refused() -> None:
    planned = plan(SHAPE.full(), COSTS, Policy())
    held = start(planned)
    for seat in (Seat(0, 2), Seat(1, 2)):
        held[seat].add(Datum("wgrad", 2, MicroBatch(0, 3), STEP))
    with pytest.raises(Torn, match=r"micro-batch 0\.3 on stage 2, step 7, is in the sums of seats 0\.2, 1\.2"):
        recover(planned, COSTS, STEP, held)


@pytest.mark.parametrize("block", (1, 2))
@pytest.mark.parametrize("most, least", ((Seat(0, 2), Seat(1, 2)), (Seat(1, 2), Seat(0, 2))))
def test_who_has_most_of_a_block_goes_on_with_it(block, most, least) -> None:
    """Not who has kept the stash of what was run for its boundary tensor only."""
    planned, one = plan(SHAPE.full(), COSTS, Policy(block=block)), MicroBatch(0, 1)
    held = start(planned)
    held[least].add(Datum("stash", 2, one, STEP))
    held[most].add(Datum("inner", 2, one, STEP))
    if block == 2:
        held[most].add(Datum("wgrad", 2, MicroBatch(0, 0), STEP))
    recovery = recover(planned, COSTS, STEP, held)
    assert {
        seat: [str(work) for work in recovery.computed(seat) if work.micro_batch == one and work.op is Op.W]
        for seat in (most, least)
    } == {most: ["2W0.1@7"], least: []}
    assert not any(work.op is Op.I and work.micro_batch == one for work in recovery.computed(least))


def test_a_stage_rolls_forward_from_who_holds_its_sum() -> None:
    planned = plan(SHAPE.full().without(Seat(0, 1)), COSTS, Policy())
    held = {
        seat: {Datum("reduced", seat.stage, None, STEP), Datum("params", seat.stage, None, STEP + 1)}
        for seat in planned.programs
    }
    held[Seat(1, 1)] = {Datum("params", 1, None, STEP)}
    recovery = recover(planned, COSTS, STEP, held)
    assert recovery.holders == {1: Seat(2, 1)} and not recovery.undo
    assert not any(recovery.computed(seat) for seat in planned.programs)
    assert [one.op for one in recovery.closing[Seat(1, 1)]] == [
        Op.REDUCE,
        Op.STEP,
    ]
    assert [one.op for one in recovery.closing[Seat(2, 1)]] == [Op.REDUCE]


HASHED = """
from recycle_plugin.lab.simulator import campaign, seeded
spans = campaign.LOSS.run("kill 1.2 before 2I1.3@2").spans
print([(str(span.seat), str(span.instruction), span.start_us) for span in spans])
for seed in (14, 16):
    ran = campaign.run("x", seeded.scenario(seed))
    print(ran.story, [tuple(map(str, span)) for span in ran.spans], ran.exercised)
"""


def test_every_process_works_out_the_same_rest() -> None:
    """Workers don't compare their rests: text is hashed differently in each of them, and nothing may depend on that."""
    texts = [
        subprocess.run(
            [sys.executable, "-c", HASHED],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert len(set(texts)) == 1 and "2I1.3@2" in texts[0]


def test_what_the_lost_worker_had_done_is_run_again_and_nothing_else() -> None:
    """One loss at any instruction of a step: its peers repeat its finished work, from what its neighbours have kept."""
    job = SimulatedJob(
        SHAPE.full(), CostModel.uniform(4, 10, 10, 10, 2, 5, 5), Policy(activation_cap=8), by_name("free")
    )
    victim = Seat(1, 2)
    shares = []
    for one in lowered(plan(job.view, job.costs, job.policy), victim, 1)[::5]:
        ran = job.run(3, [Fault("kill", victim, "before", str(one))])
        runs: dict[Instruction, list[Seat]] = defaultdict(list)
        for span in ran.spans:
            if span.instruction.op in COMPUTE:
                runs[span.instruction].append(span.seat)
        again = {instruction: seats for instruction, seats in runs.items() if len(seats) > 1}
        assert all(seats[0] == victim and len(seats) == 2 for seats in again.values())
        shares.append(len(again) / (3 * len(SHAPE.batch) * SHAPE.stages))
    assert max(shares) <= 1 / len(SHAPE.seats) and sum(shares) / len(shares) < 0.06
