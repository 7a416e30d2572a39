import pytest

from cgprof.config.card_fields import CardFields
from cgprof.config.layer_kinds import read_attention_layers, read_moe_layers
from cgprof.errors import ConfigError


@pytest.mark.parametrize(
    ("card", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"interleave_moe_layer_step": 3}, (2, 5)),
        ({"mlp_only_layers": [0, 5]}, (1, 2, 3, 4)),
    ],
)
def test_layers_of_experts_follow_from_the_keys_that_place_them(card, layers):
    assert read_moe_layers(CardFields("card", card), 6) == layers


@pytest.mark.parametrize(
    "card", [{"mlp_only_layers": 3}, {"moe_layer_freq": [1]}, {"decoder_sparse_step": 0}]
)
def test_placing_that_makes_no_sense_is_refused(card):
    with pytest.raises(ConfigError):
        read_moe_layers(CardFields("card", card), 6)


def test_layers_without_attention_and_with_a_window_are_told_apart():
    kinds = ["linear_attention", "sliding_attention", "full_attention", "mamba"]
    found = read_attention_layers(CardFields("card", {"layer_types": kinds}), 4)
    assert found.attending == (1, 2)
    assert found.num_windowed == 1
    assert found.others == ("linear_attention", "mamba")
    with pytest.raises(ConfigError, match="layer_types"):
        read_attention_layers(CardFields("card", {"layer_types": kinds}), 5)


@pytest.mark.parametrize(
    ("card", "windowed"),
    [
        ({}, 0),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 4096}, 3),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
    ],
)
def test_window_holds_in_all_layers_where_it_is_in_use(card, windowed):
    assert read_attention_layers(CardFields("card", card), 3).num_windowed == windowed


def test_absurd_number_of_layers_is_refused():
    with pytest.raises(ConfigError, match="1000000000 layers"):
        read_attention_layers(CardFields("card", {}), 10**9)
