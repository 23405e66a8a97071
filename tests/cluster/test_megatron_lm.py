"""Megatron-LM, unmodified, under the plugin: the bits of stock over Gloo, and whoever dies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import megatron_lm
from tests.support.jobs import held
from tests.support.megatron_lm_jobs import (
    EVALUATES,
    Flags,
    Jobs,
    Trained,
    assert_same_weights,
    evaluations,
    gpt,
    ramped_up,
    trained,
)
from tests.support.returns import HELD

pytestmark = pytest.mark.skipif(megatron_lm.home() is None, reason=megatron_lm.MISSING)


def later_half(of: Trained) -> Trained:
    """What a job has left, with the losses and norms of the later half of its steps."""

    def half(values: list) -> list:
        return values[len(values) // 2 :]

    ranks = {
        rank: {**each, "losses": half(each["losses"]), "norms": half(each["norms"])} for rank, each in of.ranks.items()
    }
    return Trained(of.result, ranks)


def assert_same_bits(one: Trained, other: Trained) -> None:
    """All survivors of both have the same weights, and say the same norms."""
    for rank in assert_same_weights(one, other):
        norms = zip(one.ranks[rank]["norms"], other.ranks[rank]["norms"], strict=True)
        assert all(mine is None or theirs is None or mine == theirs for mine, theirs in norms)
    assert one.losses == pytest.approx(other.losses, abs=2e-6) and len(set(one.losses)) > 2


SHARDED = "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"
FP16 = "--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale", str(2**24), "--hysteresis", "1"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(gpt(2, 2), id="2 x 2"),
        pytest.param(gpt(4, 2), id="4 stages x 2"),
        pytest.param(gpt(2, 2, "--bf16"), id="bf16"),
        pytest.param(gpt(2, 2, *FP16), id="fp16, whose first steps are skipped"),
        pytest.param(gpt(2, 2, "--untie-embeddings-and-output-weights", "--clip-grad", "0"), id="untied, not clipped"),
        # stock's distributed optimizer sums the norm in another order, so that a clipped step is rounded otherwise
        pytest.param(gpt(2, 2, "--bf16", "--clip-grad", "0", *SHARDED), id="distributed optimizer, not clipped"),
    ],
)
def test_without_a_failure_it_has_the_bits_of_stock(job: Jobs, flags: Flags) -> None:
    stock, ours = job.stock(flags), job(flags, {})
    assert {each["backend"] for each in stock.ranks.values()} == {"gloo"}
    assert {each["backend"] for each in ours.ranks.values()} == {"recycle"}
    assert_same_bits(stock, ours)


@pytest.mark.parametrize(
    "kills",
    [
        ("kill 1.1 before 1F1.2@3",),
        ("kill 0.0 before 0W0.1@4",),
        ("kill 0.1 before 1STEP@3",),
        ("kill 1.0 before 0REDUCE@2",),
        ("kill 0.1 before 1I0.1@3", "kill 1.0 before 0F1.3@3"),
    ],
    ids=" and ".join,
)
def test_whoever_dies_the_others_train_the_bits_of_stock(job: Jobs, kills: tuple[str, ...]) -> None:
    stock = job.stock(gpt(2, 2))
    ours = job(gpt(2, 2), {"exact": True, "rejoin": "never", "faults": list(kills)})
    assert len(ours.ranks) == 4 - len(kills) and len(ours.result.of("lost")) == len(kills)
    assert_same_bits(stock, ours)


def test_a_step_whose_norm_was_over_the_limit_is_taken_back_and_clipped(job: Jobs) -> None:
    """Scheduler and counters too; the coefficient is rounded otherwise than stock's."""
    flags = gpt(2, 2, "--clip-grad", "1.6", "--lr-decay-style", "linear", "--lr-decay-iters", "8")
    stock, ours = job.stock(flags), job(flags, {"clip": "validate"})
    assert ours.result.of("rejected") and ours.losses == pytest.approx(stock.losses, abs=2e-6)
    for rank, mine in ours.ranks.items():
        for name, weight in mine["weights"].items():
            assert torch.allclose(weight, stock.ranks[rank]["weights"][name], atol=1e-6), name


def test_in_fp16_the_loss_scale_goes_as_stocks_whoever_dies(job: Jobs) -> None:
    flags = gpt(2, 2, *FP16, "--train-iters", "12")
    stock, kill = job.stock(flags), {"exact": True, "rejoin": "never", "faults": ["kill 1.1 before 1F1.2@3"]}
    ours = job(flags, kill)
    assert_same_bits(stock, ours)
    said = [
        re.findall(r"loss scale: (\S+) \|.*skipped iterations: +(\d)", each.result.output) for each in (stock, ours)
    ]
    assert said[0] == said[1] and len(said[0]) > 6 and {"0", "1"} <= {skipped for _, skipped in said[0]}


@pytest.mark.parametrize("more", [(), ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")], ids=("", "dropout"))
def test_three_replicas_train_the_same_bits_whoever_dies(job: Jobs, more: tuple[str, ...]) -> None:
    whole = job(gpt(2, 3, *more, micro_batches=2), {"exact": True})
    kills = ["kill 1.1 before 1F1.1@3", "kill 2.0 before 0W2.1@4"]
    ours = job(gpt(2, 3, *more, micro_batches=2), {"exact": True, "rejoin": "never", "faults": kills})
    assert len(ours.ranks) == 4
    assert_same_bits(whole, ours)
    if not more:
        assert job(gpt(2, 3, micro_batches=2)).losses == pytest.approx(whole.losses, abs=5e-6)


@pytest.mark.parametrize("kills", [(), ("kill 1.1 before 1F1.0@2",), ("kill 0.0 before 0F0.3@3",)], ids=str)
def test_the_batch_is_ramped_up_as_by_stock_whoever_dies(job: Jobs, kills: tuple[str, ...]) -> None:
    flags = ramped_up(2, 2, 40)
    stock, ours = job.stock(flags), job(flags, {"exact": True, "rejoin": "never", "faults": list(kills)})
    assert len(ours.result.of("lost")) == len(kills)
    assert set(re.findall(r"global batch size: +(\d+)", ours.result.output)) == {"4", "8"}
    assert_same_bits(stock, ours)


def test_who_comes_back_ramps_up_too(job: Jobs, tmp_path: Path) -> None:
    flags = ramped_up(2, 2, 8 + 8 * 38)
    kill = {"exact": True, "rejoin": "always", "faults": ["kill 1.1 before 1F1.2@4"]}
    run = job.start(flags, kill, held(tmp_path, HELD, "go"))
    run.hear("newcomer")
    (tmp_path / "go").touch()
    ours, stock = trained(run), job.stock(flags)
    assert len(ours.result.of("rejoined")) == 1 and ours.ranks.keys() == stock.ranks.keys()
    assert_same_weights(ours, stock)


def test_who_comes_back_trains_the_bits_of_stock(job: Jobs, tmp_path: Path) -> None:
    """A newcomer passes Megatron-LM's start by itself, and evaluations and checkpoints that are over."""
    flags = gpt(2, 2, "--train-iters", "40", *EVALUATES)
    stock, kill = job.stock(flags), {"exact": True, "rejoin": "always", "faults": ["kill 1.1 before 1F1.2@3"]}
    saving = "--save", str(tmp_path / "saved"), "--save-interval", "5", "--ckpt-format", "torch"
    run = job.start(Flags(flags.ranks, [*flags.words, *saving]), kill, held(tmp_path, HELD, "go"))
    run.hear("newcomer")
    (tmp_path / "go").touch()
    ours = trained(run)
    assert [event["seat"] for event in ours.result.of("rejoined")] == ["1.1"], ours.result.output[-6000:]
    assert ours.ranks.keys() == stock.ranks.keys()
    assert_same_bits(later_half(stock), later_half(ours))  # it knows no norms of steps that were over
    assert evaluations(ours) == pytest.approx(evaluations(stock), abs=5e-6)


DISTRIBUTED = "--bf16", "--clip-grad", "0", "--use-distributed-optimizer"


@pytest.mark.parametrize("more", [("--ckpt-format", "torch"), DISTRIBUTED], ids=("", "distributed"))
def test_who_comes_back_to_a_job_that_has_loaded_a_checkpoint_begins_where_it_did(
    job: Jobs, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """A newer checkpoint is on the disk by then."""
    saving = "--save", str(tmp_path / "saved"), "--save-interval", "4"
    job(gpt(2, 2, *more, "--train-iters", "40", *saving, "--exit-interval", "4"), {"exact": True})
    loading = gpt(2, 2, *more, "--train-iters", "40", *saving, "--load", str(tmp_path / "saved"))
    kill = {"exact": True, "rejoin": "always", "faults": ["kill 1.1 before 1F1.2@6"]}
    run = job.start(loading, kill, held(tmp_path, HELD, "go"))
    run.hear("newcomer")
    (tmp_path / "go").touch()
    ours, stock = trained(run), job.stock(gpt(2, 2, *more, "--train-iters", "40"))
    assert len(ours.result.of("rejoined")) == 1 and ours.ranks.keys() == stock.ranks.keys()
    assert_same_weights(ours, stock)


@pytest.mark.parametrize("kills", [(), ("kill 1.1 before 1F1.2@3",), ("kill 0.0 before 0F0.1@-3",)], ids=str)
def test_evaluations_say_what_stock_says_whoever_dies(job: Jobs, kills: tuple[str, ...]) -> None:
    stock = job.stock(gpt(2, 2, *EVALUATES))
    ours = job(gpt(2, 2, *EVALUATES), {"rejoin": "never", "faults": list(kills)})
    assert len(evaluations(stock)) == 5 and len(ours.result.of("lost")) == len(kills)
    assert evaluations(ours) == pytest.approx(evaluations(stock), abs=5e-6)


@pytest.mark.parametrize(
    "flags, kill",
    [
        (("--ckpt-format", "torch"), "kill 0.1 before 1F0.2@2"),
        (("--ckpt-format", "torch"), "kill 1.0 at checkpoint.file"),
        ((), "kill 0.1 before 1F0.2@2"),
        ((), "kill 1.0 at checkpoint.file"),
        (("--bf16",), "kill 0.0 at checkpoint.publish"),
    ],
)
def test_stock_and_plugin_go_on_from_a_degraded_checkpoint(
    job: Jobs, tmp_path: Path, flags: tuple[str, ...], kill: str
) -> None:
    """In the format "torch_dist", which is Megatron's by default, as well."""
    whole = later_half(job.stock(gpt(2, 2, *flags)))
    saving = "--save", str(tmp_path / "saved"), "--save-interval", "3", "--exit-interval", "3"
    job(gpt(2, 2, *flags, *saving), {"exact": True, "rejoin": "never", "faults": [kill]})
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "3"
    loading = gpt(2, 2, *flags, "--load", str(tmp_path / "saved"))
    for recycle in (None, {"exact": True}):
        later = job(loading, recycle)
        assert {len(each["norms"]) for each in later.ranks.values()} == {3}
        assert_same_bits(whole, later)


@pytest.mark.parametrize(
    "more, faults",
    [
        (["--exit-signal-handler"], ["leave 0.1 before 1F0.1@2", "kill 1.1 before 1F1.2@2"]),
        (["--exit-duration-in-mins", "30"], ["kill 1.1 before 1F1.2@2"]),
    ],
    ids=("signal", "duration"),
)
def test_all_leave_after_the_same_step_with_a_checkpoint(
    job: Jobs, tmp_path: Path, more: list[str], faults: list[str]
) -> None:
    """One worker's word is enough, whoever is dead; of the time, rank 0's clock says that it is over."""
    saving = "--save", str(tmp_path / "saved"), "--save-interval", "100", "--ckpt-format", "torch"
    long = {"name": "begun_before", "rank": "0", "hours": 1.0}
    long_job = gpt(2, 2, "--train-iters", "40")
    flags = Flags(4, [*long_job.words, *saving, *more])
    ours = job(flags, {"exact": True, "rejoin": "never", "faults": faults}, *[long] * ("duration" in more[0]))
    step = int((tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text())
    calls = {len(each["norms"]) for each in ours.ranks.values()}  # the last is the one that the loop is left by
    assert calls == {step + 1} and step < 10
    assert len(ours.result.of("terminate")) >= 1 and len(ours.result.of("lost")) == len(faults) - ("signal" in more[0])
    later = job(Flags(4, [*long_job.words, "--load", str(tmp_path / "saved"), "--ckpt-format", "torch"]))
    assert {len(each["norms"]) for each in later.ranks.values()} == {40 - step}
    assert_same_weights(later, job.stock(long_job))


@pytest.mark.parametrize(
    "flags, saved_by",
    [
        (("--bf16", "--dist-ckpt-optim-fully-reshardable"), None),
        (("--bf16",), None),
        (("--bf16",), {"exact": True, "rejoin": "never", "faults": ["kill 0.0 before 0F0.1@2"]}),
        ((), {"exact": True, "rejoin": "never", "faults": ["kill 1.0 at checkpoint.file"]}),
    ],
)
def test_a_checkpoint_of_a_distributed_optimizer_is_loaded(
    job: Jobs, tmp_path: Path, flags: tuple[str, ...], saved_by: dict | None
) -> None:
    """Stock's and the plugin's, each by both."""
    flags += "--clip-grad", "0", "--use-distributed-optimizer"
    whole = later_half(job.stock(gpt(2, 2, *flags)))
    saving = "--save", str(tmp_path / "saved"), "--save-interval", "3", "--exit-interval", "3"
    job(gpt(2, 2, *flags, *saving), saved_by)
    for recycle in (None, {"exact": True}):
        later = job(gpt(2, 2, *flags, "--load", str(tmp_path / "saved")), recycle)
        assert {len(each["norms"]) for each in later.ranks.values()} == {3}
        assert_same_bits(whole, later)


@pytest.mark.parametrize("saved_by", [None, {"exact": True, "rejoin": "never", "faults": ["kill 0.0 before 0F0.1@2"]}])
def test_a_checkpoint_is_loaded_by_other_numbers_of_stages_and_replicas(
    job: Jobs, tmp_path: Path, saved_by: dict | None
) -> None:
    """In the format "torch_dist": stock's and the plugin's, each by both."""
    saving = "--save", str(tmp_path / "saved"), "--save-interval", "3", "--exit-interval", "3"
    job(gpt(2, 2, *saving, micro_batches=3), saved_by)
    whole = later_half(job.stock(gpt(2, 2, micro_batches=3)))
    for recycle in (None, {}):
        later = job(gpt(1, 3, "--load", str(tmp_path / "saved"), micro_batches=2), recycle)
        assert later.losses == pytest.approx(whole.losses, abs=5e-6)


def test_who_takes_the_last_ranks_place_writes_for_tensorboard_and_wandb(job: Jobs, tmp_path: Path) -> None:
    """Megatron's last rank writes, 1.1 here; from its death on another one does, in the same run of wandb's, which has
    the checkpoints too.
    """
    saving = "--save", str(tmp_path / "saved"), "--save-interval", "2", "--ckpt-format", "torch"
    board = "--tensorboard-dir", str(tmp_path / "board"), "--tensorboard-log-interval", "1"
    wandb = "--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", str(tmp_path / "wandb")
    kill = {"rejoin": "never", "faults": ["kill 1.1 before 1F1.2@3"]}
    ours = job(gpt(2, 2, *board, *wandb, *saving, *EVALUATES), kill)
    pids = {seat: ours.result.pids[ours.result.rank_of(seat)] for seat in ("0.1", "1.1")}
    (run,) = (tmp_path / "wandb").iterdir()
    for folder in (tmp_path / "board", run):
        losses = _written(folder, "lm loss")
        assert [value for _, (value, _) in sorted(losses.items())] == pytest.approx(ours.losses, abs=1e-6)
        assert [pid for _, (_, pid) in sorted(losses.items())] == [pids["1.1"]] * 2 + [pids["0.1"]] * 4
        evaluated = {step: pid for step, (_, pid) in _written(folder, "lm loss validation").items()}
        assert evaluated == {2: pids["1.1"], 4: pids["0.1"], 6: pids["0.1"]}
    for step, pid in {2: pids["1.1"], 4: pids["0.1"], 6: pids["0.1"]}.items():
        assert _written(run, f"iter_{step:07d}") == {step: (pid, pid)}
    assert _written(run, "finished") == {0: (pids["0.1"], pids["0.1"])}


def _written(folder: Path, name: str) -> dict[int, tuple[float, int]]:
    found: dict[int, tuple[float, int]] = {}
    for file in folder.glob("*.jsonl"):
        pid = int(file.stem)
        for tag, value, step in map(json.loads, file.read_text().splitlines()):
            if tag == name:
                assert found.get(step, (0, pid))[1] == pid, "one worker writes a step"
                found[step] = value, pid
    return found


@pytest.mark.parametrize(
    "kills", [(), ("kill 1.1 before 1F1.3@3",), ("kill 1.1 before 1STEP@3",), ("kill 0.1 before 1I0.1@4",)], ids=str
)
def test_all_that_a_loss_function_gives_is_logged_as_by_stock_whoever_dies(
    job: Jobs, monkeypatch: pytest.MonkeyPatch, kills: tuple[str, ...]
) -> None:
    """Numbers, and sums of as many tokens as a micro-batch has; stock's last rank prints, 1.1 here."""
    monkeypatch.setenv("RECYCLE_TEST_LOGS_MORE", "1")
    flags = gpt(2, 2, *EVALUATES)
    stock, ours = job(flags), job(flags, {"exact": True, "rejoin": "never", "faults": list(kills)})
    assert len(ours.result.of("lost")) == len(kills)
    assert all(each.keys() == {"plain", "pair", "lm loss"} for each in stock.ranks[3]["logged"])
    for last in (2, 3):  # whoever is left of the last stage
        assert last not in ours.ranks or ours.ranks[last]["logged"] == stock.ranks[3]["logged"]
    assert _lines(ours) == _lines(stock) and len(_lines(stock)) == 6 + 5


def _lines(of: Trained) -> list[str]:
    """What is printed of steps and evaluations, without times, and without what another rank prints on the same line:
    each tells of its memory after the first step.
    """
    found = re.findall(r" iteration +\d+/.*?consumed.*?nan iterations: +\d+ \||validation loss at .*", of.result.output)
    return [re.sub(r"elapsed time.*?\| (throughput.*?\|)?", "", line).rstrip() for line in found]


def test_torchrun_with_the_plugins_module_in_between_outlives_a_worker(job: Jobs, tmp_path: Path) -> None:
    flags = gpt(2, 2)
    kill = {"exact": True, "rejoin": "never", "faults": ["kill 1.1 before 1F1.2@3"]}
    settings, out = tmp_path / "recycle.json", tmp_path / "out"
    settings.write_text(json.dumps({"enabled": True, "report": False, "run_dir": str(tmp_path / "run"), **kill}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(flags.ranks)]
    script = ["-m", "recycle_plugin.launch", megatron_lm.SCRIPT, str(out), *flags.words]
    ended = subprocess.run(
        [*torchrun, *script, "--recycle-config", str(settings)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(megatron_lm.home()), str(megatron_lm.ROOT)]),
            "OMP_NUM_THREADS": "1",
        },
        cwd=megatron_lm.ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    ranks, stock = {int(file.stem[4:]): torch.load(file) for file in out.glob("rank*.pt")}, job.stock(flags)
    assert ranks.keys() == {0, 1, 2}
    assert_same_weights(Trained(stock.result, ranks), stock)


def test_a_flag_that_is_not_supported_is_refused_in_one_line(job: Jobs) -> None:
    refused = job.start(gpt(2, 2, "--log-params-norm"), {}).finish()
    assert refused.code == 1
    assert "--log-params-norm is not supported with recycle.enabled: leave it out" in refused.output


def test_overlapped_communication_is_taken_and_not_done(job: Jobs) -> None:
    ours = job(gpt(2, 2, *DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"), {})
    assert_same_bits(job.stock(gpt(2, 2, *DISTRIBUTED)), ours)


def test_a_switched_off_section_leaves_stock_megatron(job: Jobs) -> None:
    off = job(gpt(2, 2), {"enabled": False})
    assert_same_bits(job.stock(gpt(2, 2)), off)
    assert not off.result.of("start")
