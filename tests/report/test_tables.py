import subprocess
import sys
from pathlib import Path

from cgprof.record.types import Failure
from cgprof.report.formats import OutputFormat
from cgprof.report.tables import capture_document, report_document
from tests.support.checks import checked_run
from tests.support.documents import text_of
from tests.support.runs import (
    cuda_dbo_run,
    cuda_graph,
    cuda_run,
    failed_graph,
    key,
    leg,
    run_record,
    stages,
    tape_dbo_run,
)

ROOT = Path(__file__).parents[2]
FAILURE = "FAILED: out of memory: 3 MiB free, lower --max-capture-size"
RULE = "-" * len(FAILURE)
CUDA_TABLE = f"""\
key               nodes  eager  replay  eager/replay  round robin  device  memory  parity  remark
----------------  -----  -----  ------  ------------  -----------  ------  ------  ------  {RULE}
FULL-64x64q1        602  40 ms   20 us         x2000        40 us    4 ms   4 MiB  pass    -
FULL-8x8q1          602  40 ms   10 us         x4000        20 us    4 ms   1 MiB  pass    -
FULL-64x64q1-mb2   1202  40 ms   36 us         x1111        72 us    4 ms   9 MiB  pass    -
FULL-32x32q1-mb2      -      -       -             -            -       -       -  -       {FAILURE}

graph memory: 0.31 GiB plain -> 0.63 GiB with twins (x2.03)
steps served: 34 = 30 replayed, 4 eager (no captured key fits; 4 of them split)
exchange is a loopback: there was nothing to hide
graph memory by estimate before capture: 4 MiB (+-30 % or 4 MiB, from H200 figures of this \
engine); measured: 0.63 GiB (x162)
"""
LEGEND = (
    "key: FULL-64x64q1-mb2 is graph mode-tokens x requests, q tokens a request (none: any "
    "lengths), mb microbatches (none: a plain key)"
)
POLICY = "policy: full requested, full-decode-only effective (attention runs uniform batches only)"
CUDA_MEASURED = [
    POLICY,
    LEGEND,
    "recorder: cuda: launch times are host times, device times come from device events",
    "eager, replay, round robin: host time from first to last enqueue, GPU idle before, "
    "median of 20 samples",
    "replay: the same key again (hot); round robin: keys in turn",
    "device: device events around launch, hot replay, median",
    "memory: device delta around capture beside a KV cache of 8 MiB, keys in capture order; the "
    "driver reuses its arenas, so a later key may look free",
]
TAPE_TABLE = """\
key             nodes  eager  replay  eager/replay  round robin  device  memory  parity
--------------  -----  -----  ------  ------------  -----------  ------  ------  ------
FULL-8x8q1         90   3 ms    1 ms         x3.00      1.10 ms       -  96 KiB  pass
FULL-8x8q1-mb2    180   3 ms    1 ms         x3.00      1.10 ms       -  96 KiB  pass

graph memory, tape arena: 96 KiB plain -> 144 KiB with twins (x1.50)
steps served: 34 = 30 replayed, 4 eager (no captured key fits; 4 of them split)
exchange is a loopback: there was nothing to hide
"""
TAPE_MEASURED = [
    POLICY,
    LEGEND,
    "recorder: tape, a CPU stand-in: all times are CPU stand-in times, never GPU times",
    "eager, replay, round robin: host time from first to last enqueue, queue empty before, "
    "median of 20 samples",
    "replay: the same key again (hot); round robin: keys in turn",
    "nodes: operators on the tape; memory: growth of the tape arena by this key",
]


def capture_table(record):
    return text_of(capture_document(record))


def report_text(*records):
    return text_of(report_document(records))


def line_of(text, label):
    return next(line for line in text.splitlines() if line.startswith(label)).split()


def test_capture_table_of_cuda_reads_as_agreed():
    assert capture_table(cuda_dbo_run()) == CUDA_TABLE + "\n".join(CUDA_MEASURED)


def test_capture_table_of_a_tape_reads_as_agreed():
    assert capture_table(tape_dbo_run()) == TAPE_TABLE + "\n".join(TAPE_MEASURED)


def test_capture_table_shows_parity_that_failed_or_was_not_checked():
    failed = (leg("replay-eager"), leg("step-reference", passed=False))
    graphs = (cuda_graph(key(64), parity=failed), cuda_graph(key(8), parity=()))
    text = capture_table(run_record("cuda", graphs))
    assert line_of(text, "FULL-64x64q1 ")[-2:] == ["FAIL", "step-reference"]
    assert line_of(text, "FULL-8x8q1 ")[-2:] == ["not", "verified"]


def test_capture_table_shows_what_was_not_measured_as_a_dash():
    bare = cuda_graph(key(8), replay=None, round_robin=None, witness=None, nodes={}, parity=())
    row = line_of(capture_table(run_record("cuda", (bare,))), "FULL-8x8q1")
    assert row == ["FULL-8x8q1", "-", "40", "ms", "-", "-", "-", "-", "-", "not", "verified"]


def test_capture_table_of_a_zero_replay_has_no_ratio():
    record = run_record("cuda", (cuda_graph(key(8), replay=stages(0)),))
    assert line_of(capture_table(record), "FULL-8x8q1")[4:7] == ["0", "ns", "-"]


def test_capture_table_cuts_a_long_failure_and_the_report_keeps_it():
    failure = "line one\nline two " + "x" * 200
    record = run_record("cuda", (failed_graph(key(8), failure),))
    longest = max(len(line) for line in capture_table(record).splitlines() if "FAILED" in line)
    assert longest < 200
    assert f"FULL-8x8q1: line one line two {'x' * 200}" in report_text(record)


def test_capture_table_names_kinds_of_warnings_that_the_report_spells_out():
    graphs = (
        cuda_graph(key(8), warnings=("noisy: by 4%", "slow: twice")),
        cuda_graph(key(4), warnings=("noisy: by 9%",)),
    )
    record = run_record("cuda", graphs)
    lines = capture_table(record).splitlines()
    assert (lines[2].split()[-1], lines[3].split()[-1]) == ("slow", "-")
    noisy = "noisy: 2 of 2 keys (quartiles of launch 3 % or more apart, or too few samples)"
    assert noisy in lines
    expected = "warnings\n2 like FULL-8x8q1: noisy: by 4%\nFULL-8x8q1: slow: twice\n"
    assert expected in report_text(record)


def test_capture_table_of_a_partial_run_says_what_is_missing():
    record = cuda_run(status="partial")
    rank = record.ranks[0].model_copy(update={"graphs": record.ranks[0].graphs[:1]})
    text = capture_table(record.model_copy(update={"ranks": (rank,)}))
    assert "run is partial: 1 of 2 planned keys not recorded" in text
    assert "no key captured" in capture_table(record.model_copy(update={"ranks": ()}))


def test_capture_table_of_eighty_keys_is_one_aligned_ascii_line_a_key():
    graphs = [cuda_graph(key(tokens), launch_ns=tokens * 997) for tokens in range(80, 0, -1)]
    text = capture_table(run_record("cuda", graphs))
    rows = text.split("\n\n")[0].splitlines()
    assert len(rows) == 82
    assert {row.index("pass") for row in rows[2:]} == {rows[0].index("parity")}
    assert max(map(len, rows)) <= 100
    assert text.isascii()


def test_report_text_begins_with_what_ran_where_and_how():
    lines = report_text(cuda_dbo_run(process_seconds={"start to first captured key": 12.34}))
    assert lines.startswith(
        "recorder: cuda: launch times are host times, device times come from device events\n"
        "run: a1b2, complete, started 2026-11-30T10:22:05Z\n"
        "model: tiny-moe, qwen3_moe, bfloat16\n"
        "policy: full requested, full-decode-only effective (attention runs uniform batches only)\n"
        "microbatches: 2 from 32 decode tokens, twins both\n"
        "device: NVIDIA H200, 141.00 GiB; host Xeon 8480 on node-1\n"
        "versions: cgprof 0.1.0, python 3.12.3, torch 2.11.0, triton 3.6.0, cuda 13.0, "
        "driver 580.159\n"
        "seed: 0\n"
        "timer floor: 40 ns\n"
        "recording overhead: 900 ns a step\n"
        "start to first captured key: 12.3 s\n"
        "\n"
        "findings: 3 of 22 checks\n"
        "fault: capture-failed: FULL-32x32q1-mb2, said out of memory: 3 MiB free, lower "
        "--max-capture-size\n"
        "  found when a key was not captured, for any other reason\n"
        "  way out: the failure says what to do; steps of these sizes run as a larger key or "
        "eagerly until then\n"
        "doubt: unexplained-memory: device delta 650 MiB, parts 10.7 MiB, rest 639 MiB, released "
        "0 B\n"
        "  found when the device delta and the sum of the parts are more than max(4 MiB, 2% of the "
        "device delta) apart, or more was given back than taken\n"
        "  way out: see --table memory for the keys whose rest is large; captures that failed and "
        "libraries that start late keep memory that is in no part\n"
        "info: never-replayed: FULL-64x64q1 FULL-64x64q1-mb2, steps served 34, graph memory 13 "
        "MiB\n"
        "  found when requests were served, and no step replayed the key\n"
        "  way out: cgprof's own short trial, which says nothing of your traffic: where your "
        "batches never reach these sizes, leave them out of "
        "--cudagraph-capture-sizes\n"
        "9 of 22 checks had nothing to look at:\n"
        "  work-not-eager (no eager work to compare with)\n"
        "  neighbours (processes on the device not read)\n"
        "  nvml-disagrees (no figure of NVML)\n"
        "  over-the-memory-limit (no --max-graph-memory)\n"
        "  peer-copies (nodes not read one by one)\n"
        "  launch-unexplained, tracing-inflates (no replay costs)\n"
        "  launch-model-loose (no launch model)\n"
        "  slow-host (pace of the host beside two keys not read)\n"
        "\n"
        "plan: 4 keys, 1 skipped\n"
        "skipped key         reason\n"
        "------------------  ---------------------\n"
        "FULL-512x512q1-mb2  unreachable: 256 rows\n"
        "decode batches that no key covers: 9-11, 15\n"
        "fingerprint: beef\n"
    )


def test_report_text_names_the_error_mode_that_captures_had():
    assert "capture error mode" not in report_text(cuda_run())
    text = report_text(cuda_run(capture_error_mode="thread_local"))
    assert "\ncapture error mode: thread_local\n" in text


def test_report_text_shows_stages_of_each_phase_apart():
    lines = report_text(cuda_dbo_run()).splitlines()
    hot = next(line for line in lines if line.startswith("FULL-64x64q1-mb2  hot"))
    assert " ".join(hot.split("hot")[1].split()) == (
        "2 us 150 us 36 us 39.6 us 32.4 us 0.02 40 us 900 us 1.13 ms 4 ms 20 noise"
    )
    for phase in ("eager", "round robin"):
        assert any(line.startswith(f"FULL-8x8q1        {phase}") for line in lines)


def test_report_text_shows_memory_parts_and_witnesses_side_by_side():
    text = report_text(cuda_dbo_run())
    assert (
        "key               pool compute  pool communication  instantiate+upload  outputs  "
        "workspaces       rest  allocator  device delta   NVML\n"
    ) in text
    assert (
        "FULL-8x8q1               1 MiB             512 KiB               2 MiB      0 B      "
        "64 KiB  -2.56 MiB   1.50 MiB         1 MiB  1 MiB\n"
    ) in text
    assert "three views of one growth: never added up" in text
    assert "plain keys                          320 MiB    160 MiB       320 MiB     -\n" in text


def test_report_text_of_a_tape_says_why_nvml_is_missing_and_never_gpu_memory():
    text = report_text(tape_dbo_run())
    assert "NVML: no NVML on this machine" in text
    assert "headline of plain keys and twins: tape arena bytes, not GPU memory" in text
    assert "device: Xeon 8480 on node-1" in text


def test_report_text_ends_with_failures_and_notes():
    failures = (Failure(where="parity", error="ValueError", message="odd\nthing"),)
    text = report_text(cuda_dbo_run(failures=failures, notes=("clock was low",)))
    assert text.endswith(
        "failures\n"
        "FULL-32x32q1-mb2: out of memory: 3 MiB free, lower --max-capture-size\n"
        "parity: ValueError: odd thing\n"
        "\n"
        "notes\n"
        "clock was low"
    )


def test_report_and_all_of_its_modules_import_no_torch():
    modules = [f"cgprof.report.{path.stem}" for path in (ROOT / "cgprof/report").glob("[!_]*.py")]
    program = (
        "import sys, cgprof.report\n"
        "assert not {'torch', 'pandas'} & set(sys.modules)\n"
        f"import {', '.join(modules)}\n"
        "heavy = {'torch', 'triton', 'pynvml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert len(modules) > 10
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_capture_table_has_no_remarks_for_noise_alone():
    graphs = (cuda_graph(key(8), warnings=("noisy: by 4%",)), cuda_graph(key(4)))
    text = capture_table(run_record("cuda", graphs))
    assert "remark" not in text
    assert "noisy: 1 of 2 keys" in text


def test_report_of_a_checked_run_has_one_accuracy_line_and_one_table_of_legs():
    lines = report_text(checked_run()).splitlines()
    assert sum(line.startswith("accuracy of arithmetic") for line in lines) == 1
    assert lines.count("parity") == 1


def test_report_has_no_endless_line_for_many_cases():
    many = tuple(f"full: {number} requests, contexts 1 15" for number in range(500))
    legs = (leg("replay-eager", cases=many),)
    text = report_text(run_record("cuda", (cuda_graph(key(8), parity=legs),)))
    assert "replay-eager: 500 cases (full), contexts 1 15" in text
    assert max(map(len, text.splitlines())) < 250


def test_tables_that_only_a_device_fills_say_so_on_a_tape_and_are_quiet_elsewhere():
    why = "recorder tape: this is measured on a CUDA device only"
    for name in ("alone", "launch-model", "launch-fit", "overlap", "eager-work", "estimates"):
        on_tape = report_document([tape_dbo_run()]).render(OutputFormat.TEXT, name)
        assert on_tape.splitlines()[-2:] == ["(none)", why]
        assert report_document([tape_dbo_run()]).render(OutputFormat.JSON, name) == "[]"
        assert why not in report_document([cuda_run()]).render(OutputFormat.TEXT, name)
    assert why not in report_document([tape_dbo_run()]).render(OutputFormat.TEXT, "keys")
    assert text_of(report_document([tape_dbo_run()])).count(why) == 1
