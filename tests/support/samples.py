"""Whether lines that a document shows of a job are lines that a job prints."""

from __future__ import annotations

import re

LINE = re.compile(r"^\[recycle +[\d.]+\] (\w+): (.*)$", re.MULTILINE)
VARIES = re.compile(r"\d+(?:\.\d+)?|(?<= on )\S+")  # numbers, and names of hosts


def shapes(text: str) -> list[str]:
    """Of each event in ``text``, its kind and its first clause without what differs from run to run: what a lost worker
    was first missed by does too.
    """
    return [f"{kind}: {re.split('[:;.]', VARIES.sub('#', rest))[0]}" for kind, rest in LINE.findall(text)]


def never_printed(document: str, printed: str) -> list[str]:
    """The shapes of the document's lines that no line of ``printed`` has."""
    return sorted(set(shapes(document)) - set(shapes(printed)))
