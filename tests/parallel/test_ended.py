import signal

import pytest

from cgprof.errors import RankError, RefusedByRankError
from cgprof.parallel.ended import Silent, error_of, first_of
from cgprof.parallel.failure import Failure


def report(reporter, *, exit_code=3, traceback=None):
    return Failure(
        reporter=reporter,
        rank=reporter,
        message="out of memory",
        exit_code=exit_code,
        at_ns=reporter,
        traceback=traceback,
    )


@pytest.mark.parametrize(
    ("ended", "reporters", "cause"),
    [
        ({}, [], None),
        ({0: 0, 1: 0}, [], None),
        ({0: 0}, [1], 1),
        ({0: 0, 1: 5}, [], Silent(1, 5)),
        ({0: 3, 1: 3}, [1, 0], 1),
        ({0: 3, 1: -signal.SIGKILL}, [0], Silent(1, -signal.SIGKILL)),
        ({0: 3, 1: 5}, [0], Silent(1, 5)),
        ({0: 3, 1: -signal.SIGABRT}, [0], 0),
        ({0: -signal.SIGABRT, 1: -signal.SIGSEGV}, [], Silent(1, -signal.SIGSEGV)),
        ({0: -signal.SIGABRT}, [], Silent(0, -signal.SIGABRT)),
        ({1: -signal.SIGKILL}, [1, 0], 1),
    ],
)
def test_the_cause_is_told_from_what_follows_from_it(ended, reporters, cause):
    found = first_of(ended, [report(rank) for rank in reporters])
    assert (found.reporter if isinstance(found, Failure) else found) == cause


def test_an_error_has_the_kind_of_the_rank_s():
    refused = error_of(report(1, exit_code=2), {})
    failed = error_of(report(1), {})
    assert (type(refused), refused.exit_code) == (RefusedByRankError, 2)
    assert (type(failed), failed.exit_code) == (RankError, 3)
    assert str(refused) == str(failed) == "rank 1: out of memory"


def test_a_traceback_is_named():
    error = error_of(report(0, traceback="/t/traceback-0.txt"), {})
    assert str(error) == "rank 0: out of memory; its traceback is in /t/traceback-0.txt"


def test_only_the_end_of_a_long_log_is_shown(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_bytes(b"x" * 100_000 + b"\n\xffnot text\n\n  two \nthree\n")
    error = error_of(Silent(1, -signal.SIGSEGV), {1: str(log)})
    assert error.problem == (
        f"was killed by SIGSEGV; the end of its log {log}: \ufffdnot text | two | three"
    )


def test_a_rank_without_a_log_or_with_an_empty_one_has_no_end(tmp_path):
    log = tmp_path / "stderr.log"
    log.touch()
    logs = {0: "", 1: str(log)}
    assert error_of(Silent(0, 5), logs).problem == "ended with exit code 5 and no error"
    assert error_of(Silent(1, 5), logs).problem == "ended with exit code 5 and no error"
