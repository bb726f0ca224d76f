from hypothesis import given
from hypothesis import strategies as st

from wellfed.ranks import largest_share, share_of


@given(total=st.integers(0, 10_000), world_size=st.integers(1, 600))
def test_the_ranks_take_each_sample_once_and_nearly_equally_many(total, world_size):
    shares = [share_of(total, rank, world_size) for rank in range(world_size)]
    assert [place for own in shares for place in own] == list(range(total))
    sizes = [len(own) for own in shares]
    assert max(sizes) == largest_share(total, world_size)
    assert max(sizes) - min(sizes) <= 1
