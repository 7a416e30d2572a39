import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgprof.errors import ConfigError
from cgprof.parallel.ep import expert_range


@given(data=st.data(), num_experts=st.integers(1, 300))
def test_expert_range_gives_every_expert_to_one_rank_in_even_shares(data, num_experts):
    size = data.draw(st.integers(1, num_experts))
    shares = [expert_range(num_experts, size, rank) for rank in range(size)]
    assert [expert for share in shares for expert in share] == list(range(num_experts))
    counts = {len(share) for share in shares}
    assert max(counts) - min(counts) <= 1


def test_expert_range_refuses_more_ranks_than_experts():
    with pytest.raises(ConfigError, match="9 ranks cannot share 8 experts"):
        expert_range(8, 9, 0)
