"""``train_batch(data_iter=…)`` through losses: the interrupted step is finished with its own data, and from then on the
survivors' iterators give as many samples as before, each used once, inputs with their labels (see
tests/jobs/iterators.py).
"""

from __future__ import annotations

import json
from itertools import count

import pytest
import torch

from tests.jobs.stateful import order
from tests.support.cluster import Result
from tests.support.iterators import A_STEP, MICRO_BATCHES, SIZE, STEPS, counts, ends, retired
from tests.support.jobs import LOSS_TOLERANCE, SQUARE, Shape, assert_one_line
from tests.support.kills import matrix
from tests.support.launching import launching


@pytest.fixture
def train(launch, tmp_path):
    """``train(*faults, case=, shape=)``: the finished job."""

    number = count()

    def run(*faults: str, case: str = "plain", shape: Shape = SQUARE, **more: object) -> Result:
        job = {
            "folder": str(tmp_path / f"run{next(number)}"),
            "faults": faults,
            "steps": STEPS,
            "case": case,
            "replicas": shape.replicas,
            "stages": shape.stages,
        } | more
        return launch(shape=shape, script="tests/jobs/iterators.py", RECYCLE_TEST_ITERATORS=json.dumps(job)).finish()

    return run


def assert_each_once(result: Result, shape: Shape, own_until: dict[int, int]) -> None:
    """Replica r's samples of the steps up to ``own_until[r]``, and as many more of the others' as are missing, evenly:
    each once.
    """
    used = counts(result, shape)
    numbers = [sum(each) for each in used]
    for replica, each in enumerate(used):
        assert each == [1] * numbers[replica] + [0] * (len(each) - numbers[replica]), f"replica {replica}: {each}"
    assert sum(numbers) == STEPS * shape.replicas * A_STEP
    for replica in range(shape.replicas):
        if replica in own_until:
            assert numbers[replica] == own_until[replica] * A_STEP
        else:
            assert numbers[replica] >= STEPS * A_STEP


@pytest.mark.parametrize(
    "case",
    (
        "batch_fn",
        *(pytest.param(case, marks=pytest.mark.all_kills) for case in ("plain", "repeating", "set_dataloader")),
    ),
)
def test_without_a_failure_everybody_reads_its_own(train, case):
    result = train(case=case)
    assert_each_once(result, SQUARE, {0: STEPS, 1: STEPS})
    assert not retired(result)


@pytest.mark.parametrize("shape", (SQUARE, Shape(3, 2)), ids=str)
def test_the_loader_that_initialize_returns_is_stocks(train, shape):
    """Its order, over several epochs, with one sample twice in each and none that ends with a step; also in place of a
    lost replica's.
    """
    each = 11 * SIZE * shape.replicas - 1
    stock = ends(train(case="returned", shape=shape, each=each, recycle={"enabled": False}))
    found = ends(train(case="returned", shape=shape, each=each))
    for rank, end in stock.items():
        assert found[rank]["losses"] == pytest.approx(end["losses"], abs=LOSS_TOLERANCE)
        assert torch.allclose(found[rank]["rows"], end["rows"], atol=1e-6)
    lost = train("kill 0.0 before 0F0.1@4", case="returned", shape=shape, each=each, recycle={"rejoin": "never"})
    first, *others = (end["rows"] for end in ends(lost).values())
    assert all(torch.equal(each, first) for each in others) and lost.of("lost")
    used = shape.replicas * MICRO_BATCHES * -first
    assert used.sum() == pytest.approx(STEPS * shape.replicas * A_STEP) and used.round().unique().numel() > 1


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param("kill 0.0 before 0LOAD0.0@4", marks=pytest.mark.all_kills),
        "kill 0.0 before 0F0.1@4",
        pytest.param("kill 0.1 before 1LOAD0.0@4", marks=pytest.mark.all_kills),
        pytest.param("kill 0.1 after 1SG0.0>0.0@4", marks=pytest.mark.all_kills),
        "kill 0.1 before 1W0.1@4",
        pytest.param("kill 0.0 before 0REDUCE@4", marks=pytest.mark.all_kills),
    ],
)
def test_either_end_in_mid_step(train, kill):
    """The interrupted step has its own data; the next may have been begun."""
    result = train(kill)
    ((first, replicas),) = retired(result)
    assert replicas == [0] and first in (5, 6)
    assert_each_once(result, SQUARE, {0: first - 1})


@pytest.mark.parametrize("seat", ("1.0", "0.1"))
def test_work_moves_away_from_a_slow_end_with_its_samples(train, seat, monkeypatch):
    steps = 3 * STEPS
    wrap = {"name": "slow", "seat": seat, "times": 3, "steps": [3, 12]}
    monkeypatch.setenv("RECYCLE_TEST_WRAP", json.dumps(wrap))
    result = train(recycle={"rebalance": True}, steps=steps)
    assert seat in {event["seat"] for event in result.of("rebalance")}
    for used in counts(result, SQUARE):
        assert used[: steps * A_STEP] == [1] * steps * A_STEP and not any(used[steps * A_STEP :])


@pytest.mark.all_kills
@pytest.mark.parametrize(
    "kill", (pytest.param("kill 0.0 at step.end@4", marks=pytest.mark.all_kills), "kill 0.1 before 1STEP@4")
)
def test_either_end_before_it_has_drawn(train, kill):
    """The other end of the replica has drawn the step already, or not."""
    result = train(kill)
    ((first, _),) = retired(result)
    assert first in (5, 6)
    assert_each_once(result, SQUARE, {0: first - 1})


@pytest.mark.all_kills
@pytest.mark.parametrize(
    "shape, kills, lost",
    [
        pytest.param(
            Shape(3), ("kill 0.0 before 0F0.1@4", "kill 0.1 before 1F0.1@4"), {0}, id="both ends of a replica"
        ),
        pytest.param(
            Shape(3),
            ("kill 0.0 before 0F0.1@4", "kill 1.1 before 1W1.0@4"),
            {0, 1},
            id="one end each of two",
            marks=pytest.mark.all_kills,
        ),
        pytest.param(
            Shape(3),
            ("kill 2.0 before 0F2.1@3", "kill 1.1 at recovery.resume:2"),
            {1, 2},
            id="another while recovering",
            marks=pytest.mark.all_kills,
        ),
        pytest.param(
            Shape(2, 3),
            ("kill 0.1 before 1F0.1@3", "kill 1.2 before 2W1.0@6"),
            {1},
            id="a stage between the ends, then an end",
        ),
        pytest.param(Shape(2, 1), ("kill 0.0 before 0I0.1@4",), {0}, id="one stage", marks=pytest.mark.all_kills),
    ],
)
def test_several_losses(train, shape, kills, lost):
    result = train(*kills, shape=shape)
    assert len(result.of("lost")) == len(kills)
    since = {replica: step for step, replicas in reversed(retired(result)) for replica in replicas}
    assert since.keys() == lost
    assert_each_once(result, shape, {replica: step - 1 for replica, step in since.items()})


@pytest.mark.parametrize(
    "kill", ("kill 0.0 before 0F0.1@4", pytest.param("kill 0.1 after 1STEP@4", marks=pytest.mark.all_kills))
)
def test_steps_that_are_rejected_keep_their_data(train, kill):
    """With ``recycle.clip: validate``, and a norm that is over the limit in each step: what the next step has computed
    meanwhile is run again.
    """
    result = train(kill, case="validate")
    assert {event["step"] for event in result.of("rejected")} == set(range(1, STEPS + 1))
    ((first, replicas),) = retired(result)
    assert replicas == [0] and first in (5, 6)
    assert_each_once(result, SQUARE, {0: first - 1})


@pytest.mark.parametrize(
    "kill", ("kill 0.0 before 0F0.3@5", pytest.param("kill 0.1 at resize", marks=pytest.mark.all_kills))
)
def test_another_batch_size_between_steps(train, kill):
    """From step 4 on twice as many micro-batches, so that each counts half."""
    result = train(kill, case="another batch size")
    ((first, _),) = retired(result)
    found = [
        (-SQUARE.replicas * MICRO_BATCHES * end["rows"]).reshape(SQUARE.replicas, -1) for end in ends(result).values()
    ]
    assert all(torch.equal(each, found[0]) for each in found)
    own = 3 + 2 * (first - 4)  # times A_STEP
    expected = {0: own, 1: 2 * (3 + 2 * (STEPS - 3)) - own}
    assert (first == 4) == ("resize" in kill)
    for replica, used in enumerate(found[0].tolist()):
        numbers = [3 * A_STEP, (expected[replica] - 3) * A_STEP]
        assert used == pytest.approx([1.0] * numbers[0] + [0.5] * numbers[1] + [0.0] * (len(used) - sum(numbers)))


def test_a_planned_leave(train):
    result = train("leave 0.1 before 1F0.0@3", case="leaving")
    ((first, replicas),) = retired(result)
    assert replicas == [0]
    assert_each_once(result, SQUARE, {0: first - 1})


def test_a_data_source_keeps_every_steps_data(train):
    result = train("kill 0.0 before 0F0.1@4", case="data_source")
    assert_each_once(result, SQUARE, {0: STEPS, 1: STEPS})
    assert all(end["reads"] == 0 for end in ends(result).values()) and not result.of("data")


def test_epochs_that_micro_batches_do_not_divide(train):
    """Nine samples in batches of two: the fifth of each epoch has one."""
    result = train("kill 0.0 before 0F0.1@4", case="not a multiple")
    ((first, _),) = retired(result)
    own = (first - 1) * MICRO_BATCHES
    for used, batches in zip(counts(result, SQUARE), (own, 2 * STEPS * MICRO_BATCHES - own), strict=True):
        expected = [0] * len(used)
        for batch in range(batches):
            for sample in range(batch % 5 * SIZE, min(9, (batch % 5 + 1) * SIZE)):
                expected[sample] += 1
        assert used == expected


# --- checkpoints ------------------------------------------------------------------------------------


def in_turn(launch, tmp_path, case, *runs):
    """The results of jobs of ``case`` one after the other, each with its shape, and what its job has besides."""
    results = []
    for number, (shape, more) in enumerate(runs):
        job = {"folder": str(tmp_path / f"run{number}"), "case": case, "each": 100, "faults": []} | more
        job |= {"replicas": shape.replicas, "stages": shape.stages}
        started = launch(shape=shape, script="tests/jobs/iterators.py", RECYCLE_TEST_ITERATORS=json.dumps(job))
        results.append(started.finish())
    return results


def test_a_job_goes_on_at_each_iterators_place(launch, tmp_path):
    """A checkpoint of a job that has lost a worker: its iterators have given unequally much.  A script that skips by
    itself is told; with another number of replicas it is said what changes.
    """
    saved = str(tmp_path / "saved")
    first, second, skips, third = in_turn(
        launch,
        tmp_path,
        "plain",
        (SQUARE, {"steps": 6, "saved": saved, "faults": ["kill 0.0 before 0F0.1@4"]}),
        (SQUARE, {"steps": 9, "loaded": saved, "resume": True}),
        (SQUARE, {"steps": 7, "loaded": saved}),
        (Shape(3), {"steps": 7, "loaded": saved, "resume": True}),
    )
    assert [each["seat"] for each in first.of("lost")] == ["0.0"] and not second.of("lost")
    flat = [count for each in counts(second, SQUARE) for count in each]  # there is room for 3 replicas
    used = [flat[:100], flat[100:200]]
    numbers = [sum(each) for each in used]
    assert used == [[1] * number + [0] * (100 - number) for number in numbers] and not any(flat[200:])
    assert sum(numbers) == 9 * SQUARE.replicas * A_STEP and numbers[0] < numbers[1]
    assert [each["text"] for each in skips.of("data") if "unevenly, since workers were missing" in each["text"]]
    assert not [each for each in second.of("data") if "unevenly" in each["text"]]
    (said,) = [each["text"] for each in third.of("data") if "the checkpoint is of 2 replicas" in each["text"]]
    assert "here are 3 replicas with 2: each iterator begins after its batch 8," in said


def test_a_job_goes_on_with_each_loaders_state(launch, tmp_path):
    """Loaders whose order is by a seed, which is another one in the job that goes on: what was read is not read again,
    and nothing is left out.  Another number of replicas reads up to where together they have given as much.
    """
    saved = str(tmp_path / "saved")
    _, second, places_itself, third = in_turn(
        launch,
        tmp_path,
        "stateful",
        (SQUARE, {"steps": 6, "saved": saved, "faults": ["kill 0.0 before 0F0.1@4"], "seed": 1}),
        (SQUARE, {"steps": 9, "loaded": saved, "resume": True, "seed": 2}),
        (SQUARE, {"steps": 7, "loaded": saved, "seed": 1}),
        (Shape(3), {"steps": 7, "loaded": saved, "resume": True, "seed": 1}),
    )
    flat = [count for each in counts(second, SQUARE) for count in each]  # there is room for 3 replicas
    numbers = [sum(flat[:100]), sum(flat[100:200])]
    assert sum(numbers) == 9 * SQUARE.replicas * A_STEP and numbers[0] < numbers[1]
    for replica, number in enumerate(numbers):
        used = [sample for sample in range(100) if flat[replica * 100 + sample] == 1]
        assert used == sorted(order(100, 1)[:number]), f"replica {replica}"
    assert [each for each in places_itself.of("data") if "has the states of its data iterators" in each["text"]]
    assert not [each for each in second.of("data") if "has the states" in each["text"]]
    assert [each for each in third.of("data") if "here are 3 replicas with 2: each iterator" in each["text"]]


# --- what ends the job ------------------------------------------------------------------------------


def test_both_copies_gone(train):
    """1.0 has the copy of what 0.0 had drawn, and dies before it can hand it on; stage 1 has computed with it."""
    result = train("kill 0.0 before 0F0.1@4", "kill 1.0 at recovery.start:2", shape=Shape(3))
    assert_one_line(
        result,
        "step 4: all workers that kept the inputs of micro-batch 0.0 are lost, and plain iterators can't be read again",
    )


def test_no_replica_with_both_ends(train):
    result = train("kill 0.0 before 0F0.1@4", "kill 1.1 before 1W1.0@6")
    assert_one_line(result, "no replica has both its first and its last stage left")


@pytest.mark.parametrize(
    "case, text",
    [
        (
            "short",
            "the data has ended before step 2 was filled: the data iterators of all replicas have ended; catch",
        ),
        ("loader", "train_batch(data_iter=…) is a DataLoader, which is no iterator"),
        ("no data", "train_batch() has no data: pass data_iter="),
        (
            "exact",
            "recycle.exact with data from a plain iterator: after a loss the survivors' iterators give other batches "
            "than without a loss",
        ),
    ],
)
def test_iterators_that_will_not_do(train, case, text):
    assert_one_line(train(case=case, shape=Shape(2, 1)), text)


# --- scripts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, shape, kill",
    [("megatron_like", SQUARE, "kill 0.0 before 0F0.1@5"), ("neox_like", Shape(2, 3), "kill 1.2 before 2W1.0@5")],
)
def test_scripts_written_like_known_codebases(launch, tmp_path, script, shape, kill):
    """Up to the interrupted step, that one included, the losses are those of the run without a failure."""
    found = []
    for number, faults in enumerate(([], [kill])):
        job = {"folder": str(tmp_path / f"run{number}"), "faults": faults, "steps": 10}
        result = launch(shape=shape, script=f"tests/jobs/{script}.py", RECYCLE_TEST_SCRIPT=json.dumps(job)).finish()
        found.append(ends(result, "ends"))
        assert [event["seat"] for event in result.of("lost")] == [kill.split()[1]][: len(faults)]
    ((first, _),) = retired(result)
    for rank, end in found[1].items():
        reference = found[0][rank]
        assert end["losses"][: first - 1] == pytest.approx(reference["losses"][: first - 1], abs=LOSS_TOLERANCE)
        assert end["losses"][-1] != pytest.approx(reference["losses"][-1], abs=10 * LOSS_TOLERANCE), (
            "the data after the loss is another's"
        )
        assert end["losses"][-1] < end["losses"][0] - 0.1
        assert {name: end[name] for name in ("rates", "steps", "samples")} == {
            name: reference[name] for name in ("rates", "steps", "samples")
        }
    assert len({tuple(end["losses"]) for end in found[1].values()}) == 1


@pytest.mark.all_kills
@pytest.mark.parametrize("kill", [pytest.param(first, id=str(first)) for first, _ in matrix()])
def test_such_a_script_in_bf16_with_a_tied_embedding_killed_anywhere(launch, tmp_path, calm_in_bf16, kill):
    """The moments of the main job's list; the losses up to the interrupted step are those of the run without a failure,
    to what bf16 rounds.
    """
    found, result = script_in_bf16(launch, tmp_path / "run0", [kill.at(5)])
    assert [event["fault"] for event in result.of("fault")] == [kill.at(5)]
    assert [event["seat"] for event in result.of("lost")] == [kill.seat]
    ((first, _),) = retired(result)
    assert first >= 5
    for end in found.values():
        assert end["losses"][: first - 1] == pytest.approx(calm_in_bf16["losses"][: first - 1], abs=10 * LOSS_TOLERANCE)
        assert {name: end[name] for name in ("rates", "steps", "samples")} == {
            name: calm_in_bf16[name] for name in ("rates", "steps", "samples")
        }
    assert len({tuple(end["losses"]) for end in found.values()}) == 1
    shared = [
        end["weights"][name] for end in found.values() for name in end["weights"] if name.endswith("words.weight")
    ]
    assert len(shared) == 3 and shared[0].dtype == torch.bfloat16
    assert all(torch.equal(each, shared[0]) for each in shared)


def script_in_bf16(launch, folder, kills: list[str]) -> tuple[dict[int, dict], Result]:
    job = {"folder": str(folder), "faults": kills, "steps": 10, "config": {"bf16": {"enabled": True}}}
    result = launch(script="tests/jobs/megatron_like.py", RECYCLE_TEST_SCRIPT=json.dumps(job)).finish()
    return ends(result, "ends"), result


@pytest.fixture(scope="module")
def calm_in_bf16(server, tmp_path_factory) -> dict:
    """What any rank says at the end of the run without a failure."""
    folder = tmp_path_factory.mktemp("calm")
    with launching(server, folder) as launch:
        found, _ = script_in_bf16(launch, folder / "run0", [])
    return found[0]
