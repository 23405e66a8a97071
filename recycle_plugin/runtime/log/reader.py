"""Reads a folder of logs: which steps can be replayed from it, and what was logged of them.

The streams of a folder are read together: what counts in one may be written in any of them, since generations are those
of the whole job. A step's data counts

* if the step is *committed*: a stream has a Commit of it that counts itself;
* and if it is valid from the latest generation required by a Void of the steps after an earlier one, or by the Commit
  of this or an earlier step.

So records of rejected and abandoned attempts are never returned.

Commits, Voids and Gaps are read at once, everything else on request, each with its CRC checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.step_log import CountsFrom
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.log.records import Commit, DatumRecord, Gap, IndexEntry, StepRecord, Stream, Void
from recycle_plugin.runtime.log.segment import NAME, Damaged, Found, LogFault, Segment, called, files, load


class KeptDatum(NamedTuple):
    """A datum of a log: its record, and the bytes of its tensors, each in its own memory."""

    record: DatumRecord
    tensors: tuple[bytearray, ...]


class KeptStep(NamedTuple):
    """A stream's record of a step."""

    stream: Stream
    record: StepRecord


class _Place(NamedTuple):
    segment: Segment
    entry: IndexEntry


class NotKept(RecycleError):
    """A log does not have what was requested; the message tells why."""


class LogReader:
    """The logs of the run ``run_id`` in ``folder``, and those of other workers in the folders ``also``.

    ``before``: a reader of the same logs, which nobody uses any more; only what has come since is read. Read-only:
    ``segments``, by stream and in order; ``gaps`` of each stream; ``faults``: what is unreadable in these and in any
    other segment of the folder. Raises nothing for a damaged log.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        before: LogReader | None = None,
        also: Iterable[Path] = (),
    ) -> None:
        self.folder, self.run_id = folder, run_id
        known = before.segments.values() if before is not None else ()
        self._known = {segment.path: segment for segments in known for segment in segments}
        self.faults: list[LogFault] = []
        self._unreadable: list[LogFault] = []  # those of Commits and Gaps
        self.segments: dict[WorkerId, list[Segment]] = {}
        self.gaps: dict[WorkerId, tuple[Gap, ...]] = {}
        self._data: dict[int, dict[Datum, list[_Place]]] = {}
        self._steps: dict[int, dict[WorkerId, list[_Place]]] = {}
        self._commits: dict[int, dict[WorkerId, Commit]] = {}
        self._voids: list[Void] = []
        there: dict[WorkerId, dict[int, Path]] = {}
        for each in (*also, folder):
            there |= files(each)
        for worker, paths in there.items():
            self._open(worker, paths)
        if before is not None and self._goes_on_from(before):
            self._data, self._steps, self._commits = before._data, before._steps, before._commits
            self._voids, self._unreadable, self.gaps = before._voids, before._unreadable, before.gaps
        else:
            self._known = {}
        for worker, segments in self.segments.items():
            self._read(worker, segments)
        self.faults += self._unreadable
        commits = (each for of in self._commits.values() for each in of.values())
        self._since = CountsFrom(
            ((each.after, each.valid_from) for each in self._voids), ((each.step, each.valid_from) for each in commits)
        )

    def missing(self, wanted: Iterable[Datum]) -> dict[Datum, str]:
        """Return each datum of ``wanted`` that is not here, and why."""
        found = {}
        for datum in wanted:
            if not self._counting(datum.step):
                given_up = datum.step in self._commits
                found[datum] = (
                    f"the commit of step {datum.step} was taken back"
                    if given_up
                    else f"step {datum.step} is not committed"
                )
            elif not self._counted(datum.step, self._data.get(datum.step, {}).get(datum, ())):
                gaps = [gap for of in self.gaps.values() for gap in of if gap.covers(datum.step)]
                found[datum] = "; ".join([f"nobody has kept the {datum}", *map(str, gaps)])
        return found

    # --- what there is -------------------------------------------------------------------------------

    def get(self, datum: Datum) -> KeptDatum:
        """Return the datum, its CRC checked. Raises NotKept if none here counts, Damaged if no copy is readable."""
        if why := self.missing([datum]).get(datum):
            raise NotKept(why)
        fault: Damaged | None = None
        for place in reversed(self._counted(datum.step, self._data[datum.step][datum])):
            try:
                record, tensors = place.segment.read(place.entry)
            except Damaged as error:
                fault = fault or error
                continue
            assert isinstance(record, DatumRecord), f"the index says {place.entry.what}"
            return KeptDatum(record, tensors)
        assert fault is not None, f"the {datum} is somewhere"
        raise fault

    def step_records(self, step: int) -> list[KeptStep]:
        """Return each stream's last readable record of ``step`` that counts; unreadable ones become faults."""
        found = []
        for places in self._steps.get(step, {}).values() if self._counting(step) else ():
            for place in self._counted(step, places)[-1:]:
                try:
                    record, _ = place.segment.read(place.entry)
                except Damaged as error:
                    self.faults.append(error.fault)
                    continue
                assert isinstance(record, StepRecord), f"the index says {place.entry.what}"
                found.append(KeptStep(place.segment.stream, record))
        return found

    def counts_from(self, step: int) -> int:
        """Return the generation from which data of ``step`` has to be valid to count."""
        return self._since.of(step)

    def incomplete(self, stage: int) -> list[str]:
        """Return, in words, the signs that logged data of ``stage`` is lost; [] if there are none."""
        of = {worker for worker, segments in self.segments.items() if segments[0].stream.seat.stage == stage}
        if not of:
            return [f"no log of stage {stage} is in {self.folder}"]
        signs = []
        for fault in self.faults:
            match = NAME.fullmatch(fault.file.name)
            worker = WorkerId(int(match[1]), int(match[2])) if match else None
            if worker in of or worker not in self.segments:
                signs.append(str(fault))
        return signs

    # --- which of it counts --------------------------------------------------------------------------

    def _counting(self, step: int) -> dict[WorkerId, Commit]:
        """Return the commits of a step that were not voided."""
        since = self._since.of(step)
        return {worker: each for worker, each in self._commits.get(step, {}).items() if each.valid_from >= since}

    def _counted(self, step: int, places: Iterable[_Place]) -> list[_Place]:
        """Return the places of the data that counts of a step, the latest last."""
        since = self._since.of(step)
        return sorted(
            (each for each in places if each.entry.valid_from >= since), key=lambda each: each.entry.valid_from
        )

    # --- reading -------------------------------------------------------------------------------------

    def _open(self, worker: WorkerId, paths: dict[int, Path]) -> None:
        there, segments, others = [], [], []
        for sequence, path in paths.items():
            try:
                segment = load(path, self._known.get(path))
            except Damaged as error:
                if path.exists():  # else it was just deleted
                    there.append(sequence)
                    self.faults.append(error.fault)
                continue
            if segment.stream.run_id != self.run_id:
                others.append(segment)
                continue
            there.append(sequence)
            segments.append(segment)
            self.faults += segment.faults
            if not segment.sealed and not segment.faults and sequence < max(paths):
                self._fault(path, "has no index, expected one, since a later segment is there", segment.size)
        for last, following in pairwise(there):
            if following > last + 1:
                path, until = paths[last].parent / called(worker, last + 1), called(worker, following - 1)
                up_to = f" (and so are all up to {until})" * (following > last + 2)
                self._fault(path, f"is missing{up_to}, expected behind {called(worker, last)}")
        if segments:
            self.segments[worker] = segments
        for segment in others:
            place = segment.head.sequence
            if not there or there[0] < place < there[-1]:  # else the folder was used before, or again later
                self._fault(segment.path, f"is of run {segment.stream.run_id!r}, expected {self.run_id!r}")

    def _goes_on_from(self, before: LogReader) -> bool:
        """Return whether all data that ``before`` has indexed is still there, so that only later data has to be
        indexed.
        """
        there = {segment.path: segment for segments in self.segments.values() for segment in segments}
        return self.run_id == before.run_id and all(
            path in there
            and there[path].seed == known.seed
            and there[path].entries[: len(known.entries)][-1:] == known.entries[-1:]
            for path, known in self._known.items()
        )

    def _read(self, worker: WorkerId, segments: Sequence[Segment]) -> None:
        """Index the records of a stream that are not indexed yet."""
        gaps = [*self.gaps.get(worker, ())]
        for segment in segments:
            small = []
            indexed = self._known.get(segment.path)
            for place in segment.entries[len(indexed.entries) if indexed is not None else 0 :]:
                if place.what == "StepRecord":
                    of_step = self._steps.setdefault(place.step, {})
                    of_step.setdefault(worker, []).append(_Place(segment, place))
                elif place.datum is not None:
                    of = self._data.setdefault(place.step, {})
                    of.setdefault(place.datum, []).append(_Place(segment, place))
                elif place.what == "Void":  # the index has all of it, so it is known even if the record is damaged
                    self._voids.append(Void(place.step, place.valid_from))
                else:
                    small.append(place)
            for found in segment.each(small):
                match found:
                    case LogFault():
                        self._unreadable.append(found)
                    case Found(Commit() as commit, _):
                        known = self._commits.setdefault(commit.step, {}).get(worker, commit)
                        self._commits[commit.step][worker] = max(known, commit, key=lambda each: each.valid_from)
                    case Found(Gap() as gap, _):
                        gaps = [each for each in gaps if each.last is not None or gap.last is None] + [gap]
        self.gaps[worker] = tuple(gaps)

    def _fault(self, path: Path, what: str, offset: int = 0) -> None:
        self.faults.append(LogFault(path, offset, what))
