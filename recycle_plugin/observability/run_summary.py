"""Summary of a run, for status and report: one sentence, why the run ended, and its model, hosts and times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import isfinite

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.observability.run_history import KILLED, NO_REASON, Failure, RunHistory

UNKNOWN = "not in the log"
THROUGH = " and came to its planned end"
PLANNED = "all workers have left"  # beginning of a "finished" event's text if no other cause is known
MANY_HOSTS = 16  # more hosts are counted instead of named
MOST = 24  # texts of a kind; further ones are counted
LONGEST = 200  # most characters of a cause in the sentence


def sentence(history: RunHistory) -> str:
    """Return one sentence: what happened in the run of ``history``, and the cost."""
    said = f"{_subject(history)} {_trained(history)}{_outcome(history)}"
    lost = history.failures
    if not lost:
        return f"{said}; no worker was lost."
    where = ", ".join(f"{failure.seat} in step {failure.step}{_back(failure)}" for failure in lost[:3])
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    seats = len({failure.seat for failure in lost})
    times = f", {len(lost)} times in all" if seats < len(lost) else ""
    were = f"{'was' if seats == 1 else 'were'} lost{times}"
    return f"{said}; {seats} of {_seats(history)} {were} ({where}{more}): {cost(history)}."


def _back(failure: Failure) -> str:
    absence = failure.absence
    replayed = absence.replayed and f", {absence.replayed}"
    return f", back after {seconds(absence.lasted_s)}{replayed}" if absence.is_over else ""


def _subject(history: RunHistory) -> str:
    return "The job has so far" if end(history) is None else "The job"


def _trained(history: RunHistory) -> str:
    commits = history.commits
    if commits:  # steps are consecutive, apart from lines that could not be written
        steps = max(commits) - min(commits) + 1
        return f"trained {_count(steps, 'step')} in {seconds(max(commits.values()) - history.began)}"
    if history.reached:
        return f"trained up to step {history.reached} (the commits are {UNKNOWN})"
    return "committed no step"


def _outcome(history: RunHistory) -> str:
    last = history.end
    if last is None:
        return " and was killed" if history.was_killed else ""
    if last["event"] == "end":
        return " and ended before its planned end"
    lost = {event["rank"] for event in history.of("lost")}
    crashed = any(event.get("rank") not in lost for event in history.of("error"))
    if history.of("terminate") and not crashed:
        return " and was stopped as asked"
    if last["text"].startswith(PLANNED) and not crashed:
        return THROUGH
    return (
        f" and ended: {_short(last['text'].partition(': ')[2] or last['text'])}" if last["text"] else f", {NO_REASON}"
    )


def _seats(history: RunHistory) -> str:
    if history.ranks_a_seat == 1:
        return f"{len(history.seats)} workers"
    return f"{len(history.seats)} seats of {history.ranks_a_seat} ranks each"


def cost(history: RunHistory) -> str:
    """Return the cost of the lost workers: time to the next commits, and throughput since."""
    stalls: dict[float, float] = {}
    for failure in history.failures:  # failures in one step share its commit
        if failure.committed_at is not None:
            stalls[failure.committed_at] = max(stalls.get(failure.committed_at, 0.0), failure.stall_s)
    if not stalls:
        return f"the time to the next commit is {UNKNOWN}" if history.went_on else "no step was committed after that"
    before, now = history.before_s, history.now_s
    told = f"{seconds(sum(stalls.values()))} passed from the loss to the next commit"
    if len(stalls) > 1:
        told = f"{seconds(sum(stalls.values()))} in all passed from losses to the next commits"
    if isfinite(before):
        told += f" (an undisturbed step took {seconds(before)})"
    if isfinite(before) and isfinite(now):
        told += f", and throughput went from {_rates(history, before, now)}"
    return told


def _rates(history: RunHistory, before: float, now: float) -> str:
    """Return samples a second before the first failure and at the end; if all workers are back, also between."""
    usual, last = history.rate(before, history.last_before), history.rate(now, history.last)
    meanwhile = history.rate(*history.meanwhile)
    if history.gone or not isfinite(meanwhile):
        return f"{usual:.4g} to {last:.4g} samples/s ({last / usual:.0%})"
    low = f"{usual:.4g} to {meanwhile:.4g} samples/s ({meanwhile / usual:.0%})"
    return f"{low} and back to {last:.4g} ({last / usual:.0%})"


def end(history: RunHistory) -> str | None:
    """Return why the job ended, None if its log shows no end."""
    if history.end:
        return history.end["text"] or NO_REASON
    return KILLED.format(**history.coordinator) if history.was_killed else None


def exit_code(history: RunHistory) -> int:
    """Return the exit code of a command about the run: 0 if it goes on or came to its planned end, else 1."""
    return int(end(history) is not None and _outcome(history) != THROUGH)


def facts(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each fact: model, hosts, times, and how losses were noticed."""
    yield "topology", history.shape.text
    yield "model", model(history)
    yield "batch", batch(history)
    yield "precision", "; ".join(dict.fromkeys(event["precision"] for event in history.of("stage"))) or UNKNOWN
    yield "hosts", hosts(history)
    yield "started", wall_clock(history.began)
    last = history.end or history.events[-1]
    yield "ended" if end(history) is not None else "last event", wall_clock(last["time"])
    if history.failures:
        yield "noticed", noticed(history)
    if slow := slow_replicas(history):
        yield "slow", slow
    yield "checkpoint", checkpoints(history)


def model(history: RunHistory) -> str:
    """Return layers and parameters of all stages, if the workers of all stages have reported them."""
    told = {event["stage"]: event for event in history.of("stage")}
    if len(told) < history.shape.stages:
        return UNKNOWN
    names = [name for _, event in sorted(told.items()) for name in event["layers"]]
    counted = ((name, len(list(each))) for name, each in groupby(names))
    layers = ", ".join(f"{count} {name}" if count > 1 else name for name, count in counted)
    parameters = sum(event["parameters"] for event in told.values())
    counted_layers = f"{_count(len(names), 'layer')} ({layers}), " * bool(names)  # a replica's model names none
    return f"{counted_layers}{parameters:,} parameters"


def batch(history: RunHistory) -> str:
    """Return samples of a step and of a micro-batch, in the last steps if that has changed."""
    _, samples = history.batch_from(history.last)
    shape = history.shape
    each, rest = divmod(samples, shape.replicas * shape.micro_batches)
    changed = history.of("batch")
    return (
        f"{samples} samples a step"
        + ("" if rest else f", {each} a micro-batch")
        + (f" (since step {changed[-1]['step']})" if changed else "")
    )


def hosts(history: RunHistory) -> str:
    if not history.hosts:
        return ", ".join(history.of("start")[0].get("hosts", ())) or UNKNOWN
    workers = Counter(history.hosts.values())
    if len(workers) > MANY_HOSTS:
        each = sorted({min(workers.values()), max(workers.values())})
        return f"{len(workers)}, of {' to '.join(map(str, each))} workers each"
    return "; ".join(
        f"{host}: " + ", ".join(seat for seat, its in history.hosts.items() if its == host)
        for host in sorted(set(history.hosts.values()))
    )


def noticed(history: RunHistory) -> str:
    """Return how long after each fault the coordinator knew of it."""
    told = [
        f"{failure.seat}: {seconds(failure.seen_at - failure.struck_at)} after the fault"
        if failure.fault
        else f"{failure.seat}: at {wall_clock(failure.seen_at)} (the time of its death is not known)"
        for failure in history.failures
    ]
    return ", ".join(some(told))


def slow_replicas(history: RunHistory) -> str:
    """Return the replicas reported as slow, and by how much; "" if none was."""
    last = {event["replica"]: event for event in history.of("slow_replica")}
    told = []
    for replica, event in sorted(last.items()):
        by = f"{event['behind_us'] / 1000:.0f} ms a step"
        who = f", by rank {event['rank']}" if event["rank"] is not None else ""
        told.append(f"replica {replica}: {'no more' if event['over'] else by + who}")
    return "; ".join(told)


def checkpoints(history: RunHistory) -> str:
    """Return the number of checkpoints written, and the path of the last one."""
    written = history.of("checkpoint")
    return f"{len(written)} written, the last one {written[-1]['path']}" if written else "none"


def some(texts: Sequence[str]) -> list[str]:
    """Return the texts; of more than MOST the first ones and the number of the others."""
    left = len(texts) - MOST
    return [*texts[:MOST], f"and {left} more"] if left > 0 else [*texts]


def these(seats: Iterable[Seat | str]) -> str:
    """Return the seats as a list, ``0.1, 1.1``; of more than three the first two and the number of others."""
    named = list(map(str, seats))
    return ", ".join(named) if len(named) <= 3 else f"{named[0]}, {named[1]} and {len(named) - 2} more"


def wall_clock(seconds_since_epoch: float) -> str:
    """Return local date and time, with the time zone's offset."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds_since_epoch))


def seconds(value: float) -> str:
    """Return a duration in words: seconds to three figures, or hours and minutes if it is 2 min or more."""
    if value < 120:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
