"""Functions of torch.distributed that are more than one operation of a group.

Each replaces torch's function of the same name. It takes the worker's ``session`` and torch's function ``stock``, and
passes calls for groups that cannot lose members on to ``stock``. Pickled objects can have gaps, which tensors cannot:
gathers of objects return None for lost members.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.collectives import group as groups
from recycle_plugin.runtime.collectives.average import BACKEND
from recycle_plugin.runtime.collectives.callers import calling_line, named
from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.collectives.script_store import ScriptStore
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.state.stage_state import fingerprint

Stock = Callable[..., Any]
# --- groups --------------------------------------------------------------------------------------------


def init_process_group(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """Make torch's default group one that can lose members, for each backend that ``recycle`` stands in for. Its store
    is at the coordinator, unless the script brings one.
    """
    bound = _bound(stock, arguments, given)
    _bring_store(session, bound.arguments)
    if groups.takes(bound.arguments.get("backend")):
        groups.register(session)
        bound.arguments["backend"] = BACKEND
        _unbound(bound)
    return stock(*bound.args, **bound.kwargs)


def _bring_store(session: Session, asked: dict[str, Any]) -> None:
    """Give the job's store in place of one that every rank would look for at the master's address."""
    method = asked.get("init_method") or "env://"
    if asked.get("store") is not None or asked.get("backend") == "fake" or not method.startswith(("env://", "tcp://")):
        return
    asked.pop("init_method", None)
    for name, variable, own in (("rank", "RANK", session.rank), ("world_size", "WORLD_SIZE", session.ranks)):
        if asked.get(name, -1) < 0:
            asked[name] = int(os.environ.get(variable, own))
    asked["store"] = ScriptStore(session, asked.get("timeout") or default_pg_timeout)


def new_group(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """Create torch's group, also for meshes. Raises RecycleError for a backend whose groups cannot lose members."""
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
    """Drop ``device_id``, for which torch would query the group's backend; over Gloo a group belongs to no device."""
    bound.arguments.pop("device_id", None)


def split_group(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """Call torch's; raises RecycleError for a group that can lose members."""
    return _refused(stock, "parent_pg", "call new_group(ranks) for each part instead", arguments, given)


def shrink_group(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """Call torch's; raises RecycleError for a group that can lose members."""
    return _refused(stock, "group", "a group goes on with its live members by itself", arguments, given)


def _refused(stock: Stock, of: str, advice: str, arguments: tuple[Any, ...], given: dict[str, Any]) -> Any:
    bound = _bound(stock, arguments, given)
    if (followed := _followed(bound.arguments.get(of))) is not None:
        raise RecycleError(f"{_where(stock, followed)} is not supported: {advice}")
    return stock(*arguments, **given)


# --- objects -------------------------------------------------------------------------------------------


def broadcast_object_list(session: Session, stock: Stock, *arguments: Any, **given: Any) -> None:
    """Call torch's. A newcomer that would send gets its predecessor's objects instead, as if it received them."""
    _received_again(session, stock, arguments, given)


def scatter_object_list(session: Session, stock: Stock, *arguments: Any, **given: Any) -> None:
    """Call torch's. A newcomer that would send gets its predecessor's objects instead, as if it received them."""
    _received_again(session, stock, arguments, given)


def _received_again(session: Session, stock: Stock, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Call ``stock`` with a root other than this newcomer: its objects may differ in size from the objects sent."""
    bound = _bound(stock, arguments, given)
    group = bound.arguments.get("group")
    if session.hooks.startup is not None and session.hooks.startup.alone and dist.get_rank(group) >= 0:
        others = set(dist.get_process_group_ranks(group)) - {session.rank}
        if others and dist.get_backend(group) == BACKEND:
            bound.arguments.pop("group_src", None)
            bound.arguments["src"] = min(others)
    stock(*bound.args, **bound.kwargs)


def all_gather_object(session: Session, stock: Stock, *arguments: Any, **given: Any) -> None:
    """Call torch's; lost members' places get None."""
    bound = _bound(stock, arguments, given).arguments
    if (group := _followed(bound.get("group"))) is None:
        stock(*arguments, **given)
        return
    objects, members = bound["object_list"], group.size()
    if len(objects) < members:
        raise RecycleError(
            f"{_where(stock, group)}: object_list has {len(objects)} places for {members} members (counting lost ones)"
        )
    objects[:members] = _gathered(stock, group, bound["obj"])


def gather_object(session: Session, stock: Stock, *arguments: Any, **given: Any) -> None:
    """Call torch's; lost members' places get None. Raises RecycleError if the gathering member is lost. Internally all
    members get all objects: no member can be through while another still needs its object.
    """
    bound = _bound(stock, arguments, given).arguments
    if (group := _followed(bound.get("group"))) is None:
        stock(*arguments, **given)
        return
    root = _member(group, bound.get("dst"), bound.get("group_dst"))
    objects, where = bound.get("object_gather_list"), _where(stock, group)
    if (root == session.rank) != bool(objects):
        raise RecycleError(f"{where}: rank {root}, which gathers, must give object_gather_list, and no other rank")
    found = _gathered(stock, group, bound["obj"], lambda: _check_root(where, group, root))
    if objects:
        objects[: len(found)] = found


def _check_root(where: str, group: MemberGroup, root: int) -> None:
    if root in group.lost:
        raise RecycleError(f"{where}: it goes to rank {root}, and that worker is lost")


def _gathered(stock: Stock, group: MemberGroup, own: Any, check: Callable[[], object] = bool) -> list[Any]:
    """Return each member's ``own`` in group order, None for lost ones; each gets as much memory as the largest. The
    group makes ``check`` before each try, and counts a refused gather, whenever each member has heard of the loss.
    """
    text = text_of(own)
    sizes = torch.zeros(group.size(), 1, dtype=torch.int64)
    group.gather_rows(stock.__name__, sizes, torch.tensor([text.numel()]), check).wait()
    rows = torch.zeros(group.size(), 1 + int(sizes.max()), dtype=torch.uint8)  # column 0 is 1 if the row has arrived
    row = torch.ones(rows.size(1), dtype=torch.uint8)
    if text.numel() < row.numel():  # else this is a newcomer, whose predecessor gave its own
        row[1 : 1 + text.numel()] = text
    group.gather_rows(stock.__name__, rows, row, check).wait()
    return [object_of(there[1 : 1 + int(size)]) if there[0] and size else None for there, size in zip(rows, sizes)]


def text_of(thing: Any) -> torch.Tensor:
    """Return the pickled object as a uint8 tensor in host memory. Raises pickle's errors."""
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def object_of(text: torch.Tensor) -> Any:
    """Unpickle an object from another member of the script. This can run code, as in stock torch."""
    return pickle.loads(text.numpy().tobytes())


# --- messages ------------------------------------------------------------------------------------------


def batch_isend_irecv(session: Session, stock: Stock, *arguments: Any, **given: Any) -> list[dist.Work]:
    """Call torch's. Raises RecycleError, and starts no message, if one is to or from a lost member."""
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
    """Run a barrier of the live members that raises WaitTimeout on each of them after ``timeout``; only Gloo has it."""
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
    """Call torch.distributed.checkpoint's. Raises RecycleError as :func:`load` does, and for values that would be
    written wrong.
    """
    values = dict(_values("", _bound(stock, arguments, given).arguments["state_dict"]))
    return _of_all(stock, arguments, given, lambda group: _check_one_value_each(stock, group, values))


def load(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """Call torch.distributed.checkpoint's. Raises RecycleError if a group's member is lost before or during it."""
    return _of_all(stock, arguments, given)


def async_save(session: Session, stock: Stock, *arguments: Any, **given: Any) -> Any:
    """Save as torch.distributed.checkpoint.save before returning, and return a future that is done: stock's collectives
    in a second thread would hang if a member were lost. Raises RecycleError as :func:`save`, and for a stager.
    """
    if given.get("no_dist") or (group := _followed(given.get("process_group"))) is None:
        return stock(*arguments, **given)
    if given.pop("async_stager", None) is not None:
        raise RecycleError(f"{_where(stock, group)}: leave async_stager out, since this saves before it returns")
    given.pop("async_checkpointer_type", None)
    done: Future[Any] = Future()
    done.set_result(sys.modules["torch.distributed.checkpoint"].save(*arguments, **given))
    return done


def _of_all(
    stock: Stock, arguments: tuple[Any, ...], given: dict[str, Any], check: Callable[[MemberGroup], object] = bool
) -> Any:
    """Call a function of torch.distributed.checkpoint that needs all members' parts, after ``check``."""
    from torch.distributed.checkpoint import CheckpointException

    group = None if given.get("no_dist") else _followed(given.get("process_group"))  # both by name only
    if group is None:
        return stock(*arguments, **given)
    _check_whole(stock, group)
    check(group)
    try:
        found = stock(*arguments, **given)
    except CheckpointException:
        _check_whole(stock, group)
        raise
    _check_whole(stock, group)
    return found


def _values(name: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors in ``state`` by their names in DCP. Tensors of other types say which part they are."""
    from torch.distributed.checkpoint.stateful import Stateful

    if isinstance(state, Stateful) and not torch.is_tensor(state):
        state = state.state_dict()
    if type(state) in (torch.Tensor, torch.nn.Parameter):
        yield name, state
    elif isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _values(f"{name}.{key}" if name else str(key), value)


def _check_one_value_each(stock: Stock, group: MemberGroup, values: dict[str, torch.Tensor]) -> None:
    """Raise RecycleError on all members if two have different values under one name, of which DCP would write one, or
    if ZeRO 3 has sharded a value. Members that have all alike are represented by one: costs what DCP's own plan does.
    """
    empty = "deepspeed" in sys.modules
    own = {name: "" if empty and not value.numel() else fingerprint(value) for name, value in values.items()}
    alike = _gathered(stock, group, hashlib.sha256(repr(own).encode()).hexdigest())
    first = alike.index(alike[group.rank()]) == group.rank()
    seen: dict[str, tuple[int, str]] = {}
    for rank, theirs in zip(dist.get_process_group_ranks(group), _gathered(stock, group, own if first else {})):
        for name, value in (theirs or {}).items():
            other, its = seen.setdefault(name, (rank, value))
            if value == its and value:
                continue
            why = f"ranks {other} and {rank} have different values" if value != its else "ZeRO 3 has sharded it"
            raise RecycleError(
                f"torch.distributed.checkpoint.{stock.__name__}, called at {calling_line()}, would write one rank's "
                f'value under the name "{name}" for all, but {why}: call engine.save_checkpoint(folder), or give it '
                "whole values, as of deepspeed.zero.GatheredParameters, or a name for each rank's"
            )


def _check_whole(stock: Stock, group: MemberGroup) -> None:
    if lost := group.lost:
        raise RecycleError(
            f"{_where(stock, group)}, needs every member's part, and {named(lost)} {'are' if len(lost) > 1 else 'is'} "
            "lost: give process_group=torch.distributed.new_group(the live ranks) if each of them has all, or let "
            "the engine save"
        )


# --- what they share -----------------------------------------------------------------------------------


def _bound(stock: Stock, arguments: tuple[Any, ...], given: dict[str, Any]) -> inspect.BoundArguments:
    return inspect.signature(stock).bind(*arguments, **given)


def _followed(group: Any) -> MemberGroup | None:
    """Return the group of a call (None: the default group) if it can lose members and has this worker, else None."""
    found = group or (dist.group.WORLD if dist.is_initialized() else None)
    return found if isinstance(found, MemberGroup) else None


def _member(group: MemberGroup, rank: int | None, place: int | None) -> int:
    """Return a member's global rank, given as ``rank`` or as ``place`` in the group; by default rank 0."""
    return dist.get_global_rank(group, place) if place is not None else rank or 0


def _where(stock: Stock, group: MemberGroup) -> str:
    called = f"{stock.__module__.removesuffix('.distributed_c10d').partition('.state_dict')[0]}.{stock.__name__}"
    return f"{called} over {named(dist.get_process_group_ranks(group))}, called at {calling_line()}"
