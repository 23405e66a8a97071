"""Keeps DeepSpeed's ``init_distributed`` from building its shared-memory extension on the CPU.

The build takes a minute and a C++ compiler, and a process killed while it holds the build's lock file
leaves the lock behind: every later run then hangs without a word.  DeepSpeed falls back to the backend's
own collectives, which are the ones that recovery can abort.

No function is replaced: DeepSpeed asks its table of compatible extensions, which is computed once and
kept so that entries can be changed (deepspeed/ops/__init__.py).
"""

from __future__ import annotations

from recycle_plugin.versions import RANGES

EXTENSION = "deepspeed_shm_comm"


def apply() -> None:
    """Mark the extension as not available.  Call it before ``init_distributed``.

    Raises RuntimeError where this DeepSpeed has no such table.
    """
    import deepspeed

    table = getattr(deepspeed.ops, "__compatible_ops__", None)
    if table is None:
        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} has no deepspeed.ops.__compatible_ops__: "
            f"expected {RANGES['deepspeed']}; without it {EXTENSION} is compiled at every start"
        )
    table[EXTENSION] = False


def revert() -> None:
    """Drop the table: DeepSpeed computes it anew when it is next asked."""
    import deepspeed

    vars(deepspeed.ops).pop("__compatible_ops__", None)
