"""Fresh processes as their parent sees them; what they do is tested in test_fresh_work.py."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from cgprof.config.schema import ParallelConfig
from cgprof.fresh.start import FreshTask, measure_alone, run_fresh
from cgprof.shapes import GraphKey, RuntimeMode
from tests.support.builders import tiny_model, tiny_run
from tests.support.children import ROOT, environment

KEY = GraphKey(mode=RuntimeMode.FULL, num_tokens=8, num_reqs=8, uniform_query_len=1)
# Both hold a pipe open for as long as they live; the first argument says which.
HANGS = 'exec 3>"$0"; echo up >&3; sleep 1000 & wait'
FOLLOWS = """
import os, signal, sys
from cgprof.parallel.launched import follow
follow(int(sys.argv[2]))
pipe = os.open(sys.argv[1], os.O_WRONLY)
os.write(pipe, b"up\\n")
signal.pause()
"""
PARENT = """
import sys
from cgprof.fresh.start import FreshTask, run_fresh
task = FreshTask.model_validate_json(sys.argv[1])
run_fresh(task, timeout_s=100, command=[sys.executable, "-c", sys.argv[2], sys.argv[3]])
"""


def task(**changes):
    facts = {"kind": "alone", "run": tiny_run(), "model": tiny_model(), "keys": (KEY,)}
    return FreshTask(**(facts | changes))


def run_script(script, timeout_s=60):
    return run_fresh(task(), timeout_s=timeout_s, command=[sys.executable, "-c", script])


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_answer_comes_home_whatever_libraries_print():
    answer = run_script(
        "import json, os, sys\n"
        "task = json.load(sys.stdin)\n"
        "print('{' * 100_000); print('noise', file=sys.stderr)\n"
        "answer = {'problems': {'asked': task['kind']}, 'process_id': os.getpid()}\n"
        "open(sys.argv[2] + '/answer.json', 'w').write(json.dumps(answer))\n"
    )
    assert answer.failure is None
    assert answer.problems == {"asked": "alone"}
    assert answer.process_id != os.getpid()


def test_task_arrives_as_it_was_sent():
    sent = task(run=tiny_run(dbo=True), kind="eager-work")
    assert FreshTask.model_validate_json(sent.model_dump_json()) == sent


def test_answer_holds_though_its_process_ends_badly_afterwards():
    answer = run_script(
        "import os, sys\n"
        "open(sys.argv[2] + '/answer.json', 'w').write('{\"process_id\": 5}')\n"
        "os.abort()\n"
    )
    assert answer.failure is None
    assert answer.process_id == 5


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "import sys; print('first\\nout of  memory\\n', file=sys.stderr); sys.exit(3)",
            "ended with exit code 3: out of memory",
        ),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "was killed by signal 40"),
        ("raise MemoryError('no room')", "ended with exit code 1: MemoryError: no room"),
        ("pass", "ended without an answer"),
        (
            "import sys; open(sys.argv[2] + '/answer.json', 'w').write('{\"memory\": 1}')",
            "gave an answer that cannot be read",
        ),
    ],
)
def test_failure_of_the_process_is_a_value(script, words):
    answer = run_script(script)
    assert words in answer.failure
    assert answer.process_id > 0


def test_process_that_hangs_is_killed_with_all_that_it_started(pipe):
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    answer = run_fresh(task(), timeout_s=2, command=["sh", "-c", HANGS, str(pipe)])
    os.set_blocking(end, True)
    with open(end) as reading:
        assert reading.read() == "up\n"  # to its end: nobody holds the other end any more
    assert answer.failure == "the fresh process took longer than 2 s and was killed"


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_process_does_not_outlive_its_parent(pipe, by, tmp_path):
    with (
        subprocess.Popen(
            [sys.executable, "-c", PARENT, task().model_dump_json(), FOLLOWS, str(pipe)],
            env={**environment(), "TMPDIR": str(tmp_path)},
            stderr=subprocess.DEVNULL,
        ) as parent,
        open(pipe) as reading,
    ):
        assert reading.readline() == "up\n"
        parent.send_signal(by)
        assert reading.read() == ""
        assert parent.wait(60) == -by


def test_process_of_another_parent_ends_before_it_begins(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "cgprof.fresh.process", "1", str(tmp_path)],
        env=environment(),
        input=task().model_dump_json().encode(),
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_run_of_several_ranks_is_refused_before_anything_is_started():
    run = tiny_run().model_copy(update={"parallel": ParallelConfig(data_parallel_size=2)})
    found = measure_alone(run, tiny_model(), KEY, timeout_s=60)
    assert "2 ranks" in found.failure
    assert found.memory is None


def test_process_that_cannot_be_started_is_a_value(tmp_path, monkeypatch):
    answer = run_fresh(task(), timeout_s=60, command=[str(tmp_path / "nothing")])
    assert "could not be run" in answer.failure
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert "could not be run" in run_script("pass").failure
