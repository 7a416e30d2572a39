"""What ran where. Imports no torch: versions come from package metadata, devices are handed in."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cgprof.record.place import Device, Environment

_PREFIXES = ("CUDA_", "CUBLAS", "NCCL_", "PYTORCH_", "TORCH_", "OMP_", "TRITON_")
# The CUDA runtime's package; the second name is that of CUDA 12 and older.
_CUDA_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
_CPU_INFO = Path("/proc/cpuinfo")
_PACKAGE = Path(__file__).parents[1]


def collect(device: Device | None) -> Environment:
    """Returns this process's environment."""
    return Environment(
        cgprof=_version("cgprof") or "not installed",
        python=platform.python_version(),
        torch=_version("torch") or "not installed",
        triton=_version("triton"),
        cuda=next((found for name in _CUDA_PACKAGES if (found := _version(name))), None),
        hostname=platform.node(),
        platform=platform.platform(),
        cpu=_cpu_name(),
        device=device,
        variables=relevant_variables(os.environ),
        code=code_fingerprint(_PACKAGE),
    )


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns, sorted, those that change what CUDA, NCCL, torch, Triton or OpenMP do."""
    return {name: variables[name] for name in sorted(variables) if name.startswith(_PREFIXES)}


def code_fingerprint(package: Path) -> str:
    """Returns the SHA-256 of a package's modules, by name and content."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or None
