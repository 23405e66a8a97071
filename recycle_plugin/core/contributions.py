"""Numbers of a step that all workers contribute to and all need: losses by micro-batch, squared norms by stage."""

from __future__ import annotations

from typing import Iterator

from recycle_plugin.core.protocol import Contribution

LOSS = "loss"  # computed once whoever dies, so it stays good over failures
NORM = "norm"  # squared, by stage: of one membership, whose workers wait for it


class Contributions:
    """What has come of each (step, name)."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], dict] = {}
        self._told: set[int] = set()  # steps whose losses were complete

    def add(self, message: Contribution) -> dict | None:
        """All numbers of that name, sorted by key, if this makes them complete."""
        key = message.step, message.name
        if message.name == LOSS and message.step in self._told:
            return None  # after a failure they are said once more
        values = self._values.setdefault(key, {})
        values.update(message.values)
        if len(values) < message.expected:
            return None
        self._told |= {message.step} if message.name == LOSS else set()
        return dict(sorted(self._values.pop(key).items()))

    def regrouped(self) -> None:
        """What else was contributed is made again."""
        self._values = {key: values for key, values in self._values.items() if key[1] == LOSS}

    def void(self, after: int) -> None:
        """What was said of the steps after ``after`` counts no more."""
        self._values = {key: values for key, values in self._values.items() if key[0] <= after}
        self._told = {step for step in self._told if step <= after}

    def committed(self, step: int) -> Iterator[tuple[int, dict]]:
        """``step`` is, and what is not here by now has gone down with somebody: (step, the losses that are)."""
        for key in sorted(key for key in self._values if key[0] <= step):
            values = self._values.pop(key)
            if key[1] == LOSS:
                yield key[0], dict(sorted(values.items()))
        self._told = {told for told in self._told if told > step}
