"""A link whose members are threads of one process: the port's second implementation
(recycle_plugin/runtime/collectives/link.py).

Whoever comes last to an operation carries it out for all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ReduceOp

from recycle_plugin.runtime.collectives.link import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Broken,
    Gather,
    Handle,
    Operation,
    Receive,
    ReduceScatter,
    Send,
    done,
)

Begun = tuple[Operation, Handle]
REDUCTIONS = {ReduceOp.SUM: torch.sum, ReduceOp.MAX: torch.amax, ReduceOp.MIN: torch.amin, ReduceOp.PRODUCT: torch.prod}


class Meeting:
    """Of ``members`` of one generation."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.lock = threading.RLock()
        self.links: dict[int, ThreadsLink] = {}
        self.gone: set[int] = set()
        self.rounds: list[dict[int, Begun]] = []  # of what all take part in
        self.sent: list[tuple[int, int, int, torch.Tensor]] = []  # from, to, tag
        self.awaited: list[tuple[int, Receive, Handle]] = []  # by whom

    def whole(self) -> bool:
        return len(self.links) == self.members

    def join(self, number: int, position: int, begun: Begun) -> None:
        while len(self.rounds) <= number:
            self.rounds.append({})
        self.rounds[number][position] = begun
        if len(self.rounds[number]) == self.members:
            everybodys = [self.rounds[number][place] for place in range(self.members)]
            carry_out([operation for operation, _ in everybodys])
            for _, handle in everybodys:
                handle.end()

    def send(self, position: int, operation: Send, handle: Handle) -> None:
        self.sent.append((position, operation.to, operation.tag, operation.tensor.clone()))
        handle.end()
        self.deliver()

    def deliver(self) -> None:
        for one in list(self.awaited):
            position, receive, handle = one
            fits = (
                place
                for place, mail in enumerate(self.sent)
                if mail[1:3] == (position, receive.tag) and receive.source in (None, mail[0])
            )
            place = next(fits, None)
            if place is not None:
                source, _, _, tensor = self.sent.pop(place)
                self.awaited.remove(one)
                receive.tensor.copy_(tensor)
                handle.end(source=source)

    def lose(self, position: int) -> None:
        """Whoever is in an operation with that member gets Broken."""
        self.gone.add(position)
        for _, handle in [begun for one in self.rounds for begun in one.values()]:
            handle.end(Broken(f"member {position} has closed its connections"))
        for _, receive, handle in self.awaited:
            if receive.source == position:
                handle.end(Broken(f"member {position} has closed its connections"))


class ThreadsLink:
    """The port's, for the member at ``position``; ``name``: what the members are called."""

    def __init__(self, generation: int, meeting: Meeting, position: int, name: str) -> None:
        self.generation, self._meeting, self._position, self._name = generation, meeting, position, name
        self._connecting = Handle(self._who_is_missing)
        self._waiting: deque[Begun] = deque()
        self._running: list[Handle] = []
        self._rounds = 0
        self._end: Broken | None = None

    @property
    def connected(self) -> bool:
        return self._end is None and self._meeting.whole()

    def connect(self) -> Handle:
        with self._meeting.lock:
            if self._end is None and self._position not in self._meeting.links:
                self._meeting.links[self._position] = self
                if self._meeting.whole():
                    for link in self._meeting.links.values():
                        link.begin()
        return self._connecting

    def start(self, operation: Operation) -> Handle:
        handle = Handle(f"{type(operation).__name__} among {self._name}")
        with self._meeting.lock:
            if self._end is not None:
                handle.end(self._end)
            else:
                self._running.append(handle)
                self._waiting.append((operation, handle))
                self.connect()
                if self._meeting.whole():
                    self.begin()
        return handle

    def begin(self) -> None:
        self._connecting.end()
        while self._waiting:
            operation, handle = self._waiting.popleft()
            if isinstance(operation, Send):
                self._meeting.send(self._position, operation, handle)
            elif isinstance(operation, Receive):
                self._meeting.awaited.append((self._position, operation, handle))
                self._meeting.deliver()
            else:
                self._meeting.join(self._rounds, self._position, (operation, handle))
                self._rounds += 1
            for position in self._meeting.gone:
                self._meeting.lose(position)

    def abort(self) -> Handle:
        with self._meeting.lock:
            self._end = self._end or Broken(f"the connections among {self._name} were given up")
            for handle in [*self._running, self._connecting]:
                handle.end(self._end)
            self._meeting.lose(self._position)
        return done()

    def _who_is_missing(self) -> str:
        missing = [str(position) for position in range(self._meeting.members) if position not in self._meeting.links]
        return (
            f"the connections among {self._name}; not there of {self._meeting.members} are number {', '.join(missing)}"
        )


def carry_out(operations: Sequence[Operation]) -> None:
    """One operation, of which all members have their own."""
    match operations[0]:
        case AllReduce():
            results = [together(operations[0].op, list(each)) for each in zip(*(one.tensors for one in operations))]
            copy([one.tensors for one in operations], [results] * len(operations))
        case Broadcast(root=root):
            copy([one.tensors for one in operations], [operations[root].tensors] * len(operations))
        case AllGather():
            copy([one.outputs for one in operations], [[other.source for other in operations]] * len(operations))
        case Gather(root=root):
            copy([operations[root].outputs], [[one.source for one in operations]])
        case ReduceScatter(op=op):
            parts = together(op, [one.source for one in operations]).chunk(len(operations))
            copy([[one.output for one in operations]], [parts])
        case AllToAll():
            exchange(operations)
        case Barrier():
            pass


def together(op: ReduceOp, tensors: list[torch.Tensor]) -> torch.Tensor:
    reduced: Callable = REDUCTIONS[op]
    return reduced(torch.stack(tensors), dim=0).to(tensors[0].dtype)


def exchange(operations: Sequence[AllToAll]) -> None:
    parts = [
        one.source.split(list(one.outgoing)) if one.outgoing else one.source.chunk(len(operations))
        for one in operations
    ]
    for position, one in enumerate(operations):
        one.output.copy_(torch.cat([theirs[position] for theirs in parts]))


def copy(targets: Sequence[Sequence[torch.Tensor]], sources: Sequence[Sequence[torch.Tensor]]) -> None:
    for target, source in zip(targets, sources, strict=True):
        for one, value in zip(target, source, strict=True):
            one.copy_(value)
