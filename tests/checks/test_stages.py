"""The stages of ``scripts/on_gpu``, rehearsed on the CPU: their code, not their figures."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from recycle_plugin.lab.checks import killed
from recycle_plugin.lab.checks.rows import Row
from recycle_plugin.lab.gpu import gpu_figures, gpu_jobs, gpu_recoveries, on_gpu, stages
from recycle_plugin.lab.gpu.place import StagePlace
from recycle_plugin.lab.runs import JobRun, RunFailed, RunOutcome
from recycle_plugin.observability.event_log import read_events


@pytest.fixture
def place(tmp_path) -> StagePlace:
    return made(tmp_path, "stage")


def made(out: Path, name: str) -> StagePlace:
    (out / name).mkdir()
    return StagePlace("cpu", out, out / name, rehearsal=True)


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- figures -----------------------------------------------------------------------------------------


def test_undo_is_measured_and_taken_back(place, one_thread):
    found = by_name(gpu_figures.undo(place))
    assert found["undo: snapshot"].passed
    assert found["undo: snapshot"].figures["bytes_a_parameter"] == pytest.approx(12, abs=0.1)
    assert found["undo: inverse"].passed
    assert found["undo: inverse"].figures["bytes_a_parameter"] == pytest.approx(4, abs=0.1)


def test_an_undo_that_does_not_take_back_fails(place, one_thread, monkeypatch):
    monkeypatch.setattr(gpu_figures.KINDS["snapshot"], "restore", lambda self: None)
    found = by_name(gpu_figures.undo(place))["undo: snapshot"]
    assert found.passed is False and "parameters differ" in found.text


def test_copies_go_both_ways_alone_and_beside_compute(place, one_thread):
    (row,) = gpu_figures.copies(place)
    assert {"to_host_gb_s", "from_host_gb_s", "to_host_beside_gb_s", "from_host_beside_gb_s"} < set(row.figures)
    assert all(value > 0 for value in row.figures.values())


def test_keyed_randomness_that_is_not_keyed_fails(place, monkeypatch):
    (row,) = gpu_figures.rng(place)
    assert row.passed
    monkeypatch.setattr(gpu_figures, "keyed", lambda seed, device: torch.no_grad())
    (row,) = gpu_figures.rng(place)
    assert row.passed is False and "other masks" in row.text


def test_a_layers_backward_is_timed_split_and_fused(place, one_thread):
    plain, checkpointing = gpu_figures.split(place)
    assert (plain.name, checkpointing.name) == ("gpt_tiny", "gpt_tiny, checkpointing")
    assert all(row.passed is None and row.figures["ratio"] > 0 for row in (plain, checkpointing))


def test_what_a_stage_raises_is_a_row(tmp_path, monkeypatch, one_thread, capsys):
    def broken(place: StagePlace) -> list[Row]:
        raise ValueError("two\nlines")

    def ends_badly(place: StagePlace) -> list[Row]:
        raise RunFailed("the run in x ended with exit code 1:\nits output")

    said = []
    for run in (broken, ends_badly):
        monkeypatch.setitem(stages.STAGES, "rng", stages.STAGES["rng"]._replace(run=run))
        (row,) = stages.run("rng", tmp_path, "cpu")
        assert row.passed is False
        said.append(row.text)
    assert said == ["ValueError: two lines", "the run in x ended with exit code 1:"]


# --- jobs --------------------------------------------------------------------------------------------


@pytest.fixture
def warm(monkeypatch, plain_server) -> None:
    """Workers of plain jobs are forked from a warm process."""
    monkeypatch.setenv("RECYCLE_FORK_SERVER", plain_server.path)


@pytest.mark.processes
def test_kills_from_outside_are_survived(warm, place, monkeypatch):
    monkeypatch.setattr(gpu_jobs, "MOMENTS", {name: killed.MOMENTS[name] for name in ("F", "between steps")})
    rows = gpu_jobs.kills(place)
    assert [row.name for row in rows] == ["kill: F", "kill: between steps"]
    assert all(row.passed for row in rows), rows
    assert all(row.figures["difference"] <= killed.TOLERANCE and row.figures["seen_s"] >= 0 for row in rows)


@pytest.mark.processes
def test_a_watched_job_says_what_it_has_seen(warm, place):
    races, waits = gpu_jobs.sanitizer(place)
    assert (races.passed, waits.passed) == (None, None) and "not watched on cpu" in races.text


@pytest.mark.processes
def test_a_deepspeed_job_in_bf16_survives_a_kill_from_outside(server, place, monkeypatch):
    monkeypatch.setenv("RECYCLE_FORK_SERVER", server.path)
    rows = by_name(gpu_jobs.precision(place))
    assert rows["bf16"].passed and rows["bf16: kill: F"].passed, rows
    assert rows["fp16"].passed in (True, None) and rows["fp16"].text


def test_a_survivor_computes_on_after_its_peer_was_killed(place):
    rows = by_name(gpu_jobs.context(place))
    assert rows["computes"].passed and rows["allocates and frees"].passed and rows["memory"].passed is None


def test_a_survivor_that_does_not_answer_is_a_row(place, monkeypatch):
    monkeypatch.setattr(gpu_jobs, "process", lambda command: nullcontext(subprocess.Popen(["true"])))
    monkeypatch.setattr(gpu_jobs, "_said", lambda one: 0)
    monkeypatch.setattr(gpu_jobs, "_asked", lambda survivor, what: (_ for _ in ()).throw(ValueError("nothing in 1 s")))
    (row,) = gpu_jobs.context(place)
    assert row.passed is False and "nothing in 1 s" in row.text


@pytest.mark.processes
def test_what_a_stage_has_started_ends_with_it(warm, tmp_path, monkeypatch):
    """A stage past its deadline, while a job of its own runs."""
    events = tmp_path / "kills" / "reference" / "events.jsonl"

    class PastIt(JobRun):
        def wait_for(self, found, what, *rest):
            super().wait_for(lambda: events.exists() and "worker" in events.read_text(), what)
            raise RunFailed("it has not come in time")

    monkeypatch.setattr(on_gpu, "JobRun", PastIt)
    assert on_gpu.OnGpuCall(tmp_path, "cpu", 0.0)._rows("kills", 1.0) is None
    workers = [event["pid"] for event in read_events(events) if event["event"] == "worker"]
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], timeout=60)
    assert workers and not alive


@pytest.mark.processes
def test_a_job_that_would_fall_back_on_the_cpu_fails(warm, place):
    """Its workers have no other device."""
    (found,) = gpu_jobs.side_by_side(partial(gpu_jobs.started_plain, place.folder / "plain", "cuda"))
    assert isinstance(found, RunFailed) and "the accelerator is cuda, and torch finds cpu here" in str(found)


RECOVERIES = {
    stage.__name__: stage for stage in (gpu_recoveries.returns, gpu_recoveries.replay, gpu_recoveries.sharded)
}


@pytest.mark.processes
@pytest.mark.parametrize("stage", RECOVERIES)
def test_what_is_lost_comes_back(server, place, monkeypatch, stage):
    monkeypatch.setenv("RECYCLE_FORK_SERVER", server.path)
    rows = RECOVERIES[stage](place)
    assert rows and all(row.passed for row in rows), rows


@pytest.fixture
def on_the_standin(server, tmp_path, monkeypatch) -> StagePlace:
    """A place whose jobs have their tensors on the stand-in accelerator, where late copies are seen."""
    monkeypatch.setenv("RECYCLE_FORK_SERVER", server.path)
    one_host = killed.one_host

    def started(device: str, deadline_s: float, workers: int = 4) -> killed.StartedJob:
        on_it = {"RECYCLE_TEST_ON_STANDIN": "1", "RECYCLE_TEST_STANDIN_LATE": "7"} if device == "standin" else {}
        made = one_host("cpu", deadline_s, workers)
        script = str(Path(__file__).parents[1] / "jobs" / "on_standin.py")
        return made._replace(command=[*made.command, script], variables={**made.variables, **on_it})

    monkeypatch.setattr(gpu_jobs, "one_host", started)
    monkeypatch.setattr(gpu_recoveries, "one_host", started)
    return StagePlace("standin", tmp_path, tmp_path, rehearsal=True)


JOBS = {stage.__name__: stage for stage in (gpu_jobs.smoke, gpu_jobs.precision, gpu_jobs.kills)} | RECOVERIES


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", JOBS)
def test_jobs_pass_on_the_standin(on_the_standin, stage):
    rows = JOBS[stage](on_the_standin)
    assert rows and all(row.passed for row in rows), rows
    output = "".join(path.read_text() for path in on_the_standin.folder.rglob("output.txt"))
    assert output and "never raised" not in output


# --- verdicts ----------------------------------------------------------------------------------------

SEEN = {"event": "lost", "seat": "0.1", "rank": 2, "how": "", "seen_at": 7.0, "time": 7.0}
AFTER = [{"event": "resume", "committed": 3, "throughput": 1.0, "time": 7.1}]
START = {"event": "start", "time": 0.0, "seats": {"0.1": 2}, "job": {"replicas": 2, "stages": 2, "micro_batches": 2}}


def ended(*losses: float, lost: bool = False, pid: int = 5, then: tuple[dict, ...] = ()) -> RunOutcome:
    steps = enumerate(losses, 1)
    events = [
        event
        for step, value in steps
        for event in (
            {"event": "committed", "step": step, "time": 2.0 * step},
            {"event": "loss", "step": step, "loss": value, "time": 2.0 * step},
        )
    ]
    worker = {"event": "worker", "rank": 0, "pid": 5, "time": 0.0}
    failure = [SEEN, *AFTER] if lost else []
    whole = [worker, START, *events[:6], *failure, *then, *events[6:]]
    return RunOutcome(tuple(whole), 0, {0: {"rank": 0, "pid": pid, "losses": list(losses)}})


REFERENCE = ended(4.0, 3.0, 2.0, 1.0)


@pytest.mark.parametrize(
    "found, wrong",
    [
        (ended(4.0, 3.0, 2.0, 1.0, lost=True), ""),
        (ended(4.0, 3.0, 2.0, 1.0), "lost nobody instead of 0.1"),
        (ended(4.0, 3.0, 2.0, 1.5, lost=True), "losses differ by 0.5, and 5e-06 is allowed"),
        (ended(4.0, 3.0, 2.0, float("nan"), lost=True), "losses differ by inf"),
        (ended(4.0, 3.0, 2.0, lost=True), "losses differ by inf"),
        (ended(4.0, 3.0, 2.0, 1.0, lost=True, pid=6), "ranks 0 are new processes at the end"),
    ],
)
def test_a_kill_is_judged_by_losses_and_survivors(found, wrong):
    row = killed.row("kill", found, REFERENCE, at=6.5)
    assert row.passed is not bool(wrong) and wrong in row.text
    if not wrong:
        assert (row.figures["seen_s"], row.figures["regrouped_s"]) == (0.5, 0.1)


@pytest.fixture
def left(monkeypatch) -> dict[str, RunOutcome | RunFailed]:
    """What jobs leave in the folders that are named so."""
    found: dict[str, RunOutcome | RunFailed] = {}

    def side_by_side(*starts, meanwhile=None):
        return [found[start.args[0].name] for start in starts]

    monkeypatch.setattr(gpu_jobs, "side_by_side", side_by_side)
    monkeypatch.setattr(gpu_recoveries, "side_by_side", side_by_side)
    return found


def test_smoke_has_a_row_for_each_adapter(place, left):
    left |= {"plain": ended(4.0, 3.00001), "plain_cpu": ended(4.0, 3.0), "deepspeed_cpu": ended(4.0, 3.0)}
    left["deepspeed"] = RunFailed("the run in x ended\n[recycle 1.0] end: the job ends: why")
    found = by_name(gpu_jobs.smoke(place))
    assert found["plain"].passed and found["plain"].figures["difference"] == pytest.approx(1e-5, rel=0.01)
    assert found["deepspeed"].passed is False and "the job ends: why" in found["deepspeed"].text


def test_precisions_are_judged_one_by_one(place, left):
    """What is refused has no verdict, and does not keep the others from theirs."""
    left |= {place.device: ended(4.0, 3.0, 2.0, 1.0), "bf16": ended(4.0, 3.0, 2.0, 1.001)}
    left["fp16"] = RunFailed("x\nfp16.enabled: DeepSpeed has no fp16 on this device, cpu; set it")
    left["bf16_killed"] = ended(4.0, 3.0, 2.0, 1.01, lost=True)
    found = by_name(gpu_jobs.precision(place))
    assert {name: row.passed for name, row in found.items()} == {"bf16": True, "bf16: kill: F": False, "fp16": None}
    assert "losses differ by 0.009" in found["bf16: kill: F"].text


@pytest.mark.parametrize("broken", ("reference", "killed"))
def test_a_recovery_whose_job_fails_is_a_row(place, left, broken):
    left |= {name: ended(4.0, 3.0) for name in ("reference", "killed", "calm", "calm_cpu")}
    left |= {"reference" if broken == "reference" else "killed": RunFailed("the run in x ended\n] end: why")}
    left |= {"calm": RunFailed("the run in x ended\n] end: why")}
    for stage in (gpu_recoveries.returns, gpu_recoveries.replay, gpu_recoveries.sharded):
        assert [row.passed for row in stage(place)][-1:] == [False]
        assert any("end: why" in row.text for row in stage(place))


BACK = {"event": "rejoined", "seat": "0.1", "rank": 2, "step": 4, "time": 7.9}


@pytest.mark.parametrize(
    "found, replayed, wrong",
    [
        (ended(4.0, 3.0, 2.0, 1.0, lost=True, then=(BACK,)), False, ""),
        (ended(4.0, 3.0, 2.0, 1.0), False, "lost nobody instead of 0.1"),
        (ended(4.0, 3.0, 2.0, 1.0, lost=True), False, "seat 0.1 has not come back"),
        (ended(4.0, 3.0, 2.0, 1.0, lost=True, then=(BACK,)), True, "stage 1 was not replayed"),
        (ended(4.0, 3.0, 2.0, 1.5, lost=True, then=(BACK,)), False, "losses differ by 0.5, and 5e-06 is allowed"),
        (ended(4.0, 3.0, 2.0, float("nan"), lost=True, then=(BACK,)), False, "losses differ by inf"),
    ],
)
def test_a_recovery_is_judged_by_losses_and_who_is_back(place, found, replayed, wrong):
    row = gpu_recoveries.recovered("return", found, REFERENCE, place.folder, replayed)
    assert row.passed is not bool(wrong) and wrong in row.text


def of_shards(*losses: float, ranks: int = 4, lost: tuple[str, ...] = ()) -> RunOutcome:
    records = {
        rank: {"rank": rank, "pid": 5, "losses": {str(step): loss for step, loss in enumerate(losses)}}
        for rank in range(ranks)
    }
    return RunOutcome(tuple({"event": "lost", "seat": seat} for seat in lost), 0, records)


@pytest.mark.parametrize(
    "found, wrong",
    [
        (of_shards(2.0, 1.0, lost=("1.0", "1.0")), ""),
        (of_shards(2.0, 1.0), "lost nobody instead of 1.0"),
        (of_shards(2.0, 1.0, lost=("0.0", "1.0")), "lost 0.0, 1.0 instead of 1.0"),
        (of_shards(2.0, 1.0, ranks=2, lost=("1.0",)), "ranks [0, 1] have come to the end, instead of [0, 1, 2, 3]"),
        (of_shards(2.0, 1.5, lost=("1.0",)), "losses differ by 0.5, and 5e-06 is allowed"),
        (of_shards(2.0, float("nan"), lost=("1.0",)), "losses differ by inf"),
    ],
)
def test_sharded_replicas_are_judged_by_the_losses_of_each_rank(place, found, wrong):
    row = gpu_recoveries.compared("sharded", found, of_shards(2.0, 1.0), 5e-6, place.folder, {"1.0"})
    assert row.passed is not bool(wrong) and wrong in row.text


def test_places_that_wait_for_the_device_fail_a_watched_job(place, monkeypatch):
    class Ended:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    record = {"rank": 0, "pid": 5, "watched": True, "synchronisations": {"stage.py:step": 3}}
    monkeypatch.setattr(killed.StartedJob, "run", lambda *_, **__: Ended())
    monkeypatch.setattr(gpu_jobs, "outcome", lambda *_: RunOutcome((), 0, {0: record}))
    races, waits = gpu_jobs.sanitizer(place)
    assert races.passed and waits.passed is False and waits.text == "stage.py:step: 3 times"


def test_losses_unlike_the_cpus_fail():
    assert gpu_jobs.alike("plain", ended(4.0, 3.0), ended(4.0, 3.00005), 1e-4, Path("x")).passed
    row = gpu_jobs.alike("plain", ended(4.0, 3.0), ended(4.0, 3.1), 1e-4, Path("x"))
    assert row.passed is False and "differ from the CPU's by 0.1" in row.text


def test_the_line_that_ended_a_job_is_the_rows():
    error = RunFailed("the run in x ended\n[recycle 1.0] end: the job ends: why\nTraceback\n  more")
    assert killed.failed("kill", error, Path("x")).text == "[recycle 1.0] end: the job ends: why"
    assert killed.failed("kill", RunFailed("the run in x ended\nmore"), Path("x")).text == "the run in x ended"
    said = RunFailed("x\n[recycle 1.0] end: the job ends: fp16.enabled: DeepSpeed has no fp16 on this device, cpu; set")
    assert gpu_jobs.refused("fp16", said) == Row(
        "fp16", None, "refused: fp16.enabled: DeepSpeed has no fp16 on this device, cpu; set"
    )
    assert gpu_jobs.refused("fp16", RunFailed("x\nTraceback")) is None
