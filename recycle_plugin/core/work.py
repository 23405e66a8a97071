"""What the workers have computed of each committed step, as figures for whoever watches the job."""

from __future__ import annotations

from recycle_plugin.core.protocol import Pace


class Work:
    """Adds up what workers say of a step; what a lost one has not said is not in it."""

    def __init__(self) -> None:
        self._said: dict[int, list[Pace]] = {}
        self._committed_at: float | None = None

    def add(self, message: Pace) -> None:
        self._said.setdefault(message.step, []).append(message)  # a step that is applied twice is spoken of twice, each time of what is new

    def committed(self, step: int, workers: int, now: float) -> dict:
        """Figures of ``step``, as far as they are known: ``step_s`` since the commit before; ``bubble_share``: of the live
        workers' time since then, in which they computed no micro-batch; ``redone_share``: of the time that they computed,
        spent on what had been a lost worker's, or on what they had computed before.
        """
        paces = [pace for told in [each for each in self._said if each <= step] for pace in self._said.pop(told)]
        spent, again = (sum(getattr(pace, name) for pace in paces) for name in ("spent_us", "again_us"))
        took = now - self._committed_at if self._committed_at is not None else 0.0
        self._committed_at = now
        figures: dict = {"workers": workers}
        if took > 0:
            figures["step_s"] = round(took, 6)
        if took > 0 and spent:
            figures["bubble_share"] = round(max(0.0, 1 - spent / (workers * took * 1e6)), 4)
        if spent:
            figures["redone_share"] = round(again / spent, 4)
        return figures
