"""What a coordinator's process tells people where it goes on in another's place."""

from __future__ import annotations

import asyncio
import json
import os
import re
from dataclasses import asdict

import pytest

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.runtime.control.operator_access import FILE, OperatorAccess
from recycle_plugin.runtime.processes.telling import LOG, SLICE, Telling
from tests.support.membership import job
from tests.support.secret import SECRET

SEATS = {"0.0": 0, "1.0": 1, "0.1": 2, "1.1": 3}


@pytest.fixture
def telling(tmp_path):
    """``telling()`` is another process's, in effect."""
    made: list[Telling] = []

    def tell() -> Telling:
        made.append(Telling(("127.0.0.1", 1), SECRET, os.getpid(), lambda event: None))
        made[-1].run_dir = lambda: str(tmp_path)
        return made[-1]

    yield tell
    for each in made:
        each.close()


def start_of(folder, **settings: object) -> Event:
    return Event("start", "it starts", {"job": asdict(job(run_dir=str(folder), **settings)), "seats": SEATS})


def logged(folder) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / LOG).read_text().splitlines()]


def test_what_the_one_before_has_told_is_not_told_again(telling, tmp_path):
    first, start = telling(), start_of(tmp_path)
    for event in (start, Event("lost", "one is lost"), Event("note", "cut off")):
        first.say(event, 1.0)
    first.close()
    with (tmp_path / LOG).open("ab") as log:
        log.truncate(log.tell() - 5)  # it was killed while it wrote
    second = telling()
    second.go_on(start, 2.0)
    for event in (Event("lost", "one is lost"), Event("lost", "another is lost")):
        second.say_unless_said(event, 2.0)
    second.close()
    lines = (tmp_path / LOG).read_text()
    assert lines.count("one is lost") == lines.count("another is lost") == 1


def test_metrics_go_on_with_what_was_told_before(telling, tmp_path):
    start = start_of(tmp_path, metrics="127.0.0.1:0")
    first, second = telling(), telling()
    lost = {"seat": "0.1", "rank": 2, "cause": "died", "how": "", "seen_at": 1.0}
    for event in (start, Event("lost", "one is lost", lost)):
        first.say(event, 1.0)
    second.go_on(start, 2.0)
    values = [
        each._exporter._metrics.registry.get_sample_value("recycle_workers", {"state": "lost"})
        for each in (first, second)
    ]
    assert values == [1.0, 1.0]


def test_an_earlier_job_of_the_same_folder_is_not_counted_nor_taken_for_this_one(telling, tmp_path):
    start, worker = start_of(tmp_path, metrics="127.0.0.1:0"), Event("worker", "worker 2", {"rank": 2, "pid": 7})
    lost = Event("lost", "one is lost", {"seat": "0.1", "rank": 2, "cause": "died", "how": "", "seen_at": 1.0})
    first, second, third = telling(), telling(), telling()
    for event in (start, lost, committed(1)):
        first.say(event, 1.0)
    first.close()
    for event in (worker, start, committed(1)):
        second.say(event, 2.0)
    third.go_on(start, 3.0)
    registry = third._exporter._metrics.registry
    assert registry.get_sample_value("recycle_workers", {"state": "lost"}) == 0.0
    assert registry.get_sample_value("recycle_samples_total") == start.details["job"]["batch"]
    assert logged(tmp_path).count("one is lost") == 1
    third.say_unless_said(lost, 3.0)
    third.say_unless_said(worker, 3.0)
    assert logged(tmp_path).count("one is lost") == 2 and logged(tmp_path).count("worker 2") == 1


async def test_a_long_log_is_counted_while_the_job_goes_on(telling, tmp_path):
    """And what comes meanwhile behind all that."""
    start = start_of(tmp_path, metrics="127.0.0.1:0")
    first, second, steps = telling(), telling(), 5 * SLICE
    first.say(start, 1.0)
    for step in range(1, steps + 1):
        first.say(committed(step), 1.0 + step)
    second.go_on(start, 1.0 + steps)
    registry = second._exporter._metrics.registry
    assert registry.get_sample_value("recycle_step") < steps
    second.say(committed(steps + 1), 2.0 + steps)
    assert registry.get_sample_value("recycle_step") < steps
    while second._past is not None:
        await asyncio.sleep(0)
    assert registry.get_sample_value("recycle_step") == steps + 1


def committed(step: int) -> Event:
    return Event("committed", f"step {step} committed", {"step": step, "workers": 4, "redone_s": 0.0, "bubbles": []})


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"port": "x"}, "it.port is 'x', and it has to be int"),
        ({"port": 99999}, "it can't be: 99999 is no port"),
        ({"tls": 7}, "it.tls is 7, and it has to be str | None"),
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
    ],
)
def test_a_way_to_a_job_that_is_malformed_is_refused_in_one_line(tmp_path, changed, said):
    access = OperatorAccess(("127.0.0.1", 1), SECRET)
    assert access.write(tmp_path) == "" and OperatorAccess.read(tmp_path).address == access.address
    path = tmp_path / FILE
    path.write_text(changed if isinstance(changed, str) else json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path} is not a file of a job')}: {re.escape(said)}$"):
        OperatorAccess.read(tmp_path)
