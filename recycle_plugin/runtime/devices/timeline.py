"""How far a device is behind its host, and when it has run what.

The host starts an instruction no earlier than while the device runs the one before. So the device is always busy, and a
worker that hears of a loss waits for one instruction before its state is at rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from recycle_plugin.core.vocabulary.instruction import STAGE_WIDE, Instruction
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.runtime.devices.port import Device, DeviceEvent

T = TypeVar("T")
AHEAD = 1  # instructions


@dataclass
class Started:
    """An instruction between two events; ``span``: the host's time in it, None until that has ended."""

    instruction: Instruction
    begin: DeviceEvent
    end: DeviceEvent
    span: Span | None = None


class Timeline:
    """The work under way on ``device``, in its order. ``patience_s()``: the longest time for one instruction."""

    def __init__(self, device: Device, patience_s: Callable[[], float]) -> None:
        self._device, self._patience_s = device, patience_s
        self._under_way: deque[Started] = deque()
        self._over: list[Span] = []
        self._anchor: tuple[DeviceEvent, int] | None = None  # an event, and the host's time in µs when it happened
        self._last_us = 0  # end of the last span

    def start(self, start: Callable[..., T], instruction: Instruction, *given: object) -> T:
        """Call ``start(instruction, *given)`` once the device has at most one other instruction to run. Raises
        WaitTimeout if that takes too long, and errors of earlier work.
        """
        if not self._device.lags:
            return start(instruction, *given)
        self._settle(AHEAD)
        begin = self._mark(instruction)
        made = start(instruction, *given)
        self._under_way.append(Started(instruction, begin, self._device.event(instruction)))
        return made

    def spans(self, span: Span) -> list[Span]:
        """Record the host's span of an instruction; returns the spans that are over, in the device's time. After an
        instruction of a whole stage it waits for all: others are told how long the step has taken.
        """
        if not self._device.lags:
            return [span]
        own = self._under_way[-1] if self._under_way and self._under_way[-1].instruction is span.instruction else None
        if own is not None:
            own.span = span
        self._settle(0 if span.instruction.op in STAGE_WIDE else len(self._under_way))
        over, self._over = self._over, []
        return [*over, span] if own is None else over

    def _settle(self, left: int) -> None:
        """Wait until at most ``left`` instructions are under way, and record the times of all that are over."""
        while self._under_way and (len(self._under_way) > left or self._under_way[0].end.poll()):
            first = self._under_way[0]
            for event in (first.begin, first.end):
                event.wait(self._patience_s())
            self._under_way.popleft()
            if first.span is not None:  # else it was interrupted
                self._last_us = self._at(first.end)
                self._over.append(first.span._replace(start_us=self._at(first.begin), end_us=self._last_us))
        if not self._under_way:
            self._anchor = None

    def _mark(self, instruction: Instruction) -> DeviceEvent:
        """Return an event. If nothing is under way it happens now, and relates the device's clock to the host's."""
        made = self._device.event(instruction)
        if self._anchor is None:
            # no earlier than the last span's end, which the last anchor may have rounded up
            self._anchor = made, max(self._last_us, time.time_ns() // 1000)
        return made

    def _at(self, event: DeviceEvent) -> int:
        """Return when the event happened, in µs of the host's clock."""
        assert self._anchor is not None, "there is one as long as something is under way"
        known, when = self._anchor
        return when + round(1e6 * event.since(known))
