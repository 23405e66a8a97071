"""Mistakes in what goes over NCCL, each to be switched on alone: what a loss over the false NCCL has to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recycle_plugin.runtime.collectives import in_flight
from recycle_plugin.runtime.collectives.asked import Call
from recycle_plugin.runtime.collectives.confirmed import ConfirmedLink
from recycle_plugin.runtime.collectives.link import Handle
from recycle_plugin.runtime.collectives.nccl import Begun, NcclLink

Mistakes = dict[str, Callable[[], object]]
IN_LINKS: Mistakes = {}  # which a stuck sum of two members shows
IN_CALLS: Mistakes = {}  # which a script's calls show
IN_TENSORS: Mistakes = {}  # which boundary tensors show
IN_SUMS: Mistakes = {}  # which the weights of a job show


def mistake(name: str, *where: Mistakes) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def register(patch: Callable[[], object]) -> Callable[[], object]:
        for each in where:
            each[name] = patch
        return patch

    return register


@mistake("what is launched counts as over", IN_LINKS)
def trust_the_stream() -> None:
    """As in stock, where all that follows is behind it on the device."""
    launch = NcclLink._launch

    def changed(self: NcclLink, begun: Begun) -> None:
        launch(self, begun)
        if self.connected:
            begun.handle.end()

    NcclLink._launch = changed


@mistake("an event counts though an abort has let it happen", IN_LINKS)
def trust_the_event() -> None:
    give_up = NcclLink._give_up

    def changed(self: NcclLink, error: Any) -> Any:
        launched, self._launched = self._launched, type(self._launched)()
        down = give_up(self, error)
        if launched:
            while not all(each.over.poll() for each in launched):
                self._group.abort()
            for each in launched:
                each.over.wait(0)
                each.handle.end()
        return down

    NcclLink._give_up = changed


@mistake("the end is set after the abort", IN_LINKS)
def abort_first() -> None:
    give_up = NcclLink._give_up

    def changed(self: NcclLink, error: Any) -> Any:
        launched = [each.handle for each in self._launched]
        if launched and self._group is not None:
            self._group.abort()
            for handle in launched:
                handle.wait(60)
        return give_up(self, error)

    NcclLink._give_up = changed


@mistake("what is over here counts", IN_CALLS, IN_TENSORS, IN_SUMS)
def trust_oneself() -> None:
    """Though another member's abort may have ended it."""

    def changed(self: ConfirmedLink, here: Handle, everywhere: Handle) -> None:
        everywhere.end(here.error)

    ConfirmedLink._confirm = changed


@mistake("a sum of the script is made in place", IN_CALLS)
def work_in_place() -> None:
    def changed(call: Call, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    in_flight._buffer = changed
