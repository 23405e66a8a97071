"""A stage's weight gradients in a step: from contributions over their sum to the commit.

Contributions are in the framework's gradients (runtime/stage/gradient_store.py), in exact mode in sums of blocks. For
weights that several stages share, the sum over the stages is applied (runtime/stage/tied.py). The stage's own sum is
kept beside it, to make it again.

The sum stays in second buffers until every bucket is done, so an interruption leaves the contributions intact. It is
kept until the step is committed: a peer may lack it, or this worker may have to apply it again, or take the step back
(runtime/state/undo/inverse.py, which keeps no copy).
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
from recycle_plugin.runtime.devices.host import bytes_of
from recycle_plugin.runtime.devices.port import COPY_S, Device
from recycle_plugin.runtime.movers.shares import Sums
from recycle_plugin.runtime.stage.block_sums import ALONE, BlockSums
from recycle_plugin.runtime.stage.gradient_store import GradientStore, Slots, empty, swapped
from recycle_plugin.runtime.stage.ports import Buckets
from recycle_plugin.runtime.stage.tied import TiedWeight
from recycle_plugin.runtime.state.step_hooks import hooks_of, is_scripts

# optimizers known not to change gradients; Nesterov's foreach form does
READ_ONLY = (torch.optim.Adam, torch.optim.AdamW)
Bucket = list[int]  # places of parameters


def _may_change_gradients(optimizer: torch.optim.Optimizer) -> bool:
    before, after = hooks_of(optimizer)
    return type(optimizer) not in READ_ONLY or any(map(is_scripts, (*before, *after)))


def _versions(gradients: Sequence[torch.Tensor | None]) -> list[int | None]:
    return [None if gradient is None else gradient._version for gradient in gradients]


class WorkerContributions:
    """A worker's contributions to a step's ``gradients``, by block if there are any; for or from another worker."""

    def __init__(self, gradients: GradientStore, blocks: BlockSums | None, device: Device) -> None:
        self._gradients, self._blocks, self._device = gradients, blocks, device

    def forget(self) -> None:
        """Drop all contributions."""
        self._gradients.zero()
        if self._blocks is not None:
            self._blocks.clear()

    def of(self, blocks: Iterable[Block]) -> Sums:
        """Return the sums of ``blocks``, which must be all blocks here, in host memory."""
        if self._blocks is None:
            return {None: self._on_host(self._gradients.view())}
        return {block: self._on_host(self._blocks.of(block)) for block in blocks}

    def add(self, sums: Sums) -> None:
        """Add another worker's contributions. Raises RecycleError for a block that is here already."""
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
    """Sums ``gradients`` over a stage's workers, by ``buckets`` or, in exact mode, from ``blocks``. ``tied``: those of
    the parameters that other stages share.
    """

    def __init__(
        self,
        buckets: Buckets,
        store: StepStore,
        gradients: GradientStore,
        blocks: BlockSums | None,
        tied: Sequence[TiedWeight],
    ) -> None:
        self._buckets, self._store, self._gradients, self._blocks = buckets, store, gradients, blocks
        self.find_places()
        self._retrained: tuple[int, int] | None = None  # (first step, hash of the parameters)
        self._tied = {self._places[weight.parameter]: weight for weight in tied}
        self._step = 0  # being applied, or applied last
        self._factors: list[Callable[[torch.Tensor], torch.Tensor]] = []  # that scaled its gradients

    def find_places(self) -> None:
        """Use the parameters that the gradients have now."""
        self._places = {parameter: place for place, parameter in enumerate(self._gradients.parameters)}
        self._cut = self._cut_buckets()
        self._note(empty(self._gradients))

    def retrain(self, step: int, trained: int) -> None:
        """Use the parameters that the gradients have now, from ``step`` on. Before that step's sum the stage's workers
        compare ``trained``, a hash of these parameters below 2 ** 63.
        """
        self.find_places()
        self._retrained = step, trained

    def reduce(self, step: int, holder: int | None, agree: Callable[[], object] = bool) -> list[torch.Tensor] | None:
        """Sum the stage's contributions, or take the sum from the live worker of rank ``holder``: one tensor per
        parameter.

        None if this worker has the sum already, and only helped the others. ``agree()`` is called when all of the sum
        is here, and the contributions are still intact. Raises RecycleError if ``step`` changes the trained parameters,
        and the stage's workers differ in these.
        """
        if holder is None and self._retrained is not None and self._retrained[0] == step:
            self._compare_trained(step, self._retrained[1])
        owners = self._blocks.owners(self._buckets.group) if self._blocks is not None and holder is None else None
        reduced = [(bucket, self._sum(bucket, step, holder, owners)) for bucket in self._cut]
        agree()
        if self._whole(step) is not None:
            return None  # only the others needed it
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
        """Sum the stage's contributions, which are all here: one tensor per parameter."""
        owners = None if self._blocks is None else self._blocks.owners(ALONE)
        return self._take([(bucket, self._all_here(bucket, owners)) for bucket in self._cut])

    def _all_here(self, bucket: Bucket, owners: list[list[Block]] | None) -> torch.Tensor:
        if self._blocks is not None and owners is not None:
            flat = self._blocks.total(bucket, owners, ALONE)
        else:
            flat = self._buckets.flatten(self._filled(bucket, self._gradients.view())).clone()
        return flat.mul_(1.0 / self._buckets.group.size()) if self._buckets.averages else flat

    def _filled(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None] | None) -> list[torch.Tensor]:
        """Return those of ``gradients`` that are in ``bucket``, with zeros for what is missing."""
        parameters = self._gradients.parameters
        return [
            torch.zeros_like(parameters[place]) if gradients is None or (one := gradients[place]) is None else one
            for place in bucket
        ]

    def _take(self, reduced: Iterable[tuple[Bucket, torch.Tensor]]) -> list[torch.Tensor]:
        """Put each bucket's sum in the place of its contributions; returns one tensor per parameter."""
        whole = self._unflattened(reduced)
        self._gradients.swap(whole)
        return whole

    def _unflattened(self, summed: Iterable[tuple[Bucket, torch.Tensor]]) -> list[torch.Tensor]:
        """Return one tensor per parameter from the flat tensors of all buckets."""
        parameters, found = self._gradients.parameters, dict[int, torch.Tensor]()
        for bucket, flat in summed:
            found |= zip(bucket, self._buckets.unflatten(flat, [parameters[place] for place in bucket]), strict=True)
        return [found[place] for place in range(len(parameters))]

    def tied_of(self, totals: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return :meth:`tie`'s result for any stage's ``totals``, given in the order of the weights' names."""
        named = sorted(self._tied.items(), key=lambda each: each[1].name)
        return {place: total for (place, _), total in zip(named, totals, strict=True)}

    def tied_in_order(self, totals: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the result of :meth:`tie`, in the order of the weights' names."""
        return tuple(totals[place] for place, _ in sorted(self._tied.items(), key=lambda each: each[1].name))

    def tie(self, step: int) -> dict[int, torch.Tensor]:
        """Sum the tied gradients over the stages, from each stage's sum: {the parameter's place: tensor}. Raises
        RecycleError if it is computed again with another result.
        """
        totals = {place: weight.total(self._sums(step)[place]) for place, weight in self._tied.items()}
        before = self._of("tied", step)
        for place, weight in self._tied.items() if before else ():
            if not torch.equal(bytes_of(before[place]), bytes_of(totals[place])):
                raise RecycleError(
                    f"the gradient of {weight.name}, step {step}, differs between two sums over the stages that share "
                    "it: this is a mistake of the plugin; go on from the last checkpoint, "
                    "and report it with the run's events.jsonl"
                )
        return totals

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Return a context in which the gradients are the sum of ``step``, whatever has begun for the next step."""
        with swapped(self._gradients, [*self._applied(step)]):
            yield

    def apply(self, step: int, optimizer: torch.optim.Optimizer, step_once: Callable[[], None], clipped: bool) -> None:
        """Call ``step_once`` with the sum of ``step`` in the gradients' place; the sum itself stays unchanged.

        The optimizer leaves a parameter alone if the sum lacks it (:meth:`gathered`). ``clipped``: ``step_once`` brings
        its own gradients. Raises AssertionError if the optimizer has changed the sum.
        """
        whole, sums = self._applied(step), self._gradients.view()
        with swapped(self._gradients, [*whole]):
            if not clipped and _may_change_gradients(optimizer):
                self._gradients.change(torch.clone)
            versions = _versions(whole)
            self._step, self._factors = step, []
            self._note(self._gradients.view())
            step_once()
            self._note(empty(self._gradients))
        assert versions == _versions(whole), "the optimizer has changed gradients that a peer may still need"
        left = zip(sums, self._sums(step), strict=True)  # what has begun for the next step stays
        self._gradients.swap([None if mine is gradient else mine for mine, gradient in left])

    def any(self, step: int) -> bool:
        """Return whether ``step`` applies anything; True if there are no parameters."""
        return not self._places or any(gradient is not None for gradient in self._applied(step))

    def empty(self) -> None:
        """Empty the gradients. The kept sum stays, and so do sums of blocks (Stage.forget_sums)."""
        self._gradients.zero()

    def scale(self, factor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Scale the gradients of the step that is being applied: ``factor(gradient)``, a new tensor, replaces each. The
        old ones stay for peers that lack them.
        """
        found = zip(self._gradients.parameters, self._gradients.view(), strict=True)
        unchanged = [self.holds(parameter, gradient) for parameter, gradient in found]
        self._note(empty(self._gradients))  # so that each old tensor can be freed in turn
        self._gradients.change(factor)
        self._factors.append(factor)
        self._note([gradient if same else None for gradient, same in zip(self._gradients.view(), unchanged)])

    def holds(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Return whether ``gradient``, applied to ``parameter``, is as it was put there (see :meth:`applied_to`)."""
        place = self._places.get(parameter)
        if place is None or gradient is None or gradient is not self._put[place]:
            return False
        return gradient._version == self._versions[place]

    def applied_to(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what the last step applied to ``parameter``, until its commit: the kept sum, scaled again."""
        place, over_stages = self._places[parameter], self._of("tied", self._step)
        gradient: torch.Tensor = over_stages[place] if place in self._tied else self._sums(self._step)[place]
        for factor in self._factors:
            gradient = factor(gradient)
        return gradient

    def _note(self, gradients: Slots) -> None:
        """Note the ``gradients`` that are as they were put in their places, with their versions."""
        self._put, self._versions = gradients, _versions(gradients)

    def applied(self, step: int, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradient that ``step`` applies to each of ``parameters``, for other workers; it must not be
        changed. None for a parameter that the step leaves alone, for example since it was frozen.
        """
        own, over_stages = self._sums(step), self._of("tied", step)
        places = map(self._places.get, parameters)
        return [
            None if place is None else over_stages[place] if place in self._tied else own[place] for place in places
        ]

    def gathered(self, step: int, sums: Mapping[torch.Tensor, torch.Tensor]) -> dict[Datum, Any]:
        """Return the results of REDUCE and TIE, by datum, for a worker that has received only these ``sums``, by
        parameter.
        """
        whole = [sums.get(parameter) for parameter in self._gradients.parameters]
        found: dict[Datum, Any] = {self._store.of_layers("reduced", step): whole}
        if self._store.tied:  # also if all that the stages share is frozen
            found[self._store.of_layers("tied", step)] = {place: whole[place] for place in self._tied}
        return found

    def _applied(self, step: int) -> list[torch.Tensor | None]:
        """Return what the step applies: the stage's own sum, and for tied weights the sum over the stages."""
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
            total = self._blocks.total(bucket, owners, self._buckets.group)
            return total.mul_(1.0 / self._buckets.group.size()) if self._buckets.averages else total
        return self._buckets.all_reduce(self._filled(bucket, self._gradients.view()))

    def _taken_over(self, bucket: Bucket, holder: int, whole: Sequence[torch.Tensor | None] | None) -> torch.Tensor:
        """Return the sum of ``bucket`` from the worker of rank ``holder``; ``whole``: this worker's, if it has it."""
        flat = self._buckets.flatten(self._filled(bucket, whole)).clone()
        dist.broadcast(flat, holder, self._buckets.group)
        return flat

    # --- what a script makes of a sum (runtime/worker/script_changes.py) ------------------------------------------

    def sums(self, step: int) -> list[torch.Tensor | None]:
        """Return the sum of ``step``, one tensor per parameter, as it is in the store."""
        return self._sums(step)

    def replace_sums(self, step: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replace the sum of ``step``, here and for other workers; parameters with None are not stepped."""
        self._sums(step)[:] = gradients
        self._gradients.swap(gradients)

    def taken_from(self, giver: int, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of the worker of rank ``giver``, on all group members; ``gradients``: this worker's."""
        there = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
        dist.broadcast(there, giver, self._buckets.group)
        found = self._unflattened((bucket, self._taken_over(bucket, giver, gradients)) for bucket in self._cut)
        return [gradient if has else None for gradient, has in zip(found, there.tolist())]

    def _cut_buckets(self) -> list[Bucket]:
        """Group the parameters by dtype, and cut them into buckets as DeepSpeed does. Blocks have smaller buckets,
        since a worker has one more copy of these.
        """
        limit = self._buckets.limit if self._blocks is None else EXACT_BUCKET
        buckets: list[Bucket] = []
        by_dtype: dict[torch.dtype, Bucket] = {}
        for place, parameter in enumerate(self._gradients.parameters):
            by_dtype.setdefault(parameter.dtype, []).append(place)
        for places in by_dtype.values():
            buckets.append([])
            numbers = 0
            for place in places:
                buckets[-1].append(place)
                numbers += self._gradients.parameters[place].numel()
                if numbers > limit:
                    buckets.append([])
                    numbers = 0
        return [bucket for bucket in buckets if bucket]
