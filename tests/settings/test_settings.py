"""The door: what a section may say, and the one line that every mistake gets."""

import subprocess
import sys

import pytest
from hypothesis import given, settings as hypothesis_settings
from hypothesis import strategies as st

from recycle_plugin.core.faults import Fault
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.plan import Policy
from recycle_plugin.settings import Costs, Settings, SettingsError, reference


def test_no_section_and_an_empty_one_give_the_defaults():
    assert Settings.from_section(None) == Settings.from_section({}) == Settings()
    assert Settings().enabled is False


def message(section) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings.from_section(section)
    return str(caught.value)


FAULT_LIST = 'write a list of faults such as ["kill 0.1 before 1F0.2@5"]'
PER_STAGE = "write a number of milliseconds, not negative, or a list of one for each stage"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("yes", 'recycle: "yes" is a string; write an object such as {"enabled": true}'),
        ([], 'recycle: [] is a list; write an object such as {"enabled": true}'),
        ({"split_backwards": True}, "recycle.split_backwards: no such key; did you mean split_backward?"),
        ({"costs": {"forward": 3}}, "recycle.costs.forward: no such key; did you mean forward_ms?"),
        ({"enabled": "yes"}, 'recycle.enabled: "yes" is a string; write true or false'),
        ({"enabled": 1}, "recycle.enabled: 1 is a whole number; write true or false"),
        ({"enabled": None}, "recycle.enabled: null is not possible; write true or false"),
        ({"seed": "auto"}, 'recycle.seed: "auto" is not supported here; write a whole number, not negative'),
        ({"seed": -1}, "recycle.seed: -1 is not possible; write a whole number, not negative"),
        ({"activation_cap": 0}, "recycle.activation_cap: 0 is not possible; write a whole number of at least 1, or null"),
        ({"activation_cap": True}, "recycle.activation_cap: true is a boolean; write a whole number of at least 1, or null"),
        ({"norm": False}, 'recycle.norm: false is not possible; write true or "deepspeed"'),
        ({"rng": "x"}, 'recycle.rng: "x" is not possible; write "keyed" or "stream"'),
        (
            {"rng": "stream"},
            'recycle.rng: "stream" contradicts recycle.reroute = true, because a peer would draw another dropout mask; '
            'write "keyed", or set recycle.reroute to false',
        ),
        (
            {"wait_timeout_s": 20},
            "recycle.regroup_timeout_s: 120 s is no less than recycle.wait_timeout_s = 20 s; "
            "write less than 20, or raise recycle.wait_timeout_s",
        ),
        ({"wait_timeout_s": True}, "recycle.wait_timeout_s: true is a boolean; write a number of seconds, more than 0"),
        ({"wait_timeout_s": 0}, "recycle.wait_timeout_s: 0 is not possible; write a number of seconds, more than 0"),
        ({"wait_timeout_s": float("inf")}, "recycle.wait_timeout_s: Infinity is not possible; write a number of seconds, more than 0"),
        ({"run_dir": ""}, 'recycle.run_dir: "" is not possible; write a folder\'s path, or null'),
        ({"faults": "kill 0.1"}, f'recycle.faults: "kill 0.1" is a string; {FAULT_LIST}'),
        ({"faults": [3]}, 'recycle.faults[0]: 3 is a whole number; write a fault such as "kill 0.1 before 1F0.2@5"'),
        (
            {"faults": ["kill 0.1 before 1F0.2@5", "x"]},
            "recycle.faults[1]: 'x' is no fault; "
            "write 'kill 0.1 before 1F0.2@5', 'kill 0.1 after 1STEP@5' or 'kill 0.1 at recovery.report'",
        ),
        ({"faults": ["hit 0.1 before 1F0.2"]}, "recycle.faults[0]: fault kind 'hit'; write one of kill, stop, leave"),
        (
            {"faults": ["kill 0.1 before 1F@5"]},
            'recycle.faults[0]: F needs a micro-batch; write a fault such as "kill 0.1 before 1F0.2@5"',
        ),
        (
            {"faults": ["kill 0.1 before 1F0.2@5"]},
            "recycle.faults: only the plugin's engine injects faults, and recycle.enabled is false; "
            "write [], or set recycle.enabled to true",
        ),
        ({"costs": {"forward_ms": [1, -1]}}, f"recycle.costs.forward_ms: -1 is not possible; {PER_STAGE}"),
        ({"costs": {"forward_ms": "a"}}, f'recycle.costs.forward_ms: "a" is a string; {PER_STAGE}'),
        (
            {"costs": 3},
            "recycle.costs: 3 is a whole number; "
            'write an object such as {"forward_ms": 20, "input_ms": 20, "weight_ms": 20}, or null',
        ),
        (
            {"enabled": 2, "trace": 3, "foo": 1},
            "recycle.enabled: 2 is a whole number; write true or false (also wrong: recycle.trace, recycle.foo)",
        ),
    ],
)  # fmt: skip
def test_every_mistake_names_the_key_and_the_fix(section, expected):
    assert message(section) == expected


def test_a_key_near_no_other_lists_them_all():
    assert message({"zzz": 1}) == f"recycle.zzz: no such key; the keys are {', '.join(Settings.model_fields)}"
    assert message({3: 1}).startswith("recycle.3: no such key; the keys are enabled, ")


@hypothesis_settings(deadline=None)  # the first example is slow on a loaded machine
@given(st.dictionaries(st.sampled_from([*Settings.model_fields, "x"]), st.none() | st.booleans() | st.text() | st.lists(st.integers())))
def test_any_section_gives_settings_or_one_line(section):
    try:
        Settings.from_section(section)
    except SettingsError as error:
        assert "\n" not in str(error) and "; " in str(error) and str(error).startswith("recycle.")


@pytest.mark.parametrize("name", [*Settings.model_fields])
def test_every_setting_says_what_it_does_and_refuses_auto(name):
    assert Settings.model_fields[name].description
    assert message({name: "auto"}).startswith(f"recycle.{name}: ") if name != "run_dir" else True


def test_settings_are_frozen_and_compared_by_value():
    settings = Settings.from_section({"enabled": True, "faults": ["kill 0.1  before 1F0.2@5"]})
    assert settings == Settings.from_section({"enabled": True, "faults": ["kill 0.1 before 1F0.2@5"]})
    assert hash(settings) == hash(settings.model_copy())
    with pytest.raises(ValueError, match="frozen"):
        settings.enabled = False


def test_norm_may_be_written_as_a_string():
    assert Settings.from_section({"norm": "true"}).norm is True
    assert Settings.from_section({"norm": "deepspeed"}).norm == "deepspeed"


def test_stream_is_allowed_where_nothing_is_rerouted():
    assert Settings.from_section({"rng": "stream", "reroute": False}).rng == "stream"


def test_policy():
    settings = Settings.from_section({"split_backward": False, "activation_cap": 3})
    assert settings.policy(validate=True) == Policy(split_backward=False, activation_cap=3, validate=True)


def test_faults_of_a_seat():
    text = "kill 0.1 before 1F0.2@5"
    settings = Settings.from_section({"enabled": True, "faults": [text]})
    assert settings.fault_list == (Fault.parse(text),)
    assert settings.fault_script(Seat(0, 1)).due("before", "1F0.2@5") == Fault.parse(text)
    assert settings.fault_script(Seat(0, 0)).due("before", "1F0.2@5") is None


def test_costs_default_to_one_millisecond_each():
    costs = Settings().cost_model(3)
    assert costs.forward == costs.input == costs.weight == (1000, 1000, 1000)
    assert costs.communication == costs.dispatch == 0 and costs.reduce == costs.step == (0, 0, 0)


def test_costs_in_milliseconds_become_whole_microseconds():
    section = {"costs": {"forward_ms": [1.5, 2], "input_ms": 3, "step_ms": [0, 0.25], "communication_ms": 0.1, "dispatch_ms": 0.02}}
    costs = Settings.from_section(section).cost_model(2)
    assert (costs.forward, costs.input, costs.weight) == ((1500, 2000), (3000, 3000), (1000, 1000))
    assert (costs.step, costs.communication, costs.dispatch) == ((0, 250), 100, 20)


def test_costs_of_another_number_of_stages():
    with pytest.raises(SettingsError) as caught:
        Settings.from_section({"costs": {"weight_ms": [1, 2]}}).cost_model(3)
    assert str(caught.value) == "recycle.costs.weight_ms: 2 entries for 3 stages; write one number, or a list of 3"


def test_the_reference_lists_every_setting():
    table = reference()
    assert all(f"| `{name}` |" in table for name in Settings.model_fields)
    assert all(f"| `costs.{name}` |" in table for name in Costs.model_fields)


@pytest.mark.parametrize("module", ["recycle_plugin", "recycle_plugin.settings", "recycle_plugin.cli", "recycle_plugin.compose"])
def test_importing_loads_neither_torch_nor_deepspeed(module):
    code = f"import sys, {module}; print(*sorted({{'torch', 'deepspeed', 'megatron'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
