import errno

import pytest

from cgprof.errors import is_lost_stream


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ENOSPC, "No space left on device", "run/summary.json"), False),
        (PermissionError(errno.EACCES, "Permission denied", "weights.gguf"), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_only_a_stream_of_this_process_is_lost(error, lost):
    assert is_lost_stream(error) is lost
