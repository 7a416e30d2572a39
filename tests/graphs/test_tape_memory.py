import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgprof.errors import RecordingError
from cgprof.graphs.tape_memory import Arena, Lifetime, TapeMemory, place

LIVES = st.lists(
    st.builds(
        lambda first, length, size: Lifetime(first, first + length, size),
        st.integers(0, 20),
        st.integers(0, 8),
        st.integers(0, 1000),
    ),
    max_size=30,
)


@given(lives=LIVES)
def test_place_never_overlaps_what_lives_at_the_same_time(lives):
    offsets, needed = place(dict(enumerate(lives)))
    for a, first in enumerate(lives):
        assert offsets[a] % 64 == 0
        assert offsets[a] + first.num_bytes <= needed
        for b, second in enumerate(lives[:a]):
            meet = first.first <= second.last and second.first <= first.last
            apart = (
                offsets[a] + first.num_bytes <= offsets[b]
                or offsets[b] + second.num_bytes <= offsets[a]
            )
            assert apart or not meet or not first.num_bytes or not second.num_bytes


def test_place_reuses_memory_after_the_last_use_and_not_in_it():
    chain = {step: Lifetime(step, step + 1, 64) for step in range(10)}
    offsets, needed = place(chain)
    assert needed == 128
    assert all(offsets[step] != offsets[step + 1] for step in range(9))


def test_arena_grows_in_place_under_tensors_that_use_it():
    arena = Arena()
    assert arena.reserve(64) == 64
    tensor = torch.empty(0, dtype=torch.int32).set_(arena.storage, 4, (4,), (1,))
    tensor.fill_(7)
    assert arena.reserve(1 << 22) == (1 << 22) - 64
    assert arena.reserve(64) == 0
    assert tensor.tolist() == [7] * 4
    assert tensor.data_ptr() == arena.storage.data_ptr() + 16


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.empty(2, device="meta"), "meta"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "conjugated"),
    ],
)
def test_describe_refuses_what_a_view_cannot_rebuild(make, said):
    with pytest.raises(RecordingError, match=said):
        TapeMemory().describe(make(), is_output=False)
