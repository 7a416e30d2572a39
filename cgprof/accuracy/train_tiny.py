"""Trains the bundled tiny mixture of experts on generated arithmetic and writes its folder.

    python -m cgprof.accuracy.train_tiny OUTPUT_DIR [--device cpu] [--steps N] [--seed S]

OUTPUT_DIR gets config.json, model.safetensors, tokenizer.json and training.json. The score in the
record is that of the engine, which loads and serves what was written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cgprof.accuracy.arithmetic import MOST_DIGITS, Problem, problems
from cgprof.config.model_card import load_model_card
from cgprof.config.schema import CaptureConfig, MeasureConfig, RunConfig
from cgprof.engine.generate import Sampling, generate_texts
from cgprof.models.training import IGNORED, Batch, fit
from cgprof.record.environment import collect
from cgprof.shapes import CapturePolicy

Progress = Callable[[str], None]

EOS = "<eos>"
EOS_ID = 0
_UNKNOWN = "<unk>"
_VOCAB_SIZE = 128  # a token is a printable ASCII character, its id the character's code

_CARD = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "vocab_size": _VOCAB_SIZE,
    "eos_token_id": EOS_ID,
    "max_position_embeddings": 4352,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

_BATCH = 128
_STEPS = 3600
_LEARNING_RATE = 3e-3
_HELD_OUT = 1000
_HELD_OUT_SEED = 0
_MOST_ANSWER_TOKENS = MOST_DIGITS + 2  # a carried digit, and the end


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, writes and scores what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m cgprof.accuracy.train_tiny")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself with it
    torch.use_deterministic_algorithms(True, warn_only=True)
    train(
        options.output_dir,
        device=options.device,
        steps=options.steps,
        seed=options.seed,
        progress=_to_stderr,
    )


def train(
    output_dir: Path,
    *,
    device: str,
    steps: int,
    seed: int,
    progress: Progress,
    held_out: int = _HELD_OUT,
) -> None:
    """Trains a model from seeded weights, fills its folder and scores what is in it.

    Raises:
        CgprofError: The device or what was written cannot be used.
    """
    started = time.monotonic()
    output_dir.mkdir(parents=True, exist_ok=True)
    _write_json(output_dir / "config.json", _CARD)
    tokenizer = make_tokenizer()
    tokenizer.save(str(output_dir / "tokenizer.json"))
    weights, losses = fit(
        load_model_card(str(output_dir.resolve()), with_weights=False),
        _batches(tokenizer, steps, seed),
        steps=steps,
        learning_rate=_LEARNING_RATE,
        seed=seed,
        device=torch.device(device),
        progress=progress,
    )
    weights_path = output_dir / "model.safetensors"
    weights_path.write_bytes(save(weights, metadata={"format": "pt"}))
    training_seconds = time.monotonic() - started
    asked = problems(held_out, seed=_HELD_OUT_SEED, split="held-out")
    right = count_right(output_dir, asked, device=device)
    progress(f"held-out problems answered right by the engine: {right} of {len(asked)}")
    record = {
        "command": "python -m cgprof.accuracy.train_tiny OUTPUT_DIR "
        f"--device {device} --steps {steps} --seed {seed}",
        "data": f"generated sums and differences of numbers of 1 to {MOST_DIGITS} digits, answers "
        "least significant digit first; one in ten held out by a hash; loss on answers only",
        "seed": seed,
        "steps": steps,
        "problems_per_step": _BATCH,
        "learning_rate": _LEARNING_RATE,
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "final_losses": {name: round(loss, 6) for name, loss in losses.items()},
        "held_out": {
            "problems": len(asked),
            "seed": _HELD_OUT_SEED,
            "right": right,
            "accuracy": right / len(asked),
            "scored_by": "the engine, eager, greedy",
        },
        "device": device,
        "cpu": collect(None).cpu,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "tokenizers", "safetensors")},
        "training_seconds": round(training_seconds, 1),
        "weights_sha256": hashlib.sha256(weights_path.read_bytes()).hexdigest(),
    }
    _write_json(output_dir / "training.json", record)


def make_tokenizer() -> Tokenizer:
    """Returns a tokenizer of single ASCII characters, whose ids are their codes."""
    vocabulary = {EOS: EOS_ID, _UNKNOWN: EOS_ID + 1, "\n": ord("\n")}
    vocabulary |= {chr(code): code for code in range(ord(" "), ord("~") + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.add_special_tokens([EOS, _UNKNOWN])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def count_right(model_dir: Path, asked: Sequence[Problem], *, device: str) -> int:
    """Returns how many problems the engine answers exactly, eager and greedy.

    Raises:
        CgprofError: The device or the folder cannot be used.
    """
    run = RunConfig(
        capture=CaptureConfig(policy=CapturePolicy.NONE),
        measure=MeasureConfig.model_validate({"device": device}),
    )
    generation = generate_texts(
        run,
        load_model_card(str(model_dir.resolve())),
        [problem.question for problem in asked],
        Sampling(max_tokens=_MOST_ANSWER_TOKENS, temperature=0.0, seed=0),
        progress=_ignore,
    )
    return sum(
        completion.text == problem.answer and completion.finish_reason == "stop"
        for problem, completion in zip(asked, generation.completions, strict=True)
    )


def _batches(tokenizer: Tokenizer, steps: int, seed: int) -> Iterator[Batch]:
    """Yields fresh problems for every step."""
    for step in range(steps):
        yield _batch(tokenizer, problems(_BATCH, seed=seed * steps + step, split="train"))


def _batch(tokenizer: Tokenizer, drawn: Sequence[Problem]) -> Batch:
    """Returns tokens and targets [B, N]: each token's target is the next one, of answers only."""
    texts = [problem.question + problem.answer for problem in drawn]
    rows = [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(texts)]
    longest = max(map(len, rows)) - 1
    tokens = torch.full((len(rows), longest), EOS_ID)
    targets = torch.full((len(rows), longest), IGNORED)
    for index, (row, problem) in enumerate(zip(rows, drawn, strict=True)):
        ids, first = torch.tensor(row), len(problem.question)
        tokens[index, : len(row) - 1] = ids[:-1]
        targets[index, first - 1 : len(row) - 1] = ids[first:]
    return tokens, targets


def _ignore(text: str) -> None:
    """Progress of a part that needs none."""


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
