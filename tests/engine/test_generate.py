import json

import pytest

from cgprof.config.load import load_run
from cgprof.engine.generate import Sampling, generate_texts
from cgprof.errors import ConfigError
from cgprof.models.tokenizer import Tokenizer
from tests.support.cards import MOE, card
from tests.support.checkpoints import LLAMA, save_model, save_tokenizer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = ["the cat", "a", "the other dog sat down"]
GREEDY = Sampling(max_tokens=10, temperature=0, seed=0)


def save(folder, content=LLAMA):
    save_model(folder, card(content, "eos_token_id"))
    save_tokenizer(folder)
    return str(folder)


def generate(folder, prompts=PROMPTS, sampling=GREEDY, **overrides):
    run, model = load_run(None, folder, overrides)
    return generate_texts(run, model, prompts, sampling, progress=lambda line: None)


def on(device, **overrides):
    """On a GPU batch invariant: a near tie must not depend on the batch."""
    invariant = {"model.batch_invariant": device == "cuda"}
    return {"measure.device": device, **invariant, **overrides}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("content", [LLAMA, MOE], ids=["llama", "moe"])
def test_replayed_steps_give_the_texts_of_eager_ones(tmp_path, device, content):
    folder = save(tmp_path, content)
    settings = {
        "microbatch.enabled": content is MOE,
        "microbatch.decode_token_threshold": 2,
        "microbatch.prefill_token_threshold": 8,
    }
    eager = generate(folder, **on(device, **{"capture.policy": "none"}))
    replayed = generate(folder, **on(device, **settings))
    assert replayed.completions == eager.completions
    assert (eager.captured_graphs, eager.replayed_steps) == (0, 0)
    assert replayed.captured_graphs > 0
    assert replayed.replayed_steps >= 9
    assert eager.eager_steps == replayed.replayed_steps + replayed.eager_steps


def test_texts_are_the_tokens_in_the_order_of_the_prompts(tmp_path):
    folder = save(tmp_path)
    tokenizer = Tokenizer.load(folder)
    found = generate(folder).completions
    assert [completion.prompt for completion in found] == PROMPTS
    for completion in found:
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert completion.prompt_tokens == len(tokenizer.encode(completion.prompt))
        assert (len(completion.token_ids), completion.finish_reason) == (10, "length")
        assert generate(folder, [completion.prompt]).completions == (completion,)


def test_end_token_ends_a_text(tmp_path):
    folder = save(tmp_path)
    tokens = generate(folder, ["the cat"]).completions[0].token_ids
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[2]}))
    (completion,) = generate(folder, ["the cat"]).completions
    assert completion.token_ids == tokens[: tokens.index(tokens[2]) + 1]
    assert completion.finish_reason == "stop"


def test_temperature_follows_the_seed(tmp_path):
    folder = save(tmp_path)

    def text(seed):
        sampling = Sampling(max_tokens=10, temperature=1.0, seed=seed)
        return generate(folder, ["a"], sampling).completions

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1) != generate(folder, ["a"]).completions


def test_more_prompts_than_rows_are_served_one_after_another(tmp_path):
    folder = save(tmp_path)
    few = generate(folder, **{"limits.max_num_seqs": 1})
    assert few.completions == generate(folder).completions


def test_what_cannot_be_served_is_refused(tmp_path):
    folder = save(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len 80"):
        generate(folder, ["a" * 75], **{"limits.max_model_len": 80})
    with pytest.raises(ConfigError, match="no tokenizer"):
        generate("tiny-dense")
    (tmp_path / "small").mkdir()
    small = save(tmp_path / "small", card(LLAMA, vocab_size=200))
    with pytest.raises(ConfigError, match="258 tokens, its vocabulary 200"):
        generate(small)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        generate(folder)
