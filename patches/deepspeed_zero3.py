"""Restrict ZeRO stage 3's checks that all ranks do the same to the ranks of one data parallel group.

Before it first gathers parameters, and before it reduces gradients, stage 3 compares lists of numbers with global rank
0 over the group of all ranks, even if its data parallel group is smaller. In a job of sharded replicas
(recycle_plugin/adapters/deepspeed/replica) other replicas are at another micro-batch then, or lost.
"""

from __future__ import annotations

import torch

from recycle_plugin.patches import Patch

VERSIONS = ">=0.19.3,<0.20"
WHERE = "deepspeed.runtime.zero.utils"


def _from_first(numbers: list[int]) -> list[int]:
    """Return the list of the first rank in this rank's data parallel group."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    group = groups._get_data_parallel_group()
    given = torch.tensor(numbers, dtype=torch.int64, device=get_accelerator().current_device_name())
    dist.broadcast(given, dist.get_global_rank(group, 0), group=group)
    return given.tolist()


def _check_length(lst: list[int]) -> None:
    """Replace ``assert_lst_len_same_as_other_ranks``: compare within the data parallel group."""
    (first,) = _from_first([len(lst)])
    if first != len(lst):
        raise RuntimeError(f"ZeRO stage 3: a list has {len(lst)} numbers here and {first} at the group's first rank")


LENGTH = Patch(
    target=f"{WHERE}:assert_lst_len_same_as_other_ranks",
    package="deepspeed",
    versions=VERSIONS,
    source_sha256="89aab0f80f1a80b328a6b87b3cec95352b8973c4a69e3c805ac162950ff9f7fc",
    replacement=_check_length,
)
NUMBERS = Patch(
    target=f"{WHERE}:get_lst_from_rank0",
    package="deepspeed",
    versions=VERSIONS,
    source_sha256="d0218dade2013bdb18baca491636e05eec5ae20895e9075a9d3b7b907b096e90",
    replacement=_from_first,
)


def apply() -> None:
    """Apply both patches. Raises ``PatchMismatch``."""
    LENGTH.apply()
    NUMBERS.apply()
