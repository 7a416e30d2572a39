import sys

import pytest

from cgprof.errors import DeviceError
from cgprof.graphs import nodes


def test_missing_cuda_bindings_is_a_device_error_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for call in (lambda: nodes.count_nodes(1), lambda: nodes.upload(1, 0), nodes.bindings):
        with pytest.raises(DeviceError, match=r"pip install 'cgprof\[gpu\]'"):
            call()
