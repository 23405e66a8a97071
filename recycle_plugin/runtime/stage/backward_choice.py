"""Which backwards of a stage are split: those whose halves gain something over a backward in one piece.

I sends the input's gradient early, and W fills a wait. But halves cost the host more for each layer. If W comes right
after I, they gain nothing. They gain nothing either if a forward with a whole backward takes no longer than a split
forward with I alone, as with small layers, whose time is the host's. So a stage runs some steps each way, and takes
the shorter way from then on.

All backwards of a measured step are made one way, and only if its W come in the order of its I. So a sum has one order
of additions, and the same bits, whatever was measured. A step that a failure interrupts is an exception: its program
may have the W in another order, as its sum has another order anyway.
"""

from __future__ import annotations

from statistics import median

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.loop_ports import StepProgram

Key = tuple[int, MicroBatch]  # step, micro-batch
WARM_UP = 2  # programs before the first that is measured
SAMPLES = 12  # micro-batches of each way
AGAIN = 1000  # programs from one measurement to the next: batches may change


class BackwardChoice:
    """The choice between split and whole backwards on one stage. ``measuring``: :meth:`ran` wants this program's spans.
    One thread's.
    """

    def __init__(self) -> None:
        self.measuring = False
        self._way, self._pairs = False, frozenset[MicroBatch]()  # of this program: all are whole; those that are anyway
        self._chosen = False  # whole, by the last measurement
        self._wait: float = WARM_UP  # programs
        self._forwards: dict[Key, int] = {}  # microseconds
        self._took: dict[bool, list[int]] = {False: [], True: []}  # microseconds of F and I, by whether it was whole
        self._whole: set[Key] = set()  # backwards that were
        self._unnamed: set[Key] = set()  # of these, those whose I has not been named yet

    def begin(self, program: StepProgram) -> None:
        """Choose for the forwards of ``program``."""
        step, in_turn = program.step, program.in_turn
        self.measuring = False
        if step <= 0:  # an evaluation
            return
        self._whole = {key for key in self._whole if key[0] >= step}
        self._unnamed &= self._whole
        self._forwards.clear()
        self._wait -= 1
        self.measuring = in_turn and self._wait < 0
        if self.measuring:
            self._way, self._pairs = len(self._took[True]) < len(self._took[False]), frozenset()
        else:
            self._way, self._pairs = in_turn and self._chosen, program.back_to_back

    def whole(self, micro_batch: MicroBatch) -> bool:
        """Return whether the backward of a forward that runs now is to be whole."""
        return self._way or micro_batch in self._pairs

    def keep_apart(self) -> None:
        """Have no measurement choose: on this stage both ways add uses of a parameter in different orders. Only a split
        backward shows that: uses that begin after the choice are found by the next measurement.
        """
        self.measuring, self._chosen, self._wait = False, False, float("inf")

    def runs(self, key: Key, whole: bool) -> None:
        """Record that an I runs, which computes all gradients if it is ``whole``."""
        (self._whole.add if whole else self._whole.discard)(key)
        (self._unnamed.add if whole else self._unnamed.discard)(key)

    def ran(self, span: Span) -> None:
        """Take the time of an instruction, while ``measuring``; choose once there are enough."""
        one, took = span.instruction, span.end_us - span.start_us
        if one.op is Op.F:
            self._forwards[one.step, one.works_on] = took
        elif one.op is Op.I and (key := (one.step, one.works_on)) in self._forwards:
            self._took[key in self._whole].append(self._forwards.pop(key) + took)
            if min(map(len, self._took.values())) >= SAMPLES:
                self._chosen = median(self._took[True]) <= median(self._took[False])
                self._took = {False: [], True: []}
                self.measuring, self._wait = False, AGAIN

    def named(self, span: Span) -> Span | None:
        """Return ``span`` as what has run: an I that computed all gradients is a B, and its W, which had nothing left
        to do, is None.
        """
        one = span.instruction
        if one.micro_batch is None or (key := (one.step, one.micro_batch)) not in self._whole:
            return span
        if one.op is Op.I and key in self._unnamed:
            self._unnamed.discard(key)
            return span._replace(instruction=Instruction(Op.B, one.stage, one.micro_batch, one.step))
        return None if one.op is Op.W else span
