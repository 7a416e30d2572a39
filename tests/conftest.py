"""Skips what the machine lacks, and says what that is; keeps files that run side by side apart."""

import os

import pytest
import torch

# Files run side by side, each on a core of its own; their child processes too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also whole runs on several ranks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found, long = torch.cuda.device_count(), config.getoption("--long")
    for item in items:
        if item.get_closest_marker("long") and not long:
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --long"))
        needed = 1 if item.get_closest_marker("gpu") else 0
        marker = item.get_closest_marker("multigpu")
        if marker is not None:
            needed = int(marker.args[0])
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, found {found}"))


@pytest.fixture(autouse=True)
def _inference_mode():
    with torch.inference_mode():
        yield
