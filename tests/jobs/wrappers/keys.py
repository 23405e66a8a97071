"""What a script says itself in its store, beside its training."""

from __future__ import annotations

import threading
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from wrappers.trainers import wait_until


def keys(folder: str) -> None:
    """Rank 0 sets the key "early". All others wait for "late", which rank 1 sets once there is the file ``folder``/set;
    then they write what they find in "early" to ``folder``/heard.RANK.
    """

    def share() -> None:
        wait_until(dist.is_initialized, "the default group")
        store, rank = _get_default_store(), dist.get_rank()
        if rank == 0:
            store.set("early", "set by rank 0")
        elif rank == 1:
            store.wait(["early"])
            Path(folder, "early").touch()
            wait_until(Path(folder, "set").exists, "the test")
            store.set("late", "set by rank 1")
        if rank:
            store.wait(["late"])
            written = Path(folder, f"writing.{rank}")
            written.write_bytes(store.get("early"))
            written.rename(Path(folder, f"heard.{rank}"))

    threading.Thread(target=share, daemon=True).start()
