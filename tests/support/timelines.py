"""A replay planted activity by activity, as torch's profiler writes it and as a run keeps it."""

from cgprof.record.timeline import Activity

GEMM = "void gemm<4, std::array<char*, 2ul> >(int, float*)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COPY = "Memcpy DtoD (Device -> Device)"


def event(name, start_us, duration_us, stream=7, category="kernel"):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start_us,
        "dur": duration_us,
        "args": {"stream": stream, "correlation": 3},
    }


def activity(role, start_ns, end_ns, *, stream=7, kind="kernel", name=GEMM):
    return Activity(
        name=name,
        kind=kind,
        role=role,
        stream=stream,
        start_ns=start_ns,
        duration_ns=end_ns - start_ns,
    )


# Compute 0..100 (two at once), 150..250 and 400..500; communication 50..200, 240..260, 300..320.
PLANTED = (
    activity("compute", 0, 80),
    activity("communication", 50, 200, stream=9, name=SEND),
    activity("compute", 60, 100, stream=8),
    activity("compute", 150, 250, kind="memset", name="Memset (Device)"),
    activity("communication", 240, 260, stream=9, name=SEND),
    activity("communication", 300, 320, stream=9, kind="peer-copy", name="Memcpy PtoP (a -> b)"),
    activity("compute", 400, 500),
)
