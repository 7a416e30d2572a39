import pytest

from cgprof.config.card_fields import CardFields
from cgprof.config.rope import read_rope
from cgprof.config.schema import RopeConfig
from cgprof.errors import ConfigError

LINEAR = RopeConfig(kind="linear", theta=5e5, factor=8)


def rope(**card: object) -> RopeConfig:
    return read_rope(CardFields("card", card))


@pytest.mark.parametrize(
    "card",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 8, "rope_theta": 500000}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 8},
            "rope_parameters": {"rope_type": "linear", "factor": 8, "rope_theta": 5e5},
        },
    ],
)
def test_three_spellings_have_one_form(card):
    assert rope(**card) == LINEAR


@pytest.mark.parametrize(
    "card",
    [
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 8}},
        {
            "rope_scaling": {"type": "linear", "factor": 8},
            "rope_parameters": {"rope_type": "linear", "factor": 4},
        },
        {
            "rope_scaling": {"type": "linear", "factor": 8},
            "rope_parameters": {"rope_type": "default"},
        },
    ],
)
def test_spellings_that_disagree_are_refused(card):
    with pytest.raises(ConfigError, match="keep one"):
        rope(**card)


@pytest.mark.parametrize(
    "card",
    [
        {"rope_theta": 0},
        {"rope_theta": "1e6"},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"factor": 8}},
        {"rope_scaling": {"rope_type": 3}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
    ],
)
def test_what_is_not_understood_is_refused(card):
    with pytest.raises(ConfigError):
        rope(**card)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_scaling_is_read_whole():
    expected = RopeConfig(
        kind="llama3",
        theta=5e5,
        factor=8,
        low_freq_factor=1,
        high_freq_factor=4,
        original_max_positions=8192,
    )
    assert rope(rope_theta=5e5, rope_scaling=LLAMA3) == expected
    assert rope(rope_parameters={**LLAMA3, "rope_theta": 5e5}) == expected


@pytest.mark.parametrize("key", [key for key in LLAMA3 if key != "rope_type"])
def test_llama3_scaling_that_lacks_a_number_names_it(key):
    with pytest.raises(ConfigError, match=f"has no {key}$"):
        rope(rope_scaling={name: value for name, value in LLAMA3.items() if name != key})


@pytest.mark.parametrize(
    "changes",
    [{"high_freq_factor": 1.0}, {"original_max_position_embeddings": 0.5}, {"factor": -1}],
)
def test_llama3_scaling_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ConfigError):
        rope(rope_scaling={**LLAMA3, **changes})


def test_absent_theta_is_assumed_and_said_so():
    fields = CardFields("card", {})
    assert read_rope(fields) == RopeConfig()
    assert fields.sources["rope"].startswith("assumed")
