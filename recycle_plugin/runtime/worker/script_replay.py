"""A newcomer's script on its way through steps and evaluations that are over: it gets their results."""

from __future__ import annotations

from recycle_plugin.core.messages.from_coordinator import Recorded
from recycle_plugin.errors import RecycleError


class ScriptReplay:
    """A script's place among the recorded losses of steps and means of evaluations, by number. ``position``: the last
    step whose loss the script got; ``evaluated``: how many evaluations.
    """

    def __init__(self, position: int = 0) -> None:
        self._losses: dict[int, float] = {}
        self._evaluations: dict[int, float] = {}
        self._unknown: set[int] = set()
        self._unfilled: tuple[int, ...] = ()
        self._refused = ""
        self.position, self.evaluated = position, 0

    @property
    def only_steps(self) -> bool:
        """Whether the others are ahead of this script by steps only: by no evaluation, and no end of their data."""
        return not self._evaluations and all(step <= self.position for step in self._unfilled)

    def hear(self, message: Recorded) -> None:
        """Record the coordinator's message on what is over."""
        self._refused = self._refused or message.refused
        self._unknown |= {*message.unknown}
        self._unfilled = message.unfilled
        known = enumerate(message.losses, message.step)
        self._losses.update((step, loss) for step, loss in known if step not in message.unknown)
        self._evaluations.update(enumerate(message.evaluations, message.evaluation))

    def loss(self) -> float | None:
        """Return the script's next loss, and advance; None while unknown. Raises RecycleError if nobody has it."""
        coming = self.position + 1
        if self._refused:
            raise RecycleError(f"{self._refused}: step {coming} can't be gone through once more")
        known = self._losses.pop(coming, None)
        if known is not None:
            self.position = coming
        elif coming in self._unknown or any(step > coming for step in self._losses):
            raise RecycleError(
                f"a newcomer's script comes to step {coming}, of which the others have no loss: it has to begin as "
                "theirs did, with as many steps before its first one"
            )
        return known

    def evaluation(self) -> float | None:
        """Return the mean loss of the script's next evaluation, and advance; None while it is not known."""
        known = self._evaluations.pop(self.evaluated + 1, None)
        if known is not None:
            self.evaluated += 1
        return known
