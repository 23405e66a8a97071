"""The metrics of a job for Prometheus, computed from its events.

The log gets the same events, so a dashboard and ``events.jsonl`` can't disagree.
recycle_plugin.observability.run_history defines what a failure is, and when it began and ended. The number of series is
fixed, apart from a few for each stage: no text of an event becomes a label.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf, nan

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.observability.run_history import Failure, RunHistory, trained
from recycle_plugin.observability.training_time import TrainingTime

LIVE, LOST, LEFT = "live", "lost", "left"
NOTICE, REGROUP, FINISH = "notice", "regroup", "finish"
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

prometheus_client.disable_created_metrics()  # they would add a series with the creation time of each counter


class Metrics:
    """A job's metrics, from its ``worker`` and ``start`` events on; ``clock``: seconds since the epoch, as there."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._stages: dict[int, int] = {}  # {rank of a live worker: stage}
        self._away: dict[int, tuple[int, str]] = {}  # {rank: (stage, state)} of workers that are lost or have left
        self._recoveries = Recoveries()
        self._training = TrainingTime(clock)
        self._batch = 0
        self._workers = self._gauge(
            "recycle_workers", "Workers by state; those that come back are live again.", "state"
        )
        self._live = self._gauge("recycle_stage_live_workers", "Live workers of a stage; at 0 the job ends.", "stage")
        self._step = self._gauge("recycle_step", "The last committed step.")
        self._loss = self._gauge("recycle_loss", "The last step's mean loss over all micro-batches.")
        self._step_s = self._gauge("recycle_step_seconds", "From one commit to the next, the last time.")
        self._samples = self._counter(
            "recycle_samples_total", "Samples of committed steps, also of those that a checkpoint took back later."
        )
        self._bubbles = self._gauge(
            "recycle_bubble_ratio",
            "Share of the last step in which the live workers of a stage computed no micro-batch.",
            "stage",
        )
        self._redone = self._counter(
            "recycle_redone_seconds_total",
            "Computed in interrupted steps in a lost worker's place, or once more: seconds of all workers.",
        )
        self._failures = self._counter(
            "recycle_failures_total", "Workers lost, by the cause of giving them up.", "cause"
        )
        self._returns = self._counter(
            "recycle_rejoins_total", "Workers that came back after they were lost or had left."
        )
        self._suspicions = self._counter(
            "recycle_suspicions_total", "Workers suspected, by the cause; most go on.", "cause"
        )
        self._recovery = Histogram(
            "recycle_recovery_seconds",
            "From a worker's failure to the next committed step, in three parts that follow each other.",
            ["phase"],
            registry=self.registry,
            buckets=BUCKETS_S,
        )
        self._bound = self._gauge(
            "recycle_plan_bound_ratio",
            "Predicted time of a step over the least that any plan for these workers takes: at best 1.",
        )
        self._predicted = self._gauge(
            "recycle_predicted_throughput_ratio",
            "The planner's throughput with these workers, where 1 is that with all of them.",
        )
        self._checkpoints = self._counter("recycle_checkpoints_total", "Checkpoints that are in place.")
        ettr = self._gauge(
            "recycle_ettr_ratio",
            "Effective training time ratio: committed work at the job's undisturbed pace, over the time since its "
            "start.",
        )
        ettr.set_function(self._training.ratio)
        self._begin_counts()

    def take(self, event: Event, now: float) -> None:
        """Count an event that happened at ``now``, in seconds since the epoch."""
        for failure, began_at in self._recoveries.take(event, now):
            self._recovered(failure, began_at)
        self._training.take(event.kind, event.details, now)
        details = event.details
        match event.kind:
            case "start":
                self._start(details)
            case "lost" | "left":
                self._gone(details["rank"], LOST if event.kind == "lost" else LEFT)
                if event.kind == "lost":
                    self._failures.labels(details["cause"]).inc()
            case "rejoined":
                self._back(details["rank"])
            case "suspected":
                self._suspicions.labels(details["cause"]).inc()
            case "committed":
                self._committed(details)
            case "resume":
                self._resume(details)
            case "loss":
                self._loss.set(details["loss"])
            case "loaded":
                self._step.set(details["step"])
            case "batch":
                self._batch = details["batch"]
            case "checkpoint":
                self._checkpoints.inc()

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _begin_counts(self) -> None:
        """Create all series now: Prometheus' ``rate`` misses the first event of a series that begins with it."""
        for cause in Cause:
            self._failures.labels(cause.value)
            self._suspicions.labels(cause.value)
        for phase in (NOTICE, REGROUP, FINISH):
            self._recovery.labels(phase)
        for state in (LIVE, LOST, LEFT):
            self._workers.labels(state)
        for unknown in (self._loss, self._step_s, self._bound, self._predicted):
            unknown.set(nan)

    def _start(self, details: dict) -> None:
        self._batch = details["job"]["batch"]
        others = details.get("others", {})
        self._stages = {
            rank: Seat.parse(seat).stage
            for seat, first in details["seats"].items()
            for rank in (first, *others.get(seat, ()))
        }
        self._workers.labels(LIVE).set(len(self._stages))
        for stage in range(details["job"]["stages"]):
            self._bubbles.labels(stage).set(nan)
            self._count_stage(stage)

    def _gone(self, rank: int, state: str) -> None:
        stage = self._stages.pop(rank, None)
        if stage is not None:
            self._away[rank] = stage, state
            self._workers.labels(LIVE).dec()
            self._workers.labels(state).inc()
            self._count_stage(stage)

    def _back(self, rank: int) -> None:
        self._returns.inc()
        stage, state = self._away.pop(rank)
        self._stages[rank] = stage
        self._workers.labels(state).dec()
        self._workers.labels(LIVE).inc()
        self._count_stage(stage)

    def _count_stage(self, stage: int) -> None:
        self._live.labels(stage).set(list(self._stages.values()).count(stage))

    def _committed(self, details: dict) -> None:
        self._step.set(details["step"])
        self._samples.inc(trained(self._batch, details))
        self._redone.inc(details["redone_s"])
        if "step_s" in details:
            self._step_s.set(details["step_s"])
        for stage, share in enumerate(details.get("stage_bubbles", ())):
            self._bubbles.labels(stage).set(share)

    def _resume(self, details: dict) -> None:
        self._predicted.set(details["throughput"])
        self._step.set(details["committed"])
        if details["bound_us"]:
            self._bound.set(details["period_us"] / details["bound_us"])

    def _recovered(self, failure: Failure, began_at: float) -> None:
        """Observe the parts of a recovery. Hosts' clocks may differ, so negative times count as 0."""
        assert failure.resumed_at is not None and failure.committed_at is not None, "it is over"
        moments = began_at, failure.seen_at, failure.resumed_at, failure.committed_at
        for phase, begins, ends in zip((NOTICE, REGROUP, FINISH), moments, moments[1:]):
            self._recovery.labels(phase).observe(max(0.0, ends - begins))


class Recoveries:
    """Failures that are over, each found once, at the commit that ends it, and timed in three parts.

    * *notice*: until the coordinator knows of the loss. It begins when an injected fault struck, or when a worker that
      was given up was last heard or began the work on which it got stuck. It is 0 if the death or the broken connection
      is the first sign.
    * *regroup*: until the survivors have agreed on the step to go on from and on the plan.
    * *finish*: until the interrupted step is committed; most of this time the step would have taken anyway.
    """

    def __init__(self) -> None:
        # as in the log: workers, faults, and everything since the first loss that is not over
        self._known: list[dict] = []
        self._owing: dict[str, float] = {}  # {seat of a suspected worker: when the suspicious behaviour began}
        self._given_up: dict[str, float] = {}  # the same for lost workers

    def take(self, event: Event, now: float) -> Iterator[tuple[Failure, float]]:
        """Yield the failures that end with this event, and when each began, in seconds since the epoch. The cost grows
        with the events since the first failure that is not over.
        """
        if event.kind == "suspected":
            self._owing[event.details["seat"]] = now - event.details["for_s"]
        elif event.kind == "cleared":
            self._owing.pop(event.details["seat"], None)
        elif event.kind == "loaded":  # the awaited step may be far away now
            self._forget(lambda event: False)
        elif event.kind in ("worker", "fault", "lost", "resume", "committed"):
            self._known.append({"time": now, "event": event.kind, **event.details})
            if event.kind == "lost" and event.details["seat"] in self._owing:
                self._given_up[event.details["seat"]] = self._owing.pop(event.details["seat"])
            if event.kind == "committed":
                yield from self._over()

    def _over(self) -> Iterator[tuple[Failure, float]]:
        failures = RunHistory(tuple(self._known)).failures
        waiting = {str(failure.seat) for failure in failures if failure.committed_at is None}
        for failure in failures:
            if failure.committed_at is not None:
                yield failure, min(failure.struck_at, self._given_up.pop(str(failure.seat), inf))
        self._forget(lambda event: bool(waiting) and event.get("seat", "") in {"", *waiting})

    def _forget(self, wanted: Callable[[dict], bool]) -> None:
        self._known = [event for event in self._known if event["event"] in ("worker", "fault") or wanted(event)]
