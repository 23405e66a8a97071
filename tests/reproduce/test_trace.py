"""The real runs: kills made of a trace, gpt_tiny for real."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator.peers import published
from recycle_plugin.lab.simulator.peers.kills import kills
from recycle_plugin.lab.training.compose import compose
from recycle_plugin.runs import TrainingRun
from tests.support.jobs import apart

SMALL = [
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.sequence=16",
    "micro_batch_size=1",
    "data.limit_bytes=100000",
    "steps=12",
]


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 6), st.integers(2, 30), st.integers(0, 99))
def test_kills_leave_every_stage_a_worker(
    replicas: int, stages: int, micro_batches: int, steps: int, seed: int
) -> None:
    topology = Topology(replicas, stages, micro_batches)
    found = kills(published.TRACE, published.TRACE_ENDS_H, topology, steps, seed)
    view = topology.full().without(*(fault.seat for fault in found))
    assert not view.empty_stages() and len({fault.seat for fault in found}) == len(found)
    assert len(found) <= (9 * len(topology.seats) + 12) // 24
    at = [Instruction.parse(fault.where) for fault in found]
    assert all(2 <= one.step <= steps for one in at) and [one.step for one in at] == sorted(one.step for one in at)
    assert all(
        one.stage == fault.seat.stage and one.micro_batch.replica == fault.seat.replica for one, fault in zip(at, found)
    )


def test_the_papers_trace_on_the_papers_cluster_loses_nine() -> None:
    found = kills(published.TRACE, published.TRACE_ENDS_H, Topology(6, 4, 12), 632, 0)
    assert len(found) == 9
    assert [Instruction.parse(fault.where).step for fault in found][:2] == [13, 57]  # .12 h and .56 h of 6.32 h


@pytest.mark.parametrize("experiment", ("gpt3_medium", "gpt3_3_35b", "gpt3_6_7b"))
def test_the_papers_runs_lose_as_large_a_share(experiment: str) -> None:
    job = compose([f"experiment={experiment}", "faults=trace"])
    assert job.workers == 32 and len(job.recycle["faults"]) == 12


@pytest.mark.all_kills
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_gpt_tiny_under_the_trace_trains_what_it_trains_without(tmp_path) -> None:
    losses = {}
    for faults in ("none", "trace"):
        with TrainingRun(tmp_path / faults, 4, ["experiment=gpt_tiny", f"faults={faults}", *SMALL]) as run:
            outcome = run.finish(timeout_s=280)
        assert outcome.code == 0 and not outcome.restarted
        losses[faults] = outcome.losses
        assert len(outcome.of("lost")) == (2 if faults == "trace" else 0)
    assert max(apart(one, two) for one, two in zip(losses["none"], losses["trace"], strict=True)) <= 5e-6
