"""The ledger of steps: what is committed is what all who are live have applied, whoever they are by then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.facts.step_ledger import StepLedger
from recycle_plugin.core.messages.from_workers import Stepped
from recycle_plugin.core.vocabulary.roster import Roster
from tests.support.membership import member

MEMBERS = [member(rank, replicas=4) for rank in range(4)]
APPLIED = st.tuples(st.just("applied"), st.integers(0, 3), st.integers(0, 6))
LOST = st.tuples(st.just("lost"), st.integers(0, 3), st.just(0))
RESUMED = st.tuples(st.just("resumed"), st.integers(0, 3), st.just(0))
REWOUND = st.tuples(st.just("rewound"), st.integers(0, 3), st.just(0))


@given(st.lists(st.one_of(APPLIED, APPLIED, APPLIED, LOST, RESUMED, REWOUND), max_size=40))
def test_a_step_is_committed_once_all_who_are_live_have_applied_it(events):
    ledger, roster, applied = StepLedger(), Roster(tuple(MEMBERS)), dict.fromkeys(range(4), 0)
    for what, rank, step in events:
        if what == "applied" and rank in roster.ranks:
            applied[rank] = max(applied[rank], step)
            found = ledger.apply(Stepped(rank, 0, step), roster)
            assert found == range(ledger.committed + 1, min(applied[each] for each in roster.ranks) + 1)
            if found:
                ledger.committed = found[-1]
        elif what == "lost" and len(roster) > 1:
            roster = Roster(tuple(one for one in roster if one.rank != rank))
        elif what == "resumed":
            roster, applied = Roster(tuple(MEMBERS)), dict.fromkeys(range(4), ledger.committed)
            ledger.resume(roster, ledger.committed)
        elif what == "rewound":
            ledger.rewind(rank, CoordinatorOutput())


def test_a_message_costs_no_look_at_every_member():
    """Of a thousand members all are looked at when a step begins and when it is committed, and not in between."""
    looks = 0

    class Counted(Roster):
        @property
        def workers(self):
            nonlocal looks
            looks += 1
            return super().workers

    ledger, roster = StepLedger(), Counted(tuple(member(rank, replicas=1000) for rank in range(1000)))
    for step in (1, 2, 3):
        for rank in range(1000):
            if committed := ledger.apply(Stepped(rank, 0, step), roster):
                assert rank == 999
                ledger.committed = committed[-1]
    assert ledger.committed == 3 and looks <= 6
