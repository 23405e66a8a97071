"""Scenarios for a simulated cluster: a job, the weather on its lines, and what goes wrong in it."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator.message_delays import FAIR, Weather

MILLISECOND = 1000
HOSTS = ("coordinator's host", "candidate's host")  # are lost whole
TAKEOVERS = ("coordinator", "standby", "candidate", *HOSTS, "partition", "pause", "hold")


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong ``at_us``, for ``for_us`` where it passes.

    ``kind``: kill; stop (SIGSTOP; wakes up again unless it was given up and fenced), unfenced (the same, and its
    supervisor can't kill it), stuck (an instruction never ends), slow (takes ``percent``); drop, delay (what goes
    from ``seat`` to ``peer`` is lost, or comes late); deafened, walled (what others send to the worker is lost from
    then on; it finds so itself, or can't tell that from peers that send nothing); cut (``seats`` are cut off from
    all others); stall (the coordinator reads nothing); mute, deaf (what the worker says to the coordinator, or the
    other way, is held up); host (the worker's host is lost whole, with its supervisor, and its log where it is on a
    disk of that host's own); rude (it dies where it should say goodbye); vanish (its script calls os._exit(0)
    behind the step that it is in, behind the last one from 0 on); again (a second process of its rank asks to take
    part, and goes); confused (beside what it has to say the worker says what is valid and wrong,
    lab/simulator/confusion.py); swallow (as drop, and nobody who misses anything says so); and what is asked for: leave
    (a worker is to go), end (the job is), finish (the job is, by a worker's word).

    Where others may take the coordinator's place (lab/simulator/takeovers.py): coordinator, standby, candidate (its
    process is killed, or the one that stands by on its host, or on another one; the same of their hosts), partition
    (the hosts of ``seats``, and that of the coordinator if there is no other, are cut off from all others), pause (the
    coordinator's process is stopped), hold (what goes one way between the coordinator's host and the others is held up;
    to it where ``percent`` is 0).  ``point``: at this step of taking over, the ``number``-th time, and ``at_us`` later.
    """

    kind: str
    at_us: int
    seats: tuple[Seat, ...] = ()
    peer: Seat | None = None
    for_us: int = 0
    percent: int = 100
    point: str = ""
    number: int = 1

    def __str__(self) -> str:
        names = "+".join(map(str, self.seats)) + (f">{self.peer}" if self.peer else "")
        lasts = f" for {self.for_us / 1000:g} ms" if self.for_us else ""
        behind = f" behind {self.point}:{self.number}" if self.point else ""
        return f"{self.kind} {names} at {self.at_us / 1000:g} ms".replace("  ", " ") + lasts + behind


@dataclass(frozen=True)
class Heavy:
    """Work that takes so much longer, ``for_us`` microseconds: that of ``step`` and ``micro_batch`` in ``stage``, by
    the letter or word of ``op``.  Its worker ``computes`` meanwhile, or sleeps.
    """

    step: int
    micro_batch: str
    op: str
    stage: int
    for_us: int
    computes: bool

    def __str__(self) -> str:
        does = "computes" if self.computes else "sleeps"
        return f"{self.stage}{self.op}{self.micro_batch}@{self.step} {does} for {self.for_us / 1000:g} ms"


@dataclass(frozen=True)
class Scenario:
    """A job and its troubles.

    ``faults``: kills and stops at named instructions and points.  ``torn``: seeds who is left without the result when a
    peer dies in a REDUCE, and how late messages come; ``budget``: boundary tensors that a worker may keep before those
    that it has sent go; ``clip``: the limit of the norm that steps are validated against (``policy.together``: that
    they wait for), 0: there is none; ``rounds``: sums depend on their order, and nothing keeps it, as in real training
    outside exact mode; ``reloads``: before which share of what the coordinator does its state is written down and read
    again; ``iterators``: data comes from one plain iterator for each replica (core/vocabulary/iterator_draws.py), and
    ``epoch``: from another for so many steps each, where that is not 0; ``lengths``: batches of each replica's, after
    which scripts give another, where they ever end;
    ``rebalances``: workers say how fast they are, and work is dealt out anew; ``between``: what the script does after
    steps: evaluate, save, or pause; ``heavy``: work that takes long, whoever does it; ``full``: after which step a
    seat's share of a checkpoint, or its "latest", can't be written; ``damaged_share``: of what newcomers are sent;
    ``logs``: what crosses stages is logged, and there is a checkpoint before the first step; ``log_choices``: over
    which boundaries, at the start and from each checkpoint on in turn, the last ones to the end, all where there are
    none; ``logs_apart``: each log is on its own host's disk; ``log_lag_us``: by how much longer than usual that takes
    to be on a disk; ``log_damaged_share``: of its records; ``log_full``: from which step on a seat's log finds its disk
    full; ``helpers``: how many may help with a replay, None for all, and ``helps_not``: which share of them can't;
    ``shards``: workers that hold each seat together, of which the one with the number ``struck`` has the troubles and
    faults; ``by_hand``: the script sets the learning rate of each step; ``unit``: who is given up as one, "worker" (all
    that hold a seat) or "replica"; ``slow``: what becomes of a slow replica, as in the settings; ``pushes``: scripts
    run their own loops of forward, backward and step, with samples of their own, in a job of one stage; ``dawdles``:
    behind which share of their calls they take their time; ``takes_over``: other processes may take the coordinator's
    place.
    """

    shape: Topology
    costs: CostModel
    policy: Policy
    steps: int
    troubles: tuple[Trouble, ...] = ()
    faults: tuple[Fault, ...] = ()
    torn: int = 0
    budget: int | None = None
    torn_share: float = 0.5
    clip: float = 0.0
    weather: Weather = FAIR
    rounds: bool = False
    reloads: float = 0.0
    iterators: bool = False
    rebalances: bool = False
    between: tuple[tuple[int, str], ...] = ()
    heavy: tuple[Heavy, ...] = ()
    full: tuple[tuple[int, str], ...] = ()
    damaged_share: float = 0.0
    rejoin: str | int = "never"
    epoch: int = 0
    lengths: tuple[int, ...] = ()
    logs: bool = False
    logs_apart: bool = False
    shards: int = 1
    struck: int = 0
    log_lag_us: int = 0
    log_damaged_share: float = 0.0
    log_full: tuple[tuple[int, str], ...] = ()
    helpers: int | None = None
    helps_not: float = 0.0
    by_hand: bool = False
    log_choices: tuple[tuple[int, ...], ...] = ()
    unit: str = "worker"
    slow: bool = False
    pushes: bool = False
    dawdles: float = 0.0
    takes_over: bool = False

    @property
    def loses_hosts(self) -> bool:
        """Whether a host is lost whole, which the coordinator comes to know by its silence."""
        return self.takes_over or any(trouble.kind == "host" for trouble in self.troubles)

    @property
    def exact(self) -> bool:
        """Whether sums have their order, whoever computes."""
        return self.policy.block != 1

    @property
    def ordered(self) -> bool:
        """Whether sums depend on their order."""
        return self.exact or self.rounds
