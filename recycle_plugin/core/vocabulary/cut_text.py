"""The text of a value that does not fit, for an error of one line."""

from __future__ import annotations

SHOWN = 80  # characters


def shown(value: object) -> str:
    """Return the text of ``value`` in one line, cut off if it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeper, or with more digits, than Python prints
        return f"a {'deep' if isinstance(value, list | dict) else 'huge'} {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
