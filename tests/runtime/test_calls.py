"""The table of docs/collectives.md, of what a script's calls to torch.distributed give while nobody is lost, once
somebody is, and where somebody dies in them: each cell by three real processes, against what stock torch gives.

``--freeze`` writes the table anew.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from recycle_plugin.runtime.collectives.gloo import GlooLink
from tests.support.calls import CALLS, LOST
from tests.support.calls_page import (
    COLUMNS,
    PAGE,
    each,
    goes_on,
    known,
    outcome,
    rows,
    torchs_names,
    words,
)
from tests.support.results import DIED
from tests.support.scenario import Script, run

NOT_CALLS = {
    **dict.fromkeys(("Store", "PrefixStore", "ProcessGroup", "ProcessGroupGloo", "Backend", "BackendConfig", "P2POp",
                     "Work", "ReduceOp", "reduce_op", "GroupMember", "GroupName", "group", "DebugLevel",
                     "AllToAllOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "BarrierOptions",
                     "BroadcastOptions", "GatherOptions", "ReduceOptions", "ReduceScatterOptions", "ScatterOptions"),
                    "a type, or a value"),
    **dict.fromkeys(("get_backend", "get_backend_config", "get_debug_level", "get_default_backend_for_device",
                     "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count",
                     "get_process_group_ranks", "get_rank", "get_world_size", "is_backend_available",
                     "is_gloo_available", "is_initialized", "is_mpi_available", "is_nccl_available",
                     "is_torchelastic_launched", "is_ucc_available", "is_xccl_available", "supports_complex",
                     "default_pg_timeout", "record_comm"), "asks nobody else"),
    **dict.fromkeys(("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration",
                     "destroy_process_group", "split_group", "shrink_group"), "tests/runtime/test_groups_of_all.py"),
    **dict.fromkeys(("Work.block_current_stream", "Work.boxed", "Work.unbox", "Work.get_future_result"),
                    "not there over Gloo either"),
    **dict.fromkeys(("functional.wait_tensor", "functional.wait_tensor_backward",
                     "functional.wait_tensor_setup_context",
                     "functional.allow_inflight_collective_as_graph_input_ctx"), "of all functional ones"),
    **{f"functional.{name}{kind}": "one that is there, for autograd"
       for name in ("all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
                    "all_to_all_single") for kind in ("_autograd",)},
    **{f"functional.{name}{kind}": "for autograd, of one that is there"
       for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
                    "all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
       for kind in ("_backward", "_setup_context")},
    **dict.fromkeys(("functional.all_gather_single", "functional.all_gather_single_coalesced",
                     "functional.reduce_scatter_single", "functional.reduce_scatter_single_coalesced"),
                    "torch's newer name of one that is there"),
    **{f"functional.{name}_inplace": "for compiled code, which the plugin refuses"
       for name in ("all_gather_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all", "all_gather", "isend",
                    "irecv", "batch_p2p_ops")},
    **dict.fromkeys(("checkpoint.save_state_dict", "checkpoint.load_state_dict",
                     "checkpoint.load_sharded_optimizer_state_dict"), "torch's older name, or builds on one"),
}  # fmt: skip


AT_ONCE = 12  # of the calls, in one run of the tests


# --- which calls there are -----------------------------------------------------------------------------


def test_all_that_torch_has_is_in_the_table():
    """So that a new release shows what it has added."""
    known = {call.of for call in CALLS} | NOT_CALLS.keys()
    assert not (new := torchs_names() - known), (
        f"torch has {', '.join(sorted(new))}: give each a row in tests/support/calls.py, or say in NOT_CALLS why it "
        "has none; then pytest --freeze tests/runtime/test_calls.py"
    )


# --- what they give ------------------------------------------------------------------------------------


def after_a_loss(script: Script, chosen: list[int]) -> dict[int, Any]:
    dist.barrier()
    if script.rank == LOST:
        script.die()
    script.recover()
    return each(script, chosen)


def lost_in_it(script: Script, place: int) -> Any:
    """The last rank dies once the others wait in the call, or are through with it."""
    dist.barrier()
    if script.rank == LOST:
        script.hear("in it", 0, 1)
        script.die()
    start = GlooLink.start

    def started(link: GlooLink, operation: Any) -> Any:
        handle = start(link, operation)
        script.say("in it")
        return handle

    GlooLink.start = started
    found = outcome(CALLS[place].do, script.rank)
    script.say("in it")
    return found, goes_on(script)


def nobody_lost() -> dict[str, str]:
    ranks = run(functools.partial(each, chosen=known()), 3)
    return words({place: [rank[place] for rank in ranks] for place in known()}, 3)


def somebody_lost() -> dict[str, str]:
    *ranks, died = run(functools.partial(after_a_loss, chosen=known()), 3, loses=True)
    assert died == DIED
    return words({place: [rank[place] for rank in ranks] for place in known()}, 2)


def somebody_lost_in_it(chosen: list[int] | None = None) -> dict[str, str]:
    chosen = known() if chosen is None else chosen
    return words({place: run(functools.partial(lost_in_it, place=place), 3, loses=True)[:2] for place in chosen}, 2)


def written(columns: list[dict[str, str]]) -> str:
    return "\n".join(f"| {name} | {' | '.join(column[name] for column in columns)} |" for name in columns[0])


@pytest.fixture(scope="module")
def said(request) -> Callable[[str], dict[str, str]]:
    text = PAGE.read_text()
    if request.config.getoption("--freeze"):
        table = written([nobody_lost(), somebody_lost(), somebody_lost_in_it()])
        PAGE.write_text(text := re.sub(r"(?<=\|---\|---\|---\|---\|\n)(\|.*\n)*", lambda _: table + "\n", text))
    return lambda column: {name: cells[COLUMNS.index(column)] for name, cells in rows(text).items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("column, measure", [(COLUMNS[0], nobody_lost), (COLUMNS[1], somebody_lost)])
def test_the_page_says_what_is_measured(said, column, measure):
    assert measure() == said(column), "docs/collectives.md; pytest --freeze writes it anew"


@pytest.mark.timeout(600)
def test_the_page_says_what_a_loss_in_a_call_leads_to(said, request):
    """Of some calls, which --kill-seed chooses, each in three processes of its own; of all with --all-kills."""
    chosen, seed = known(), request.config.getoption("--kill-seed")
    if not request.config.getoption("--all-kills"):
        chosen = random.Random(f"{seed} calls").sample(chosen, AT_ONCE)
    column = said(COLUMNS[2])
    assert column.keys() == {CALLS[place].name for place in known()}
    assert somebody_lost_in_it(chosen) == {CALLS[place].name: column[CALLS[place].name] for place in chosen}, (
        "docs/collectives.md; pytest --freeze writes it anew"
    )
