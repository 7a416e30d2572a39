import pytest
import torch

from cgprof.attention.reference import ReferenceAttention
from cgprof.config.schema import RopeConfig
from cgprof.errors import ConfigError, UnsupportedError
from cgprof.models.checkpoint import load_state
from cgprof.models.decoder import Decoder
from cgprof.moe.dispatcher import LocalDispatcher
from tests.support.builders import tiny_model
from tests.support.models import RefuseHostReads, make_context, make_model, run_hidden

# Groups of three query heads, as SmolLM2 has them.
LLAMA = tiny_model(num_experts=0, hidden_size=72, num_heads=9, num_kv_heads=3).model_copy(
    update={"family": "llama", "qk_norm": False}
)
MIXTRAL = tiny_model(experts_per_token=3).model_copy(update={"family": "mixtral", "qk_norm": False})
LLAMA3 = RopeConfig(
    kind="llama3",
    theta=100.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=256,
)
PROMPTS = [[5, 9, 2, 2, 77, 30, 1], [3], [100 - t for t in range(19)]]


def transformers_config(card):
    from transformers import LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

    shared = {
        "vocab_size": card.vocab_size,
        "hidden_size": card.hidden_size,
        "intermediate_size": card.ffn_size,
        "num_hidden_layers": card.num_layers,
        "num_attention_heads": card.num_heads,
        "num_key_value_heads": card.num_kv_heads,
        "head_dim": card.head_dim,
        "rms_norm_eps": card.norm_eps,
        "tie_word_embeddings": card.tied_embeddings,
        "max_position_embeddings": card.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": card.rope.theta},
        "attn_implementation": "eager",
    }
    if card.rope.kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        shared["rope_parameters"] |= {
            "rope_type": "llama3",
            **{name: getattr(card.rope, name) for name in names},
            "original_max_position_embeddings": card.rope.original_max_positions,
        }
    if card.family == "llama":
        return LlamaConfig(**shared)
    if card.family == "mixtral":
        experts = {"num_local_experts": card.num_experts, "sliding_window": None}
        experts |= {"num_experts_per_tok": card.experts_per_token}
        return MixtralConfig(**shared | experts | {"intermediate_size": card.expert_ffn_size})
    if not card.is_moe:
        return Qwen3Config(**shared)
    return Qwen3MoeConfig(
        **shared,
        num_experts=card.num_experts,
        num_experts_per_tok=card.experts_per_token,
        moe_intermediate_size=card.expert_ffn_size,
        norm_topk_prob=card.norm_topk,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def checkpoint_names(state, family):
    """A transformers state with its stacked experts taken apart, as published checkpoints are."""
    parts = {}
    gate_up_down = (
        ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    if family == "mixtral":
        state = {name.replace(".mlp.", ".block_sparse_moe."): state[name] for name in state}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, rows in enumerate(tensor):
                gate, up = rows.chunk(2)
                stem = name.removesuffix("gate_up_proj") + str(expert)
                parts[f"{stem}.{gate_up_down[0]}.weight"] = gate
                parts[f"{stem}.{gate_up_down[1]}.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(tensor):
                parts[f"{name.removesuffix('down_proj')}{expert}.{gate_up_down[2]}.weight"] = rows
        else:
            parts[name] = tensor
    return parts


@pytest.mark.parametrize(
    "card",
    [
        tiny_model(),
        tiny_model(norm_topk=False),
        tiny_model(num_experts=0),
        tiny_model(num_experts=0, tied_embeddings=True),
        LLAMA,
        LLAMA.model_copy(update={"tied_embeddings": True, "rope": LLAMA3}),
        MIXTRAL,
    ],
    ids=["moe", "moe-unscaled", "dense", "dense-tied", "llama", "llama3-tied", "mixtral"],
)
def test_logits_equal_transformers(card):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(transformers_config(card)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if name.endswith("norm.weight"):
            parameter.normal_(1.0, 0.2, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    ours = make_model(card, ReferenceAttention())
    load_state(ours, checkpoint_names(theirs.state_dict(), card.family))

    histories = [list(prompt) for prompt in PROMPTS]
    computed = [0] * len(PROMPTS)
    new = [list(prompt) for prompt in PROMPTS]
    for _ in range(3):
        context = make_context(new, computed, pad_tokens=2)
        scores = ours.logits(run_hidden(ours, context))
        assert scores.dtype is torch.float32
        rows = scores[:-2].split([len(part) for part in new])
        for request, history in enumerate(histories):
            expected = theirs(torch.tensor([history])).logits[0, computed[request] :]
            torch.testing.assert_close(rows[request], expected, rtol=0, atol=2e-5)
        computed = [len(history) for history in histories]
        new = [[int(row[-1].argmax())] for row in rows]
        histories = [old + more for old, more in zip(histories, new, strict=True)]


def test_forward_never_asks_the_host():
    model = make_model(tiny_model(), ReferenceAttention())
    context = make_context(PROMPTS, [0, 0, 0], pad_tokens=3)
    with RefuseHostReads():
        run_hidden(model, context)


def test_forward_does_not_depend_on_padding():
    model = make_model(tiny_model(), ReferenceAttention())
    short = run_hidden(model, make_context(PROMPTS, [0, 0, 0]))
    padded = run_hidden(model, make_context(PROMPTS, [0, 0, 0], pad_tokens=5))
    torch.testing.assert_close(padded[:-5], short, rtol=1e-5, atol=1e-5)
    assert padded.isfinite().all()


def test_expert_usage_counts_distinct_experts_of_real_tokens():
    card = tiny_model(num_experts=16, experts_per_token=2)
    model = make_model(card, ReferenceAttention())
    one = make_context([[7]], [0], pad_tokens=9)
    out = torch.empty(10, card.hidden_size)
    assert model.expert_usage(one, out).tolist() == [2, 2]
    many = make_context([[3, 11, 29, 50, 77, 101]], [0], pad_tokens=4)
    usage = model.expert_usage(many, out)
    assert (usage > 2).all()
    assert (usage <= 12).all()
    assert torch.equal(out, run_hidden(model, many))
    dense = make_model(tiny_model(num_experts=0), ReferenceAttention())
    assert dense.expert_usage(one, out).shape == (0,)


def test_model_refuses_a_cache_of_another_model():
    model = make_model(tiny_model(), ReferenceAttention())
    with pytest.raises(ConfigError, match="kv cache"):
        model.bind_cache(torch.zeros(2, 4, 2, 16, 2, 8), ReferenceAttention())


def test_forward_refuses_an_output_of_another_shape():
    model = make_model(tiny_model(), ReferenceAttention())
    context = make_context([[1, 2]], [0])
    for out in (torch.empty(3, 32), torch.empty(2, 64)[:, ::2]):
        with pytest.raises(ConfigError, match="output"):
            model.forward(context, out)


def test_forward_without_a_cache_is_refused():
    model = Decoder(
        tiny_model(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        dispatcher=LocalDispatcher(loopback=False),
        batch_invariant=False,
    )
    with pytest.raises(ConfigError, match="bind_cache"):
        run_hidden(model, make_context([[1]], [0]))


def test_batch_invariance_is_refused_on_a_cpu():
    with pytest.raises(UnsupportedError, match="batch_invariant"):
        make_model(tiny_model(), ReferenceAttention(), batch_invariant=True)


def on_gpu(card, dtype=torch.float32, batch_invariant=False):
    from cgprof.attention.paged import PagedAttention

    backend = PagedAttention(
        num_heads=card.num_heads,
        num_kv_heads=card.num_kv_heads,
        head_dim=card.head_dim,
        dtype=dtype,
        batch_invariant=batch_invariant,
    )
    return make_model(card, backend, device="cuda", dtype=dtype, batch_invariant=batch_invariant)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "card",
    [
        tiny_model(),
        tiny_model(uniform_routing=True, experts_per_token=8),
        tiny_model(num_experts=0),
        LLAMA,
        MIXTRAL,
    ],
    ids=["moe", "moe-uniform", "dense", "llama", "mixtral"],
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_cuda_forward_equals_cpu(card, batch_invariant):
    cpu = make_model(card, ReferenceAttention())
    gpu = on_gpu(card, batch_invariant=batch_invariant)
    load_state(gpu, dict(cpu.named_weights()))
    for tokens, computed in ((PROMPTS, [0, 0, 0]), ([[4], [8], [15]], [7, 1, 19])):
        expected = run_hidden(cpu, make_context(tokens, computed, pad_tokens=2))
        found = run_hidden(gpu, make_context(tokens, computed, pad_tokens=2, device="cuda"))
        torch.testing.assert_close(found.cpu()[:-2], expected[:-2], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            gpu.logits(found[:3]).cpu(), cpu.logits(expected[:3]), rtol=1e-3, atol=2e-3
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_do_not_depend_on_the_batch_when_invariant_on_gpu(dtype):
    model = on_gpu(tiny_model(), dtype, batch_invariant=True)
    whole = run_hidden(model, make_context(PROMPTS, [0, 0, 0], device="cuda"))
    alone = run_hidden(model, make_context(PROMPTS[:1], [0], pad_tokens=4, device="cuda"))
    assert torch.equal(alone[:7], whole[:7])
    assert torch.equal(model.logits(alone[:1]), model.logits(whole)[:1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "card", [tiny_model(), tiny_model(num_experts=0), LLAMA], ids=["moe", "dense", "llama"]
)
def test_forward_replays_without_a_sync_on_gpu(card):
    model = on_gpu(card, torch.bfloat16)
    context = make_context([[4], [8], [15]], [7, 1, 19], pad_tokens=5, device="cuda")
    out = torch.empty(8, card.hidden_size, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model.forward(context, out)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.forward(context, out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            model.forward(context, out)
    for ids in ([4, 8, 15], [99, 3, 64]):
        context.batch.input_ids[:3] = torch.tensor(ids, dtype=torch.int32, device="cuda")
        expected = run_hidden(model, context)
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
