"""The choice of what is logged, as workers make it of what they have measured, and say it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.log_figures import LogFigures, StageFigures
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.log_meter import LogMeter
from recycle_plugin.planner.log_selection import Line
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.worker.log_choice import LogChoice
from recycle_plugin.runtime.worker.stage_log import StageLog
from recycle_plugin.settings.schema import Settings

EVERY, SIZE = 10, 1000  # steps between checkpoints; bytes over each boundary in a step
STAGES = 4
LINE = Line((1.0,) * 4, (SIZE,) * 3, (0.25,) * 4, ("h",) * 4, 0.0, EVERY, 1e9, 1e9)


class Told:
    """A session that a test tells what to log, and that keeps what it is to say."""

    def __init__(self, *boundaries: int) -> None:
        members = tuple(Member(rank, Seat(0, rank), "", "h") for rank in range(STAGES))
        roster = Generation(1, members, 0, "", 0.0).roster
        self.view = SimpleNamespace(roster=roster, logged=frozenset(boundaries), worker=WorkerId(0))
        self.rank, self.job_id = 0, "job"
        self.said: list[tuple[str, str, dict]] = []

    def note(self, kind: str, text: str, **details: object) -> None:
        self.said.append((kind, text, details))

    def texts(self, kind: str) -> list[str]:
        return [text for found, text, _ in self.said if found == kind]


def choice(
    session: Told, planned: Line | None = None, boundaries: object = "all", budget: int | None = None
) -> LogChoice:
    return LogChoice(session, boundaries, budget, 0, LogMeter(), lambda every: planned, lambda: 7)


def brought(logged: int = 0, steps: int = EVERY) -> list[StageFigures]:
    """By four workers, of which each computes for a second in a step."""
    ways = [(steps * SIZE * (stage < STAGES - 1), steps * SIZE * (stage > 0)) for stage in range(STAGES)]
    return [
        StageFigures(stage, 0, LogFigures(steps, float(steps), down // 2, up // 2, logged // STAGES))
        for stage, (down, up) in enumerate(ways)
    ]


def test_before_steps_are_measured_what_is_logged_stays_and_is_said_once():
    session = Told(0, 1, 2)
    made = choice(session, boundaries="auto", budget=1)
    assert made.choose(brought(steps=0), EVERY) == made.choose(brought(steps=2), EVERY) == (0, 1, 2)
    (text,) = session.texts("log_boundaries")
    assert text == (
        "logged: 0|1, 1|2, 2|3; each stage replays alone; its cost is not measured yet; recycle.log.boundaries "
        "chooses once steps are measured"
    )


@pytest.mark.parametrize("budget, expected", [(None, (0, 1, 2)), (2 * EVERY * SIZE, (0, 1)), (15_000, (1,)), (1, ())])
def test_the_best_within_the_budget_is_chosen_whoever_chooses(budget, expected):
    session, other = Told(0, 1, 2), Told(0, 1, 2)
    assert choice(session, boundaries="auto", budget=budget).choose(brought(), EVERY) == expected
    assert choice(other, boundaries="auto", budget=budget).choose(brought()[::-1], EVERY) == expected
    assert session.said == other.said
    ((kind, text, details),) = session.said
    assert kind == "log_boundaries" and details["boundaries"] == expected and details["fits"]
    assert text.endswith("(measured; logs and checkpoints are read at 1 GB/s)")


def test_a_choice_follows_the_interval_and_says_so_when_it_changes():
    session = Told(0, 1, 2)
    made = choice(session, boundaries="auto", budget=2 * EVERY * SIZE)
    for every, found in ((EVERY, (0, 1)), (EVERY, (0, 1)), (2 * EVERY, (1,)), (EVERY, (0, 1))):
        assert made.choose(brought(), every) == found
        session.view.logged = frozenset(found)
    assert [details["boundaries"] for _, _, details in session.said] == [(0, 1), (1,), (0, 1)]


def test_an_earlier_run_chooses_before_anything_is_measured():
    session = Told(0, 1, 2)
    assert choice(session, LINE, boundaries="auto", budget=15_000).choose(brought(steps=0), EVERY) == (1,)
    assert "(by an earlier run; " in session.texts("log_boundaries")[0]


def costs_of(path: Path, memory: bool) -> str:
    """Write the costs of four stages, with a second's work and SIZE bytes a boundary, in steps of ten micro-batches."""
    found: dict[str, Any] = {"forward": [100_000] * STAGES, "input": [0] * STAGES, "weight": [0] * STAGES}
    if memory:
        stage = StageBytes(1, 1, 1, 0, 1, 1, SIZE // 20, "cpu", 0, 0, 1)
        found |= {"activation_bytes": [1] * STAGES, "pending_bytes": [1] * STAGES, "memory": [vars(stage)] * STAGES}
    path.write_text(json.dumps(found))
    return str(path)


@pytest.mark.parametrize("memory, expected", [(True, (1,)), (False, (0, 1, 2))])
def test_costs_of_an_earlier_run_choose_if_they_tell_what_crosses_a_boundary(tmp_path, memory, expected):
    costs = costs_of(tmp_path / "costs.json", memory)
    log = {"folder": str(tmp_path / "log"), "boundaries": "auto", "budget": 15_000}
    back = {"rejoin": "always", "checkpoint": {"overhead": 0.035}}
    settings = Settings.from_section({"enabled": True, "log": log, "costs": costs, **back})
    shape = Topology(1, STAGES, 10)
    model, gradients = SimpleNamespace(device=CPU), SimpleNamespace(parameters=())
    framework: Any = SimpleNamespace(topology=shape, seat=Seat(0, 0), model=model, gradients=gradients)
    state: Any = SimpleNamespace(tensors=lambda: {"w": torch.zeros(7)})
    session: Any = Told(0, 1, 2)
    assert settings.log is not None
    stage_log = StageLog(session, framework, settings.log, str(tmp_path))
    try:
        made = stage_log.choice(session, settings, lambda: shape, state)
        assert made.begin().state_bytes == 28
        assert made.choose(brought(steps=0), EVERY) == expected, "of steps that nobody has measured"
    finally:
        stage_log.close()
    assert ("(by an earlier run; " in session.texts("log_boundaries")[0]) == memory


def test_a_list_stays_whatever_it_takes():
    session = Told(1, 2)
    made = choice(session, boundaries=[1, 2], budget=10)
    assert made.choose(brought(), EVERY) == (1, 2)
    assert "more than the budget of 0.01 kB" in session.texts("log_boundaries")[0]


def test_a_log_that_takes_too_much_is_said_once_until_it_fits_again():
    session = Told(0, 1, 2)
    made = choice(session, boundaries="all", budget=40_000)
    for taken, said in ((40_000, 0), (44_000, 1), (48_000, 1), (36_000, 1), (44_000, 2)):
        made.choose(brought(taken), EVERY)
        assert len(session.texts("log_budget")) == said
    assert session.texts("log_budget")[0] == (
        "the logs took 44 kB since the last checkpoint, and recycle.log.budget is 40 kB: set recycle.log.boundaries to "
        '"auto", raise it, or raise recycle.checkpoint.overhead, so that checkpoints are made more often'
    )


def test_what_was_logged_before_a_choice_does_not_speak_against_it():
    session = Told(0, 1, 2)
    made = choice(session, boundaries="auto", budget=15_000)
    for taken, said in ((32_000, 0), (20_000, 0), (16_000, 1)):
        session.view.logged = frozenset(made.choose(brought(taken), EVERY))
        assert len(session.texts("log_budget")) == said


def test_a_worker_brings_what_it_has_measured_since_the_last_checkpoint_that_is_whole():
    meter = LogMeter()
    made = LogChoice(Told(), "all", None, 2, meter, lambda every: None, lambda: 7)

    def work(size: int) -> None:
        meter.crossed(True, size, True)
        meter.stepped()

    work(3)
    assert made.begin() == StageFigures(2, 7, LogFigures(1, 0.0, 3, 0, 3))
    work(4)
    assert made.begin().figures == LogFigures(2, 0.0, 7, 0, 7), "the first one has failed"
    work(5)
    made.made()
    assert made.begin().figures == LogFigures(1, 0.0, 5, 0, 5)
    made.forget()
    assert made.begin().figures == LogFigures(0, 0.0, 0, 0, 0)
