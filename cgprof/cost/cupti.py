"""Host intervals of cudaGraphLaunch as CUPTI sees them: its records of runtime API calls alone.

No record of a kernel is asked for, since tracing a graph's nodes slows its launch many times.
Times taken in this process afterwards may be longer. No other tracing may be on meanwhile.

Source: CUPTI's reference, activity API: buffers are lent by one callback and come back, filled,
by another, which any thread may call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Interval = tuple[int, int]

_MAPS = Path("/proc/self/maps")
_NAME = "libcupti.so"
_TOOLKITS = ("CUDA_HOME", "CUDA_PATH")
_DEFAULT_TOOLKIT = "/usr/local/cuda"

# Source: cupti_activity.h and cupti_callbacks.h of CUDA 13.0.
_SUCCESS = 0
_RUNTIME_CALLS = 5  # CUPTI_ACTIVITY_KIND_RUNTIME
_RUNTIME_DOMAIN = 2  # CUPTI_CB_DOMAIN_RUNTIME_API
_FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
_ALIGNMENT = 8  # of buffers and records
_BUFFER_BYTES = 1 << 20
_LAUNCH = b"cudaGraphLaunch_"  # then a version, or ptsz and a version

_Request = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_Complete = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)
_SIGNATURES = {
    "cuptiActivityRegisterCallbacks": (_Request, _Complete),
    "cuptiActivityEnable": (ctypes.c_int,),
    "cuptiActivityDisable": (ctypes.c_int,),
    "cuptiActivityFlushAll": (ctypes.c_uint32,),
    "cuptiActivityGetNextRecord": (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ),
    "cuptiGetCallbackName": (ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(ctypes.c_char_p)),
    "cuptiGetResultString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


@dataclass(slots=True)
class LaunchTrace:
    """What was collected, complete once the context is left; `problem` says why nothing was."""

    intervals: tuple[Interval, ...] = ()  # begin and end by CUPTI's clock, in order
    problem: str = ""


@contextmanager
def graph_launches(library: str | None = None) -> Iterator[LaunchTrace]:
    """Collects the cudaGraphLaunch calls of this process; wait for the device before leaving.

    Never fails: without CUPTI, or where it refuses, the trace has a problem and the block runs
    untraced. `library` is the path of CUPTI, None for the one that `find_library` finds.
    """
    trace = LaunchTrace()
    found = _cupti(library)
    trace.problem = found if isinstance(found, str) else found.begin()
    if isinstance(found, str) or trace.problem:
        yield trace
        return
    try:
        yield trace
    finally:
        trace.intervals, trace.problem = found.end()


def find_library() -> str | None:
    """Returns the CUPTI that this process has loaded, else a wheel's, else the toolkit's."""
    return next(iter([*loaded_libraries(_MAPS), *_installed_libraries()]), None)


def loaded_libraries(maps: Path) -> list[str]:
    """Returns the paths of CUPTI in a process's memory map, each once."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = [fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6]
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith(_NAME)))


def _installed_libraries() -> list[str]:
    wheels = importlib.util.find_spec("nvidia")
    places = [] if wheels is None else list(wheels.submodule_search_locations or ())
    roots = [os.environ[name] for name in _TOOLKITS if name in os.environ]
    toolkits = [Path(root) for root in (*roots, _DEFAULT_TOOLKIT)]
    found = [sorted(Path(place).glob(f"*/lib/{_NAME}*")) for place in places]
    for folder in ("extras/CUPTI/lib64", "lib64", "lib"):
        found += [sorted((root / folder).glob(f"{_NAME}*")) for root in toolkits]
    return [str(path) for paths in found for path in paths]


def _cupti(library: str | None) -> _Cupti | str:
    """The library, or why there is none."""
    path = library or find_library()
    if path is None:
        return "CUPTI is not installed: pip install nvidia-cuda-cupti"
    try:
        return _open(path)
    except (OSError, AttributeError) as error:
        return f"{path} cannot be used as CUPTI: {error}"


@functools.cache
def _open(path: str) -> _Cupti:
    # Cached for the life of the process, since CUPTI keeps the callbacks for as long.
    return _Cupti(path)


class _Record(ctypes.Structure):
    """CUpti_ActivityAPI; every kind of record begins with its kind."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("callback_id", ctypes.c_uint32),
        ("begin_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("process_id", ctypes.c_uint32),
        ("thread_id", ctypes.c_uint32),
        ("correlation_id", ctypes.c_uint32),
        ("returned", ctypes.c_uint32),
    )


class _Cupti:
    """One loaded CUPTI, and the buffers that it was lent."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._functions = {}
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
            self._functions[name] = function
        self._lent: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._filled: list[tuple[int, int, ctypes.Array[ctypes.c_char] | None]] = []
        self._launches: dict[int, bool] = {}
        self._callbacks = (_Request(self._lend), _Complete(self._take_back))

    def begin(self) -> str:
        """Begins to record; returns why it cannot, or nothing."""
        return self._refusal("cuptiActivityRegisterCallbacks", *self._callbacks) or self._refusal(
            "cuptiActivityEnable", _RUNTIME_CALLS
        )

    def end(self) -> tuple[tuple[Interval, ...], str]:
        """Stops recording; returns the launches in order, or why they are not known."""
        problem = self._refusal("cuptiActivityDisable", _RUNTIME_CALLS)
        problem = self._refusal("cuptiActivityFlushAll", _FORCED) or problem
        filled, self._filled = self._filled, []
        calls = [call for address, size, _ in filled for call in self._calls(address, size)]
        intervals = sorted((call.begin_ns, call.end_ns) for call in calls if not call.returned)
        if any(not 0 < begin_ns <= end_ns for begin_ns, end_ns in intervals):
            problem = problem or "CUPTI recorded a launch without its times"
        return (() if problem else tuple(intervals)), problem

    def _calls(self, address: int, size: int) -> Iterator[_Record]:
        """The launches in a filled buffer, which must stay alive meanwhile."""
        place = ctypes.c_void_p()
        following = self._functions["cuptiActivityGetNextRecord"]
        while following(address, size, ctypes.byref(place)) == _SUCCESS and place.value:
            if ctypes.c_uint32.from_address(place.value).value != _RUNTIME_CALLS:
                continue
            call = _Record.from_address(place.value)
            if self._is_launch(call.callback_id):
                yield call

    def _is_launch(self, callback_id: int) -> bool:
        known = self._launches.get(callback_id)
        if known is None:
            name = ctypes.c_char_p()
            self._functions["cuptiGetCallbackName"](
                _RUNTIME_DOMAIN, callback_id, ctypes.byref(name)
            )
            known = self._launches[callback_id] = (name.value or b"").startswith(_LAUNCH)
        return known

    def _refusal(self, function: str, *arguments: object) -> str:
        code = self._functions[function](*arguments)
        if code == _SUCCESS:
            return ""
        words = ctypes.c_char_p()
        self._functions["cuptiGetResultString"](code, ctypes.byref(words))
        return f"{function} says {(words.value or b'?').decode(errors='replace')} ({code})"

    def _lend(
        self,
        buffer: ctypes._Pointer[ctypes.c_void_p],
        size: ctypes._Pointer[ctypes.c_size_t],
        most_records: ctypes._Pointer[ctypes.c_size_t],
    ) -> None:
        memory = ctypes.create_string_buffer(_BUFFER_BYTES + _ALIGNMENT)
        address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        self._lent[address] = memory
        buffer[0], size[0], most_records[0] = address, _BUFFER_BYTES, 0

    def _take_back(
        self, context: int | None, stream: int, buffer: int | None, size: int, used: int
    ) -> None:
        # One that an earlier tool lent may come back here; its memory is that tool's.
        if buffer is not None:
            self._filled.append((buffer, used, self._lent.pop(buffer, None)))
