"""Runs the notebook in a kernel of this Python, on the run folders beside it and on made ones."""

import json
import os
import shutil
from pathlib import Path

import pytest

from cgprof.record.store import read_run
from cgprof.record.timeline import TIMELINES
from tests.support.runs import cuda_dbo_run, run_record, tape_dbo_run, write_run

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "launch_and_memory.ipynb"


@pytest.fixture
def execute(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    import nbformat
    from nbclient import NotebookClient

    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "TkAgg",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    environment.pop("DISPLAY", None)

    def run(path):
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(
            notebook,
            timeout=90,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
        )
        client.execute(env=environment)
        return notebook

    return run


@pytest.mark.slow
def test_notebook_runs_on_the_folders_beside_it(execute):
    folders = sorted(path.parent.name for path in NOTEBOOK.parent.glob("runs/*/manifest.json"))
    notebook = execute(NOTEBOOK)
    assert _printed(notebook).startswith("\n".join(folders) or "no run folders")
    records = [read_run(NOTEBOOK.parent / "runs" / name) for name in folders]
    modelled = [one for one in records if any(rank.launch_model for rank in one.ranks)]
    weighed = [one for one in records if one.worth]
    traced = [name for name in folders if (NOTEBOOK.parent / "runs" / name / TIMELINES).exists()]
    assert len(traced) >= 2
    expected = 4 * len(folders) + 2 * len(modelled) + len(weighed) + len(traced)
    assert _images(notebook) == expected


@pytest.mark.slow
def test_notebook_shows_twins_failures_and_tapes(execute, tmp_path):
    notebook_copy = tmp_path / "made" / NOTEBOOK.name
    notebook_copy.parent.mkdir()
    shutil.copy(NOTEBOOK, notebook_copy)
    write_run(notebook_copy.parent / "runs" / "gpu", cuda_dbo_run())
    write_run(notebook_copy.parent / "runs" / "nothing", run_record("cuda", ()))
    write_run(notebook_copy.parent / "runs" / "tape", tape_dbo_run())
    notebook = execute(notebook_copy)
    printed = _printed(notebook)
    assert "graph memory: 0.31 GiB plain -> 0.63 GiB with twins (x2.03)" in printed
    assert "graph memory, tape arena: 96 KiB plain -> 144 KiB with twins (x1.50)" in printed
    assert _images(notebook) == 12


def test_notebook_is_kept_without_outputs():
    import nbformat

    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


def test_kept_folders_hold_what_their_manifests_name_and_are_small():
    folders = [path.parent for path in NOTEBOOK.parent.glob("runs/*/manifest.json")]
    assert len(folders) == len(list((NOTEBOOK.parent / "runs").iterdir()))
    for folder in folders:
        named = json.loads((folder / "manifest.json").read_text())["files"]
        assert {path.name for path in folder.iterdir()} == {"manifest.json", *named}
    files = [path for folder in folders for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) < 10 * 1024**2


def _outputs(notebook):
    return [out for cell in notebook.cells for out in cell.get("outputs", ())]


def _printed(notebook):
    return "".join(out.text for out in _outputs(notebook) if out.output_type == "stream")


def _images(notebook):
    return sum("image/png" in out.get("data", {}) for out in _outputs(notebook))
