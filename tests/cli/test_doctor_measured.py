"""``recycle doctor`` with a run's costs.json: the bytes that the run has measured are those of its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle_plugin.cli import main
from tests.support.doctor import HEALTHY, MIB, data

STAGE = {
    "weights": 8 * MIB,
    "masters": 0,
    "optimizer": 4 * MIB,  # momentum, of half of the weights
    "frozen": 2 * MIB,
    "gradient": 8 * MIB,
    "largest": MIB,
    "boundary": MIB,
    "device": "cpu",
    "device_bytes": 4096 * MIB,
    "host_bytes": 4096 * MIB,
    "samples": 1,
}
COSTS = {
    "forward": [10_000] * 2,
    "input": [10_000] * 2,
    "weight": [10_000] * 2,
    "activation_bytes": [100 * MIB, 50 * MIB],
    "pending_bytes": [40 * MIB, 60 * MIB],
}
JOB = "--pp 2 --dp 3 --profile costs.json"


def write(**changed: object) -> None:
    """Write costs.json of a job whose second stage is as the first but for what goes to the next one."""
    first = STAGE | changed
    Path("costs.json").write_text(json.dumps(COSTS | {"memory": [first, first | {"boundary": 0}]}))


@pytest.fixture
def measured(doctor):
    """``measured(**changed)``: what doctor says as data of a run with these bytes."""

    def run(config: dict | None = None, **changed: object) -> dict:
        write(**changed)
        return data(doctor, config or {**HEALTHY, "recycle": {"enabled": True, "activation_cap": 3}}, JOB)

    return run


def test_the_table_has_what_the_run_has_measured(measured):
    found = measured()
    first, last = found["memory"]["stages"]
    assert found["memory"]["measured"] and found["memory"]["host"] == 4096 * MIB and found["change"] == []
    held = 2 * 9 * MIB + 3 * 100 * MIB + (40 + 1 + 2) * MIB  # kept, activations, and what an instruction needs
    assert first == {
        "each": 100 * MIB,
        "state": 14 * MIB,
        "undo": 12 * MIB,
        "sums": 8 * MIB,
        "contributions": 8 * MIB,
        "kept": 2 * 9 * MIB,
        "activations": 300 * MIB,
        "working": 43 * MIB,
        "between": 34 * MIB,
        "computing": 42 * MIB + held,
        "summing": 42 * MIB + 8 * MIB,
        "stepping": 34 * MIB + 2 * MIB,
        "today": 42 * MIB + held - 2 * 3 * MIB,
        "peak": 42 * MIB + held,
        "host": 2 * 9 * MIB,
    }
    assert (last["each"], last["kept"], last["working"]) == (60 * MIB, 2 * 9 * MIB, 51 * MIB)


def test_without_copies_there_are_none(measured):
    config = {**HEALTHY, "recycle": {"enabled": True, "undo": "inverse"}}
    assert measured(config)["memory"]["stages"][0]["undo"] == 0


def test_masters_are_copied_in_the_place_of_weights(measured):
    config = {**HEALTHY, "bf16": {"enabled": True}}
    row = measured(config, weights=4 * MIB, masters=8 * MIB)["memory"]["stages"][0]
    assert (row["state"], row["undo"], row["computing"] - row["summing"]) == (
        18 * MIB,
        12 * MIB,
        row["kept"] + row["activations"] + row["working"] + 4 * MIB - 8 * MIB,  # new gradients; the second buffer
    )


def test_a_host_that_is_too_small_is_told_of_and_a_device(measured):
    need = sum(row["peak"] for row in measured()["memory"]["stages"]) * 3
    assert measured(host_bytes=need)["change"] == []
    (line,) = measured(host_bytes=need - 1)["change"]
    assert line.startswith("this host: its workers take ") and "put fewer on it" in line
    (line,) = measured(device="cuda", device_bytes=300 * MIB)["change"]
    assert line == "stage 0: 0.39 GiB of 0.29 GiB; use more stages, or set recycle.activation_cap to 1"
    (line,) = measured(device="cuda", host_bytes=100 * MIB)["change"]
    assert line.startswith("this host: its workers take 0.11 GiB together, of 100.00 MiB;"), (
        "what is sent is kept there"
    )


def test_it_is_said_whose_bytes_these_are_and_of_what_else(doctor, surroundings):
    write(samples=4)
    code, text = doctor({**HEALTHY, "bf16": {"enabled": True}}, JOB)
    assert code == 0 and "measured on cpu by the run of the costs: state, gradients" in text
    assert "the host has 4.00 GiB for all its workers" in text
    assert "measured with micro-batches of 4, and the job's have 1" in text
    assert "measured without fp32 masters, and the job is in bf16" in text
    Path("costs.json").write_text(json.dumps(COSTS))
    assert "bytes of each stage: not known without a run" in doctor(HEALTHY, JOB)[1]


@pytest.mark.parametrize(
    "memory, said",
    (
        ([STAGE], "memory is no list with an object for each of 2 stages"),
        ("much", "memory is no list with an object for each of 2 stages"),
        ([STAGE, 7], "memory has an entry whose keys are not boundary, device,"),
        ([STAGE, {**STAGE, "more": 1}], "memory has an entry whose keys are not boundary, device,"),
        ([STAGE, {**STAGE, "weights": -1}], "memory.weights is -1: write a whole number from 0 to 10000"),
        ([STAGE, {**STAGE, "host_bytes": 10**400}], "memory.host_bytes is 10000"),
        ([STAGE, {**STAGE, "device": None}], "memory.device is None: write a name"),
    ),
)
def test_what_is_no_measured_memory_is_refused_in_one_line(surroundings, tmp_path, monkeypatch, capsys, memory, said):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(HEALTHY))
    Path("costs.json").write_text(json.dumps(COSTS | {"memory": memory}))
    assert main(["doctor", "ds.json", *JOB.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    Path("costs.json").write_text(json.dumps({**COSTS, "activation_bytes": [], "memory": [STAGE] * 2}))
    assert main(["doctor", "ds.json", *JOB.split()]) == 2
    assert "memory needs activation_bytes and pending_bytes" in capsys.readouterr().err
