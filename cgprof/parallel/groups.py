"""The process groups of a rank: gloo for votes and objects, two more for tensors."""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from cgprof.config.schema import All2AllBackend, ParallelConfig
from cgprof.errors import DeviceError, RankError
from cgprof.parallel.grid import Rank
from cgprof.parallel.into_one import all_gather, reduce_scatter
from cgprof.parallel.meeting import meet
from cgprof.parallel.nccl import Settings, gloo_group, prepare_nccl, tensor_group
from cgprof.parallel.rounds import RoundKind, Rounds

_FIRST_ROWS = (256, 1 << 21)  # f32, to each rank: both of NCCL's ways, for few bytes and for many
_AFTER_DEADLINE_S = 10.0  # an error that names the key comes before the library's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of all ranks."""

    control: dist.ProcessGroup
    captured: dist.ProcessGroup
    eager: dist.ProcessGroup


class Ranks:
    """This process among its peers.

    `settings` is what the tensor groups were set to, for the record, and `communicator_bytes` what
    each of their communicators took on the device as it started; empty on the CPU.
    """

    def __init__(
        self,
        rank: Rank,
        device: torch.device,
        groups: Groups,
        store: Store,
        parallel: ParallelConfig,
        settings: Settings,
    ) -> None:
        self.rank, self.size, self.device = rank.rank, rank.size, device
        self.control, self.captured, self.eager = groups.control, groups.captured, groups.eager
        self.settings = settings
        self.communicator_bytes: dict[str, int] = {}
        self.rounds = Rounds(
            self.control,
            store,
            rank=self.rank,
            size=self.size,
            share_within_s=parallel.startup_timeout_s,
        )
        self.answer_timeout_s = parallel.replay_timeout_s
        self._startup_timeout_s = parallel.startup_timeout_s
        self._set_tensor_timeout(self.answer_timeout_s)

    def gather_objects(self, mine: object, *, soon: bool = False) -> list[object]:
        """Returns every rank's object in rank order.

        Waits as long as a start-up may take, or `soon` half as long as for a vote.

        Raises:
            RankError: A rank did not answer, is gone, or is elsewhere in the program.
        """
        limit_s = self.answer_timeout_s / 2 if soon else self._startup_timeout_s
        sent = self.rounds.all_bytes(pickle.dumps(mine), timeout_s=limit_s)
        return [pickle.loads(data) for data in sent]

    def barrier(self) -> None:
        """Waits for all ranks, as long as a start-up may take.

        Raises:
            RankError: A rank did not answer, is gone, or is elsewhere in the program.
        """
        self.rounds.start(RoundKind.BARRIER, (), timeout_s=self._startup_timeout_s)
        self.rounds.finish()

    @contextlib.contextmanager
    def extended(self, seconds: float | None = None) -> Iterator[None]:
        """Lets votes and tensors wait longer: for compiling and warm-up. None: as a start-up."""
        usual = self.answer_timeout_s
        longer = max(usual, self._startup_timeout_s if seconds is None else seconds)
        self.answer_timeout_s = longer
        self._set_tensor_timeout(longer)
        try:
            yield
        finally:
            self.answer_timeout_s = usual
            self._set_tensor_timeout(usual)

    def lost(self, error: RuntimeError) -> RankError:
        """Returns the error of a tensor collective that failed: it names the ranks that are silent.

        The control group is of no use afterwards.
        """
        return self.rounds.lost(error)

    def stuck(self, what: str) -> RankError:
        """Returns the error of work on this rank's device that does not finish.

        It names a rank that is silent, or what the devices of all wait for. Called on a thread
        beside the blocked one; the control group is of no use afterwards.
        """
        return self.rounds.stuck(what)

    def close(self) -> None:
        """Leaves all groups. Graphs that hold their collectives must be gone."""
        self.rounds.close()
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Leaves after an error; the groups end with the process.

        NCCL's wait for the other ranks as they end, which may wait for this one in a collective.
        """
        self.rounds.close()

    def _set_tensor_timeout(self, seconds: float) -> None:
        limit = timedelta(seconds=seconds + (_AFTER_DEADLINE_S if self._on_cuda else 0.0))
        for group in (self.captured, self.eager):
            _set_pg_timeout(limit, group)

    @property
    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"


def collective_cause(error: BaseException | None) -> RuntimeError | None:
    """Returns the failed collective that an error comes from: a peer is gone or late. None if none.

    gloo's errors have no type of their own.
    """
    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in str(error)
        ):
            return error
        error = error.__cause__
    return None


def connect(rank: Rank, device: torch.device, parallel: ParallelConfig) -> Ranks:
    """Joins the other ranks; returns when all are there.

    On cuda the device is this rank's own of the host's, and becomes the current one.

    Raises:
        ConfigError: Nothing says where the ranks meet.
        RankError: They did not meet in time.
        DeviceError: Two ranks have one device.
    """
    on_cuda = device.type == "cuda"
    settings = prepare_nccl(parallel) if on_cuda else {}
    device = _own_device(rank) if on_cuda else device
    limit = timedelta(seconds=parallel.startup_timeout_s)
    store = meet(rank, limit)
    dist.init_process_group(
        "gloo", store=store, rank=rank.rank, world_size=rank.size, timeout=limit
    )
    groups = Groups(
        control=gloo_group(limit),
        captured=tensor_group(device, parallel, limit),
        eager=tensor_group(device, parallel, limit),
    )
    ranks = Ranks(rank, device, groups, store, parallel, settings)
    if on_cuda:
        _refuse_shared_device(ranks)
        _start_communicators(ranks, parallel.all2all_backend)
    return ranks


def _own_device(rank: Rank) -> torch.device:
    count = torch.cuda.device_count()
    if not count:
        raise DeviceError(f"rank {rank.rank}: no CUDA device is visible; use --device cpu")
    device = torch.device("cuda", rank.local_rank % count)
    torch.cuda.set_device(device)
    return device


def _refuse_shared_device(ranks: Ranks) -> None:
    """Ranks may each see one device under the same index, or all see too few."""
    uuid = str(torch.cuda.get_device_properties(ranks.device).uuid)
    owners: dict[object, int] = {}
    for rank, found in enumerate(ranks.gather_objects((socket.gethostname(), uuid))):
        first = owners.setdefault(found, rank)
        if first != rank:
            raise DeviceError(
                f"ranks {first} and {rank} have the same CUDA device; "
                "each rank needs its own: use a smaller --data-parallel-size"
            )


def _start_communicators(ranks: Ranks, backend: All2AllBackend) -> None:
    """NCCL connects and allocates at the first collectives, which must not be captured ones."""
    if backend is All2AllBackend.SYMMETRIC_MEMORY:
        return  # the exchange has none
    for name, group in (("captured", ranks.captured), ("eager", ranks.eager)):
        before = _held_outside_allocator(ranks.device)
        dist.all_reduce(torch.zeros(1, device=ranks.device), group=group)
        for rows in _FIRST_ROWS:
            one = torch.zeros(rows, device=ranks.device)
            all_of_them = torch.zeros(rows * ranks.size, device=ranks.device)
            if backend is All2AllBackend.ALLGATHER_REDUCESCATTER:
                all_gather(all_of_them, one, group=group)
                reduce_scatter(one, all_of_them, group=group)
            else:
                dist.all_to_all_single(torch.empty_like(all_of_them), all_of_them, group=group)
        torch.cuda.synchronize(ranks.device)
        grown = _held_outside_allocator(ranks.device) - before
        if grown >= 0:  # else another process gave memory back meanwhile, and it is not known
            ranks.communicator_bytes[name] = grown
    torch.cuda.empty_cache()


def _held_outside_allocator(device: torch.device) -> int:
    """Device memory in use but for what torch's allocator holds, bytes; of all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
