"""Checks a plan before anybody runs it.  Separate code: it reads programs and ``requires``/``provides``, nothing of the scheduler.

* every (micro-batch, stage) runs F < I < W, or F < B, exactly once, on the one live worker that the route names;
* activations and pending weight gradients stay under the cap at every prefix of a program;
* every program ends with REDUCE, VALIDATE where the policy asks for it, STEP;
* data edges and program order have no cycle, a REDUCE being one joint event of its stage's live workers.
  That covers the step boundary too: nothing of a step waits for a later one, so one step runs to its end,
  and with it every stage has the parameters that the next step requires.

The order of messages in a channel is not checked: our transport names each tensor.
"""

from __future__ import annotations

from collections import defaultdict

from recycle_plugin.core.dataflow import Datum, provides, requires
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.instruction import COMPUTE, Instruction, Op
from recycle_plugin.core.plan import Plan
from recycle_plugin.planner.errors import VerificationError

ORDERS = ([Op.F, Op.I, Op.W], [Op.F, Op.B])
HOLDS = {Op.F: 1, Op.I: 0, Op.W: -1, Op.B: -1}


def verify(plan: Plan) -> None:
    """Raises VerificationError at the first rule that ``plan`` breaks."""
    for seat, program in sorted(plan.programs.items()):
        _check_end(plan, seat, program)
    _check_once(plan)
    for seat, program in sorted(plan.programs.items()):
        _check_memory(plan, seat, program)
    _check_progress(plan)


def _check_end(plan: Plan, seat: Seat, program: tuple[Instruction, ...]) -> None:
    tail = (Op.REDUCE, Op.VALIDATE, Op.STEP) if plan.policy.validate else (Op.REDUCE, Op.STEP)
    if tuple(instruction.op for instruction in program[-len(tail) :]) != tail:
        names, last = ", ".join(op.name for op in tail), program[-1] if program else None
        raise VerificationError(f"the program does not end with {names}", plan, seat, last)
    for instruction in program[: -len(tail)]:
        if instruction.op not in COMPUTE:
            raise VerificationError(f"{instruction.op.name} before the end of the program", plan, seat, instruction)
    for instruction in program:
        if instruction.stage != seat.stage:
            raise VerificationError(f"an instruction of stage {instruction.stage}", plan, seat, instruction)


def _check_memory(plan: Plan, seat: Seat, program: tuple[Instruction, ...]) -> None:
    held, cap = 0, plan.policy.cap(seat.stage, plan.stages)
    for instruction in program:
        held += HOLDS.get(instruction.op, 0)
        if held > cap:
            raise VerificationError(f"{held} micro-batches held, the cap is {cap}", plan, seat, instruction)


def _check_once(plan: Plan) -> None:
    ran: defaultdict[tuple[int, MicroBatch], list[Op]] = defaultdict(list)
    for seat, program in sorted(plan.programs.items()):
        for instruction in program:
            if instruction.op not in COMPUTE:
                continue
            task = instruction.stage, instruction.micro_batch
            if plan.route.get(task) != seat:
                raise VerificationError(f"the route gives this to {plan.route.get(task)}", plan, seat, instruction)
            ran[task].append(instruction.op)
            if not any(order[: len(ran[task])] == ran[task] for order in ORDERS):
                raise VerificationError(f"runs after {' '.join(map(str, ran[task][:-1])) or 'nothing'}", plan, seat, instruction)
    topology = plan.view.topology
    for stage in range(topology.stages):
        for micro_batch in topology.batch:
            if ran[stage, micro_batch] not in ORDERS:
                done, seat = " ".join(map(str, ran[stage, micro_batch])) or "nothing", plan.route.get((stage, micro_batch))
                raise VerificationError(f"of micro-batch {micro_batch} stage {stage} runs {done}", plan, seat)


def _check_progress(plan: Plan) -> None:
    """Run the step without time: each seat goes on as far as its data allow."""
    made = {Datum("params", stage, None, 0) for stage in range(plan.stages)}
    made |= {Datum("data", stage, micro_batch, 0) for stage in (0, plan.stages - 1) for micro_batch in plan.view.topology.batch}
    place = dict.fromkeys(plan.programs, 0)
    waiting: defaultdict[Datum, list[Seat]] = defaultdict(list)
    arrived: defaultdict[int, list[Seat]] = defaultdict(list)  # at their stage's REDUCE
    runnable = sorted(plan.programs, reverse=True)
    while runnable:
        seat = runnable.pop()
        program = plan.programs[seat]
        while place[seat] < len(program):
            instruction = program[place[seat]]
            missing = next((datum for datum in requires(instruction, plan.stages) if datum not in made), None)
            if missing is not None:
                waiting[missing].append(seat)
                break
            place[seat] += 1
            if instruction.op is Op.REDUCE:
                arrived[seat.stage].append(seat)
                if len(arrived[seat.stage]) < len(plan.view.live_replicas(seat.stage)):
                    continue  # its STEP waits for `reduced`
            for datum in provides(instruction):
                made.add(datum)
                runnable += waiting.pop(datum, ())
    stuck = [seat for seat in sorted(plan.programs) if place[seat] < len(plan.programs[seat])]
    if stuck:
        waits = "; ".join(f"{seat} waits before {plan.programs[seat][place[seat]]}" for seat in stuck)
        raise VerificationError(f"the programs wait for each other: {waits}", plan, stuck[0], plan.programs[stuck[0]][place[stuck[0]]])
