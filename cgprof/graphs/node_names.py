"""The names of kernels, spelled as torch's profiler spells them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_STDLIB = "libstdc++.so.6"


@cache
def demangled(name: str) -> str:
    """Returns a C++ name in words, or the name as it is: a C name, or no C++ library is here."""
    demangle = _demangler()
    # One letter would be read as the code of a type.
    if demangle is None or len(name) < 2:
        return name
    return demangle(name)


@cache
def _demangler() -> Callable[[str], str] | None:
    """The demangler of the C++ library that torch has loaded, so that both print the same."""
    try:
        demangle = ctypes.CDLL(_STDLIB).__cxa_demangle
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return None
    demangle.restype = ctypes.c_void_p
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    free.restype = None
    free.argtypes = [ctypes.c_void_p]

    def run(name: str) -> str:
        status = ctypes.c_int()
        address = demangle(name.encode(), None, None, ctypes.byref(status))
        if not address:
            return name
        try:
            return ctypes.string_at(address).decode(errors="replace")
        finally:
            free(address)

    return run
