"""Stock checkpoints from a degraded pipeline, complete.

Stock DeepSpeed lets replica 0 write each stage's layers and optimizer state, and rank 0 the ``latest``
file; either may be dead.  Here the lowest live replica of each stage, and the lowest live rank, play
those parts while the stock code runs.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

from recycle_plugin.core.ids import Seat
from recycle_plugin.core.protocol import Generation


@contextmanager
def stand_in(engine: Any, seat: Seat, generation: Generation) -> Iterator[None]:
    """``engine`` writes what its stage's, and the job's, lowest live member has to write."""
    writer = min(member.seat.replica for member in generation.members if member.seat.stage == seat.stage) == seat.replica
    first = min(member.rank for member in generation.members) == engine.global_rank
    grid, module = engine.grid, engine.module
    kept = (grid.data_parallel_id, engine.save_non_zero_checkpoint, engine.global_rank, module.checkpoint_parallel_write_pipeline)
    grid.data_parallel_id = 0 if writer else seat.replica + grid.data_parallel_size
    engine.save_non_zero_checkpoint = writer
    engine.global_rank = 0 if first else max(1, engine.global_rank)
    module.checkpoint_parallel_write_pipeline = False
    try:
        yield
    finally:
        grid.data_parallel_id, engine.save_non_zero_checkpoint, engine.global_rank, module.checkpoint_parallel_write_pipeline = kept
