"""Parts of Megatron-LM's start and loop that a worker does by itself, whoever is lost: timers and loading."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recycle_plugin.runtime.control.session import Session

LOADED = "what Megatron-LM's start has loaded"
COUNTS = ("iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples",
          "num_floating_point_operations_so_far")  # fmt: skip


def without_collectives() -> None:
    """Have Megatron's timers wait for nobody: a timer's line has this worker's times in place of all workers'."""
    from megatron.core import timers

    if hasattr(timers.Timer, "recycle"):
        return
    for name in ("start", "stop"):
        _without_barrier(timers.Timer, name)
    timers.Timer.recycle = True
    timers.dist_all_gather_func = lambda whole, own: whole.copy_(own.repeat(whole.numel() // own.numel()))
    stock = timers.Timers._get_elapsed_time_all_ranks
    timers.Timers._get_elapsed_time_all_ranks = lambda self, names, reset, barrier: stock(self, names, reset, False)


def _without_barrier(owner: type, name: str) -> None:
    stock = getattr(owner, name)
    setattr(owner, name, lambda self, barrier=False: stock(self, barrier=False))


@contextmanager
def loading(session: Session, args: Namespace) -> Iterator[Callable[[Any], None]]:
    """A context in which Megatron-LM builds the model, and loads a checkpoint if there is one.

    A newcomer loads none, since its state comes from its peers, and the checkpoint on disk may be newer than the one
    its predecessor loaded. It recalls its predecessor's counts and its scheduler's numbers instead. Call the yielded
    function with the scheduler once everything is built.
    """
    startup = session.hooks.startup
    if not session.view.newcomer:

        def remember(scheduler: Any) -> None:
            counts = {name: getattr(args, name) for name in COUNTS if hasattr(args, name)}
            startup.remember(LOADED, (counts, scheduler.state_dict()))

        yield remember
        return

    def recall(scheduler: Any) -> None:
        counts, scheduled = startup.recall(LOADED)
        vars(args).update(counts | paths)
        scheduler.num_steps = 0
        scheduler.load_state_dict(scheduled)

    paths = {name: getattr(args, name) for name in ("load", "pretrained_checkpoint") if hasattr(args, name)}
    vars(args).update(dict.fromkeys(paths))
    with torch.random.fork_rng(devices=[]):
        yield recall
