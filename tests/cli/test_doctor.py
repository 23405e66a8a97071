"""``recycle doctor``: its text in full for two jobs, its figures against the planner's, what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from tests.support.doctor import HEALTHY, MIB, ON, SIZES, data, of_a_run

DOCUMENT = (Path(__file__).parents[2] / "recycle_plugin/docs/planning.md").read_text()


# --- the text --------------------------------------------------------------------------------------------


def test_a_job_that_needs_no_change(doctor) -> None:
    assert doctor({**HEALTHY, "gradient_accumulation_steps": 4}, "--pp 2 --dp 2") == (0, FINE)


def test_a_job_with_much_to_change(doctor, surroundings) -> None:
    surroundings["deepspeed"] = "0.18.2"
    del surroundings["megatron-core"]
    config = {**SIZES, "amp": {"enabled": True}, "recycle": {"activation_cap": 6}}
    assert doctor(config, f"--pp 2 --dp 3 {of_a_run(600 * MIB)}", {"a": 2, "b": 2, "c": 4}) == (1, MUCH)


def test_the_documents_example(doctor) -> None:
    example = DOCUMENT.split("for three hosts with four slots each:\n\n```\n")[1].split("```")[0].splitlines()
    _, text = doctor({**SIZES, **ON}, "--pp 4 --dp 3", dict.fromkeys("abc", 4))
    assert len(example) > 10 and [line for line in example if line not in text.splitlines()] == []


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize(
    "config",
    [HEALTHY, {**SIZES, "zero_optimization": {"stage": 1}, "recycle": {"split_backward": False, "activation_cap": 8}}],
)
def test_text_fits_a_page_whatever_the_names(doctor, config, profiled) -> None:
    hosts = {f"a-very-long-name-of-a-host-{number}.in.a.cluster.example.org": 6 for number in range(9)}
    more = of_a_run(80 << 30, 6) if profiled else ""
    _, text = doctor(config, f"--pp 6 --dp 9 {more}", hosts)
    assert max(map(len, text.splitlines())) <= 100 and "--json has" in text


def test_what_goes_over_nccl_and_what_would_hang_there(doctor, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    over = {**SIZES, "recycle": {"enabled": True, "device_link": "nccl", "exact": True}}
    code, text = doctor(over, "--pp 2 --dp 2")
    said = " ".join(text.split())
    assert code == 1 and "! CUDA_DEVICE_MAX_CONNECTIONS is '1'" in said
    assert "with recycle.exact: all collectives" in said and "TORCH_NCCL_ASYNC_ERROR_HANDLING" in said
    assert "CUDA_MODULE_LOADING" in said
    assert "What carries tensors" not in doctor({**SIZES, **ON}, "--pp 2 --dp 2")[1]


def test_links_of_two_and_their_memory(doctor) -> None:
    """The middle stages of a 4 x 8 job have two neighbours, each way; where one is lost, those beside it have many."""
    over = {**SIZES, "recycle": {"enabled": True, "device_link": "nccl"}}
    _, text = doctor(over, "--pp 4 --dp 8")
    said = " ".join(text.split())
    assert "at most 4 links of two at each worker (about 164 MiB of its device's memory)" in said
    assert "and 16 while one worker is out (about 656 MiB)" in said
    links = data(doctor, over, "--pp 4 --dp 8")["device_link"]["links"]
    assert links == {"whole": 4, "one_out": 16, "most": 16, "bytes": 41 << 20}


# --- figures ---------------------------------------------------------------------------------------------


COSTS = replace(CostModel.uniform(4, 1000, 1000, 1000), forward=(1000, 2000, 1000, 1000), communication=500)


@pytest.mark.parametrize(
    "section",
    [
        {"enabled": True},
        {"enabled": True, "activation_cap": "1f1b", "costs": "costs.json"},
    ],
)
def test_slowdowns_are_the_planners(doctor, section) -> None:
    Path("costs.json").write_text(json.dumps({name: each for name, each in asdict(COSTS).items() if each}))
    found = data(doctor, {**HEALTHY, "recycle": section}, "--pp 4 --dp 3", {"a": 3, "b": 4, "c": 5})
    costs, policy = CostModel.uniform(4, 1000, 1000, 1000), Policy()
    if "costs" in section:
        costs, policy = COSTS, Policy(activation_cap="1f1b")
    full = Topology(3, 4, 6).full()
    free = planner.plan(full, costs, policy).period_us
    for case in found["slowdown"]["cases"]:
        view = full.without(*map(Seat.parse, case["seats"]))
        planned = planner.plan(view, costs, policy)
        assert (case["period_us"], case["bound_us"]) == (planned.period_us, planned.bound_us)
        assert (case["slowdown"], case["bound"]) == (
            round(planned.period_us / free, 4),
            round(planned.bound_us / free, 4),
        )
    each = [planner.plan(full.without(Seat(0, stage)), costs, policy).period_us for stage in range(4)]
    assert found["slowdown"]["each_stage"] == [round(period / free, 4) for period in each]
    worst = next(case for case in found["slowdown"]["cases"] if "at worst" in case["lost"])
    assert worst["period_us"] == max(each)


def test_each_kind_of_loss_comes_once(doctor) -> None:
    cases = data(doctor, HEALTHY, "--pp 4 --dp 5")["slowdown"]["cases"]
    assert [case["lost"] for case in cases][:1] == ["nobody"]
    assert [len(case["seats"]) for case in cases] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 16]
    kinds = [tuple(sorted(case["seats"])) for case in cases]
    assert len(set(kinds)) == len(kinds)
    assert [case["lost"] for case in data(doctor, HEALTHY, "--pp 1 --dp 2")["slowdown"]["cases"]] == [
        "nobody",
        "one worker of any stage",
    ]


def test_hosts_that_lose_the_same_are_told_together(doctor) -> None:
    """Of six hosts with half a stage each, three stages: they are alike by stage."""
    cases = data(doctor, HEALTHY, "--pp 3 --dp 4", dict.fromkeys("abcdef", 2))["slowdown"]["cases"]
    assert {case["lost"]: case["hosts"] for case in cases if "hosts" in case} == {
        "host a (+1 alike)": ["a", "b"],
        "host c (+1 alike)": ["c", "d"],
        "host e (+1 alike)": ["e", "f"],
    }


@pytest.mark.parametrize(
    "cap, says",
    [
        (2, "one loss costs 1.48x; with 4 micro-batches nothing"),
        (4, "one loss costs 1.43x; with 7 micro-batches 1.29x"),
        (7, "7 is enough: from 7"),
    ],
)
def test_the_least_cap_is_the_least(doctor, cap, says) -> None:
    """In memory for 2 micro-batches the step is slow as it is, so that little memory makes up for a loss."""
    config = {**HEALTHY, "recycle": {"enabled": True, "activation_cap": cap}}
    row = data(doctor, config, "--pp 4 --dp 3")["memory"]["activation_cap"]
    free = planner.plan(
        Topology(3, 4, 6).full(), CostModel.uniform(4, 1000, 1000, 1000), Policy(activation_cap=cap)
    ).period_us
    goal = max(free, one_loss(18))
    assert row["period_one_lost_us"] == one_loss(cap) and row["period_one_lost_us_changed"] == one_loss(row["least"])
    assert one_loss(row["least"]) <= goal < one_loss(row["least"] - 1)
    assert says in doctor(config, "--pp 4 --dp 3")[1]


def one_loss(cap: int) -> int:
    full, costs = Topology(3, 4, 6).full(), CostModel.uniform(4, 1000, 1000, 1000)
    return max(
        planner.plan(full.without(Seat(0, stage)), costs, Policy(activation_cap=cap)).period_us for stage in range(4)
    )


# --- hosts -----------------------------------------------------------------------------------------------


def test_ranks_sit_as_deepspeed_puts_them(doctor) -> None:
    hosts = {"a": 3, "b": 4, "c": 0, "d": 5}
    rows = data(doctor, HEALTHY, "--pp 4 --dp 3", hosts)["survives"]["hosts"]
    from deepspeed.launcher.runner import _parse_hostfile
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    topology, first, wanted = PipeDataParallelTopology(4, 3), 0, []
    for host, slots in _parse_hostfile(Path("hosts").read_text().splitlines()).items():
        coordinates = [topology.get_coord(rank) for rank in range(first, first + slots)]
        wanted += [(host, [f"{at.data}.{at.pipe}" for at in coordinates])] if slots else []
        first += slots
    assert [(row["host"], row["seats"]) for row in rows] == wanted


def test_a_host_with_all_of_a_stage_is_told_and_mended(doctor) -> None:
    code, text = doctor(HEALTHY, "--pp 2 --dp 2", {"a": 2, "b": 2})
    assert code == 1
    assert "! a holds every replica of stage 0; b holds every replica of stage 1: set recycle.placement to" in text
    assert "topology=ProcessTopology(axes=['data', 'pipe'], dims=[2, 2])" in text
    code, text = doctor(HEALTHY, "--pp 2 --dp 2", {"a": 1, "b": 3})
    assert code == 1 and "! b holds every replica of stage 1: no placement helps while one host has more than 2" in text


def test_ranks_dealt_out_over_the_hosts(doctor) -> None:
    """What is recommended takes the trouble away, and the loss of a host is then that of whole replicas."""
    spread = {**HEALTHY, "recycle": {"enabled": True, "placement": "spread"}}
    found = data(doctor, spread, "--pp 4 --dp 3", dict.fromkeys("abc", 4))
    assert found["change"] == [] and [row["ends"] for row in found["survives"]["hosts"]] == ["", "", ""]
    assert [row["seats"][0] for row in found["survives"]["hosts"]] == ["0.0", "1.0", "2.0"]
    assert [row["ranks"] for row in found["survives"]["hosts"]] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    costs = {case["lost"]: case["period_us"] for case in found["slowdown"]["cases"]}
    assert costs["host a (+2 alike)"] == costs["any whole replica"]
    (line,) = data(doctor, spread, "--pp 2 --dp 2", {"a": 1, "b": 3})["change"]
    assert line.startswith("b holds every replica of stage 1: no placement helps")


def test_rank_0s_host_may_go_where_the_others_have_more_than_half_of_the_workers(doctor) -> None:
    for slots, survived in (
        ({"a": 2, "b": 1, "c": 1}, False),
        ({"a": 2, "b": 2}, False),
        ({"a": 1, "b": 2, "c": 1}, True),
    ):
        config = {**HEALTHY, "recycle": {"enabled": True, "placement": "spread"}}
        found = data(doctor, config, "--pp 2 --dp 2", slots)["survives"]
        assert ("coordinator" not in found["hosts"][0]["ends"]) == survived
        text = doctor(config, "--pp 2 --dp 2", slots)[1]
        assert ("the host of rank 0, which runs" not in text) == survived
        assert ("SLURM ends a job that loses its batch host" in text) == survived


def test_hosts_that_may_go(doctor) -> None:
    found = data(doctor, HEALTHY, "--pp 2 --dp 2", {"a": 1, "b": 1, "c": 1, "d": 1})
    assert found["change"] == [] and [row["ends"] for row in found["survives"]["hosts"]] == ["", "", "", ""]
    assert (found["survives"]["any_workers"], found["survives"]["at_best_workers"]) == (1, 2)


def test_slots_to_spare_are_told(doctor) -> None:
    code, text = doctor(HEALTHY, "--pp 2 --dp 2", {"a": 1, "b": 1, "c": 1, "d": 3})
    assert code == 0 and "slots: 2 more than workers; launch with --num_nodes" in text


def test_zero_1_is_replicated_where_that_is_asked_for(doctor) -> None:
    config = {**HEALTHY, "zero_optimization": {"stage": 1}, "recycle": {"enabled": True, "zero": "replicate"}}
    assert not data(doctor, config, "--pp 2 --dp 3")["change"]


@pytest.mark.parametrize("precision", ("bf16", "fp16"))
def test_two_bytes_a_weight_are_taken(doctor, precision) -> None:
    code, text = doctor({**HEALTHY, precision: {"enabled": True}}, "--pp 2 --dp 3")
    assert code == 0 and ("whether the device has fp16" in " ".join(text.split())) == (precision == "fp16")


# --- what has to change ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, says",
    [
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage 1 shards the optimizer state"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage 3 does not work with pipelines"),
        ({"amp": {"enabled": True}}, "amp.enabled: only fp32, bf16 and fp16 are supported yet"),
        ({"train_batch_size": 24}, "train_batch_size 24 is not 1 samples x 6 micro-batches x 2 replicas; set it to 12"),
        ({"recycle": {}}, "recycle.enabled is false"),
        ({"recycle": {"enabled": True, "reroute": False}}, "recycle.reroute is false: any loss ends the job"),
        ({"recycle": {"enabled": True, "placement": "strict"}}, 'recycle.placement "strict" refuses to start'),
    ],
)
def test_what_has_to_change(doctor, config, says) -> None:
    (line,) = data(doctor, {**HEALTHY, **config}, "--pp 2 --dp 2")["change"]
    assert says in line


def test_all_refusals_at_once(doctor) -> None:
    config = {
        **HEALTHY,
        "zero_optimization": {"stage": 2},
        "torch_autocast": {"enabled": True},
        "amp": {"enabled": True},
    }
    assert [line.split(":")[0].split()[0] for line in data(doctor, config, "--pp 2 --dp 2")["refused"]] == [
        "torch_autocast.enabled",
        "amp.enabled",
        "zero_optimization.stage",
    ]


def test_an_optimizer_that_has_to_be_compiled(doctor, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    (line,) = data(doctor, {**HEALTHY, "optimizer": {"type": "Adam"}}, "--pp 2 --dp 2")["change"]
    assert "there is no C++ compiler; set optimizer.params.torch_adam to true" in line
    assert (
        data(doctor, {**HEALTHY, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, "--pp 2 --dp 2")[
            "change"
        ]
        == []
    )


def test_one_replica_survives_nothing(doctor) -> None:
    found = data(doctor, HEALTHY, "--pp 2 --dp 1")
    assert found["survives"]["any_workers"] == 0 and [case["lost"] for case in found["slowdown"]["cases"]] == ["nobody"]
    assert found["change"] == [
        "--dp 1: a lost worker has no peer to take its micro-batches, and the plugin refuses it; use two replicas or "
        "more, or set recycle.log, so that a stage without a replica can be replayed"
    ]


@pytest.mark.parametrize(
    "name, version",
    [("torch", "2.5.1+cpu"), ("deepspeed", "0.20.0"), ("deepspeed", "0.19.2"), ("megatron-core", "0.15.2")],
)
def test_versions_out_of_range(doctor, surroundings, name, version) -> None:
    surroundings[name] = version
    (line,) = data(doctor, HEALTHY, "--pp 2 --dp 2")["change"]
    assert line.startswith(f"{name} {version}: pip install '{name}")


def test_versions_of_what_is_not_there(doctor, surroundings) -> None:
    surroundings.clear()
    assert [row["installed"] for row in data(doctor, HEALTHY, "--pp 2 --dp 2")["versions"]] == [None] * 3


# --- batch sizes and memory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, more, count",
    [
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, "", 4),
        ({"train_batch_size": 18, "gradient_accumulation_steps": 3}, "", 3),
        ({"train_batch_size": 24}, "", 1),
        ({"train_micro_batch_size_per_gpu": 2}, "", 1),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}, "--micro-batches 7", 7),
    ],
)
def test_micro_batches_as_deepspeed_counts_them(doctor, sizes, more, count) -> None:
    found = data(doctor, {**sizes, **ON}, f"--pp 2 --dp 3 {more}")
    assert found["job"]["micro_batches"] == count and found["change"] == []


@pytest.mark.parametrize("where", ["config", "command line"])
def test_bytes_come_from_the_run(doctor, where) -> None:
    named = of_a_run(2048 * MIB)
    section, more = ({"costs": "costs.json"}, "") if where == "config" else ({}, named)
    found = data(
        doctor, {**HEALTHY, "recycle": {"enabled": True, "activation_cap": 3, **section}}, f"--pp 2 --dp 3 {more}"
    )
    row = found["memory"]["stages"][0]
    assert row == {
        "each": 200 * MIB,
        "state": 24 * MIB,
        "undo": 24 * MIB,
        "sums": 8 * MIB,
        "contributions": 8 * MIB,
        "kept": 2 * 9 * MIB,
        "activations": 600 * MIB,
        "working": 86 * MIB,
        "between": 56 * MIB,
        "computing": 64 * MIB + 704 * MIB,
        "summing": 64 * MIB + 8 * MIB + 4 * MIB,  # the second buffer, and a piece that comes back from the host
        "stepping": 56 * MIB + 8 * MIB,  # what Adam works with
        "today": 768 * MIB - 2 * 3 * MIB,  # less is kept
        "peak": 768 * MIB,
        "host": 2 * 9 * MIB,
    }
    assert found["memory"]["device"] == 2048 * MIB and found["change"] == []


@pytest.mark.parametrize(
    "section, undo, between, peak",
    (
        ({}, "snapshot", 28, 36),
        ({"bf16": {"enabled": True}}, "inverse", 18, 26),
        ({"fp16": {"enabled": True}}, "host_snapshot", 18, 26),
    ),
)
def test_bytes_of_a_parameter_need_no_run(doctor, section, undo, between, peak) -> None:
    config = {**HEALTHY, **section, "recycle": {"enabled": True, "undo": undo}}
    found = data(doctor, config, "--pp 2 --dp 3")["memory"]["bytes_a_parameter"]
    assert found["between steps"]["all"] == between and max(of["all"] for of in found.values()) == peak


def test_the_cap_that_would_fit_fits_and_one_more_does_not(doctor) -> None:
    of_a_run(900 * MIB)

    def change(cap: int) -> list[str]:
        return data(
            doctor,
            {**HEALTHY, "recycle": {"enabled": True, "activation_cap": cap}},
            "--pp 2 --dp 3 --profile costs.json",
        )["change"]

    assert change(5) == ["stages 0-1: 1.14 GiB of 0.88 GiB; use more stages, or set recycle.activation_cap to 3"]
    assert change(3) == [] and change(4) != []
    of_a_run(300 * MIB)
    assert change(1) == ["stages 0-1: 0.36 GiB of 0.29 GiB; use more stages"]


def test_a_host_with_a_worker_of_every_replica_ends_a_job_of_whole_replicas(doctor):
    hosts = {"a": 1, "b": 2, "c": 1}  # 0.0, then 1.0 and 0.1, then 1.1
    of_workers, of_replicas = (
        data(doctor, {**SIZES, **config}, "--pp 2 --dp 2", hosts)["survives"]["hosts"]
        for config in (ON, {"recycle": {**ON["recycle"], "unit": "replica"}})
    )
    assert [host["ends"] for host in of_workers] == ["", "", ""]
    assert [host["ends"] for host in of_replicas] == ["", "a worker of every replica", ""]


# --- the two texts ---------------------------------------------------------------------------------------

FINE = """\
--pp 2 --dp 2: 4 workers, 4 micro-batches of each replica in a step
costs: equal, F = I = W = 1 ms: no costs given

What it survives
  workers: any 1; at best 2 of 4, if one is left in every stage
  ends it: a stage's last worker; the host of rank 0, which runs the coordinator
  hosts: none, all ranks are on one (no --hostfile given)

Predicted slowdown
  lost                      step  slower  bound
  nobody                   13 ms   1.00x  1.00x
  one worker of any stage  25 ms   1.92x  1.92x
  any whole replica        25 ms   1.92x  1.92x

What is refused
  nothing that the config asks for
  not known before the start: tensor parallelism, running statistics, plain iterators

Versions here
  torch          2.6.0   needs >=2.6
  deepspeed      0.19.3  needs >=0.19.3,<0.20
  megatron-core  0.16.0  needs >=0.16,<0.17

Memory of a worker
  bytes of each stage: not known without a run of your model with recycle.trace (--run RUN_DIR)
  recycle.activation_cap null: one loss costs 1.92x; with 3 micro-batches 1.85x
  bytes a parameter, with Adam, at each moment of a step; a worker keeps the last step's sum until
    it knows of its commit
                 committed  between steps  computing  summing  stepping
  weights                4              4          4        4         4
  optimizer              8              8          8        8         8
  undo                  12             12         12       12        12
  sum                    0              4          4        4         4
  contributions          0              0          4        4         0
  second                 0              0          0        4         0
  work                   0              0          0        0         4
  all                   24             28         32       36        32

Nothing has to change.
"""

MUCH = """\
--pp 2 --dp 3: 6 workers, 6 micro-batches of each replica in a step
costs: of each stage, as costs.json has them

What it survives
! recycle.enabled is false: the stock engine runs, and any loss ends the job; set it to true
  workers: any 2; at best 4 of 6, if one is left in every stage
  ends it: a stage's last worker
  the host of rank 0: another host takes over; but SLURM ends a job that loses its batch host
  slots: 2 more than workers; launch with --num_nodes or --num_gpus to leave them out
  host  ranks  seats    its loss
  a     0-1    0.0 1.0  is survived
  b     2-3    2.0 0.1  is survived
  c     4-5    1.1 2.1  is survived

Predicted slowdown
  lost                              step  slower  bound
  nobody                          381 ms   1.00x  1.00x
  one worker, at worst: stage 1   561 ms   1.47x  1.47x
  one worker, at best: stage 0    541 ms   1.42x  1.42x
  2 workers of stage 1           1101 ms   2.89x  2.89x
  2 workers, spread: stages 0-1   561 ms   1.47x  1.47x
  any whole replica               561 ms   1.47x  1.47x
  all replicas but one           1101 ms   2.89x  2.89x
  host c                         1101 ms   2.89x  2.89x
  host a                         1081 ms   2.84x  2.84x
  host b                          561 ms   1.47x  1.47x

What is refused
! amp.enabled: only fp32, bf16 and fp16 are supported yet; remove the amp section, and set
    bf16.enabled or fp16.enabled to true if you can
  not known before the start: tensor parallelism, running statistics, plain iterators

Versions here
! deepspeed 0.18.2: pip install 'deepspeed>=0.19.3,<0.20'
  torch          2.6.0          needs >=2.6
  deepspeed      0.18.2         needs >=0.19.3,<0.20
  megatron-core  not installed  needs >=0.16,<0.17

Memory of a worker
! stages 0-1: 1.34 GiB of 0.59 GiB; use more stages, or set recycle.activation_cap to 2
  measured on cuda by the run of the costs: state, gradients, the bytes of a micro-batch, boundary
    tensors; the rest follows from these and from the settings here
  the device has 0.59 GiB; the host has 1024.00 GiB for all its workers, beside what their processes
    take
  kept: boundary tensors of two steps, after one loss; activations: at the cap; running: an estimate
    of an instruction's workspace
  between: between two steps; today: the most within a step, with all workers; peak: the same after
    one loss; host: in host memory, if the device has its own
  recycle.activation_cap 6 is enough: from 2 micro-batches (0.39 GiB) on one loss costs 1.47x
  bytes a parameter, with Adam, at each moment of a step; a worker keeps the last step's sum until
    it knows of its commit
                 committed  between steps  computing  summing  stepping
  weights                4              4          4        4         4
  optimizer              8              8          8        8         8
  undo                  12             12         12       12        12
  sum                    0              4          4        4         4
  contributions          0              0          4        4         0
  second                 0              0          0        4         0
  scaled                 0              0          0        0         4
  work                   0              0          0        0         4
  all                   24             28         32       36        36

  GiB
  stage  state  undo   sum  contributions  kept  activations  running  between  today  peak  host
  0       0.02  0.02  0.01           0.01  0.02         1.17     0.08     0.05   1.33  1.34  0.02
  1       0.02  0.02  0.01           0.01  0.02         1.17     0.08     0.05   1.33  1.33  0.02

4 things to change, marked with !
"""


# --- exact mode ------------------------------------------------------------------------------------------


def test_what_exact_mode_costs_shows_beside_the_same_job_without_it(doctor) -> None:
    named = of_a_run(2048 * MIB)
    sizes = {**HEALTHY, "gradient_accumulation_steps": 8}
    plain, exact, halves = (
        data(doctor, {**sizes, "recycle": {"enabled": True, **more}}, f"--pp 2 --dp 3 {named}")
        for more in ({}, {"exact": True}, {"exact": 4})
    )
    for mine, theirs in zip(exact["slowdown"]["cases"], plain["slowdown"]["cases"], strict=True):
        assert theirs["period_us"] <= mine["period_us"]
    lost = [found["memory"]["activation_cap"]["period_one_lost_us"] for found in (plain, halves, exact)]
    assert lost[0] < lost[1] < lost[2]
    contributions = [row["contributions"] for found in (plain, exact, halves) for row in found["memory"]["stages"]]
    assert contributions == [8 * MIB] * 2 + [16 * MIB] * 2 + [24 * MIB] * 2
