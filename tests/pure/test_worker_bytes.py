"""What a worker holds for its parameters, by hand; tests/cluster/test_memory.py compares it with measured bytes."""

from __future__ import annotations

import pytest

from recycle_plugin.core.vocabulary.worker_bytes import SUM_PIECE, WorkerBytes

N = 10 * SUM_PIECE


@pytest.mark.parametrize(
    "dtype, undo, settled, between, computing, summing, stepping",
    (
        ("fp32", "snapshot", 24, 28, 32, 36, 28),
        ("fp32", "inverse", 12, 16, 20, 24, 16),
        ("bf16", "snapshot", 26, 30, 36, 38, 30),
        ("fp16", "inverse", 14, 18, 24, 26, 18),
    ),
)
def test_bytes_of_a_parameter(dtype, undo, settled, between, computing, summing, stepping):
    one = WorkerBytes(1, dtype, undo)
    assert (sum(one.settled.values()), sum(one.between.values())) == (settled, between)
    assert one.peaks() == {"computing": computing, "summing": summing, "stepping": stepping}
    assert one.peaks(100) == {"computing": computing + 100, "summing": summing, "stepping": stepping}
    early = {"computing": computing - 4, "summing": summing - 4, "stepping": stepping}
    assert one.peaks(committed=True) == early and one.on_host == 0


def test_copies_on_the_host_are_no_copies_on_a_device():
    beside, apart = WorkerBytes(N, "fp32", "host_snapshot"), WorkerBytes(N, "fp32", "host_snapshot", apart=True)
    assert (sum(beside.settled.values()), beside.on_host) == (24 * N, 0)
    assert (sum(apart.settled.values()), apart.on_host) == (12 * N, 12 * N)
    assert apart.summing()["pieces"] == 4 * SUM_PIECE and beside.summing()["pieces"] == 0


def test_what_a_step_scales_and_works_with_is_there_while_it_steps():
    scaled = WorkerBytes(N, "fp32", "inverse", scales=True, work=7)
    assert scaled.peaks() == {"computing": 20 * N, "summing": 24 * N, "stepping": 16 * N + 4 * N + 7}


@pytest.mark.parametrize("blocks, pieces", ((1, 3), (2, 6), (3, 8)))
def test_exact_mode_has_a_gradient_for_each_block(blocks, pieces):
    exact = WorkerBytes(N, "fp32", "snapshot", blocks)
    assert exact.computing()["contributions"] == 4 * N * blocks
    assert exact.summing()["pieces"] == 4 * (4 * SUM_PIECE * blocks + pieces * SUM_PIECE)
    on_device = WorkerBytes(N, "fp32", "snapshot", blocks, apart=True)
    assert on_device.summing()["pieces"] == 4 * (4 * SUM_PIECE * blocks + SUM_PIECE)
