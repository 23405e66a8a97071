"""All that a worker has for transfers of its stage's state: lines to newcomers, or from sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.catch_up.inlet import TcpInlet
from recycle_plugin.runtime.catch_up.listener import StateListener
from recycle_plugin.runtime.catch_up.outlet import TcpOutlet
from recycle_plugin.runtime.catch_up.rate import Rate
from recycle_plugin.runtime.catch_up.wire import Arrival
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.state.units import StageUnits


class Transfers:
    """The transfers of the worker of ``session``, at ``stage``, which computes on ``device``. ``interface``: the
    setting. ``units(spent)`` makes the units of its state for one newcomer; ``spent`` gets the seconds of copying.
    """

    def __init__(
        self,
        session: Session,
        stage: int,
        interface: str | None,
        device: Device,
        units: Callable[[Callable[[float], None]], StageUnits],
    ) -> None:
        self._session, self._interface, self._device, self._units = session, interface, device, units
        self._rate = Rate(lambda: len(session.view.roster.stage(stage)) == 1)
        self._listener: StateListener | None = None

    def to(self, newcomer: WorkerId) -> tuple[StageUnits, TcpOutlet, str]:
        """Return what serves an announced newcomer: the state's units, the line, and the address to come to. Raises
        RecycleError for an unusable interface.
        """
        if self._listener is None:
            self._listener = StateListener(self._session, self._interface, self._rate)
        outlet = self._listener.expect(newcomer)
        return self._units(outlet.copied), outlet, self._listener.address

    def come_from(self, address: str) -> TcpInlet:
        """Return the line from the source at ``address``; this worker is the newcomer."""
        session = self._session
        note, arrival = partial(session.note, "warning"), Arrival(session.job_id, session.view.worker)
        return TcpInlet(address, arrival, session.secret, session.waiting.changed, note, self._device)

    def close(self) -> None:
        """Let nobody in any more; data already sent still arrives."""
        if self._listener is not None:
            self._listener.close()
