import pytest

from cgprof.accuracy.choices import choice_row
from cgprof.errors import ConfigError


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ({"goal": "q", "sol1": "x ", "sol2": "y", "label": 1}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": 0}, 0),
        ({"question": "q", "choices": ["x", "y"], "answer": "y"}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "B"}, 1),
        ({"question": "q", "options": "A. x\nB. y", "answer": "B. y"}, 1),
        ({"question": "q", "options": "A.  x \nB. y ", "answer": "A.  x "}, 0),
        ({"question": "q", "options": "A) x\nB) y", "answer": "A"}, 0),
    ],
)
def test_row_in_every_spelling_is_the_same_question(row, right):
    found = choice_row(row, "f:1")
    assert (found.question, found.choices, found.right) == ("q", ("x", "y"), right)


def test_text_of_a_choice_goes_before_its_letter():
    row = {"question": "q", "choices": ["B", "A"], "answer": "A"}
    assert choice_row(row, "f:1").right == 1


def test_number_in_a_text_is_no_index():
    row = {"question": "q", "choices": ["1", "0"], "answer": "0"}
    assert choice_row(row, "f:1").right == 1


@pytest.mark.parametrize(
    "row",
    [
        {"goal": "q", "sol1": "x", "sol2": "y"},
        {"goal": "q", "sol1": "x", "sol2": "y", "label": 2},
        {"goal": "q", "sol1": "x", "sol2": "y", "label": -1},
        {"goal": "q", "sol1": "x", "sol2": "y", "label": True},
        {"goal": "q", "sol1": "x", "label": 0},
        {"question": "q", "choices": ["x", ""], "answer": 0},
        {"question": "q", "choices": ["x"], "answer": 0},
        {"question": "q", "choices": "x or y", "answer": 0},
        {"question": "q", "choices": ["x", "y"], "answer": "C"},
        {"question": "q", "choices": {"text": ["x"]}, "answer": 0},
        {"choices": ["x", "y"], "answer": 0},
    ],
)
def test_row_that_names_no_choice_is_refused_with_its_place(row):
    with pytest.raises(ConfigError, match="f:7"):
        choice_row(row, "f:7")
