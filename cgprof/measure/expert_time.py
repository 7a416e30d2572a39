"""Device time of the expert matmuls of a step, from the device's own record of its kernels.

Tracing slows launches: run it after all timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.profiler import supported_activities

from cgprof.measure.torch_trace import torch_trace

# Source: the names of the kernels in cgprof.moe.experts_triton, as the profiler reports them.
MATMULS = ("_gate_up_kernel", "_down_kernel")
_STEPS = 3


def expert_matmul_ns(step: Callable[[], None]) -> int | None:
    """Runs a step three times and returns the matmuls' device time in one; None if none was seen.

    The step has to wait for its own end.
    """
    with torch_trace(supported_activities()) as trace:
        for _ in range(_STEPS):
            step()
    kernels = [
        (event.name, event.time_range.elapsed_us())
        for event in trace.events() or ()
        if event.device_type.name == "CUDA" and event.time_range is not None
    ]
    return matmul_ns(kernels, _STEPS)


def matmul_ns(kernels: Iterable[tuple[str, float]], steps: int) -> int | None:
    """Returns the time a step of the expert matmuls among kernels of (name, us), None if none."""
    found = [us for name, us in kernels if name.startswith(MATMULS)]
    return round(1e3 * sum(found) / steps) if found else None
