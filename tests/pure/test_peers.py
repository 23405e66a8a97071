"""Peers against figures that are published or recomputed, and rules that hold for every policy."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.planner.analytic import SHAPES, profile
from recycle_plugin.lab.simulator.peers import (
    Bamboo,
    CheckFreq,
    ElasticBatching,
    ElasticHorovod,
    FaultScaled,
    Oobleck,
    PeerJob,
    Recycle,
    RestartFromCheckpoint,
    WorkersChange,
    changes_of,
    label,
    published,
    regular_losses,
    replay,
)
from recycle_plugin.lab.simulator.peers.bamboo import Nodes, fits_memory
from recycle_plugin.lab.simulator.peers.oobleck import Template, distribute, multisets, template
from recycle_plugin.lab.simulator.peers.recycle import techniques

JOB = PeerJob("GPT-3 350M", Topology(6, 4, 6), profile(SHAPES["gpt3_medium"], micro_batch=4))
BIG = PeerJob("GPT-3 3.35B", Topology(6, 4, 6), profile(SHAPES["gpt3_3_35b"]))
TRACE = changes_of(published.TRACE, seed=1)
END_S = published.TRACE_ENDS_H * 3600
OOBLECK = json.loads((Path(__file__).parents[1] / "support" / "oobleck_figures.json").read_text())["models"]


@cache
def policies() -> list:
    return [
        FaultScaled(JOB.fault_free, 24),
        ElasticBatching(JOB),
        RestartFromCheckpoint(JOB),
        CheckFreq(JOB),
        ElasticHorovod(JOB),
        Oobleck.of_job(JOB, 3.0, 15),
        Bamboo.of_job(JOB),
        Recycle(JOB, techniques(JOB)),
    ]


@pytest.mark.parametrize("model", OOBLECK)
@pytest.mark.parametrize("every_s", (21600, 10800, 3600, 1800, 600), ids=["6h", "3h", "1h", "30min", "10min"])
def test_oobleck_reproduces_its_own_simulator_from_its_measured_tables(model: str, every_s: int) -> None:
    figures = OOBLECK[model]
    measured = {30 - place: speed for place, speed in enumerate(figures["measured"])}
    policy = Oobleck(measured, figures["batch"], figures["pause_s"], 30)
    run = replay(policy, regular_losses(every_s, 15), 30, 15 * every_s)
    assert run.average == pytest.approx(figures["averages"][str(every_s)], rel=0.02)


@pytest.mark.parametrize("model, pause_s, batch", [("350M", 29.0, 1.0), ("big", 83.0, 1.0)])
def test_oobleck_with_the_implied_pause_reproduces_the_published_average(
    model: str, pause_s: float, batch: float
) -> None:
    """Papers.md: 29 s and 83 s per change; fed with the published steady speeds, the trace's average comes out."""
    row, fault_free = published.FRACTIONS["Oobleck", model], published.FAULT_FREE[model]
    speeds = {gpus: fault_free * part for gpus, part in zip(published.GPUS, row)}
    run = replay(Oobleck(speeds, 1, pause_s, 24), TRACE, 24, END_S)
    assert run.average == pytest.approx(published.AVERAGES["Oobleck", model], rel=0.02)


def test_the_trace_and_the_published_points_give_the_published_averages() -> None:
    """To 1%; to 2% for Bamboo, whose published curve seems to hold some transition cost, unlike the others'."""
    for system, model in (("ReCycle", "big"), ("ReCycle", "350M"), ("fault-scaled", "big"), ("Bamboo", "350M")):
        speeds = {
            gpus: published.FAULT_FREE[model] * part
            for gpus, part in zip(published.GPUS, published.FRACTIONS[system, model])
        }
        run = replay(Oobleck(speeds, 1, 0.0, 24), TRACE, 24, END_S)
        assert run.average == pytest.approx(
            published.AVERAGES[system, model], rel=0.02 if system == "Bamboo" else 0.01
        ), (system, model)


def test_bamboo_has_both_published_fault_free_rates_and_its_degraded_fractions() -> None:
    """ReCycle's figure: within 6% down to 17 GPUs; at 16 and 15 the rules give up to 14% more than was published."""
    slow, fast = (Bamboo.of_job(JOB, rate=rate) for rate in (0.25, 0.32))
    assert [policy.speed(policy.start()) / JOB.fault_free for policy in (slow, fast)] == pytest.approx([0.25, 0.32])
    bamboo = Bamboo.of_job(JOB)
    for gpus, part in zip(published.GPUS, published.FRACTIONS["Bamboo", "350M"]):
        off = bamboo.speed(Nodes(gpus)) / JOB.fault_free / part - 1
        assert abs(off) < (0.06 if gpus >= 17 else 0.14), (gpus, off)


def test_bamboos_fatal_neighbours_and_rendezvous() -> None:
    many = Bamboo(1.0, 16, 4, step_s=1.0)
    state, transition = many.change(many.start(), regular_losses(1, 1)[0], 0.5)
    assert state == Nodes(63, 1) and transition.pause_s == 0 and many.speed(state) == pytest.approx(0.651 / 1.5)
    state, transition = many.change(Nodes(63, 1), type(TRACE[0])(2, (0.0,)), 0.5)
    assert state == Nodes(62) and transition.pause_s == 30 and transition.text.startswith("fatal")


def test_bamboos_memory() -> None:
    small = replace(BIG, memory_limit=30e9, name="small")
    assert fits_memory(JOB) and fits_memory(BIG) and not fits_memory(small)
    assert Bamboo.of_job(small).speed(Nodes(24)) == 0 < Bamboo.of_job(BIG).speed(Nodes(24))


def test_oobleck_templates() -> None:
    """Its formula by hand: stages 1, 3, 2 have k* = 1, so T = 6 + (6 + 1 + 1) * 3 + (3 + 2)."""
    assert Template((1, 1, 1), (1.0, 3.0, 2.0)).time_us == 35
    found = template(JOB.parts, 4)
    assert sum(found.cut) == 26 and len(found.cut) == 4 and all(found.cut)
    assert list(multisets(7, [2, 3, 4], 2)) == [(2, 2, 3), (3, 4)]


@given(st.integers(1, 60), st.lists(st.floats(0.5, 4.0), min_size=1, max_size=6))
def test_batches_are_distributed_whole_and_evenly(batch: int, weights: list[float]) -> None:
    given_out = distribute(batch, weights)
    assert sum(given_out) == batch
    times = [count * weight for count, weight in zip(given_out, weights)]
    assert max(times) - min(times) <= 2 * max(weights) + 1e-9


def test_every_run_accounts_for_all_its_time() -> None:
    for policy in policies():
        run = replay(policy, TRACE, 24, END_S)
        assert sum(segment.end_s - segment.start_s for segment in run.segments) == pytest.approx(END_S)
        assert 0 < run.average <= run.average_without_transitions * (1 + 1e-9), policy.name
        assert all(segment.samples >= 0 and segment.paused_s >= 0 for segment in run.segments)
        assert run.segments[-1].workers == 24


def test_a_loss_costs_us_the_lost_workers_part_of_the_step() -> None:
    own = Recycle(JOB, techniques(JOB), moves=False)
    step_s = own.period_us(own.start()) / 1e6
    _, transition = own.change(own.start(), WorkersChange(0.0, lost=(0.3,)), 2.5 * step_s)
    assert transition.lost_s == pytest.approx(0.5 * step_s / JOB.topology.replicas)


def test_who_has_no_check_is_called_unvalidated() -> None:
    labels = [label(policy) for policy in policies()]
    unvalidated = {name for name in labels if name.endswith("(unvalidated)")}
    assert unvalidated == {
        f"{name} (unvalidated)"
        for name in ("elastic batching", "restart from checkpoint", "CheckFreq", "Elastic Horovod")
    }
    assert all(policy.source for policy in policies())
    assert label(Bamboo.of_job(JOB, rate=0.25)) == "Bamboo (unvalidated)"


def test_same_seed_same_run() -> None:
    one, two = (replay(Recycle(JOB, techniques(JOB)), changes_of(published.TRACE, seed=3), 24, END_S) for _ in range(2))
    assert one == two


def test_a_cap_is_what_the_accelerator_holds() -> None:
    for job in (JOB, BIG):
        caps = techniques(job).activation_cap
        for stage, cap in enumerate(caps):
            assert job.memory_bytes(stage, cap) <= 0.9 * job.memory_limit < job.memory_bytes(stage, cap + 1)
        assert techniques(job, 2).activation_cap == (8, 8, 8, 8)
        with pytest.raises(ValueError, match="micro-batches per stage"):
            techniques(job, 10)
