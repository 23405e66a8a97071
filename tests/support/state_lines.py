"""The lines on which a newcomer gets its stage's state."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection
from functools import partial
from itertools import count

import torch

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Head, Item, Marker, Sums, Unit
from recycle_plugin.runtime.catch_up.inlet import TcpInlet
from recycle_plugin.runtime.catch_up.listener import StateListener
from recycle_plugin.runtime.catch_up.outlet import TcpOutlet
from recycle_plugin.runtime.catch_up.rate import Rate
from recycle_plugin.runtime.catch_up.wire import Arrival
from recycle_plugin.runtime.state.units import UnitValue
from tests.support.secret import SECRET

NEWCOMER = WorkerId(3, 1)
PATIENCE_S = 30.0


class Ends:
    """A source's listener, and newcomers that come there. ``damaged``: the chunks, by number from 1 on, of which a byte
    changes on its way.
    """

    def __init__(self, session, alone: bool = False, damaged: Collection[int] = (), **given) -> None:
        self._damaged, self._chunks = damaged, count(1)
        self.session, self.changed, self.noted = session, threading.Condition(), []
        self.secret = given.pop("secret", SECRET)  # of newcomers
        rate = Rate(lambda: alone, idle=lambda: 8.0)
        self.listener = StateListener(session, given.pop("interface", None), rate, **given)
        self.inlets: list[TcpInlet] = []

    def line(self, newcomer: WorkerId = NEWCOMER) -> tuple[TcpOutlet, TcpInlet]:
        outlet = self.listener.expect(newcomer)
        outlet._write = partial(self._write, outlet._write)
        return outlet, self.come(newcomer)

    def _write(self, write: Callable[..., None], connection: socket.socket, parts: list[memoryview]) -> None:
        if len(parts) > 1 and next(self._chunks) in self._damaged:  # what announces it, and its bytes
            changed = bytearray(parts[1])
            changed[len(changed) // 2] ^= 1
            parts = [parts[0], memoryview(changed)]
        write(connection, parts)

    def come(self, newcomer: WorkerId = NEWCOMER, job: str = "job") -> TcpInlet:
        made = TcpInlet(self.listener.address, Arrival(job, newcomer), self.secret, self.changed, self.noted.append)
        self.inlets.append(made)
        return made

    def wait(self, ready: Callable[[], object], what: str) -> None:
        """Until ``ready()``, which something that comes may change."""
        with self.changed:
            assert self.changed.wait_for(ready, PATIENCE_S), f"waited for {what}"

    def received(self, inlet: TcpInlet, count: int) -> list[Item]:
        found: list[Item] = []
        self.wait(lambda: found.extend(inlet.items()) or len(found) >= count, f"{count} items")
        return found

    def close(self) -> None:
        for inlet in self.inlets:
            inlet.close()
        self.listener.close()


def unit(name: str, step: int, size: int = 700_000) -> Unit:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(size, generator=generator)
    tensors = {f"weights/{name}": weight.view(2, -1), f"optimizer/{name}/step": torch.tensor(3.0)}
    tensors[f"masters/{name}"], tensors[f"optimizer/{name}/none"] = weight.bfloat16(), torch.empty(0, 3)
    return Unit(step, name, UnitValue(tensors, b"plain", frozenset({f"optimizer/{name}/step"})))


def plain(item: Item) -> object:
    """The item without tensors, which compare element by element."""
    match item:
        case Marker():
            norm = item.norm
            return item.step, (str(norm.dtype), norm.item()) if torch.is_tensor(norm) else norm, item.begins
        case Sums():
            values = {name: [*map(told, tensors)] for name, tensors in item.values.items()}
            return item.step, values
        case Unit() if item.value is not None:
            tensors = {name: told(tensor) for name, tensor in item.value.tensors.items()}
            return item.step, item.name, tensors, item.value.plain, item.value.on_host
    return item


def told(tensor: torch.Tensor) -> object:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


ITEMS: list[Item] = [
    Marker(4, begins=True, valid_from=2),
    Head(4, b"what goes by value", {"0.weight": 12, "ä/b": 3}),
    unit("0.weight", 4),
    Sums(5, {"0.weight": (torch.arange(600_000.0),)}),
    Marker(5, torch.tensor(0.1), valid_from=2),
    Marker(6, 0.1),
    Sums(7, {"group": (torch.ones(3, 2).t(), torch.zeros(()))}),
    Marker(7, torch.tensor(float("inf"))),
    Marker(8),
]
