import socket
from datetime import timedelta

import pytest

from cgprof.errors import ConfigError, RankError
from cgprof.parallel.grid import Rank
from cgprof.parallel.meeting import meet, meeting_point


def test_meeting_point_is_the_one_of_the_environment():
    environ = {"MASTER_ADDR": "big7", "MASTER_PORT": "29500", "SLURM_STEP_NODELIST": "gpu[1-2]"}
    assert meeting_point(environ) == ("big7", 29500)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],big1", "gpu07"),
        ("gpu[3]", "gpu3"),
        ("node-a-12", "node-a-12"),
        ("node-a-12,node-a-13", "node-a-12"),
    ],
)
def test_meeting_point_of_a_slurm_step_is_its_first_node(nodes, first):
    environ = {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "8123", "SLURM_STEP_ID": "0"}
    host, port = meeting_point(environ)
    assert host == first
    assert 20000 <= port < 32000
    assert meeting_point(environ | {"SLURM_STEP_ID": "1"})[1] != port


@pytest.mark.parametrize(
    "environ", [{}, {"MASTER_ADDR": "big7"}, {"MASTER_ADDR": "big7", "MASTER_PORT": "x"}]
)
def test_meeting_point_refuses_an_environment_that_names_none(environ):
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        meeting_point(environ)


def test_meet_names_the_rank_that_found_nobody(monkeypatch):
    with socket.socket() as bound:  # and not listening: no one can take the port meanwhile
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with pytest.raises(
            RankError, match=f"rank 1: no ranks met at 127.0.0.1:{port}: "
        ) as caught:
            meet(Rank(1, 2, 1), timedelta(seconds=1))
    assert caught.value.rank == 1
