"""Jobs in virtual time in which the coordinator dies, or is cut off, and others take its place."""

from __future__ import annotations

import pytest

from recycle_plugin.lab.simulator import campaign
from recycle_plugin.lab.simulator.exercised import OF_TAKEOVERS
from recycle_plugin.lab.simulator.seeded_takeovers import with_a_takeover
from tests.mistakes.takeovers import TAKEOVERS

SEEDS = 40


@pytest.mark.timeout(600)
def test_whoever_takes_the_coordinators_place_knows_all_that_was_heard() -> None:
    """More of them with ``recycle campaign --takeovers``."""
    report = campaign.campaign(range(SEEDS), run_one=campaign.run_takeover)
    assert not report.violations, [(one.name, one.faults, one.violations) for one in report.violations]
    assert all(report.exercised[rule] for rule in OF_TAKEOVERS)


@pytest.mark.parametrize(
    "seed",
    (
        pytest.param(1, id="who has come again waits for an answer, and has to hear that a term begins first"),
        pytest.param(127, id="a worker is never let in, since who coordinates dies"),
    ),
)
def test_what_a_seed_has_found_once_stays_mended(seed) -> None:
    assert not campaign.run_takeover(seed).violations


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", TAKEOVERS)
def test_a_mistake_is_found(mistake, monkeypatch) -> None:
    job, _ = TAKEOVERS.shown_by(mistake, monkeypatch, with_a_takeover)
    assert not campaign.run("x", job).violations
