"""A tokenizer of single characters, and small tasks for it."""

from __future__ import annotations

import numpy as np
import tokenizers
from tokenizers import decoders, models

from cgprof.accuracy.tasks import Item, Task
from cgprof.models.tokenizer import Tokenizer

VOCAB_SIZE = 128


def character_tokenizer(eos_id=None):
    """One token an ASCII character, its id the character's code."""
    vocab = {chr(code): code for code in range(VOCAB_SIZE)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.Fuse()
    return Tokenizer(inner, eos_id)


def random_text(rng, length):
    return "".join(chr(code) for code in rng.integers(32, 127, length))


def random_task(kind, count, *, seed=0, prompt=(4, 12), gold=(6, 14), num_choices=2, **fields):
    """Items of random characters; golds of choices are the first ones."""
    rng = np.random.default_rng(seed)
    items = []
    for index in range(count):
        text = random_text(rng, int(rng.integers(*prompt)))
        if kind == "multiple-choice":
            choices = tuple(random_text(rng, int(rng.integers(*gold))) for _ in range(num_choices))
            item = Item(item_id=str(index), prompt=text, gold=choices[0], choices=choices)
        else:
            answer = random_text(rng, int(rng.integers(*gold)))
            item = Item(item_id=str(index), prompt=text, gold=answer)
        items.append(item)
    return Task(
        name="random",
        kind=kind,
        items=tuple(items),
        subset_rule=f"{count} random texts",
        prompt_rule="zero-shot",
        seed=seed,
        **{"max_new_tokens": 12, **fields},
    )
