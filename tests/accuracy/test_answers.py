from decimal import Decimal

import pytest

from cgprof.accuracy.answers import extract_answer, grade

CASES = [
    ("18", "She sells 9 eggs at $2.\n#### 18\nQuestion: and now?\n#### 7", "right"),
    ("1234", "It costs $1,234.00.", "right"),
    ("-3", "#### -3", "right"),
    ("\u22123", "#### -3", "right"),
    ("42", "The answer is 42.", "right"),
    ("70000", "#### 70,000", "right"),
    ("5", "I cannot tell", "no answer"),
]


@pytest.mark.parametrize(("gold", "text", "expected"), CASES)
def test_grade_of_answers_as_models_write_them(gold, text, expected):
    assert grade(text, gold) == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### $70,000.50 a year", "70000.5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("a debt of \u22127.", "-7"),
        ("10-3", "3"),
        ("pages 5-10.", "10"),
        ("x = -0.5", "-0.5"),
        ("3 apples, 4 pears", "4"),
        ("sizes 1,2,3", "3"),
        ("1,2345", "2345"),
        ("12,345,678", "12345678"),
        ("so it is .25", "0.25"),
        ("#### unknown\n12 or 13\n#### 14", "14"),
        ("#### unknown\nmaybe 13", "13"),
        ("9\n####", "9"),
        ("\\boxed{42}", "42"),
        ("**+8**", "8"),
        ("3.", "3"),
    ],
)
def test_answer_is_the_first_marked_number_else_the_last(text, answer):
    assert extract_answer(text) == Decimal(answer)


@pytest.mark.parametrize("text", ["", "none", "####", "- $ , .", "#### ?\n"])
def test_text_without_a_number_has_no_answer(text):
    assert extract_answer(text) is None


def test_wrong_answer_is_not_a_missing_one():
    assert grade("#### 19", "18") == "wrong"
    assert grade("3", "-3") == "wrong"
