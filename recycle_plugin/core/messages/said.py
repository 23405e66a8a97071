"""What the class of a message declares of who may say it to the coordinator, and when.

core/coordinator/words.py looks at that before the message is handled.
"""

from __future__ import annotations

from typing import ClassVar

WORKER, SUPERVISOR = "worker", "supervisor"


class ToCoordinator:
    """A message to the coordinator.

    ``by``: a WORKER says it of itself, or a SUPERVISOR of the workers that it starts.  ``running``: nobody says it
    before training has started.  ``ahead``: by so many steps its ``step`` may be ahead of the last committed one; None:
    the step is judged where it is taken in.  Its ``generation``, if it has one, is at most the newest.  ``most``: so
    many bytes are read of it, since what all are told has a part of it.
    """

    BY: ClassVar[str] = WORKER
    RUNNING: ClassVar[bool] = False
    AHEAD: ClassVar[int | None] = None
    MOST: ClassVar[int] = 1 << 20

    def __init_subclass__(
        cls, by: str = WORKER, running: bool = False, ahead: int | None = None, most: int = 1 << 20
    ) -> None:
        cls.BY, cls.RUNNING, cls.AHEAD, cls.MOST = by, running, ahead, most
