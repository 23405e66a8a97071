#!/usr/bin/env python
"""What exact mode's sum takes: the blocks' gradients added in a fixed order, beside DeepSpeed's way, one all-reduce,
over Gloo on this host.

    scripts/bench_exact.py [--workers 2 3 4] [--blocks 1 2] [--millions 4] [--rounds 15] [--json FILE]

Both are run in turn by the same processes, on buffers of --millions fp32 numbers; --blocks: how many each worker has.
Medians over --rounds, of the slowest worker of each round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.runtime.stage.block_sums import fixed_order_sum

TIMEOUT = timedelta(seconds=120)


class Group:
    """A Gloo group as runtime.stage.block_sums.Group."""

    def __init__(self, gloo: Any) -> None:
        self.gloo = gloo

    def live_position(self) -> tuple[int, int]:
        return self.gloo.rank(), self.gloo.size()

    def exchange(self, target: torch.Tensor, source: torch.Tensor, incoming: list[int], outgoing: list[int]) -> None:
        self.gloo.alltoall_base(target, source, incoming, outgoing, dist.AllToAllOptions()).wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[2, 3, 4], help="live workers of the stage (default 2 3 4)"
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2], help="blocks of each worker (default 1 2)")
    parser.add_argument("--millions", type=float, default=4.0, help="numbers in a gradient (default 4)")
    parser.add_argument("--rounds", type=int, default=15, help="of each way (default 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    found = parser.parse_args()
    if min(*found.workers, *found.blocks, found.rounds, found.millions * 1e6) < 1 or min(found.workers) < 2:
        parser.error("--workers: at least 2; --blocks, --rounds and numbers: at least 1")
    rows = [
        measured(workers, blocks, int(found.millions * 1e6), found.rounds)
        for workers in found.workers
        for blocks in found.blocks
    ]
    print(f"{found.millions:g} million numbers, {found.rounds} rounds, ms")
    print("workers  blocks  all-reduce  fixed order  ratio")
    for row in rows:
        print(
            f"{row['workers']:7}  {row['blocks']:6}  {row['all_reduce_ms']:10.1f}  {row['fixed_order_ms']:11.1f}  "
            f"{row['ratio']:5.2f}"
        )
    if found.json is not None:
        found.json.write_text(json.dumps(rows, indent=1))
    return 0


def measured(workers: int, blocks: int, length: int, rounds: int) -> dict:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    multiprocessing.spawn(run, (store.port, workers, blocks, length, rounds), workers)
    told = [json.loads(store.get(f"times{rank}")) for rank in range(workers)]
    plain, fixed = (median(map(max, zip(*(each[way] for each in told)))) for way in ("all_reduce", "fixed_order"))
    return {
        "workers": workers,
        "blocks": blocks,
        "length": length,
        "all_reduce_ms": 1e3 * plain,
        "fixed_order_ms": 1e3 * fixed,
        "ratio": fixed / plain,
    }


def run(rank: int, port: int, workers: int, blocks: int, length: int, rounds: int) -> None:
    """One worker.  All wait for each other before each sum."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
    group = Group(dist.ProcessGroupGloo(store, rank, workers, TIMEOUT))
    owners = [[Block(replica, number) for number in range(blocks)] for replica in range(workers)]
    mine = {block: torch.randn(length, generator=torch.Generator().manual_seed(rank)) for block in owners[rank]}
    contribution, times = sum(mine.values()), {"all_reduce": [], "fixed_order": []}
    ways = {
        "all_reduce": lambda: group.gloo.allreduce([contribution.clone()]).wait(),
        "fixed_order": lambda: fixed_order_sum(mine, owners, torch.empty(length), group),
    }
    for number in range(rounds + 1):
        for name, way in ways.items():
            group.gloo.barrier(dist.BarrierOptions()).wait()
            start = time.perf_counter()
            way()
            times[name] += [time.perf_counter() - start] if number else []  # the first is to warm up
    store.set(f"times{rank}", json.dumps(times))


if __name__ == "__main__":
    sys.exit(main())
