"""Members of a group who run one scenario together: what each returns comes in their order, DIED for who has died."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from tests.support.coordinator import FakeCoordinator, generation
from tests.support.results import DIED, RESULT_S, result_of, say_where_it_hangs

LONG_S = 60.0  # what must not pass


class Place:
    """Of one member in a scenario; members meet at ``store``.  ``made(generation)``: a link of theirs."""

    made: Callable[[int], Any]

    def __init__(self, position: int, members: int, store: dist.Store) -> None:
        self.position, self.members, self.store = position, members, store

    def link(self, generation: int = 1) -> Any:
        return self.made(generation)

    def say(self, word: str) -> None:
        self.store.set(f"{word} {self.position}", "")

    def hear(self, word: str, *of: int) -> None:
        self.store.wait([f"{word} {position}" for position in of], timedelta(seconds=LONG_S))

    def meet(self, word: str) -> None:
        self.say(word)
        self.hear(word, *range(self.members))

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


# Of a place, the store's port, the coordinator's address: what the scenario gets, the place itself where that is None.
Enter = Callable[[Place, int, tuple[str, int] | None], Place | None]


def told(scenario: Callable, place: Place) -> Any:
    """What it returns; a failure's type and words, which no test expects."""
    try:
        return scenario(place)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def in_processes(
    scenario: Callable,
    members: int,
    enter: Enter,
    preload: Sequence[str],
    coordinated: bool = False,
    loses: bool = False,
) -> list[Any]:
    """Run it in a process for each, which calls ``enter`` first, and there opens a session if it is ``coordinated``.

    ``hear("lost", member)`` tells of a death; ``loses``: the last member dies, and the others' sessions are told.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    coordinator = FakeCoordinator() if coordinated else None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload])
    ends = [context.Pipe(duplex=False) for _ in range(members)]
    started = [
        context.Process(
            target=_run,
            args=(scenario, enter, position, members, store.port, coordinator and coordinator.address, writing),
            daemon=True,
        )
        for position, (_, writing) in enumerate(ends)
    ]
    try:
        for process, (_, writing) in zip(started, ends):
            process.start()
            writing.close()
        threading.Thread(target=_tell_of_deaths, args=(started, store), daemon=True).start()
        for _ in started if coordinator else ():
            coordinator.accept()
        if loses:
            started[-1].join(LONG_S)
            coordinator.tell(generation(1, list(range(members - 1))))
        return [result_of(reading) for reading, _ in ends]
    finally:
        for process in started:
            process.kill()
            process.join(LONG_S)
        if coordinator:
            coordinator.close()


def _tell_of_deaths(started: Sequence[Any], store: dist.Store) -> None:
    left = {process.sentinel: position for position, process in enumerate(started)}
    while left:
        for sentinel in wait([*left]):
            position = left.pop(sentinel)
            if started[position].exitcode == -signal.SIGKILL:
                store.set(f"lost {position}", "")


def _run(
    scenario: Callable,
    enter: Enter,
    position: int,
    members: int,
    port: int,
    coordinator: tuple[str, int] | None,
    results: Any,
) -> None:
    say_where_it_hangs()
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    place = Place(position, members, store)
    results.send(told(scenario, enter(place, port, coordinator) or place))
    faulthandler.cancel_dump_traceback_later()
    threading.Event().wait(RESULT_S)  # until all have returned, whom this process may serve
    os._exit(0)  # threads may still look for who never comes


__all__ = ["DIED", "LONG_S", "Place", "in_processes", "told"]
