"""What scripts' own averages give once a worker is lost, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import LATE, assert_in_order, assert_one_line, on_deepspeed

SCRIPT = "tests/jobs/averages.py"
LOST, AFTER = 1, 2  # the rank of seat 1.0, and the step


@pytest.fixture
def train(launch, tmp_path):
    def run(environment: dict[str, str] | None = None, **settings: object):
        job = {"folder": str(tmp_path / "run0"), "lost": [LOST, AFTER], "settings": settings}
        return launch(script=SCRIPT, RECYCLE_TEST_AVERAGES=json.dumps(job), **(environment or {})).finish()

    return run


def test_averages_of_scripts_after_a_loss(train):
    """Two replicas of two stages; the first stage has one worker left, and there are three of four."""
    assert_averages(train())


def test_averages_of_scripts_over_nccl_after_a_loss(train, tmp_path):
    """Each has a device of its own; the others wait in a kernel for the lost one."""
    over = on_deepspeed({"name": "over_false_nccl", "folder": str(tmp_path)})
    result = train(over | LATE, device_link="nccl")
    assert_averages(result)
    assert_in_order(result)
    counts = [json.loads(path.read_text()) for path in tmp_path.glob("?.?.json")]
    assert counts and all(count["allgather"] for count in counts), counts


def assert_averages(result) -> None:
    assert (
        result.code == 0
        and {event["seat"] for event in result.of("lost")} == {"1.0"}
        and sorted(result.records) == [0, 2, 3]
    ), result.output[-6000:]
    for rank, record in result.records.items():
        for step, (loss, seen) in enumerate(zip(record["losses"], record["seen"]), 1):
            whole, both = step < AFTER, pytest.approx([loss, 2 * loss])
            of_all, of_replicas = (1, 1) if whole else (3 / 4, 1 / 2 if rank == 0 else 1)
            assert [number / of_all for number in seen["neox"]] == both, "the sum over three of four, divided by four"
            assert [number / of_replicas for number in seen["megatron"]] == both
            assert seen["average by torch"] == pytest.approx(loss) == seen["mean over replicas"]
            assert seen["mean"] == both
            assert seen["tokens"] == pytest.approx([11.5 if whole else (10 + 12 + 13) / 3])
            assert seen["over Gloo by name"] == seen["tokens"]
            assert seen["over a mesh"] == [12.5 if rank > 1 else 10.5 if whole else 10.0]
            assert seen["objects"] == [0, 1 if whole else -1, 2, 3]
            if whole:
                assert seen["torchmetrics mean"] == pytest.approx(loss) and seen["torchmetrics sum"] == 4
            else:
                for name in ("torchmetrics mean", "torchmetrics sum"):
                    assert seen[name].startswith("torch.distributed.all_gather over ranks 0, 1, 2, 3, called at ")
                    assert "rank 1 is lost" in seen[name]
    assert_said_once(result)


def assert_said_once(result) -> None:
    """Each line that has added up without the lost worker's part, and nothing of the engine's."""
    told = {Path(event["line"]).name: event for event in result.of("warning") if "line" in event}
    text = Path(SCRIPT).read_text().splitlines()
    lines = {text[int(name.partition(":")[2]) - 1].strip() for name in told}
    assert all(name.startswith("averages.py:") for name in told)
    assert len(told) == len([event for event in result.of("warning") if "line" in event])
    assert lines == {
        "torch.distributed.all_reduce(reduced)",
        "torch.distributed.all_reduce(averaged, group=group)",
        "torch.distributed.all_reduce(square, group=group)",
    }
    for event in told.values():
        assert event["lost"] == [LOST]
        assert "for an average over the live write recycle_plugin.mean(tensor, group)" in event["text"]


@pytest.mark.all_kills
def test_such_a_sum_ends_the_job_where_it_is_told_to(train):
    result = train(group_sums="raise")
    assert_one_line(
        result,
        "torch.distributed.all_reduce over ranks 0, 1, 2, 3 adds up over 3 of 4 members (rank 1 lost), but "
        "get_world_size() still counts all: write",
    )
