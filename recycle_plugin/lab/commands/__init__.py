"""Subcommands of ``recycle`` that study the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType


def modules() -> Sequence[ModuleType]:
    """The modules of these subcommands, each with ``add``."""
    from recycle_plugin.lab.commands import campaign, profile, simulate

    return simulate, profile, campaign
