"""The command-line flag of each setting that has one, so that an error can name it."""

from __future__ import annotations

FLAGS = {
    "model.name": "--model",
    "model.dtype": "--dtype",
    "model.load_format": "--load-format",
    "parallel.data_parallel_size": "--data-parallel-size",
    "parallel.all2all_backend": "--all2all-backend",
    "parallel.verify_decisions": "--verify-decisions",
    "parallel.nccl_graph_mixing": "--nccl-graph-mixing",
    "limits.max_num_seqs": "--max-num-seqs",
    "limits.max_num_batched_tokens": "--max-num-batched-tokens",
    "limits.max_model_len": "--max-model-len",
    "limits.block_size": "--block-size",
    "limits.num_gpu_blocks_override": "--num-gpu-blocks-override",
    "limits.gpu_memory_utilization": "--gpu-memory-utilization",
    "capture.policy": "--mode",
    "capture.sizes": "--cudagraph-capture-sizes",
    "capture.max_size": "--max-cudagraph-capture-size",
    "capture.strict": "--strict",
    "capture.max_graph_memory_bytes": "--max-graph-memory",
    "microbatch.enabled": "--dbo",
    "microbatch.num_microbatches": "--ubatch-size",
    "microbatch.decode_token_threshold": "--dbo-decode-token-threshold",
    "microbatch.prefill_token_threshold": "--dbo-prefill-token-threshold",
    "microbatch.twins": "--twins",
    "microbatch.spread_real_tokens": "--dbo-spread-real-tokens",
    "microbatch.worth": "--dbo-worth",
    "measure.device": "--device",
    "accuracy.parity": "--parity",
    "seed": "--seed",
}


def spell(path: str) -> str:
    """Returns a setting as an error names it: the dotted path, and the flag where one exists."""
    setting = path.partition("[")[0]
    flag = FLAGS.get(setting)
    return path if flag is None else f"{path} ({flag})"
