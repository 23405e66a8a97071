"""Accelerate's functions between processes, over the live ranks (team.py)."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate import data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import operations, random

from recycle_plugin.adapters.hugging_face.team import Team
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.average import mean


def install(team: Team) -> None:
    """Have Accelerate gather from, and broadcast among, the live ranks of ``team``."""
    made = Operations(team)
    replace(operations, "_gpu_gather", made.gather)
    replace(operations, "_gpu_gather_object", made.gather_object)
    wrap(operations, "reduce", made.reduce)
    wrap(operations, "pad_across_processes", made.pad)
    wrap(operations, "_gpu_broadcast", made.broadcast)
    wrap(operations, "broadcast_object_list", made.broadcast_object_list)
    wrap(random, "synchronize_rng_state", made.synchronize)
    wrap_method(data_loader.DataLoaderDispatcher, "__iter__", _refuse_dispatch)
    wrap_method(AcceleratedScheduler, "step", made.step_scheduler)
    wrap_method(PartialState, "wait_for_everyone", made.wait_for_everyone)


def wrap(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function of a module by ``wrapper(stock, …)``."""
    stock = getattr(module, name)
    replace(module, name, functools.wraps(stock)(functools.partial(wrapper, stock)))


def wrap_method(of: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by ``wrapper(stock, self, …)``."""
    stock = getattr(of, name)

    @functools.wraps(stock)
    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        return wrapper(stock, self, *arguments, **named)

    setattr(of, name, wrapped)


def replace(module: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace the function ``name`` of ``module`` in all modules that have imported it."""
    stock = getattr(module, name)
    for each in [one for one in sys.modules.values() if getattr(one, "__dict__", {}).get(name) is stock]:
        setattr(each, name, instead)


class Operations:
    """Replacements for Accelerate's functions; those that get ``stock`` call it."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def gather(self, tensor: Any) -> Any:
        """Gather tensors, alone or nested: the rows of the live ranks, the same ranks for all tensors, concatenated."""
        return self._team.steadily(
            lambda: operations.recursively_apply(self._team.joined, tensor, error_on_other_type=True)
        )

    def gather_object(self, given: Any) -> list[Any]:
        """Gather lists: those of the live ranks, in one."""
        return [*itertools.chain.from_iterable(self._team.objects(given).values())]

    def reduce(self, stock: Callable[..., Any], tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        """Reduce a tensor; a mean is over the live ranks, even before all agree on their count."""

        def reduce() -> Any:
            if reduction != "mean":
                return stock(tensor, reduction, scale)
            return operations.recursively_apply(lambda each: mean(each, None), tensor, error_on_other_type=True)

        return self._team.kept(f"reduce, {reduction}", PartialState().device, reduce)

    def pad(self, stock: Callable[..., Any], tensor: Any, dim: int = 0, *arguments: Any, **named: Any) -> Any:
        """Pad to the largest size. In steps that are over, this rank's tensor doesn't count: others' may be smaller."""

        def emptied(each: torch.Tensor) -> torch.Tensor:
            there = -each.ndim <= dim < each.ndim and not each.is_nested  # otherwise stock leaves it as it is
            return each.narrow(dim, 0, 0) if there else each

        if self._team.replay is not None:
            tensor = operations.recursively_apply(emptied, tensor, error_on_other_type=True)
        return stock(tensor, dim, *arguments, **named)

    def broadcast(self, stock: Callable[..., Any], data: Any, src: int = 0) -> Any:
        """Broadcast tensors; ``src`` counts among the live ranks."""

        def broadcast(tensor: torch.Tensor) -> torch.Tensor:
            send = lambda: self._from(src, lambda rank: stock(tensor, src=rank))
            return tensor.copy_(self._team.kept("broadcast", tensor.device, send))

        return operations.recursively_apply(broadcast, data, error_on_other_type=True)

    def broadcast_object_list(self, stock: Callable[..., Any], object_list: list[Any], from_process: int = 0) -> Any:
        """Broadcast objects; ``from_process`` counts among the live ranks."""

        def broadcast() -> list[Any]:
            return [*self._from(from_process, lambda rank: stock(object_list, from_process=rank))]

        object_list[:] = self._team.kept("broadcast_object_list", PartialState().device, broadcast)
        return object_list

    def synchronize(self, stock: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Synchronise random numbers with those of process 0."""

        def synchronize(rank: int) -> None:
            torch.distributed.broadcast = functools.partial(self._synchronized, broadcast, rank)
            try:
                stock(*arguments, **named)
            finally:
                torch.distributed.broadcast = broadcast

        broadcast = torch.distributed.broadcast
        if self._team.replay is not None:
            synchronize(0)
        else:
            self._from(0, synchronize)

    def wait_for_everyone(self, stock: Callable[..., Any], of: Any) -> None:
        """Wait for all live ranks, which then know the first process: it often writes something next."""
        self._team.agree()

    def step_scheduler(self, stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> None:
        """Step a scheduler by the samples of a whole batch: a loss does not change the job's number of steps."""
        with self._team.as_at_start():
            stock(of, *arguments, **named)

    def _from(self, process: int, send: Callable[[int], Any]) -> Any:
        """Return ``send(rank)`` for the rank of ``process``, or for its successor if that rank is lost meanwhile."""
        live = self._team.live
        while True:
            try:
                return send(live[process])
            except RecycleError:
                if live[process] in (left := self._team.agree()):
                    raise
                live = left

    def _synchronized(self, stock: Callable[..., Any], rank: int, tensor: torch.Tensor, src: int) -> None:
        """Set ``tensor`` to the state of the generator on ``rank``. A newcomer gets it from the others, which have
        passed this call.
        """
        if self._team.known:
            tensor.copy_(self._team.known.pop(0))
        else:

            def send() -> torch.Tensor:
                stock(tensor, rank)
                return tensor

            tensor.copy_(self._team.kept("synchronisation of random numbers", tensor.device, send))
        if self._team.synchronized is not None:
            self._team.synchronized.append(tensor.detach().cpu().clone())


def _refuse_dispatch(stock: Callable[..., Any], of: Any) -> Any:
    raise RecycleError(
        "Accelerate reads these batches on process 0 alone, and the data would be lost with it (dispatch_batches, "
        "which an IterableDataset has by default): set dispatch_batches=False, for Hugging Face's Trainer by "
        'accelerator_config={"dispatch_batches": False}'
    )
