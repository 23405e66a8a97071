"""Keep DeepSpeed's ``init_distributed`` from building its shared-memory extension on the CPU.

The build takes a minute and a C++ compiler. A process killed while it holds the build's lock file leaves the lock
behind, and every later run hangs silently. Without the extension DeepSpeed uses the backend's own collectives, which
recovery can abort.

No function is replaced: DeepSpeed looks into a table of compatible extensions that is computed once and may be changed
(deepspeed/ops/__init__.py).
"""

from __future__ import annotations

from recycle_plugin.versions import RANGES

EXTENSION = "deepspeed_shm_comm"


def apply() -> None:
    """Mark the extension as not available; call this before ``init_distributed``. Raises RuntimeError if this DeepSpeed
    has no such table.
    """
    import deepspeed

    table = getattr(deepspeed.ops, "__compatible_ops__", None)
    if table is None:
        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} has no deepspeed.ops.__compatible_ops__: "
            f"expected {RANGES['deepspeed']}; without it {EXTENSION} is compiled at every start"
        )
    table[EXTENSION] = False
