"""The keys and values of torch's store as scripts see it (runtime/collectives/script_store.py).

They are the coordinator's: who changes one is a worker of the job, and they go on with the coordinator's successor. The
calls are those of torch's Store. What one call costs does not grow with the number of keys that it does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from recycle_plugin.core.messages.from_coordinator import StoreAnswer
from recycle_plugin.core.messages.from_workers import StoreCall
from recycle_plugin.core.vocabulary.roster import WorkerId

SHARE = 64 << 20  # bytes of all keys and values
EACH = 256  # bytes that a key or a wait counts for beside its own
MOST = 8 << 20  # bytes of a value, and of the values in an answer: one message carries them and their heads
Tell = Callable[[WorkerId, object], object]


@dataclass
class Wait:
    """A worker's call ``number``, which is answered once none of the keys is ``missing``."""

    worker: WorkerId
    number: int
    missing: list[str]


@dataclass
class KeyValues:
    """All keys of a job's store, and who waits for which."""

    values: dict[str, bytes] = field(default_factory=dict)
    used: int = 0  # bytes
    waits: dict[str, list[Wait]] = field(default_factory=dict)  # by a missing key

    def call(self, call: StoreCall, tell: Tell) -> None:
        """Carry out ``call`` and answer it, or answer why not."""
        try:
            answer = CALLS[call.call](self, call, tell)
        except (NoRoom, LookupError, ValueError) as error:  # also for what no store says
            tell(call.worker, StoreAnswer(call.number, (), str(error)))
        else:
            if answer is not None:
                tell(call.worker, StoreAnswer(call.number, tuple(answer)))

    def _put(self, new: dict[str, bytes], tell: Tell) -> None:
        """Set all of ``new`` and answer the waits that this ends, or set none of it. Raises NoRoom."""
        if any(len(value) > MOST for value in new.values()):
            raise NoRoom(f"its value would have more than {MOST >> 20} MiB")
        self._take_room(sum(_size(key, value) - self._size_of(key) for key, value in new.items()))
        self.values |= new
        for key in new:
            for wait in self.waits.pop(key, ()):
                self.used -= EACH
                self._await(wait, tell)

    def _size_of(self, key: str) -> int:
        return _size(key, self.values[key]) if key in self.values else 0

    def _take_room(self, size: int) -> None:
        if size > 0 and self.used + size > SHARE:
            raise NoRoom(f"the store of the job keeps at most {SHARE >> 20} MiB; delete keys that nobody needs")
        self.used += size

    def _await(self, wait: Wait, tell: Tell) -> None:
        """Answer ``wait`` if all of its keys are there, else keep it at the first that is not."""
        wait.missing = [key for key in wait.missing if key not in self.values]
        if not wait.missing:
            tell(wait.worker, StoreAnswer(wait.number, ()))
        else:
            self._take_room(EACH)
            self.waits.setdefault(wait.missing[0], []).append(wait)

    # --- the calls -------------------------------------------------------------------------------------

    def _set(self, call: StoreCall, tell: Tell) -> Iterable[bytes]:
        if len(call.keys) != len(call.values):
            raise ValueError(f"{len(call.keys)} keys and {len(call.values)} values")
        self._put(dict(zip(call.keys, call.values)), tell)
        return ()

    def _get(self, call: StoreCall, tell: Tell) -> Iterable[bytes]:
        """The values of keys that are there, since the worker has waited for them."""
        missing = [key for key in call.keys if key not in self.values]
        if missing:
            raise ValueError(f"key {missing[0][:80]!r} was deleted")
        if sum(len(self.values[key]) for key in call.keys) > MOST:
            raise ValueError(f"these values have more than {MOST >> 20} MiB; ask for fewer at a time")
        return [self.values[key] for key in call.keys]

    def _add(self, call: StoreCall, tell: Tell) -> Iterable[bytes]:
        key, more = call.keys[0], int(call.values[0])
        total = int(self.values.get(key, b"0")) + more
        if not -(1 << 63) <= total < 1 << 63:
            raise ValueError("the sum has more than the 64 bits that torch reads")
        self._put({key: b"%d" % total}, tell)
        return [self.values[key]]

    def _append(self, call: StoreCall, tell: Tell) -> Iterable[bytes]:
        self._put({call.keys[0]: self.values.get(call.keys[0], b"") + call.values[0]}, tell)
        return ()

    def _compare_set(self, call: StoreCall, tell: Tell) -> Iterable[bytes]:
        """As torch's: set an absent key only if no value is expected; otherwise return the expected value."""
        (key,), (expected, desired) = call.keys, call.values
        if self.values.get(key, b"") == expected:
            self._put({key: desired}, tell)
        return [self.values.get(key, expected)]

    def _delete(self, call: StoreCall, tell: Tell) -> Iterable[bytes]:
        self.used -= self._size_of(call.keys[0])
        return [b"0" if self.values.pop(call.keys[0], None) is None else b"1"]

    def _count(self, call: StoreCall, tell: Tell) -> Iterable[bytes]:
        return [b"%d" % len(self.values)]

    def _check(self, call: StoreCall, tell: Tell) -> Iterable[bytes]:
        return [b"1" if all(key in self.values for key in call.keys) else b"0"]

    def _wait(self, call: StoreCall, tell: Tell) -> None:
        self._await(Wait(call.worker, call.number, list(call.keys)), tell)

    def _wait_no_more(self, call: StoreCall, tell: Tell) -> None:
        """The worker's call of this number has passed its deadline. O(waits for its keys)."""
        self._forget(call.keys, lambda wait: (wait.worker, wait.number) == (call.worker, call.number))

    def forget(self, worker: WorkerId) -> None:
        """Forget the waits of a worker that hears nothing any more. O(waits)."""
        self._forget(tuple(self.waits), lambda wait: wait.worker == worker)

    def _forget(self, keys: Iterable[str], is_over: Callable[[Wait], bool]) -> None:
        for key in keys:
            there = self.waits.pop(key, [])
            if kept := [wait for wait in there if not is_over(wait)]:
                self.waits[key] = kept
            self.used -= EACH * (len(there) - len(kept))


def _size(key: str, value: bytes) -> int:
    return EACH + len(key) + len(value)


class NoRoom(Exception):
    """The store is full."""


CALLS: dict[str, Callable[[KeyValues, StoreCall, Tell], Iterable[bytes] | None]] = {
    "set": KeyValues._set,
    "get": KeyValues._get,
    "add": KeyValues._add,
    "append": KeyValues._append,
    "compare_set": KeyValues._compare_set,
    "delete_key": KeyValues._delete,
    "num_keys": KeyValues._count,
    "check": KeyValues._check,
    "wait": KeyValues._wait,
    "wait_no_more": KeyValues._wait_no_more,
}
