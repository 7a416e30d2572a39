"""Runs a module in a process of its own where Triton kernels are interpreted on CPU tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def accept_loop_bounds() -> None:
    """Lets the interpreter loop to a loaded bound: numpy 2.4 refuses its int(array of one)."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index


def report(name: str, **facts: object) -> None:
    """Hands one case's facts to `run_module`."""
    sys.stdout.write(json.dumps({"name": name, **facts}) + "\n")


def run_module(module: str, *, interpret: bool) -> dict[str, dict[str, object]]:
    """Returns the facts that the module reports, by name."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module],
        env=os.environ | {"TRITON_INTERPRET": "1" if interpret else "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}
