import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from cgprof.record.environment import collect, relevant_variables
from cgprof.record.types import Device

_ROOT = Path(__file__).parents[2]


def test_collect_tells_versions_and_keeps_the_device_it_was_given():
    device = Device(index=0, name="a device")
    environment = collect(device)
    assert environment.torch == version("torch")
    assert environment.python == ".".join(str(part) for part in sys.version_info[:3])
    assert environment.device == device
    assert environment.hostname


def test_collect_imports_no_torch():
    code = (
        "import sys; from cgprof.record import environment, store; environment.collect(None);"
        "sys.exit(int(bool({'torch', 'pynvml', 'triton'} & set(sys.modules))))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=_ROOT).returncode == 0


def test_relevant_variables_keeps_those_by_prefix_only():
    found = relevant_variables(
        {"NCCL_DEBUG": "WARN", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "1", "MY_CUDA_KEY": "x"}
    )
    assert list(found.items()) == [("CUDA_VISIBLE_DEVICES", "1"), ("NCCL_DEBUG", "WARN")]
