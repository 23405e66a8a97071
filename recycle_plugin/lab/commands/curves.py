"""Two loss curves side by side, as text."""

from __future__ import annotations

from collections.abc import Mapping

HEAD = ("step", "fault-free", "with failure", "difference")


def table(fault_free: Mapping[int, float], failed: Mapping[int, float], killed_in: tuple[int, ...] = ()) -> str:
    """Return a table of two loss curves, a line for each step of either run; ``killed_in``: steps to mark. Raises
    ValueError if the runs have no step in common.
    """
    if not fault_free.keys() & failed.keys():
        raise ValueError("the two runs have no step in common: nothing to compare")
    lines = [_line(HEAD), _line(tuple("-" * len(title) for title in HEAD))]
    for step in sorted(fault_free.keys() | failed.keys()):
        one, two = fault_free.get(step), failed.get(step)
        difference = f"{abs(one - two):.1e}" if one is not None and two is not None else ""
        cells = (str(step), _number(one), _number(two), difference)
        lines.append(_line(cells) + ("  <-- killed" if step in killed_in else ""))
    lines.append(f"largest difference: {largest_difference(fault_free, failed):.1e}")
    return "\n".join(lines)


def largest_difference(fault_free: Mapping[int, float], failed: Mapping[int, float]) -> float:
    """Return the largest difference over the steps of both runs, NaN if any is. Raises ValueError if there is none."""
    differences = [abs(fault_free[step] - failed[step]) for step in sorted(fault_free.keys() & failed.keys())]
    return max(differences, key=lambda value: (value != value, value))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(text.rjust(max(len(title), 10 if title != "step" else 4)) for text, title in zip(cells, HEAD))
