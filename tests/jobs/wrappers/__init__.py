"""Changes to a job from outside of it, whatever framework it uses: what a broken recovery would do, gates that fix an
order of events, and deaths at odd moments.  A job names one of these functions, and its arguments.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType

from wrappers.broken_lines import *  # noqa: F403
from wrappers.deaths import *  # noqa: F403
from wrappers.devices import *  # noqa: F403
from wrappers.gates import *  # noqa: F403
from wrappers.keys import *  # noqa: F403
from wrappers.nccl import *  # noqa: F403
from wrappers.negative_controls import *  # noqa: F403
from wrappers.paces import *  # noqa: F403
from wrappers.saving import *  # noqa: F403
from wrappers.trainers import *  # noqa: F403
from wrappers.watching import *  # noqa: F403


def apply(*more: ModuleType) -> None:
    """Make the changes that RECYCLE_TEST_WRAP holds as JSON, {"name": …, other arguments …} or a list of these;
    ``more``: modules that have others.
    """
    changes = json.loads(os.environ.get("RECYCLE_TEST_WRAP", "[]"))
    for arguments in changes if isinstance(changes, list) else [changes]:
        name = arguments.pop("name")
        where = next((module for module in more if hasattr(module, name)), sys.modules[__name__])
        getattr(where, name)(**arguments)
