"""The live ranks as Accelerate counts processes and gathers over them.

Accelerate and transformers gather a row from every process, multiply by ``num_processes``, deal data by
``process_index``, and let process 0 write. After a loss all four refer to the live ranks, in order. Members may hear of
a loss at different places of the script, and would then differ in all four. So the count changes only in gathers, whose
rows are the same on every live rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import operations

from recycle_plugin.adapters.hugging_face.record import Record, Replay
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.calls import object_of, text_of
from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.collectives.outcomes import LARGEST
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import bytes_of

T = TypeVar("T")
SHARDS = (BatchSamplerShard, IterableDatasetShard)


class Team:
    """The live ranks of the job, as agreed by all of them. ``between()``: whether the script is between two steps. The
    number of ranks does not change inside a step, because its losses are multiplied by it.
    """

    def __init__(self, session: Session, group: MemberGroup, between: Callable[[], bool]) -> None:
        self._session, self._group, self._between = session, group, between
        self.size = group.size()
        self.live = tuple(range(self.size))
        self._hosts: dict[int, str] = {}  # by rank, as far as known
        self.dealt: tuple[int, ...] = self.live  # ranks of the last evaluation
        self._tell: Callable[[tuple[int, ...]], None] | None = None
        self.synchronized: list[torch.Tensor] | None = None  # kept results of Accelerate's synchronisations, if any
        self.known: list[torch.Tensor] = []  # of these, a newcomer's from the others, in order
        self.record: Record | None = None  # of calls between steps, if loops rejoin
        self.replay: Replay | None = None  # of the record, in a script that goes through steps that are over

    @property
    def is_first(self) -> bool:
        """Whether this rank does the work that one process does for all."""
        return self.replay is None and self.live[0] == self._session.rank

    def kept(self, name: str, device: torch.device, call: Callable[[], T]) -> T:
        """Return ``call()``, the same on all live ranks. In past steps return the kept result of ``name`` instead, on
        ``device``.
        """
        if self.replay is not None:
            found = self.replay.next(name)
            self.live = found.live
            _set(num_processes=len(self.live))
            return cast(T, operations.recursively_apply(lambda each: each.to(device, copy=True), found.value))
        before = self.live
        with self.unkept():  # its own calls are part of it
            value = call()
        if self.record is not None:
            self.record.add(name, value, before, self.live)
        return value

    @contextmanager
    def unkept(self) -> Iterator[None]:
        """A context whose calls are not kept, since newcomers' scripts do not repeat them."""
        record, self.record = self.record, None
        try:
            yield
        finally:
            self.record = record

    def agree(self) -> tuple[int, ...]:
        """Return the live ranks, the same on each of them, also of losses in the present step. All of them call it."""
        return tuple(self.rows(torch.zeros(1)))

    def rows(self, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return each live rank's ``tensor`` by rank, in order; shape and dtype are the same on all. It goes in pieces.
        The result of each is kept for members that a loss has cut off, so all get the same rows.
        """
        name = f"gather of {str(tensor.dtype).removeprefix('torch.')} in {tensor.ndim} dimensions"
        return self.kept(name, tensor.device, lambda: self._rows(tensor))

    def _rows(self, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        flat = bytes_of(tensor.detach().contiguous())
        there, pieces = set(range(self.size)), []
        for piece in flat.split(LARGEST // self.size - 1):
            own = torch.cat([piece.new_ones(1), piece])  # a leading one marks a row that has come
            found = own.new_zeros(self.size, own.numel())
            self._group.gather_rows("all_gather", found, own).wait()
            there &= set(found[:, 0].nonzero().flatten().tolist())
            pieces.append(found[:, 1:])
        live = tuple(sorted(there))
        self._take(live)
        whole = torch.cat(pieces, dim=1)
        return {rank: whole[rank].clone().view(tensor.dtype).view(tensor.shape) for rank in live}

    def joined(self, tensor: torch.Tensor, kept: Callable[[int, int], int] = lambda rank, size: size) -> torch.Tensor:
        """Return the live ranks' tensors, concatenated: of a rank's ``size`` rows the first ``kept(rank, size)``."""
        found = self.rows(tensor[None] if tensor.ndim == 0 else tensor)
        return torch.cat([row[: kept(rank, len(row))] for rank, row in found.items()])

    def objects(self, given: Any) -> dict[int, Any]:
        """Return each live rank's ``given`` by rank, in order; it must be picklable."""
        text = text_of(given)
        sizes = {rank: int(size) for rank, size in self.rows(torch.tensor([text.numel()])).items()}
        filled = text.new_zeros(max([text.numel(), *sizes.values()]))  # others' may be shorter, of steps that are over
        filled[: text.numel()] = text
        rows = self.rows(filled).items()
        return {rank: object_of(row[: sizes[rank]]) for rank, row in rows}

    def steadily(self, gather: Callable[[], T]) -> T:
        """Return ``gather()``, repeated until no rank is lost in it: all its tensors have rows of the same ranks."""
        while True:
            before = self.live if self.replay is None else self.replay.live_before(self.live)
            found = gather()
            if self.live == before:
                return found

    def deal(self, dataloader: Any) -> None:
        """Deal the samples of an evaluation by ``dataloader``, prepared by Accelerate, to the live ranks."""
        self.dealt = self.agree()
        sampler = getattr(dataloader, "batch_sampler", None)
        if isinstance(sampler, SkipBatchSampler):  # skip_first_batches
            sampler = sampler.batch_sampler
        for part in (sampler, getattr(dataloader, "dataset", None)):
            if isinstance(part, SHARDS):
                self._check_split(part)
                # a rank that was away then takes as many batches as any
                place = self.dealt.index(self._session.rank) if self._session.rank in self.dealt else 0
                part.num_processes, part.process_index = len(self.dealt), place

    def _check_split(self, shard: BatchSamplerShard | IterableDatasetShard) -> None:
        if shard.split_batches and shard.batch_size % len(self.dealt):
            raise RecycleError(
                f"split_batches with batches of {shard.batch_size}, which can't be divided among the "
                f"{len(self.dealt)} ranks that are left: leave it out"
            )

    @contextmanager
    def told_of_losses(self, tell: Callable[[tuple[int, ...]], None]) -> Iterator[None]:
        """A context of an evaluation: all ranks call ``tell(the ranks left)`` after a gather that lacks one of them."""
        before, self._tell = self._tell, tell
        try:
            yield
        finally:
            self._tell = before

    @contextmanager
    def as_seen(self) -> Iterator[None]:
        """A context in which process 0 is the first rank that this rank knows to be alive. The others may not agree
        yet: scripts may call the context's content on one rank only.
        """
        agreed = self.live
        self._count(tuple(sorted(set(self._session.view.roster.ranks) & set(agreed))))
        try:
            yield
        finally:
            self._count(agreed)

    @contextmanager
    def as_at_start(self) -> Iterator[None]:
        """A context that counts processes as at the start of the job."""
        before = PartialState().process_index
        _set(num_processes=self.size, process_index=self._session.rank)
        try:
            yield
        finally:
            _set(num_processes=len(self.live), process_index=before)

    def passed(self, live: tuple[int, ...]) -> None:
        """Record that this rank's script is through the steps that were over, and that the ranks ``live`` are alive."""
        self.replay = None
        self._count(live)

    def warn(self, text: str) -> None:
        """Warn the user, once for all ranks."""
        if self.is_first:
            self._session.note("warning", text)

    def _take(self, there: tuple[int, ...]) -> None:
        startup = self._session.hooks.startup
        if startup is not None and startup.alone:  # the result is this rank's predecessor's
            return
        if there != self.live and self._between():
            self._count(there)
        if self._tell is not None and there != self.dealt:
            self._tell(there)

    def _count(self, live: tuple[int, ...]) -> None:
        self.live = live
        rank = self._session.rank
        self._hosts |= {member.rank: member.host for member in self._session.view.roster}
        here = [each for each in live if self._hosts.get(each) == self._hosts[rank]]
        _set(num_processes=len(live), process_index=live.index(rank), local_process_index=here.index(rank))


def _set(**numbers: int) -> None:
    for state in (PartialState, AcceleratorState):
        state._shared_state.update(numbers)
