"""ReCycle, ours: the planner that the runtime runs, under a trace.

A loss reroutes. If it pays before the next change is expected, workers move to a stage that lost more (normalise.py). A
loss costs what the runtime does today: detection, regrouping, what the lost workers had done of the running step
(lab/simulator/history.py), and the copies of the moves. Returning workers take a seat of the stage that lacks most, and
enter at a commit line for the price of one regroup and no step, with their state copied in the background: an
assumption.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy as Techniques
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.lab.simulator.peers.normalise import normalise
from recycle_plugin.lab.simulator.peers.peer_job import PeerJob, Transitions
from recycle_plugin.lab.simulator.peers.policy import PeerTransition, WorkersChange
from recycle_plugin.planner import PlanError, PlanStore

MEMORY_SHARE = 0.9  # share of the accelerator that state and activations may fill


def techniques(job: PeerJob, factor: float | None = None) -> Techniques:
    """Return the policy of ReCycle for ``job``: split backward, staggered optimizer, rerouting, and room for ``factor``
    x PP micro-batches; None: as many as the device holds. ValueError if it doesn't hold that many.
    """
    most = [
        int((MEMORY_SHARE * job.memory_limit - state) // each)
        for state, each in zip(job.state_bytes, job.costs.activation_bytes)
    ]
    wanted = most if factor is None else [round(factor * job.topology.stages)] * len(most)
    if min(most) < 1 or any(cap > room for cap, room in zip(wanted, most)):
        raise ValueError(
            f"{job.name}: {wanted} micro-batches per stage, and {MEMORY_SHARE:.0%} of {job.memory_limit / 1e9:.0f} GB "
            f"hold {most}"
        )
    return Techniques(activation_cap=tuple(wanted))


@dataclass(frozen=True)
class Recycle:
    """The policy of ReCycle, by our planner. ``horizon_s``: the seconds in which a move has to pay."""

    job: PeerJob
    techniques: Techniques
    costs: Transitions = Transitions()
    moves: bool = True
    horizon_s: float = 600.0
    name: str = "ReCycle, ours"
    source: str = "recycle_plugin.planner, the runtime's own"
    validated: str = "plans verified, period from the plan; transitions: lab/planner/machine_costs.py"
    store: PlanStore = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", PlanStore(self.job.costs, self.techniques))

    def start(self) -> ClusterView:
        """Return the view in which every seat is live."""
        return self.job.topology.full()

    def period_us(self, view: ClusterView) -> int:
        """Return the microseconds of a step of the plan for ``view``. PlanError if there is none."""
        return self.store.plan(view).period_us

    def speed(self, state: ClusterView) -> float:
        """Return the samples per second in ``state``; 0 if a stage is empty."""
        return 0.0 if state.empty_stages() else 1e6 * self.job.batch / self.period_us(state)

    def change(self, state: ClusterView, change: WorkersChange, trained_s: float) -> tuple[ClusterView, PeerTransition]:
        """Return the next view, and the change's cost. ``trained_s``: seconds since the last transition's end."""
        view = state
        for draw in change.lost:
            live = sorted(view.live)
            view = view.without(live[int(draw * len(live))])
        lost = state.live - view.live
        for _ in range(change.joined):
            view = joined(view)
        if view.empty_stages():
            empty = ", ".join(map(str, view.empty_stages()))
            return view, PeerTransition(self.costs.restart_s, trained_s, f"stage {empty} lost: no live worker holds it")
        view, copy_s, text = self._normalised(view)
        gone = lost | (state.live - view.live)  # a moving worker's work is lost too
        lost_s = (
            trained_s % (self.period_us(state) / 1e6) * state.lost_share(gone)
            if lost and not state.empty_stages()
            else 0.0
        )
        return view, PeerTransition(self.costs.own_s + copy_s, lost_s, "regroup" + text)

    def _normalised(self, view: ClusterView) -> tuple[ClusterView, float, str]:
        if not (self.moves and view.lost):
            return view, 0.0, ""
        job, period_s = self.job, self.period_us(view) / 1e6
        copies = list(map(job.profile.across.transfer_us, job.state_bytes))
        found = normalise(view, job.costs, self.techniques, copies, max(1, int(self.horizon_s / period_s)))
        moved = "".join(f", {move}" for move in found.moves)
        return found.view, found.copy_us / 1e6, moved


def joined(view: ClusterView) -> ClusterView:
    """Return the view with one worker more, of the stage that lacks most; the same view if none is missing."""
    lost = view.lost
    if not lost:
        return view
    lacking: dict[int, int] = {}
    for seat in lost:
        lacking[seat.stage] = lacking.get(seat.stage, 0) + 1
    seat = min(lost, key=lambda seat: (-lacking[seat.stage], seat))
    return ClusterView(view.topology, view.live | {Seat(*seat)})


def spread(job: PeerJob, losses: int, policy: Techniques) -> ClusterView:
    """Return the best pattern of ``losses`` losses, one by one, each where it costs least. A plan for each loss and
    stage.
    """
    view = job.topology.full()
    store = PlanStore(job.costs, policy)
    for number in range(losses):
        options = []
        for stage in range(job.topology.stages):
            live = view.live_replicas(stage)
            if len(live) > 1:
                lost = view.without(Seat(live[(number + stage) % len(live)], stage))
                options.append((_period(store, lost), stage, lost))
        view = min(options, key=lambda option: option[:2])[2]
    return view


def _period(store: PlanStore, view: ClusterView) -> int:
    try:
        return store.plan(view).period_us
    except PlanError:
        return 1 << 60
