"""What the differential tester builds models from: pieces, what travels between stages, data and losses, by name."""

from . import forwards, hooked, surroundings  # noqa: F401  register theirs
from .boundaries import BOUNDARIES, CAN_NOT_TRAVEL, DATA, LOSSES, NO_LOSSES
from .pieces import PIECES, WIDTH
from .refused import REFUSED

__all__ = ["BOUNDARIES", "CAN_NOT_TRAVEL", "DATA", "LOSSES", "NO_LOSSES", "PIECES", "REFUSED", "WIDTH"]
