"""Before the start: who is waited for is named, and a job that lacks a worker ends."""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.enrolment import WAIT_S
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.starting import TOLD_S
from recycle_plugin.core.messages.from_workers import Ready
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.settings.schema import Settings
from tests.support.membership import DEADLINES, job, member

BEGAN = 1000.0


def of_four(*come: int) -> Membership:
    made = Membership(4)
    made.tick(BEGAN)
    for rank in come:
        made.greet(WorkerId(rank), "h")
    made.tick(BEGAN)
    return made


def told(made: Membership, until_s: float) -> list[tuple[float, str]]:
    """(seconds, text) of the warnings from the beginning to then."""
    found = []
    for after_s in range(0, int(until_s) + 1, 10):
        found += [(after_s, event.text) for event in made.tick(BEGAN + after_s).events if event.kind == "warning"]
    return found


def test_a_rank_whose_worker_never_comes_is_named_and_ends_the_job():
    made = of_four(0, 2)
    warnings = told(made, WAIT_S)
    assert [at for at, _ in warnings] == [TOLD_S + 10, 150, 310, 630]
    assert all("ranks 1 and 3 have not come: see whether their hosts have started" in text for _, text in warnings)
    assert "In 830 s the job ends (recycle.wait_timeout_s)" in warnings[0][1] and made.ended is None
    made.tick(BEGAN + WAIT_S + 1)
    assert made.ended is not None and made.ended.failed
    assert made.ended.reason.startswith("ranks 1 and 3 have not come within 900 s of the last other worker")


def test_whoever_comes_gives_the_rest_as_much_time_again():
    made = of_four(0)
    told(made, WAIT_S - 10)
    made.greet(WorkerId(3), "h")
    made.tick(BEGAN + WAIT_S)
    made.tick(BEGAN + 2 * WAIT_S - 1)
    assert made.ended is None
    made.tick(BEGAN + 2 * WAIT_S + 1)
    assert made.ended is not None


def test_a_script_that_takes_long_is_named_and_ended_by_nobody_here():
    """A worker that is ready has a deadline of its own for that."""
    made = of_four(0, 1, 2, 3)
    assert not told(made, 2 * WAIT_S), "nobody waits yet"
    for rank in (0, 1, 3):
        made.receive(Ready(member(rank), 0, job()), BEGAN)
    warnings = told(made, 2 * WAIT_S)
    assert [text.partition(". In")[0] for _, text in warnings] == [
        "training can't start, since rank 2 has not come to the first step"
    ]
    assert "In 30 s" in warnings[0][1] and DEADLINES.wait_timeout_s == 100 and made.ended is None
    made.receive(Ready(member(2), 0, job()), BEGAN)
    assert made.started and not told(made, 2 * WAIT_S)


def test_a_job_whose_setting_is_known_ends_by_that():
    made = of_four()
    made.receive(Ready(member(0), 0, job()), BEGAN)
    told(made, DEADLINES.wait_timeout_s)
    assert made.ended is None
    made.tick(BEGAN + DEADLINES.wait_timeout_s + 1)
    assert made.ended is not None and "ranks 1, 2 and 3 have not come within 100 s" in made.ended.reason


def test_the_time_for_the_setting_that_is_not_known_yet_is_its_default():
    assert Settings().wait_timeout_s == WAIT_S
