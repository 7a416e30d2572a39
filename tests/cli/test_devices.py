import json

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.cli.devices import devices_table
from cgprof.record.place import Device

FOUND = (
    Device(index=0, name="NVIDIA H200", total_bytes=2**37, compute_capability="9.0"),
    Device(index=1, name="A", compute_capability="8.0"),
)


def devices(monkeypatch, *args):
    monkeypatch.setattr("cgprof.measure.nvml.list_devices", lambda: FOUND)
    result = CliRunner().invoke(app, ["devices", *args])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_devices_table_aligns_and_drops_empty_columns():
    assert devices_table(FOUND).to_text().splitlines() == [
        "index  name             memory  compute",
        "-----  -----------  ----------  -------",
        "    0  NVIDIA H200  128.00 GiB  9.0",
        "    1  A                     -  8.0",
    ]


def test_devices_as_csv_and_json_have_bytes(monkeypatch):
    lines = devices(monkeypatch, "--format", "csv").splitlines()
    assert lines[0] == "index,name,total_bytes,compute_capability,driver,uuid,note"
    assert lines[1] == f"0,NVIDIA H200,{2**37},9.0,,,"
    document = json.loads(devices(monkeypatch, "--format", "json"))
    assert [device["total_bytes"] for device in document] == [2**37, None]


def test_devices_as_markdown_is_one_table(monkeypatch):
    assert devices(monkeypatch, "--format", "md").splitlines()[:3] == [
        "| index | name | memory | compute |",
        "| ---: | :--- | ---: | :--- |",
        "| 0 | NVIDIA H200 | 128.00 GiB | 9.0 |",
    ]


@pytest.mark.parametrize("output_format", ["text", "md", "json", "csv"])
def test_devices_without_a_device_prints_no_table(monkeypatch, output_format):
    monkeypatch.setattr("cgprof.measure.nvml.list_devices", list)
    result = CliRunner().invoke(app, ["devices", "--format", output_format])
    assert (result.exit_code, result.stdout) == (3, "")
    assert len(result.stderr.splitlines()) == 1


def test_devices_of_this_machine_are_printed_or_missed_on_one_line():
    result = CliRunner().invoke(app, ["devices", "--format", "json"])
    if result.exit_code == 0:
        assert json.loads(result.stdout)[0]["name"]
    else:
        assert (result.exit_code, result.stdout) == (3, "")
        assert len(result.stderr.splitlines()) == 1
