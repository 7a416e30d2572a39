import pytest

from cgprof.report.layout import Table, format_ratio, one_line, ratio, show

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "cell", "text"),
    [
        ("launch_ns", 12_345, "12.3 us"),
        ("pool_bytes", 3 * 1024**2, "3 MiB"),
        ("eager_ratio", 2.054, "x2.05"),
        ("eager_ratio", 2054.4, "x2054"),
        ("nodes", 2054, "2054"),
        ("floor", 0.00123456, "0.00123"),
        ("key", "two\nlines \u00b5", "two lines \\xb5"),
        ("launch_ns", None, "-"),
        ("pool_bytes", NAN, "-"),
        ("eager_ratio", INFINITY, "-"),
    ],
)
def test_show_takes_the_unit_from_the_name_of_the_column(name, cell, text):
    assert show(name, cell) == text


def test_table_aligns_words_left_and_numbers_right():
    table = Table(
        name="a",
        title="what",
        columns={"key": "key", "launch_ns": "launch", "absent": "absent"},
        rows=(("a", 5, None), ("long", 12_345, None)),
        notes=("a note",),
    )
    assert table.to_text() == (
        "what\n"
        "key    launch  absent\n"
        "----  -------  ------\n"
        "a        5 ns       -\n"
        "long  12.3 us       -\n"
        "a note"
    )


def test_table_without_rows_says_so():
    assert (
        Table(name="a", title="what", columns={"key": "key"}, rows=()).to_text() == "what\n(none)"
    )


def test_records_hold_no_nan_and_no_infinity():
    table = Table(name="a", columns={"a": "a", "b": "b"}, rows=((NAN, 1), (-INFINITY, 0.5)))
    assert table.records() == [{"a": None, "b": 1}, {"a": None, "b": 0.5}]


def test_ratio_over_zero_or_nothing_is_none():
    assert ratio(6, 3) == 2
    assert ratio(6, 0) is None
    assert ratio(None, 3) is None
    assert ratio(6, None) is None
    assert ratio(6, -3) is None
    assert format_ratio(ratio(6, 0)) == "-"


def test_one_line_is_cut_at_the_limit():
    assert one_line("abcdefghij", 8) == "abcde..."
    assert one_line("abcdefgh", 8) == "abcdefgh"
