"""Contradictions between settings that are each valid: which pairs are refused, and what to write instead."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from recycle_plugin.settings.wording import SettingsError

if TYPE_CHECKING:
    from recycle_plugin.settings.schema import Settings


def refuse_contradictions(settings: Settings) -> None:
    """Raise :class:`SettingsError` if one setting excludes another, or has no effect without it."""
    if settings.rng == "stream" and settings.reroute:
        raise SettingsError(
            "rng",
            '"stream" contradicts recycle.reroute = true, because a peer would draw another dropout mask',
            'write "keyed", or set recycle.reroute to false',
        )
    if pairs := settings.deadlines.contradictions():
        first, last = pairs[0]
        others = dict.fromkeys(key for key, _ in pairs[1:] if key != first)
        raise SettingsError(
            first,
            f"{getattr(settings, first):g} s is to fire before recycle.{last} = {getattr(settings, last):g} s",
            f"write less than {getattr(settings, last):g}, or raise recycle.{last}",
            tuple(others),
        )
    if settings.rebalance is True and not settings.reroute:
        raise SettingsError(
            "rebalance",
            "contradicts recycle.reroute = false, because it moves micro-batches too",
            'write "lasting" or false, or set recycle.reroute to true',
        )
    if settings.log is not None and (settings.checkpoint is None or settings.rejoin in ("never", 0)):
        lacks = "checkpoint = null" if settings.checkpoint is None else f"rejoin = {json.dumps(settings.rejoin)}"
        raise SettingsError(
            "log",
            f"contradicts recycle.{lacks}: a stage is replayed by a process that comes back, from the last automatic "
            "checkpoint",
            'write null, or set recycle.checkpoint to an object such as {"overhead": 0.035} and recycle.rejoin to '
            '"always"',
        )
    _refuse_units(settings)
    refuse_shrinking(settings)
    _refuse_steps(settings)
    _refuse_inexact(settings)
    _refuse_unheeded(settings)


NOT_OF_REPLICAS = {
    "split_backward": "a backward that the script calls is not split",
    "exact": "DeepSpeed adds up inside a replica in its own order",
    "checkpoint": "automatic checkpoints are not supported there yet",
    "rebalance": "a replica's work is its script's",
    "zero": "DeepSpeed shards inside a replica, whose copies are the others",
    "loss_scaling": "DeepSpeed scales losses itself",
    "resume_iterators": "the script reads its data itself",
}  # settings that have no effect in jobs without a pipeline, or are not supported there
JUDGED = {"clip": "sync", "norm": True, "nonfinite": "end"}


def _refuse_units(settings: Settings) -> None:
    if settings.unit == "worker":
        if settings.replicas is not None:
            raise SettingsError(
                "replicas",
                'has no effect with recycle.unit = "worker"',
                'leave it out, or set recycle.unit to "replica"',
            )
        return
    if settings.log is not None:
        raise SettingsError(
            "unit",
            '"replica" with recycle.log: a log brings back a stage without workers, worker by worker',
            'write "worker", or set recycle.log to null',
        )
    if settings.replicas is not None:
        _refuse_sharded(settings, settings.replicas)


def _refuse_sharded(settings: Settings, replicas: int) -> None:
    if replicas < 2:
        raise SettingsError(
            "replicas",
            f"is {replicas}, and a lost replica needs another one to go on",
            "write how many replicas the job's ranks make, 2 or more",
        )
    for name, why in NOT_OF_REPLICAS.items():
        if name in settings.model_fields_set and getattr(settings, name):
            raise SettingsError(name, f"contradicts recycle.replicas: {why}", "leave it out")
    for name, value in JUDGED.items():
        if getattr(settings, name) != value:
            raise SettingsError(
                name, "contradicts recycle.replicas: DeepSpeed itself judges each step there", "leave it out"
            )


def refuse_shrinking(settings: Settings) -> None:
    """Raise :class:`SettingsError` if batches shrink and another setting does not allow that."""
    if settings.batch != "shrink":
        return
    for wrong, what, instead in (
        (settings.unit == "worker", 'unit = "worker", whose work others take', 'recycle.unit to "replica"'),
        (not settings.reroute, "reroute = false: others finish a step that counts lost work", "it to true"),
        (bool(settings.exact), "exact, whose sums need all blocks in order", "that to false"),
        (settings.loss_scaling, "loss_scaling, or fp16: scales are not tried with it", "that to false, or use bf16"),
        (settings.clip == "validate", 'clip = "validate": a rejected step may be void too', 'that to "sync"'),
        (settings.undo == "inverse", 'undo = "inverse", which goes by the rate of the step', 'that to "snapshot"'),
    ):
        if wrong:
            raise SettingsError("batch", f'"shrink" contradicts recycle.{what}', f'write "constant", or set {instead}')


def _refuse_steps(settings: Settings) -> None:
    if settings.clip == "validate" and not settings.stagger_optimizer:
        raise SettingsError(
            "clip",
            '"validate" contradicts recycle.stagger_optimizer = false, by which each step waits for all stages, as '
            "it would for the norm",
            'write "sync", or set recycle.stagger_optimizer to true',
        )
    if settings.clip == "validate" and settings.norm == "deepspeed":
        raise SettingsError(
            "clip",
            '"validate" contradicts recycle.norm = "deepspeed", which is no norm over all stages',
            'write "sync", or set recycle.norm to true',
        )
    if settings.loss_scaling and settings.nonfinite == "end":
        raise SettingsError(
            "loss_scaling",
            'contradicts recycle.nonfinite = "end", since overflows are how the scale is found',
            'write false, or set recycle.nonfinite to "skip"',
        )
    if settings.check_replicas and settings.undo == "inverse":
        raise SettingsError(
            "check_replicas",
            'contradicts recycle.undo = "inverse", which rounds: after a failure replicas differ without being wrong',
            'write 0, or set recycle.undo to "snapshot"',
        )


def _refuse_inexact(settings: Settings) -> None:
    if settings.exact and settings.undo == "inverse":
        raise SettingsError(
            "exact",
            'contradicts recycle.undo = "inverse", which rounds',
            'write false, or set recycle.undo to "snapshot"',
        )
    if settings.exact and settings.rng == "stream":
        raise SettingsError(
            "exact",
            'contradicts recycle.rng = "stream", because who runs a micro-batch then decides its dropout mask',
            'write false, or set recycle.rng to "keyed"',
        )


def _refuse_unheeded(settings: Settings) -> None:
    if settings.faults and not settings.enabled:
        raise SettingsError(
            "faults",
            "only the plugin's engine injects faults, and recycle.enabled is false",
            "write [], or set recycle.enabled to true",
        )
