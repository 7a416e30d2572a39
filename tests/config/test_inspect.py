import pytest
import torch

from cgprof.config.inspect import Inspection, inspect_card
from cgprof.errors import ConfigError
from tests.support.cards import DENSE, MOE, card, write_card
from tests.support.checkpoints import save_state

SHORT = {"n_layer": 24, "n_embd": 2048, "n_head": 16}
LATENT = {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
EIGHT_LINEAR = {"factor": 8}


def look(folder, content: dict[str, object], **options) -> Inspection:
    return inspect_card(write_card(folder, content), **options)


def refusal(folder, content: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        look(folder, content)
    assert "\n" not in str(caught.value)
    return caught.value.problem


def values(found: Inspection) -> dict[str, object]:
    return {field.name: field.value for field in found.fields}


def sources(found: Inspection) -> dict[str, str]:
    return {field.name: field.source for field in found.fields}


def test_language_part_of_a_composite_card_is_read_and_never_the_vision_tower(tmp_path):
    text = {
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
    vision = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16}
    found = look(tmp_path, {"text_config": text, "vision_config": vision})
    fields = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    assert [values(found)[field] for field in fields] == [2560, 34, 8, 4, 256]
    assert {sources(found)[field].partition(".")[0] for field in fields} == {"text_config"}
    assert any("vision_config" in note for note in found.notes)
    assert "no num_heads" in refusal(tmp_path, {"vision_config": vision})


@pytest.mark.parametrize("part", ["language_config", "llm_config"])
def test_language_part_has_several_names(tmp_path, part):
    found = look(tmp_path, {part: card(DENSE, "dtype"), "dtype": "float16", "hidden_size": 1})
    assert (found.family, values(found)["hidden_size"], found.dtype) == ("qwen3", 64, "float16")
    assert sources(found)["num_heads"] == f"{part}.num_attention_heads"
    nested = {"thinker_config": {"text_config": DENSE}}
    assert sources(look(tmp_path, nested))["dtype"] == "thinker_config.text_config.dtype"


def test_rope_spellings_of_one_meaning_share_a_form_and_a_fingerprint(tmp_path):
    flat = card(DENSE, rope_theta=5e5)
    spelled = [
        card(flat, rope_scaling={"type": "linear", **EIGHT_LINEAR}),
        card(flat, rope_scaling={"rope_type": "linear", **EIGHT_LINEAR}),
        card(
            DENSE,
            "rope_theta",
            rope_parameters={"rope_type": "linear", "rope_theta": 5e5, **EIGHT_LINEAR},
        ),
    ]
    found = [look(tmp_path, content) for content in spelled]
    for one in found:
        fields = values(one)
        assert (fields["rope"], fields["rope_theta"], fields["rope_factor"]) == ("linear", 5e5, 8.0)
        assert "'linear'" in one.refusal
    assert len({one.fingerprint for one in found}) == 1
    both = card(spelled[0], rope_parameters={"rope_type": "linear", "factor": 4, "rope_theta": 5e5})
    assert "keep one" in refusal(tmp_path, both)


def test_fingerprint_tells_meanings_apart(tmp_path):
    scaled = {"type": "yarn", "factor": 4.0}
    fp8 = {"quant_method": "fp8"}
    contents = [
        MOE,
        card(MOE, rope_scaling=scaled),
        card(MOE, rope_scaling={**scaled, "beta_fast": 16}),
        card(MOE, quantization_config=fp8),
        card(MOE, quantization_config={**fp8, "ignored_layers": ["model.layers.0"]}),
        card(MOE, mlp_only_layers=[0]),
    ]
    assert len({look(tmp_path, content).fingerprint for content in contents}) == len(contents)


def test_rope_that_differs_by_layer_is_sized_and_not_run(tmp_path):
    layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    found = look(tmp_path, card(DENSE, "rope_theta", rope_parameters=layers))
    assert values(found)["rope"] == "differs by layer type"
    assert "layer type" in found.refusal


def test_declared_head_dim_decides_the_kv_bytes(tmp_path):
    content = {
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 24,
        "head_dim": 64,
        "dtype": "bfloat16",
    }
    declared = look(tmp_path, content)
    assert declared.kv_bytes_per_token == 49_152
    assert sources(declared)["head_dim"] == "head_dim"
    derived = look(tmp_path, card(content, "head_dim"))
    assert derived.kv_bytes_per_token == 34_560
    assert sources(derived)["head_dim"].startswith("derived")
    problem = refusal(tmp_path, card(content, "head_dim", hidden_size=2881))
    assert "2881 does not divide by 64" in problem


@pytest.mark.parametrize(
    ("content", "attention", "kv_bytes"),
    [
        ({**SHORT, "multi_query": True}, "MQA", 100_663_296),
        ({"n_layer": 12, "n_embd": 768, "n_head": 12}, "MHA", 301_989_888),
        ({"n_layer": 12, "n_embd": 768, "n_head": 12, "n_head_kv": None}, "MHA", 301_989_888),
    ],
)
def test_kv_heads_that_are_not_counted_follow_from_the_card(tmp_path, content, attention, kv_bytes):
    found = look(tmp_path, content)
    assert found.attention == attention
    assert found.kv_bytes_per_token * 8192 == kv_bytes


def test_latent_attention_keeps_one_vector_for_all_heads(tmp_path):
    found = look(tmp_path, LATENT)
    assert found.attention == "MLA"
    assert found.kv_bytes_per_token == 31_104
    assert found.family is None
    assert found.weight_bytes is None
    assert "qk_rope_head_dim" in refusal(tmp_path, card(LATENT, "qk_rope_head_dim"))


@pytest.mark.parametrize(
    ("changes", "dtype", "source"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16", "torch_dtype"),
        ({"dtype": "torch.bfloat16"}, "bfloat16", "dtype"),
        ({}, "bfloat16", "assumed: bfloat16 (no dtype)"),
    ],
)
def test_dtype_is_read_under_both_keys_or_assumed(tmp_path, changes, dtype, source):
    found = look(tmp_path, card(DENSE, "dtype", **changes))
    assert (found.dtype, sources(found)["dtype"]) == (dtype, source)


def test_unknown_and_contradictory_dtypes_are_refused(tmp_path):
    assert "'bf17'" in refusal(tmp_path, card(DENSE, dtype="bf17"))
    problem = refusal(tmp_path, card(DENSE, dtype="float16", torch_dtype="bfloat16"))
    assert "dtype is 'float16' but torch_dtype is 'bfloat16'" in problem
    nested = {"text_config": DENSE, "torch_dtype": "bfloat16"}
    assert "text_config.dtype is 'float32'" in refusal(tmp_path, nested)


def test_asked_dtype_goes_before_the_cards(tmp_path):
    stated, asked = look(tmp_path, DENSE), look(tmp_path, DENSE, dtype="bfloat16")
    assert stated.weight_bytes == 2 * asked.weight_bytes
    assert stated.kv_bytes_per_token == 2 * asked.kv_bytes_per_token
    assert sources(asked)["dtype"] == "--dtype"


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3"])
def test_index_without_a_head_ties_and_contradicts_a_card_that_does_not(tmp_path, model_type):
    names = {"model.embed_tokens.weight": torch.zeros(2), "model.norm.weight": torch.zeros(2)}
    save_state(tmp_path, names, num_shards=2)
    silent = card(DENSE, "tie_word_embeddings", model_type=model_type)
    for _ in range(2):
        found = look(tmp_path, silent)
        assert values(found)["tied_embeddings"] is True
        reason = "model.safetensors.index.json has no lm_head.weight (no tie_word_embeddings)"
        assert sources(found)["tied_embeddings"] == reason
        assert "output head" not in {part.name for part in found.weights}
        problem = refusal(tmp_path, card(silent, tie_word_embeddings=False))
        assert "untied but no output head" in problem
        # The index alone says as much.
        for shard in tmp_path.glob("*.safetensors"):
            shard.unlink()


def test_head_under_a_longer_name_is_a_head(tmp_path):
    save_state(tmp_path, {"language_model.lm_head.weight": torch.zeros(2)})
    found = look(tmp_path, card(DENSE, "tie_word_embeddings"))
    assert values(found)["tied_embeddings"] is False


def test_family_that_ties_does_so_where_nothing_says_otherwise(tmp_path):
    found = look(tmp_path, card(DENSE, "tie_word_embeddings", model_type="gemma2"))
    assert values(found)["tied_embeddings"] is True
    assert sources(found)["tied_embeddings"].startswith("family default of gemma2")
    assert not values(look(tmp_path, card(DENSE, model_type="gemma2")))["tied_embeddings"]


@pytest.mark.parametrize(
    ("count", "num_experts"),
    [
        ("num_local_experts", 8),
        ("num_experts", 128),
        ("n_routed_experts", 64),
        ("moe_num_experts", 64),
    ],
)
@pytest.mark.parametrize("top_k", ["num_experts_per_tok", "top_k_experts", "moe_top_k"])
def test_experts_of_any_card_are_found_under_many_names(tmp_path, count, num_experts, top_k):
    content = card(DENSE, model_type="new_moe", **{count: num_experts, top_k: 4})
    found = look(tmp_path, content)
    fields = values(found)
    assert (fields["num_experts"], fields["experts_per_token"]) == (num_experts, 4)
    assert (found.is_moe, found.num_experts) == (True, num_experts)
    assert "experts" in {part.name for part in found.weights}
    assert (sources(found)["num_experts"], sources(found)["experts_per_token"]) == (count, top_k)


@pytest.mark.parametrize(
    ("key", "value"), [("num_moe_experts", 8), ("num_experts_per_tok", 2), ("n_shared_experts", 1)]
)
def test_experts_that_no_key_counts_are_refused_with_the_names_tried(tmp_path, key, value):
    problem = refusal(tmp_path, card(DENSE, model_type="new_moe", **{key: value}))
    assert f"{key} is {value}" in problem
    assert "num_experts, num_local_experts, n_routed_experts, moe_num_experts" in problem
    look(tmp_path, card(DENSE, **{key: None}))


def test_shared_and_dense_parts_beside_experts_are_counted(tmp_path):
    changes = {"n_shared_experts": 2, "first_k_dense_replace": 1}
    found = look(tmp_path, card(MOE, model_type="new_moe", **changes))
    parts = {part.name: part.num_parameters for part in found.weights}
    assert parts["experts"] == 8 * 3 * 64 * 64
    assert parts["shared experts"] == 2 * 3 * 64 * 64
    assert parts["dense feed-forward"] == 3 * 64 * 128
    assert values(found)["num_moe_layers"] == 1


def test_quantisation_is_found_where_it_lies_and_never_taken_for_bf16(tmp_path):
    plain = look(tmp_path, MOE)
    nested = look(tmp_path, card(MOE, text_config={"quantization_config": {"quant_method": "fp8"}}))
    assert nested.quantisation.method == "fp8"
    assert sources(nested)["quantisation"] == "text_config.quantization_config"
    assert nested.weight_bytes < plain.weight_bytes
    assert (nested.family, "'fp8'" in nested.refusal) == ("qwen3_moe", True)
    assert "names no quant_method" in refusal(tmp_path, card(MOE, quantization_config={"bits": 4}))
    unknown = refusal(tmp_path, card(MOE, quantization_config={"quant_method": "foo9"}))
    assert "'foo9'" in unknown
    assert "known: awq" in unknown


def test_ignored_modules_are_counted_in_full(tmp_path):
    block = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "self_attn"]}
    parts = {
        part.name: part for part in look(tmp_path, card(MOE, quantization_config=block)).weights
    }
    plain = {part.name: part for part in look(tmp_path, MOE).weights}
    assert parts["attention"] == plain["attention"]
    assert parts["experts"].num_quantised == parts["experts"].num_parameters


def test_family_that_is_unknown_is_sized_and_says_why_it_cannot_be_run(tmp_path):
    found = look(tmp_path, card(MOE, model_type="gpt_oss", num_hidden_layers=4))
    assert found.family is None
    assert "'gpt_oss' is not supported" in found.refusal
    assert found.weight_bytes > 0
    assert any("estimate" in note for note in found.notes)


def test_feed_forward_has_a_gate_unless_its_family_has_none(tmp_path):
    for model_type, matrices in (("gpt2", 2), ("phi", 2), ("phi3", 3), ("unheard_of", 3)):
        found = look(tmp_path, card(DENSE, model_type=model_type))
        parts = {part.name: part.num_parameters for part in found.weights}
        assert parts["dense feed-forward"] == 2 * matrices * 64 * 128


def test_card_that_runs_has_the_same_fields_as_the_run(tmp_path):
    from cgprof.config.model_card import load_model_card

    for content in (DENSE, MOE, card(DENSE, "rms_norm_eps", "rope_theta", model_type="llama")):
        path = write_card(tmp_path, content)
        model, found = load_model_card(path), inspect_card(path)
        assert found.refusal is None
        fields = values(found)
        shared = fields.keys() & type(model).model_fields.keys() - {"rope"}
        assert len(shared) >= 11
        assert {name: fields[name] for name in shared} == {
            name: getattr(model, name) for name in shared
        }
        assert fields["rope_theta"] == model.rope.theta


def test_windows_further_predictions_and_other_layers_are_noted(tmp_path):
    kinds = ["sliding_attention", "full_attention", "linear_attention", "full_attention"]
    content = card(DENSE, num_hidden_layers=4, layer_types=kinds, sliding_window=128)
    found = look(tmp_path, {**content, "num_nextn_predict_layers": 1})
    assert found.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert "1 of 3 layers attend in a window of 128 tokens" in found.notes[0]
    assert "linear_attention" in found.notes[1]
    assert "predict" in found.notes[2]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": [4, 4]},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**30},
        {"num_key_value_heads": 3},
        {"rope_scaling": "linear"},
        {"architectures": "Qwen3ForCausalLM"},
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, changes):
    refusal(tmp_path, card(DENSE, **changes))
