import pytest

from cgprof.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1073741824", 2**30),
        ("0.5GiB", 2**29),
        ("512MiB", 2**29),
        ("512 MiB", 2**29),
        (" 2kib ", 2048),
        ("1GB", 10**9),
        ("1.5MB", 1_500_000),
        ("7B", 7),
        ("0", 0),
        # Exact, where a float of GiB would not be.
        ("0.1GiB", 107_374_182),
        ("16777216.000000001GiB", 16777216 * 2**30 + 1),
    ],
)
def test_size_means_its_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "-1", "-1GiB", "+1", "0.5", "0.5B", "1.GiB", ".5GiB", "1e9", "nan", "infGiB"),
        *("1GiBs", "1 G", "1TB", "1,5GiB", "1_000", "0x10", "1GiB 2", "\u0661MiB", "9" * 19),
    ],
)
def test_what_is_no_size_is_refused_with_the_text_and_the_way_out(text):
    with pytest.raises(ValueError, match="is not a size; write whole bytes, or a number") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert "0.5GiB" in str(caught.value)
