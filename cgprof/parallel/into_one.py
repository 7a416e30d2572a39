"""Collectives from or into one tensor, under the names of every torch in range."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class _IntoOne(Protocol):
    def __call__(
        self, output: torch.Tensor, input: torch.Tensor, /, *, group: dist.ProcessGroup
    ) -> object: ...


def _newest(name: str, older: str) -> _IntoOne:
    found: _IntoOne = getattr(dist, name if hasattr(dist, name) else older)
    return found


# torch 2.13 deprecates the older names, 2.11 has no others.
all_gather = _newest("all_gather_single", "all_gather_into_tensor")
reduce_scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
