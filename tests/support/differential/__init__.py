"""One random model trained twice: by stages of the plugin, with work that moves between workers, and uncut by stock
autograd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from recycle_plugin.runtime.stage.boundary import Tensors

from .model import Course, Journal, Model, stage_of
from .outcome import Outcome, differ
from .plugin import Plugin
from .stock import NOBODYS, Uncut, check_trains


def compare(model: Model, course: Course, tolerance: float = 0.0) -> list[str]:
    """Where the two differ, a line for each, in the first step in which they do.

    Raises what the plugin raises, or Stuck where stock autograd raises something too.
    """
    plugin, uncut = Plugin(model, course), Uncut(model)
    for step in range(1, course.steps + 1):
        try:
            mine = plugin.step(step)
        except Exception:
            check_trains(model, step)
            raise
        theirs = uncut.step(step, plugin.orders())
        found = [
            *_disagreements(mine, theirs, tolerance),
            *(() if tolerance else _untold(plugin.journal, uncut.journal)),
        ]
        if found:
            return [f"step {step}: {line}" for line in found]
    return []


def _disagreements(mine: Outcome, theirs: Outcome, tolerance: float) -> Iterator[str]:
    for what in ("losses", "sums", "weights"):
        ours, stock = getattr(mine, what), getattr(theirs, what)
        assert ours.keys() == stock.keys()
        for key in stock:
            yield from _compare(f"{what} {key}", (ours[key],), (stock[key],), tolerance)
    for what in ("activations", "gradients"):
        ours, stock = getattr(mine, what), getattr(theirs, what)
        for key in stock:
            yield from _compare(f"{what} {key}", ours[key], stock[key], tolerance)


def _compare(what: str, mine: Tensors, theirs: Tensors, tolerance: float) -> Iterator[str]:
    if len(mine) != len(theirs):
        yield f"{what}: {len(mine)} tensors where stock has {len(theirs)}"
    for one, other in zip(mine, theirs):
        if other is not NOBODYS and differ(one, other, tolerance):
            alike = one.dtype == other.dtype and one.shape == other.shape
            if alike:
                yield f"{what}: {(one - other).abs().max().item()} apart"
            else:
                yield f"{what}: {one.dtype}{list(one.shape)} where stock has {other.dtype}{list(other.shape)}"


def _untold(told: Journal, expected: Journal) -> Iterator[str]:
    """What hooks and functions have seen otherwise, or another number of times.

    A forward that is run several times tells it as often.
    """
    for key in sorted(set(told.entries) | set(expected.entries)):
        ours, stock = (
            Counter(
                {
                    entry: 1 if key[2] and (*key[:2], stage_of(entry)) in told.again else count
                    for entry, count in journal.entries[key].items()
                }
            )
            for journal in (told, expected)
        )
        if ours != stock:
            yield f"hooks at {key}: {dict(ours - stock)} where stock has {dict(stock - ours)}"
