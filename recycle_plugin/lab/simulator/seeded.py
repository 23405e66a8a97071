"""Jobs drawn from seeds: a seed gives a job, its troubles and their times. At first anything may happen; after
:data:`CALM_US` nothing new goes wrong. A seed must keep its job when something is added here, so each change of the job
has its own source of random numbers.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from recycle_plugin.core.vocabulary.deadlines import LATE_S, SUSPECTED
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology, tied
from recycle_plugin.lab.simulator.confusion import confused, with_confused_workers
from recycle_plugin.lab.simulator.drawn_troubles import CALM_US, SETTLED_US, add_trouble, costs_of
from recycle_plugin.lab.simulator.message_delays import FAIR, STORMY, UNEVEN
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Heavy, Scenario, Trouble
from recycle_plugin.lab.simulator.seeded_replicas import with_pushing
from recycle_plugin.lab.simulator.simulated_spec import DEADLINES, SILENCE_S
from recycle_plugin.lab.simulator.slow_replicas import with_slow_replicas
from recycle_plugin.planner import lowered, plan

LONG = 25  # steps with pauses, long enough for a host to be taken for gone, and more
APART = ("cut", "deafened", "walled", "unfenced")
CHOOSES = 0.4  # share of the jobs that log
UNITS = 0.1
WRONG_WITH_LOGS = ("damage", "lag", "lag", "full")


def scenario(seed: int) -> Scenario:
    """Return a seed's scenario. Two in five have several troubles, two in five are exact, three in ten have ties."""
    random = Random(seed)
    shape = Topology(random.randint(2, 4), random.randint(2, 4), random.randint(2, 6))
    policy = Policy(random.random() < 0.8, random.random() < 0.8, True, random.choice((None, 2 * shape.stages, "1f1b")))
    costs = costs_of(random, shape.stages)
    steps = random.randint(4, 6)
    troubles: list[Trouble] = []
    faults: list[Fault] = []
    for _ in range(1 if random.random() < 0.6 else random.choice((2, 2, 3))):
        add_trouble(random, shape, costs, policy, steps, troubles, faults)
    budget = random.choice((None, None, 0, 2))
    clip = random.choice((0.0, 0.0, 25.0, 40.0))  # the mean norm is 32 for two stages, 45 for four
    if clip and random.random() < 0.3:
        policy = replace(policy, validate=True)
    elif (
        clip and random.random() < 0.5
    ):  # the norm is known late, and data computed with rejected weights arrives later
        replica = random.randrange(shape.replicas)
        troubles.append(Trouble("slow", 0, (Seat(replica, shape.stages - 1),), percent=300))
        troubles.append(
            Trouble("delay", random.randrange(CALM_US // 4), (Seat(replica, 0),), Seat(replica, 1), 200 * MILLISECOND)
        )
    policy = replace(policy, block=random.choice((1, 1, 1, 2, None)))
    job = Scenario(shape, costs, policy, steps, tuple(troubles), tuple(faults), seed, budget, clip=clip)
    for name, change in (
        ("ties", _with_ties),
        ("weather", _with_weather),
        ("endings", _with_endings),
        ("undo", _with_undo),
        ("coordination", _with_coordination),
        ("data", _with_data),
        ("pauses", _with_pauses),
        ("paces", _with_paces),
        ("leisure", _with_leisure),
        ("moments", _with_moments),
        ("disks", _with_full_disks),
        ("deafness", _with_deafness),
        ("returns", _with_returns),
        ("places", _with_places),
        ("shards", _with_groups),
        ("logs", _with_logs),
        ("choices", _with_choices),
        ("rates", _with_rates),
        ("hosts and logs", _with_lost_hosts),
        ("units", _with_units),
        ("slow replicas", with_slow_replicas),
        ("pushes", with_pushing),
        ("confusion", with_confused_workers),
    ):
        # its own random numbers: a new change leaves the rest of a seed's job as it was
        job = change(job, Random(f"{name} in {seed}"))
    return job


def with_confusion(seed: int) -> Scenario:
    """Return the scenario of ``seed`` with a confused worker; in every second one without any other trouble."""
    given = scenario(seed)
    random = Random(f"confused in {seed}")
    calm = replace(given, troubles=(), faults=(), heavy=()) if random.random() < 0.5 else given
    return confused(calm, random)


def _with_weather(given: Scenario, random: Random) -> Scenario:
    """Give one job in four lines that are all alike. Outside exact mode half of those with a norm limit round."""
    rounds, faults = given.clip > 0 and not given.exact and random.random() < 0.5, given.faults
    # a worker dies in a rejection, or in an earlier regroup
    if given.clip and not given.policy.validate and random.random() < 0.3:
        point, number = random.choice((("recovery.resume", 2), ("recovery.resume", 3), ("recovery.undone", 1)))
        faults += (Fault("kill", random.choice(given.shape.seats), "at", point, number),)
    return replace(given, weather=random.choice((FAIR, UNEVEN, UNEVEN, STORMY)), rounds=rounds, faults=faults)


def _with_coordination(given: Scenario, random: Random) -> Scenario:
    """Let a second process of a rank come in one job of five; in one of five reload the coordinator's state."""
    troubles = given.troubles
    if random.random() < 0.2:
        troubles += (Trouble("again", random.randrange(SETTLED_US, CALM_US), (random.choice(given.shape.seats),)),)
    return replace(given, troubles=troubles, reloads=random.choice((0.0, 0.0, 0.0, 0.0, 0.004)))


def _with_data(given: Scenario, random: Random) -> Scenario:
    """Let a quarter of the jobs that are not exact read plain iterators."""
    return replace(given, iterators=not given.exact and random.random() < 0.25)


def _with_pauses(given: Scenario, random: Random) -> Scenario:
    """Let a quarter of the jobs evaluate or save after some steps; in half of these a worker dies in that."""
    if random.random() >= 0.25:
        return given
    between = tuple(
        (step, what) for step in range(1, given.steps + 1) for what in ("evaluate", "save") if random.random() < 0.3
    )
    seat, faults = random.choice(given.shape.seats), given.faults
    if between and random.random() < 0.5:
        load = seat.stage in (0, given.shape.stages - 1) and random.random() < 0.5
        evaluating = (
            f"{seat.stage}{'LOAD' if load else 'F'}{seat.replica}.{random.randrange(given.shape.micro_batches)}@-1"
        )
        moment = random.choice(
            (
                (random.choice(("before", "after")), evaluating),
                ("at", "checkpoint.written"),
                ("at", "checkpoint.publish"),
                ("at", "checkpoint.named"),
            )
        )
        first = moment[1] in ("checkpoint.publish", "checkpoint.named")
        faults += (Fault("kill", given.shape.seats[0] if first else seat, *moment),)
    return replace(given, between=between, faults=faults)


def _with_full_disks(given: Scenario, random: Random) -> Scenario:
    """Make two in five of the checkpoints between steps fail: workers can't write, or the name can't be given."""
    places = [*given.shape.seats, "latest"]
    saves = (step for step, what in given.between if what == "save" and random.random() < 0.4)
    return replace(
        given, full=tuple((step, str(where)) for step in saves for where in random.sample(places, random.randint(1, 2)))
    )


def _with_leisure(given: Scenario, random: Random) -> Scenario:
    """Let scripts pause in one job of twelve, and two workers leave, the second perhaps in the first one's step."""
    if random.random() >= 1 / 12:
        return given
    pauses = tuple((step, "pause") for step in range(1, given.steps + 1) if random.random() < 0.7)
    at, seats = random.randrange(CALM_US // 4), random.sample(given.shape.seats, 2)
    leaves = tuple(
        Trouble("leave", at + place * random.randrange(600 * MILLISECOND), (seat,)) for place, seat in enumerate(seats)
    )
    return replace(given, between=given.between + pauses, troubles=given.troubles + leaves)


def _with_deafness(given: Scenario, random: Random) -> Scenario:
    """Give one job of sixteen a single trouble: from some time on one worker hears nobody, itself included."""
    if random.random() >= 1 / 16:
        return given
    return replace(
        given,
        troubles=(Trouble("deafened", random.randrange(CALM_US // 4), (random.choice(given.shape.seats),)),),
        faults=(),
    )


def _with_returns(given: Scenario, random: Random) -> Scenario:
    """Let lost workers come back in one job of six, which is longer; in half of these more die, also newcomers."""
    deaf = any(trouble.kind in ("deafened", "walled") for trouble in given.troubles)
    if random.random() >= 1 / 6 or deaf:
        return given
    seat, troubles = random.choice(given.shape.seats), given.troubles
    at = random.randrange(SETTLED_US // 2, CALM_US)
    if not any(trouble.kind == "kill" for trouble in troubles):
        troubles += (Trouble("kill", at, (seat,)),)
    if random.random() < 0.5:
        for _ in range(random.choice((1, 1, 2, 3))):
            at += random.randrange(CALM_US)
            troubles += (Trouble("kill", at, (random.choice((seat, random.choice(given.shape.seats))),)),)
    return replace(
        given,
        troubles=troubles,
        steps=given.steps + random.choice((24, 36)),
        damaged_share=random.choice((0.0, 0.0, 0.3)),
        rejoin=random.choice(("always", "always", 1, 3)),
    )


def _with_places(given: Scenario, random: Random) -> Scenario:
    """Change the iterators of jobs that read plain ones: in one of three a new one every few steps; else in two of five
    they end, mostly after unlike numbers of batches. In half of the jobs with returns a replica loses both its ends.
    """
    if not given.iterators:
        return given
    troubles = given.troubles
    if given.rejoin != "never" and random.random() < 0.5:
        replica, at = random.randrange(given.shape.replicas), random.randrange(SETTLED_US // 2, CALM_US)
        for stage in (0, given.shape.stages - 1):
            troubles += (Trouble("kill", at, (Seat(replica, stage),)),)
            at += random.choice((0, 0, random.randrange(CALM_US)))
    given = replace(given, troubles=troubles, epoch=random.choice((0, 0, 0, 0, 2, 5)))
    if given.epoch or random.random() < 0.6:
        return given
    least = 2 * given.shape.micro_batches
    batch = len(given.shape.batch)  # otherwise one replica alone could never fill a step
    lengths = tuple(max(batch, random.randrange(least, 4 * least)) for _ in range(given.shape.replicas))
    return replace(given, lengths=lengths[:1] * given.shape.replicas if random.random() < 0.25 else lengths)


def _with_groups(given: Scenario, random: Random) -> Scenario:
    """Have two workers hold each seat in one of eight jobs without iterators; in three of four lost seats return."""
    if random.random() >= 1 / 8 or given.iterators:
        return given
    given = replace(given, shards=2, struck=random.randrange(2), clip=given.clip * 2**0.5)  # as often over it as one is
    if random.random() < 0.25 or given.rejoin != "never":
        return given
    seat, at = random.choice(given.shape.seats), random.randrange(SETTLED_US // 2, CALM_US)
    more = tuple(
        Trouble("kill", at + place * random.randrange(CALM_US), (seat,)) for place in range(random.choice((1, 2)))
    )
    return replace(
        given,
        troubles=given.troubles + more,
        steps=given.steps + 24,
        damaged_share=random.choice((0.0, 0.3)),
        rejoin=random.choice(("always", 2)),
    )


def _with_logs(given: Scenario, random: Random) -> Scenario:
    """Log what crosses stages in one job of eight. In four of ten of these there is one replica, so that stages are
    lost whole; in half of them something is wrong with the logs too. Troubles that leave a worker away for ever, or not
    to be told from a dead one, are dropped.
    """
    if random.random() >= 1 / 8 or given.shards > 1:
        return given
    given = replace(given, iterators=False, epoch=0, lengths=())
    given = _narrowed(given, replace(given.shape, replicas=1)) if random.random() < 0.4 else given
    given = replace(
        given,
        logs=True,
        rejoin="always",
        steps=max(given.steps, 12) + random.choice((0, 12)),
        troubles=tuple(each for each in given.troubles if each.kind not in APART),
    )
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        given = _without_stages(given, random)
    had = {step for step, what in given.between if what == "save"}
    saved = [step for step in range(1, given.steps) if step not in had and random.random() < 0.2]
    full = [(step, "latest") for step in (0, *saved) if random.random() < (0.1 if step else 0.03)]
    given = replace(
        given, between=given.between + tuple((step, "save") for step in saved), full=given.full + tuple(full)
    )
    match random.choice((*WRONG_WITH_LOGS, *("nothing",) * 4)):
        case "damage":
            given = replace(given, log_damaged_share=random.choice((0.01, 0.05)))
        case "lag":
            given = replace(given, log_lag_us=random.choice((80, 300, 600)) * MILLISECOND)
        case "full":
            places = random.sample(given.shape.seats, random.randint(1, 2))
            given = replace(given, log_full=tuple((random.randint(1, given.steps), str(seat)) for seat in places))
    given = replace(given, helpers=random.choice((None, None, None, 1, 0)), helps_not=random.choice((0.0, 0.0, 0.3)))
    return _without_helpers(given, random) if random.random() < 0.4 else given


def _with_choices(given: Scenario, random: Random) -> Scenario:
    """Log only some boundaries in a share of the jobs that log; the choice may change with each checkpoint. Their logs
    are quick, since stages that are replayed together hand each other data over them.
    """
    if not given.logs or random.random() >= CHOOSES:
        return given
    everywhere = range(given.shape.stages - 1)
    choices = (tuple(each for each in everywhere if random.random() < 0.6) for _ in range(random.choice((1, 1, 2, 4))))
    return replace(given, log_choices=tuple(choices), log_lag_us=0)


def _without_helpers(given: Scenario, random: Random) -> Scenario:
    """Have a worker die at the first of several instructions of other stages, which only helpers run."""
    seat, shape = random.choice(given.shape.seats), given.shape
    faults = [
        Fault("kill", seat, "before", str(Instruction(Op.F, stage, micro_batch, step)))
        for stage in range(shape.stages)
        for micro_batch in shape.batch
        for step in range(1, given.steps)
        if stage != seat.stage and random.random() < 0.2
    ]
    return replace(given, faults=given.faults + tuple(faults))


def _with_rates(given: Scenario, random: Random) -> Scenario:
    """Let the script set learning rates in a quarter of the jobs with returns."""
    return replace(given, by_hand=given.rejoin != "never" and random.random() < 0.25)


def _with_lost_hosts(given: Scenario, random: Random) -> Scenario:
    """Give half of the jobs that log, have replicas and no ties, one trouble only: a host is lost, mostly with its
    worker's log, and later a neighbouring stage, before or after the coordinator takes the host for gone, or after a
    checkpoint. Scripts pause, to make time for that.
    """
    shape = given.shape
    if not given.logs or shape.replicas < 2 or shape.ties or random.random() >= 0.5:
        return given
    seat, at = random.choice(shape.seats), random.randrange(SETTLED_US, CALM_US)
    stage = random.choice([each for each in (seat.stage - 1, seat.stage + 1) if 0 <= each < shape.stages])
    later = int(SILENCE_S * 1e6 * random.choice((0.1, 0.5, 1.3, 1.5, 3.0)))
    steps = LONG + random.randrange(10)
    saved = random.sample(range(1, steps), random.choice((0, 0, 1, 2)))
    between = [(step, "save") for step in saved] + [(step, "pause") for step in range(1, steps)]
    troubles = Trouble("host", at, (seat,)), *_kills(shape, {stage: at + later}, random)
    return replace(
        given,
        steps=steps,
        between=tuple(sorted(between, reverse=True)),
        troubles=troubles,
        faults=(),
        full=(),
        log_full=(),
        log_damaged_share=0.0,
        logs_apart=random.random() < 0.7,
    )


def _with_units(given: Scenario, random: Random) -> Scenario:
    """Make replicas the unit in one of ten of the jobs that neither log nor are exact nor lose data on lines for good.
    In three of four of these the batch shrinks. Mostly lost replicas come back.
    """
    silent = any(trouble.kind in ("deafened", "walled", "swallow") for trouble in given.troubles)
    if given.logs or given.exact or silent or random.random() >= UNITS:
        return given
    given = replace(given, unit="replica")
    if random.random() < 0.75:
        given = replace(given, policy=replace(given.policy, shrinks=True))
    if given.rejoin == "never" and random.random() < 0.75:
        seat, at = random.choice(given.shape.seats), random.randrange(SETTLED_US // 2, CALM_US)
        troubles = [*given.troubles, Trouble("kill", at, (seat,))]
        if random.random() < 0.5:  # one of the replica's workers, while it comes back
            again = at + random.randrange(1_000, 1_800) * MILLISECOND
            troubles.append(Trouble("kill", again, (Seat(seat.replica, random.randrange(given.shape.stages)),)))
        given = replace(
            given,
            troubles=tuple(troubles),
            steps=given.steps + random.choice((24, 36)),
            damaged_share=random.choice((0.0, 0.3)),
            rejoin=random.choice(("always", 2)),
        )
    return given


def _narrowed(given: Scenario, shape: Topology) -> Scenario:
    """Return the job without troubles of seats not in ``shape``, and with at most one fault and one kill."""
    seats = set(shape.seats)
    troubles = [
        replace(each, seats=tuple(seat for seat in each.seats if seat in seats)[: 1 if each.kind == "kill" else None])
        for each in given.troubles
        if not each.seats or (seats.intersection(each.seats) and (each.peer is None or each.peer in seats))
    ]
    kills = [each for each in troubles if each.kind == "kill"]
    faults = [each for each in given.faults if each.seat in seats]
    return replace(
        given,
        shape=shape,
        troubles=tuple(each for each in troubles if each not in kills[1:]),
        faults=tuple(faults[:1]),
    )


def _without_stages(given: Scenario, random: Random) -> Scenario:
    """Lose whole stages: one, one at an instruction, two at once, one or the same in a replay, or the newcomers."""
    shape, stage, at = given.shape, random.randrange(given.shape.stages), random.randrange(SETTLED_US, CALM_US)
    replayed = at + random.randrange(900 * MILLISECOND, 1_700 * MILLISECOND)
    other = random.choice([each for each in range(shape.stages) if each != stage])
    match random.choice(("one", "one", "instruction", "neighbours", "ends", "other", "again", "newcomer")):
        case "one":
            lost = {stage: at}
        case "neighbours":
            lost = {stage: at, stage - 1 if stage else 1: at}
        case "ends":
            lost = {shape.stages - 1: at, 0: at}
        case "other":
            lost = {stage: at, other: replayed}
        case "again":
            again = tuple(Trouble("kill", replayed, (seat,)) for seat in shape.seats if seat.stage == stage)
            return replace(given, troubles=given.troubles + _kills(shape, {stage: at}, random) + again)
        case "newcomer":
            of = Instruction(Op.F, stage, random.choice(shape.batch), random.randint(1, 6))
            next_ones = (
                Fault("kill", seat, "before", str(of), incarnation=1) for seat in shape.seats if seat.stage == stage
            )
            return replace(
                given,
                troubles=given.troubles + _kills(shape, {stage: at}, random),
                faults=given.faults + tuple(next_ones),
            )
        case _:
            program = lowered(
                plan(shape.full(), given.costs, given.policy), Seat(0, stage), random.randint(1, given.steps)
            )
            ties = [one for one in program if one.op is Op.TIE]  # rare among all, and where two stages meet
            where = random.choice(("before", "after")), str(random.choice(ties or program))
            first = Fault("kill", Seat(0, stage), *where)
            rest = (
                Fault("kill", seat, "at", f"recovery.{random.choice(('start', 'report', 'resume'))}", 2)
                for seat in shape.seats
                if seat.stage == stage and seat.replica
            )
            return replace(given, faults=(*given.faults, first, *rest))
    if len(lost) == shape.stages and replayed not in lost.values():  # a worker has to be left
        lost.popitem()
    return replace(given, troubles=given.troubles + _kills(shape, lost, random))


def _kills(shape: Topology, lost: dict[int, int], random: Random) -> tuple[Trouble, ...]:
    """Return kills of all workers of the ``lost`` stages, each within 60 ms from the stage's time on."""
    return tuple(
        Trouble("kill", lost[seat.stage] + random.randrange(60 * MILLISECOND), (seat,))
        for seat in shape.seats
        if seat.stage in lost
    )


def _with_paces(given: Scenario, random: Random) -> Scenario:
    """Make one worker slow in one job of eight, in half of these not for ever, with rebalancing and more steps."""
    if random.random() >= 1 / 8:
        return given
    seat, at = random.choice(given.shape.seats), random.randrange(CALM_US // 4)
    troubles = given.troubles + (Trouble("slow", at, (seat,), percent=random.choice((170, 300))),)
    if random.random() < 0.5:
        troubles += (Trouble("slow", at + random.randrange(CALM_US), (seat,), percent=100),)
    return replace(given, rebalances=True, troubles=troubles, steps=given.steps + 6)


def _with_moments(given: Scenario, random: Random) -> Scenario:
    """Make some work take long, whoever does it, or lose tensors without a complaint, in one job of eight."""
    if random.random() >= 1 / 8:
        return given
    shape = given.shape
    if random.random() < 0.3:
        seat = random.choice(given.shape.seats)
        peer = random.choice([other for other in shape.seats if abs(other.stage - seat.stage) == 1])
        return replace(
            given,
            troubles=given.troubles
            + (Trouble("swallow", random.randrange(CALM_US // 4), (seat,), peer, 100 * MILLISECOND),),
        )
    computes, stage, one = random.random() < 0.5, random.randrange(shape.stages), random.choice(shape.batch)
    ops = ("F", "I", "W") if given.policy.split_backward else ("F", "B")
    shortest_s, longest_s = (1.2 * DEADLINES.progress_timeout_s, DEADLINES.busy_timeout_s - LATE_S)
    if not computes and random.random() < 0.7:  # long enough to be suspected again after it has cost a worker
        shortest_s, longest_s = SUSPECTED * DEADLINES.idle_timeout_s + LATE_S, DEADLINES.last_worker_timeout_s - LATE_S
    lasts = random.randrange(int(shortest_s * 1e6), int(longest_s * 1e6))
    return replace(
        given, heavy=(Heavy(random.randint(2, given.steps), str(one), random.choice(ops), stage, lasts, computes),)
    )


def _with_ties(given: Scenario, random: Random) -> Scenario:
    """Give three jobs in ten stages that share weights; in half of these a worker also dies or stops around a TIE."""
    if random.random() >= 0.3:
        return given
    shape = replace(
        given.shape, ties=tied(random.sample(range(given.shape.stages), 2) for _ in range(random.choice((1, 1, 2))))
    )
    costs = replace(given.costs, tie=random.choice((0, 4)) * MILLISECOND)
    faults = given.faults
    if random.random() < 0.5:
        seat = Seat(random.randrange(shape.replicas), random.choice(random.choice(shape.ties)))
        kill = random.choice(("kill", "kill", "stop")), seat, random.choice(("before", "after"))
        faults += (Fault(*kill, str(Instruction(Op.TIE, seat.stage, None, random.randint(1, given.steps)))),)
    return replace(given, shape=shape, costs=costs, faults=faults)


def _with_endings(given: Scenario, random: Random) -> Scenario:
    """Give one job in eight an end of its own: a leaving worker dies where it should say goodbye; a stage does at a
    planned end; workers are cut off before one; or a stage dies whole before it has sent its share of a norm that the
    others have stepped without.
    """
    if random.random() >= 1 / 8:
        return given
    shape, seat, at = given.shape, random.choice(given.shape.seats), random.randrange(CALM_US // 2)
    stage = tuple(each for each in shape.seats if each.stage == seat.stage)
    kinds, end = ["leave", "end"], ("end", "finish")[at % 2]
    # a worker has to be left in touch with the coordinator
    if not any(trouble.kind == "cut" for trouble in given.troubles):
        kinds += ["cut"]
    if given.clip and not given.policy.together:
        kinds += ["stage"] * 3
    match random.choice(kinds):
        case "leave":
            troubles = Trouble("leave", at, (seat,)), Trouble("rude", 0, (seat,))
        case "end":
            troubles = Trouble(end, at, (seat,)), Trouble("rude", 0, stage)
        case "cut":
            some = random.sample(shape.seats, random.randint(1, len(shape.seats) // 2))
            troubles = (
                Trouble(end, at, (seat,)),
                Trouble("cut", at + random.randrange(300 * MILLISECOND), tuple(some)),
            )
        case "stage":
            step = random.randint(1, given.steps)
            return replace(
                given,
                faults=given.faults
                + tuple(Fault("kill", each, "before", f"{each.stage}REDUCE@{step}") for each in stage),
            )
    return replace(given, troubles=given.troubles + troubles)


def _with_undo(given: Scenario, random: Random) -> Scenario:
    """Make one job in sixteen whose stages step apart take steps back. A worker of the last stage stops when the stages
    before it can step. Nobody keeps what was sent, so they must take the step back when it is given up. Another worker
    dies in that regroup.
    """
    shape, policy = given.shape, given.policy
    if random.random() >= 1 / 16 or policy.together or not policy.split_backward:
        return given
    seat, other = random.sample(shape.seats, 2)
    last = Instruction(
        Op.W, shape.stages - 1, MicroBatch(seat.replica, shape.micro_batches - 1), random.randint(1, given.steps)
    )
    stops = Fault("stop", Seat(seat.replica, last.stage), "before", str(last))
    dies = Fault("kill", other, "at", *random.choice((("recovery.resume", 2), ("recovery.undone", 1))))
    return replace(given, faults=given.faults + (stops, dies), budget=0)
