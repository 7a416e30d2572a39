from cgprof.measure.budget import MemoryBudget
from tests.support.graphs import decode_key

MIB = 1024**2
KEY = decode_key(8)


def test_key_that_just_fits_has_room():
    assert MemoryBudget(100 * MIB).room_for(KEY, 95 * MIB, 5 * MIB) is None


def test_key_that_would_pass_the_limit_is_left_out_with_all_figures():
    assert MemoryBudget(100 * MIB).room_for(KEY, 96 * MIB, 5 * MIB) == (
        "left out to keep graph memory within 100 MiB: 96 MiB measured before it, and FULL-8x8q1 "
        "takes about 5 MiB (estimate)"
    )


def test_nothing_fits_once_more_was_measured_than_allowed():
    assert MemoryBudget(100 * MIB).room_for(KEY, 101 * MIB, 0) is not None
