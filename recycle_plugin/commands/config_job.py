"""The job that a DeepSpeed config, a shape and a hostfile describe, read without torch; errors are ValueErrors."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from recycle_plugin.commands.given import of_run, refuse_empty
from recycle_plugin.core.coordinator.succession import LEAST
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.placement import spread, stages_at_risk
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SECTION, refuse_misspelt, shown

TOTAL, SAMPLES, COUNT = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
CLIPPING, DEFAULT_CLIPPING = "gradient_clipping", 1.0  # DeepSpeed's default
ONE_HOST = "this host"  # the only host if there is no hostfile
_SLOTS = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class ConfiguredJob:
    """A job as configured.

    ``hosts``: the seats of each host, rank 0's host first. ``origin``: the source of ``costs``. ``samples``: of a
    micro-batch. ``mismatch``: how the batch sizes contradict each other, one line or "". ``measured``: bytes that a run
    of this model held on each stage, if the costs are from a run.
    """

    config: dict[str, Any]
    settings: Settings
    shape: Topology
    policy: Policy
    costs: CostModel
    origin: str
    hosts: dict[str, tuple[Seat, ...]]
    spare_slots: int
    clipping: float
    samples: int
    mismatch: str
    measured: tuple[StageBytes, ...] = ()

    @property
    def replicas(self) -> int:
        return self.shape.replicas

    @property
    def stages(self) -> int:
        return self.shape.stages

    @property
    def survives(self) -> bool:
        """Whether the job, with the plugin enabled, survives any loss by rerouting."""
        return self.settings.reroute and self.replicas > 1

    @property
    def survives_first_host(self) -> bool:
        """Whether a standby on another host can take the coordinator's place if rank 0's host dies."""
        first = next(iter(self.hosts.values()))
        return len(self.hosts) >= LEAST and 2 * len(first) < sum(map(len, self.hosts.values()))

    @property
    def busiest_blocks(self) -> int:
        """The number of exact mode's blocks at the busiest worker after one loss."""
        return -(-len(self.policy.blocks(self.shape).members()) // max(1, self.replicas - 1))

    @property
    def busiest(self) -> int:
        """The most micro-batches of a worker after one loss."""
        return min(len(self.shape.batch), self.busiest_blocks * self.policy.blocks(self.shape).size)

    @property
    def ordinary(self) -> int:
        """Micro-batches of each worker without a loss."""
        return self.shape.micro_batches

    def planned(self, lost: tuple[Seat, ...] = (), **changed: Any) -> tuple[int, int]:
        """Return (period, lower bound) in microseconds of the plan without the ``lost`` seats and those that go with
        them. ``changed``: fields of the policy. Raises PlanError.
        """
        return _planned(self.shape.full().without(*self.gone(lost)), self.costs, replace(self.policy, **changed))

    def gone(self, lost: Iterable[Seat]) -> tuple[Seat, ...]:
        """Return the seats that go with ``lost``: the same, or their whole replicas if replicas are the unit."""
        if self.settings.unit == "worker":
            return tuple(lost)
        replicas = {seat.replica for seat in lost}
        return tuple(seat for seat in self.shape.seats if seat.replica in replicas)

    def ends(self, lost: Iterable[Seat]) -> bool:
        """Return whether the loss of these seats empties a stage."""
        return bool(self.shape.full().without(*self.gone(lost)).empty_stages())

    def one_lost(self, **changed: Any) -> int:
        """Return the period in microseconds after the costliest single loss, or without a loss if no loss is survived.
        Makes one plan for each stage. Raises PlanError.
        """
        if not self.survives:
            return self.planned(**changed)[0]
        return max(self.planned((Seat(0, stage),), **changed)[0] for stage in range(self.stages))


@cache
def _planned(view: ClusterView, costs: CostModel, policy: Policy) -> tuple[int, int]:
    from recycle_plugin import planner

    made = planner.plan(view, costs, policy)
    return made.period_us, made.bound_us


def made() -> int:
    """Return how many plans this process has made."""
    return _planned.cache_info().misses


def job_of(found: argparse.Namespace) -> ConfiguredJob:
    """Return the job that the command line describes. Raises ValueError with one line."""
    refuse_empty(found)
    from recycle_plugin.adapters.deepspeed.refusals import FP16, half

    config = config_of(found.config)
    refuse_misspelt(config)
    settings = Settings.from_section(config.get(SECTION))
    count, samples, mismatch = batch(config, found.micro_batches, found.dp, found.config)
    shape = Topology(found.dp, found.pp, count)
    settings.refuse_faults(shape)
    clip = clipping(config, found.config)
    if half(config) == FP16:
        settings = settings.in_fp16(clip)
    policy = settings.policy(settings.waits_for_norm(clip), found.pp)
    costs, origin, measured = costs_of(found, settings, shape)
    if not any((*costs.forward, *costs.input, *costs.weight)):
        raise ValueError(
            f"{found.config}: {SECTION}.costs are 0 for every micro-batch; write at least one that is more"
        )
    hosts, spare = placement(found.hostfile, shape, settings.placement)
    known = costs, origin, hosts, spare, clip, samples, mismatch, measured
    return ConfiguredJob(config, settings, shape, policy, *known)


def config_of(path: str) -> dict[str, Any]:
    """Read a DeepSpeed config. Raises ValueError if ``path`` has none."""
    advice = f'give the path of DeepSpeed\'s JSON with a "{SECTION}" section'
    try:
        config = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {advice}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}; {advice}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {shown(config)}: {advice}")
    return config


def batch(config: dict[str, Any], given: int | None, replicas: int, path: str) -> tuple[int, int, str]:
    """Return micro-batches of a replica, samples of a micro-batch, and how they contradict ``train_batch_size`` or "".

    The sizes follow from each other as in DeepSpeed. ``given``: micro-batches by the command line. Raises ValueError if
    the config is missing a size.
    """
    total, samples, count = (_whole(config, key, path) for key in (TOTAL, SAMPLES, COUNT))
    count = given or count
    if total is None and samples is None:
        raise ValueError(f"{path} has neither {TOTAL} nor {SAMPLES}: write one of the two, with {COUNT}")
    if count is None:
        count = max(1, total // (samples * replicas)) if total and samples else 1
    if samples is None:
        assert total is not None, "one of both is there"
        samples = max(1, total // (count * replicas))
    product = samples * count * replicas
    if total in (None, product):
        return count, samples, ""
    return (
        count,
        samples,
        f"{TOTAL} {total} is not {samples} samples x {count} micro-batches x {replicas} replicas; set it to {product}",
    )


def _whole(config: dict[str, Any], key: str, path: str) -> int | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{path}: {key} is {shown(value)}; write a whole number of at least 1")
    return value


def clipping(config: dict[str, Any], path: str) -> float:
    """Return the config's gradient clipping, or DeepSpeed's default if it has none. Raises ValueError."""
    value = config.get(CLIPPING, DEFAULT_CLIPPING)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{path}: {CLIPPING} is {shown(value)}; write a number, 0 for none")
    return value


def costs_of(
    found: argparse.Namespace, settings: Settings, shape: Topology
) -> tuple[CostModel, str, tuple[StageBytes, ...]]:
    """Return the cost model, its source in words, and the bytes measured by a run. The command line overrides the
    config. Raises ValueError for costs of another number of stages.
    """
    if found.profile is not None:
        costs, measured = of_run(found.profile, shape.stages)
        return costs, f"of each stage, as {found.profile} has them", measured
    costs, given = settings.cost_model(shape), settings.given_costs()
    if given is None:
        return costs, "equal, F = I = W = 1 ms: no costs given", ()
    return costs, f"of each stage, as {settings.costs} has them", given.memory


def placement(path: str | None, shape: Topology, way: str) -> tuple[dict[str, tuple[Seat, ...]], int]:
    """Return the seats of each host that has any, and the number of unused slots. ``path``: the hostfile, None for one
    host; ``way``: the setting recycle.placement. Raises ValueError.
    """
    ranks = [Seat(rank % shape.replicas, rank // shape.replicas) for rank in range(len(shape.seats))]
    if path is None:
        return {ONE_HOST: tuple(ranks)}, 0
    slots = slots_of(path)
    if sum(slots.values()) < len(ranks):
        raise ValueError(
            f"--hostfile {path}: {sum(slots.values())} slots for {shape.stages} stages x {shape.replicas} replicas; "
            f"write hosts with {len(ranks)} slots together, or lower --pp or --dp"
        )
    places = [host for host, count in slots.items() for _ in range(count)]
    used = places[: len(ranks)]
    hosts: dict[str, tuple[Seat, ...]] = {}
    for host, rank in zip(used, spread(used) if way == "spread" else range(len(used))):
        hosts[host] = (*hosts.get(host, ()), ranks[rank])
    return hosts, len(places) - len(ranks)


def slots_of(path: str) -> dict[str, int]:
    """Return the slots of each host in DeepSpeed's hostfile, in its order. Raises ValueError."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--hostfile {path}: {getattr(error, 'strerror', None) or 'no text'}; give the path of DeepSpeed's hostfile"
        ) from None
    slots: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _SLOTS.match(line)
        if match is None:
            raise ValueError(f"--hostfile {path}, line {number}: {shown(line)}; write lines such as worker-1 slots=4")
        if match[1] in slots:
            raise ValueError(
                f"--hostfile {path}, line {number}: {match[1]} stands there twice; write one line for each host"
            )
        slots[match[1]] = int(match[2])
    return slots


def at_risk(hosts: dict[str, tuple[Seat, ...]]) -> dict[str, tuple[int, ...]]:
    """Return {host: the stages that have all their workers on it}."""
    return stages_at_risk(Member(0, seat, "", host) for host, seats in hosts.items() for seat in seats)
