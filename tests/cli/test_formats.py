"""Every command in every format, by really running it."""

import csv
import io

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from tests.report.test_document import REPORT_TABLES
from tests.support.checkpoints import LLAMA, save_model, save_tokenizer
from tests.support.documents import strict
from tests.support.gguf_files import write_gguf
from tests.support.runs import cuda_dbo_run, cuda_run, tape_dbo_run, write_run

FORMATS = ("text", "md", "json", "csv")
QUICK = (
    *("--model", "tiny-dense", "--device", "cpu", "--mode", "full-decode-only"),
    *("--max-num-seqs", "4", "--max-model-len", "96", "--cudagraph-capture-sizes", "2"),
    *("--set", "measure.max_samples=5", "--set", "measure.min_samples=5"),
)


def printed(*args, codes=(0,)):
    result = CliRunner().invoke(app, [*map(str, args)])
    assert result.exit_code in codes, result.stderr
    return result.stdout


def table(text):
    """Rows of CSV; every row has as many cells as the header."""
    rows = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows


def check_formats(by_format, main_column):
    assert set(by_format) == set(FORMATS)
    assert by_format["text"] != by_format["md"]
    assert strict(by_format["json"])
    assert main_column in table(by_format["csv"])[0]
    assert all(text.endswith("\n") and not text.endswith("\n\n") for text in by_format.values())


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "a", cuda_run())
    write_run(tmp_path / "b", cuda_dbo_run(run_id="b\u00e9 |x"))
    write_run(tmp_path / "tape", tape_dbo_run())
    return tmp_path


def test_plan_in_every_format():
    found = {form: printed("plan", "--dbo", "--format", form) for form in FORMATS}
    check_formats(found, "num_tokens")
    assert len(table(found["csv"])) == 1 + strict(found["json"])["num_plain"] + 5
    skipped = table(printed("plan", "--dbo", "--format", "csv", "--table", "skipped"))
    assert skipped[1][0] == "FULL-128x64q2-mb2"


def test_report_in_every_format(runs):
    paths = (runs / "a", runs / "b", runs / "tape")
    found = {form: printed("report", *paths, "--format", form) for form in FORMATS}
    check_formats(found, "replay_launch_ns")
    assert {row[0] for row in table(found["csv"])[1:]} == {"a1b2", "b\u00e9 |x"}
    assert "| key |" in found["md"]
    assert found["text"].isascii()


@pytest.mark.parametrize("name", REPORT_TABLES)
def test_report_prints_each_of_its_tables_and_names_them_in_its_help(runs, name):
    rows = table(printed("report", runs / "b", "--format", "csv", "--table", name))
    assert rows[0][0] == "run"
    listed = printed("report", "--help").partition("Tables: ")[2].partition(".")[0]
    assert name in listed.replace(",", " ").replace(";", " ").split()


def test_compare_in_every_format(runs):
    args = ("compare", runs / "a", runs / "b")
    found = {form: printed(*args, "--format", form, codes=(0, 1)) for form in FORMATS}
    check_formats(found, "replay_ratio")
    for name in ("keys", "twins", "unmatched", "verdicts"):
        table(printed(*args, "--format", "csv", "--table", name, codes=(0, 1)))


def test_compare_of_a_folder_with_itself_is_the_same(runs):
    assert strict(printed("compare", runs / "b", runs / "b", "--format", "json"))["verdict"] == (
        "same"
    )


@pytest.mark.parametrize("command", ["plan", "report", "compare"])
def test_unknown_table_is_one_line_and_2(runs, command):
    folders = {"report": [runs / "a"], "compare": [runs / "a", runs / "a"]}.get(command, [])
    result = CliRunner().invoke(app, [command, *map(str, folders), "--table", "nope"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --table: 'nope' is no table")
    assert "keys" in result.stderr


@pytest.mark.parametrize("output_format", ["md", "csv"])
def test_capture_prints_markdown_and_csv(tmp_path, output_format):
    text = printed("capture", *QUICK, "-o", tmp_path / "run", "--format", output_format)
    if output_format == "md":
        assert text.startswith("| key |")
    else:
        assert [row[2] for row in table(text)] == ["key", "FULL-2x2q1"]


@pytest.mark.parametrize("output_format", ["md", "csv"])
def test_check_prints_markdown_and_csv(tmp_path, output_format):
    text = printed("check", *QUICK, "-o", tmp_path / "run", "--format", output_format, codes=(0, 1))
    if output_format == "md":
        assert "| FULL-2x2q1 |" in text
    else:
        assert table(text)[0][:2] == ["key", "replay-eager"]


def test_generate_in_every_format(tmp_path):
    save_model(tmp_path, LLAMA)
    save_tokenizer(tmp_path)
    args = ("generate", "--device", "cpu", "--model", tmp_path, "--mode", "none", "-p", "a")
    found = {form: printed(*args, "--max-tokens", 3, "--format", form) for form in FORMATS}
    check_formats(found, "prompt_tokens")
    assert table(found["csv"])[1][1] == found["text"].removesuffix("\n")


def test_weights_in_every_format(tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "tiny.gguf", save_model(tmp_path, LLAMA), LLAMA)
    made = tmp_path / "made"
    args = ("weights", "smollm2", made, "--gguf", tmp_path / "tiny.gguf", "--force")
    found = {form: printed(*args, "--format", form) for form in FORMATS}
    check_formats(found, "directory")
    assert strict(found["json"]) == {
        "directory": str(made),
        "source": "tiny.gguf",
        "num_slices": None,
    }


def test_inspect_in_every_format():
    found = {form: printed("inspect", "tiny-moe", "--format", form) for form in FORMATS}
    check_formats(found, "field")
