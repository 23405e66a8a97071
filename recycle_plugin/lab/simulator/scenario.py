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
HOSTS = ("coordinator's host", "candidate's host")  # lost whole
TAKEOVERS = ("coordinator", "standby", "candidate", *HOSTS, "partition", "pause", "hold", "reset", "line")


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong ``at_us``, for ``for_us`` if it passes. By ``kind``:

    * kill; stop (SIGSTOP; wakes up again unless it was given up and fenced); unfenced (a stop, and the supervisor can't
      kill it); stuck (an instruction never ends); slow (instructions take ``percent``)
    * drop, delay (what goes from ``seat`` to ``peer`` is lost, or comes late); swallow (a drop of which nobody
      complains); deafened, walled (what others send to the worker is lost from then on; it finds that out, or can't
      tell it from silent peers); cut (``seats`` are cut off from all others)
    * stall (the coordinator reads nothing); mute, deaf (messages from the worker to the coordinator, or back, are held
      up)
    * host (the worker's host is lost whole, with its supervisor, and its log if that is on a disk of its own)
    * rude (the worker dies where it should say goodbye); vanish (its script calls os._exit(0) after its present step,
      or after the last one if ``at_us`` is 0); again (a second process of its rank asks to take part, and goes);
      confused (it sends valid and wrong messages beside its own, lab/simulator/confusion.py)
    * requests: leave (a worker is to go), end (the job is), finish (the job is, by a worker's message)

    If others may take the coordinator's place (lab/simulator/takeovers.py):
    * coordinator, standby, candidate (the coordinator's process is killed, or the standby on its host, or on another
      one; or their hosts are lost)
    * partition (the hosts of ``seats``, by default the coordinator's, are cut off from all others); pause (the
      coordinator's process is stopped); hold (what goes from the coordinator's host is held up; to it if ``percent`` is
      0); reset (the connections of all that have turned to the standby on another host break, and both ends live);
      line (the same for those of the workers of ``seats`` to the coordinator)

    ``point``: ``at_us`` after this step of a takeover is reached for the ``number``-th time.
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
    """Work that takes ``for_us`` us longer, by the letter or word of ``op``; its worker ``computes`` meanwhile, or
    sleeps.
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

    * ``faults``: kills and stops at named instructions and points. ``torn``: the seed of delays, and of who has no
      result if a peer dies in a REDUCE (``torn_share`` of them). ``budget``: boundary tensors that a worker may keep
      before those that it has sent are dropped.
    * ``clip``: the limit of the norm that steps are validated against, or wait for (``policy.together``); 0: none.
      ``rounds``: sums depend on their order and nothing keeps it, as in real training outside exact mode. ``by_hand``:
      the script sets the learning rate of each step.
    * ``reloads``: the share of the coordinator's actions before which its state is written and read again.
      ``takes_over``: other processes may take the coordinator's place.
    * ``iterators``: data comes from one plain iterator per replica (core/vocabulary/iterator_draws.py). ``epoch``: from
      another one every so many steps, if not 0. ``lengths``: batches of each replica's iterators, if they end; scripts
      then give others.
    * ``rebalances``: workers report their speed, and work is dealt out anew. ``heavy``: work that takes long, whoever
      does it. ``slow``: slow replicas are looked for.
    * ``between``: what the script does after steps: evaluate, save, or pause. ``full``: after which step a seat's share
      of a checkpoint, or its "latest", can't be written. ``damaged_share``: of what newcomers are sent.
    * ``logs``: what crosses stages is logged, with a checkpoint before the first step. ``log_choices``: over which
      boundaries, at the start and from each checkpoint on in turn; the last choice stays; without any, over all.
      ``logs_apart``: each log is on its own host's disk. ``log_lag_us``: extra time until a record is on a disk.
      ``log_damaged_share``: of its records. ``log_full``: from which step on a seat's log finds its disk full.
      ``helpers``: how many may help with a replay, None for all; ``helps_not``: the share of them that can't.
    * ``shards``: workers that hold each seat together; ``struck``: the number of the one that has the troubles and
      faults. ``unit``: what is given up as one, "worker" (all of a seat) or "replica".
    * ``pushes``: scripts run their own loops of forward, backward and step, with samples of their own, in a job of one
      stage. ``dawdles``: the share of their calls after which they pause.
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
        """Whether hosts may be lost whole, which the coordinator learns by their silence."""
        return self.takes_over or any(trouble.kind == "host" for trouble in self.troubles)

    @property
    def exact(self) -> bool:
        """Whether sums have their order, whoever computes."""
        return self.policy.block != 1

    @property
    def ordered(self) -> bool:
        """Whether sums depend on their order."""
        return self.exact or self.rounds
