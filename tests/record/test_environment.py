import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from cgprof.record.environment import code_fingerprint, collect, relevant_variables
from cgprof.record.place import Device

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


def test_code_fingerprint_tells_names_and_contents_of_modules_only(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("x = 1\n")
    seen = {code_fingerprint(tmp_path)}
    (tmp_path / "room" / "notes.txt").write_text("not code")
    assert code_fingerprint(tmp_path) in seen
    (tmp_path / "room" / "a.py").write_text("x = 2\n")
    seen.add(code_fingerprint(tmp_path))
    (tmp_path / "room" / "a.py").rename(tmp_path / "a.py")
    seen.add(code_fingerprint(tmp_path))
    assert len(seen) == 3


def test_code_of_this_package_is_in_its_environment():
    code = collect(None).code
    assert code == code_fingerprint(_ROOT / "cgprof")
