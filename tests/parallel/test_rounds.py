import os
import re
import resource

import pytest
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from cgprof.config.schema import ParallelConfig
from cgprof.errors import RankError
from cgprof.parallel.rounds import NUM_VALUES, RoundKind, Rounds
from tests.support.ranks import run_ranks

LIMIT_S = 20.0
SHORT = ParallelConfig(replay_timeout_s=1, startup_timeout_s=30)
GLOO, SHARED = None, LIMIT_S


def rounds_of(ranks, share_within_s):
    store = PrefixStore("rounds", _get_default_store())
    size = {"rank": ranks.rank, "size": ranks.size}
    return Rounds(ranks.control, store, share_within_s=share_within_s, **size)


def talk(ranks, share_within_s):
    rounds = rounds_of(ranks, share_within_s)
    found = [rounds.carrier]
    for kind in (RoundKind.VOTE, RoundKind.DECISION, RoundKind.BARRIER):
        rounds.start(kind, [ranks.rank, -kind], timeout_s=LIMIT_S)
        found.append(rounds.finish())
    found.append(rounds.all_bytes(b"x" * (1 + 1000 * ranks.rank), timeout_s=LIMIT_S))
    rounds.close()
    return found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("share", [GLOO, SHARED])
def test_rounds_carry_all_kinds_in_rank_order(size, share):
    zeros = (0,) * (NUM_VALUES - 2)
    kinds = [[(rank, -kind, *zeros) for rank in range(size)] for kind in (1, 2, 4)]
    sent = [b"x" * (1 + 1000 * rank) for rank in range(size)]
    carrier = "shared memory" if share else "gloo"
    assert run_ranks(size, talk, share) == [[carrier, *kinds, sent]] * size


def talk_without_descriptors(ranks, lacking):
    """One rank has no descriptor left while ranks choose what carries their rounds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    if ranks.rank == lacking:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        found = talk(ranks, SHARED)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.dup(0)
    return found[0], len(found), os.dup(0) - free


@pytest.mark.ranks(4)
@pytest.mark.parametrize("lacking", [0, 2])
def test_all_ranks_use_gloo_if_one_cannot_share_memory(lacking):
    found = run_ranks(4, talk_without_descriptors, lacking, spoils=True)
    told = f"gloo: rank {lacking} cannot share memory with rank 0 (Too many open files)"
    assert found == [(told, 5, 1)] * 4  # no descriptor stays open


def failure(work):
    try:
        work()
    except RankError as error:
        return error.rank, error.problem
    return None


def silent(ranks, share_within_s):
    rounds = rounds_of(ranks, share_within_s)
    if ranks.rank == 1:
        return None
    rounds.start(RoundKind.VOTE, [], timeout_s=1.0)
    return failure(rounds.finish)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("share", [GLOO, SHARED])
def test_silent_rank_is_named_by_all_others(share):
    found = run_ranks(4, silent, share, parallel=SHORT, spoils=True)
    for rank in (0, 2, 3):
        assert found[rank][0] == 1
        assert found[rank][1].startswith("did not answer; others waited in round 1 (")


def unlike_kinds(ranks, share_within_s):
    """Rank 1 votes where the other is at a barrier; afterwards all are in step again."""
    rounds = rounds_of(ranks, share_within_s)
    rounds.start(RoundKind.VOTE if ranks.rank else RoundKind.BARRIER, [], timeout_s=LIMIT_S)
    told = failure(rounds.finish)
    rounds.start(RoundKind.VOTE, [], timeout_s=LIMIT_S)
    return told, len(rounds.finish())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("share", [GLOO, SHARED])
def test_ranks_in_rounds_of_unlike_kinds_are_named(share):
    told = (1, "out of step: rank 1 has round 1 (vote); rank 0 has round 1 (barrier)")
    assert run_ranks(2, unlike_kinds, share) == [(told, 2)] * 2


def come_late(ranks, share_within_s):
    """Rank 1 comes to a round that rank 0 has given up: it must not go on with its row."""
    rounds = rounds_of(ranks, share_within_s)
    if ranks.rank == 0:
        rounds.start(RoundKind.VOTE, [], timeout_s=1.0)
        told = failure(rounds.finish)
        ranks.barrier()
        return told
    ranks.barrier()
    rounds.start(RoundKind.VOTE, [], timeout_s=LIMIT_S)
    return failure(rounds.finish)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_rank_that_comes_after_others_gave_up_gets_no_rows():
    first, late = run_ranks(2, come_late, SHARED, spoils=True)
    assert re.match(r"did not answer; others waited in round 1 \(timed out\)", first[1])
    assert late == (1, "lost its peers in round 1 (rank 0 gave up)")


def close_while_others_wait(ranks):
    rounds = rounds_of(ranks, SHARED)
    if ranks.rank == 1:
        rounds.close()
        return None
    rounds.start(RoundKind.VOTE, [], timeout_s=LIMIT_S)
    return failure(rounds.finish)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_rank_that_closed_is_missed_by_those_who_wait():
    found = run_ranks(2, close_while_others_wait, spoils=True)
    assert found[0] == (1, "did not answer; others waited in round 1 (rank 1 is gone)")
