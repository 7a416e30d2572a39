"""How NCCL is set up, which has to happen before its first communicator."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from cgprof.config.schema import ParallelConfig
from cgprof.errors import DeviceError

Settings = dict[str, str | int | bool]
_MIXING, _MULTICAST = "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_NVLS_ENABLE"


def prepare_nccl(parallel: ParallelConfig) -> Settings:
    """Sets NCCL's environment and returns all settings of the tensor groups.

    Multicast stays as the user set it; else it is off, and on only by choice.

    Raises:
        DeviceError: This torch has no NCCL.
    """
    if not dist.is_nccl_available():
        raise DeviceError(
            "this torch has no NCCL, which ranks on CUDA devices need; use a CUDA build"
        )
    os.environ[_MIXING] = str(int(parallel.nccl_graph_mixing))
    os.environ.setdefault(_MULTICAST, "0")
    settings: Settings = {name: os.environ[name] for name in (_MIXING, _MULTICAST)}
    settings["high_priority_stream"] = parallel.comm_stream_priority < 0
    if parallel.nccl_max_ctas is not None:
        settings["max_ctas"] = parallel.nccl_max_ctas
    return settings


def tensor_group(
    device: torch.device, parallel: ParallelConfig, limit: timedelta
) -> dist.ProcessGroup:
    """Returns a new group of all ranks for tensors on a device."""
    if device.type != "cuda":
        return gloo_group(limit)
    from torch.distributed import ProcessGroupNCCL  # CPU builds lack it

    options = ProcessGroupNCCL.Options(is_high_priority_stream=parallel.comm_stream_priority < 0)
    if parallel.nccl_max_ctas is not None:
        options.config.max_ctas = parallel.nccl_max_ctas
    group: dist.ProcessGroup = dist.new_group(backend="nccl", timeout=limit, pg_options=options)
    return group


def gloo_group(limit: timedelta) -> dist.ProcessGroup:
    """Returns a new group of all ranks for tensors and objects in host memory."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
    return group
