"""The verifier's rules once more, slow and without arrays: what the compiled one is compared with."""

from __future__ import annotations

from collections import defaultdict

from recycle_plugin.core.vocabulary.dataflow import Datum, provides, requires
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Op
from recycle_plugin.core.vocabulary.plan import Plan

ORDERS = ([Op.F, Op.I, Op.W], [Op.F, Op.B])


def acceptable(plan: Plan) -> bool:
    """Whether ``plan`` keeps every rule; memory in micro-batches."""
    return all(rule(plan) for rule in (_ends, _once, _blocks, _memory, _progress))


def _ends(plan: Plan) -> bool:
    for seat, program in plan.programs.items():
        tied, validated = (
            bool(plan.view.topology.tie(seat.stage)),
            plan.policy.validate or not plan.policy.stagger_optimizer,
        )
        tail = (Op.REDUCE, *[Op.TIE] * tied, *[Op.VALIDATE] * validated, Op.STEP)
        ops = tuple(one.op for one in program)
        if (
            ops[-len(tail) :] != tail
            or not set(ops[: -len(tail)]) <= COMPUTE
            or any(one.stage != seat.stage for one in program)
        ):
            return False
    return True


def _once(plan: Plan) -> bool:
    ran = defaultdict(list)
    for seat, program in plan.programs.items():
        for one in program:
            if one.op in COMPUTE:
                if plan.route.get((one.stage, one.micro_batch)) != seat:
                    return False
                ran[one.stage, one.micro_batch].append(one.op)
    return all(ran[stage, mb] in ORDERS for stage in range(plan.stages) for mb in plan.view.topology.batch)


def _blocks(plan: Plan) -> bool:
    workers, last, size = {}, {}, plan.policy.block or plan.view.topology.micro_batches
    for seat, program in plan.programs.items():
        for one in program:
            if one.op in COMPUTE:
                block = one.stage, one.micro_batch.replica, one.micro_batch.index // size
                if workers.setdefault(block, seat) != seat:
                    return False
                if one.op in (Op.W, Op.B) and last.setdefault(block, -1) > one.micro_batch.index:
                    return False
                last[block] = one.micro_batch.index if one.op in (Op.W, Op.B) else last.get(block, -1)
    return True


def _memory(plan: Plan) -> bool:
    for seat, program in plan.programs.items():
        held = 0
        for one in program:
            held += {Op.F: 1, Op.W: -1, Op.B: -1}.get(one.op, 0)
            if held > plan.policy.cap(seat.stage, plan.stages):
                return False
    return True


def _progress(plan: Plan) -> bool:
    """Try everybody's next instruction until nobody can go on."""
    made = {Datum("params", stage, None, 0) for stage in range(plan.stages)}
    made |= {Datum("data", stage, mb, 0) for stage in (0, plan.stages - 1) for mb in plan.view.topology.batch}
    place, arrived, moved = dict.fromkeys(plan.programs, 0), defaultdict(list), True
    while moved:
        moved = False
        for seat, program in plan.programs.items():
            if place[seat] == len(program):
                continue
            one = program[place[seat]]
            own = plan.own(seat) if one.op is Op.REDUCE else ()
            tie = plan.view.topology.tie(seat.stage)
            if all(datum in made for datum in requires(one, plan.stages, own, bool(tie))):
                place[seat] += 1
                moved = True
                arrived[one.op].append(seat)
                if one.op is Op.TIE:
                    if {other for other in plan.view.live if other.stage in tie} <= set(arrived[one.op]):
                        made.update(Datum("tied", stage, None, 0) for stage in tie)
                elif one.op is not Op.REDUCE or {other for other in plan.view.live if other.stage == seat.stage} <= set(
                    arrived[one.op]
                ):
                    made.update(provides(one))
    return all(place[seat] == len(program) for seat, program in plan.programs.items())
