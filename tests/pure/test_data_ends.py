"""Jobs in which nobody is lost, and whose plain iterators end: epochs end when all iterators have, in virtual time with
exact numbers (lab/simulator/samples.py checks that each batch is used once, and that too few are left for a step).
"""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.facts.step_ledger import StepLedger
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator import campaign
from recycle_plugin.lab.simulator.campaign import ScenarioOutcome
from recycle_plugin.lab.simulator.scenario import Scenario


def outcome(stages: int, lengths: tuple[int, ...]) -> ScenarioOutcome:
    shape = Topology(len(lengths), stages, 2)
    given = Scenario(shape, CostModel.uniform(stages), Policy(), 14, iterators=True, lengths=lengths)
    return campaign.run("x", given)


def ends(found: ScenarioOutcome) -> int:
    return sum("all iterators have ended" in str(line) for line in found.story)


@pytest.mark.parametrize("stages", (1, 2, 3))
@pytest.mark.parametrize(
    "lengths, epoch",
    [((6, 6), 3), ((5, 9), 3), ((7, 12), 4), ((6, 8), 3), ((2, 20), 5), ((4, 9, 12), 4), ((1, 1, 12, 12), 3)],
    ids=str,
)
def test_epochs_have_as_many_steps_as_all_batches_fill(stages, lengths, epoch) -> None:
    assert epoch == sum(lengths) // (2 * len(lengths))
    found = outcome(stages, lengths)
    assert not found.violations and ends(found) == (14 - 1) // epoch


def test_what_was_said_of_a_step_that_is_dropped_does_not_count(monkeypatch) -> None:
    """Who had data for it has computed with that, and said its losses."""
    monkeypatch.setattr(StepLedger, "leave_out", lambda self, step: None)
    assert "was told wrong losses of step 4" in outcome(1, (6, 8)).violations[0]
