"""What a worker says of the time that it has computed for."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.stopwatch import Stopwatch

OWN, REST = "0F0.0@1 0F0.1@1 0I0.0@1 0REDUCE@1", "0F0.1@1 0F1.0@1 0F0.0@1 0REDUCE@1"


def program(text: str, resumed: bool = False) -> StepProgram:
    return StepProgram(1, tuple(map(Instruction.parse, text.split())), resumed=resumed)


class Clock:
    """The time at which a step ends, and what was waited by then."""

    def now_us(self) -> int:
        return self.now

    def waited_us(self) -> int:
        return self.waited


CLOCK = Clock()


def timed() -> Stopwatch:
    return Stopwatch(CostModel.uniform(1, 7, 7, 7), CLOCK)


def told_of(stopwatch: Stopwatch, step: int, now_us: int, waited_us: int) -> ComputeTime:
    CLOCK.now, CLOCK.waited = now_us, waited_us
    stopwatch.applied(step, None)
    told = stopwatch.time_of(step)
    assert stopwatch.time_of(step) is None  # a step that is reported again has taken nothing more
    return told


def run(stopwatch: Stopwatch, text: str) -> None:
    for one in map(Instruction.parse, text.split()):
        stopwatch.ran(Span(Seat(0, 0), one, 1000, 1010))


def test_another_s_work_and_what_was_done_before_are_again():
    stopwatch = timed()
    stopwatch.begins(program(OWN))
    run(stopwatch, "0F0.0@1")
    stopwatch.begins(program(REST, resumed=True))
    run(stopwatch, REST)
    # of 0F0.0, 0F0.1, 0F1.0, 0F0.0 the last two
    assert told_of(stopwatch, 1, 0, 0) == ComputeTime(spent_us=40, nominal_us=28, again_us=20)


def test_a_step_that_is_applied_twice_is_told_of_twice_and_a_committed_one_is_forgotten():
    stopwatch = timed()
    stopwatch.begins(program(OWN))
    run(stopwatch, "0F0.0@1")
    assert told_of(stopwatch, 1, 0, 0) == ComputeTime(10, 7, 0)
    run(stopwatch, "0F0.0@1 0F0.1@1")
    assert told_of(stopwatch, 1, 0, 0) == ComputeTime(20, 14, 10)
    stopwatch.begins(StepProgram(3, ()))  # so that step 1 is committed
    stopwatch.begins(program(REST))
    run(stopwatch, "0F0.0@1 0F1.0@1")
    assert told_of(stopwatch, 1, 0, 0) == ComputeTime(20, 14, 0)


def test_a_sum_and_what_was_spent_waiting_for_nobody_are_told_by_the_worker_s_own_clock():
    stopwatch = timed()
    told = []
    for step, (now_us, waited_us, sum_us) in enumerate(((1000, 300, 50), (2000, 900, 60), (3500, 1000, 70)), 1):
        stopwatch.begins(StepProgram(step, ()))
        stopwatch.summed(Instruction.parse(f"0REDUCE@{step}"), sum_us)
        told.append(told_of(stopwatch, step, now_us, waited_us))
    assert [(each.exchange_us, each.own_us) for each in told] == [(50, None), (60, 400), (70, 1400)]


def test_of_an_interrupted_step_neither_is_known():
    stopwatch = timed()
    told_of(stopwatch, 1, 1000, 0)
    stopwatch.begins(StepProgram(2, ()))
    stopwatch.begins(StepProgram(2, (), resumed=True))
    stopwatch.summed(Instruction.parse("0REDUCE@2"), 60)
    told = told_of(stopwatch, 2, 2000, 0)
    assert told.exchange_us is None and told.own_us is None
    stopwatch.begins(StepProgram(3, ()))
    stopwatch.summed(Instruction.parse("0REDUCE@3"), 70)
    assert told_of(stopwatch, 3, 2600, 100).own_us == 500
