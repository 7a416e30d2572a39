import csv
import io

import pytest

from cgprof.errors import ConfigError
from cgprof.report.compare import compare_sides
from cgprof.report.document import Document, Lines, strict_json
from cgprof.report.formats import OutputFormat
from cgprof.report.layout import Interval, Table
from cgprof.report.pairing import Side
from cgprof.report.tables import capture_document, report_document
from tests.support.documents import data_of, rows_of, strict, text_of
from tests.support.runs import (
    MIB,
    cuda_dbo_run,
    cuda_graph,
    cuda_run,
    failed_graph,
    key,
    run_record,
    samples_of,
    stages,
    tape_dbo_run,
    totals,
)

MAIN = Table(
    name="keys",
    title="what | ever",
    columns={"key": "key", "launch_ns": "launch", "memory_bytes": "memory", "remark": "remark"},
    rows=(("a|b", 12_345, 3 * MIB, None), ("c", None, float("nan"), None)),
    notes=("a <note>",),
    tags={"rank": 0},
    optional=frozenset({"remark"}),
)
OTHER = Table(name="other", columns={"reason": "reason"}, rows=())


def document(*tables):
    return Document(
        blocks=[Lines(lines=["a line", "  another\n"]), *tables],
        tables=tables,
        data=lambda: {"rows": 2},
    )


def side(record):
    return Side(path="runs/x", record=record, samples=samples_of(record).table().to_pandas())


def test_text_has_blocks_between_blank_lines_and_units():
    assert text_of(document(MAIN, OTHER)) == (
        "a line\n  another\n\n\n"
        "what | ever\n"
        "key   launch  memory\n"
        "---  -------  ------\n"
        "a|b  12.3 us   3 MiB\n"
        "c          -       -\n"
        "a <note>\n\n"
        "(none)"
    )


def test_markdown_has_github_tables_whose_marks_are_escaped():
    assert document(MAIN, OTHER).render(OutputFormat.MD) == (
        "- a line\n"
        "- another\n\n"
        "### what \\| ever\n\n"
        "| key | launch | memory |\n"
        "| :--- | ---: | ---: |\n"
        "| a\\|b | 12.3 us | 3 MiB |\n"
        "| c | - | - |\n\n"
        "- a \\<note>\n\n"
        "(none)"
    )


def test_csv_is_the_main_table_in_raw_units_with_tags_in_front():
    text = document(MAIN, OTHER).render(OutputFormat.CSV)
    assert text == ("rank,key,launch_ns,memory_bytes,remark\n0,a|b,12345,3145728,\n0,c,,,")


def test_table_option_selects_one_table_in_every_format():
    made = document(MAIN, OTHER)
    assert made.render(OutputFormat.CSV, "other") == "reason"
    assert made.render(OutputFormat.TEXT, "other") == "(none)"
    assert made.render(OutputFormat.MD, "keys").startswith("### what")
    assert strict(made.render(OutputFormat.JSON, "keys"))[1] == {
        "rank": 0,
        "key": "c",
        "launch_ns": None,
        "memory_bytes": None,
        "remark": None,
    }


@pytest.mark.parametrize("output_format", OutputFormat)
def test_unknown_table_is_refused_with_the_names_that_there_are(output_format):
    with pytest.raises(ConfigError, match=r"--table: 'nope' is no .* it has keys, other$"):
        document(MAIN, OTHER).render(output_format, "nope")


def test_tables_of_one_name_are_one_with_all_their_columns():
    first = Table(name="memory", columns={"a": "a"}, rows=((1,),), tags={"rank": 0})
    second = Table(name="memory", columns={"b": "b"}, rows=((2,),), tags={"rank": 1})
    rows = rows_of(document(first, second))
    assert rows == [{"rank": "0", "a": "1", "b": ""}, {"rank": "1", "a": "", "b": "2"}]


def test_interval_is_one_cell_for_people_and_three_numbers_for_programs():
    table = Table(
        name="keys",
        columns={"replay_interval": "replay B/A"},
        rows=((Interval(2.0, 1.9, 2.125),), (Interval(2.0),), (None,)),
    )
    assert text_of(document(table)).splitlines()[-3:] == [
        "x2.00 [1.90, 2.12]",
        "x2.00 [no interval]",
        "-",
    ]
    rows = [[*row.values()] for row in table.records()]
    assert rows == [[2.0, 1.9, 2.125], [2.0, None, None], [None, None, None]]
    assert table.record_names() == ["replay_ratio", "replay_low", "replay_high"]


def test_csv_quotes_what_would_break_a_row():
    table = Table(name="a", columns={"text": "text"}, rows=(('two\nlines, "quoted"',),))
    rows = list(csv.reader(io.StringIO(document(table).render(OutputFormat.CSV))))
    assert rows == [["text"], ['two\nlines, "quoted"']]


def test_json_never_holds_nan():
    with pytest.raises(ValueError, match="JSON"):
        strict_json({"value": float("nan")})
    assert strict_json("\udcff \u00e9") == '"\\udcff \\u00e9"'


def test_capture_as_csv_has_one_row_a_key_with_what_text_leaves_out():
    rows = rows_of(capture_document(cuda_dbo_run()))
    assert [row["key"] for row in rows] == [
        "FULL-64x64q1",
        "FULL-8x8q1",
        "FULL-64x64q1-mb2",
        "FULL-32x32q1-mb2",
    ]
    assert (rows[0]["run"], rows[0]["rank"]) == ("a1b2", "0")
    assert (rows[0]["replay_launch_ns"], rows[0]["memory_bytes"]) == ("20000", str(4 * MIB))
    assert rows[3]["replay_launch_ns"] == ""
    assert rows[3]["remark"].startswith("FAILED: out of memory")
    clean = rows_of(capture_document(cuda_run()))
    assert clean[0].keys() == rows[0].keys()


REPORT_TABLES = (
    *("keys", "parity", "stages", "memory", "totals", "graphs", "captures", "remarks", "skipped"),
    *("checks", "accuracy", "verdicts", "worth", "findings", "estimates", "memory-sum", "alone"),
    *("launches", "launch-model", "launch-fit", "overlap", "eager-work"),
    *("ranks", "rank-memory", "rank-replays", "rank-decisions"),
)


@pytest.mark.parametrize("name", REPORT_TABLES)
def test_every_table_of_a_report_is_there_whatever_a_run_recorded(name):
    for record in (cuda_dbo_run(), tape_dbo_run(), cuda_run(ranks=())):
        made = report_document([record])
        header = made.render(OutputFormat.CSV, name).splitlines()[0]
        assert header.startswith("run")
        strict(made.render(OutputFormat.JSON, name))


def test_report_of_two_runs_tells_their_rows_apart():
    records = [cuda_run(run_id="one"), cuda_dbo_run(run_id="two")]
    rows = rows_of(report_document(records), "stages")
    assert {row["run"] for row in rows} == {"one", "two"}
    assert [record["run_id"] for record in data_of(report_document(records))] == ["one", "two"]
    assert data_of(report_document(records[:1]))["run_id"] == "one"


def test_report_lists_failures_and_warnings_in_full_for_programs():
    graphs = (
        failed_graph(key(8), "one\ntwo " + "x" * 200),
        cuda_graph(key(4), warnings=("noisy: by 4%", "slow: twice")),
    )
    rows = rows_of(report_document([run_record("cuda", graphs)]), "remarks")
    assert [(row["key"], row["kind"]) for row in rows] == [
        ("FULL-8x8q1", "failure"),
        ("FULL-4x4q1", "warning"),
        ("FULL-4x4q1", "warning"),
    ]
    assert rows[0]["text"] == "one\ntwo " + "x" * 200


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ({"replay": stages(0, 0)}, {}, "the median of A is zero"),
        ({"replay": None}, {}, "not measured in A"),
        ({}, {"replay": None}, "not measured in B"),
        (
            {"replay": stages(20_000, count=1)},
            {"replay": stages(30_000, count=1)},
            "too few samples for an interval",
        ),
        ({}, {}, None),
    ],
)
def test_compare_gives_the_reason_of_a_number_that_is_null(a, b, reason):
    sides = [side(run_record("cuda", (cuda_graph(key(8), **facts),))) for facts in (a, b)]
    change = data_of(compare_sides(*sides).to_document())["keys"][0]["changes"]["replay"]
    assert change["reason"] == reason
    assert (change["low"] is None) is (reason is not None)


def test_compare_gives_the_reason_of_a_missing_memory_ratio():
    a = run_record("cuda", (cuda_graph(key(8)),), rank_totals=totals("device", 0, 0))
    b = run_record("cuda", (cuda_graph(key(8)),), rank_totals=totals("device", MIB, 0))
    document = data_of(compare_sides(side(a), side(b)).to_document())
    assert document["memory_ratio"] is None
    assert document["memory_ratio_reason"] == "the graph memory of A is zero"
    assert data_of(compare_sides(side(b), side(b)).to_document())["memory_ratio_reason"] is None
    c = run_record("cuda", (cuda_graph(key(8)),))
    document = data_of(compare_sides(side(b), side(c)).to_document())
    assert document["memory_ratio_reason"] == "no graph memory in B"


def test_compare_as_csv_has_ratios_and_bounds_as_numbers():
    made = compare_sides(side(cuda_run()), side(cuda_dbo_run())).to_document()
    row = rows_of(made)[0]
    assert (row["key"], row["replay_a_ns"], row["verdict"]) == ("FULL-64x64q1", "20000", "same")
    assert float(row["replay_low"]) <= float(row["replay_ratio"]) <= float(row["replay_high"])
    assert float(row["round_robin_ratio"]) == 1.0
    assert [row["key"] for row in rows_of(made, "twins")] == ["FULL-64x64q1-mb2"]
    assert [row["key"] for row in rows_of(made, "unmatched")] == [
        "FULL-64x64q1-mb2",
        "FULL-32x32q1-mb2",
    ]
    assert rows_of(made, "verdicts") == []


def test_every_table_of_a_report_is_tested():
    names = {table.name for table in report_document([cuda_dbo_run()]).tables}
    assert names == set(REPORT_TABLES)
