"""A fresh process: `python -m cgprof.fresh.process PARENT FOLDER`, its task on stdin.

The answer is a file in the folder; stdout and stderr are left to libraries.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cgprof.ending import ending
from cgprof.parallel.launched import follow


def main() -> None:
    """Ties the process to its parent before anything heavy is loaded, then does its task."""
    follow(int(sys.argv[1]))
    from cgprof.fresh.start import ANSWER, FreshTask
    from cgprof.fresh.work import do

    answer = do(FreshTask.model_validate_json(sys.stdin.buffer.read()))
    path = Path(sys.argv[2]) / ANSWER
    part = path.with_suffix(".part")
    part.write_text(answer.model_dump_json())
    os.replace(part, path)


if __name__ == "__main__":
    with ending():
        main()
