"""The collectives of a worker that comes back: before its first step it runs alone, and has what its predecessor got;
once it is let in, groups have it again.  Two or three real processes over Gloo.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recycle_plugin.core.messages.from_workers import ALWAYS, Post
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.gloo import GlooLink
from recycle_plugin.runtime.collectives.link import Handle
from recycle_plugin.runtime.collectives.startup import MOST, OF_MODELS, Startup
from tests.support.coordinator import generation
from tests.support.results import DIED, result_of
from tests.support.scenario import LONG_S, RANKS, Job, Script

LARGE = MOST // 4 + 1  # numbers of 4 bytes


# --- before the first step ----------------------------------------------------------------------------


def begins(script: Script) -> list[Any]:
    """All that a script can ask for, of numbers that are drawn anew whenever it runs."""
    rank, drawn = script.rank, float(secrets.randbelow(1 << 20))
    pair, own = dist.new_group([0, 2]), [dist.new_group([one]) for one in range(RANKS)][rank]
    seed, objects, mine = torch.tensor([drawn]), [drawn if rank == 0 else None, "x" * secrets.randbelow(99)], {}
    dist.broadcast(seed, 0)
    dist.broadcast_object_list(objects, 0)
    everybodys = [None] * RANKS
    dist.all_gather_object(everybodys, {rank: drawn})
    part, parts = torch.zeros(2), [torch.full((2,), drawn + one) for one in range(RANKS)]
    dist.scatter(part, parts if rank == 1 else None, 1)
    given = [None]
    texts = [f"{one} {drawn} {'x' * secrets.randbelow(99)}" for one in range(RANKS)]
    dist.scatter_object_list(given, texts if rank == 2 else None, 2)
    total, mean, gathered = torch.tensor([drawn]), torch.tensor([drawn]), torch.zeros(RANKS)
    dist.reduce(total, 1)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.all_gather_into_tensor(gathered, seed + drawn)
    later = torch.tensor([drawn])
    work = dist.all_reduce(later, dist.ReduceOp.MAX, async_op=True)
    dist.barrier()
    received, source = torch.zeros(1), None
    if rank == 0:
        source = [dist.recv(received, None), dist.recv(received, None)]
    else:
        dist.send(torch.tensor([drawn]), 0)
    if rank == 2:
        dist.all_reduce(torch.ones(1), group=pair)
    elif rank == 0:
        dist.all_reduce(received, group=pair)
    alone = torch.tensor([7.0])
    dist.all_reduce(alone, group=own)
    work.wait()
    script.session.hooks.startup.begin_training([])
    mine["reduced"] = total.item() if rank == 1 else None  # elsewhere a script has its own
    kept = [seed.item(), objects, everybodys, part.tolist(), given, mine, mean.item(), gathered.tolist(), later.item()]
    return [*kept, received.item(), source, alone.item()]


def test_a_newcomer_has_what_its_predecessor_got_and_meets_nobody(job):
    """Whichever rank comes back, rank 0 too, which drew the seed, and more than once."""
    first = job.run(begins)
    assert all(isinstance(each, list) for each in first), first
    assert first[0][0] == first[1][0] == first[2][0] and sorted(first[0][10]) == [1, 2]
    for rank in (0, 1, 2, 0):
        assert job.alone(begins, rank) == first[rank]


def other_order(script: Script) -> Any:
    held = torch.zeros(2)
    if script.session.view.newcomer:
        dist.broadcast(held, 0)
    dist.all_reduce(held)
    script.session.hooks.startup.begin_training([])


def other_shape(script: Script) -> Any:
    dist.all_reduce(torch.zeros(3 if script.session.view.newcomer else 2))
    script.session.hooks.startup.begin_training([])


def one_more(script: Script) -> Any:
    for _ in range(2 if script.session.view.newcomer else 1):
        dist.all_reduce(torch.zeros(2))
    script.session.hooks.startup.begin_training([])


def much(script: Script) -> Any:
    dist.all_reduce(torch.full((LARGE,), script.rank + 1.0))
    script.session.hooks.startup.begin_training([])


def under_way(script: Script) -> Any:
    held = torch.zeros(1)
    dist.barrier()
    if script.rank == 0:
        work = dist.irecv(held, 1)
        script.session.hooks.startup.begin_training([])
        script.say("asked")
        work.wait()
    elif script.rank == 1:
        script.hear("asked", 0)
        dist.send(held, 0)
        script.session.hooks.startup.begin_training([])


def between_steps(script: Script) -> Any:
    script.session.hooks.startup.begin_training([])
    dist.barrier(dist.new_group([script.rank]))
    dist.barrier()


def not_trained(script: Script) -> Any:
    dist.broadcast(torch.nn.Parameter(torch.zeros(2)), 0)
    script.session.hooks.startup.begin_training([torch.nn.Parameter(torch.zeros(2))])


REFUSED = {
    other_order: "torch.distributed.broadcast over ranks 0, 1, 2, called at {line}, on float32[2]: in the same place "
    "this worker's predecessor called all_reduce on float32[2], at {file}",
    other_shape: "on float32[3]: in the same place this worker's predecessor called all_reduce on float32[2]",
    one_more: "this worker's predecessor did not call it before its first step, or there was no room",
    much: "gave this worker's predecessor more than is kept for a newcomer (4 MiB in all), and the newcomer has",
    under_way: "torch.distributed.recv over ranks 0, 1, 2, called at {line}, has a result that a newcomer can't get: "
    "it was under way when training began",
    between_steps: "torch.distributed.barrier over ranks 0, 1, 2, called at {line}, between steps that were over "
    "before this worker came back: its result is not kept; call it before the first step, leave it out",
    not_trained: "has filled a parameter of shape (2,) that is not trained",
}


@pytest.mark.parametrize("scenario", REFUSED, ids=lambda scenario: scenario.__name__)
def test_what_cant_be_had_again_is_refused_by_its_line(job, scenario):
    assert job.run(scenario) == [None] * RANKS
    said = job.alone(scenario, 0)
    file, first = scenario.__code__.co_filename, scenario.__code__.co_firstlineno
    lines = [f"{file}:{line}" for line in range(first, first + 9)]
    expected = [REFUSED[scenario].format(line=line, file=f"{file}:") for line in lines]
    assert any(one in said for one in expected) and any(line in said for line in lines), said
    assert said.startswith("RecycleError: torch.distributed.")
    assert said.endswith(
        'let on_join(callback, state) bring a newcomer what it gives, or set recycle.rejoin to "never"'
    )


def test_without_a_record_nothing_is_made_up(job):
    """The predecessor was lost before it trained."""
    assert "this worker's predecessor did not call it before its first step" in job.alone(one_more, 1)


def builds(script: Script) -> list[float]:
    """A model whose first member draws it; what is trained comes with the state, and what is frozen is had here."""
    newcomer, drawn = script.session.view.newcomer, float(secrets.randbelow(1 << 20))
    torch.manual_seed(3)
    tied = torch.nn.Parameter(torch.full((LARGE,), drawn))
    weight = torch.nn.Parameter(torch.full((LARGE,), drawn))
    frozen, small = torch.randn(LARGE), torch.full((2,), drawn)
    dist.broadcast(tied, 0)
    with script.session.hooks.startup.building([weight]):
        dist.broadcast(weight.data.view(torch.uint8), 0)
        dist.broadcast(frozen, 0)
        dist.broadcast(small, 0)
    late = torch.tensor([drawn])
    dist.broadcast(late, 0)
    script.session.hooks.startup.begin_training([weight, tied])
    assert not newcomer or tied[0] == weight[0] == drawn  # its own, until the state comes
    return [frozen.sum().item(), small.tolist(), late.item()]


def test_a_model_of_any_size_leaves_room_for_the_scripts_own(job):
    first = job.run(builds)
    assert isinstance(first[0], list), first
    for rank in (0, 2):
        assert job.alone(builds, rank) == first[rank]


def many(script: Script) -> Any:
    """First more than there is room for, of small ones, while a model is built; then one of the script's."""
    startup = script.session.hooks.startup
    with startup.building([]):
        for _ in range(24):
            dist.broadcast(torch.full((OF_MODELS // 64,), script.rank + 1.0), 1)
    late = torch.tensor([float(secrets.randbelow(1 << 20))])
    dist.broadcast(late, 1)
    startup.begin_training([])
    return late.item()


def test_what_is_kept_is_bounded(job):
    """Rank 1 has made for itself what there was no room for."""
    first = job.run(many)
    coordinator, sizes = job.coordinator, []

    def heard() -> bool:
        posts = [one for one in coordinator.heard if isinstance(one, Post) and one.generation == ALWAYS]
        sizes[:] = [len(post.value) for post in posts]
        return len(sizes) == RANKS

    with coordinator.news:
        assert coordinator.news.wait_for(heard, LONG_S), sizes
    assert len({*first}) == 1 and all(OF_MODELS / 2 < size < 2 * OF_MODELS for size in sizes)
    assert job.alone(many, 1) == first[1]
    assert "more than is kept for a newcomer" in job.alone(many, 0)


# --- once it is let in ----------------------------------------------------------------------------------


def begun(job: Job, stay: Callable, come: Callable) -> tuple[list[Any], Any, Script]:
    """Rank 2 dies in ``stay``, and its next process, in ``come``, is let in by the two others, of whom ``stay`` has
    said that they are about to: where the others' results come, and the newcomer's, and what hears what they say.
    """
    members = [job.start(stay, rank) for rank in range(RANKS)]
    assert result_of(members[2]) == DIED
    job.coordinator.tell(generation(1, [0, 1]))
    newcomer, store = job.start(come, 2, newcomer=True), Script(9, None, job.store)
    store.hear("is about to let it in", 0, 1)
    store.hear("has come", 2)
    job.coordinator.tell(generation(2, [0, 1, 2], from_step=5))
    return members[:2], newcomer, store


def goes_on(script: Script) -> list[Any]:
    """What all do from there on, the newcomer too; it takes the others' counts over in the one or the other call."""
    total, everybodys = script.value(), [torch.zeros(1) for _ in range(RANKS)]
    dist.all_reduce(total)
    dist.all_gather(everybodys, script.value())
    objects = [{"step": script.rank}]
    dist.broadcast_object_list(objects, 2)
    message = torch.zeros(1)
    match script.rank:
        case 2:
            dist.send(torch.tensor([5.0]), 0)
            dist.recv(message, 1)
        case 1:
            dist.send(torch.tensor([6.0]), 2)
        case 0:
            assert dist.recv(message) == 2
    everybody = [each.item() for each in everybodys]
    return [total.item(), everybody, objects, message.item(), dist.group.WORLD.live_position()]


def stays(script: Script) -> Any:
    """Ranks 0 and 1 call, and begin to call, more than rank 2, which dies, and comes back."""
    rank = script.rank
    dist.barrier()
    if rank:
        dist.send(script.value(), 0)
    else:
        for source in (1, 2):
            dist.recv(torch.zeros(1), source)
    script.session.hooks.startup.begin_training([])
    if rank == 2:
        script.die()
    script.recover()
    without = script.value()
    for _ in range(3):
        dist.all_reduce(without)
    awaited, message, start = script.value(), torch.zeros(1), GlooLink.start
    GlooLink.start = lambda self, operation: Handle("what is under way for long")
    works = [dist.all_reduce(awaited, dist.ReduceOp.AVG, async_op=True)]
    GlooLink.start = start
    works += [dist.irecv(message, 0, tag=5)] if rank else []
    script.say("is about to let it in")
    script.recover()
    found = goes_on(script)
    works += [] if rank else [dist.isend(torch.tensor([8.0]), 1, tag=5)]
    for work in works:
        work.wait()
    if rank == 1:
        script.say("has all")
        script.die()
    return [without.item(), awaited.item(), *found, *after_another(script)]


def comes_back(script: Script) -> Any:
    dist.barrier()
    dist.send(script.value(), 0)
    script.session.hooks.startup.begin_training([])
    script.say("has come")
    script.recover()
    found = [*goes_on(script), *after_another(script)]
    gaps = [said.after for said in dist.group.WORLD._flight._outcomes._own.values() if said.after]
    return [*found, gaps]


def after_another(script: Script) -> list[float]:
    """The loss of rank 1 finds rank 0 and the newcomer at the same number of the same sequence."""
    script.hear("has all", 1)
    script.recover()
    totals = [script.value(), script.value()]
    for total in totals:
        dist.all_reduce(total)
    return [total.item() for total in totals]


def test_who_is_let_in_counts_on_where_the_others_are(job):
    """What they had begun before goes on without it, over a link of their own."""
    members, newcomer, store = begun(job, stays, comes_back)
    store.hear("has all", 1)
    job.started[1].join(LONG_S)
    job.coordinator.tell(generation(3, [0, 2]))
    everybody = [6.0, [1.0, 2.0, 3.0], [{"step": 2}]]
    assert result_of(members[0]) == [12.0, 1.5, *everybody, 5.0, (0, 3), 4.0, 4.0]
    assert result_of(newcomer) == [*everybody, 6.0, (2, 3), 4.0, 4.0, []]


def is_refused(script: Script) -> Any:
    """Rank 0 is refused before rank 2 is let in, and rank 1 makes the same call behind that."""
    script.session.hooks.startup.begin_training([])
    if script.rank == 2:
        script.die()
    script.recover()
    said = gathers(script) if script.rank == 0 else ""
    script.say("is about to let it in")
    script.recover()
    said = said or gathers(script)
    dist.all_reduce(total := script.value(2))
    return said, total.tolist()


def gathers(script: Script) -> str:
    try:
        dist.all_gather([script.value() for _ in range(RANKS)], script.value())
    except RecycleError as error:
        return str(error)
    return ""


def sums(script: Script) -> list[float]:
    script.session.hooks.startup.begin_training([])
    script.say("has come")
    script.recover()
    dist.all_reduce(total := script.value(2))
    return total.tolist()


def test_a_call_that_is_refused_before_somebody_is_let_in_is_no_other_behind_that(job):
    members, newcomer, _ = begun(job, is_refused, sums)
    (early, total), (late, same) = map(result_of, members)
    assert "needs every member, and rank 2 is lost" in early
    assert "all_gather was over on rank 0 but not on rank 1" in late
    assert total == same == result_of(newcomer) == [6.0, 6.0]


def receives(script: Script) -> Any:
    """Rank 1 has asked for a message before rank 2 is let in, and rank 0 sends it after that."""
    script.session.hooks.startup.begin_training([])
    if script.rank == 2:
        script.die()
    script.recover()
    held = torch.zeros(1)
    work = dist.irecv(held, 0) if script.rank else None
    script.say("is about to let it in")
    script.recover()
    work.wait() if work else dist.send(torch.tensor([8.0]), 1)
    script.say("has all")
    script.hear("has all", 0, 1)
    return held.item()


def calls_nothing(script: Script) -> None:
    script.session.hooks.startup.begin_training([])
    script.say("has come")
    script.recover()
    script.hear("has all", 0, 1)


def test_two_meet_though_the_newcomer_calls_nothing(job):
    members, newcomer, _ = begun(job, receives, calls_nothing)
    assert [result_of(one) for one in (*members, newcomer)] == [0.0, 8.0, None]


# --- what is kept beside collectives ---------------------------------------------------------------------


def startup_of(coordinator, newcomer: bool) -> Startup:
    if newcomer:  # its predecessor's record has come to the coordinator long before
        coordinator.hear(Post)
    session = coordinator.session(0)
    session.view.newcomer = newcomer
    return Startup(session)


def test_what_lies_where_a_parameter_was_before_the_framework_moved_it_is_kept(coordinator):
    """ZeRO 3 gives a parameter's memory back, and torch may give it to the next tensor."""
    weight = torch.nn.Parameter(torch.ones(8))
    startup = startup_of(coordinator, newcomer=False)
    with startup.building([weight]):
        assert (arrives := startup.keep("all", "broadcast", [weight.data.view(torch.uint8)], True)) and arrives.arrives
        former = weight.data
        weight.data = torch.empty(0)
        kept = startup.keep("all", "all_gather_into_tensor", [former], True)
    assert kept is not None and not kept.arrives
    startup.fill(kept, [former], None, None)
    assert kept.values == [former]


def test_what_was_loaded_is_remembered_if_it_can_be(coordinator):
    """Not what is too large or can't be pickled, and nothing after the first step."""
    first = startup_of(coordinator, newcomer=False)
    first.remember("small", {"epoch": 3, "weight": torch.ones(2)})
    first.remember("large", b"x" * MOST)
    first.remember("odd", lambda: 0)
    first.begin_training([])
    first.remember("late", 1)
    newcomer = startup_of(coordinator, newcomer=True)
    assert [name for name in ("small", "large", "odd", "late") if newcomer.left_out(name)] == ["late"]
    assert [name for name in ("small", "large", "odd", "late") if newcomer.remembered(name)] == ["small"]
    assert newcomer.recall("small")["epoch"] == 3
    for what in ("large", "odd", "late"):
        with pytest.raises(RecycleError, match=f"{what}, called at .* something that is not kept for a newcomer"):
            newcomer.recall(what)
    newcomer.begin_training([])
    with pytest.raises(RecycleError, match="small, called at .*, between steps that were over"):
        newcomer.recall("small")
    newcomer.join()
    assert not newcomer.alone and not first.alone


def test_what_a_newcomer_does_not_do_over_again_leaves_no_gap(coordinator):
    held = [torch.ones(1)]
    first = startup_of(coordinator, newcomer=False)
    with first.apart():
        assert first.keep("line", "barrier", [], True) is None
    first.fill(first.keep("line", "all_reduce", held, True), [torch.tensor([5.0])], None, None)
    first.begin_training([])
    newcomer = startup_of(coordinator, newcomer=True)
    assert newcomer.replay("line", "all_reduce", held, [0, 1]).values[0].item() == 5.0


def test_what_has_failed_is_not_had_again(coordinator):
    held = [torch.ones(1)]
    first = startup_of(coordinator, newcomer=False)
    first.fill(first.keep("line", "all_reduce", held, True), held, None, ValueError("odd"))
    first.begin_training([])
    newcomer = startup_of(coordinator, newcomer=True)
    with pytest.raises(RecycleError, match="has a result that a newcomer can't get: it has failed: odd"):
        newcomer.replay("line", "all_reduce", held, [0, 1])


def test_a_newcomer_does_nothing_for_all_before_it_is_a_member(coordinator):
    session = coordinator.session(0)
    assert session.view.is_first
    session.view.newcomer = True
    assert not session.view.is_first
    session.view.adopt(generation(3, [0, 1]))
    assert session.view.is_first
