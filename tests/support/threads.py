"""Workers of a stage that are threads of this process."""

from __future__ import annotations

import threading

import torch

DEADLINE_S = 30


class Threads:
    """As many live workers as threads of this process."""

    def __init__(self, live: int) -> None:
        self.live, self._barrier, self._sent = live, threading.Barrier(live), {}

    def member(self, position: int) -> Member:
        return Member(self, position)

    def swap(self, position: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        self._sent[position] = parts
        self._barrier.wait(DEADLINE_S)
        found = [self._sent[other][position] for other in range(self.live)]
        self._barrier.wait(DEADLINE_S)
        return found


class Member:
    def __init__(self, threads: Threads, position: int) -> None:
        self._threads, self._position = threads, position

    def live_position(self) -> tuple[int, int]:
        return self._position, self._threads.live

    def exchange(self, target, source, incoming, outgoing) -> None:
        got = self._threads.swap(self._position, [part.clone() for part in source.split(outgoing)])
        assert [len(part) for part in got] == incoming
        target.copy_(torch.cat(got))
