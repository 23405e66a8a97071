"""``recycle doctor`` of jobs that log: what is logged, and whether there is room for it."""

from __future__ import annotations

import pytest

from recycle_plugin.commands import doctor_recovery
from recycle_plugin.commands.doctor_recovery import EVERY
from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner.log_line import STORAGE_BYTES_PER_S, expected
from recycle_plugin.planner.log_selection import Line, choose
from recycle_plugin.settings.schema import Settings
from tests.support.doctor import HEALTHY, MIB, data, of_a_run

LOGS = {**HEALTHY, "recycle": {"enabled": True, "checkpoint": {}, "log": {}}}


def test_a_job_that_logs_nothing_has_no_such_section(doctor) -> None:
    assert "recovery" not in data(doctor, HEALTHY, "--pp 2 --dp 2")


def test_bytes_and_the_choice_are_the_planners(doctor) -> None:
    found = data(doctor, LOGS, f"--pp 4 --dp 1 {of_a_run(stages=4)}")["recovery"]
    assert found["boundary_bytes"] == [2 * 6 * MIB] * 3 and found["disk_bytes"] is None
    line = Line(
        recompute_s=(6 * 0.06 + 0.001,) * 4,
        boundary_bytes=tuple(found["boundary_bytes"]),
        failure=(0.25,) * 4,
        hosts=("one",) * 4,
        load_s=24 * MIB / STORAGE_BYTES_PER_S,
        every=EVERY[1],
        network_bytes_per_s=STORAGE_BYTES_PER_S,
        read_bytes_per_s=STORAGE_BYTES_PER_S,
    )
    assert found["chosen"][1] == doctor_recovery._as_data(choose(line, "all"))


@pytest.mark.parametrize("free, fits", [(10**12, True), (3 * 10**7, False)])
def test_a_disk_that_is_too_small_has_to_change(doctor, tmp_path, monkeypatch, free, fits) -> None:
    named = of_a_run(stages=4)
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(doctor_recovery.shutil, "disk_usage", lambda place: usage)
    config = {**LOGS, "recycle": {**LOGS["recycle"], "log": {"folder": str(tmp_path / "not yet" / "there")}}}
    found = data(doctor, config, f"--pp 4 --dp 1 {named}")
    assert found["recovery"]["disk_bytes"] == free
    assert [each["fits"] for each in found["recovery"]["chosen"]] == [fits, fits]
    assert any("the log takes" in line for line in found["change"]) != fits


@pytest.mark.parametrize(
    "settings, blocks, helpers, said",
    [
        ({}, 6, 1, "if 1 of the 1 live ones help, and share 6 blocks of up to 1 micro-batches"),
        ({"exact": True}, 1, 0, "no worker can help with a replay: recycle.exact adds all 6 micro-batches"),
        ({"exact": 4}, 2, 1, "and share 2 blocks of up to 4 micro-batches"),
        ({"log": {"helpers": 0}}, 6, 0, "no worker helps with a replay: recycle.log.helpers is 0"),
    ],
)
def test_the_help_that_a_replay_gets_is_said(doctor, settings, blocks, helpers, said) -> None:
    config = {**LOGS, "recycle": {**LOGS["recycle"], **settings}}
    found = data(doctor, config, "--pp 2 --dp 1")["recovery"]["help"]
    assert found == {"blocks": blocks, "helpers": helpers}
    assert said in " ".join(doctor(config, "--pp 2 --dp 1")[1].split())


def test_it_fits_a_page(doctor) -> None:
    _, text = doctor(LOGS, f"--pp 12 --dp 2 {of_a_run(80 << 30, 12)}")
    section = text.split("\nRecovery\n")[1].split("\n\n")[0].splitlines()
    assert len(section) > 6 and max(map(len, section)) <= 100


def logging(**log: object) -> dict:
    return {**HEALTHY, "recycle": {"enabled": True, "checkpoint": {}, "log": log}}


def test_what_a_list_leaves_out_replays_along(doctor) -> None:
    """Without a run too."""
    text = " ".join(doctor(logging(boundaries=[1]), "--pp 4 --dp 1")[1].split())
    assert "logged: 1|2; stages 0 to 1 and 2 to 3 replay together" in text
    assert "stages that replay together are replayed without it" in text


def test_it_says_the_line_that_the_job_will_say(doctor) -> None:
    named = of_a_run(stages=4)
    budget = EVERY[0] * 2 * 6 * MIB
    found = data(doctor, logging(boundaries="auto", budget=budget), f"--pp 4 --dp 1 {named}")
    assert not found["change"] and found["recovery"]["boundaries"] == "auto" and found["recovery"]["budget"] == budget
    assert [len(each["logged"]) for each in found["recovery"]["chosen"]] == [1, 0]
    _, text = doctor(logging(boundaries="auto", budget=budget), f"--pp 4 --dp 1 {named}")
    given = Settings.from_section({"costs": "costs.json"}).given_costs()
    for every in EVERY:
        line = expected(*given, True, 6, ("h",) * 4, every)
        assert str(choose(line, "auto", budget)) in " ".join(text.split())


def test_a_budget_that_is_too_small_has_to_change(doctor) -> None:
    named = of_a_run(stages=4)
    budget = 3 * EVERY[0] * 2 * 6 * MIB
    for size, change in ((budget, f"every {EVERY[1]} steps"), (budget - 1, f"every {EVERY[0]} steps")):
        found = data(doctor, logging(budget=size), f"--pp 4 --dp 1 {named}")
        (line,) = found["change"]
        assert change in line and "recycle.log.budget is" in line and 'recycle.log.boundaries to "auto"' in line


def test_only_boundaries_between_hosts(doctor) -> None:
    found = data(doctor, logging(boundaries="hosts"), f"--pp 4 --dp 1 {of_a_run(stages=4)}", {"a": 2, "b": 2})
    assert [each["logged"] for each in found["recovery"]["chosen"]] == [[1], [1]]


def test_a_boundary_that_there_is_not_is_bad_input(doctor, capsys) -> None:
    assert doctor(logging(boundaries=[3]), "--pp 4 --dp 1")[0] == 2


@pytest.mark.parametrize(
    ("size", "live", "limit", "found"),
    (
        (1, 3, None, (3, 2)),
        (1, 9, None, (7, 1)),
        (1, 3, 1, (1, 4)),
        (1, 3, 0, (0, 8)),
        (4, 3, None, (1, 4)),
        (3, 2, None, (2, 4)),
    ),
)
def test_blocks_are_shared_as_they_are_dealt(size, live, limit, found):
    """Two replicas of four micro-batches."""
    assert Blocks(Topology(2, 3, 4), size).shared(live, limit) == found
