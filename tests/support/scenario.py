"""Scenarios that a few real processes run, each as a rank of a job whose coordinator the test plays.

In some the last rank dies, of which the others hear from the test.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.adapters.deepspeed.entry import Plugin
from recycle_plugin.runtime.collectives import group
from recycle_plugin.runtime.control.connections import connect
from recycle_plugin.runtime.control.session import Session
from tests.support.coordinator import FakeCoordinator, generation
from tests.support.results import result_of, say_where_it_hangs
from tests.support.secret import SECRET, way

LONG_S = 60.0
RANKS = 3  # of a Job
WAIT_S = 60.0  # of the workers: where they would wait for ever, they say so
IMPORTED = ["torch", "recycle_plugin.runtime.collectives.calls", "tests.support.calls", "tests.support.scenario"]


class Script:
    """What a scenario sees of its rank; ranks meet at ``store`` without a collective."""

    def __init__(self, rank: int, session: Session, store: dist.Store) -> None:
        self.rank, self.session, self._store = rank, session, store

    def value(self, length: int = 1) -> torch.Tensor:
        return torch.full((length,), self.rank + 1.0)

    def say(self, word: str) -> None:
        self._store.set(f"{word} {self.rank}", "")

    def hear(self, word: str, *of: int) -> None:
        self._store.wait([f"{word} {rank}" for rank in of], timedelta(seconds=LONG_S))

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def recover(self) -> None:
        self.session.view.adopt(
            self.session.waiting.until("another membership", lambda: self.session.view.pending, interruptible=False)
        )


Scenario = Callable[[Script], Any]


def follower(
    scenario: Scenario, rank: int, ranks: int, port: int, result: Any, coordinator: tuple[str, int], first: bool
) -> None:
    """A rank of a job whose groups can lose members; ``first``: with the default group."""
    say_where_it_hangs()
    session = Session(connect(way(coordinator), LONG_S), rank, SECRET, wait_timeout_s=WAIT_S)
    Plugin(session).install()
    script = Script(rank, session, _client(port))
    session.hooks.between_steps = script.recover
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is there
    if first:
        dist.init_process_group("gloo")
    _send(scenario, script, result)


def stock(scenario: Scenario, rank: int, ranks: int, port: int, result: Any) -> None:
    """A rank of a job over torch's own groups."""
    say_where_it_hangs()
    session: Any = None
    dist.init_process_group("gloo", store=_client(port), rank=rank, world_size=ranks)
    _send(scenario, Script(rank, session, _client(port)), result)


def _send(scenario: Scenario, script: Script, result: Any) -> None:
    try:
        result.send(scenario(script))
    except Exception as error:
        result.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def _client(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


def run(scenario: Scenario, ranks: int, loses: bool = False, first: bool = True) -> list[Any]:
    """What it returns on each rank, DIED for who has.  ``loses``: the last one dies, and the others are told;
    ``first``: there is a default group.
    """
    coordinator = FakeCoordinator()
    try:
        return _of_all(functools.partial(follower, first=first), scenario, ranks, coordinator, loses)
    finally:
        coordinator.close()


def run_stock(scenario: Scenario, ranks: int) -> list[Any]:
    """What it returns on each rank over torch's own groups."""
    return _of_all(stock, scenario, ranks, None, False)


def _of_all(
    worker: Callable[..., None], scenario: Scenario, ranks: int, coordinator: FakeCoordinator | None, loses: bool
) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ends = [context.Pipe(duplex=False) for _ in range(ranks)]
    more = {} if coordinator is None else {"coordinator": coordinator.address}
    started = [
        context.Process(target=worker, args=(scenario, rank, ranks, store.port, end[1]), kwargs=more, daemon=True)
        for rank, end in enumerate(ends)
    ]
    try:
        for process, (_, writing) in zip(started, ends):
            process.start()
            writing.close()
        if coordinator is not None:
            for _ in started:
                coordinator.accept()
            if loses:
                started[-1].join(LONG_S)
                coordinator.tell(generation(1, list(range(ranks - 1))))
        return [result_of(reading) for reading, _ in ends]
    finally:
        for process in started:
            process.kill()
            process.join(LONG_S)


def member(
    scenario: Callable[[Script], Any], rank: int, newcomer: bool, coordinator: tuple[str, int], port: int, result: Any
) -> None:
    """A rank of a job that workers may come back to."""
    say_where_it_hangs()
    session = Session(connect(way(coordinator), LONG_S), rank, SECRET, wait_timeout_s=WAIT_S)
    session.view.newcomer = newcomer
    Plugin(session).install()
    group.register(session)
    stores = _client(port), _client(port)
    dist.init_process_group("recycle", store=stores[0], rank=rank, world_size=RANKS)
    script = Script(rank, session, stores[1])
    session.hooks.between_steps = script.recover
    _send(scenario, script, result)


class Job:
    """A job of three ranks, each in a process, whose coordinator is the test."""

    def __init__(self) -> None:
        self.coordinator, self._started = FakeCoordinator(), []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "recycle_plugin.runtime.collectives.group"])
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def start(self, scenario: Callable[[Script], Any], rank: int, newcomer: bool = False) -> Any:
        """Where the result of ``scenario`` on ``rank`` will come."""
        reading, writing = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=member,
            args=(scenario, rank, newcomer, self.coordinator.address, self.store.port, writing),
            daemon=True,
        )
        process.start()
        self._started.append(process)
        writing.close()
        self.coordinator.accept()
        return reading

    def run(self, scenario: Callable[[Script], Any]) -> list[Any]:
        """What it returns on each rank."""
        return [result_of(one) for one in [self.start(scenario, rank) for rank in range(RANKS)]]

    def alone(self, scenario: Callable[[Script], Any], rank: int) -> Any:
        """What it returns in a newcomer."""
        return result_of(self.start(scenario, rank, newcomer=True))

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.join(LONG_S)
        self.coordinator.close()
