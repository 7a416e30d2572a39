import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from cgprof.config.schema import ParallelConfig
from cgprof.errors import RankError
from tests.support.ranks import run_ranks

SHORT = ParallelConfig(replay_timeout_s=1, startup_timeout_s=30)
SHORT_START = ParallelConfig(replay_timeout_s=1, startup_timeout_s=2)


def failure(work):
    """The rank that is named and the message; the time it took is bounded by the caller."""
    try:
        work()
    except RankError as error:
        return error.rank, error.problem
    return None


def talk(ranks, word):
    ranks.barrier()
    return ranks.gather_objects((ranks.rank, word * ranks.rank))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [2, 4])
def test_gather_objects_gives_all_ranks_all_objects_in_rank_order(size):
    expected = [(rank, "word" * rank) for rank in range(size)]
    assert run_ranks(size, talk, "word") == [expected] * size


def sum_over(ranks):
    total = []
    for group in (ranks.captured, ranks.eager):
        value = torch.tensor([ranks.rank + 1.0])
        dist.all_reduce(value, group=group)
        total.append(value.item())
    return total, ranks.settings


@pytest.mark.ranks(2)
def test_tensor_groups_hold_all_ranks_and_have_no_nccl_settings_on_a_cpu():
    assert run_ranks(2, sum_over) == [([3.0, 3.0], {})] * 2


def unlike_calls(ranks):
    return failure(ranks.barrier if ranks.rank else lambda: ranks.gather_objects("x" * 999))


@pytest.mark.ranks(2)
def test_ranks_in_unlike_calls_are_named():
    found = run_ranks(2, unlike_calls)
    assert found[0] == found[1]
    named, problem = found[0]
    assert named == 1
    assert re.fullmatch(
        r"out of step: rank 1 has round (\d+) \(barrier\); rank 0 has round \1 \(objects\)", problem
    )


def silent(ranks):
    if ranks.rank == 1:
        return None
    started = time.monotonic()
    return failure(ranks.barrier), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_a_rank_that_never_answers_is_named_in_time():
    found = run_ranks(4, silent, parallel=SHORT_START, spoils=True)
    for rank in (0, 2, 3):
        (named, problem), seconds = found[rank]
        assert named == 1
        assert problem.startswith("did not answer; others waited in round 1 (")
        assert seconds < 8


def killed(ranks):
    if ranks.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(lambda: ranks.gather_objects(1))


@pytest.mark.ranks(4)
def test_a_rank_that_is_gone_is_named_by_all_others_long_before_the_timeout():
    started = time.monotonic()
    found = run_ranks(4, killed, parallel=SHORT, may_die=[3])
    assert time.monotonic() - started < 25
    assert [name for name, _ in found[:3]] == [3, 3, 3]


def give_up(ranks):
    """Rank 0 gives up but stays alive, so that no connection tells rank 1."""
    if ranks.rank == 0:
        return str(ranks.lost(RuntimeError("[here] Connection closed by peer. This is typical")))
    return failure(ranks.barrier)


@pytest.mark.ranks(2)
def test_a_rank_hears_that_another_gave_up_long_before_its_own_timeout():
    found = run_ranks(2, give_up, parallel=SHORT, spoils=True, limit_s=20)
    assert found[0] == "rank 0: lost its peers in round 0 (Connection closed by peer)"
    assert found[1] == (1, "lost its peers in round 1 (rank 0 gave up)")


def stuck(ranks, words):
    """A rank with words has a device that does not finish; one without waits for a vote."""
    if words[ranks.rank]:
        named = ranks.stuck(words[ranks.rank])
        return named.rank, named.problem
    return failure(ranks.barrier)


A_STEP, ANOTHER = "a step of FULL-2x2q1 did not finish", "a step of FULL-8x8q1 did not finish"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((A_STEP, A_STEP), A_STEP),
        ((A_STEP, ANOTHER), f"{A_STEP}; rank 1: {ANOTHER}; see --verify-decisions"),
        ((A_STEP, ""), A_STEP),
    ],
)
def test_devices_that_do_not_finish_are_told_alike_on_all_ranks(words, told):
    found = run_ranks(2, stuck, words, parallel=SHORT, spoils=True, limit_s=20)
    assert found == [(0, told)] * 2


def stuck_while_it_waits(ranks):
    """Rank 0's launching thread waits in a round, as its deadline asks; rank 1 asks later."""
    if ranks.rank == 1:
        time.sleep(1.5)
        named = ranks.stuck(ANOTHER)
        return named.rank, named.problem
    found = []
    asking = threading.Thread(target=lambda: found.append(ranks.stuck(A_STEP)))
    asking.start()
    waited = failure(ranks.barrier)
    asking.join()
    assert (found[0].rank, found[0].problem) == waited
    return waited


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_what_a_device_did_not_finish_stays_when_its_rank_gives_up_a_round_as_well():
    found = run_ranks(2, stuck_while_it_waits, parallel=SHORT, spoils=True, limit_s=20)
    assert found == [(0, f"{A_STEP}; rank 1: {ANOTHER}; see --verify-decisions")] * 2


def stuck_beside_a_silent_rank(ranks):
    """Rank 1 answers nothing until rank 0 has found that out."""
    if ranks.rank == 1:
        time.sleep(5)
        return None
    named = ranks.stuck(A_STEP)
    return named.rank, named.problem


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_rank_that_is_silent_is_to_blame_for_a_device_that_does_not_finish():
    found = run_ranks(2, stuck_beside_a_silent_rank, parallel=SHORT, spoils=True, limit_s=20)
    assert found[0] == (1, f"did not answer; on rank 0 {A_STEP}")


def late(ranks, seconds):
    """Rank 1 comes late to one tensor collective, and not at all to the next."""
    if ranks.rank == 1:
        time.sleep(seconds)
    with ranks.extended(20):
        dist.all_reduce(torch.zeros(1), group=ranks.captured)
    if ranks.rank == 1:
        return None
    try:
        dist.all_reduce(torch.zeros(1), group=ranks.captured)
    except RuntimeError as error:
        named = ranks.lost(error)
        return named.rank, named.problem
    return None


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_extended_waits_longer_and_afterwards_the_usual_time():
    found = run_ranks(2, late, 2.5, parallel=SHORT, spoils=True)
    named, problem = found[0]
    assert named == 1
    assert "Timed out waiting 1000ms" in problem


def sum_on_cuda(ranks):
    totals = []
    for group in (ranks.captured, ranks.eager):
        value = torch.full((4,), ranks.rank + 1.0, device=ranks.device)
        dist.all_reduce(value, group=group)
        totals.append(value.tolist())
    with ranks.extended():
        ranks.barrier()
    mixing = os.environ["NCCL_GRAPH_MIXING_SUPPORT"]
    return totals, str(ranks.device), ranks.settings, mixing, ranks.communicator_bytes


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("mixing", [False, True])
def test_ranks_on_cuda_have_a_device_each_and_nccl_as_configured(mixing):
    parallel = ParallelConfig(
        nccl_graph_mixing=mixing, nccl_max_ctas=8, comm_stream_priority=-1, startup_timeout_s=60
    )
    for rank, found in enumerate(run_ranks(2, sum_on_cuda, device="cuda", parallel=parallel)):
        totals, device, settings, environment, communicator_bytes = found
        assert totals == [[3.0] * 4] * 2
        assert device == f"cuda:{rank}"
        assert settings["max_ctas"] == 8
        assert settings["high_priority_stream"] is True
        assert settings["NCCL_GRAPH_MIXING_SUPPORT"] == environment == str(int(mixing))
        assert communicator_bytes.keys() == {"captured", "eager"}
        assert all(communicator_bytes.values())
