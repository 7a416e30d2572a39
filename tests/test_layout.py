"""The rules that hold for every file of the package."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cgprof"
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))

MOST_LINES = 400
DRAWERS = {"utils", "util", "common", "helpers", "helper", "base", "misc"}
MAY_TOUCH_CUDA = (
    "graphs.cuda",
    "graphs.tape",
    "graphs.nodes",
    "microbatch.runner",
    "staging.",
    "measure.clock",
    "measure.memory",
    "measure.nvml",
    "cost.synthetic",
    "engine.tokens",
    "engine.room",
    "parallel.groups",
    "moe.symmetric_rendezvous",
    "engine.worker",
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def touches_cuda(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                return True
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                if module.startswith("torch.cuda"):
                    return True
                if module == "torch" and any(alias.name == "cuda" for alias in names):
                    return True
            case ast.Import(names=names):
                if any(alias.name.startswith("torch.cuda") for alias in names):
                    return True
    return False


@pytest.mark.parametrize(
    ("code", "touches"),
    [
        ("import torch\ntorch.cuda.synchronize()", True),
        ("import torch.cuda", True),
        ("from torch import cuda", True),
        ("from torch.cuda import Stream", True),
        ("import torch\ntorch.zeros(1)  # torch.cuda", False),
        ("from torch import nn", False),
    ],
)
def test_touching_cuda_is_seen(code, touches):
    assert touches_cuda(ast.parse(code)) is touches


def test_only_named_modules_touch_torch_cuda():
    guilty = [
        name_of(path)
        for path in MODULES
        if touches_cuda(ast.parse(path.read_text()))
        and not name_of(path).startswith(MAY_TOUCH_CUDA)
    ]
    assert guilty == []


def test_no_module_is_longer_than_400_lines():
    long = {
        name_of(path): lines
        for path in MODULES
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_no_module_or_room_is_a_drawer():
    names = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    words = {word: name for name in names for word in name.split("_")}
    assert not DRAWERS & words.keys()


def test_manager_is_one_module():
    assert [name_of(path) for path in MODULES if "manager" in path.stem] in ([], ["graphs.manager"])


def test_every_folder_of_modules_is_a_room():
    assert {path.parent for path in MODULES} == {PACKAGE, *ROOMS}


def test_init_of_a_room_is_one_docstring_line():
    for room in ROOMS:
        text = (room / "__init__.py").read_text()
        body = ast.parse(text).body
        assert len(text.splitlines()) == 1, room.name
        assert len(body) == 1, room.name
        assert ast.get_docstring(ast.parse(text)), room.name


def test_modules_that_import_triton_say_so_in_their_name():
    for path in MODULES:
        imports = re.search(r"^\s*(import|from) triton\b", path.read_text(), re.MULTILINE)
        assert imports is None or path.stem.endswith("_triton"), name_of(path)


def test_triton_modules_are_imported_inside_functions_only():
    for path in MODULES:
        if path.stem.endswith("_triton"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "_triton" not in ast.unparse(node), name_of(path)


def test_every_room_is_named_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    missing = [room.name for room in ROOMS if not re.search(rf"`(cgprof/)?{room.name}/?`", readme)]
    assert missing == []
