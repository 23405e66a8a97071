"""Jobs of tests/jobs/iterators.py, and how often each of their samples was used."""

from __future__ import annotations

import torch

from tests.support.cluster import Result
from tests.support.jobs import Shape

STEPS, MICRO_BATCHES, SIZE = 8, 2, 2
A_STEP = MICRO_BATCHES * SIZE  # samples of one replica


def ends(result: Result, folder: str = "rows") -> dict[int, dict]:
    assert result.code == 0, result.output[-6000:]
    return {
        int(path.stem.removeprefix("rank")): torch.load(path) for path in sorted((result.folder / folder).glob("rank*"))
    }


def counts(result: Result, shape: Shape) -> list[list[int]]:
    """By replica, how often each sample of its iterator was used; all ranks' weights say the same.

    In the case ``validate`` gradients are halved.
    """
    once = -0.5 if result.of("rejected") else -1.0
    found = [shape.replicas * MICRO_BATCHES * end["rows"] / once for end in ends(result).values()]
    stayed = shape.ranks - len(result.of("lost")) - len(result.of("leaving"))
    assert stayed <= len(found) <= stayed + len(result.of("caught_up"))
    assert all(torch.equal(each, found[0]) for each in found)
    assert torch.allclose(found[0], found[0].round(), atol=1e-4)
    return found[0].reshape(shape.replicas, -1).round().int().tolist()


def retired(result: Result) -> list[tuple[int, list[int]]]:
    return [(event["step"], event["replicas"]) for event in result.of("data") if "replicas" in event]
