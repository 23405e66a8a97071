"""Planning, from the live workers to their programs: reroute, schedule, bound, verify, lower. Every worker plans for
itself and compares digests, so planning depends on nothing but its arguments.
"""

from __future__ import annotations

from recycle_plugin.planner.lower import lowered
from recycle_plugin.planner.make import plan
from recycle_plugin.planner.plan_error import PlanError, VerificationError
from recycle_plugin.planner.plan_store import PlanStore
from recycle_plugin.planner.recovery import recover
from recycle_plugin.planner.verify import verify
from recycle_plugin.planner.warming import warm

__all__ = [
    "PlanError",
    "PlanStore",
    "VerificationError",
    "lowered",
    "plan",
    "recover",
    "verify",
    "warm",
]
