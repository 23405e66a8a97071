#!/usr/bin/env python
"""How long a newcomer takes to get a stage's state from two workers that train on, and what their steps lose.

    scripts/bench_catch_up.py [--megabytes 400] [--step-s 1.0] [--waiting 0.3] [--rounds 5] [--json FILE]

Two sources and a newcomer, processes of this host, with the real lines, units and optimizers (Adam in fp32), and an
emulated step: --step-s seconds of sleep in 10 instructions, of which the last --waiting part is a wait for others.
No coordinator: a step is committed when both have applied it.  Seconds are from the first chunk to the equal hash of
all three.  A source's step beside its own steps without a newcomer: median of those that serve, and the longest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from recycle_plugin.core.worker.catching_up import CatchingUp
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.serving import Serving
from recycle_plugin.lab.experiments.bench_scripts import script
from recycle_plugin.runtime.catch_up.inlet import TcpInlet
from recycle_plugin.runtime.catch_up.listener import StateListener
from recycle_plugin.runtime.catch_up.rate import Rate
from recycle_plugin.runtime.catch_up.wire import Arrival
from recycle_plugin.runtime.state.background_hash import BackgroundHash
from tests.support.stepped_worker import SteppedWorker

SOURCES = 2
INSTRUCTIONS = 10
WIDTH = 1024  # of a layer, which has a million parameters, and 12 MB
PATIENCE_S = 60.0
APART = 4  # steps between two rounds, and before the first
SECRET = Secret("of a bench, which is nobody's business")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400, help="of weights and moments")
    parser.add_argument(
        "--step-s", type=float, default=1.0, help="seconds of a source's step, without what it computes"
    )
    parser.add_argument("--waiting", type=float, default=0.3, help="the part of a step that a source waits for others")
    parser.add_argument("--rounds", type=int, default=5, help="newcomers, one after the other")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    given = parser.parse_args(arguments)
    figures = measured(given)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Run sources and newcomers, and put together what they say."""
    context = multiprocessing.get_context("spawn")
    stepped = context.Array("q", SOURCES)
    talks = [context.Pipe() for _ in range(SOURCES)]
    sources = [
        context.Process(target=source, args=(rank, given, stepped, talk[1]), daemon=True)
        for rank, talk in enumerate(talks)
    ]
    for process in sources:
        process.start()
    said = [talk[0] for talk in talks]
    addresses, rounds = [hear(one) for one in said], []
    for number in range(given.rounds):
        time.sleep(APART * given.step_s)  # steps of the sources alone, to compare with
        for one in said:
            one.send(("serve", number))
            hear(one)
        here, there = context.Pipe()
        process = context.Process(target=newcomer, args=(number, given, addresses, stepped, there), daemon=True)
        process.start()
        step = hear(here)
        for one in said:
            one.send(("hash", step))
        rounds.append(hear(here))
        hashes = {rounds[-1].pop("hash"), *(hear(one) for one in said)}
        assert len(hashes) == 1, "the states differ"
        rounds[-1]["seconds"] = time.monotonic() - rounds[-1].pop("first")
        for one in said:
            one.send("go on")
        print(f"round {number}: {rounds[-1]}", flush=True)
        process.join(PATIENCE_S)
    steps = []
    for one in said:
        one.send(("end", 0))
        steps.append(hear(one))
    for process in sources:
        process.join(PATIENCE_S)
    return put_together(rounds, steps)


def put_together(rounds: list[dict[str, Any]], steps: list[dict[str, list[float]]]) -> dict[str, Any]:
    alone = [statistics.median(each["alone"]) for each in steps]
    serving = [[one / usual for one in each["serving"]] for each, usual in zip(steps, alone, strict=True)]
    return {
        "catch_up_s": [round(each["seconds"], 2) for each in rounds],
        "whole_s": [round(each["whole_s"], 2) for each in rounds],
        "megabytes_of_state": [round(each["state"] / 1e6, 1) for each in rounds],
        "megabytes_of_sums": [round(each["sums"] / 1e6, 1) for each in rounds],
        "step_alone_s": [round(each, 4) for each in alone],
        "steps_alone_s": [[round(min(each["alone"]), 4), round(max(each["alone"]), 4)] for each in steps],
        "step_ratio": [round(statistics.median(each), 3) for each in serving],
        "worst_step_ratio": [round(max(each), 3) for each in serving],
    }


def hear(connection: Connection) -> Any:
    assert connection.poll(PATIENCE_S), "a process says nothing"
    return connection.recv()


def worker(given: argparse.Namespace, seed: int) -> SteppedWorker:
    torch.set_num_threads(1)
    layers = max(1, round(given.megabytes * 1e6 / 12 / WIDTH**2))

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    return SteppedWorker(lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False), seed, model=model)


def source(rank: int, given: argparse.Namespace, stepped: Any, talk: Connection) -> None:
    """Trains until it is told to end; serves whom it is told to."""
    made = worker(given, seed=0)
    sums = [torch.full_like(one, 1e-3) for one in made.summed]  # nobody changes them, so they are those of each step
    session = SimpleNamespace(
        rank=rank,
        worker=WorkerId(rank),
        roster=Roster(),
        own_address="127.0.0.1",
        secret=SECRET,
        note_stranger=print,
        job_id="bench",
        note=lambda kind, text, **details: print(kind, details or text, flush=True),
    )
    rate = Rate()
    listener = StateListener(session, None, rate)
    found: dict[str, list[float]] = {"alone": [], "serving": []}
    digests: SimpleQueue[str] = SimpleQueue()
    hashing = BackgroundHash(made.state, lambda step, digest: digests.put(digest))
    made.stepping._await_readers = hashing.finish
    talk.send(listener.address)
    step, hash_at, outlet, ends = 0, 0, None, False
    while not ends:
        step += 1
        began = time.monotonic()
        compute(made, given, step, stepped)
        made.reduce(step, sums)
        await_committed(stepped, step - 1)
        held = step - 1 == hash_at > 0
        if held:  # the newcomer would be a member of this step, and come to it only now
            made.servings.between(step - 1, step - 1, 0, True, True)
            hashing.finish()
            talk.send(digests.get(timeout=PATIENCE_S))
            hear(talk)
        made.step(step)
        stepped[rank] = step
        served = bool(outlet and outlet._connection) and not outlet.broken
        if step > APART and not held:
            found["serving" if served else "alone"].append(time.monotonic() - began)
        while step > APART and talk.poll():
            what, number = talk.recv()
            if what == "serve":
                newcomer = WorkerId(SOURCES, number + 1)
                outlet = listener.expect(newcomer)
                made.servings.add(newcomer, Serving(made.new_units(outlet.copied), outlet))
                talk.send("announced")
            elif what == "hash":
                assert number >= step, "that state is gone"
                hash_at = number
            ends |= what == "end"
        if step == hash_at:
            hashing.hash_state(step)
    listener.close()
    talk.send(found)


def compute(made: SteppedWorker, given: argparse.Namespace, step: int, stepped: Any) -> None:
    """An emulated step, and what is served in it."""

    def serve(waiting: bool) -> bool:
        return made.servings.between(step - 1, min(stepped), 0, False, waiting)

    working = round(INSTRUCTIONS * (1 - given.waiting))
    for _ in range(working):
        time.sleep(given.step_s / INSTRUCTIONS)
        while serve(waiting=False):
            pass
    until = time.monotonic() + given.step_s * (1 - working / INSTRUCTIONS)
    while time.monotonic() < until:
        if not serve(waiting=True):
            time.sleep(0.001)  # it would wait for a message


def await_committed(stepped: Any, step: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while min(stepped) < step:
        assert time.monotonic() < until, f"step {step} is not committed"
        time.sleep(0.0005)


def newcomer(number: int, given: argparse.Namespace, addresses: list[str], stepped: Any, talk: Connection) -> None:
    """Catches up, has the state of a step to come hashed everywhere, and says how it went."""
    made, changed = worker(given, seed=1), threading.Condition()
    machine = SimpleNamespace(
        units=made.units,
        operations=SimpleNamespace(compute=made.compute, go_by=lambda share: None),
        hashing=SimpleNamespace(hash_state=lambda step: None, finish=lambda: None),
    )
    catching_up = CatchingUp(FilledStage(machine, made.store, made.steps))
    arrival = Arrival("bench", WorkerId(SOURCES, number + 1))
    lines = [TcpInlet(address, arrival, SECRET, changed, print) for address in addresses]
    for rank, line in enumerate(lines):
        catching_up.add_source(WorkerId(rank), line)
    first, until, compared = 0.0, time.monotonic() + PATIENCE_S, 0
    while not (compared and catching_up.whole and catching_up.clock == compared):
        assert time.monotonic() < until, f"it is not whole: {catching_up.progress:.0%}"
        with changed:
            changed.wait(0.05)
        first = first or (time.monotonic() if any(line.taken["state"] for line in lines) else 0.0)
        catching_up.pump(compared or max(stepped))
        if catching_up.whole and not compared:
            compared = max(stepped) + 1  # which is under way
            whole = time.monotonic()
            talk.send(compared)
    figures = {name: sum(line.taken[name] for line in lines) for name in ("state", "sums")}
    talk.send({**figures, "first": first, "whole_s": whole - first, "hash": made.state.digest()})
    for line in lines:
        line.close()


if __name__ == "__main__":
    script(main)
