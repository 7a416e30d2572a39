import pytest

from cgprof.config.flags import FLAGS, spell
from cgprof.config.load import load_run
from cgprof.config.settings import known_settings, nearest_setting, parse_assignment
from cgprof.errors import ConfigError


def test_every_flag_sets_a_known_setting():
    assert FLAGS.keys() <= known_settings().keys()


def test_an_element_keeps_the_flag_of_its_list():
    assert spell("capture.sizes[2]") == "capture.sizes[2] (--cudagraph-capture-sizes)"
    assert spell("measure.context_len") == "measure.context_len"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b = 1.5", 1.5),
        ("a.b=true", True),
        ('a.b="1"', "1"),
        ("a.b=word", "word"),
        ("a.b=x=y", "x=y"),
        ("a.b=1\nc = 2", "1\nc = 2"),
        ("a.b=", ""),
    ],
)
def test_assignment_reads_toml_or_a_bare_word(text, value):
    path, read = parse_assignment(text)
    assert path == "a.b"
    assert (type(read), read) == (type(value), value)


def test_nearest_setting_looks_at_the_last_word():
    assert nearest_setting("limits.block_sizes") == "limits.block_size"
    assert nearest_setting("zzz") is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("measure.launch_model", "{}"),
        ("microbatch.timeout_s", "1e30"),
        ("parallel.startup_timeout_s", "1e300"),
        ("parallel.replay_timeout_s", "86401"),
    ],
)
def test_tables_in_place_of_values_and_endless_times_are_refused(setting, value):
    with pytest.raises(ConfigError, match=setting.replace(".", r"\.")):
        load_run(None, "tiny-moe", {}, [f"{setting}={value}"])
