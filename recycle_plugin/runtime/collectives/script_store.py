"""The store that the script's ``init_process_group`` gets: torch's Store over the connection to the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.control.session import Session


class ScriptStore(dist.Store):
    """Keys and values that the job's workers share: the coordinator has them, and its successor after it. Nobody else
    reaches them. Calls block; torch makes them from any thread, and some from C++, for which it takes the GIL.
    """

    def __init__(self, session: Session, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)  # torch's own, which a PrefixStore sets too
        self._session, self._call = session, session.store.call
        session.store.used_by.append(self)  # groups and PrefixStores keep only the C++ part of a store

    def clone(self) -> ScriptStore:
        """Return a store of the same keys, with a timeout of its own."""
        return ScriptStore(self._session, self.timeout)  # type: ignore[attr-defined]

    def set(self, key: str, value: Any) -> None:
        """Set ``key``, anew if it has a value."""
        self._call("set", [key], [_bytes(value)])

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set ``keys`` in one message."""
        self._call("set", keys, list(map(_bytes, values)))

    def get(self, key: str) -> bytes:
        """Return the value of ``key`` once it has one. Raises DistStoreError after the store's timeout."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys`` once all have one. Raises DistStoreError after the store's timeout."""
        self.wait(keys)
        return list(self._call("get", keys))

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number that ``key`` has, 0 at first, and return the sum."""
        return int(self._call("add", [key], [b"%d" % amount])[0])

    def append(self, key: str, value: Any) -> None:
        """Add bytes to the end of the value of ``key``."""
        self._call("append", [key], [_bytes(value)])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set ``key`` if it has the ``expected`` value, or none and none is expected; return the value that it has."""
        return self._call("compare_set", [key], [_bytes(expected), _bytes(desired)])[0]

    def delete_key(self, key: str) -> bool:
        """Delete ``key`` and return whether it was there."""
        return self._call("delete_key", [key]) == (b"1",)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._call("num_keys", [])[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` have values."""
        return self._call("check", keys) == (b"1",)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all ``keys`` have values. Raises DistStoreError after ``timeout`` (default: the store's)."""
        try:
            self._call("wait", keys, timeout_s=(timeout or self.timeout).total_seconds())  # type: ignore[attr-defined]
        except WaitTimeout as error:
            raise dist.DistStoreError(str(error)) from None

    def has_extended_api(self) -> bool:
        """Whether there are append, multi_get and multi_set."""
        return True

    # names by which torch calls these from C++
    deleteKey, getNumKeys = delete_key, num_keys


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
