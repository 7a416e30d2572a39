import pytest

from cgprof.config.card_fields import CardFields
from cgprof.config.quantisation import read_quantisation
from cgprof.errors import ConfigError


def read(**block: object):
    return read_quantisation(CardFields("card", {"quantization_config": block}))


def compressed(**weights: object):
    groups = {"group_0": {"weights": weights}}
    return read(quant_method="compressed-tensors", config_groups=groups)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"quant_method": "fp8"}, 256 * 384 + 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 256 * 384 + 2 * 3 * 4),
        ({"quant_method": "mxfp4"}, 256 * 384 // 2 + 256 * 384 // 32),
        # 4-bit elements; a half and a 4-bit zero point for each group of 128 columns.
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 49152 + 256 * 3 * 20 // 8),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 98304 + 256 * 24 // 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 49152 + 256 * 6 * 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 98304 + 256 * 4),
    ],
)
def test_matrix_takes_its_elements_and_their_scales(block, expected):
    assert read(**block).matrix_bytes(256, 384) == expected


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"num_bits": 8, "strategy": "tensor"}, 98304 + 2),
        ({"num_bits": 8, "strategy": "channel"}, 98304 + 256 * 2),
        ({"num_bits": 4, "strategy": "group", "group_size": 128}, 49152 + 256 * 3 * 2),
        ({"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}, 98304 + 6 * 2),
    ],
)
def test_compressed_tensors_say_how_scales_are_shared(weights, expected):
    assert compressed(**weights).matrix_bytes(256, 384) == expected


@pytest.mark.parametrize("part", ["", "text_config", "language_config", "other"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_block_is_found_where_it_lies(part, key):
    inner = {key: {"quant_method": "fp8"}}
    card = {part: inner} if part else inner
    found = read_quantisation(CardFields("card", card))
    assert found.method == "fp8"
    assert found.source == (f"{part}.{key}" if part else key)


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ({"bits": 4}, "names no quant_method"),
        ({"quant_method": "foo9"}, "'foo9'"),
        ("fp8", "names no quant_method"),
    ],
)
def test_absent_and_unknown_methods_are_refused_with_the_known_ones(block, part):
    with pytest.raises(ConfigError) as caught:
        read_quantisation(CardFields("card", {"quantization_config": block}))
    assert part in caught.value.problem
    assert "known: awq, bitsandbytes, compressed-tensors, fp8, gptq, mxfp4" in caught.value.problem


@pytest.mark.parametrize(
    "block",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "awq", "bits": "4", "group_size": 128},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "ignored_layers": "lm_head"},
        {"quant_method": "fp8", "ignored_layers": ["re:("]},
        {"quant_method": "compressed-tensors"},
    ],
)
def test_block_that_is_not_understood_is_refused(block):
    with pytest.raises(ConfigError, match="quantization_config"):
        read(**block)


@pytest.mark.parametrize(
    ("entry", "left", "covered"),
    [
        ("lm_head", ["lm_head"], ["model.lm_head2"]),
        ("gate", ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.gate_proj"]),
        ("model.layers.1", ["model.layers.1.mlp.up_proj"], ["model.layers.11.mlp.up_proj"]),
        (
            "model.layers.*.self_attn",
            ["model.layers.3.self_attn.q_proj"],
            ["model.layers.3.mlp.up_proj"],
        ),
        ("re:.*mlp[.]up.*", ["model.layers.3.mlp.up_proj"], ["model.layers.3.mlp.gate_proj"]),
    ],
)
def test_ignored_names_are_parts_patterns_or_regular_expressions(entry, left, covered):
    ignores = read(quant_method="fp8", modules_to_not_convert=["other", entry]).ignores()
    assert all(ignores(name) for name in left)
    assert not any(ignores(name) for name in covered)


def test_nothing_is_ignored_without_a_list():
    assert not read(quant_method="fp8").ignores()("lm_head")
    assert read_quantisation(CardFields("card", {})) is None
