"""Changes to a job from outside of it, whatever framework it uses: what a broken recovery would do, gates that fix an
order of events, and deaths at odd moments.  A job names one of these functions, and its arguments.
"""

from __future__ import annotations

from wrappers.broken_lines import *  # noqa: F403
from wrappers.deaths import *  # noqa: F403
from wrappers.devices import *  # noqa: F403
from wrappers.gates import *  # noqa: F403
from wrappers.nccl import *  # noqa: F403
from wrappers.negative_controls import *  # noqa: F403
from wrappers.paces import *  # noqa: F403
from wrappers.saving import *  # noqa: F403
from wrappers.trainers import *  # noqa: F403
from wrappers.watching import *  # noqa: F403
