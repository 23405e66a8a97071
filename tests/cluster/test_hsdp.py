"""Replicas of two processes each that share a model by torch's fully_shard, and checkpoints of torch's own format."""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from tests.support.cluster import Result, Run
from tests.support.hosts import HostsRun
from tests.support.jobs import PLAIN, Shape, assert_one_line
from tests.support.launching import launching

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process without groups
SCRIPT = "tests/jobs/hsdp.py"
STEPS, HELD = 12, 8
NOTHING_ELSE = {
    "steps": STEPS,
    "held": 0,
    "clip": 0.0,
    "half": False,
    "dropout": 0.0,
    "evaluate": 0,
    "shards": 2,
    "save": 0,
    "full": None,
    "load": "",
    "lone": 0,
    "wrong": "",
}


@pytest.fixture
def vehicle():
    return PLAIN


def started(launch, folder: Path, settings: dict[str, Any] | None = None, **more: Any) -> Run:
    """2 replicas of two processes, or of so many ``shards``."""
    job = NOTHING_ELSE | more | {"folder": str(folder)}
    job["settings"] = {"run_dir": str(folder), "report": False, "check_replicas": 1} | (settings or {})
    return launch(shape=Shape(2, job["shards"]), script=SCRIPT, RECYCLE_TEST_HSDP=json.dumps(job))


def ended_well(result: Result, lost: str = "") -> Result:
    """Without errors; of a seat that is lost both processes are."""
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    assert [event["seat"] for event in result.of("lost")] == [lost] * 2 * bool(lost), result.output[-6000:]
    return result


def alike(result: Result) -> None:
    """Replicas hold the same bits of each shard, and shards differ."""
    digests = {(each["shard"], each["digest"]) for each in result.records.values()}
    assert len(digests) == 2, digests


@pytest.mark.some_of(4)
@pytest.mark.parametrize(
    "kill",
    (
        None,
        "kill 1.0 before 0F1.1@4",
        "kill 1.0 before 0B1.1@4",
        "kill 0.0 before 0REDUCE@4",
        "kill 0.0 after 0REDUCE@4",
        "kill 1.0 after 0STEP@4",
    ),
)
@pytest.mark.parametrize("clip", ("", "sync", "validate"))
def test_whoever_dies_it_trains_what_one_process_trains(launch, tmp_path, kill, clip):
    """Also where gradients are clipped by the norm over the replica's processes, which every step is, and where a step
    is taken back for that.  What a script reads between steps is the weights of a whole step.
    """
    settings = {"faults": [kill] * bool(kill), "rejoin": "never"} | ({"clip": clip} if clip else {})
    more = {"clip": 0.3 * bool(clip), "evaluate": 1}
    result = ended_well(started(launch, tmp_path / "run0", settings, **more).finish(), kill[5:8] if kill else "")
    alike(result)
    for each in result.records.values():
        assert each["losses"] == pytest.approx(each["alone"], abs=5e-6) and each["weights_differ"] < 5e-6
        assert each["evaluations"] == pytest.approx(each["evaluated"], abs=5e-6) and each["torn"] == 0
    assert len(result.of("rejected")) == STEPS * (clip == "validate")


def test_a_replica_comes_back_to_the_shards_of_its_peers(launch, tmp_path):
    run = started(launch, tmp_path / "run0", {"faults": ["kill 1.0 before 0B1.1@4"]}, steps=40, held=HELD, evaluate=2)
    run.hear("newcomer", 2)
    (tmp_path / "run0" / "go").touch()
    result = ended_well(run.finish(), "1.0")
    alike(result)
    assert {rank: each["incarnation"] for rank, each in result.records.items()} == {0: 0, 1: 0, 2: 1, 3: 1}
    for each in result.records.values():
        assert each["losses"] == pytest.approx(each["alone"], abs=5e-6) and each["weights_differ"] < 5e-6
        assert len(each["evaluations"]) >= 5
        for step, value in each["evaluations"].items():
            assert value == pytest.approx(each["evaluated"][step], abs=5e-6), step


def test_a_batch_shrinks_as_long_as_a_replica_is_out(launch, tmp_path):
    settings = {"unit": "replica", "batch": "shrink", "rejoin": "never", "faults": ["kill 1.0 before 0B1.1@4"]}
    result = ended_well(started(launch, tmp_path / "run0", settings, lone=4).finish(), "1.0")
    alike(result)
    for each in result.records.values():
        assert each["losses"] == pytest.approx(each["alone"], abs=5e-6) and each["weights_differ"] < 5e-6


@pytest.mark.parametrize("more, tolerance", [({"dropout": 0.3}, 5e-6), ({"half": True}, 2e-2)])
def test_a_survivor_draws_and_rounds_as_the_lost_one(launch, tmp_path, more, tolerance):
    """Each process of a replica has dropout masks of its own.  In bf16 the order of sums shows."""
    losses = []
    for number, faults in enumerate(([], ["kill 1.0 before 0F1.1@4"])):
        run = started(launch, tmp_path / f"run{number}", {"faults": faults, "rejoin": "never"}, **more)
        result = ended_well(run.finish(), "1.0" * len(faults))
        alike(result)
        masks = {each["shard"]: each["mask"] for each in result.records.values() if each["mask"]}
        assert not masks or masks[0] != masks[1]
        assert bool(masks) == ("dropout" in more)
        losses.append(result.losses)
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"wrong": "mesh"}, "fully_shard over a mesh of the script's own: give it the processes of one replica"),
        ({"wrong": "unused"}, "replica_mesh(…) without fully_shard: call fully_shard(module, mesh=replica_mesh(…))"),
        ({"wrong": "rest"}, "4.weight is trained but not sharded, so its gradients would not be added up"),
        ({"wrong": "optimizer"}, "Adafactor with fully_shard is not supported yet"),
        ({"wrong": "compiled"}, "0 is compiled: layers whose backward is split"),
        ({"wrong": "freeze"}, "0.bias is frozen or thawed after Replicas(…) was made"),
        ({"wrong": "assign"}, "0.weight is another tensor than when Replicas(…) was made"),
        (
            {"settings": {"log": {}, "checkpoint": {}}},
            "recycle.log with fully_shard: the logs of several workers of one seat",
        ),
        ({"shards": 1, "wrong": "optimizer"}, "Adafactor with dcp=True is not supported yet"),
    ],
)
def test_what_does_not_work_is_said_in_a_line(launch, tmp_path, more, said):
    assert_one_line(started(launch, tmp_path / "run0", **more).finish(), said)


# --- checkpoints ---------------------------------------------------------------------------------------------


def stock() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A script's model and optimizer, without the plugin and in one process."""
    layers = [nn.Linear(8, 13), nn.Tanh(), nn.Dropout(0.0), nn.Linear(13, 6), nn.LayerNorm(6), nn.Linear(6, 1)]
    model = nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=0.5)


def loaded(folder: Path) -> dict[str, Any]:
    """What a stock script has after it has loaded a checkpoint, by torch's own functions."""
    model, optimizer = stock()
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    values = {name: each.detach() for name, each in model.named_parameters()}
    kept = {(name, kind): one for name, each in model.named_parameters() for kind, one in optimizer.state[each].items()}
    return {**values, **kept, "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_loses_nothing_and_the_job_goes_on(launch, tmp_path, full):
    """All ranks are told in a line, whoever could not write, and the next attempt is whole."""
    folder = tmp_path / "saved"
    result = ended_well(started(launch, tmp_path / "run0", save=[4, str(folder)], full=full).finish())
    (said,) = {record["refused"] for record in result.records.values()}
    assert "has failed" in said and f"(rank {full})" in said and "\n" not in said, said
    assert [*folder.glob(".*")] == [] and loaded(folder / "global_step4")
    assert len(result.losses) == STEPS and all(record["weights_differ"] < 5e-6 for record in result.records.values())


def test_a_stock_script_loads_what_is_saved_and_any_number_of_processes_goes_on(launch, tmp_path):
    """Saved while a replica is out; loaded by one process without the plugin, by as many processes, by replicas of
    three, and by replicas of one, which save the same again.
    """
    settings = {"faults": ["kill 0.0 before 0F0.1@4"], "rejoin": "never"}
    saved = tmp_path / "saved" / "global_step6"
    ended_well(started(launch, tmp_path / "run0", settings, save=[6, str(saved.parent)]).finish(), "0.0")
    assert {file.name for file in saved.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    there = loaded(saved)
    assert there["lr"] == torch.tensor(1e-2) and there["0.weight", "step"] == 6 and there["0.weight", "exp_avg"].any()
    second = ended_well(started(launch, tmp_path / "run1", load=str(saved.parent)).finish())
    for each in second.records.values():
        assert each["losses"] == pytest.approx(each["alone"][6:], abs=5e-6) and each["weights_differ"] < 5e-6
    for shards in (3, 1):
        again = tmp_path / f"again{shards}"
        more = {"shards": shards, "steps": 6, "load": str(saved.parent), "save": [6, str(again)]}
        ended_well(started(launch, tmp_path / f"run{shards + 1}", **more).finish())
        assert same(loaded(again / "global_step6"), there)


def test_a_stock_checkpoint_is_gone_on_from(launch, tmp_path):
    model, optimizer = stock()
    for _ in range(3):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "saved" / "stock")
    (tmp_path / "saved" / "latest").write_text("stock")
    more = {"steps": 0, "load": str(tmp_path / "saved"), "save": [0, str(tmp_path / "again")]}
    ended_well(started(launch, tmp_path / "run0", **more).finish())
    assert same(loaded(tmp_path / "again" / "global_step0"), loaded(tmp_path / "saved" / "stock"))


@pytest.mark.parametrize("where", ("checkpoint.file:3", "checkpoint.publish:2"))
def test_a_death_while_one_is_written_leaves_the_last_whole_one(launch, tmp_path, where):
    """In the background, before every fourth step; the one that is lost is no checkpoint, and others follow."""
    saved = tmp_path / "saved"
    settings = {"checkpoint": {"every": 4, "keep": 9}, "checkpoint_dir": str(saved), "faults": [f"kill 0.0 at {where}"]}
    result = ended_well(started(launch, tmp_path / "run0", settings | {"rejoin": "never"}, steps=20).finish(), "0.0")
    assert len(result.of("checkpoint")) >= 2
    for folder in saved.glob("automatic_step*"):
        assert loaded(folder)["0.weight", "step"] == int(folder.name.removeprefix("automatic_step"))
    second = ended_well(started(launch, tmp_path / "run1", load=str(saved), steps=20).finish())
    for each in second.records.values():
        assert each["losses"] == pytest.approx(each["alone"][20 - len(each["losses"]) :], abs=5e-6)


@pytest.mark.parametrize(
    "change, said",
    [
        ("damage", "is damaged, incomplete, or not of such a job; load another one"),
        ("shape", "is of another model: its 0.weight has shape (2, 2), and here it is (13, 8)"),
        ("names", "is of another model, without model.0.weight"),
        ("dtype", "is of another model: its 0.weight is torch.float64, and here it is torch.float32"),
        ("groups", "is of an optimizer with 2 parameter groups, and here it has 1; give the same"),
        ("parameters", "is of an optimizer with other parameters: 5.weight is in group 0 of this one alone"),
        ("none", ".metadata is missing; name a folder that save() has written to"),
    ],
)
def test_what_can_not_be_loaded_is_said_in_a_line(launch, tmp_path, change, said):
    folder = tmp_path / "saved" / "stock"
    model = stock()[0]
    weights = {name: torch.full_like(each, 7.0) for name, each in model.state_dict().items()}
    first = weights.pop("0.weight")
    if change != "names":
        weights["0.weight"] = first[:2, :2].clone() if change == "shape" else first
    if change == "dtype":
        weights["0.weight"] = first.double()
    parts = [*model.parameters()]
    groups = {
        "groups": [{"params": parts[:2]}, {"params": parts[2:]}],
        "parameters": [{"params": parts[:-2] + parts[-1:]}],
    }
    states = get_optimizer_state_dict(model, torch.optim.Adam(groups.get(change, parts)))
    if change != "none":
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    (tmp_path / "saved").mkdir(exist_ok=True)
    (tmp_path / "saved" / "latest").write_text("stock")
    if change == "damage":
        (file,) = folder.glob("*.distcp")
        seven = struct.pack("f", 7.0)
        file.write_bytes(file.read_bytes().replace(seven, struct.pack("f", 6.0), 1))
    assert_one_line(started(launch, tmp_path / "run0", load=str(tmp_path / "saved")).finish(), said)


# --- on several hosts: network namespaces ---------------------------------------------------------------


@pytest.fixture
def launch_on_hosts(plain_server, tmp_path, four):
    with launching(plain_server, tmp_path, partial(HostsRun, four), PLAIN) as launch:
        yield launch


@pytest.mark.parametrize("dies", ("delta", "alpha"))
def test_on_several_hosts_whichever_host_dies_the_other_replica_trains_on(launch_on_hosts, tmp_path, dies):
    """Also that of the coordinator, as soon as another one stands by."""
    folder = tmp_path / "run0"
    run = started(launch_on_hosts, folder, {"rejoin": "never", "heartbeat_timeout_s": 3}, held=HELD)
    run.wait_for(lambda: [each for each in run.of("standby") if each.get("address")], "standby on another host")
    run.wait_for(lambda: [each for each in run.of("committed") if each["step"] == HELD - 1], "steps")
    run.crash(dies)
    (folder / "go").touch()
    result = run.finish()
    lost = "1.0" if dies == "delta" else "0.0"
    assert result.code == 0 and {event["seat"] for event in result.of("lost")} == {lost}, result.output[-6000:]
    assert set(result.records) == ({0, 1} if dies == "delta" else {2, 3})
    for each in result.records.values():
        assert each["losses"] == pytest.approx(each["alone"], abs=5e-6) and each["weights_differ"] < 5e-6


def test_on_several_hosts_a_replica_comes_back_and_any_host_loads_what_is_saved(launch_on_hosts, tmp_path):
    folder, saved = tmp_path / "run0", tmp_path / "saved"
    faults = {"faults": ["kill 1.0 before 0B1.1@4"]}
    run = started(launch_on_hosts, folder, faults, steps=30, held=HELD, save=[20, str(saved)])
    run.hear("newcomer", 2)
    (folder / "go").touch()
    result = ended_well(run.finish(), "1.0")
    alike(result)
    assert {rank: each["incarnation"] for rank, each in result.records.items()} == {0: 0, 1: 0, 2: 1, 3: 1}
    for each in result.records.values():
        assert each["losses"] == pytest.approx(each["alone"], abs=5e-6) and each["weights_differ"] < 5e-6
    again = started(launch_on_hosts, tmp_path / "run1", {"run_dir": str(tmp_path / "run1")}, load=str(saved), steps=22)
    loaded = ended_well(again.finish())
    assert all(len(each["losses"]) == 2 for each in loaded.records.values())
