"""Twelve jobs of all kinds against what they did when they were frozen: each worker's instructions in their order, and
the bits of the losses.

A change that is to leave training alone leaves ``frozen.json`` alone.  One that changes an order or a number on purpose
writes it anew (``--freeze``), and the difference is explained where it is made: beside the code that makes it, and in
the commit's message.

With a failure, each micro-batch's gradient is in each stage's sum of each step once, and losses are those without it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.span import Span, run_again
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.observability.trace import read_traces
from tests.support.cluster import ForkServer, Result
from tests.support.iterators import ends, retired
from tests.support.jobs import BF16, LOSS_TOLERANCE, SQUARE, Shape, apart, faults
from tests.support.launching import launching

# Which weight gradients a step's sums are made of, worked out from a job's traces and events.  What was run is more
# than what counts: a worker's gradients go down with it, and those made with rejected weights are void.
Place = tuple[int, int]  # stage, step


class Books:
    """What all workers have added up so far.

    ``sums``: of which micro-batches' gradients the stage's sum of the step is made, and how often of each.
    """

    def __init__(self) -> None:
        self.sums: dict[Place, Counter[MicroBatch]] = {}
        self._parts: dict[Place, dict[Seat, Counter[MicroBatch]]] = defaultdict(lambda: defaultdict(Counter))
        self._holders: dict[Place, set[Seat]] = defaultdict(set)  # of the sum

    def run(self, span: Span) -> None:
        """The first to end its REDUCE has what all have added up; whoever reduces later takes it from there."""
        seat, instruction = span.seat, span.instruction
        place = instruction.stage, instruction.step
        if instruction.op in (Op.W, Op.B):
            self._parts[place][seat][instruction.micro_batch] += 1
        elif instruction.op is Op.REDUCE:
            self.sums.setdefault(place, sum(self._parts[place].values(), Counter()))
            self._holders[place].add(seat)

    def lose(self, seat: Seat) -> None:
        for place, parts in self._parts.items():
            parts.pop(seat, None)
            self._holders[place].discard(seat)
            if not self._holders[place]:
                self.sums.pop(place, None)

    def void(self, after: int) -> None:
        for place in [place for place in self._parts if place[1] > after]:
            del self._parts[place]
            self._holders.pop(place, None)
            self.sums.pop(place, None)


def counted(result: Result) -> dict[Place, Counter[MicroBatch]]:
    """:attr:`Books.sums` at the end of a job with ``recycle.trace``.

    What happens to the membership holds from the next ``resume`` on: before it all have stopped, and nobody goes on
    before it is said.
    """
    books, happened = Books(), []
    told = [(event["time"], event) for event in result.events if event["event"] in ("lost", "rejected", "resume")]
    ran = [(span.end_us / 1e6, span) for span in read_traces(result.folder / "trace")]
    for _, what in sorted([*told, *ran], key=lambda timed: timed[0]):
        if isinstance(what, Span):
            books.run(what)
        elif what["event"] != "resume":
            happened.append(what)
        else:
            for event in happened:
                books.lose(Seat.parse(event["seat"])) if event["event"] == "lost" else books.void(event["step"])
            happened.clear()
    return books.sums


PATH = Path(__file__).with_name("frozen.json")
STEPS = 6
CLIPPED, EXACT, TIED = "gradient_clipping=1.25", "recycle.exact=true", "model.tied=true"


@dataclass(frozen=True)
class Job:
    """A job, and who dies where in its run with a failure.

    ``iterators``: the script written like Megatron's, with plain iterators, instead of the GPT.
    """

    settings: tuple[str, ...]
    kill: str
    shape: Shape = SQUARE
    iterators: bool = False

    def train(self, server: ForkServer, folder: Path, *kills: str) -> Result:
        with launching(server, folder) as launch:
            if self.iterators:
                script = {
                    "folder": str(folder / "run0"),
                    "faults": kills,
                    "steps": STEPS,
                    "settings": {"report": False, "trace": True},
                }
                run = launch(
                    shape=self.shape, script="tests/jobs/megatron_like.py", RECYCLE_TEST_SCRIPT=json.dumps(script)
                )
            else:
                run = launch(f"steps={STEPS}", "recycle.trace=true", *self.settings, faults(*kills), shape=self.shape)
            return run.ended_well()

    def losses(self, result: Result) -> list[float]:
        if not self.iterators:
            return result.losses
        (losses,) = {tuple(end["losses"]) for end in ends(result, "ends").values()}
        return list(losses)


JOBS = {
    "split": Job((), "kill 0.1 before 1W0.1@3"),
    "fused": Job(("recycle.split_backward=false",), "kill 0.0 after 0B0.0@3"),
    "clipped": Job((CLIPPED,), "kill 1.0 after 0I1.0@3"),
    "clipped, validated": Job((CLIPPED, "recycle.clip=validate"), "kill 1.1 before 1W1.1@3"),
    "exact": Job((EXACT,), "kill 1.1 after 1W1.0@3"),
    "exact, in blocks": Job((EXACT, "recycle.exact=2"), "kill 0.1 before 1W0.2@3", Shape(micro_batches=4)),
    "tied": Job((TIED,), "kill 1.0 before 0W1.1@3"),
    "bf16": Job((BF16,), "kill 0.1 before 1I0.1@3"),
    "bf16, tied": Job((BF16, TIED), "kill 0.0 before 0TIE@3"),
    "plain iterators": Job((), "kill 0.1 before 1W0.1@3", iterators=True),
    "three replicas": Job((), "kill 2.0 before 0F2.1@3", Shape(replicas=3)),
    "four stages, nothing kept": Job(("recycle.keep_bytes=1",), "kill 0.2 before 2W0.1@3", Shape(stages=4)),
}
DEFAULT = ("exact, in blocks", "bf16, tied")


@pytest.fixture(params=[pytest.param(name, marks=() if name in DEFAULT else pytest.mark.all_kills) for name in JOBS])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def trained(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """``trained(name, *kills)``: the result of that job; each is run once."""
    results: dict[tuple[str, ...], Result] = {}

    def run(*case: str) -> Result:
        if case not in results:
            name, *kills = case
            result = results[case] = JOBS[name].train(server, tmp_path_factory.mktemp("frozen"), *kills)
            assert [event["fault"] for event in result.of("fault")] == kills
            assert [event["seat"] for event in result.of("lost")] == [kill.split()[1] for kill in kills]
        return results[case]

    return run


# --- without a failure ------------------------------------------------------------------------------


def machine() -> str:
    """Another one may round sums otherwise.

    The numbers beside the model's name: virtual machines cut the name short.
    """
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    told = dict(map(str.strip, line.partition(":")[::2]) for line in first.splitlines())
    model = " ".join(told.get(key, "?") for key in ("model name", "cpu family", "model"))
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def digests(result: Result) -> dict[str, str]:
    """Of each seat's instructions, in their order. Which backwards are split is measured, so B counts as I, and W not
    at all. Where steps are rejected, of each instruction's last run: how far a stage has got with the step after when
    it hears of the norm is a matter of milliseconds.
    """
    spans = read_traces(result.folder / "trace")
    done: dict[str, list[str]] = {}
    void = run_again(spans) if result.of("rejected") else {}
    for span in spans:
        if span not in void and span.instruction.op is not Op.W:
            one = span.instruction
            done.setdefault(str(span.seat), []).append(str(replace(one, op=Op.I) if one.op is Op.B else one))
    return {
        seat: hashlib.sha256(" ".join(instructions).encode()).hexdigest()[:16]
        for seat, instructions in sorted(done.items())
    }


@pytest.fixture(scope="module")
def frozen(request: pytest.FixtureRequest) -> Iterator[dict[str, dict]]:
    """By job: ``machine``, ``losses`` in hexadecimal, ``instructions`` by seat.

    With ``--freeze`` what a test puts in is written at the end.
    """
    anew = request.config.getoption("--freeze")
    if anew and hasattr(request.config, "workerinput"):
        pytest.fail("--freeze with -n: several processes would write one file; leave -n out")
    jobs = json.loads(PATH.read_text())
    yield jobs
    if anew:
        PATH.write_text(json.dumps({name: jobs[name] for name in JOBS if name in jobs}, indent=1) + "\n")


def test_without_a_failure_the_same_instructions_and_losses(request, trained, frozen, name):
    result = trained(name)
    losses = JOBS[name].losses(result)
    if request.config.getoption("--freeze"):
        frozen[name] = {
            "machine": machine(),
            "losses": [loss.hex() for loss in losses],
            "instructions": digests(result),
        }
    assert digests(result) == frozen[name]["instructions"]
    expected = [float.fromhex(loss) for loss in frozen[name]["losses"]]
    assert losses == (expected if frozen[name]["machine"] == machine() else pytest.approx(expected, abs=LOSS_TOLERANCE))
    assert bool(result.of("rejected")) == (name == "clipped, validated")


def test_all_are_frozen():
    assert list(json.loads(PATH.read_text())) == list(JOBS)


# --- with one ---------------------------------------------------------------------------------------


def wrong(job: Job, result: Result) -> dict[Place, Counter]:
    """Sums that are not of each micro-batch once."""
    shape, found = Topology(job.shape.replicas, job.shape.stages, job.shape.micro_batches), counted(result)
    places = {(stage, step) for stage in range(shape.stages) for step in range(1, STEPS + 1)}
    return {place: found.get(place, Counter()) for place in places if found.get(place) != Counter(shape.batch)}


def test_with_a_failure_each_gradient_counts_once_and_the_losses_are_those_without(trained, name):
    job = JOBS[name]
    result = trained(name, job.kill)
    assert not wrong(job, result) and result.of("committed")[-1]["step"] == STEPS
    losses, expected = job.losses(result), job.losses(trained(name))
    if job.iterators:
        ((first, _),) = retired(result)
        losses, expected = losses[: first - 1], expected[: first - 1]  # of the same data
    found = max(apart(one, other) for one, other in zip(losses, expected, strict=True))
    print(f"{name}: losses differ by {found:.2g}")
    assert found <= (0 if EXACT in job.settings else LOSS_TOLERANCE)


def test_the_count_would_show_what_counts_twice_or_not_at_all(trained):
    """As if what the lost worker had added up counted, which others have made again; and as if one micro-batch were
    nobody's.
    """
    job = JOBS[DEFAULT[0]]
    result = trained(DEFAULT[0], job.kill)
    unheard = replace(result, events=[event for event in result.events if event["event"] != "lost"])
    assert wrong(job, unheard) == {
        (1, 3): Counter(Topology(2, 2, 4).batch) + Counter(map(MicroBatch.parse, ("0.0", "0.1")))
    }
    fewer = replace(job, shape=replace(job.shape, micro_batches=5))
    assert len(wrong(fewer, result)) == 2 * STEPS


def test_the_books():
    """A sum is what all have added up when the first has it; it stays as long as somebody has it, and is void as what
    it is made of is.
    """
    books = Books()

    def ran(*texts: str) -> Counter | None:
        """Seat and instruction; the sum of the last one's stage and step."""
        for text in texts:
            seat, instruction = text.split()
            books.run(Span(Seat.parse(seat), Instruction.parse(instruction), 0, 0))
        return books.sums.get((0, Instruction.parse(instruction).step))

    def of(*texts: str) -> Counter:
        return Counter(map(MicroBatch.parse, texts))

    assert ran("0.0 0W0.0@1", "1.0 0W1.0@1", "2.0 0B2.0@1", "0.0 0REDUCE@1") == of("0.0", "1.0", "2.0")
    books.lose(Seat(2, 0))
    assert ran("1.0 0REDUCE@1") == of("0.0", "1.0", "2.0")
    assert ran("0.0 0W0.0@2", "1.0 0W1.0@2", "0.0 0W0.0@3", "1.0 0REDUCE@2", "1.0 0REDUCE@3") == of("0.0")
    books.lose(Seat(1, 0))
    assert books.sums.keys() == {(0, 1)} and ran("0.0 0W1.0@2", "0.0 0REDUCE@2") == of("0.0", "1.0")
    books.void(1)
    assert books.sums.keys() == {(0, 1)} and ran("0.0 0W0.0@2", "0.0 0REDUCE@2") == of("0.0")
