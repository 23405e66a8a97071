"""Changes to a job from outside of it, whatever framework it uses: what a broken recovery would do, gates that fix an
order of events, and deaths at odd moments.  A job names one of these functions, and its arguments.
"""

from __future__ import annotations

from wrappers.broken_lines import break_sum, cut_line, swallow
from wrappers.deaths import die_within_sum, killed_in_rotation, strike_at
from wrappers.devices import break_device, small_pieces, watch_device
from wrappers.gates import gate, lose_result, lose_tied, replay_beside
from wrappers.nccl import die_beside_stuck_sums, never_abort, over_false_nccl
from wrappers.negative_controls import (
    divide_by_live,
    flip_bit,
    keep_rejected,
    masks_by_worker,
    overflow,
    overflow_in_half,
    scale_micro_batch,
    scale_tied,
)
from wrappers.paces import begun_before, helped, lag, leaves_first, linger, restless, slow, stop_after, uneven_end
from wrappers.saving import checkpoint_every, log_apart, save_each
from wrappers.trainers import TRAINERS, inside, wait_until
from wrappers.watching import record_states

__all__ = [
    "TRAINERS",
    "begun_before",
    "break_device",
    "break_sum",
    "checkpoint_every",
    "cut_line",
    "die_beside_stuck_sums",
    "die_within_sum",
    "divide_by_live",
    "flip_bit",
    "gate",
    "helped",
    "inside",
    "keep_rejected",
    "killed_in_rotation",
    "lag",
    "leaves_first",
    "linger",
    "log_apart",
    "lose_result",
    "lose_tied",
    "masks_by_worker",
    "never_abort",
    "over_false_nccl",
    "overflow",
    "overflow_in_half",
    "record_states",
    "replay_beside",
    "restless",
    "save_each",
    "scale_micro_batch",
    "scale_tied",
    "slow",
    "small_pieces",
    "stop_after",
    "strike_at",
    "swallow",
    "uneven_end",
    "wait_until",
    "watch_device",
]
