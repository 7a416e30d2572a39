"""Triton without a GPU: kernels interpreted in a process of their own, or compiled for an H200."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


def run_interpreted(check: Callable[..., None], *args: Any) -> None:
    """Calls `check(*args)` where TRITON_INTERPRET was set before Triton was imported."""
    _interpreter().submit(_call, check, args).result()


def compile_for_hopper(
    kernel: Any, arguments: dict[str, str], constants: dict[str, Any], **options: int
) -> str:
    """Returns the PTX of a kernel; `arguments` are types such as `*bf16`, `i32`, `fp32`.

    `options` are the launch's num_warps and num_stages.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = arguments | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= 227 * 1024
    return compiled.asm["ptx"]


@functools.cache
def _interpreter() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_interpret)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _call(check: Callable[..., None], args: tuple[Any, ...]) -> None:
    with torch.inference_mode():
        check(*args)
