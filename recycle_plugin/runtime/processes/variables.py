"""The plugin's environment variables. A misspelt one would have no effect, so it is refused."""

from __future__ import annotations

from collections.abc import Iterable

SERVER_VARIABLE = "RECYCLE_FORK_SERVER"  # the address of the fork server, if there is one
USERS = ("RECYCLE_CONFIG", "RECYCLE_SECRET_FILE", "RECYCLE_TLS", "RECYCLE_TRACEBACK")
OWN = (  # set by the job's processes, and by scripts that measure and install
    "RECYCLE_COORDINATOR", SERVER_VARIABLE, "RECYCLE_INCARNATION",
    "RECYCLE_INSTALL_TIMEOUT", "RECYCLE_PLACEMENT", "RECYCLE_RUN", "RECYCLE_SECRET_AT",
)  # fmt: skip
TESTS = "RECYCLE_TEST_"
ALIKE = 0.8  # similarity from which a name counts as misspelt


class Misspelt(ValueError):
    """An environment variable has almost the name of one of the plugin's; the message says what to write."""


def check(names: Iterable[str]) -> str:
    """Raise Misspelt for a name that is almost the plugin's. Return a line on other RECYCLE_ names, or ""."""
    unknown = [name for name in sorted(names) if name.startswith("RECYCLE_") and name not in (*USERS, *OWN)]
    others = [name for name in unknown if not name.startswith(TESTS)]
    if not others:
        return ""
    from difflib import get_close_matches  # imported here, to keep guards small

    for name in others:
        if meant := get_close_matches(name, USERS, 1, ALIKE):
            raise Misspelt(f"the environment has {name}, which the plugin does not know: write {meant[0]}, or unset it")
    return f"the environment has {', '.join(others)}, which the plugin does not know: it reads {', '.join(USERS)}"
