"""Scenarios that a few real processes run, each as a rank of a job whose coordinator the test plays.

In some the last rank dies, of which the others hear from the test.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.adapters.deepspeed.entry import Plugin
from recycle_plugin.runtime.collectives import group
from recycle_plugin.runtime.control.connections import connect
from recycle_plugin.runtime.control.session import Session
from tests.support.coordinator import FakeCoordinator
from tests.support.members import LONG_S, Place, in_processes, told
from tests.support.results import result_of, say_where_it_hangs
from tests.support.secret import SECRET, way

RANKS = 3  # of a Job
WAIT_S = 60.0  # of the workers: where they would wait for ever, they say so
IMPORTED = ["torch", "recycle_plugin.runtime.collectives.calls", "tests.support.calls", "tests.support.scenario"]


class Script(Place):
    """What a scenario sees of its rank; ranks meet at ``store`` without a collective."""

    def __init__(self, rank: int, session: Session, store: dist.Store) -> None:
        super().__init__(rank, RANKS, store)
        self.rank, self.session = rank, session

    def value(self, length: int = 1) -> torch.Tensor:
        return torch.full((length,), self.rank + 1.0)

    def recover(self) -> None:
        self.session.view.adopt(
            self.session.waiting.until("another membership", lambda: self.session.view.pending, interruptible=False)
        )


Scenario = Callable[[Script], Any]


def _follower(first: bool, place: Place, port: int, coordinator: tuple[str, int]) -> Script:
    """A rank of a job whose groups can lose members; ``first``: with the default group."""
    rank, ranks = place.position, place.members
    session = Session(connect(way(coordinator), LONG_S), rank, SECRET, wait_timeout_s=WAIT_S)
    Plugin(session).install()
    script = Script(rank, session, place.store)
    session.hooks.between_steps = script.recover
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    if first:
        dist.init_process_group("gloo")
    return script


def _stock(place: Place, port: int, coordinator: None) -> Script:
    """A rank of a job over torch's own groups."""
    session: Any = None
    dist.init_process_group("gloo", store=_client(port), rank=place.position, world_size=place.members)
    return Script(place.position, session, place.store)


def _client(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


def run(scenario: Scenario, ranks: int, loses: bool = False, first: bool = True) -> list[Any]:
    """What it returns on each rank, DIED for who has.  ``loses``: the last one dies, and the others are told;
    ``first``: there is a default group.
    """
    enter = functools.partial(_follower, first)
    return in_processes(scenario, ranks, enter, IMPORTED, coordinated=True, loses=loses)


def run_stock(scenario: Scenario, ranks: int) -> list[Any]:
    """What it returns on each rank over torch's own groups."""
    return in_processes(scenario, ranks, _stock, IMPORTED)


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
    result.send(told(scenario, script))
    os._exit(0)


class Job:
    """A job of three ranks, each in a process, whose coordinator is the test."""

    def __init__(self) -> None:
        self.coordinator, self.started = FakeCoordinator(), []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "recycle_plugin.runtime.collectives.group"])
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def start(self, scenario: Callable[[Script], Any], rank: int, newcomer: bool = False) -> Any:
        reading, writing = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=member,
            args=(scenario, rank, newcomer, self.coordinator.address, self.store.port, writing),
            daemon=True,
        )
        process.start()
        self.started.append(process)
        writing.close()
        self.coordinator.accept()
        return reading

    def run(self, scenario: Callable[[Script], Any]) -> list[Any]:
        return [result_of(one) for one in [self.start(scenario, rank) for rank in range(RANKS)]]

    def alone(self, scenario: Callable[[Script], Any], rank: int) -> Any:
        return result_of(self.start(scenario, rank, newcomer=True))

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.join(LONG_S)
        self.coordinator.close()
