"""Where a stage of ``scripts/on_gpu`` runs, and where it leaves what it has found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recycle_plugin.runtime.devices.host import HOST


@dataclass(frozen=True)
class Place:
    """The place of one stage.

    ``device``: its kind, such as "cuda", or "cpu" in a rehearsal, for which everything is small; ``out``: the folder of
    all stages; ``folder``: that of this one.
    """

    device: str
    out: Path
    folder: Path

    @property
    def rehearsal(self) -> bool:
        """Whether only the code is tried, and no figure means anything."""
        return self.device == HOST.type
