"""From who is alive to who does what when: reroute, schedule, bound, verify, lower.

Every worker plans for itself and compares digests, so planning depends on nothing but its arguments.
"""

from __future__ import annotations

from recycle_plugin.planner.errors import PlanError, VerificationError
from recycle_plugin.planner.lower import lower
from recycle_plugin.planner.make import plan, refine, warm
from recycle_plugin.planner.verify import verify

__all__ = ["PlanError", "VerificationError", "lower", "plan", "refine", "verify", "warm"]
