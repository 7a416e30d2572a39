from types import SimpleNamespace

import pytest

from cgprof.errors import RecordingError


def test_first_runs_are_refused_by_name_inside_and_the_hook_of_before_comes_back():
    """Triton calls this hook before it compiles or loads a kernel, and only then."""
    from triton import knobs

    from cgprof.graphs.first_run_triton import first_runs_refused

    seen = []

    def before(**facts):
        seen.append(facts["fn"].name)
        return False

    kernel = SimpleNamespace(name="some_kernel")
    knobs.runtime.jit_cache_hook = before
    try:
        with first_runs_refused():
            with pytest.raises(RecordingError, match="first run of kernel some_kernel inside"):
                knobs.runtime.jit_cache_hook(fn=kernel, key="k", already_compiled=False)
            assert seen == []
        knobs.runtime.jit_cache_hook(fn=kernel)
        assert seen == ["some_kernel"]
        with pytest.raises(ValueError, match="planted"), first_runs_refused():
            raise ValueError("planted")
        assert knobs.runtime.jit_cache_hook is before
    finally:
        knobs.runtime.jit_cache_hook = None
