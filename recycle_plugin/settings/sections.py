"""Settings that are objects: their keys and defaults."""

from __future__ import annotations

from pydantic import BaseModel

from recycle_plugin.core.vocabulary.log_boundaries import at_start
from recycle_plugin.settings.field_types import STRICT, Boundaries, Bytes, Count, Folder, Helpers, setting
from recycle_plugin.settings.wording import SettingsError


class CheckpointSettings(BaseModel):
    """Checkpoints that the plugin makes by itself, in the background."""

    model_config = STRICT

    overhead: float = setting(
        0.035,
        "a number above 0, below 1",
        "The share of training time that checkpoints may cost. Their interval follows from the cost of the last ones.",
        gt=0,
        lt=1,
        allow_inf_nan=False,
    )
    every: Count | None = setting(
        None,
        "a whole number of at least 1, or null",
        "The number of steps between two checkpoints, whatever they cost. Null: as often as `overhead` allows.",
    )
    keep: Count = setting(2, "a whole number of at least 1", "How many of a run's checkpoints stay.")


class LogSettings(BaseModel):
    """Logging of data between stages, so that a stage without a live worker can be replayed from a checkpoint."""

    model_config = STRICT

    folder: Folder | None = setting(
        None,
        "a folder's path, or null",
        "The folder for the log: one that all hosts share, or each host's own under the same path. Null: "
        "`log` in the run folder.",
    )
    ring_bytes: Bytes = setting(
        "256MiB",
        'a whole number of at least 1, a size such as "2GiB", or null',
        "How much host memory may wait for a worker's disk. If the disk can't keep up, nothing is logged "
        "until the next checkpoint, and training goes on. Null: any amount.",
    )
    helpers: Helpers = setting(
        "auto",
        '"auto", or a whole number of at least 0',
        'How many live workers may help to replay a stage. "auto": as many as there is work for. 0: none.',
    )
    boundaries: Boundaries = setting(
        "all",
        '"all", "auto", "hosts", or a list of boundaries such as [0, 2], where 0 is between stages 0 and 1',
        'Which boundaries between stages are logged. "all"; "auto": those with the quickest recovery within '
        '`log.budget`; "hosts": those between stages on different hosts; or a list, where 0 is the boundary '
        "between stages 0 and 1.",
    )
    budget: Bytes = setting(
        None,
        'a whole number of at least 1, a size such as "2GiB", or null',
        "How much the logs of all workers together may take between two checkpoints. `log.boundaries` "
        '"auto" keeps to it; for other boundaries an event says that the logs take more. Null: no limit.',
    )

    def of_stages(self, stages: int) -> str | tuple[int, ...]:
        """Return the ``boundaries`` of a pipeline of ``stages``. Raises SettingsError for one that it does not have."""
        try:
            at_start(self.boundaries, ("",) * stages)
        except ValueError as error:
            raise SettingsError("log.boundaries", str(error), 'write a list of these, or "all"') from None
        return self.boundaries

    @property
    def budget_bytes(self) -> int | None:
        assert not isinstance(self.budget, str), "a checked size is a number"
        return self.budget

    @property
    def most_helpers(self) -> int | None:
        """The most workers that may help with a replay; None: as many as there are blocks and workers."""
        return None if self.helpers == "auto" else self.helpers


SECTIONS: dict[str, type[BaseModel]] = {"checkpoint": CheckpointSettings, "log": LogSettings}
"""{key: model} of settings that are objects."""
