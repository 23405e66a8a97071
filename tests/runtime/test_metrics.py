"""What a job's events come to as numbers, and what becomes of a server that can't listen."""

from __future__ import annotations

import math
import re
import socket
import urllib.request
from dataclasses import asdict

import pytest

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.observability.exporter import Exporter
from recycle_plugin.observability.metrics import Metrics
from tests.support.expressions import DOCS, expressions, targets
from tests.support.membership import job

SEATS = {"0.0": 0, "1.0": 1, "0.1": 2, "1.1": 3}
BEGAN = 1000.0  # the start event


class Fed:
    """Metrics of a job of 2 replicas x 2 stages, whose events the test says.  ``now``: what its clock shows."""

    def __init__(self) -> None:
        self.now = BEGAN
        self.metrics = Metrics(lambda: self.now)
        for rank in range(4):
            self.say("worker", rank=rank, pid=100 + rank)
        self.say("start", job=asdict(job(batch=8)), seats=SEATS)

    def say(self, kind: str, at: float | None = None, **details: object) -> None:
        self.now = self.now if at is None else BEGAN + at
        self.metrics.take(Event(kind, "", details), self.now)

    def committed(self, step: int, at: float, **details: object) -> None:
        self.say("committed", at, step=step, **{"workers": 4, "redone_s": 0.0} | details)

    def lost(self, seat: str, at: float, cause: Cause = Cause.DIED, seen: float | None = None) -> None:
        self.say(
            "lost",
            at,
            seat=seat,
            rank=SEATS[seat],
            cause=cause.value,
            how="",
            seen_at=BEGAN + (at if seen is None else seen),
        )

    def resume(self, committed: int, at: float, **details: object) -> None:
        self.say("resume", at, committed=committed, **{"throughput": 1.0, "period_us": 110, "bound_us": 100} | details)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def recovery(self) -> dict[str, float]:
        return {
            phase: round(self.value("recycle_recovery_seconds_sum", phase=phase), 6)
            for phase in ("notice", "regroup", "finish")
        }


@pytest.fixture
def fed() -> Fed:
    return Fed()


def series(fed: Fed) -> set[tuple]:
    return {
        (sample.name, *sorted(sample.labels.items()))
        for metric in fed.metrics.registry.collect()
        for sample in metric.samples
    }


def test_workers_by_state_and_stage(fed):
    def workers() -> tuple:
        return tuple(fed.value("recycle_workers", state=state) for state in ("live", "lost", "left")) + tuple(
            fed.value("recycle_stage_live_workers", stage=stage) for stage in "01"
        )

    assert workers() == (4, 0, 0, 2, 2)
    fed.lost("0.1", 1.0)
    assert workers() == (3, 1, 0, 2, 1)
    fed.say("left", rank=1)
    fed.say("left", rank=2)  # it is lost already
    assert workers() == (2, 1, 1, 1, 1)


def test_who_comes_back_is_live_again(fed):
    def workers() -> tuple:
        return tuple(fed.value("recycle_workers", state=state) for state in ("live", "lost", "left"))

    fed.lost("0.1", 1.0)
    fed.say("left", 1.5, rank=1)
    assert workers() == (2, 1, 1) and fed.value("recycle_rejoins_total") == 0
    fed.say("rejoined", 2.0, seat="0.1", rank=2, step=7)
    assert workers() == (3, 0, 1) and fed.value("recycle_stage_live_workers", stage="1") == 2
    fed.say("rejoined", 3.0, seat="1.0", rank=1, step=8)
    fed.lost("0.1", 4.0)
    assert workers() == (3, 1, 0) and fed.value("recycle_rejoins_total") == 2


def test_failures_and_suspicions_by_cause(fed):
    fed.say("suspected", 1.0, seat="0.1", rank=2, cause="stuck", for_s=3.0)
    fed.say("cleared", 2.0, seat="0.1", rank=2)
    fed.lost("1.1", 3.0, Cause.ERROR)
    assert {cause.value: fed.value("recycle_failures_total", cause=cause.value) for cause in Cause} == {
        cause.value: float(cause is Cause.ERROR) for cause in Cause
    }
    assert fed.value("recycle_suspicions_total", cause="stuck") == 1
    assert fed.value("recycle_suspicions_total", cause="silent") == 0


def test_a_death_is_timed_from_when_it_is_seen(fed):
    fed.resume(0, 1.0)
    fed.committed(1, 2.0)
    fed.lost("0.1", 2.7, seen=2.5)
    fed.resume(1, 3.25)
    assert fed.recovery() == {"notice": 0, "regroup": 0, "finish": 0}
    fed.committed(2, 5.0)
    fed.committed(3, 6.0)
    assert fed.recovery() == {"notice": 0, "regroup": 0.75, "finish": 1.75}
    assert fed.value("recycle_recovery_seconds_count", phase="notice") == 1


def test_an_injected_fault_is_timed_from_when_it_struck(fed):
    fed.say("fault", 2.2, fault="kill 0.1 before 1F0.1@2", seat="0.1", struck_at=BEGAN + 2)
    fed.lost("0.1", 2.5)
    fed.resume(0, 3.0)
    fed.committed(1, 4.0)
    assert fed.recovery() == {"notice": 0.5, "regroup": 0.5, "finish": 1.0}


def test_who_is_given_up_is_timed_from_when_it_began_to_owe(fed):
    fed.say("suspected", 10.0, seat="0.1", rank=2, cause="stuck", for_s=7.0)
    fed.say("suspected", 10.0, seat="1.0", rank=1, cause="stuck", for_s=7.0)
    fed.say("cleared", 12.0, seat="1.0", rank=1)
    fed.lost("0.1", 23.0, Cause.STUCK)
    fed.lost("1.0", 23.0)
    fed.resume(0, 24.0)
    fed.committed(1, 26.0)
    assert fed.recovery() == {"notice": 20, "regroup": 2, "finish": 4}
    assert fed.value("recycle_recovery_seconds_count", phase="finish") == 2


def test_a_second_loss_before_the_first_is_over(fed):
    """Both go on with the same membership; who is lost after that waits for its own."""
    fed.lost("0.1", 1.0)
    fed.lost("1.0", 1.5)
    fed.resume(3, 2.0)
    fed.lost("0.0", 2.5)
    fed.committed(4, 3.0)
    assert fed.recovery() == {"notice": 0, "regroup": 1.5, "finish": 2.0}
    fed.resume(4, 3.25)
    fed.committed(5, 4.0)
    assert fed.recovery() == {"notice": 0, "regroup": 2.25, "finish": 2.75}
    assert fed.value("recycle_recovery_seconds_count", phase="regroup") == 3


def test_a_loaded_checkpoint_leaves_nothing_to_be_timed(fed):
    fed.lost("0.1", 1.0)
    fed.resume(5, 2.0)
    fed.say("loaded", 3.0, step=2)
    for step in range(3, 8):
        fed.committed(step, 10.0 * step)
    assert fed.recovery() == {"notice": 0, "regroup": 0, "finish": 0} and fed.value("recycle_step") == 7


def test_steps_bubbles_and_what_was_redone(fed):
    assert math.isnan(fed.value("recycle_bubble_ratio", stage="1")) and math.isnan(fed.value("recycle_loss"))
    fed.say("loss", 1.0, step=1, loss=2.5)
    fed.committed(1, 1.0)
    fed.committed(2, 1.5, step_s=0.5, redone_s=0.25, stage_bubbles=[0.1, 0.4])
    fed.committed(3, 2.0, step_s=0.5, redone_s=0.5, stage_bubbles=[0.2, 0.3])
    fed.say("batch", step=4, batch=20)
    fed.committed(4, 3.0)
    fed.say("checkpoint", path="saved/x")
    names = ("step", "loss", "step_seconds", "samples_total", "redone_seconds_total", "checkpoints_total")
    assert [fed.value(f"recycle_{name}") for name in names] == [4, 2.5, 0.5, 44, 0.75, 1]
    assert [fed.value("recycle_bubble_ratio", stage=stage) for stage in "01"] == [0.2, 0.3]


def test_the_plan(fed):
    fed.resume(6, 1.0, throughput=0.75, period_us=150, bound_us=120)
    assert [fed.value(f"recycle_{name}") for name in ("step", "plan_bound_ratio", "predicted_throughput_ratio")] == [
        6,
        1.25,
        0.75,
    ]


def ettr(fed: Fed, at: float) -> float:
    fed.now = BEGAN + at
    return fed.value("recycle_ettr_ratio")


def test_the_effective_training_time(fed):
    """Ten steps of 2 s after a first one of 5 s; then a failure, by which one takes 9 s, and the next ones 3 s."""
    assert math.isnan(ettr(fed, 0.0))
    for step in range(1, 12):
        fed.committed(step, 5.0 + 2 * (step - 1))
    assert ettr(fed, 25.0) == pytest.approx(11 * 2 / 25) and ettr(fed, 30.0) == pytest.approx(22 / 30)
    fed.lost("0.1", 26.0)
    fed.committed(12, 34.0)
    fed.committed(13, 37.0)
    assert ettr(fed, 37.0) == pytest.approx(13 * 2 / 37)  # what is measured after a loss is not usual
    fed.say("loaded", 38.0, step=10)
    fed.committed(11, 40.0)
    assert ettr(fed, 40.0) == pytest.approx(11 * 2 / 40)
    fed.say("finished", 44.0, step=11)
    assert ettr(fed, 100.0) == pytest.approx(22 / 44)


def test_the_effective_training_time_counts_samples(fed):
    for step in range(1, 11):
        fed.committed(step, float(step))
    fed.say("batch", 10.0, step=11, batch=16)
    fed.committed(11, 12.0)
    fed.committed(12, 14.0)
    assert ettr(fed, 14.0) == pytest.approx((10 * 8 + 2 * 16) * (1 / 8) / 14)


@pytest.mark.parametrize("to, samples", ((12, 10 * 8 + 2 * 6), (10, 10 * 8), (3, 3 * 8), (0, 0)))
def test_a_load_takes_back_what_its_steps_had(fed, to, samples):
    """Ten whole steps, of 1 s each, and then three without a replica."""
    for step in range(1, 14):
        fed.committed(step, float(step), **{"contributed": [0, 1, 2], "replicas": 4} if step > 10 else {})
    before = ettr(fed, 16.0)
    fed.say("loaded", 14.0, step=to)
    assert ettr(fed, 16.0) == before, "a best model that is loaded at the end leaves all in place"
    fed.committed(to + 1, 15.0)
    assert ettr(fed, 16.0) == pytest.approx((samples / 8 + 1) / 16)


def test_who_is_lost_before_a_step_was_timed_leaves_no_usual_pace(fed):
    fed.lost("0.1", 1.0)
    for step in range(1, 9):
        fed.committed(step, 1.0 + step)
    assert math.isnan(ettr(fed, 9.0))


def test_no_event_adds_a_series(fed):
    before = series(fed)
    for number in range(300):
        fed.say("suspected", seat="0.1", rank=2, cause="silent", for_s=1.0, what=f"it computes 1F0.{number}")
        fed.say(f"kind {number}", path=f"/{number}", rank=number)
        fed.say("left", rank=number)
        fed.committed(number + 1, float(number + 1), stage_bubbles=[0.1, 0.2])
    fed.lost("0.1", 500.0)
    assert series(fed) == before and len(before) < 100


def test_what_is_kept_does_not_grow_with_the_job(fed):
    for step in range(1, 3001):
        fed.committed(step, float(step))
    assert len(fed.metrics._recoveries._known) == 4 and len(fed.metrics._training._undisturbed) == 1000


# --- served ------------------------------------------------------------------------------------------------


def exported(where: str | None) -> tuple[Exporter, list[Event]]:
    said: list[Event] = []
    exporter = Exporter(said.append)
    for kind, details in (
        ("worker", {"rank": 0, "pid": 7}),
        ("start", {"job": asdict(job(metrics=where)), "seats": SEATS}),
        ("loss", {"step": 1, "loss": 0.5}),
    ):
        exporter.take(Event(kind, "", details), 1.0)
    return exporter, said


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read().decode()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]"])
def test_port_0_is_one_that_is_free_and_is_said(address, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    exporter, (said,) = exported(f"{address}:0")
    try:
        assert said.kind == "metrics" and said.details["url"] in said.text and said.details["port"] > 0
        lines = scraped(said.details["url"]).splitlines()
        assert "recycle_loss 0.5" in lines and 'recycle_workers{state="live"} 4.0' in lines
        assert not [line for line in lines if "_created" in line]
    finally:
        exporter.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", said.details["port"])) != 0


def test_who_says_nothing_keeps_nobody_from_scraping():
    exporter, (said,) = exported("127.0.0.1:0")
    try:
        with socket.create_connection(("127.0.0.1", said.details["port"])):
            assert "recycle_loss 0.5" in scraped(said.details["url"])
    finally:
        exporter.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1", "no such host.invalid"])
def test_where_nobody_can_listen_there_is_a_warning(address):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        exporter, (said,) = exported(f"{address}:{(port := taken.getsockname()[1])}")
        exporter.take(Event("loss", "", {"step": 2, "loss": 0.25}), 2.0)
        exporter.close()
    assert said.kind == "warning" and said.text.startswith(f"metrics: can't listen on {address}:{port} (")
    assert "\n" not in said.text


def test_where_nobody_asks_for_metrics_nothing_listens():
    assert exported(None)[1] == []


# --- the board ---------------------------------------------------------------------------------------------


def test_the_board_asks_for_metrics_that_there_are(fed):
    known = {name for name, *_ in series(fed)}
    asked = {name for text in expressions() for name in re.findall(r"recycle_\w+", text)}
    assert asked <= known, asked - known
    assert {metric.name for metric in fed.metrics.registry.collect()} <= {
        re.sub("_(total|sum|count|bucket)$", "", name) for name in asked
    }


def test_the_board_filters_and_names_series_by_labels_that_they_have(fed):
    """Prometheus adds ``instance``, and by its quantile leaves what it is summed by."""
    exported = [(name, {"instance": "", **dict(labels)}) for name, *labels in series(fed)]
    for target in targets():
        shown = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
        for each in re.findall(r"by \((.*?)\)", target["expr"]):
            shown |= set(each.split(", "))
        for name, selector in re.findall(r"(recycle_\w+)\{(.*?)\}", target["expr"]):
            wanted = dict(re.findall(r'(\w+)="(.*?)"', selector))
            filters = set(re.findall(r'(\w+)=~?"', selector))
            assert any(
                name == one and filters | shown <= labels.keys() and wanted.items() <= labels.items()
                for one, labels in exported
            ), f"{target['expr']} {shown}"


def test_the_page_describes_each_metric(fed):
    page = (DOCS / "metrics.md").read_text()
    named = set(re.findall(r"^\| `(recycle_\w+)", page, re.MULTILINE))
    assert named == {metric.name + "_total" * (metric.type == "counter") for metric in fed.metrics.registry.collect()}
    assert all(f"`{cause.value}`" in page for cause in Cause)
