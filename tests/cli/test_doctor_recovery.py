"""``recycle doctor`` of jobs that log: which way each loss goes, with the planner's figures."""

from __future__ import annotations

import pytest

from recycle_plugin.commands import doctor_recovery
from recycle_plugin.commands.doctor_recovery import BEFORE_S, EVERY, shared
from recycle_plugin.core.vocabulary import profile
from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner.log_line import STORAGE_BYTES_PER_S, expected
from recycle_plugin.planner.log_selection import Line, choose
from recycle_plugin.settings.schema import Settings
from tests.support.doctor import HEALTHY, MIB, data, medium, small_profile

LOGS = {**HEALTHY, "recycle": {"enabled": True, "checkpoint": {}, "log": {}}}


def ways(found: dict) -> dict[str, tuple[str, list[float]]]:
    return {row["lost"]: (row["way"], row["seconds"]) for row in found["recovery"]["ways"]}


def test_a_job_that_logs_nothing_has_no_such_section(doctor) -> None:
    assert "recovery" not in data(doctor, HEALTHY, "--pp 2 --dp 2")


def test_without_a_profile_times_are_those_of_the_costs_and_bytes_are_not_known(doctor) -> None:
    """Six micro-batches of 3 ms on each stage; a step of two stages takes 21 ms."""
    found = data(doctor, LOGS, "--pp 2 --dp 1")
    replayed = [BEFORE_S + every / 2 * 6 * 0.003 for every in EVERY]
    step_s = found["slowdown"]["cases"][0]["period_us"] / 1e6
    again = [BEFORE_S + every / 2 * step_s for every in EVERY]
    assert ways(found) == {
        "the last worker of any stage": ("replay", pytest.approx(replayed, abs=1e-3)),
        "stages that can't be replayed": ("end", pytest.approx(again, abs=1e-3)),
        "the host of rank 0": ("end", pytest.approx(again, abs=1e-3)),
    }
    assert "boundary_bytes" not in found["recovery"] and found["recovery"]["start_up"] == "assumed"
    _, text = doctor(LOGS, "--pp 2 --dp 1")
    assert "assumed: 10 s until the next process" in text and "not known without a profile" in text


def test_with_replicas_a_loss_is_rerouted_first_and_one_worker_replays_the_work_of_all(doctor) -> None:
    alone, two = (ways(data(doctor, LOGS, f"--pp 3 --dp {replicas}")) for replicas in (1, 2))
    assert "a worker whose stage has others" not in alone
    way, (seconds, _) = two["a worker whose stage has others"]
    assert way == "reroute" and 0 < seconds < BEFORE_S, "slower until the next process is there, and no more"
    of_one, of_two = (found["the last worker of any stage"][1][1] - BEFORE_S for found in (alone, two))
    assert of_two == pytest.approx(2 * of_one, abs=0.01)
    assert alone["two neighbours, at worst"][1][1] - BEFORE_S == pytest.approx(2 * of_one, abs=0.01)


def test_bytes_and_the_choice_are_the_planners(doctor) -> None:
    made = small_profile(None)
    profile.write(made, "small.json")
    found = data(doctor, LOGS, "--pp 4 --dp 1 --profile small.json")["recovery"]
    assert found["boundary_bytes"] == 2 * 6 * MIB and found["disk_bytes"] is None
    line = Line(
        recompute_s=(6 * 0.03 + 0.0005,) * 4,
        boundary_bytes=(found["boundary_bytes"],) * 3,
        failure=(0.25,) * 4,
        hosts=("one",) * 4,
        load_s=max(made.state_bytes(4)) / STORAGE_BYTES_PER_S,
        every=EVERY[1],
        network_bytes_per_s=made.across.bytes_per_us * 1e6,
        read_bytes_per_s=STORAGE_BYTES_PER_S,
    )
    assert found["chosen"][1] == doctor_recovery._as_data(choose(line, "all"))
    replayed = next(row for row in found["ways"] if row["lost"] == "the last worker of stages 1-2")
    assert replayed["seconds"][1] == pytest.approx(BEFORE_S + line.recovery_s(1, 2), abs=1e-3)


@pytest.mark.parametrize("free, fits", [(10**12, True), (3 * 10**7, False)])
def test_a_disk_that_is_too_small_has_to_change(doctor, tmp_path, monkeypatch, free, fits) -> None:
    profile.write(small_profile(None), "small.json")
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(doctor_recovery.shutil, "disk_usage", lambda place: usage)
    config = {**LOGS, "recycle": {**LOGS["recycle"], "log": {"folder": str(tmp_path / "not yet" / "there")}}}
    found = data(doctor, config, "--pp 4 --dp 1 --profile small.json")
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
    _, text = doctor(LOGS, f"--pp 12 --dp 2 {medium('medium.json')}")
    section = text.split("\nRecovery\n")[1].split("\n\n")[0].splitlines()
    assert len(section) > 10 and max(map(len, section)) <= 100


def logging(**log: object) -> dict:
    return {**HEALTHY, "recycle": {"enabled": True, "checkpoint": {}, "log": log}}


def test_what_a_list_leaves_out_replays_along(doctor) -> None:
    """Six micro-batches of 3 ms on each stage; without a profile too."""
    config = logging(boundaries=[1])
    found = data(doctor, config, "--pp 4 --dp 1")
    taken = pytest.approx([BEFORE_S + every / 2 * 2 * 6 * 0.003 for every in EVERY], abs=1e-3)
    assert ways(found)["the last worker of any stage"] == ("replay", taken)
    text = " ".join(doctor(config, "--pp 4 --dp 1")[1].split())
    assert "logged: 1|2; stages 0 to 1 and 2 to 3 replay together" in text
    assert "two neighbours" in text and "not done yet" not in text
    assert "stages that replay together are replayed without it" in text


def test_it_says_the_line_that_the_job_will_say(doctor) -> None:
    made = small_profile(None)
    profile.write(made, "small.json")
    budget = EVERY[0] * 2 * 6 * MIB
    found = data(doctor, logging(boundaries="auto", budget=budget), "--pp 4 --dp 1 --profile small.json")
    assert not found["change"] and found["recovery"]["boundaries"] == "auto" and found["recovery"]["budget"] == budget
    assert [len(each["logged"]) for each in found["recovery"]["chosen"]] == [1, 0]
    _, text = doctor(logging(boundaries="auto", budget=budget), "--pp 4 --dp 1 --profile small.json")
    settings = Settings.from_section({"costs": "small.json"})
    shape = Topology(1, 4, 6)
    for every in EVERY:
        line = expected(settings.cost_model(shape, 1), made, True, 6, ("h",) * 4, every)
        assert str(choose(line, "auto", budget)) in " ".join(text.split())


def test_a_budget_that_is_too_small_has_to_change(doctor) -> None:
    profile.write(small_profile(None), "small.json")
    budget = 3 * EVERY[0] * 2 * 6 * MIB
    for size, change in ((budget, f"every {EVERY[1]} steps"), (budget - 1, f"every {EVERY[0]} steps")):
        found = data(doctor, logging(budget=size), "--pp 4 --dp 1 --profile small.json")
        (line,) = found["change"]
        assert change in line and "recycle.log.budget is" in line and 'recycle.log.boundaries to "auto"' in line


def test_only_boundaries_between_hosts(doctor) -> None:
    found = data(doctor, logging(boundaries="hosts"), f"--pp 4 --dp 1 {medium('medium.json')}", {"a": 2, "b": 2})
    assert [each["logged"] for each in found["recovery"]["chosen"]] == [[1], [1]]


def test_a_boundary_that_there_is_not_is_bad_input(doctor, capsys) -> None:
    assert doctor(logging(boundaries=[3]), "--pp 4 --dp 1")[0] == 2


@pytest.mark.parametrize(
    ("size", "live", "limit", "found"),
    (
        (1, 3, None, (3, 0.25)),
        (1, 9, None, (7, 0.125)),
        (1, 3, 1, (1, 0.5)),
        (1, 3, 0, (0, 1.0)),
        (4, 3, None, (1, 0.5)),
        (3, 2, None, (2, 0.5)),
    ),
)
def test_blocks_are_shared_as_they_are_dealt(size, live, limit, found):
    """Two replicas of four micro-batches."""
    assert shared(Blocks(Topology(2, 3, 4), size), live, limit) == found
