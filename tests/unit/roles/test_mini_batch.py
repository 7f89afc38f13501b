from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl.roles.mini_batch import rows_of_mini_batch


@given(groups=st.integers(1, 4), minis=st.integers(1, 3), each=st.integers(1, 3), size=st.integers(1, 4))
def test_a_mini_batch_is_the_same_rows_on_any_mesh(groups: int, minis: int, each: int, size: int) -> None:
    """Each of `groups` ranks has as many prompt groups as all mini-batches need; group g is in number g mod `minis`."""
    share = minis * each * size
    for number in range(minis):
        wanted = [row for row in range(groups * share) if (row // size) % minis == number]
        parts = [range(rank * share, (rank + 1) * share) for rank in range(groups)]
        found = [part.start + row for part in parts for row in rows_of_mini_batch(number, minis, part, size)]
        assert found == wanted
        assert all(len(rows_of_mini_batch(number, minis, part, size)) == each * size for part in parts)


def test_a_rank_whose_share_is_less_than_a_round_has_some_mini_batches_only() -> None:
    """Rows 4 to 7 are the groups 2 and 3 of two rows each; of three mini-batches they are in number 2 and 0."""
    assert [rows_of_mini_batch(j, 3, range(4, 8), 2) for j in range(3)] == [[2, 3], [], [0, 1]]
