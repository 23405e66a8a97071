"""A stage's weight gradients in a step: from contributions over their sum to the commit.

Contributions are in the framework's gradients (runtime/stage/gradient_store.py), in exact mode in sums of blocks.  Of
weights that several stages share, what is applied is the sum over the stages (runtime/stage/tied.py), beside the
stage's own, from which it can be made again.

The sum stands in second buffers until every bucket is done, so an interrupted one leaves the contributions as they
were; and it is kept until the step is committed, since a peer may lack it, or this worker may have to apply it once
more, or take the step back (runtime/state/undo/inverse.py, which has no copy of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.worker_bytes import EXACT_BUCKET
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.port import COPY_S, Device
from recycle_plugin.runtime.movers.shares import Sums
from recycle_plugin.runtime.stage.block_sums import ALONE, BlockSums
from recycle_plugin.runtime.stage.gradient_store import GradientStore, swapped
from recycle_plugin.runtime.stage.ports import Buckets
from recycle_plugin.runtime.stage.tied import TiedWeight

# known to leave gradients as they are; Nesterov's foreach form does not
READ_ONLY = (torch.optim.Adam, torch.optim.AdamW)
Bucket = list[torch.Tensor]  # parameters


def _versions(gradients: Sequence[torch.Tensor | None]) -> list[int | None]:
    return [None if gradient is None else gradient._version for gradient in gradients]


class WorkerContributions:
    """A worker's contributions to the ``gradients`` of a step on ``device``, by block where there are ``blocks``; for
    another worker, or from one.
    """

    def __init__(self, gradients: GradientStore, blocks: BlockSums | None, device: Device) -> None:
        self._gradients, self._blocks, self._device = gradients, blocks, device

    def forget(self) -> None:
        """Drop all of them."""
        self._gradients.zero()
        if self._blocks is not None:
            self._blocks.clear()

    def of(self, blocks: Iterable[Block]) -> Sums:
        """The sums of ``blocks``, which are all that there is, in host memory."""
        if self._blocks is None:
            return {None: self._on_host(self._gradients.view())}
        return {block: self._on_host(self._blocks.of(block)) for block in blocks}

    def add(self, sums: Sums) -> None:
        """Add what another worker has contributed.  Raises RecycleError for a block that is here already."""
        for block, tensors in sums.items():
            there = self._device.from_host(tensors, "a share of a replay", shared=True).wait(COPY_S)
            if block is not None and self._blocks is not None:
                self._blocks.put(block, list(there))
            else:
                self._gradients.add(there)

    def _on_host(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        whole = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._gradients.parameters, gradients, strict=True)
        ]
        return self._device.to_host(whole, "a share of a replay", shared=True).wait(COPY_S)


class Gradients:
    """Sums ``gradients`` over a stage's workers, by ``buckets`` or, in exact mode, from ``blocks``.

    ``tied``: those of the parameters that other stages have too.
    """

    def __init__(
        self,
        buckets: Buckets,
        store: StepStore,
        gradients: GradientStore,
        blocks: BlockSums | None,
        tied: Sequence[TiedWeight],
    ) -> None:
        self._buckets, self._store, self._gradients = buckets, store, gradients
        self.find_places()
        self._retrained: tuple[int, int] | None = None  # the step from which on, and a hash of what
        self._blocks = blocks
        self._tied = {self._places[weight.parameter]: weight for weight in tied}
        self._step = 0  # that is being applied, or was applied last
        self._factors: list[Callable[[torch.Tensor], torch.Tensor]] = []  # by which its gradients were scaled
        self._in_place: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}  # by parameter, with the version

    def find_places(self) -> None:
        """Go by the parameters that the gradients have now."""
        self._places = {parameter: place for place, parameter in enumerate(self._gradients.parameters)}

    def retrain(self, step: int, trained: int) -> None:
        """Go by the parameters that the gradients have now, from ``step`` on, before whose sum the stage's workers
        compare ``trained``, a hash below 2 ** 63 of which these are.
        """
        self.find_places()
        self._retrained = step, trained

    def forget(self) -> None:
        """Drop all contributions, and their sum."""
        self._gradients.zero()

    def reduce(self, step: int, holder: int | None, agree: Callable[[], object] = bool) -> list[torch.Tensor] | None:
        """Sum the stage's contributions, or take the sum from the live worker of rank ``holder``: one tensor for each
        parameter.

        None where this worker has the sum already, and only gives it to others.  ``agree()`` is called when all of it
        is here, and the contributions are as they were.  Raises RecycleError where the stage's workers train other
        parameters from ``step`` on, and not all the same.
        """
        if holder is None and self._retrained is not None and self._retrained[0] == step:
            self._compare_trained(step, self._retrained[1])
        owners = self._blocks.owners(self._buckets.group) if self._blocks is not None and holder is None else None
        reduced = [(bucket, self._sum(bucket, step, holder, owners)) for bucket in self._cut()]
        agree()
        if self._whole(step) is not None:
            return None  # here was what the others got
        return self._take(reduced)

    def _compare_trained(self, step: int, trained: int) -> None:
        group = self._buckets.group
        _, live = group.live_position()
        told = torch.empty(live, dtype=torch.int64)
        group.exchange(told, torch.tensor([trained]).repeat(live), [1] * live, [1] * live)
        if told.unique().numel() > 1:
            raise RecycleError(
                f"the scripts of a stage's replicas have frozen or thawed other parameters before step {step}: have "
                "all of them change the same (a random choice needs the same seed on all ranks)"
            )

    def reduce_alone(self) -> list[torch.Tensor]:
        """Sum the stage's contributions, all of which are here: one tensor for each parameter."""
        owners = None if self._blocks is None else self._blocks.owners(ALONE)
        return self._take([(bucket, self._all_here(bucket, owners)) for bucket in self._cut()])

    def _all_here(self, bucket: Bucket, owners: list[list[Block]] | None) -> torch.Tensor:
        if self._blocks is not None and owners is not None:
            flat = self._blocks.total([self._places[parameter] for parameter in bucket], owners, ALONE)
        else:
            flat = self._buckets.flatten(self._contributed(bucket)).clone()
        return flat.mul_(1.0 / self._buckets.group.size()) if self._buckets.averages else flat

    def _contributed(self, bucket: Bucket) -> list[torch.Tensor]:
        """What this worker has contributed, zeros where that is nothing."""
        found = self._gradients.view()
        here = ((parameter, found[self._places[parameter]]) for parameter in bucket)
        return [torch.zeros_like(parameter) if gradient is None else gradient for parameter, gradient in here]

    def _take(self, reduced: Iterable[tuple[Bucket, torch.Tensor]]) -> list[torch.Tensor]:
        """Have the sum of each bucket in the place of its contributions; one tensor for each parameter."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        for bucket, flat in reduced:
            found |= zip(bucket, self._buckets.unflatten(flat, bucket), strict=True)
        whole = [found[parameter] for parameter in self._gradients.parameters]
        self._gradients.swap(whole)
        return whole

    def tied_of(self, totals: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """What :meth:`tie` gives, of the sums over the stages in the order of the weights' names, whichever stage they
        come from.
        """
        named = sorted(self._tied.items(), key=lambda each: each[1].name)
        return {place: total for (place, _), total in zip(named, totals, strict=True)}

    def tied_in_order(self, totals: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What :meth:`tie` has given, in the order of the weights' names."""
        return tuple(totals[place] for place, _ in sorted(self._tied.items(), key=lambda each: each[1].name))

    def tie(self, step: int) -> dict[int, torch.Tensor]:
        """Sum what is tied over the stages, from their own sums: one tensor for each tied parameter, by its place.

        Raises RecycleError where it is made again and comes out otherwise.
        """
        totals = {place: weight.total(self._sums(step)[place]) for place, weight in self._tied.items()}
        before = self._of("tied", step)
        for place, weight in self._tied.items() if before else ():
            if not torch.equal(before[place].view(torch.uint8), totals[place].view(torch.uint8)):
                raise RecycleError(
                    f"the gradient of {weight.name}, step {step}, over the stages that share it has come out in two "
                    "ways: this is a mistake of the plugin; go on from the last checkpoint, "
                    "and report it with the run's events.jsonl"
                )
        return totals

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Inside of this context gradients are the sum of ``step``, whatever has begun for the next step."""
        with swapped(self._gradients, [*self._applied(step)]):
            yield

    def apply(self, step: int, optimizer: torch.optim.Optimizer, step_once: Callable[[], None], clipped: bool) -> None:
        """Call ``step_once`` with the sum of ``step`` in the gradients' place; the sum itself stays as it is.

        What it lacks for a parameter (:meth:`gathered`) the optimizer leaves as it is.  ``clipped``: ``step_once`` puts
        gradients of its own in place.  Raises AssertionError where the optimizer has changed the sum.
        """
        whole, sums = self._applied(step), self._gradients.view()
        with self.of(step):
            if type(optimizer) not in READ_ONLY and not clipped:
                self._gradients.change(torch.clone)
            versions = _versions(whole)
            self._step, self._factors = step, []
            self._note(self._gradients.parameters)
            step_once()
            self._in_place = {}
        assert versions == _versions(whole), "the optimizer has changed gradients that a peer may still need"
        left = zip(sums, self._sums(step), strict=True)  # what has begun for the next step
        self._gradients.swap([None if mine is gradient else mine for mine, gradient in left])

    def any(self, step: int) -> bool:
        """Whether ``step`` applies anything, where there are parameters."""
        return not self._places or any(gradient is not None for gradient in self._applied(step))

    def empty(self) -> None:
        """Have the step that is being applied find no gradients; the sum stays as it is."""
        self._gradients.zero()

    def scale(self, factor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Scale the gradients of the step that is being applied: ``factor(gradient)``, a new tensor, takes the place of
        each; what they were stays for peers that lack it.
        """
        found = zip(self._gradients.parameters, self._gradients.view(), strict=True)
        unchanged = [parameter for parameter, gradient in found if self.holds(parameter, gradient)]
        self._in_place = {}  # so that what was there goes, gradient by gradient
        self._gradients.change(factor)
        self._factors.append(factor)
        self._note(unchanged)

    def holds(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Whether ``gradient``, which the step applies to ``parameter``, is what was put there, so that
        :meth:`applied_to` gives it.
        """
        put, version = self._in_place.get(parameter, (None, 0))
        return put is not None and gradient is put and put._version == version

    def applied_to(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the last step has applied to ``parameter``, until it is committed: the sum that is kept, scaled once
        more.
        """
        place, over_stages = self._places[parameter], self._of("tied", self._step)
        gradient: torch.Tensor = over_stages[place] if place in self._tied else self._sums(self._step)[place]
        for factor in self._factors:
            gradient = factor(gradient)
        return gradient

    def _note(self, parameters: Iterable[torch.Tensor]) -> None:
        found = self._gradients.view()
        here = ((parameter, found[self._places[parameter]]) for parameter in parameters)
        self._in_place = {one: (gradient, gradient._version) for one, gradient in here if gradient is not None}

    def applied(self, step: int, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
        """What ``step`` applies to each of ``parameters``, for other workers, None where it leaves one as it is, also
        since it was frozen: as it is in the store, where nobody changes it.
        """
        own, over_stages = self._sums(step), self._of("tied", step)
        places = map(self._places.get, parameters)
        return [
            None if place is None else over_stages[place] if place in self._tied else own[place] for place in places
        ]

    def gathered(self, step: int, sums: Mapping[torch.Tensor, torch.Tensor]) -> dict[Datum, Any]:
        """What REDUCE and TIE of ``step`` leave at a worker that has been told what they come to for the parameters of
        ``sums``, and does not have the others; by datum.
        """
        whole = [sums.get(parameter) for parameter in self._gradients.parameters]
        found: dict[Datum, Any] = {self._store.of_layers("reduced", step): whole}
        if self._store.tied:  # also if all that the stages share is frozen
            found[self._store.of_layers("tied", step)] = {place: whole[place] for place in self._tied}
        return found

    def _applied(self, step: int) -> list[torch.Tensor | None]:
        """What the step applies: the stage's own sum, and of what is tied that over the stages."""
        over_stages = self._of("tied", step)
        return [
            over_stages[place] if place in self._tied else gradient for place, gradient in enumerate(self._sums(step))
        ]

    def _whole(self, step: int) -> list[Any] | None:
        whole: list[Any] | None = self._of("reduced", step)
        return whole

    def _sums(self, step: int) -> list[Any]:
        whole = self._whole(step)
        assert whole is not None, f"the gradients of step {step} have not been summed here"
        return whole

    def _of(self, kind: str, step: int) -> Any:
        return self._store.get(self._store.of_layers(kind, step))

    def _sum(self, bucket: Bucket, step: int, holder: int | None, owners: list[list[Block]] | None) -> torch.Tensor:
        if holder is not None:
            return self._taken_over(bucket, holder, self._whole(step))
        if owners is not None:
            assert self._blocks is not None, "owners are of blocks"
            total = self._blocks.total([self._places[parameter] for parameter in bucket], owners, self._buckets.group)
            return total.mul_(1.0 / self._buckets.group.size()) if self._buckets.averages else total
        return self._buckets.all_reduce(self._contributed(bucket))

    def _taken_over(self, bucket: Bucket, holder: int, whole: Sequence[torch.Tensor | None] | None) -> torch.Tensor:
        """What the worker of rank ``holder`` has of ``bucket``; ``whole``: what this one has."""
        found = [None if whole is None else whole[self._places[parameter]] for parameter in bucket]
        gradients = [torch.zeros_like(each) if one is None else one for each, one in zip(bucket, found)]
        flat = self._buckets.flatten(gradients).clone()
        dist.broadcast(flat, holder, self._buckets.group)
        return flat

    # --- what a script makes of a sum (runtime/worker/script_changes.py) ------------------------------------------

    def sums(self, step: int) -> list[torch.Tensor | None]:
        """The sum of ``step``, one tensor for each parameter, as it is in the store."""
        return self._sums(step)

    def replace_sums(self, step: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Have ``gradients`` in the place of the sum of ``step``, here and for other workers; what is None is not
        stepped.
        """
        self._sums(step)[:] = gradients
        self._gradients.swap(gradients)

    def taken_from(self, giver: int, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the worker of rank ``giver``, on all that are in the group; ``gradients``: those of this
        one.
        """
        there = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
        dist.broadcast(there, giver, self._buckets.group)
        found: dict[torch.Tensor, torch.Tensor] = {}
        for bucket in self._cut():
            flat = self._taken_over(bucket, giver, gradients)
            found |= zip(bucket, self._buckets.unflatten(flat, bucket), strict=True)
        return [found[parameter] if has else None for parameter, has in zip(self._gradients.parameters, there.tolist())]

    def _cut(self) -> list[Bucket]:
        """Parameters by dtype, cut into buckets as DeepSpeed does; smaller ones for blocks, which a worker then has
        once more.
        """
        limit = self._buckets.limit if self._blocks is None else EXACT_BUCKET
        buckets: list[Bucket] = []
        by_dtype: dict[torch.dtype, Bucket] = {}
        for parameter in self._gradients.parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            buckets.append([])
            numbers = 0
            for parameter in parameters:
                buckets[-1].append(parameter)
                numbers += parameter.numel()
                if numbers > limit:
                    buckets.append([])
                    numbers = 0
        return [bucket for bucket in buckets if bucket]
