"""Gives every rank of one host memory that the others' kernels can write, or says why it cannot.

Each step that may fail is followed by an agreement, so that all ranks refuse together; only in the
rendezvous itself a rank that fails leaves the others to the start-up's time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cgprof.config.flags import spell
from cgprof.config.schema import All2AllBackend
from cgprof.errors import DeviceError, UnsupportedError
from cgprof.moe.symmetric_memory import PeerMemory
from cgprof.parallel.groups import Ranks

_ASKED = f"{spell('parallel.all2all_backend')}: {All2AllBackend.SYMMETRIC_MEMORY.value}"
_INSTEAD = f"use {All2AllBackend.ALL_TO_ALL.value}"
# Multicast stays off unless the user set it. Without the pool every rank maps new memory here,
# where a pool could give one of them memory that an earlier engine had.
_DEFAULTS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMMMEM_IMPLICIT_POOL": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank runs, and what it lacks, if anything."""

    host: str
    device: int
    lacks: str | None = None


def open_peer_memory(ranks: Ranks, num_bytes: int) -> PeerMemory:
    """Returns `num_bytes` of zeros on this rank; all ranks call it alike and can write them.

    Raises:
        UnsupportedError: The ranks are on CPUs.
        DeviceError: They are on several hosts, two devices cannot reach each other, this torch
            has no symmetric memory for CUDA, or its rendezvous failed.
        RankError: A rank did not answer.
    """
    if ranks.device.type != "cuda":
        raise UnsupportedError(
            spell("parallel.all2all_backend"),
            f"{All2AllBackend.SYMMETRIC_MEMORY.value} writes into the memory of other GPUs, and "
            f"these ranks are on {ranks.device.type} devices; {_INSTEAD} or --device cuda",
        )
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    index = ranks.device.index
    mine = Seat(host=socket.gethostname(), device=index, lacks=_missing(ranks.device))
    seats = [seat for seat in ranks.gather_objects(mine) if isinstance(seat, Seat)]
    problem = refusal(seats)
    if problem is None:
        problem = _first(ranks, _unreachable(ranks.device, [seat.device for seat in seats]))
    if problem is not None:
        raise DeviceError(f"{_ASKED} cannot be used: {problem}; {_INSTEAD}")
    return _rendezvous(ranks, num_bytes)


def refusal(seats: Sequence[Seat]) -> str | None:
    """Returns why ranks in these seats, in rank order, cannot share memory; None if they may."""
    first = seats[0]
    for rank, seat in enumerate(seats):
        if seat.lacks is not None:
            return f"rank {rank}: {seat.lacks}"
        if seat.host != first.host:
            return (
                f"rank {rank} is on host {seat.host} and rank 0 on {first.host}, but a kernel "
                "writes only to GPUs of its own host"
            )
        twin = next(r for r, other in enumerate(seats) if other.device == seat.device)
        if twin != rank:
            return (
                f"ranks {twin} and {rank} both call their GPU number {seat.device}; make all "
                "GPUs visible to every rank"
            )
    return None


def _missing(device: torch.device) -> str | None:
    """What this torch lacks for it."""
    try:
        from torch.distributed import _symmetric_memory as symmetric

        # torch lists only those backends to choose from that are not its default.
        if symmetric.get_backend(device) != "CUDA":
            symmetric.set_backend("CUDA")
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"torch {torch.__version__} has no symmetric memory for {device.type} ({error})"
    return None


def _unreachable(device: torch.device, peers: Sequence[int]) -> str | None:
    for peer in peers:
        if peer >= torch.cuda.device_count():
            return f"GPU {peer}, a peer's, is not visible"
        if peer == device.index or torch.cuda.can_device_access_peer(device, peer):
            continue
        return f"GPU {device.index} has no peer access to GPU {peer}"
    return _without_atomics(device, [peer for peer in peers if peer != device.index])


def _without_atomics(device: torch.device, peers: Sequence[int]) -> str | None:
    """A flag is raised by an atomic, which a link such as PCIe may not carry."""
    from cuda.bindings import runtime

    attribute = runtime.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
    for peer in peers:
        error, has_atomics = runtime.cudaDeviceGetP2PAttribute(attribute, device.index, peer)
        if error:
            return f"GPU {device.index} could not be asked about GPU {peer}: {error.name}"
        if not has_atomics:
            return f"GPU {device.index} has no atomics on the memory of GPU {peer}"
    return None


def _rendezvous(ranks: Ranks, num_bytes: int) -> PeerMemory:
    from torch.distributed import _symmetric_memory as symmetric

    own: torch.Tensor | None = None
    problem: str | None = None
    try:
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=ranks.device)
    except RuntimeError as error:
        problem = f"{num_bytes} bytes could not be allocated: {_line(error)}"
    problem = _first(ranks, problem)
    if problem is not None or own is None:
        raise DeviceError(f"{_ASKED} has no memory: {problem}; lower --max-num-batched-tokens")
    try:
        handle = symmetric.rendezvous(own, ranks.eager)  # only the group's store is used
    except RuntimeError as error:
        raise DeviceError(
            f"{_ASKED} cannot be used: the rendezvous of {num_bytes} bytes failed on rank "
            f"{ranks.rank}: {_line(error)}; {_INSTEAD}"
        ) from error
    bases = handle.buffer_ptrs
    offset = own.data_ptr() - bases[ranks.rank]
    own.zero_()
    torch.cuda.synchronize(ranks.device)
    ranks.barrier()  # no peer writes before this rank's zeros are there
    return PeerMemory(own=own, addresses=[base + offset for base in bases], keeps=handle)


def _first(ranks: Ranks, problem: str | None) -> str | None:
    """The first rank's problem, the same on all ranks."""
    found = ranks.gather_objects(problem)
    return next((f"rank {r}: {text}" for r, text in enumerate(found) if text is not None), None)


def _line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]
