"""A stage's state, filled from workers that go on training meanwhile."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Item, Unit
from recycle_plugin.core.worker.catching_up import CatchingUp
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.serving import Service
from tests.support.optimizers import same
from tests.support.stepped_worker import SteppedWorker

NEWCOMER = WorkerId(2, 1)


class Line:
    """Both ends of a line, in order; the first unit is damaged on its way."""

    broken = False

    def __init__(self) -> None:
        self._asked: deque[Asked] = deque()
        self._items: deque[Item] = deque()
        self._damaged = False

    def ask(self, asked: Asked) -> None:
        self._asked.append(asked)

    def asked(self) -> list[Asked]:
        return [self._asked.popleft() for _ in range(len(self._asked))]

    def send(self, item: Item) -> None:
        if isinstance(item, Unit) and not self._damaged:
            self._damaged, item = True, Unit(item.step, item.name, None)
        self._items.append(item)

    def items(self) -> list[Item]:
        return [self._items.popleft() for _ in range(len(self._items))]

    def has_room(self, waiting: bool) -> bool:
        return True

    def close(self) -> None:
        pass


class Newcomer:
    """A worker that is filled by ``sources``, which have served it since step 3."""

    def __init__(self, worker: SteppedWorker, sources: list[SteppedWorker]) -> None:
        self.worker = worker
        machine = SimpleNamespace(
            units=worker.units,
            operations=SimpleNamespace(compute=worker.compute, go_by=worker.stepping.go_by),
            hashing=SimpleNamespace(hash_state=lambda step: None, finish=lambda: None),
        )
        self.catching_up = CatchingUp(FilledStage(machine, worker.store, worker.steps))
        for rank, source in enumerate(sources):
            line = Line()
            source.servings.add(NEWCOMER, Service(source.units, line))
            self.catching_up.add_source(WorkerId(rank), line)

    def is_at(self, step: int) -> bool:
        self.catching_up.pump(step)
        return self.catching_up.whole and self.catching_up.clock == step


def caught_up(
    make: Callable[..., SteppedWorker], norms: Callable[[int], float | None], seed: int, validated=False
) -> None:
    """Fills a newcomer in steps with these ``norms``, at random moments, and checks it once it is whole, and when it
    has followed for some steps more.
    """
    chance = random.Random(seed)
    newcomer, mixed = Newcomer(make(seed=1), []), 0
    units = len(newcomer.worker.units.head()[1])
    sources = [make(seed=0) for _ in range(min(2, units))]  # a unit for each

    def between(source: SteppedWorker, step: int, times: int, summed: bool) -> None:
        for _ in range(times):
            source.servings.between(step, step, 0, summed, True, True)
            if chance.random() < 0.3:
                newcomer.is_at(step)

    for step in range(1, 25):
        if step == 3:
            newcomer = Newcomer(newcomer.worker, sources)
        for source in sources:
            set_by_hand(source, step)
            times = [chance.randrange(3) for _ in range(2)]
            source.train(step, norms(step), validated, lambda summed: between(source, step - 1, times[summed], summed))
        mixed += 0 < newcomer.catching_up.progress < 1
    until_whole = 0
    while not newcomer.is_at(24):
        until_whole += 1
        assert until_whole < 1000, "it never gets whole"
        for source in sources:
            source.servings.between(24, 24, 0, False, True, True)
    compare(newcomer.worker, sources)
    for step in range(25, 29):
        for source in sources:
            set_by_hand(source, step)
            source.train(step, norms(step), validated)
        for source in sources:
            source.servings.between(step, step, 0, False, True, True)
        assert newcomer.is_at(step), "it follows"
        compare(newcomer.worker, sources)
    skipped = sum(norm is not None and not math.isfinite(norm) for norm in map(norms, range(1, 29)))
    assert sources[0].optimizer.skipped == skipped
    assert newcomer.catching_up.damaged and (mixed > 1 or units < 3)


def set_by_hand(source: SteppedWorker, step: int) -> None:
    """As a script does, for its next step, beside the scheduler; that of the newcomer is elsewhere."""
    for group in source.optimizer.wrapped.param_groups:
        group["lr"] = group["lr"] * (1 + step % 3 / 10)


def compare(worker: SteppedWorker, sources: list[SteppedWorker]) -> None:
    for source in sources:
        assert same(worker.found(), source.found()) and worker.state.digest() == source.state.digest()
