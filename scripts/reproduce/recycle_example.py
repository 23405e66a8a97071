"""ReCycle's running example: four schedules drawn as text and as a picture, published lengths beside ours.

python scripts/reproduce/recycle_example.py [cap_factor=1.5] [run_dir=...]
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import common
from common import OURS, PUBLISHED, Column, Table

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import ONE_F_ONE_B, Plan, Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.lab.simulator import simulate
from recycle_plugin.lab.simulator.peers import published
from recycle_plugin.planner import plan
from recycle_plugin.planner.assemble import timeline
from recycle_plugin.render.gantt import Panel, draw
from recycle_plugin.render.grid import draw as draw_grid

COLUMNS = (
    Column("schedule"),
    Column("M"),
    Column("cap"),
    Column("slots", OURS, 0),
    Column("slots", PUBLISHED, 0),
    Column("bound", OURS, 0),
    Column("period with optimizer", OURS, 0),
    Column("period with optimizer", PUBLISHED, 0),
    Column("peak micro-batches per stage", OURS),
    Column("remark"),
)


def main() -> None:
    config = common.settings("recycle_example")
    topology = Topology(config.replicas, config.stages, config.micro_batches)
    bare = CostModel.uniform(config.stages, config.forward, config.input, config.weight)
    costs = replace(bare, reduce=(config.reduce,) * config.stages, step=(config.step,) * config.stages)
    lost = tuple(Seat.parse(text) for text in config.lost)
    table = Table("ReCycle's running example", COLUMNS)
    panels, texts = [], []
    for name, view, policy in schedules(topology, lost, round(config.cap_factor * config.stages)):
        short, whole = plan(view, bare, policy), plan(view, costs, policy)
        known = published.EXAMPLE[name]
        staggered = policy.stagger_optimizer
        periods = (known, None) if not staggered else (None, known)
        slots = short.span_us if staggered else short.period_us
        said = remark(periods, slots, whole.period_us)
        cap = "/".join(str(policy.cap(stage, config.stages)) for stage in range(config.stages))
        table.add(
            name,
            config.micro_batches,
            cap,
            slots,
            periods[0],
            short.bound_us,
            whole.period_us,
            periods[1],
            peaks(whole),
            said,
        )
        title = f"{name}, period {whole.period_us} slots with the optimizer"
        panels.append(Panel(title, timeline(whole, costs), dict.fromkeys(view.lost, -1), (1, "slots")))
        texts.append(f"{name}\n{draw_grid(timeline(whole, costs))}\n")
    folder = Path(config.run_dir)
    notes = [
        f"PP={config.stages}, DP={config.replicas}, {config.micro_batches} micro-batches a pipeline, lost: "
        f"{', '.join(config.lost)}",
        "one slot is one F, BI or BW",
        "slots: first start to last end without the optimizer; the staggered schedule's figure is its period with the "
        "optimizer",
        "published: ReCycle (SOSP'24); its memory is not stated, except that its zero-loss schedule holds 8 "
        "micro-batches on the lost stage",
    ]
    (folder / "schedules.txt").write_text("\n".join(texts))
    print("\n".join(texts))
    table.write(folder / "example", notes)
    draw(folder / "example.png", *panels)
    draw(folder / "two_steps.png", *overlapping(topology, lost, costs, round(config.cap_factor * config.stages)))
    print(f"pictures: {folder / 'example.png'}, {folder / 'two_steps.png'}")


def schedules(topology: Topology, lost: tuple[Seat, ...], cap: int) -> list[tuple[str, ClusterView, Policy]]:
    """Return the paper's four schedules, by its names; "adaptive only" keeps to 1F1B's memory."""
    full, hurt = topology.full(), topology.full().without(*lost)
    return [
        ("fault-free 1F1B", full, Policy(split_backward=False, stagger_optimizer=False, reroute=False)),
        ("adaptive only", hurt, Policy(split_backward=False, stagger_optimizer=False, activation_cap=ONE_F_ONE_B)),
        ("+ decoupled", hurt, Policy(stagger_optimizer=False, activation_cap=cap)),
        ("+ staggered", hurt, Policy(activation_cap=cap)),
    ]


def overlapping(topology: Topology, lost: tuple[Seat, ...], costs: CostModel, cap: int) -> list[Panel]:
    """Return panels of two steps in a row, to show that a staggered optimizer closes the gap between them."""
    chosen = [entry for entry in schedules(topology, lost, cap) if entry[0] in ("+ decoupled", "+ staggered")]
    return [
        Panel(
            f"{name}, two steps",
            simulate(plan(view, costs, policy), costs, 2),
            dict.fromkeys(view.lost, -1),
            (1, "slots"),
        )
        for name, view, policy in chosen
    ]


def peaks(planned: Plan) -> str:
    """Return the most micro-batches held at once (after F, before the weight gradient), per stage."""
    most = [0] * planned.stages
    for seat, program in planned.programs.items():
        held = 0
        for instruction in program:
            held += (instruction.op.name == "F") - (instruction.op.name in ("W", "B"))
            most[seat.stage] = max(most[seat.stage], held)
    return "/".join(map(str, most))


def remark(known: tuple[int | None, int | None], slots: int, period: int) -> str:
    wanted, ours = (known[0], slots) if known[0] is not None else (known[1], period)
    return (
        "as published"
        if ours == wanted
        else f"{wanted - ours} slots better"
        if ours < wanted
        else f"short by {ours - wanted} slots"
    )


if __name__ == "__main__":
    main()
