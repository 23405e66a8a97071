"""Mistakes in sums over NCCL, each to be switched on alone: what a kill over the false NCCL has to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle_plugin.runtime.collectives.nccl import Begun, NcclLink

MISTAKES: dict[str, Callable[[], object]] = {}


def mistake(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def register(patch: Callable[[], object]) -> Callable[[], object]:
        MISTAKES[name] = patch
        return patch

    return register


@mistake("what is launched counts as over")
def trust_the_stream() -> None:
    """As in stock, where all that follows is behind it on the device."""
    launch = NcclLink._launch

    def changed(self: NcclLink, begun: Begun) -> None:
        launch(self, begun)
        if self.connected:
            begun.handle.end()

    NcclLink._launch = changed


@mistake("an event counts though an abort has let it happen")
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


@mistake("the end is set after the abort")
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
