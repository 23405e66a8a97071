"""Where a step's micro-batches begin, when steps have had different numbers of them."""

from __future__ import annotations

from recycle_plugin.core.worker.data_cursor import DataCursor


def test_places_follow_from_all_earlier_steps():
    cursor, sizes = DataCursor(2), {1: 2, 2: 2, 3: 2, 4: 5, 5: 5, 6: 1, 7: 1}
    cursor.change(4, 5)
    cursor.change(6, 1)
    assert [cursor.before(step) for step in sizes] == [
        sum(size for earlier, size in sizes.items() if earlier < step) for step in sizes
    ]


def test_a_change_holds_instead_of_what_was_said_of_the_same_and_later_steps():
    """A checkpoint of an earlier step is loaded; its data is that of the first time, as far as the size goes on the
    same.
    """
    cursor = DataCursor(2)
    cursor.change(4, 5)
    cursor.change(3, 5)
    assert [cursor.before(step) for step in (1, 2, 3, 4, 5)] == [0, 2, 4, 9, 14]
    cursor.change(4, 2)
    cursor.change(4, 1)
    assert [cursor.before(step) for step in (3, 4, 5, 9)] == [4, 9, 10, 14]


def test_evaluations_have_negative_steps():
    assert DataCursor(3).before(-2) == 0


def test_another_worker_takes_them_over():
    one, other = DataCursor(2), DataCursor(7)
    one.change(4, 5)
    other.take(one.changes())
    other.change(6, 1)
    assert [other.before(step) for step in (3, 4, 5, 6, 7)] == [4, 6, 11, 16, 17] and one.before(7) == 21
