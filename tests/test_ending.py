import subprocess
import sys

import pytest

# A C exit handler that aborts stands for what CUDA's bindings leave behind.
PROGRAM = """
import atexit, ctypes, sys
from cgprof.ending import ending
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
{loaded}
with ending():
    atexit.register(print, "handlers of Python ran")
    print("done")
    {end}
"""
LOADED = "sys.modules['cuda.bindings.runtime'] = sys"


def run(end, loaded=LOADED):
    source = PROGRAM.format(end=end, loaded=loaded)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(4)", 4)]
)
def test_ending_skips_exit_handlers_of_c_alone(end, code):
    ended = run(end)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert ended.stdout == "done\nhandlers of Python ran\n"


def test_ending_without_bindings_is_as_ever():
    assert run("pass", loaded="").returncode < 0


@pytest.mark.parametrize("end", ["raise KeyError('lost')", "sys.exit('told')"])
def test_ending_leaves_errors_and_words_to_python(end):
    ended = run(end)
    assert ended.returncode < 0
    assert "lost" in ended.stderr or "told" in ended.stderr
