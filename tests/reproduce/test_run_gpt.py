"""The real runs: kills made of a trace, large models on the meta device, gpt_tiny for real."""

from __future__ import annotations

import csv
import shlex
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.adapters.megatron_lm.refusals import refusals
from recycle_plugin.commands.megatron_flags import parsed
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.runs import JobRun, TrainingRun, environment
from recycle_plugin.lab.simulator.peers import published
from recycle_plugin.lab.simulator.peers.kills import kills
from recycle_plugin.lab.training.compose import compose
from tests.support import megatron_lm
from tests.support.jobs import apart

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "reproduce" / "run_gpt.py"
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


@pytest.mark.parametrize(
    "experiment, stages, layers, millions",
    [
        ("gpt3_medium", 2, (13, 13), (400, 410)),
        ("gpt3_3_35b", 4, (8, 8, 7, 7), (3480, 3495)),
        ("gpt3_6_7b", 8, (5, 5, 4, 4, 4, 4, 4, 4), (6855, 6870)),
    ],
)
def test_the_large_ones_on_the_meta_device(
    script, experiment: str, stages: int, layers: tuple[int, ...], millions: tuple[int, int]
) -> None:
    """Untied head and learned positions count here; the published sizes count one embedding."""
    from recycle_plugin.lab.training.gpt import GPTShape

    run_gpt = script("run_gpt")
    job = compose([f"experiment={experiment}", "faults=trace"])
    found = run_gpt.workers_on_meta(job)
    total = sum(worker.parameters for worker in found)
    assert total == GPTShape(**job.model.model_dump(exclude={"kind"})).parameters()
    assert millions[0] <= total / 1e6 <= millions[1]
    assert tuple(worker.layers for worker in found) == layers and len(found) == job.topology.stages == stages
    assert job.workers == 32 and len(job.recycle["faults"]) == 12
    assert max(worker.bytes for worker in found) < 80e9, [worker.bytes / 1e9 for worker in found]


@pytest.mark.parametrize("experiment", ("gpt_tiny", "gpt3_medium", "gpt3_3_35b", "gpt3_6_7b"))
def test_the_plugin_takes_the_flags_by_which_megatron_lm_trains_the_same(script, experiment: str) -> None:
    flags = script("run_gpt").megatron_flags.flags
    assert list(refusals(parsed(flags(compose([f"experiment={experiment}", "faults=trace"]))))) == []


@pytest.mark.parametrize("wrong", ("experiment=emulated_pp4_dp2", "optimizer=sgd"))
def test_what_megatron_lm_has_no_flag_for_is_said_in_a_line(script, wrong: str) -> None:
    with pytest.raises(SystemExit, match="run_gpt: (model.kind|optimizer.type) is .* Megatron-LM"):
        script("run_gpt").megatron_flags.flags(compose([wrong]))


@pytest.mark.skipif(megatron_lm.home() is None, reason=megatron_lm.MISSING)
@pytest.mark.all_kills
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_megatron_lm_trains_gpt_tiny_under_the_trace_as_without(script, tmp_path: Path) -> None:
    losses = {}
    for faults in ("none", "trace"):
        folder = tmp_path / faults
        run_gpt = script("run_gpt")  # which knows what a trace's kills are
        job = compose(["experiment=gpt_tiny", f"faults={faults}", "recycle.exact=true", f"run_dir={folder}", *SMALL])
        command = shlex.split(run_gpt.megatron_flags.write(job, folder).splitlines()[0])
        place = command.index("pretrain_gpt.py")
        command[0], command[place : place + 1] = sys.executable, [megatron_lm.SCRIPT, str(folder / "out")]
        more = {"PYTHONPATH": f"{megatron_lm.home()}:{megatron_lm.ROOT}", "OMP_NUM_THREADS": "1"}
        with JobRun(folder, [*command, *megatron_lm.ON_CPU], environment(**more)) as run:
            outcome = run.finish(280)
        assert len(outcome.of("lost")) == (2 if faults == "trace" else 0)
        left = [torch.load(file) for file in (folder / "out").glob("rank*.pt")]
        losses[faults] = next(each["losses"] for each in left if each["losses"])
    assert losses["none"] == losses["trace"] and len(losses["none"]) == 12


@pytest.mark.all_kills
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_gpt_tiny_under_the_trace_trains_what_it_trains_without(tmp_path) -> None:
    losses = {}
    for faults in ("none", "trace"):
        with TrainingRun(
            tmp_path / faults, 4, ["experiment=gpt_tiny", f"faults={faults}", *SMALL], script=SCRIPT
        ) as run:
            outcome = run.finish(timeout_s=280)
        assert outcome.code == 0 and not outcome.restarted
        losses[faults] = outcome.losses
        assert len(outcome.of("lost")) == (2 if faults == "trace" else 0)
        with next((tmp_path / faults / "log").glob("rank*.csv")).open() as file:
            log = list(csv.DictReader(file))
        assert len(log) == 12 and all(float(row["samples/s"]) > 0 for row in log)
    assert max(apart(one, two) for one, two in zip(losses["none"], losses["trace"], strict=True)) <= 5e-6
