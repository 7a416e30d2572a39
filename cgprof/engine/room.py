"""What a device has room for: checked with the bytes before anything is made, or told after."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

import torch

from cgprof.config.schema import Limits, ModelConfig
from cgprof.errors import DeviceError

_TOKEN_BYTES = 21  # of the input buffers: id, position, slot, padding
_WORDS = ("out of memory", "can't allocate memory", "memoryallocation", "alloc_failed")
_TRIED = re.compile(r"tried to allocate ([\d.]+ ?[kmgt]?i?b(?:ytes)?)", re.IGNORECASE)


class Room:
    """Sizes one engine's weights, buffers and cache against its device."""

    def __init__(
        self, device: torch.device, model: ModelConfig, limits: Limits, dtype: torch.dtype
    ) -> None:
        self.blocks_per_request = -(-limits.max_model_len // limits.block_size)
        self._device = device
        self._model = model
        self._limits = limits
        self._dtype = dtype

    def check(self, weights_bytes: int, num_tokens: int) -> None:
        """Refuses weights, or the buffers of a step of `num_tokens` beside them, that do not fit.

        Raises:
            DeviceError: They do not; with the bytes.
        """
        free, total = device_memory(self._device)
        if weights_bytes > free:
            raise DeviceError(
                f"the weights of {self._model.name} take {weights_bytes} bytes, the device has "
                f"{free} free of {total}; choose a smaller model or another --dtype"
            )
        model = self._model
        table_bytes = 4 * model.max_positions * model.head_dim
        if weights_bytes + table_bytes > free:
            raise DeviceError(
                f"the table of {model.max_positions} positions for heads of {model.head_dim} takes "
                f"{table_bytes} bytes beside {weights_bytes} of weights, the device has {free} "
                "free; correct the model card"
            )
        num_reqs = self._limits.max_num_seqs
        token_bytes = self._model.hidden_size * self._dtype.itemsize + _TOKEN_BYTES
        needed = num_tokens * token_bytes + 4 * num_reqs * self.blocks_per_request
        if weights_bytes + needed > free:
            raise DeviceError(
                f"the buffers of a step of {num_tokens} tokens and {num_reqs} requests take "
                f"{needed} bytes beside {weights_bytes} of weights, the device has {free} "
                "free; lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
            )

    def cache_shape(self, blocks: int) -> tuple[int, ...]:
        """Returns [layers, blocks, 2, S, G, C]."""
        model = self._model
        block = (2, self._limits.block_size, model.num_kv_heads, model.head_dim)
        return (model.num_layers, blocks, *block)

    def cache_blocks(self) -> int:
        """Returns the blocks of a cache of all requests at full length, or those that fit.

        Raises:
            DeviceError: The blocks asked for do not fit, or not even one request does.
        """
        limits = self._limits
        block_bytes = torch.Size(self.cache_shape(1)).numel() * self._dtype.itemsize
        free, total = device_memory(self._device)
        kept_free = 1 - limits.gpu_memory_utilization if self._device.type == "cuda" else 0
        room = free - int(total * kept_free)
        most = 1 + limits.max_num_seqs * self.blocks_per_request
        blocks = limits.num_gpu_blocks_override or min(most, room // block_bytes)
        if blocks * block_bytes > free:
            raise DeviceError(
                f"a KV cache of {blocks} blocks takes {blocks * block_bytes} bytes, the device has "
                f"{free} free; lower --num-gpu-blocks-override"
            )
        if limits.num_gpu_blocks_override is None and blocks <= self.blocks_per_request:
            raise DeviceError(
                f"the KV cache needs at least {(self.blocks_per_request + 1) * block_bytes} bytes "
                f"for one request of max_model_len {limits.max_model_len}, the device has {room} "
                "left of its share; lower --max-model-len or raise --gpu-memory-utilization"
            )
        return blocks


def device_memory(device: torch.device) -> tuple[int, int]:
    """Returns the free and the total bytes of a device; of the host for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, total
    return total, total


def give_back_unused(device: torch.device) -> None:
    """Gives the memory that the allocator holds and nobody uses back to a CUDA device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ran_out(error: BaseException) -> str | None:
    """Returns what could not be had, perhaps nothing in words; None if memory was not the cause."""
    for cause in _causes(error):
        text = str(cause)
        if isinstance(cause, (MemoryError, torch.OutOfMemoryError)) or any(
            words in text.lower() for words in _WORDS
        ):
            found = _TRIED.search(text)
            return found[1] if found else ""
    return None


def choose_device(wanted: str) -> torch.device:
    """Returns the device of `auto`, `cpu` or `cuda`.

    Raises:
        DeviceError: `cuda` was asked for and none is visible.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise DeviceError("--device cuda: no CUDA device is visible; use --device cpu")
    if available and wanted != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
