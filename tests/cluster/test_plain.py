"""The plain adapter: what a pipeline in pure torch trains, saves, loads and refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recycle_plugin.core.vocabulary.faults import Fault
from tests.support.cluster import Run
from tests.support.jobs import PLAIN, Shape, assert_one_line, difference, faults
from tests.support.launching import Launch

SCRIPT = "tests/jobs/plain_against_torch.py"


@pytest.fixture
def vehicle():
    return PLAIN


@pytest.mark.parametrize(
    "shape, more",
    [
        pytest.param(Shape(2, 2, 2), (), id="2 x 2"),
        pytest.param(
            Shape(3, 2, 3),
            ("optimizer=sgd", "gradient_clipping=0.5", "schedule=true"),
            id="3 x 2, clipped, with a scheduler",
        ),
        pytest.param(
            Shape(2, 3, 2),
            ("optimizer=sgd", "parts=[1,2,2]", "recycle.split_backward=false", "dataset=true"),
            id="2 x 3, uneven parts, fused, a dataset",
        ),
        pytest.param(Shape(4, 1, 2), ("recycle.exact=true",), id="4 x 1, exact"),
    ],
)
@pytest.mark.parametrize("kill", (None, "kill 1.0 before 0REDUCE@4"))
def test_it_trains_what_one_process_trains_without_it(launch: Launch, tmp_path, shape: Shape, more, kill):
    """All layers in one process, gradients of all micro-batches summed by torch: the same losses and weights, but for
    the order of sums.
    """
    result = launch(*more, *([faults(kill)] if kill else []), shape=shape, script=SCRIPT).finish()
    assert result.code == 0 and {event["seat"] for event in result.of("lost")} == (
        {str(Fault.parse(kill).seat)} if kill else set()
    ), result.output[-6000:]
    record = result.records[max(result.records)]
    assert record["losses"] == pytest.approx(record["alone"]["losses"], abs=2e-6) and len(set(record["losses"])) > 3
    for mine in result.records.values():
        assert mine["weights_differ"] < 2e-6 < mine["weights_changed"]
    assert not any(mine["deepspeed"] for mine in result.records.values())


def plan(folder: Path, **what: object) -> dict[str, str]:
    """What a job's script does between steps (tests/jobs/checkpoint.py)."""
    return {"RECYCLE_TEST_CHECKPOINT": json.dumps({"folder": str(folder), **what})}


@pytest.mark.parametrize("kills", ((), ("kill 0.0 before 0F0.1@5",)))
def test_a_checkpoint_goes_on_as_if_nothing_was(launch: Launch, reference, tmp_path, kills):
    """Saved every four steps, also while a worker is missing; a job that begins with the last one trains what the first
    one would have.
    """
    saved = tmp_path / "saved"
    launch("steps=12", "schedule=true", faults(*kills), **plan(saved, save_at=[4, 8, 12])).ended_well()
    assert {path.name for path in saved.iterdir()} == {"global_step4", "global_step8", "global_step12", "latest"}
    assert {path.name for path in (saved / "global_step8").iterdir()} == {"stage_00.pt", "stage_01.pt"}
    second, whole = launch("schedule=true", **plan(saved, load=True)).finish(), reference("schedule=true")
    later = {rank: {**each, "losses": each["losses"][12:]} for rank, each in whole.records.items()}
    assert second.losses == pytest.approx(whole.losses[12:], abs=5e-6) and len(second.losses) == 8
    assert difference(second, replace(whole, records=later)).tolerated


@pytest.mark.parametrize(
    "more, said",
    [
        (("optimizer=sgd", "schedule=true"), "is of a job whose optimizer is Adam, and here it is SGD; give the same"),
        ((), "is of a job whose scheduler is LambdaLR, and here it is NoneType; give the same"),
        (
            ("schedule=true", "model.layers=4", "parts=[3,3]"),
            ".pt is of other layers (Missing key(s)",
        ),
        (("schedule=true", "cut"), "stage_00.pt is damaged, incomplete, or not of such a job"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(launch: Launch, tmp_path, more, said):
    saved = tmp_path / "saved"
    assert launch("steps=2", "schedule=true", **plan(saved, save_at=[2])).finish().code == 0
    if "cut" in more:
        whole = saved / "global_step2" / "stage_00.pt"
        whole.write_bytes(whole.read_bytes()[:300])
    assert_one_line(launch(*(each for each in more if each != "cut"), **plan(saved, load=True)).finish(), said)


def test_where_nothing_can_be_written_is_one_line(launch: Launch, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "global_step2"
    said = f"has failed: seat 0.0 (rank 0): Not a directory: {folder}"
    assert_one_line(launch(**plan(tmp_path / "file", save_at=[2])).finish(), said)


def test_a_checkpoint_is_loaded_while_training(launch: Launch, tmp_path):
    """Everybody goes back to step 4, and trains steps 5 to 8 once more, to the bit; then on, though a worker is lost in
    the middle of that.
    """
    result = launch(
        "steps=12", faults("kill 1.1 before 1W1.0@11"), **plan(tmp_path / "saved", save_at=[4], load_at=8, load_step=4)
    ).finish()
    assert result.code == 0 and [event["seat"] for event in result.of("lost")] == ["1.1"], result.output[-6000:]
    losses = result.losses
    assert len(losses) == 16 and losses[4:8] == losses[8:12] and len(set(losses)) == 12


@pytest.mark.parametrize("kills", ((), ("kill 0.1 before 1F0.1@-2",)))
def test_evaluation_is_the_same_whoever_dies_in_it(launch: Launch, tmp_path, kills):
    twice = plan(tmp_path, evaluate_at=5, times=2)
    healthy, result = launch(**twice).finish(), launch(faults(*kills), **twice).finish()
    assert {event["seat"] for event in result.of("lost")} == {str(Fault.parse(kill).seat) for kill in kills}
    (expected,), (found,) = (
        {tuple(record["evaluated"]) for record in each.records.values()} for each in (healthy, result)
    )
    assert found == pytest.approx(expected, abs=5e-6) and len(found) == 2
    assert result.losses == pytest.approx(healthy.losses, abs=5e-6)


def test_checkpoints_by_themselves(launch: Launch, tmp_path):
    """Checkpoints by themselves, written while training goes on."""
    result = launch(
        "recycle.checkpoint={overhead: 0.5, keep: 2}", f"recycle.checkpoint_dir={tmp_path / 'own'}", "steps=60"
    ).finish()
    assert result.code == 0 and result.of("checkpoint"), result.output[-6000:]
    latest = (tmp_path / "own" / "latest").read_text()
    assert {path.name for path in (tmp_path / "own" / latest).iterdir()} == {"stage_00.pt", "stage_01.pt"}
    files = [torch.load(path, weights_only=False) for path in (tmp_path / "own" / latest).iterdir()]
    assert {file["step"] for file in files} == {int(latest.removeprefix("automatic_step"))}


WRONG = {
    "more stages than layers": ("topology.stages=9", "stages is 9, and there are 4 layers: write 1 to 4"),
    "workers that don't fit": ("topology.stages=3", "4 workers for 3 stages: start a multiple of 3, and at least 6"),
    "one replica": ("topology.stages=4", "4 workers for 4 stages: start a multiple of 4, and at least 8"),
    "parts that don't add up": ("parts=[1,2]", "parts is [1, 2]: write 2 numbers of at least 1, 4 in all"),
    "a setting": ("recycle.undo=yes", "recycle.undo"),
    "a fault's seat": (
        'recycle.faults=["kill 7.0 before 0REDUCE@2"]',
        "recycle.faults: 'kill 7.0 before 0REDUCE@2' names seat 7.0, and the topology is 2 replicas",
    ),
    "no checkpoint": ("nowhere", "load(): there is no checkpoint in /nowhere: /nowhere/latest is missing"),
    "no micro-batches": ("topology.micro_batches=0", "micro_batches is 0: write a whole number, 1 or more"),
    "half a stage": ("topology.stages=1.5", "stages is 1.5: write a whole number, 1 or more"),
    "off": ("recycle.enabled=false", "recycle.enabled is false: a plain job has nothing else to train with"),
    "a loss scale": ("recycle={loss_scaling: true, nonfinite: skip}", "recycle.loss_scaling: plain jobs train in fp32"),
    "an optimizer instead of a function": (
        "wrong=optimizer",
        "optimizer is a Adam: give a function that makes one for a stage's parameters",
    ),
    "a scheduler of metrics": (
        "wrong=plateau",
        "ReduceLROnPlateau.step() needs 'metrics', which a step does not know",
    ),
    "a function as a layer": (
        "layer=function",
        "layer 1 is loss, which is called without arguments to make a module, and has missing a required argument: "
        "'outputs'",
    ),
    "a layer": ("layer=name", "layer 1 is a str: give a module, or a function without arguments that makes one"),
    "a limit below 0": (
        "gradient_clipping=-1",
        "clip is -1: write the largest norm that gradients may have, or 0 for any",
    ),
    "no data": ("data=3", "data is a int: give a function of (step, replica, micro_batch), or a map-style dataset"),
    "a weight on two stages": (
        "layer=shared",
        "layers 1 and 2 share a weight, and are in stages 0 and 1: weights that stages share are not supported here "
        "yet",
    ),
    "batch normalisation": (
        "layer=norm",
        "keeps running statistics, which a forward that is run again would count twice",
    ),
}


@pytest.mark.parametrize("given, said", [pytest.param(*each, id=name) for name, each in WRONG.items()])
def test_what_is_wrong_is_one_line(launch: Launch, given: str, said: str):
    more = plan("/nowhere", load=True) if given == "nowhere" else {}
    assert_one_line(launch(*([] if more else [given]), **more).finish(), said)


def test_without_the_launcher_it_says_how_to_start(tmp_path):
    done = subprocess.run(
        [sys.executable, PLAIN.script, f"run_dir={tmp_path}"],
        env={"RANK": "0", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and "launch with" in done.stderr
    assert "python -m recycle_plugin.launch --workers 4 your_script.py" in done.stderr


# --- scripts that call backward() themselves ---------------------------------------------------------

LOOP = "tests/jobs/replicas_against_torch.py"
OF_A_REPLICA = (
    "kill 1.0 before 0F1.1@3",
    "kill 1.0 after 0B1.0@3",
    "kill 1.0 before 0REDUCE@3",
    "kill 1.0 after 0REDUCE@3",
    "kill 1.0 after 0STEP@3",
    "kill 1.0 at step.end@3",
)


@pytest.mark.some_of(5)
@pytest.mark.parametrize("kill", (None, *OF_A_REPLICA))
@pytest.mark.parametrize("more", ((), ("gradient_clipping=0.3", "recycle.undo=inverse", "kept=true")))
def test_a_scripts_own_backward_survives_its_peers(launch: Launch, kill, more):
    """Three replicas, no pipeline: the same losses and weights as in one process, and each micro-batch is computed,
    though its replica is gone; without copies of what a step changes, since none is ever taken back.
    """
    result = launch(*more, *([faults(kill)] if kill else []), shape=Shape(3, 1, 2), script=LOOP).finish()
    assert result.code == 0 and {event["seat"] for event in result.of("lost")} == ({"1.0"} if kill else set()), (
        result.output[-6000:]
    )
    for record in result.records.values():
        assert record["losses"] == pytest.approx(record["alone"]["losses"], abs=2e-6)
        assert record["weights_differ"] < 2e-6
        assert record["undo_bytes"] == 0 and not any(event["undone"] for event in result.of("recovery_plan"))
    everything = {(step, replica, number) for step in range(4, 7) for replica in range(3) for number in range(2)}
    assert everything <= {tuple(each) for record in result.records.values() for each in record["computed"]}


def test_a_sum_between_steps_goes_by_the_setting(launch: Launch):
    more = "sums=true", "recycle={group_sums: scale, rejoin: never}", faults("kill 1.0 before 0REDUCE@3")
    result = launch(*more, shape=Shape(3, 1, 1), script=LOOP).finish()
    assert result.code == 0 and result.records.keys() == {0, 2}, result.output[-6000:]
    assert {tuple(record["sums"]) for record in result.records.values()} == {(3.0,) * 6}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("wrong=backward", "has left no gradient: call backward() on the loss before you return it"),
        ("wrong=loss", "return the micro-batch's loss, one number, after its backward()"),
        ("wrong=iterator", "a call of compute() gives something else when it is run again"),
        ("wrong=step", "0.weight is changed by each call of compute()"),
        ("wrong=statistics", "0.parametrizations.weight.0._u is changed by each call of compute()"),
        ("wrong=optimizer", "the optimizer has a parameter of shape (5, 3) that is not in the module"),
        ("wrong=closure", "LBFGS.step() needs 'closure', such as a closure that computes losses of its own"),
        ("wrong=second", "a second engine, pipeline or set of replicas in this process"),
        ("recycle.exact=true", "recycle.exact with a backward that the script calls"),
        ("recycle.split_backward=true", "recycle.split_backward: a backward that the script calls is not split"),
    ],
)
def test_what_a_loop_does_wrong_is_one_line(launch: Launch, wrong: str, said: str):
    assert_one_line(launch(wrong, shape=Shape(2, 1, 1), script=LOOP).finish(), said)


# --- what the documents show -------------------------------------------------------------------------


PART = """
class Part(nn.Module):  # of the inputs, for the processes' parts of the first layer
    def forward(self, x):
        group = recycle_plugin.seat_group()
        return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]

"""


def test_the_documents_scripts_run_as_they_stand(plain_server, tmp_path):
    """Each, though a worker is lost; only the number of steps is smaller."""
    blocks = re.findall(r"```python\n(.*?)```", Path("recycle_plugin/docs/jobs.md").read_text(), re.DOTALL)
    words = "Pipeline(", "seat_group", "Replicas(", "replica_mesh("
    pipeline, shared, replicas, fsdp = (next(block for block in blocks if word in block) for word in words)
    settings = f'settings={{"run_dir": {str(tmp_path / "run")!r}, "faults": ["kill 1.0 before 0REDUCE@3"]}}'
    data, trains = pipeline[: pipeline.index("pipeline = ")], pipeline[pipeline.index("pipeline = ") :]
    trains = trains.replace("settings={}", settings).replace('"checkpoint"', repr(str(tmp_path / "saved")))
    by_parts = trains.replace("lambda: nn.Linear(8, 64)", "Part, lambda: RowLinear(4, 64)")
    model = "model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))\n"
    scripts = {
        data + trains: 4,
        data + shared + PART + by_parts.replace("stages=2,", "stages=2, shards=2,"): 8,
        data + model + replicas.replace("micro_batches=4", f"micro_batches=4, {settings}"): 2,
        data + model + fsdp.replace("micro_batches=4", f"micro_batches=4, {settings}"): 4,
    }
    for number, (text, workers) in enumerate(scripts.items()):
        script = tmp_path / f"train{number}.py"
        script.write_text(text.replace("200", "6"))
        run = Run(plain_server, tmp_path / "run", workers, str(script), [], launcher="plain")
        result = run.finish()
        assert not run.clean()
        assert (
            result.code == 0
            and {event["seat"] for event in result.of("lost")} == {"1.0"}
            and result.of("finished")[0]["step"] == 6
        ), result.output[-6000:]
        shutil.rmtree(tmp_path / "run")
    saved = {path.name for path in (tmp_path / "saved" / "global_step6").iterdir()}
    assert saved == {f"stage_0{stage}{shard}.pt" for stage in range(2) for shard in ("", "_shard_1")}
