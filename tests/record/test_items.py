import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cgprof.errors import RecordError
from cgprof.record.scores import ItemScore
from cgprof.record.store import ITEMS, RunWriter, read_items
from tests.support.records import run_record


def item(index=0, **fields):
    known = {
        "task": "gsm8k",
        "kind": "generate",
        "phase": "replay",
        "item_id": str(index),
        "prompt": "Question: caf\u00e9?\nAnswer:",
        "gold": "18",
        "output": " #### 18",
        "token_ids": (1, 2, 3),
        "score": 1.0,
        "correct": True,
    }
    return ItemScore(**{**known, **fields})


ROWS = [
    item(0),
    item(1, phase="eager", correct=False, answered=False, output="", token_ids=()),
    item(2, score=None, correct=None),
    item(3, choice_scores=(-1.5, None)),
]


def test_items_come_back_as_they_were(tmp_path):
    writer = RunWriter(tmp_path)
    writer.items.extend(ROWS)
    writer.write(run_record())
    assert read_items(tmp_path) == tuple(ROWS)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert ITEMS in manifest["files"]


def test_run_without_a_task_has_no_items_and_no_file(tmp_path):
    RunWriter(tmp_path).write(run_record())
    assert read_items(tmp_path) == ()
    assert not (tmp_path / ITEMS).exists()


def test_older_items_do_not_outlive_a_forced_rerun(tmp_path):
    writer = RunWriter(tmp_path)
    writer.items.extend(ROWS)
    writer.write(run_record())
    writer.close()
    RunWriter(tmp_path, force=True).write(run_record())
    assert read_items(tmp_path) == ()


def test_damaged_items_are_refused(tmp_path):
    (tmp_path / ITEMS).write_bytes(b"PAR1 and nothing more")
    with pytest.raises(RecordError, match=ITEMS):
        read_items(tmp_path)


def test_items_of_another_form_are_refused(tmp_path):

    pq.write_table(pa.table({"item_id": ["0"], "surplus": [1]}), tmp_path / ITEMS)
    with pytest.raises(RecordError, match="damaged"):
        read_items(tmp_path)
