"""Should a step of this shape split? The only copy: plan, dispatch and votes call it."""

from __future__ import annotations

from cgprof.config.schema import MicrobatchConfig


def wants_split(num_tokens: int, *, uniform: bool, config: MicrobatchConfig) -> bool:
    """Returns whether a step reaches its threshold: decode when uniform, else prefill."""
    if not config.enabled or num_tokens < config.num_microbatches:
        return False
    threshold = config.decode_token_threshold if uniform else config.prefill_token_threshold
    return num_tokens >= threshold


def last_microbatch_is_empty(num_real: int, num_padded: int, num_microbatches: int) -> bool:
    """Returns whether the last of the microbatches of `num_padded` tokens holds only padding.

    Microbatches start at multiples of `num_padded // num_microbatches`; the last takes the rest.
    """
    last_start = num_padded // num_microbatches * (num_microbatches - 1)
    return num_real <= last_start
