"""`cgprof capture --dbo --dbo-worth`: the finding, on one rank and on two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.record.store import read_run

ROOT = Path(__file__).parents[2]
ARGS = (
    *("capture", "--device", "cpu", "--dbo", "--dbo-worth", "--mode", "full-decode-only"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "48", "--max-model-len", "128"),
    *("--cudagraph-capture-sizes", "4,8", "--dbo-decode-token-threshold", "8", "--no-parity"),
    *("--dbo-prefill-token-threshold", "24", "--set", "measure.min_samples=5"),
    *("--set", "measure.max_samples=5"),
)


@pytest.mark.slow
def test_one_rank_has_times_and_says_that_there_is_nothing_to_hide(tmp_path):
    done = CliRunner().invoke(app, [*ARGS, "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.stderr
    assert "DBO for decode, one rank: nothing to hide, the exchange is a loopback" in done.stdout
    assert [row.num_tokens for row in read_run(tmp_path / "run").worth.rows] == [8, 24, 48]
    assert "over 1 ranks" not in done.stdout


@pytest.mark.long
@pytest.mark.ranks(2)
def test_two_ranks_have_bare_steps_vetoes_and_bytes(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cgprof", *ARGS, "-dp", "2", "-o", str(tmp_path / "run")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    record = read_run(tmp_path / "run")
    assert "DBO for prefill, all-to-all over 2 ranks: " in done.stdout
    assert "CPU stand-in times" in done.stdout
    assert "splitting vetoed" in done.stdout
    assert [row.num_tokens for row in record.worth.rows] == [8, 24, 48]
    assert all(row.plain_bare and row.split_bare for row in record.worth.rows)
    assert all(rank.vetoes == record.ranks[0].vetoes for rank in record.ranks)
    for rank in record.ranks:
        assert all(g.exchange_moved_bytes >= g.exchange_needed_bytes > 0 for g in rank.graphs)
