"""Mistakes in the mover over links of two, each to be switched on alone: what a link that fails has to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recycle_plugin.runtime.collectives.link import Handle, Link, Operation
from recycle_plugin.runtime.collectives.pairs import LinkedPairs, Parcel, Way
from recycle_plugin.runtime.movers.wire import Apart

Plant = Callable[[pytest.MonkeyPatch], None]
IN_PAIRS: dict[str, Plant] = {}


def mistake(name: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        IN_PAIRS[name] = plant
        return plant

    return register


@mistake("a tensor is announced before its operation is launched")
def announce_early(patch: pytest.MonkeyPatch) -> None:
    begin = LinkedPairs._begin_sending

    def changed(self: LinkedPairs, way: Way, parcel: Parcel) -> None:
        way.link = way.link if isinstance(way.link, Early) else Early(way.link)
        begin(self, way, parcel)

    patch.setattr(LinkedPairs, "_begin_sending", changed)


class Early:
    """A link that says of what it is to begin that it is launched."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def start(self, operation: Operation, launched: Callable[[], object]) -> Handle:
        launched()
        return self._link.start(operation)


@mistake("a link goes on after a failure")
def go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinkedPairs, "_fail", lambda self, way: None)


@mistake("the other side does not hear of a failure")
def tell_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinkedPairs, "_end", lambda self, way: way.link.abort())


@mistake("what was under way at a failure counts as sent")
def send_once(patch: pytest.MonkeyPatch) -> None:
    sent = LinkedPairs._sent

    def changed(self: LinkedPairs, way: Way, number: int, handle: Handle) -> None:
        way.under_way.pop(number, None) if handle.error is not None else sent(self, way, number, handle)

    patch.setattr(LinkedPairs, "_sent", changed)


@mistake("any operation is the next one")
def count_nothing(patch: pytest.MonkeyPatch) -> None:
    begin = LinkedPairs._begin_receiving

    def changed(self: LinkedPairs, sender: str, message: Apart) -> None:
        self._in[sender].begun = message.number
        begin(self, sender, message)

    patch.setattr(LinkedPairs, "_begin_receiving", changed)
