"""Functions of torch.distributed that are more than an operation of their group, as scripts call them.

Each takes the place of torch's of the same name, which it gets as ``stock`` after the worker's ``session``, for groups
that can lose members, and hands on to it for others.  What is pickled can have a gap, which tensors can't: gathers of
objects give None for who is lost.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.collectives import group as groups
from recycle_plugin.runtime.collectives.average import BACKEND
from recycle_plugin.runtime.collectives.callers import calling_line, named
from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.control.session import Session

Stock = Callable[..., Any]

# --- groups --------------------------------------------------------------------------------------------


def init_process_group(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """torch's, whose groups can lose members, whichever backend they ask for that this one takes the place of."""
    bound = _bound(stock, arguments, given)
    if groups.takes(bound.arguments.get("backend")):
        groups.register(session)
        bound.arguments["backend"] = BACKEND
        _unbound(bound)
    return stock(*bound.args, **bound.kwargs)


def new_group(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """torch's, also of meshes and sub-groups; raises RecycleError for a backend whose groups would not be followed over
    a loss.
    """
    bound = _bound(stock, arguments, given)
    if dist.get_backend() == BACKEND:
        asked = bound.arguments.pop("backend", None)
        if not groups.takes(asked):
            raise RecycleError(
                f"torch.distributed.new_group over {asked}, called at {calling_line()}: its members could not go on "
                'without a lost one; write "gloo" for the backend, or leave it out'
            )
        _unbound(bound)
    return stock(*bound.args, **bound.kwargs)


def _unbound(bound: inspect.BoundArguments) -> None:
    """Drop ``device_id``, for which torch would ask the group's backend: over Gloo a group belongs to no device."""
    bound.arguments.pop("device_id", None)


def split_group(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """torch's; raises RecycleError for a group that can lose members."""
    return _refused(stock, "parent_pg", "call new_group(ranks) for each part instead", arguments, given)


def shrink_group(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """torch's; raises RecycleError for a group that can lose members."""
    return _refused(stock, "group", "a group goes on with its live members by itself", arguments, given)


def _refused(stock: Stock, of: str, advice: str, arguments: tuple[Any, ...], given: dict[str, Any]) -> Any:
    bound = _bound(stock, arguments, given)
    if (followed := _followed(bound.arguments.get(of))) is not None:
        raise RecycleError(f"{_where(stock, followed)} is not supported: {advice}")
    return stock(*arguments, **given)


# --- objects -------------------------------------------------------------------------------------------


def broadcast_object_list(session: Session, stock: Stock, *arguments: Any, **given: Any) -> None:
    """torch's; a newcomer that would send has what its predecessor has sent, as if it received that."""
    _received_again(session, stock, arguments, given)


def scatter_object_list(session: Session, stock: Stock, *arguments: Any, **given: Any) -> None:
    """torch's; a newcomer that would send has what its predecessor has sent, as if it received that."""
    _received_again(session, stock, arguments, given)


def _received_again(session: Session, stock: Stock, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Call ``stock`` from another root than a newcomer, whose own objects may be of other sizes than were sent."""
    bound = _bound(stock, arguments, given)
    group = bound.arguments.get("group")
    if session.hooks.startup is not None and session.hooks.startup.alone and dist.get_rank(group) >= 0:
        others = set(dist.get_process_group_ranks(group)) - {session.rank}
        if others and dist.get_backend(group) == BACKEND:
            bound.arguments.pop("group_src", None)
            bound.arguments["src"] = min(others)
    stock(*bound.args, **bound.kwargs)


def all_gather_object(session: Session, stock: Stock, *arguments: Any, **given: Any) -> None:
    """torch's; None in the place of who is lost."""
    bound = _bound(stock, arguments, given).arguments
    if (group := _followed(bound.get("group"))) is None:
        stock(*arguments, **given)
        return
    objects, members = bound["object_list"], group.size()
    if len(objects) < members:
        raise RecycleError(
            f"{_where(stock, group)}: object_list has {len(objects)} places for {members} members, lost ones too"
        )
    objects[:members] = _gathered(stock, group, bound["obj"])


def gather_object(session: Session, stock: Stock, *arguments: Any, **given: Any) -> None:
    """torch's; None in the place of who is lost, and RecycleError where that is the member who gathers.

    All members get all of it on the way: a loss finds nobody through with it whose object another one still needs.
    """
    bound = _bound(stock, arguments, given).arguments
    if (group := _followed(bound.get("group"))) is None:
        stock(*arguments, **given)
        return
    root = _member(group, bound.get("dst"), bound.get("group_dst"))
    objects = bound.get("object_gather_list")
    _check_root(stock, group, root)
    if (root == session.rank) != bool(objects):
        raise RecycleError(
            f"{_where(stock, group)}: object_gather_list is for rank {root}, which gathers, and nobody else"
        )
    found = _gathered(stock, group, bound["obj"])
    _check_root(stock, group, root)
    if objects:
        objects[: len(found)] = found


def _check_root(stock: Stock, group: MemberGroup, root: int) -> None:
    if root in group.lost:
        raise RecycleError(f"{_where(stock, group)}: it goes to rank {root}, and that worker is lost")


def _gathered(stock: Stock, group: MemberGroup, own: Any) -> list[Any]:
    """What each member has given as ``own``, in the group's order, None for who is lost; costs two gathers, and a copy
    of the largest object for each member.
    """
    text = text_of(own)
    sizes = torch.zeros(group.size(), 1, dtype=torch.int64)
    group.gather_rows(stock.__name__, sizes, torch.tensor([text.numel()])).wait()
    rows = torch.zeros(group.size(), 1 + int(sizes.max()), dtype=torch.uint8)  # a one before what has come
    row = torch.ones(rows.size(1), dtype=torch.uint8)
    if text.numel() < row.numel():  # or this is a newcomer, whose predecessor has given its own
        row[1 : 1 + text.numel()] = text
    group.gather_rows(stock.__name__, rows, row).wait()
    return [object_of(there[1 : 1 + int(size)]) if there[0] and size else None for there, size in zip(rows, sizes)]


def text_of(thing: Any) -> torch.Tensor:
    """What a script's object goes to others as, uint8 in host memory.  Raises what pickle does."""
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def object_of(text: torch.Tensor) -> Any:
    """The object of which another member of the script has made ``text``, which runs what that says, as in stock."""
    return pickle.loads(text.numpy().tobytes())


# --- messages ------------------------------------------------------------------------------------------


def batch_isend_irecv(session: Session, stock: Stock, *arguments: Any, **given: Any) -> list[dist.Work]:
    """torch's; raises RecycleError, and starts none of them, where one is with a lost member."""
    for asked in _bound(stock, arguments, given).arguments["p2p_op_list"]:
        group = _followed(asked.group)
        if group is not None and asked.peer in group.lost:
            raise RecycleError(
                f"{_where(stock, group)}: one of the messages is to or from rank {asked.peer}, and that worker is "
                "lost; none has been started"
            )
    works: list[dist.Work] = stock(*arguments, **given)
    return works


# --- waiting, and checkpoints --------------------------------------------------------------------------


def monitored_barrier(session: Session, stock: Stock, *arguments: Any, **given: Any) -> None:
    """torch's, which is Gloo's alone: a barrier of the live members that says so on each of them when it takes longer
    than ``timeout``.
    """
    bound = _bound(stock, arguments, given).arguments
    group, timeout = _followed(bound.get("group")), bound.get("timeout")
    if group is None:
        stock(*arguments, **given)
        return
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout or 0)  # 0: the group's own
    try:
        group.barrier().wait(limit)
    except WaitTimeout as late:
        raise WaitTimeout(f"{_where(stock, group)}: {late}") from None


def save(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """torch.distributed.checkpoint's; raises RecycleError where a member of its group is lost, before it or in it, and
    for ZeRO's shards.
    """
    _check_whole_values(stock, _bound(stock, arguments, given).arguments["state_dict"])
    return _of_all(stock, arguments, given)


def load(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """torch.distributed.checkpoint's; raises RecycleError where a member of its group is lost, before it or in it."""
    return _of_all(stock, arguments, given)


def async_save(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """torch.distributed.checkpoint's; raises RecycleError for a group that can lose members."""
    advice = "its collectives would meet in a thread of their own, where no recovery begins; call save()"
    return _refused(stock, "process_group", advice, arguments, given)


def _of_all(stock: Stock, arguments: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """A call to torch.distributed.checkpoint that needs the parts of all members."""
    from torch.distributed.checkpoint import CheckpointException

    group = None if given.get("no_dist") else _followed(given.get("process_group"))  # both by name only
    if group is None:
        return stock(*arguments, **given)
    _check_whole(stock, group)
    try:
        found = stock(*arguments, **given)
    except CheckpointException:
        _check_whole(stock, group)
        raise
    _check_whole(stock, group)
    return found


def _check_whole_values(stock: Stock, state: Any) -> None:
    """Raise RecycleError where ``state`` has ZeRO's shards, which differ between ranks by the same names: one would
    be written for all.
    """
    if not isinstance(state, Mapping):
        return
    empty = next((name for name, value in state.items() if torch.is_tensor(value) and not value.numel()), None)
    if "deepspeed" in sys.modules and ("zero_stage" in state or empty is not None):
        what = "the state of ZeRO's optimizer" if empty is None else f"{empty}, which ZeRO 3 has sharded"
        raise RecycleError(
            f"torch.distributed.checkpoint.{stock.__name__}, called at {calling_line()}, would write one rank's part "
            f"of {what}: call engine.save_checkpoint(folder), or give it whole values, as of deepspeed.zero."
            "GatheredParameters"
        )
    for value in state.values():
        _check_whole_values(stock, value)


def _check_whole(stock: Stock, group: MemberGroup) -> None:
    if lost := group.lost:
        raise RecycleError(
            f"{_where(stock, group)}, needs every member's part, and {named(lost)} {'are' if len(lost) > 1 else 'is'} "
            "lost: give process_group=torch.distributed.new_group(the live ranks) where each of them has all, or let "
            "the engine save"
        )


# --- what they share -----------------------------------------------------------------------------------


def _bound(stock: Stock, arguments: tuple[Any, ...], given: dict[str, Any]) -> inspect.BoundArguments:
    return inspect.signature(stock).bind(*arguments, **given)


def _followed(group: Any) -> MemberGroup | None:
    """The group that a call is about, None for the default one, if it can lose members and this worker is in it."""
    found = group or (dist.group.WORLD if dist.is_initialized() else None)
    return found if isinstance(found, MemberGroup) else None


def _member(group: MemberGroup, rank: int | None, place: int | None) -> int:
    """The global rank of a member that is named by this one, or by its place in the group; by default rank 0."""
    return dist.get_global_rank(group, place) if place is not None else rank or 0


def _where(stock: Stock, group: MemberGroup) -> str:
    called = f"{stock.__module__.removesuffix('.distributed_c10d').partition('.state_dict')[0]}.{stock.__name__}"
    return f"{called} over {named(dist.get_process_group_ranks(group))}, called at {calling_line()}"
