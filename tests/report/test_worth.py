import json

import pytest

from cgprof.record.types import RunRecord
from cgprof.record.worth import Estimate, StepTimes, WorthRecord, WorthRow
from cgprof.report.canvas import png
from cgprof.report.formats import OutputFormat
from cgprof.report.frames import worth_frame
from cgprof.report.plots import worth_figure
from cgprof.report.tables import capture_document, report_document
from cgprof.report.worth import break_even, worth_lines, worth_table
from tests.support.runs import cuda_dbo_run, tape_dbo_run


def times(median_ns):
    return StepTimes(count=20, median_ns=median_ns, iqr_ns=median_ns // 100)


def row(num_tokens, speed, verdict, *, kind="decode", **facts):
    known = {
        "plain": times(1_000_000),
        "split": times(round(1_000_000 / speed)),
        "plain_bare": times(800_000),
        "split_bare": times(850_000),
        "exchange_ns": 200_000,
        "exposed_ns": 50_000,
        "hidden": Estimate(value=0.75, low=0.7, high=0.8),
        "experts_plain_ns": 100_000,
        "experts_split_ns": 150_000,
        "speedup": Estimate(value=speed, low=speed - 0.01, high=speed + 0.01),
    }
    return WorthRow(
        kind=kind,
        num_tokens=num_tokens,
        plain_label=f"FULL-{num_tokens}",
        split_label=f"FULL-{num_tokens}-mb2",
        verdict=verdict,
        **(known | facts),
    )


def bare_less(num_tokens, speed, verdict, note, **facts):
    nothing = dict.fromkeys(("plain_bare", "split_bare", "exchange_ns", "exposed_ns", "hidden"))
    return row(num_tokens, speed, verdict, bare_note=note, hidden_note=note, **nothing, **facts)


YES, NO, OPEN = "worth it", "not worth it", "undecided"
LOSING = [row(32, 0.7, NO), row(64, 0.8, NO), row(128, 0.95, OPEN)]
WINNING = [row(32, 0.8, NO), row(64, 1.1, YES), row(128, 1.2, YES)]


def run_with(
    rows,
    *,
    make=cuda_dbo_run,
    num_ranks=4,
    exchange="all-to-all",
    notes=(),
    spread=False,
    run_id=None,
    **parallel,
):
    worth = WorthRecord(exchange=exchange, num_ranks=num_ranks, rows=tuple(rows), notes=notes)
    record = make(worth=worth)
    config = record.config
    changes = {
        "microbatch": config.microbatch.model_copy(update={"spread_real_tokens": spread}),
        "parallel": config.parallel.model_copy(update=parallel),
    }
    return record.model_copy(
        update={"config": config.model_copy(update=changes), "run_id": run_id or record.run_id}
    )


def spread_row(num_tokens, speed, verdict):
    return row(num_tokens, speed, verdict, kind="spread", fewest_tokens=num_tokens // 2)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([NO, YES, YES], 64),
        ([YES, YES, YES], 32),
        ([NO, NO, YES], 128),
        ([YES, NO, YES], 128),
        ([YES, YES, NO], None),
        ([YES, YES, OPEN], None),
        ([NO, NO, NO], None),
    ],
)
def test_break_even_is_where_every_larger_size_pays_too(verdicts, expected):
    rows = [row(32 << i, 1.0, verdict) for i, verdict in enumerate(verdicts)]
    found = break_even(rows[::-1])
    assert (found.num_tokens if found else None) == expected


def test_break_even_is_one_sentence_with_its_interval():
    line = worth_lines(run_with(WINNING))[0]
    assert line == (
        "DBO for decode, all-to-all over 4 ranks: break-even at 64 tokens a rank, plain/split "
        "x1.10 [1.09, 1.11]; measured 32 to 128"
    )


def test_absence_of_a_break_even_is_said_with_the_best_and_the_open_sizes():
    line = worth_lines(run_with(LOSING))[0]
    assert line == (
        "DBO for decode, all-to-all over 4 ranks: no break-even up to 128 tokens a rank; the best "
        "is 128 tokens, plain/split x0.95 [0.94, 0.96]; undecided at 128; measured 32 to 128"
    )


def test_sizes_that_pay_below_a_largest_that_does_not_are_named():
    line = worth_lines(run_with([row(32, 1.2, YES), row(64, 0.9, NO)]))[0]
    assert "no break-even up to 64 tokens a rank: it pays at 32 but not up to the largest" in line


def test_kind_that_was_not_measured_is_said():
    decode, prefill = worth_lines(run_with([row(512, 0.9, NO, kind="prefill")]))
    assert "DBO for decode: not measured" in decode
    assert "measured 512 only" in prefill


def test_one_rank_says_that_there_is_nothing_to_hide_and_claims_no_break_even():
    note = "one rank: the exchange is a loopback, so there is nothing to hide"
    rows = [bare_less(32, 0.7, NO, note), bare_less(64, 1.1, YES, note)]
    record = run_with(rows, num_ranks=1, exchange="loopback")
    line = worth_lines(record)[0]
    assert "nothing to hide, the exchange is a loopback" in line
    assert "x0.70 to x1.10 as fast" in line
    assert "break-even" not in line
    text = worth_table(record).to_text()
    assert f"no bare steps: {note}" in text
    for words in ("hidden share", "exposed", "plain bare"):
        assert words not in text.splitlines()[1]


@pytest.mark.parametrize(
    ("rows", "finding"),
    [
        ([(64, 0.8, NO), (128, 1.1, YES), (256, 1.2, YES)],
         "pays from 128 tokens a rank, fall-back/spread x1.10 [1.09, 1.11]; measured 64 to 256"),
        ([(64, 0.7, NO), (128, 0.8, NO)],
         "pays from no size on up to 128 tokens a rank; the best is 128 tokens, fall-back/spread "
         "x0.80 [0.79, 0.81]; measured 64 to 128"),
        ([(64, 1.1, YES), (128, 0.8, NO)],
         "pays from no size on up to 128 tokens a rank: it pays at 64 but not up to the largest; "
         "measured 64 to 128"),
        ([], None),
    ],
)  # fmt: skip
def test_spreading_has_a_finding_of_its_own(rows, finding):
    record = run_with([*WINNING, *(spread_row(*one) for one in rows)], spread=True)
    decode, spread, prefill = worth_lines(record)
    assert "DBO for decode, all-to-all over 4 ranks: break-even at 64 tokens" in decode
    if finding is None:
        assert spread.startswith("spreading few tokens: not measured")
    else:
        assert spread == f"spreading few tokens, all-to-all over 4 ranks: {finding}"
    assert prefill.startswith("DBO for prefill")


def test_spreading_is_not_spoken_of_without_the_setting_or_on_one_rank():
    for record in (run_with(WINNING), run_with(WINNING, spread=True, num_ranks=1)):
        assert len(worth_lines(record)) == 2
        shown = "\n".join([*worth_lines(record), worth_table(record).to_text()])
        assert "spread" not in shown
        assert "smallest rank" not in shown


def test_table_tells_the_smallest_rank_of_spread_rows_and_what_is_compared():
    record = run_with([*WINNING, spread_row(128, 0.9, NO)], spread=True)
    text = worth_table(record).to_text()
    assert "smallest rank" in text.splitlines()[1]
    assert "spread: all ranks full but the last" in text
    rows = worth_table(record).records()
    assert [one["fewest_tokens"] for one in rows] == [None, None, None, 64]
    assert (rows[3]["kind"], rows[3]["num_tokens"]) == ("spread", 128)
    kinds = [axes.get_title() for axes in worth_figure(worth_frame(record)).axes[:2]]
    assert kinds == ["decode", "spread"]


def test_rows_of_several_runs_say_whose_they_are_and_by_which_settings():
    records = [
        run_with(WINNING, run_id="first", nccl_max_ctas=4, num_ranks=2),
        run_with(LOSING, run_id="second", exchange="symmetric-memory", nccl_graph_mixing=True),
        run_with(LOSING, run_id="third", make=tape_dbo_run, num_ranks=2),
    ]
    titles = [
        worth_table(record).title.removeprefix("is DBO worth it here: ") for record in records
    ]
    assert titles == [
        "all-to-all over 2 ranks, at most 4 NCCL CTAs, graph mixing off; run first",
        "symmetric-memory over 4 ranks; run second",
        "all-to-all over 2 ranks; run third",
    ]
    shown = report_document(records).render(OutputFormat.TEXT, "worth")
    assert [title in shown for title in titles] == [True] * 3
    tags = [worth_table(record).records()[0] for record in records]
    names = ("exchange", "num_ranks", "nccl_max_ctas", "nccl_graph_mixing")
    assert [tuple(one[name] for name in names) for one in tags] == [
        ("all-to-all", 2, 4, "off"),
        ("symmetric-memory", 4, None, "on"),
        ("all-to-all", 2, None, "off"),
    ]
    rows = json.loads(report_document(records).render(OutputFormat.JSON, "worth"))
    assert [(one["run"], one["num_tokens"]) for one in rows] == [
        (run, size) for run in ("first", "second", "third") for size in (32, 64, 128)
    ]


def test_run_without_the_comparison_says_so_beside_others():
    other = cuda_dbo_run()
    shown = report_document([run_with(WINNING), other]).render(OutputFormat.TEXT, "worth")
    assert f"not measured; run {other.run_id}" in shown


def test_cpu_times_are_labelled_in_the_sentence_the_table_and_the_figure():
    record = run_with(LOSING, make=tape_dbo_run)
    assert all("CPU stand-in times" in line for line in worth_lines(record)[:1])
    assert "CPU stand-in times" in worth_table(record).to_text()
    assert "CPU stand-in" in worth_figure(worth_frame(record)).get_suptitle()
    on_gpu = run_with(LOSING)
    assert "CPU" not in worth_table(on_gpu).to_text() + worth_lines(on_gpu)[0]


def test_table_says_how_each_number_was_measured_and_why_others_are_missing():
    rows = [
        row(32, 0.7, NO, hidden=None, hidden_note="cannot be told from noise"),
        row(64, 0.8, NO, experts_plain_ns=None, experts_split_ns=None, experts_note="a CPU"),
    ]
    text = worth_table(run_with(rows, notes=("prefill of 4096: too long",))).to_text()
    assert "no profiler on" in text
    assert "hidden share = 1 - exposed / exchange" in text
    assert "traced after all timing" in text
    assert "no hidden share: cannot be told from noise (decode 32)" in text
    assert "no growth of the experts: a CPU (decode 64)" in text
    assert "left out: prefill of 4096: too long" in text


def test_table_has_numbers_with_their_units_for_programs():
    first = worth_table(run_with(WINNING)).records()[1]
    expected = {
        "kind": "decode",
        "num_tokens": 64,
        "plain_ns": 1_000_000,
        "plain_bare_ns": 800_000,
        "exchange_ns": 200_000,
        "exposed_ns": 50_000,
        "hidden": 0.75,
        "speedup_ratio": 1.1,
        "experts_ratio": 1.5,
        "verdict": "worth it",
        "samples": 20,
    }
    assert {name: first[name] for name in expected} == expected


@pytest.mark.parametrize("output_format", list(OutputFormat))
def test_report_has_the_table_in_every_format(output_format):
    shown = report_document([run_with(WINNING)]).render(output_format, "worth")
    assert "all-to-all" in shown or output_format in (OutputFormat.JSON, OutputFormat.CSV)
    assert "worth it" in shown
    if output_format is OutputFormat.JSON:
        assert [one["num_tokens"] for one in json.loads(shown)] == [32, 64, 128]


def test_capture_shows_the_finding_and_only_if_it_was_measured():
    text = capture_document(run_with(WINNING)).render(OutputFormat.TEXT)
    assert "is DBO worth it here: all-to-all over 4 ranks" in text
    assert "break-even at 64 tokens" in text
    assert "DBO" not in capture_document(cuda_dbo_run()).render(OutputFormat.TEXT)
    assert worth_table(cuda_dbo_run()).rows == ()


def test_record_comes_back_from_json():
    record = run_with(WINNING, notes=("x",))
    assert RunRecord.model_validate_json(record.model_dump_json()) == record


def test_figure_draws_speed_and_times_of_each_kind():
    rows = [*WINNING, row(512, 0.9, NO, kind="prefill")]
    figure = worth_figure(worth_frame(run_with(rows)))
    assert [axes.get_title() for axes in figure.axes[:2]] == ["decode", "prefill"]
    steps = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert steps["plain"] == [1000, 1000, 1000]
    assert steps["split without exchange"] == [850, 850, 850]
    assert png(figure).startswith(b"\x89PNG")


def test_figure_of_a_run_without_the_comparison_says_nothing_to_plot():
    figure = worth_figure(worth_frame(cuda_dbo_run()))
    texts = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert texts == {"nothing to plot"}


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1.1, 1.3, "above 1"), (-2.0, -0.5, "below 0"), (0.9, 1.3, None), (-2.0, 0.1, None)],
)
def test_hidden_share_outside_of_its_range_is_explained_where_it_is_sure(low, high, word):
    share = Estimate(value=(low + high) / 2, low=low, high=high)
    text = worth_table(run_with([row(32, 0.7, NO, hidden=share)])).to_text()
    for known in ("above 1", "below 0"):
        assert (f"hidden share {known}: " in text) is (known == word)
