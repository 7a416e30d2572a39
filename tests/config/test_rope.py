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


def test_absent_theta_is_assumed_and_said_so():
    fields = CardFields("card", {})
    assert read_rope(fields) == RopeConfig()
    assert fields.sources["rope"].startswith("assumed")
