"""The start of a job, once all ranks are there and want the same; and processes that come after it."""

from __future__ import annotations

from dataclasses import asdict

from recycle_plugin.core.coordinator import ends, generations, returns
from recycle_plugin.core.coordinator.facts.joining import Joining
from recycle_plugin.core.coordinator.facts.logs import Logs
from recycle_plugin.core.coordinator.facts.output import SUPERVISORS, WORKERS
from recycle_plugin.core.coordinator.facts.slowness import Slowness
from recycle_plugin.core.coordinator.facts.step_ledger import StepLedger
from recycle_plugin.core.coordinator.facts.step_validation import StepValidation
from recycle_plugin.core.coordinator.facts.throughput import Throughput
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.coordinator.supervisors import pace
from recycle_plugin.core.coordinator.weak_points import weak_points
from recycle_plugin.core.messages.from_workers import Ready
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.deadlines import shown
from recycle_plugin.core.vocabulary.describe import named, those
from recycle_plugin.core.vocabulary.log_boundaries import at_start, stage_hosts
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from recycle_plugin.core.vocabulary.step_batches import StepBatches

TOLD_S = 60.0  # s until those that are waited for are first reported; then after twice as long each time
HOSTS = "see whether their hosts have started, with the same number of ranks"


def ready(state: JobState, message: Ready) -> None:
    """Handle that a worker's script has come to its first step. The last rank starts the job; a newcomer comes back."""
    worker = message.worker
    if state.speaker(worker) is not None:
        return  # a repeated message
    if state.vacancies.is_newcomer(worker):
        state.recovery_times.ready(worker.rank, state.now, state.vacancies.due(worker), again=True)
        returns.begin(state, message)
        state.log_places.ready(message, state.out)
        return
    outside = state.attendance.started and state.vacancies.is_outside(worker)
    if outside or state.enrolment.is_stranger(worker):
        turn_away(state, worker, message.member.host)
        return
    if state.attendance.started:
        return  # a former member
    state.recovery_times.ready(worker.rank, state.now)
    state.log_places.ready(message, state.out)
    if not state.enrolment.add(message) or state.ending.ended is not None:
        return
    contradiction = state.enrolment.contradiction()
    if contradiction is not None:
        ends.end(state, contradiction)
        return
    _begin(state, state.enrolment.roster, message.job, message.stepped)


def greet(state: JobState, worker: WorkerId, host: str) -> None:
    """Handle that a process on ``host`` has connected as ``worker``; turn it away at once if it can't take part."""
    state.enrolment.come(worker.rank)
    known = state.vacancies.come(worker) or not (state.attendance.started or worker.incarnation)
    if state.ending.ended is None and not known:
        turn_away(state, worker, host)


def turn_away(state: JobState, worker: WorkerId, host: str) -> None:
    """Tell a process on ``host`` that it can't take part as ``worker``."""
    state.attendance.turn_away(worker, host, state.committed + 1, state.out)


def see_awaited(state: JobState) -> None:
    """Report before the start which ranks are waited for. End the job if a rank has no worker, and none has come for as
    long as workers wait for each other; a worker that is ready ends it after that time.
    """
    if state.attendance.started or state.ending.ended is not None:
        return
    enrolment = state.enrolment
    for_s, limit_s = enrolment.awaited_s(state.now), enrolment.wait_s
    if for_s <= min(limit_s, max(TOLD_S, 2 * enrolment.told_s)):
        return
    enrolment.told_s, absent = for_s, enrolment.absent
    what = f"{those(absent)} not come" if absent else f"{those(enrolment.unready)} not come to the first step"
    if for_s <= limit_s:
        left_s, then = limit_s - for_s, f": {HOSTS}" * bool(absent)
        text = f"training can't start, since {what}{then}. In {left_s:.0f} s the job ends (recycle.wait_timeout_s)"
        state.say("warning", text)
    elif absent:
        ends.end(state, f"{what} within {limit_s:.0f} s of the last other worker: {HOSTS}")


def _begin(state: JobState, roster: Roster, job: JobSpec, stepped: int) -> None:
    """Start the job with the members of ``roster``, which are all there with the state after ``stepped`` steps."""
    _make_parts(state, roster, job, stepped)
    _say_start(state, roster, job)
    for kind, text, details, refused in weak_points(job, roster, job.shape):
        ends.end(state, text) if refused else state.say(kind, text, **details)
    pace(state, SUPERVISORS)
    if state.ending.ended is None:
        if state.logs.some:
            state.tell(WORKERS, state.logs.told)
        generations.regroup(state, "start")


def _make_parts(state: JobState, roster: Roster, job: JobSpec, stepped: int) -> None:
    state.attendance.begin(roster, job)
    logged = at_start(job.boundaries, stage_hosts(roster))
    state.job, state.logs = job, Logs(job.log, job.stages, logged)
    state.batches = StepBatches.full(job.replicas)
    validation = StepValidation(job.shape.stages, job.clipping, job.nonfinite == "skip", roster.shards)
    slowness = Slowness.of(job)
    state.steps = StepLedger(stepped, validation, roster.shards, slowness)
    state.throughput = Throughput()
    names = {rank: named(rank, seat) for rank, seat in roster.seats_by_rank().items()}
    units = [tuple(member.rank for member in unit) for unit in job.domain.units(roster)]
    absent_s = job.deadlines.heartbeat_timeout_s
    state.vacancies.begin(job.rejoin, names, roster.hosts_by_rank(), units, roster.workers, absent_s)
    state.joining = Joining(max(map(len, units)), job.domain)


def _say_start(state: JobState, roster: Roster, job: JobSpec) -> None:
    seats = {str(seat): roster.holding(seat).rank for seat in roster.seats}
    others = {str(seat): [other.rank for other in roster.group(seat)[1:]] for seat in roster.seats}
    state.say(
        "start",
        f"{job.shape.text}; run folder {job.run_dir}",
        job=asdict(job),
        seats=seats,
        **({"others": others} if roster.shards > 1 else {}),
        hosts=sorted({member.host for member in roster}),
        seat_hosts={str(seat): roster.holding(seat).host for seat in roster.seats},
    )
    state.say(
        "deadlines",
        f"how long each of these may take, and what follows:\n{shown(job.deadlines.table)}",
        table=[row._asdict() for row in job.deadlines.table],
    )
