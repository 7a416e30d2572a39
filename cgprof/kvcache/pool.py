"""The pool of KV blocks. Block 0 belongs to nobody: padding rows of block tables point to it."""

from __future__ import annotations

from collections.abc import Sequence

from cgprof.errors import ConfigError


class BlockPool:
    """Hands out block numbers 1 .. num_blocks - 1; the last one freed is the first one reused."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                "--num-gpu-blocks-override",
                f"a pool of {num_blocks} blocks holds no request: block 0 is reserved; "
                "ask for at least 2",
            )
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._taken = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that could be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, all or none.

        Raises:
            ConfigError: Fewer are free.
        """
        if count > len(self._free):
            raise ConfigError(
                "--num-gpu-blocks-override",
                f"{count} KV blocks are wanted, {len(self._free)} of {self.num_blocks - 1} are "
                "free; raise it, or lower --max-num-seqs or --max-model-len",
            )
        if not count:
            return []
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        for block in blocks:
            self._taken[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Gives blocks back. One that is not taken is the caller's bug: ValueError, none freed."""
        for block in blocks:
            if not self._taken[block]:
                raise ValueError(f"block {block} is freed but not taken")
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"a block is freed twice at once: {sorted(blocks)}")
        for block in reversed(blocks):
            self._taken[block] = 0
            self._free.append(block)
