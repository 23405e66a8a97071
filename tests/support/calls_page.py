"""The table of docs/collectives.md, and its words for what calls of torch.distributed give each rank."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.nn.functional as differentiable

from recycle_plugin.errors import RecycleError
from tests.support.calls import CALLS, Call
from tests.support.scenario import Script, run_stock

PAGE = Path(__file__).parents[2] / "recycle_plugin" / "docs" / "collectives.md"
COLUMNS = ("nobody lost", "somebody lost", "lost in it")
HEAD = f"| call | {' | '.join(COLUMNS)} |"
GAVE, REFUSED = "gave", "refused"
AS_STOCK, LIVE, GAPS = "as stock", "of the live", "`None` for the lost"
MODULES = {"": dist.distributed_c10d, "functional.": functional, "nn.functional.": differentiable}


def torchs_names() -> set[str]:
    own = {
        f"{prefix}{name}"
        for prefix, module in MODULES.items()
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
    }
    saving = {f"checkpoint.{name}" for name, one in vars(checkpoint).items() if isinstance(one, types.FunctionType)}
    handles = {f"Work.{name}" for name in dir(dist.Work) if not name.startswith("_")}
    return {*dist.distributed_c10d.__all__} | {name for name in own if "." in name} | saving | handles


def there(call: Call) -> bool:
    return call.of in torchs_names() or call.of.startswith("_")


def outcome(do: Callable[[int], Any], rank: int) -> tuple[str, Any]:
    try:
        return GAVE, do(rank)
    except RecycleError as error:
        return REFUSED, str(error)
    except Exception as error:
        return type(error).__name__, str(error)


def each(script: Script, chosen: list[int], stock: bool = False) -> dict[int, Any]:
    """All calls, one after the other; after each of them the others still meet."""
    found = {}
    for place in chosen:
        call = CALLS[place]
        found[place] = outcome(call.stock or call.do if stock else call.do, script.rank), goes_on(script)
    return found


def goes_on(script: Script) -> float | str:
    total = script.value().fill_(1)
    try:
        dist.all_reduce(total)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return total.item()


def cell(call: Call, outcomes: list[Any], stock: list[Any], live: int) -> str:
    """The word for what all ranks got; what is neither is said at length."""
    if wrong := [each for (each, there) in outcomes if each[0] not in (GAVE, REFUSED) or there != live]:
        return f"{wrong[0]}, and then {outcomes[0][1]}"
    found = [each for each, _ in outcomes]
    texts = [text for kind, text in found if kind == REFUSED]
    if texts:
        bad = [text for text in texts if "\n" in text or len(text) > 400]
        given = [value for kind, value in found if kind == GAVE and something(value)]
        return f"{bad or given}, where others are refused" if bad or given else REFUSED
    expected = [value for (_, value), _ in stock]
    values = [value for _, value in found]
    if values == expected:
        return AS_STOCK if live == 3 else LIVE
    if values == [value if value is None else [*value, None] for value in expected]:
        return GAPS
    return f"{values} where stock has {expected}"


def something(value: Any) -> bool:
    """Whether a call has given anything, but zeros in a place that nobody fills."""
    return any(map(something, value)) if isinstance(value, list) else bool(value)


@functools.cache
def stocks(ranks: int) -> list[dict[int, Any]]:
    """What stock gives on each rank, of those calls that so many can make."""
    chosen = [place for place, call in enumerate(CALLS) if there(call) and (ranks == 3 or not call.needs_the_lost)]
    return run_stock(functools.partial(each, chosen=chosen, stock=True), ranks)


def words(measured: dict[int, list[Any]], live: int) -> dict[str, str]:
    found = {}
    for place, outcomes in measured.items():
        stock = [rank.get(place, ((GAVE, ()), 0)) for rank in stocks(live)]
        found[CALLS[place].name] = cell(CALLS[place], outcomes, stock, live)
    return found


def known() -> list[int]:
    return [place for place, call in enumerate(CALLS) if there(call)]


def rows(text: str) -> dict[str, list[str]]:
    lines = [line for line in text.partition(HEAD)[2].splitlines() if line.startswith("| `")]
    cells = [[one.strip() for one in line.strip("|").split("|")] for line in lines]
    return {call: words for call, *words in cells}
