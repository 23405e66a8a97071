"""The door: what a section may say, and the one line that every mistake gets."""

import json
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.settings.schema import Settings, reference
from recycle_plugin.settings.sections import LogSettings
from recycle_plugin.settings.wording import GONE, SettingsError


def test_no_section_and_an_empty_one_give_the_defaults():
    assert Settings.from_section(None) == Settings.from_section({}) == Settings()
    assert Settings().enabled is False


def message(section) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings.from_section(section)
    return str(caught.value)


OF_COSTS = "write the path of a file that has the costs of each stage, such as a traced run's costs.json"
FAULT_LIST = 'write a list of faults such as ["kill 0.1 before 1F0.2@5"]'
METRICS = 'write an address and a port such as "127.0.0.1:9400", or null'
REJOIN = 'write a whole number, not negative, "always" or "never"'
CAP = 'write a whole number of at least 1, a list of one for each stage, "1f1b", or null'
SIZE = 'write a whole number of at least 1, a size such as "2GiB", or null'
LOGS = {"checkpoint": {}}
BOUNDARIES = 'write "all", "auto", "hosts", or a list of boundaries such as [0, 2], where 0 is between stages 0 and 1'


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("yes", 'recycle: "yes" is a string; write an object such as {"enabled": true}'),
        ([], 'recycle: [] is a list; write an object such as {"enabled": true}'),
        ({"split_backwards": True}, "recycle.split_backwards: no such key; did you mean split_backward?"),
        ({"log": {"folders": "x"}}, "recycle.log.folders: no such key; did you mean folder?"),
        ({"costs": {"forward_ms": 3}}, f'recycle.costs: {{"forward_ms": 3}} is an object; {OF_COSTS}, or null'),
        ({"enabled": "yes"}, 'recycle.enabled: "yes" is a string; write true or false'),
        ({"enabled": 1}, "recycle.enabled: 1 is a whole number; write true or false"),
        ({"enabled": None}, "recycle.enabled: null is not possible; write true or false"),
        ({"seed": "auto"}, 'recycle.seed: "auto" is not supported here; write a whole number, not negative'),
        ({"seed": -1}, "recycle.seed: -1 is not possible; write a whole number, not negative"),
        ({"activation_cap": 0}, f"recycle.activation_cap: 0 is not possible; {CAP}"),
        ({"activation_cap": True}, f"recycle.activation_cap: true is a boolean; {CAP}"),
        ({"activation_cap": 1.5}, f"recycle.activation_cap: 1.5 is a number; {CAP}"),
        ({"activation_cap": [4, 0]}, f"recycle.activation_cap: 0 is not possible; {CAP}"),
        ({"activation_cap": []}, f"recycle.activation_cap: [] is a list; {CAP}"),
        ({"activation_cap": "12 apples"}, f'recycle.activation_cap: "12 apples" is not possible; {CAP}'),
        ({"activation_cap": "0GiB"}, f'recycle.activation_cap: "0GiB" is not possible; {CAP}'),
        ({"activation_cap": "12GiB"}, f'recycle.activation_cap: "12GiB" is not possible; {CAP}'),
        ({"leave_on": "  "}, 'recycle.leave_on: "  " is not possible; write a shell command, or null'),
        (
            {"leave_on": "test -e 'x"},
            """recycle.leave_on: "test -e 'x" is not possible; write a shell command, or null""",
        ),
        ({"leave_on": "a\0b"}, 'recycle.leave_on: "a\\u0000b" is not possible; write a shell command, or null'),
        (
            {"leave_on": "true #" + "x" * 200_000},
            f'recycle.leave_on: "true #{"x" * 50}... is not possible; write a shell command, or null',
        ),
        ({"keep_bytes": 0}, f"recycle.keep_bytes: 0 is not possible; {SIZE}"),
        ({"keep_bytes": 1.5}, f"recycle.keep_bytes: 1.5 is a number; {SIZE}"),
        ({"keep_bytes": "all"}, f'recycle.keep_bytes: "all" is not possible; {SIZE}'),
        ({"metrics": {"port": 9400}}, f'recycle.metrics: {{"port": 9400}} is an object; {METRICS}'),
        ({"metrics": "9400"}, f'recycle.metrics: "9400" is not possible; {METRICS}'),
        ({"metrics": "127.0.0.1:70000"}, f'recycle.metrics: "127.0.0.1:70000" is not possible; {METRICS}'),
        ({"metrics": "::1:80"}, f'recycle.metrics: "::1:80" is not possible; {METRICS}'),
        ({"rejoin": "sometimes"}, f'recycle.rejoin: "sometimes" is not possible; {REJOIN}'),
        ({"rejoin": -1}, f"recycle.rejoin: -1 is not possible; {REJOIN}"),
        ({"rejoin": True}, f"recycle.rejoin: true is not possible; {REJOIN}"),
        ({"rejoin": None}, f"recycle.rejoin: null is not possible; {REJOIN}"),
        ({**LOGS, "log": {"boundaries": "some"}}, f'recycle.log.boundaries: "some" is not possible; {BOUNDARIES}'),
        ({**LOGS, "log": {"boundaries": [-1]}}, f"recycle.log.boundaries: -1 is not possible; {BOUNDARIES}"),
        ({**LOGS, "log": {"boundaries": [0, 1.5]}}, f"recycle.log.boundaries: 1.5 is a number; {BOUNDARIES}"),
        ({**LOGS, "log": {"boundaries": 1}}, f"recycle.log.boundaries: 1 is not possible; {BOUNDARIES}"),
        ({**LOGS, "log": {"budget": 0}}, f"recycle.log.budget: 0 is not possible; {SIZE}"),
        ({**LOGS, "log": {"budget": "much"}}, f'recycle.log.budget: "much" is not possible; {SIZE}'),
        ({"clip": "later"}, 'recycle.clip: "later" is not possible; write "sync" or "validate"'),
        ({"clip": "validate", "norm": "deepspeed"}, 'recycle.clip: "validate" contradicts recycle.norm = "deepspeed",'),
        ({"clip": "validate", "stagger_optimizer": False}, 'recycle.clip: "validate" contradicts'),
        ({"loss_scaling": True}, 'recycle.loss_scaling: contradicts recycle.nonfinite = "end", since overflows are'),
        ({"norm": False}, 'recycle.norm: false is not possible; write true or "deepspeed"'),
        ({"rng": "x"}, 'recycle.rng: "x" is not possible; write "keyed" or "stream"'),
        ({"rng": "stream"}, 'recycle.rng: "stream" contradicts recycle.reroute = true, because a peer would draw'),
        ({"wait_timeout_s": 20}, "recycle.idle_timeout_s: 600 s is to fire before recycle.wait_timeout_s = 20 s"),
        ({"wait_timeout_s": 600}, "recycle.idle_timeout_s: 600 s is to fire before recycle.wait_timeout_s = 600 s"),
        ({"progress_timeout_s": 120.5}, "recycle.progress_timeout_s: 120.5 s is to fire before recycle.busy_timeout_s"),
        ({"progress_timeout_s": 700}, "recycle.progress_timeout_s: 700 s is to fire before recycle.busy_timeout_s ="),
        ({"heartbeat_timeout_s": 400}, "recycle.heartbeat_timeout_s: 400 s is to fire before"),
        ({"exact": True, "undo": "inverse"}, 'recycle.exact: contradicts recycle.undo = "inverse", which rounds'),
        ({"exact": True, "rng": "stream", "reroute": False}, 'recycle.exact: contradicts recycle.rng = "stream",'),
        ({"exact": 0}, "recycle.exact: 0 is not possible; write true, false, or a whole number of at least 1"),
        ({"exact": 1.5}, "recycle.exact: 1.5 is a number; write true, false, or a whole number of at least 1"),
        ({"check_replicas": 10, "undo": "inverse"}, 'recycle.check_replicas: contradicts recycle.undo = "inverse",'),
        ({"rebalance": True, "reroute": False}, "recycle.rebalance: contradicts recycle.reroute = false, because it"),
        ({"check_replicas": -1}, "recycle.check_replicas: -1 is not possible; write a whole number, not negative"),
        ({"progress_timeout_s": 0.5}, "recycle.progress_timeout_s: 0.5 is not possible"),
        ({"heartbeat_timeout_s": 1}, "recycle.heartbeat_timeout_s: 1 is not possible"),
        ({"busy_timeout_s": 0.5}, "recycle.busy_timeout_s: 0.5 is not possible; write a number of seconds, at least 1"),
        ({"last_worker_timeout_s": 0}, "recycle.last_worker_timeout_s: 0 is not possible"),
        ({"idle_timeout_s": 0}, "recycle.idle_timeout_s: 0 is not possible; write a number of seconds, more than 0"),
        ({"wait_timeout_s": True}, "recycle.wait_timeout_s: true is a boolean; write a number of seconds, more than 0"),
        ({"wait_timeout_s": 0}, "recycle.wait_timeout_s: 0 is not possible; write a number of seconds, more than 0"),
        ({"wait_timeout_s": float("inf")}, "recycle.wait_timeout_s: Infinity is not possible"),
        ({"wait_timeout_s": 1e12}, "recycle.wait_timeout_s: 1000000000000.0 is more than 1000000000.0; write a number"),
        ({"activation_cap": [1, 1 << 54]}, "recycle.activation_cap: 18014398509481984 is more than 9007199254740992;"),
        ({"seed": 10**400}, "recycle.seed: 1000000000"),
        ({"rejoin": 10**400}, "recycle.rejoin: 1000000000"),
        ({"keep_bytes": "9999TiB"}, 'recycle.keep_bytes: "9999TiB" is not possible; write a whole number of at least'),
        ({"run_dir": ""}, 'recycle.run_dir: "" is not possible; write a folder\'s path, or null'),
        ({"log": {"folder": "a\0b"}}, 'recycle.log.folder: "a\\u0000b" is not possible'),
        ({"log": {}, "checkpoint": {}, "rejoin": 0}, "recycle.log: contradicts recycle.rejoin = 0: a stage is"),
        ({"faults": "kill 0.1"}, f'recycle.faults: "kill 0.1" is a string; {FAULT_LIST}'),
        ({"faults": [3]}, 'recycle.faults[0]: 3 is a whole number; write a fault such as "kill 0.1 before 1F0.2@5"'),
        ({"faults": ["kill 0.1 before 1F0.2@5", "x"]}, "recycle.faults[1]: 'x' is no fault"),
        ({"faults": ["hit 0.1 before 1F0.2"]}, "recycle.faults[0]: fault kind 'hit'; write one of kill, stop, leave"),
        ({"faults": ["kill 0.1 before 1F@5"]}, "recycle.faults[0]: F needs a micro-batch"),
        ({"faults": ["kill 0.1 before 1F0.2@5"]}, "recycle.faults: only the plugin's engine injects faults, and"),
        (
            {"costs": "/no/such/profile.json"},
            f"recycle.costs: /no/such/profile.json: No such file or directory; {OF_COSTS}",
        ),
        ({"costs": 3}, f"recycle.costs: 3 is a whole number; {OF_COSTS}, or null"),
        (
            {"enabled": 2, "trace": 3, "foo": 1},
            "recycle.enabled: 2 is a whole number; write true or false (also wrong: recycle.trace, recycle.foo)",
        ),
    ],
)
def test_every_mistake_names_the_key_and_the_fix(section, expected):
    found = message(section)
    assert found.startswith(expected) and any(f"; {verb} " in found for verb in ("write", "set", "did you mean"))


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_says_what_to_write_instead(key):
    *sections, name = key.split(".")
    section = {name: 1} if not sections else {**LOGS, sections[0]: {name: 1}}
    assert message(section) == f"recycle.{key}: is no setting any more; {GONE[key]}"


def test_a_key_near_no_other_lists_them_all():
    assert message({"zzz": 1}) == f"recycle.zzz: no such key; the keys are {', '.join(Settings.model_fields)}"
    assert message({3: 1}).startswith("recycle.3: no such key; the keys are enabled, ")


@given(
    st.dictionaries(
        st.sampled_from([*Settings.model_fields, "x"]), st.none() | st.booleans() | st.text() | st.lists(st.integers())
    )
)
def test_any_section_gives_settings_or_one_line(section):
    try:
        Settings.from_section(section)
    except SettingsError as error:
        assert "\n" not in str(error) and "; " in str(error) and str(error).startswith("recycle.")


@pytest.mark.parametrize("name", [*Settings.model_fields])
def test_every_setting_says_what_it_does_and_refuses_auto(name):
    assert Settings.model_fields[name].description
    assert (
        message({name: "auto"}).startswith(f"recycle.{name}: ")
        if name not in ("run_dir", "checkpoint_dir", "secret_file", "transfer_interface", "leave_on")
        else True
    )


def test_settings_are_frozen_and_compared_by_value():
    settings = Settings.from_section({"enabled": True, "faults": ["kill 0.1  before 1F0.2@5"]})
    assert settings == Settings.from_section({"enabled": True, "faults": ["kill 0.1 before 1F0.2@5"]})
    assert hash(settings) == hash(settings.model_copy())
    with pytest.raises(ValueError, match="frozen"):
        settings.enabled = False


def test_norm_may_be_written_as_a_string():
    assert Settings.from_section({"norm": "true"}).norm is True
    assert Settings.from_section({"norm": "deepspeed"}).norm == "deepspeed"


@pytest.mark.parametrize("written, size", [(None, None), (4096, 4096), ("2GiB", 2 << 30), (" 1.5 kb ", 1500)])
def test_what_may_be_kept_is_a_number_of_bytes(written, size):
    assert Settings.from_section({"keep_bytes": written}).keep_bytes == size


@pytest.mark.parametrize(
    "section, clipping, clip",
    [
        ({}, 0.0, "validate"),
        ({}, 1.0, "sync"),
        ({"clip": "sync"}, 0.0, "sync"),
        ({"clip": "validate"}, 1.0, "validate"),
        ({"stagger_optimizer": False}, 0.0, "sync"),
    ],
)
def test_in_fp16_losses_are_scaled_and_overflows_skipped(section, clipping, clip):
    settings = Settings.from_section(section).in_fp16(clipping)
    assert (settings.loss_scaling, settings.nonfinite, settings.clip) == (True, "skip", clip)
    assert settings.waits_for_norm(clipping) == (clip == "sync")


def test_stream_is_allowed_where_nothing_is_rerouted():
    assert Settings.from_section({"rng": "stream", "reroute": False}).rng == "stream"


def test_policy():
    settings = Settings.from_section({"split_backward": False, "activation_cap": 3})
    assert settings.policy(validate=True, stages=2) == Policy(split_backward=False, activation_cap=3, validate=True)


@pytest.mark.parametrize("written, cap", [(None, None), (3, 3), ([4, 3, 2], (4, 3, 2)), ("1f1b", "1f1b")])
def test_a_cap_in_micro_batches(written, cap):
    assert Settings.from_section({"activation_cap": written}).policy(False, 3) == Policy(activation_cap=cap)


def test_a_cap_for_another_number_of_stages():
    with pytest.raises(SettingsError) as caught:
        Settings.from_section({"activation_cap": [4, 3]}).policy(False, 3)
    assert str(caught.value) == "recycle.activation_cap: 2 entries for 3 stages; write one number, or a list of 3"


@pytest.mark.parametrize(
    "written, size",
    [
        ("12GiB", 12 << 30),
        ("1.5 gib", 3 << 29),
        ("12GB", 12 * 10**9),
        ("64kB", 64_000),
        ("7 TiB", 7 << 40),
        ("4096B", 4096),
    ],
)
def test_a_size_in_bytes(written, size):
    assert Settings.from_section({"keep_bytes": written}).keep_bytes == size


@pytest.mark.parametrize("text", [b"", b"{", b'{"layers": 3}', b"\0", b"\xff\xfe", b"[" * 100_000, b"3"], ids=len)
def test_a_file_that_has_no_costs(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_bytes(text)
    said = message({"costs": str(path)})
    assert said.startswith(f"recycle.costs: {path} has no costs: ") and said.endswith(f"; {OF_COSTS}")
    assert "\n" not in said


def test_faults_of_a_seat():
    text = "kill 0.1 before 1F0.2@5"
    settings = Settings.from_section({"enabled": True, "faults": [text]})
    assert settings.fault_list == (Fault.parse(text),)
    assert settings.fault_script(Seat(0, 1)).due("before", "1F0.2@5") == Fault.parse(text)
    assert settings.fault_script(Seat(0, 0)).due("before", "1F0.2@5") is None
    assert settings.fault_script(Seat(0, 1), incarnation=1).due("before", "1F0.2@5") is None


def test_a_fault_strikes_the_process_that_it_names():
    first, second = "kill 0.1 before 1F0.2@5", "kill 0.1#2 before 1F0.2@5"
    settings = Settings.from_section({"enabled": True, "faults": [first, second]})
    found = [settings.fault_script(Seat(0, 1), number).due("before", "1F0.2@5") for number in range(4)]
    assert found == [Fault.parse(first), None, Fault.parse(second), None]


def test_costs_default_to_one_millisecond_each():
    costs = Settings().cost_model(Topology(2, 3, 4))
    assert costs.forward == costs.input == costs.weight == (1000, 1000, 1000)
    assert costs.communication == costs.dispatch == 0 and costs.reduce == costs.step == (0, 0, 0)


def stage_costs(folder, **costs: object) -> Settings:
    (folder / "costs.json").write_text(json.dumps(costs))
    return Settings.from_section({"costs": str(folder / "costs.json")})


def test_costs_of_each_stage_in_a_file(tmp_path):
    given = {"forward": [1500, 2000], "input": [3000, 3000], "weight": [1000, 900], "step": [0, 250]}
    settings = stage_costs(tmp_path, **given, communication=100, dispatch=20, tie=7)
    costs = settings.cost_model(Topology(2, 2, 4))
    assert (costs.forward, costs.input, costs.weight) == ((1500, 2000), (3000, 3000), (1000, 900))
    assert (costs.step, costs.communication, costs.dispatch, costs.tie) == ((0, 250), 100, 20, 7)
    with pytest.raises(SettingsError) as caught:
        settings.cost_model(Topology(2, 3, 4))
    assert str(caught.value) == (
        f"recycle.costs: {tmp_path}/costs.json has costs of 2 stages, and the job has 3; write lists of 3"
    )


def test_whole_costs_with_a_point_or_an_exponent_are_whole_numbers(tmp_path):
    costs = stage_costs(tmp_path, forward=[1500.0, 1e12], input=[3e3, 1], weight=[1, 1], tie=7.0).cost_model(
        Topology(2, 2, 4)
    )
    assert all(type(each) is int for each in (*costs.forward, *costs.input, *costs.weight, costs.tie))


def test_costs_that_lack_something_name_it(tmp_path):
    for text, named in (
        ('{"forward": [1], "weight": [1]}', "no input"),
        ('{"forward": [1], "inputs": 2}', "no input, no weight, unknown key inputs"),
    ):
        (path := tmp_path / "costs.json").write_text(text)
        assert message({"costs": str(path)}).startswith(f"recycle.costs: {path} has no costs: {named}; write ")


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"forward": value}
            for value in ([1, -1], "ab", 3, [], [1.5, 1], [True, 1], [inf, 1], [nan, 1], [10**400, 1])
        ),
        *({name: value} for name in ("communication", "dispatch", "tie") for value in (-1, "1", None, nan, inf, [1])),
        {"communication_across": 1e300},
        {"slowness": [["0.1", 150]]},
        {"input": [1]},
        {"x": 1},
    ],
    ids=str,
)
def test_costs_that_can_not_be(tmp_path, change):
    with pytest.raises(SettingsError, match=r"^recycle\.costs: .*/costs\.json has no costs: .*; write the path of a"):
        stage_costs(tmp_path, **{"forward": [1, 1], "input": [1, 1], "weight": [1, 1]} | change)


def test_the_reference_lists_every_setting():
    table = reference()
    assert all(f"| `{name}` |" in table for name in Settings.model_fields)
    assert all(f"| `log.{name}` |" in table for name in LogSettings.model_fields)


def test_boundaries_to_log_have_to_be_those_of_the_job():
    log = Settings.from_section({**LOGS, "log": {"boundaries": [2, 0], "budget": "2GiB"}}).log
    assert log.of_stages(4) == (2, 0) and log.budget_bytes == 2 << 30
    with pytest.raises(SettingsError) as caught:
        log.of_stages(3)
    assert str(caught.value) == (
        'recycle.log.boundaries: there is no boundary 2: 3 stages have 0 to 1; write a list of these, or "all"'
    )
