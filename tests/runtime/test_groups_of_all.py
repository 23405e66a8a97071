"""All groups that a script makes are followed over a loss, however it asks for them, or refused when it does; four real
processes over Gloo.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from recycle_plugin.errors import RecycleError
from tests.support.results import DIED
from tests.support.scenario import Script, run

RANKS, LOST = 4, 3


def groups_of(rank: int) -> dict[str, Any]:
    """As Megatron-LM and others make them: of Gloo by name, of parts, and of meshes."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    named = dist.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"a": "gloo", "b": ("gloo", None)}
    )
    return {
        "new_group": dist.new_group(range(4), backend="gloo"),
        "pairs": dist.new_subgroups(2)[0],
        "enumerated": dist.new_subgroups_by_enumeration([[0, 2], [1, 3]], backend="gloo")[0],
        "mesh": mesh.get_group("b"),
        "by name": named.get_group("b"),
        "other name": named.get_group("a"),
    }


def all_followed(script: Script) -> dict[str, Any]:
    """Rank 3 dies; in each group the others are counted, which those do who are with it too."""
    groups = groups_of(script.rank)
    backends = {dist.get_backend(group) for group in groups.values()}
    for group in groups.values():
        dist.barrier(group)
    if script.rank == LOST:
        script.die()
    found = {}
    for name, group in groups.items():
        counted = script.value().fill_(1)
        dist.all_reduce(counted, group=group)
        found[name] = int(counted)
    assert backends == {"recycle"}, backends
    return found


def test_all_groups_go_on_without_a_lost_member():
    *live, died = run(all_followed, RANKS, loses=True)
    assert died == DIED
    for rank, found in enumerate(live):
        assert found == {
            "new_group": 3,
            "pairs": 1 if rank == 2 else 2,
            "enumerated": 1 if rank == 1 else 2,
            "mesh": 1 if rank == 2 else 2,
            "by name": 1 if rank == 2 else 2,
            "other name": 1 if rank == 1 else 2,
        }, rank


REFUSED = {
    "another backend": (lambda: dist.new_group([0, 1], backend="ucc"), "torch.distributed.new_group over ucc, called"),
    "one of several": (lambda: dist.new_group(backend="cpu:gloo,cuda:ucc"), "new_group over cpu:gloo,cuda:ucc, called"),
    "a mesh's": (
        lambda: dist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",), backend_override={"a": "ucc"}),
        "torch.distributed.new_group over ucc, called at ",
    ),
    "split": (lambda: dist.split_group(None, [[0], [1]]), "torch.distributed.split_group over ranks 0, 1, called at "),
    "shrunk": (lambda: dist.shrink_group([1]), "torch.distributed.shrink_group over ranks 0, 1, called at "),
}


def asked(script: Script) -> dict[str, str]:
    found = {}
    for name, (ask, _) in REFUSED.items():
        try:
            found[name] = repr(ask())
        except RecycleError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def answers() -> list[dict[str, str]]:
    return run(asked, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_followed_is_refused_when_it_is_asked_for(answers, name):
    for found in answers:
        assert REFUSED[name][1] in found[name] and "\n" not in found[name], found[name]


def mesh_first(script: Script) -> str:
    """torch makes the default group for a mesh, where there is none."""
    return dist.get_backend(dist.init_device_mesh("cpu", (2,)).get_group())


def test_a_mesh_makes_the_first_group_too():
    assert run(mesh_first, 2, first=False) == ["recycle"] * 2
