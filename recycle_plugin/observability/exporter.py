"""Serve a job's metrics from the coordinator's process, if the settings ask for it.

If the port can't be opened, a warning says so and the job goes on without metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator.facts.output import Event

if TYPE_CHECKING:
    from recycle_plugin.observability.metrics import Metrics
    from recycle_plugin.observability.metrics_server import MetricsServer


class Exporter:
    """A receiver of a job's events that serves metrics if the settings ask for it; ``say`` gets its own events."""

    def __init__(self, say: Callable[[Event], None]) -> None:
        self._say = say
        self._early: list[tuple[Event, float]] | None = []  # until the start event, which has the setting
        self._metrics: Metrics | None = None
        self._server: MetricsServer | None = None

    def take(self, event: Event, now: float) -> None:
        """Handle an event that happened at ``now``, in seconds since the epoch."""
        if self._early is not None:
            self._early.append((event, now))
            if event.kind == "start":
                early, self._early = self._early, None
                if event.details["job"]["metrics"] is not None:
                    self._serve(early, event.details["job"]["metrics"])
        elif self._metrics is not None:
            self._metrics.take(event, now)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _serve(self, early: list[tuple[Event, float]], where: str) -> None:
        # imported here: most processes serve no metrics
        from recycle_plugin.observability.metrics import Metrics
        from recycle_plugin.observability.metrics_server import MetricsServer

        metrics, (address, _, port) = Metrics(), where.rpartition(":")
        try:
            self._server = MetricsServer(address.strip("[]"), int(port), metrics.registry)
        except OSError as error:
            self._say(
                Event(
                    "warning",
                    f"metrics: can't listen on {where} ({error.strerror}), so the job goes on without; port 0 in "
                    "recycle.metrics takes a free one",
                    {"address": where},
                )
            )
            return
        self._metrics = metrics
        for event, now in early:
            metrics.take(event, now)
        self._say(
            Event(
                "metrics",
                f"for Prometheus at {self._server.url}",
                {"url": self._server.url, "port": self._server.server_port},
            )
        )
