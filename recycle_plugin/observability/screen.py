"""A job on one screen: its state, and each seat's activity; many seats become a grid with a sign for each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import end, seconds
from recycle_plugin.observability.seats import STAYED, WORDS, Mark, SeatState, seat_states
from recycle_plugin.observability.training_time import goodput

FEW = 16  # seats that are listed in any case
LEAST = 6  # lines that a grid leaves to the list
RULED = 10  # stages between two numbers above a grid
GREY, RED, YELLOW, CYAN = 90, 31, 33, 36  # ANSI colours
COLOURS = {
    Mark.TRAINS: 0,
    Mark.LOST: RED,
    Mark.SUSPECTED: YELLOW,
    Mark.WAITS: YELLOW,
    Mark.LEAVES: GREY,
    Mark.LEFT: GREY,
}
"""Colours of the marks; those of newcomers are cyan."""

Line = Sequence[tuple[str, Mark]]
"""The pieces of a line, each with the mark that gives its colour."""


def plain(text: str) -> Line:
    return ((text, Mark.TRAINS),)


def printed(line: Line, columns: int, coloured: bool = False) -> str:
    """Return the line as written, cut off after ``columns`` with an ellipsis."""
    cut = len("".join(piece for piece, _ in line).rstrip()) > columns
    text, room = "", columns - cut
    for piece, mark in line:
        piece = piece[:room]
        room -= len(piece)
        colour = COLOURS.get(mark, CYAN) if coloured else 0
        text += f"\x1b[{colour}m{piece}\x1b[0m" if colour and piece else piece
    return text.rstrip() + "…" * cut


def screen(history: RunHistory, now: float, size: os.terminal_size) -> list[Line]:
    """Return the lines at ``now``, in seconds since the epoch, within the lines and columns of ``size``."""
    states = seat_states(history, now)
    shown = [*map(plain, head(history, now)), *legend(states, size.columns), plain("")]
    if len(states) <= min(FEW, size.lines - len(shown) - 1):
        return [*shown, *listed(states, history)]
    odd = sorted((state for state in states if state.mark != Mark.TRAINS), key=lambda state: [*Mark].index(state.mark))
    room = size.lines - len(shown)
    shown += grid(states, room - min(len(odd) + 2, LEAST) if odd else room)
    left = size.lines - len(shown) - 3  # minus an empty line, the list's head and the last line
    if odd and left > 0:
        shown += [plain(""), *listed(odd[:left], history)]
        shown += [plain(f"… and {len(odd) - left} more")] * (len(odd) > left)
    return shown


def head(history: RunHistory, now: float) -> Iterator[str]:
    """Yield two lines on the job as a whole."""
    why, commits, lost, resumed = end(history), history.commits, history.of("lost"), history.of("resume")
    until = now if why is None else history.events[-1]["time"]
    told = [f"{'running for' if why is None else 'ran for'} {seconds(until - history.began)}", why or ""]
    if why is None and commits:
        told.append(f"last commit {now - max(commits.values()):.1f} s ago")
    if why is None and lost and lost[-1]["time"] > max((event["time"] for event in resumed), default=0.0):
        told.append(f"interrupted for {now - lost[-1]['time']:.1f} s, since seat {lost[-1]['seat']} was lost")
    if isfinite(ratio := goodput(history, until)):
        told.insert(1, f"goodput {ratio:.1%}")
    yield "   ".join(filter(None, told))
    told = [f"step {history.reached}"]
    if (loss := history.curve.get(history.last)) is not None:
        told.append(f"loss {loss:.6f}")
    if isfinite(step_s := history.now_s):
        told.append(f"{history.rate(step_s, history.last):.4g} samples/s, {step_s:.3f} s a step")
    if history.predicted is not None and history.gone:
        told.append(f"planned: {history.predicted:.0%} of full throughput")
    yield "   ".join(told)


def legend(states: Sequence[SeatState], columns: int) -> Iterator[Line]:
    """Yield how many seats have which mark, in lines of at most ``columns``."""
    stayed = {Mark.TRAINS: STAYED} if any(state.text == STAYED for state in states) else {}
    count, line, left = Counter(state.mark for state in states), list[tuple[str, Mark]](), columns
    for mark in filter(count.__getitem__, Mark):
        piece = f"{mark} {count[mark]} {(WORDS | stayed)[mark]}   "
        if line and len(piece.rstrip()) > left:
            yield line
            line, left = [], columns
        line.append((piece, mark))
        left -= len(piece)
    yield line


def grid(states: Sequence[SeatState], lines: int) -> Iterator[Line]:
    """Yield a row for each replica with a sign for each stage, under the stages' numbers. If that takes more than
    ``lines``, replicas that all train are left out, and then the last ones.
    """
    rows: dict[int, list[SeatState]] = {}
    for state in states:
        rows.setdefault(Seat.parse(state.seat).replica, []).append(state)
    yield plain(f"{'stage':>11}  " + "".join(f"{stage:<{RULED}}" for stage in range(0, len(rows[0]), RULED)))
    shown = [*rows]
    if len(rows) + 1 > lines:
        odd = [replica for replica, row in rows.items() if {state.mark for state in row} != {Mark.TRAINS}]
        shown = odd[: max(1, lines - 2)]
    for replica in shown:
        yield [(f"replica {replica:>3}  ", Mark.TRAINS), *((state.sign, state.mark) for state in rows[replica])]
    if left := len(rows) - len(shown):
        yield plain(f"and {left} replica{'s' * (left > 1)} more" + ", which all train" * (len(shown) == len(odd)))


def listed(states: Sequence[SeatState], history: RunHistory) -> Iterator[Line]:
    """Yield a line for each seat: rank, host, step, and activity."""
    hosts = history.hosts
    width = max([4, *(len(hosts.get(state.seat, "")) for state in states)])
    yield plain(f"{'seat':<7}{'rank':>5}  {'host':<{width}}  {'step':>7}  what it does")
    for state in states:
        step = "" if state.step is None else str(state.step)
        words = state.text or WORDS[state.mark]
        text = f"{state.seat:<7}{state.rank:>5}  {hosts.get(state.seat, ''):<{width}}  {step:>7}  {state.sign} {words}"
        yield ((text, state.mark),)
