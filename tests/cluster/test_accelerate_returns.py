"""Replicas of an unmodified loop with Accelerate that come back: their scripts go through the steps that are over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.hugging_face_model import Samples, model
from tests.support.cluster import ForkServer, Result
from tests.support.hugging_face import LOOP, RANKS, RARER, Start, starting

EPOCHS, IN_EPOCH, HELD = 8, 4, 5
STEPS = EPOCHS * IN_EPOCH
ODD = {"script": LOOP, "samples": 53, "epochs": EPOCHS}  # 7 batches an epoch for each rank, in steps of two
RETURNS = ODD | {"held": [HELD], "recycle": {"rejoin": "always"}}
OF_ALL = ("losses", "gathered", "norms", "counted", "evaluated", "right", "rates", "steps")  # what all know alike


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    with starting(server, tmp_path) as start:
        yield start


def returned(result: Result, *ranks: int, warnings: int = 0, alike: Sequence[str] = OF_ALL) -> int:
    """The step from which on ``ranks`` take part again; all know the same of all steps, and have the same weights, to
    the bit.
    """
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    assert len(result.of("warning")) == warnings, result.output[-6000:]
    rejoined = {event["rank"]: event["step"] for event in result.of("rejoined")}
    assert sorted(rejoined) == sorted(ranks), rejoined
    first, *others = result.records.values()
    assert len(others) == RANKS - 1
    for other in others:
        for name in (*alike, "weights"):
            assert other[name] == first[name], name
    (step,) = {*rejoined.values()}
    return step


def by_hand(
    records: dict[int, dict[str, Any]],
    live: Sequence[Sequence[int]],
    columns: bool = False,
    ends: int = IN_EPOCH,
    counted: int = RANKS,
) -> Any:
    """What one process makes of the batches that ``records`` name, of whose steps each is trained by the ranks in
    ``live``: the loss of each one's last batch, by step, and the weights.  ``ends``: each step that this divides has
    one batch instead of two; ``counted``: steps of the schedule for one of the optimizer's.
    """
    gpt, data, losses, place = model(), Samples(ODD["samples"]), [], 0
    for step, ranks in enumerate(live):
        batches = 1 if step % ends == ends - 1 else 2
        of_step = []
        for rank in ranks:
            for numbers in records[rank]["trained"][place : place + batches]:
                words = torch.stack([data[number]["input_ids"] for number in numbers])
                words = words[:, : 8 + numbers[0] % 4] if columns else words
                loss = gpt(input_ids=words, labels=words).loss
                (loss / (2 * len(ranks))).backward()
            of_step.append(loss.item())
        place += batches
        losses.append(of_step)
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 0.5)
        rate = 0.5 / (1 + step * counted / 8) * (len(ranks) / RANKS) ** 0.5
        with torch.no_grad():
            for each in gpt.parameters():
                each -= rate * each.grad
                each.grad = None
    return losses, {name: each.flatten().tolist() for name, each in gpt.named_parameters()}


@pytest.mark.parametrize(
    "stage, kill, longer", [(1, [0, "step", 3], False), (2, [3, "step", 3], True), (3, [0, "step", 3], True)]
)
def test_a_replica_comes_back_into_an_unmodified_loop(start, stage, kill, longer):
    """Also rank 0's, and where batches have lengths of their own on each rank."""
    result, calm = start(kills=[kill], stage=stage, longer=longer, **RETURNS), start(stage=stage, longer=longer, **ODD)
    lost, left = (range(2), range(2, 4)) if kill[0] < 2 else (range(2, 4), range(2))
    step = returned(result, *lost)
    live = [range(RANKS)] * 2 + [left] * (step - 3) + [range(RANKS)] * (STEPS - step + 1)
    losses, weights = by_hand(result.records, live, columns=longer)
    for rank, record in result.records.items():
        assert record["trained"] == calm.records[rank]["trained"] and record["rates"] == calm.records[rank]["rates"]
        assert [len(each) for each in record["gathered"]] == [len(each) for each in losses]
        for found, wanted in zip(record["gathered"], losses):
            assert found == pytest.approx(wanted, rel=1e-4)
        for name, values in weights.items():
            assert record["weights"][name] == pytest.approx(values, abs=1e-4)
        assert record["mains"][-1] == (rank == 0)
    assert result.output.count("\nstep 8\n") == 1


@pytest.mark.parametrize("kill", [[0, "evaluating", 2], [3, "evaluating", 2]])
def test_an_evaluation_that_was_dealt_to_others_is_gone_through(start, kill):
    """In which a replica is lost, which comes back behind the next one."""
    result = start(kills=[kill], **RETURNS | {"held": [10]})
    step = returned(result, *(range(2) if kill[0] < 2 else range(2, 4)), warnings=1)
    assert step >= 10
    record = result.records[0]
    assert len(record["evaluated"][0]) < 29 and all(len(each) == 29 for each in record["evaluated"][1:])


@pytest.mark.parametrize("kill", [[0, "step", 3], [3, "step", 3]])
def test_a_loop_that_only_gathers_is_come_back_to(start, kill):
    """The first call that the others make without the lost replica begins a step, and no newcomer repeats that call."""
    result = start(kills=[kill], **RETURNS | {"odd": "bare"})
    returned(result, *(range(2) if kill[0] < 2 else range(2, 4)))


def test_who_dies_on_its_way_comes_back_once_more(start):
    """While the others wait for it, in the step that it takes part in first."""
    kills, held = [[0, "step", 3], [0, "step", 2, 1]], [HELD, HELD + 20]
    result = start(kills=kills, **RETURNS | {"held": held, "epochs": 2 * EPOCHS})
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    assert {rank: record["incarnation"] for rank, record in result.records.items()} == {0: 2, 1: 2, 2: 0, 3: 0}
    first, *others = result.records.values()
    assert all(other[name] == first[name] for other in others for name in (*OF_ALL, "weights"))


def test_both_replicas_come_back_one_after_the_other(start):
    """Who has come back itself has what the next one needs, also of the time that it was away."""
    kills, held = [[0, "step", 3], [2, "step", HELD + 15]], [HELD, HELD + 17]
    result = start(kills=kills, **RETURNS | {"held": held, "epochs": 2 * EPOCHS})
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    assert {rank: record["incarnation"] for rank, record in result.records.items()} == {0: 1, 1: 1, 2: 1, 3: 1}
    first, *others = result.records.values()
    assert all(other[name] == first[name] for other in others for name in (*OF_ALL, "weights"))


def test_a_loop_that_has_resumed_is_come_back_to(start):
    saved = start(**ODD | {"epochs": 2})
    more = {"resume": str(saved.folder / "out" / "epoch1")}
    result = start(stage=1, kills=[[0, "step", 3]], **RETURNS | more)
    returned(result, 0, 1)
    assert result.records[0]["losses"][0] < saved.records[0]["losses"][0]


RARE = {"script": RARER, "samples": 48, "epochs": EPOCHS}  # 3 steps an epoch, but the first one has 2, the last 2
OF_RARE = ("losses", "gathered", "norms", "rates", "objects", "sent", "words", "padded", "stops", "evaluated", "rest")


@pytest.mark.parametrize("stage, kill", [(1, [0, "step", 3]), (2, [1, "step", 3]), (2, [3, "step", 3])])
def test_what_loops_use_less_often_is_gone_through_too(start, stage, kill):
    """skip_first_batches, split_batches, even_batches=False, broadcasts, objects, padding, triggers."""
    calm = start(stage=stage, **RARE)
    result = start(kills=[kill], stage=stage, held=[HELD], **RARE | {"recycle": {"rejoin": "always"}})
    lost, left = (range(2), range(2, 4)) if kill[0] < 2 else (range(2, 4), range(2))
    step = returned(result, *lost, warnings=1, alike=OF_RARE)  # of sums: a trigger is one
    steps = 3 * EPOCHS - 2
    live = [range(RANKS)] * 2 + [left] * (step - 3) + [range(RANKS)] * (steps - step + 1)
    losses, weights = by_hand(result.records, live, ends=steps + 1, counted=1)
    for rank, record in result.records.items():
        other = calm.records[rank]
        assert record["steps"] == other["steps"] == steps
        assert all(record[name] == other[name] for name in ("trained", "rates"))
        assert record["stops"] == [
            number in (4, steps) and (number != 4 or 3 in live[3]) for number in range(1, steps + 1)
        ]
        for number, ranks in enumerate(live):
            found = {name: record[name][number] for name in OF_RARE[:-2]}
            if number < 2:
                assert found == {name: other[name][number] for name in found}
            assert found["gathered"] == pytest.approx(losses[number], rel=1e-4)
            assert found["objects"] == [f"of {each}" + "." * 50 * (3 - each) for each in ranks]
            assert found["sent"] == [number + 1, ranks[0]]
            assert found["words"] == [f"step {number + 1} of {ranks[0]}", ranks[0]]
            assert found["padded"] == [[each] * (1 + each) + [-1] * (ranks[-1] - each) for each in ranks]
        for name, first in ("evaluated", 20), ("rest", 32):
            assert len(record[name]) == EPOCHS
            assert all(sorted(each) == [*range(first, 49)] for each in record[name]), (name, record[name])
        for name, values in weights.items():
            assert record["weights"][name] == pytest.approx(values, abs=1e-4)


REFUSED = [
    ("reads", "a parameter is read or written at "),
    ("sums", "torch.distributed.all_reduce over ranks 0, 1, 2, 3, called at "),
    ("more", "Accelerate's gather of float32 in 1 dimensions, called at tests/jobs/accelerate_loop.py:"),
]


@pytest.mark.parametrize("odd, line", REFUSED)
def test_who_can_not_go_through_what_is_over_is_told_so_and_the_others_go_on(start, odd, line):
    result = start(kills=[[0, "step", 3]], **RETURNS | {"odd": odd})
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    said = {warning["text"] for warning in result.of("warning")}
    assert any("which has come back, can't take part: " in each and line in each for each in said), said
    assert sorted(result.records) == [2, 3] and result.records[2]["weights"] == result.records[3]["weights"]
    assert result.records[2]["steps"] == STEPS


@pytest.mark.parametrize("kill", [[0, "step", 3], [3, "step", 3]])
def test_what_one_process_writes_is_written_once(start, kill):
    """Whoever is that process when, as Accelerate says it."""
    result = start(kills=[kill], **RETURNS | {"odd": "writes"})
    returned(result, *(range(2) if kill[0] < 2 else range(2, 4)))
    found = {file.name: sorted(map(int, file.read_text().split())) for file in (result.folder / "written").iterdir()}
    assert len(found) == 10 and all(steps == [*range(1, STEPS + 1)] for steps in found.values()), found


@pytest.mark.parametrize("odd, file", [("opens", "steps"), ("saves", "step.pt")])
def test_a_file_that_is_written_in_a_step_that_is_over_is_said(start, odd, file):
    """Of a script that asks for its index."""
    result = start(kills=[[0, "step", 3]], **RETURNS | {"odd": odd})
    returned(result, 0, 1, warnings=1)
    (warning,) = result.of("warning")
    said = f"rank 0, which has come back, writes {result.folder / file} at tests/jobs/accelerate_loop.py:"
    assert said in warning["text"]


@pytest.mark.parametrize("rejoin", ["never", "always"])
def test_each_steps_loss_is_in_a_trackers_log_once_whoever_is_process_0(start, rejoin):
    read = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    held = {"held": [HELD]} if rejoin == "always" else {}
    result = start(kills=[[0, "step", 3]], tracked=True, recycle={"rejoin": rejoin}, **ODD | held)
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    found: list[tuple[int, float]] = []
    for file in sorted((result.folder / "out" / "tracked").glob("events.out.tfevents.*")):
        of_file = read(str(file)).Reload()
        found += (
            [(each.step, each.value) for each in of_file.Scalars("loss")] if "loss" in of_file.Tags()["scalars"] else []
        )
    assert [step for step, _ in sorted(found)] == [*range(1, STEPS + 1)]
    assert [loss for _, loss in sorted(found)] == pytest.approx(result.records[3]["losses"], rel=1e-6)
