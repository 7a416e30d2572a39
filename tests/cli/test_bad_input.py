"""Bad input of every kind: one line that names it, exit code 2 or 3, and nothing left on disk."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from cgprof.cli.app import app
from tests.support.cards import DENSE, card, write_card
from tests.support.checkpoints import LLAMA, save_model
from tests.support.runs import cuda_dbo_run, tape_dbo_run, write_run

CAPTURE = ("capture", "--device", "cpu", "--mode", "none", "--no-parity", "--max-model-len", "96")
SIZES = (
    *("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--block-size"),
    *("--num-gpu-blocks-override", "--max-cudagraph-capture-size", "--cudagraph-capture-sizes"),
    *("--ubatch-size", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold"),
)


def refusal(*args, code=2):
    """The line on stderr of a command that is refused by what it was given."""
    result = CliRunner().invoke(app, [*map(str, args)])
    if not isinstance(result.exception, SystemExit):
        raise result.exception or AssertionError(f"not refused: {result.stdout}")
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    *progress, line = result.stderr.splitlines()
    assert all(text.startswith("building ") for text in progress)
    assert line.startswith("error: ")
    return line


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    """Whatever is refused writes nothing; tests prepare their files in `made`."""
    (tmp_path / "made").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert [path.name for path in (tmp_path / "cwd").iterdir()] == []


@pytest.fixture
def made(tmp_path):
    return tmp_path / "made"


@pytest.mark.parametrize("flag", SIZES)
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "  ", "nan", "1e3", "0x10", "many"])
def test_impossible_size_is_refused_with_its_flag(flag, text):
    assert flag in refusal("plan", "--dbo", flag, text)


@pytest.mark.parametrize("text", ["0", "-1", "1.01", "nan", "inf", "x", ""])
def test_impossible_share_of_memory_is_refused(text):
    assert "--gpu-memory-utilization" in refusal("plan", "--gpu-memory-utilization", text)


@pytest.mark.parametrize(
    "flag", ["--mode", "--twins", "--dtype", "--device", "--load-format", "--format", "--table"]
)
@pytest.mark.parametrize("text", ["", " ", "x", "TEXT", "\u00e9", "a\nb", "\x1b[31m", "\udcff"])
def test_unknown_word_is_refused_on_one_printable_line(flag, text):
    line = refusal("plan", flag, text)
    assert flag in line or text == "\udcff"
    assert line.isprintable()


@pytest.mark.parametrize("flag", ["--model", "--config"])
@pytest.mark.parametrize(
    "text", ["", " ", "nowhere", ".", "/", "a\nb", "\x1b[31m", "\udcff", "a" * 5000]
)
def test_name_of_nothing_is_refused(flag, text):
    line = refusal("plan", flag, text)
    assert line.isprintable()
    assert flag in line or text in (".", "/", "\udcff") or "File name too long" in line


@pytest.mark.parametrize(
    "text",
    [
        *("", "=", "=1", "seed", "nope=1", "nope.x=1", "limits=1", "limits.nope=1"),
        *("limits.max_num_seqs=", "limits.max_num_seqs=true", "limits.max_num_seqs='8'"),
        *("limits.max_num_seqs=1.0", "limits.max_num_seqs=[1]", "limits.max_num_seqs.x=1"),
        *("limits.max_num_seqs=1979-05-27", "seed=1.5", "x\ny=1", "\udcff=1", "model.name=\udcff"),
        *("measure.relative_noise=nan", "measure.relative_noise=inf", "measure.min_samples=0"),
        *("capture.sizes=[]", "capture.sizes=[0]", "capture.sizes=[[1]]", "capture.sizes=1"),
        *("microbatch.timeout_s=0", "microbatch.timeout_s=nan", "measure.context_len=-1"),
        "limits.max_num_seqs=" + "9" * 5000,
        "limits.max_num_seqs=" + "[" * 3000,
        "limits." + "a." * 2000 + "b=1",
    ],
)
def test_wrong_assignment_is_refused(text):
    refusal("plan", "--dbo", "--set", text)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"[limits]\nmax_seqs = 1\n", "limits.max_seqs: no such setting"),
        (b"[nope]\nx = 1\n", "nope.x"),
        (b"limits = 1\n", "limits"),
        (b"[limits]\nmax_num_seqs = 0\n", "0"),
        (b"[limits\n", "is not TOML"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"a = " + b"[" * 3000, "cannot be read"),
    ],
)
def test_wrong_config_names_the_file_and_the_setting(made, content, found):
    (made / "run.toml").write_bytes(content)
    line = refusal("plan", "--config", made / "run.toml")
    assert str(made / "run.toml") in line
    assert found in line


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("--model", "tiny-dense", "--dbo"), "no experts"),
        (("--dbo", "--dbo-decode-token-threshold", "1"), "below the 2 microbatches"),
        (("--ubatch-size", "4", "--dbo-prefill-token-threshold", "3"), "below the 4 microbatches"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "capture", "check"])
def test_overlap_that_cannot_be_is_refused(command, args, found):
    assert found in refusal(command, *args)


def test_last_of_a_repeated_flag_wins():
    args = ["plan", "--max-num-seqs", "0", "--max-num-seqs", "3", "--format", "md", "--format"]
    result = CliRunner().invoke(app, [*args, "json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["config"]["limits"]["max_num_seqs"] == 3


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"vocab_size": 2**40}, "the weights of"),
        ({"num_hidden_layers": 10**9}, "the weights of"),
        ({"intermediate_size": 2**40}, "the weights of"),
    ],
)
@pytest.mark.parametrize("command", ["capture", "check"])
def test_model_that_the_host_cannot_hold_is_refused_with_the_bytes(made, command, changes, found):
    write_card(made, card(DENSE, **changes))
    line = refusal(command, "--device", "cpu", "--mode", "none", "--model", made, code=3)
    assert found in line
    assert "bytes, the device has" in line


@pytest.mark.parametrize("tokens", [10**12, 10**22])
def test_step_that_the_host_cannot_hold_is_refused_with_the_bytes(tokens):
    line = refusal(*CAPTURE, "--max-num-batched-tokens", tokens, code=3)
    assert f"a step of {tokens} tokens" in line
    assert "bytes beside" in line


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_checkpoint_of_another_shape_is_refused_with_the_tensor(made, name):
    state = save_model(made, LLAMA)
    if name not in state:
        name = next(iter(state))
    state[name] = torch.zeros(3, 5)
    save_file(state, made / "model.safetensors")
    line = refusal(*CAPTURE, "--model", made)
    assert name in line
    assert "has shape (3, 5)" in line


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_unreadable_card_is_refused(made, content):
    (made / "config.json").write_bytes(content)
    assert str(made) in refusal("capture", "--model", made)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("file", "Not a directory"),
        ("file/run", "cannot write in"),
        ("taken", "--force"),
        ("/dev/null/x", "cannot write in"),
        ("a" * 300, "File name too long"),
    ],
)
@pytest.mark.parametrize("command", ["capture", "check"])
def test_output_folder_that_cannot_be_one_is_refused(made, command, output, found):
    (made / "file").write_text("kept")
    (made / "taken").mkdir()
    (made / "taken" / "summary.json").write_text("kept")
    line = refusal(command, "--device", "cpu", "--model", "tiny-dense", "-o", made / output)
    assert found in line
    assert (made / "taken" / "summary.json").read_text() == "kept"
    assert (made / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_folder_without_permission_is_refused(made):
    made.chmod(0o500)
    assert "cannot write in" in refusal(*CAPTURE, "-o", made / "run")


SUMMARY, SAMPLES = "summary.json", "replays.parquet"


def damaged(made, name, change):
    """A run folder one of whose files is replaced, or gone."""
    folder = write_run(made / "damaged", cuda_dbo_run())
    old = (folder / name).read_bytes()
    (folder / name).unlink()
    new = change(old)
    if new == "folder":
        (folder / name).mkdir()
    elif new == "loop":
        (folder / name).symlink_to(name)
    elif new is not None:
        assert new != old
        (folder / name).write_bytes(new)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda old: None,
        lambda old: "folder",
        lambda old: "loop",
        lambda old: b"",
        lambda old: old[:500],
        lambda old: old[:-5],
        lambda old: b"\x00\xff" * 100,
        lambda old: b"[]",
        lambda old: b"null",
        lambda old: b"[" * 100_000,
        lambda old: old.replace(b'"schema_version": ', b'"schema_version": 9'),
        lambda old: old.replace(b'"schema_version"', b'"schema"'),
        lambda old: old.replace(b'"run_id"', b'"run_idx"'),
        lambda old: old.replace(b'"median_ns": 20000', b'"median_ns": -1'),
        lambda old: old.replace(b'"median_ns": 20000', b'"median_ns": NaN'),
        lambda old: old.replace(b'"median_ns": 20000', b'"median_ns": ' + b"9" * 5000),
        lambda old: old.decode().encode("utf-16"),
    ],
)
@pytest.mark.parametrize("command", ["report", "compare"])
def test_damaged_summary_is_refused_with_its_path(made, command, change):
    folder = damaged(made, SUMMARY, change)
    good = [write_run(made / "good", cuda_dbo_run())] if command == "compare" else []
    assert str(folder) in refusal(command, *good, folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda old: None,
        lambda old: "folder",
        lambda old: "loop",
        lambda old: b"",
        lambda old: old[:100],
        lambda old: old[:-1],
        lambda old: b"PAR1" + b"\xff" * 100 + b"PAR1",
    ],
)
def test_damaged_samples_are_refused_by_compare(made, change):
    folder = damaged(made, SAMPLES, change)
    assert SAMPLES in refusal("compare", write_run(made / "good", cuda_dbo_run()), folder)


@pytest.mark.parametrize("path", ["", "absent", "/dev/null", "a" * 5000, "\udcff", "a\nb"])
def test_path_without_a_run_is_refused(made, path):
    refusal("report", path)
    refusal("compare", write_run(made / "good", cuda_dbo_run()), path)


def test_file_of_a_run_is_no_run_folder(made):
    folder = write_run(made / "good", cuda_dbo_run())
    refusal("report", folder / SUMMARY)
    refusal("compare", folder, folder / SUMMARY)


def test_cpu_run_beside_a_gpu_run_is_refused(made):
    a, b = write_run(made / "a", cuda_dbo_run()), write_run(made / "b", tape_dbo_run())
    assert "recorder: cuda in A, tape in B" in refusal("compare", a, b)


def test_unreadable_folder_leaves_the_other_reports_unprinted(made):
    good = write_run(made / "good", cuda_dbo_run())
    shutil.copytree(good, made / "bad")
    Path(made / "bad" / SUMMARY).unlink()
    refusal("report", good, made / "bad")


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("report",), "RUN..."),
        (("nope",), "'nope'"),
        (("plan", "--nope"), "--nope"),
        (("plan", "extra"), "extra"),
        (("plan", "--format"), "--format"),
        (("plan", "--format", "xls"), "'text', 'md', 'json', 'csv'"),
        (("generate",), "--prompt"),
        (("generate", "-p", "a", "--max-tokens", "0"), "--max-tokens"),
        (("generate", "-p", "a", "--temperature", "-1"), "--temperature"),
        (("check", "--limit", "0"), "--limit"),
        (("check", "--task-kind", "x"), "--task-kind"),
        (("weights", "gpt", "x"), "'gpt'"),
        (("weights", "smollm2", "x", "--slice-experts", "1"), "--slice-experts"),
        (("compare", "one"), "'B'"),
    ],
)
def test_wrong_usage_is_one_line(args, found):
    assert found in refusal(*args)
