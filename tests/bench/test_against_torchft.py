"""The comparison with torchft: its figures from times written by hand, and the plugin's side in real processes.

torchft itself is not installed here.
"""

from __future__ import annotations

import json
import sysconfig
from importlib.metadata import version
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from recycle_plugin.lab.experiments.against_torchft import sides
from recycle_plugin.lab.experiments.against_torchft.comparison import (
    FAULT_FREE,
    OURS,
    RELEASE,
    TUNED,
    deadline_s,
    medians,
    reference,
    table,
    verdicts,
)
from recycle_plugin.lab.experiments.against_torchft.picture import draw
from recycle_plugin.lab.experiments.against_torchft.sides import own_sides, rival_environment
from recycle_plugin.lab.experiments.against_torchft.strikes import (
    ENDS,
    GOES_ON,
    Back,
    Struck,
    TrainedShape,
    after,
    apart,
    in_turns,
    short_step,
    strike,
)
from recycle_plugin.lab.experiments.measurements import TooShort
from recycle_plugin.lab.experiments.turns import Window
from recycle_plugin.lab.runs import RunFailed

SHAPE = TrainedShape(replicas=2, micro_batches=2, step_s=0.06, megabytes=6)


# --- figures -------------------------------------------------------------------------------------------


def test_steps_belong_to_who_was_away_when_they_began():
    """Struck at 10.5; its next process is there at 18, ready at 21, and back at 23."""
    usual = [(float(at), at + 1.0) for at in range(10)]
    away = [(10.0, 14.0), (14.0, 16.0), (16.0, 18.0), (18.0, 20.0), (20.0, 21.5)]
    joining = [(21.5, 22.5), (22.5, 25.5)]
    found = after([*usual, *away, *joining, (25.5, 95.5)], 1.0, 10.5, Back(18.0, 21.0, 23.0))
    assert found.stall_s == 3.0, "the longest of those that begin before it is ready"
    assert (found.start_s, found.from_kill_s, found.from_start_s, found.join_s) == (3.0, 12.5, 5.0, 2.0)
    assert (found.joining, found.joining_worst) == (1.0, 1.5), "in units of two seconds, a step while it is away"


def test_a_newcomer_that_is_ready_within_the_stall_is_measured_by_the_steps_before():
    found = after([(0.0, 1.0), (1.0, 16.0), (16.0, 18.0)], 1.0, 1.5, Back(3.0, 5.0, 17.0))
    assert (found.stall_s, found.joining, found.joining_worst) == (14.0, 2.0, 2.0)
    never = after([(0.0, 1.0), (1.0, 16.0), (16.0, 36.0)], 1.0, 1.5, None)
    assert (never.stall_s, never.joining, never.join_s) == (19.0, None, None)


def test_what_stalls_as_it_joins_hides_no_step_while_it_was_away():
    """Struck at 2.5, and ready in the middle of the longest step."""
    found = after([(0.0, 1.0), (1.0, 3.5), (3.5, 5.5), (5.5, 9.5), (9.5, 11.5)], 1.0, 2.5, Back(6.0, 7.0, 10.0))
    assert (found.stall_s, found.joining) == (3.0, 1.0)


def test_a_step_that_was_ended_when_others_were_struck_is_no_step_while_they_are_away():
    """One peer's step ends at the strike, and its next one stalls."""
    steps = [(0.0, 1.0), (1.0, 2.001), (2.001, 7.0), (7.0, 9.0), (9.0, 11.5), (11.5, 14.5)]
    found = after(steps, 1.0, 2.0, Back(8.0, 9.2, 12.0))
    assert found.stall_s == pytest.approx(3.999) and found.joining == pytest.approx(1.5)


def test_a_short_step_is_the_median_of_windows_and_counts_all_processes():
    """Two ranks; a step that reaches into a window from before does not count."""
    ends = (0.9, 1.1, 1.3, 5.0, 5.4, 5.8, 8.0, 8.2, 8.4)
    log = [{"event": "step", "rank": rank, "time": at} for at in ends for rank in (0, 1)]
    windows = [Window(1.0, 2.0, 0.2), Window(4.0, 6.0, 0.9), Window(7.5, 9.0, 0.6)]
    step_s, cpu_s = short_step(windows, log, TrainedShape(2, 1, 0.1, 1))
    assert step_s == pytest.approx(0.2) and cpu_s == pytest.approx(0.2)
    with pytest.raises(TooShort, match="a window of 0.5 s has no whole step"):
        short_step([Window(2.0, 2.5, 0.1)], log, TrainedShape(2, 1, 0.1, 1))


def test_losses_are_compared_step_by_step_with_those_of_a_run_without_a_failure():
    log = [{"event": "step", "rank": 0, "time": at, "step": at, "loss": loss} for at, loss in ((1, 9.0), (2, 3.0))]
    losses = [[1.0, 1.0], [2.0, 6.0]]
    assert apart(log, [0], 1.5, 1, losses) == pytest.approx(0.25), "the mean over the replicas"
    assert apart(log, [0], 1.5, 0, losses) == pytest.approx(0.5), "its own replica's"
    assert apart(log, [1], 1.5, 0, losses) is None and apart(log, [0], 2.5, 0, losses) is None


def test_the_batch_is_what_was_in_the_smallest_step():
    run = SimpleNamespace(
        events=lambda: [
            {"event": "committed", "step": 1, "time": 1.0, "contributed": [0], "replicas": 3},
            {"event": "committed", "step": 2, "time": 2.0, "contributed": [0, 1], "replicas": 3},
            {"event": "committed", "step": 3, "time": 3.0},
        ]
    )
    assert sides.batch_here(run, [], 1.5) == pytest.approx(2 / 3) and sides.batch_here(run, [], 2.5) == 1.0
    log = [{"event": "step", "rank": rank, "time": 2.0, "members": 1 + rank} for rank in (0, 1)]
    assert sides.batch_there(run, log, 1.0) == 0.5 and sides.batch_there(run, log, 2.0) == 1.0


# --- what is said of them ------------------------------------------------------------------------------


def struck(stall_s: float, joining: float | None = None) -> dict:
    return vars(Struck(GOES_ON, 0.3, None, stall_s, 1.0, 1e-8, joining=joining, joining_worst=joining))


def overhead(seconds: float) -> dict[str, float]:
    return {"plain_s": 0.03, "step_s": 0.03 + seconds, "overhead_s": seconds, "plain_cpu_s": 0.01, "cpu_s": 0.02}


def rounds_of(ours_s: float, theirs_s: float, tuned_s: float) -> dict:
    kill = {OURS: [struck(ours_s, 1.05)] * 2, RELEASE: [struck(theirs_s)] * 2, TUNED: [struck(tuned_s)] * 2}
    return {
        "kill": kill,
        "stop": {OURS: [struck(19.0)], RELEASE: [struck(60.0)]},
        "coordinator": {OURS: [vars(Struck(ENDS, 0.3, 1.0))]},
        FAULT_FREE: {OURS: [overhead(0.004)], RELEASE: [overhead(0.013)]},
    }


def test_a_promise_is_kept_where_the_median_is_within_its_limit():
    kept = [verdict.met for verdict in verdicts(rounds_of(0.4, 5.0, 1.0), 20.0)]
    assert kept == [True] * 6
    assert [verdict.met for verdict in verdicts(rounds_of(0.6, 5.0, 0.5), 18.0)] == [False] * 3 + [True] * 3
    assert [verdict.met for verdict in verdicts({"kill": {OURS: [struck(0.4)]}}, None)][:4] == [None] * 4


def test_a_rival_that_seems_to_cost_less_than_nothing_judges_nobody():
    found = {FAULT_FREE: {OURS: [overhead(-0.004)], RELEASE: [overhead(-0.001)]}}
    assert [verdict.met for verdict in verdicts(found, None)] == [None] * 6


def test_the_table_says_what_was_measured_and_leaves_out_what_was_not():
    text = table(SHAPE, rounds_of(0.4, 5.0, 1.0), None)
    assert "2 replicas" in text and "emulated compute" in text and "medians of 2 rounds" in text
    assert f"| kill | {OURS} | {RELEASE} | {TUNED} |" in text and f"| coordinator | {OURS} |" in text
    assert "| stall_s | 0.4 [0.4, 0.4] | 5 [5, 5] | 1 [1, 1] |" in text and "from_kill_s" not in text
    assert "| outcome | ends (1) |" in text
    assert "at most 1/10 of torchft's: 0.4, limit 0.5: met" in text
    assert "the printed deadline and a step: not measured" in text


def test_an_outcome_is_counted_and_a_figure_has_the_rounds_that_have_it():
    found = medians([{"outcome": "ends", "x": None}, {"outcome": "goes on", "x": 2.0}, {"outcome": "ends", "x": 4.0}])
    assert found == {"outcome": "ends (2), goes on (1)", "x": 3.0}


def test_the_picture_has_a_panel_for_what_was_measured(tmp_path):
    draw(rounds_of(0.4, 5.0, 1.0), tmp_path / "all.png")
    draw({"kill": {OURS: [struck(0.4)]}}, tmp_path / "one.png")
    assert (tmp_path / "all.png").stat().st_size > (tmp_path / "one.png").stat().st_size > 0


def test_the_deadline_is_what_the_struck_job_has_said(tmp_path):
    assert deadline_s(tmp_path) is None
    (tmp_path / "stop-recycle-0").mkdir()
    row = {"setting": "progress_timeout_s", "seconds": 12.5}
    event = {
        "time": 1.0,
        "event": "deadlines",
        "text": "",
        "table": [{"setting": "heartbeat_timeout_s", "seconds": 1.0}, row],
    }
    (tmp_path / "stop-recycle-0" / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert deadline_s(tmp_path) == 12.5


# --- environments and jobs -----------------------------------------------------------------------------


@pytest.mark.parametrize("has", ("0.2.0", "0.1.0"))
def test_an_environment_is_made_once_and_of_another_version_it_is_refused(monkeypatch, tmp_path, has):
    """It finds all but torchft where this interpreter does."""
    ran: list[str] = []
    folder = tmp_path / "env"

    def run(command, what: str) -> str:
        ran.append(what)
        if "venv" in command:
            site(folder).mkdir(parents=True)
        elif "pip" in command:
            (folder / "bin").mkdir()
            (folder / "bin" / "torchft_lighthouse").touch()
        return f"{has} {version('torch')}\n"

    monkeypatch.setattr(sides, "_run", run)
    for made in (["an environment for torchft", sides.RELEASE], []):
        ran.clear()
        if has == "0.2.0":
            assert rival_environment(folder, sides.RELEASE) == str(folder / "bin" / "python")
        else:
            with pytest.raises(RunFailed, match=r"has torchft 0\.1\.0 and torch .*: remove it"):
                rival_environment(folder, sides.RELEASE)
        assert ran == [*made, "torchft's version"]
    assert (site(folder) / "shared.pth").read_text() == f"{sysconfig.get_path('purelib')}\n"


def site(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> list[list[float]]:
    return reference(SHAPE, 1, tmp_path_factory.mktemp("reference"))


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_replica_is_lost_and_returns(tmp_path, losses):
    found = strike(own_sides()[0], "kill", SHAPE, tmp_path / "job", Random(1), losses)
    assert found.outcome == GOES_ON and found.batch == 1.0 and found.apart < 5e-6
    assert found.from_kill_s > found.from_start_s > found.join_s > 0 and found.joining_worst >= found.joining


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_what_is_lost_with_a_batch_that_shrinks_shows(tmp_path, losses):
    found = strike(own_sides()[1], "term", SHAPE, tmp_path / "job", Random(1), losses)
    assert found.outcome == GOES_ON and found.batch == 0.5 and found.apart > 1e-4 and found.from_kill_s is None


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_without_its_coordinator_a_job_ends(tmp_path, losses):
    found = strike(own_sides()[0], "coordinator", SHAPE, tmp_path / "job", Random(1), losses)
    assert found.outcome == ENDS and found.ended_s > 0 and found.stall_s is None


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_same_model_trains_in_turns_without_fault_tolerance(tmp_path):
    side = own_sides()[0]
    plain = [side.python, str(sides.LOOPS / "start.py"), "plain.py"], None
    found = in_turns({"plain": plain, "job": (side.command(2), side.settings)}, SHAPE, tmp_path, 2, 1.0)
    assert min(each.step_s for each in found.values()) >= SHAPE.step_s
    assert min(each.cpu_s for each in found.values()) > 0
