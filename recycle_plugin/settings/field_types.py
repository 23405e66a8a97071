"""Types of the settings' fields: how each value is checked, and how an error describes a correct one."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from errno import E2BIG
from subprocess import DEVNULL, run
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.plan import ONE_F_ONE_B

LONGEST_S = 1e9  # the most seconds that any wait takes as its limit
MOST = 1 << 53  # of any whole number: the planner counts in 64 bits, and adds up
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*((?P<prefix>[kmgt])(?P<binary>i?))?b", re.IGNORECASE | re.ASCII)


def setting(default: Any, write: str, description: str, **limits: Any) -> Any:
    """Return a field of the settings. ``write``: a correct value, in the words of the error that asks for it."""
    return Field(default, description=description, json_schema_extra={"write": write}, **limits)


def _checked_fault(text: str) -> str:
    return str(Fault.parse(text))


def _checked_cap(value: Any) -> Any:
    """Check a text. Numbers are checked by type."""
    if isinstance(value, str) and value != ONE_F_ONE_B:
        raise PydanticCustomError("no_cap", "no cap")
    return value


def _checked_size(value: Any) -> Any:
    """Return the bytes of ``12GiB``, ``1.5 TB`` or ``4096B``."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is not None:
        unit = (1024 if match["binary"] else 1000) ** " kmgt".index((match["prefix"] or " ").lower())
        if 1 <= (size := int(Decimal(match["number"]) * unit)) <= MOST:
            return size
    raise PydanticCustomError("no_size", "no size")


def _checked_address(text: str) -> str:
    """Check the address and port of a server; an IPv6 address is in brackets."""
    match = re.fullmatch(r"(\[[\da-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})", text, re.ASCII)
    if match is None or int(match[2]) > 65535:
        raise PydanticCustomError("no_address", "no address")
    return text


def _checked_folder(path: str) -> str:
    if "\0" in path:
        raise PydanticCustomError("no_path", "no path")
    return os.path.expanduser(path)


def _checked_command(text: str) -> str:
    """Check with sh that the text has the syntax of a command, and is no longer than an argument may be."""
    try:
        if text.strip() and "\0" not in text and not run(["sh", "-nc", text], stderr=DEVNULL, stdin=DEVNULL).returncode:
            return text
    except OSError as error:
        if error.errno != E2BIG:
            raise
    raise PydanticCustomError("no_command", "no command")


_as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
_as_true = BeforeValidator(lambda value: True if value == "true" else value)
Count = Annotated[int, Field(ge=1, le=MOST)]
Number = Annotated[int, Field(ge=0, le=MOST)]
Cap = Annotated[
    Count | Annotated[tuple[Count, ...], Field(min_length=1)] | str | None, _as_tuple, AfterValidator(_checked_cap)
]
Seconds = Annotated[float, Field(le=LONGEST_S, allow_inf_nan=False)]
Bytes = Annotated[Count | str | None, AfterValidator(_checked_size)]
Folder = Annotated[str, Field(min_length=1), AfterValidator(_checked_folder)]
Address = Annotated[str, AfterValidator(_checked_address)]
ShellCommand = Annotated[str, AfterValidator(_checked_command)]
Rejoin = Literal["always", "never"] | Number
Helpers = Literal["auto"] | Number
Boundaries = Annotated[Literal["auto", "all", "hosts"] | tuple[Number, ...], _as_tuple]
Norm = Annotated[Literal[True, "deepspeed"], _as_true]
Faults = Annotated[tuple[Annotated[str, AfterValidator(_checked_fault)], ...], _as_tuple]
"""Faults as text, as :class:`~recycle_plugin.core.vocabulary.faults.Fault` writes them."""

CAP = 'a whole number of at least 1, a list of one for each stage, "1f1b", or null'
BOOL = "true or false"

STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, validate_default=True)
"""Configuration of all models of settings."""
