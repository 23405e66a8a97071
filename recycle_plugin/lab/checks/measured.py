"""Measurements among the workers of a job before they train: releases, devices, clocks, links."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.adapters.plain import Pipeline
from recycle_plugin.lab.checks.installed import installed, name_of

PINGS, WARM_UP = 50, 5
LARGE, TIMES = 16 << 20, 4  # bytes, and how often they are sent
ALL_PAIRS = 6  # hosts; if there are more, each is measured with the first and with the next


def write(pipeline: Pipeline, path: Path) -> None:
    """Measure together with all other workers of the job; rank 0 writes JSON to ``path``."""
    everybody = _gathered(about(pipeline))
    mine = {
        f"{one}-{other}": measured
        for one, other in pairs([each["host"] for each in everybody])
        if (measured := _link(one, other)) is not None
    }
    links = {name: link for each in _gathered(mine) for name, link in each.items()}
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"workers": everybody, "links": links}))


def about(pipeline: Pipeline) -> dict[str, Any]:
    """Return this worker's place, releases and device."""
    where = next(pipeline.module.parameters()).device
    return {
        "rank": dist.get_rank(),
        "seat": str(pipeline.seat),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": installed(where.type),
        "device": name_of(where),
    }


def pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose links are measured, one rank for each host; with one host its first two ranks."""
    first = sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    if len(first) == 1:
        return [(0, 1)]
    if len(first) <= ALL_PAIRS:
        return list(combinations(first, 2))
    return sorted({(first[0], other) for other in first[1:]} | set(zip(first, first[1:])))


def _gathered(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _link(one: int, other: int) -> dict[str, float] | None:
    """Return the link between two ranks as the first of them measures it, None on all others."""
    rank = dist.get_rank()
    if rank == one:
        return _measure(other)
    if rank == other:
        _answer(one)
    return None


def _measure(other: int) -> dict[str, float]:
    """Return milliseconds of a round trip, GB/s one way, and how many milliseconds the other's clock is ahead."""
    now, taken = torch.zeros(1, dtype=torch.float64), []
    for _ in range(WARM_UP + PINGS):
        begun, begun_at = time.perf_counter(), time.time()
        dist.send(now, other)
        dist.recv(now, other)
        took = time.perf_counter() - begun
        taken.append((took, now.item() - (begun_at + took / 2)))
    trips = [took for took, _ in taken[WARM_UP:]]
    large = torch.ones(LARGE, dtype=torch.uint8)
    begun = time.perf_counter()
    for _ in range(TIMES):
        dist.send(large, other)
    dist.recv(now, other)  # all of it has arrived
    seconds = max(time.perf_counter() - begun - median(trips), 1e-9)
    return {
        "round_trip_ms": round(1e3 * median(trips), 4),
        "worst_ms": round(1e3 * max(trips), 4),
        "gb_s": round(TIMES * LARGE / seconds / 1e9, 4),
        "clock_ms": round(1e3 * min(taken)[1], 3),  # from the fastest trip, whose error is least
    }


def _answer(one: int) -> None:
    now, large = torch.zeros(1, dtype=torch.float64), torch.empty(LARGE, dtype=torch.uint8)
    for _ in range(WARM_UP + PINGS):
        dist.recv(now, one)
        dist.send(now.fill_(time.time()), one)
    for _ in range(TIMES):
        dist.recv(large, one)
    dist.send(now, one)
