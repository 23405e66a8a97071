"""The jobs that the tests plan: the paper's running example, and random ones for Hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology, tied
from recycle_plugin.planner import plan

EXAMPLE = Topology(replicas=3, stages=4, micro_batches=6)
LOST = Seat(1, 2)
UNIT = CostModel.uniform(4)
STOCK = Policy(split_backward=False, stagger_optimizer=False, reroute=False)
REROUTE = Policy(split_backward=False, stagger_optimizer=False)
SPLIT = Policy(stagger_optimizer=False)
BLOCK = st.sampled_from([1, 1, 2, 3, None])  # micro-batches that stay together


@st.composite
def views(draw: st.DrawFn, replicas: int = 3, stages: int = 4, micro_batches: int = 5) -> ClusterView:
    """Any topology up to these sizes, stages that share weights included, with any losses that leave each stage a live
    worker.
    """
    topology = Topology(
        draw(st.integers(1, replicas)), draw(st.integers(1, stages)), draw(st.integers(1, micro_batches))
    )
    if topology.stages > 1:
        topology = replace(
            topology, ties=tied(draw(st.lists(st.sets(st.integers(0, topology.stages - 1), min_size=2), max_size=2)))
        )
    lost = []
    for stage in range(topology.stages):
        gone = draw(st.sets(st.integers(0, topology.replicas - 1), max_size=topology.replicas - 1))
        lost += [Seat(replica, stage) for replica in gone]
    return topology.full().without(*lost)


def crossed() -> Plan:
    """Stage 0 wants a gradient of micro-batch 1 before it forwards 0; stage 1 needs 0 before 1."""
    programs = (
        "0F0.1 0I0.1 0W0.1 0F0.0 0I0.0 0W0.0 0REDUCE 0STEP",
        "1F0.0 1I0.0 1W0.0 1F0.1 1I0.1 1W0.1 1REDUCE 1STEP",
    )
    good = plan(Topology(1, 2, 2).full(), CostModel.uniform(2), Policy())
    return replace(
        good,
        programs={Seat(0, stage): tuple(map(Instruction.parse, text.split())) for stage, text in enumerate(programs)},
    )


def costs(stages: int) -> st.SearchStrategy[CostModel]:
    """Unequal whole costs, some of them nothing."""

    def row(least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[st.integers(least, most)] * stages)

    return st.builds(
        CostModel,
        row(1, 5),
        row(0, 5),
        row(0, 5),
        st.integers(0, 4),
        row(0, 3),
        row(0, 3),
        st.integers(0, 1),
        tie=st.integers(0, 3),
    )


def policies(stages: int) -> st.SearchStrategy[Policy]:
    """Every mixture of techniques and caps; rerouting stays on."""
    cap = st.none() | st.integers(1, 2 * stages)
    return st.builds(Policy, st.booleans(), st.booleans(), st.just(True), cap, st.booleans(), block=BLOCK)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[ClusterView, CostModel, Policy]:
    view = draw(views())
    stages = view.topology.stages
    return view, draw(costs(stages)), draw(policies(stages))


@st.composite
def wide_jobs(draw: st.DrawFn) -> tuple[ClusterView, CostModel, Policy]:
    """Jobs with everything unequal: caps per stage, slow and fast workers, slower links between replicas."""
    view = draw(views())
    stages, seats = view.topology.stages, sorted(view.live)
    rows = st.tuples(*[st.integers(1, 6)] * stages)
    slow = draw(st.dictionaries(st.sampled_from(seats), st.integers(30, 300), max_size=3))
    model = replace(
        draw(costs(stages)),
        backward=draw(st.just(()) | rows),
        communication_across=draw(st.none() | st.integers(0, 6)),
        slowness=tuple(sorted(slow.items())),
    )
    cap = draw(st.none() | st.just("1f1b") | st.integers(1, 2 * stages) | st.tuples(*[st.integers(1, 6)] * stages))
    return (
        view,
        model,
        Policy(draw(st.booleans()), draw(st.booleans()), True, cap, draw(st.booleans()), draw(BLOCK)),
    )
