"""Stands in for the modules of cuda-bindings that read graphs; graphs are made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace


class Result(IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    LOSSY_QUERY = 2


class MemoryType(IntEnum):
    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2
    CU_MEMORYTYPE_ARRAY = 3
    CU_MEMORYTYPE_UNIFIED = 4


class Attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9


_RUNTIME_TYPES = ("Unregistered", "Host", "Device", "Managed")
RuntimeMemoryType = IntEnum(
    "RuntimeMemoryType", [f"cudaMemoryType{name}" for name in _RUNTIME_TYPES], start=0
)


@dataclass(eq=False)
class FakeNode:
    """A handle; `func` and `kern` are symbols, `source` and `target` memory types and addresses.

    `in_host_field`: the addresses stand where a host's do.
    """

    type: str
    func: str = ""
    kern: str = ""
    source: tuple[MemoryType, int] = (MemoryType.CU_MEMORYTYPE_HOST, 0)
    target: tuple[MemoryType, int] = (MemoryType.CU_MEMORYTYPE_HOST, 0)
    child: FakeGraph | None = None
    in_host_field: bool = False

    def __int__(self):
        return id(self)


@dataclass(eq=False)
class FakeGraph:
    nodes: list[FakeNode]
    edges: list[tuple[FakeNode, FakeNode]] = field(default_factory=list)


@dataclass
class _Handle:
    symbol: str

    def __int__(self):
        return hash(self.symbol) if self.symbol else 0


def fake_runtime(version, memory):
    """The runtime module of cuda-bindings 12 or 13; 12 answers edges with data in `_v2` alone.

    `memory` maps addresses to the runtime's memory type and device; others are refused.
    """

    def pointer_attributes(address):
        if address not in memory:
            return Result.INVALID_VALUE, None
        memory_type, device = memory[address]
        return Result.SUCCESS, SimpleNamespace(type=memory_type, device=device)

    def get_nodes(graph, count):
        return Result.SUCCESS, graph.nodes[:count], len(graph.nodes)

    def get_edges(graph, count):
        sources, targets = ([edge[end] for edge in graph.edges[:count]] for end in (0, 1))
        return Result.SUCCESS, sources, targets, [None] * count, len(graph.edges)

    runtime = SimpleNamespace(
        cudaGraphGetNodes=get_nodes,
        cudaGraphGetEdges=get_edges,
        cudaGraphNodeGetType=lambda node: (
            Result.SUCCESS,
            SimpleNamespace(name=f"cudaGraphNodeType{node.type}"),
        ),
        cudaGraphChildGraphNodeGetGraph=lambda node: (Result.SUCCESS, node.child),
        cudaMemoryType=RuntimeMemoryType,
        cudaPointerGetAttributes=pointer_attributes,
    )
    if version < 13:
        runtime.cudaGraphGetEdges = lambda graph, count: (Result.LOSSY_QUERY, None, None, 0)
        runtime.cudaGraphGetEdges_v2 = get_edges
    return runtime


def fake_driver():
    """The driver module; every address is one of device 0, as cuda-bindings 13.3 has it."""

    def pointer_attribute(attribute, address):
        wants_type = attribute is Attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        return Result.SUCCESS, int(MemoryType.CU_MEMORYTYPE_DEVICE) if wants_type else 0

    def copy_params(node):
        params = SimpleNamespace()
        for end, (memory_type, address) in (("src", node.source), ("dst", node.target)):
            setattr(params, f"{end}MemoryType", memory_type)
            setattr(params, f"{end}Device", 0 if node.in_host_field else address)
            setattr(params, f"{end}Host", address if node.in_host_field else 0)
        return Result.SUCCESS, params

    def kernel_params(node):
        return Result.SUCCESS, SimpleNamespace(func=_Handle(node.func), kern=_Handle(node.kern))

    def name(handle):
        found = Result.SUCCESS if handle.symbol else Result.INVALID_VALUE
        return found, handle.symbol.encode()

    return SimpleNamespace(
        CUmemorytype=MemoryType,
        CUpointer_attribute=Attribute,
        cuPointerGetAttribute=pointer_attribute,
        cuGraphMemcpyNodeGetParams=copy_params,
        cuGraphKernelNodeGetParams=kernel_params,
        cuFuncGetName=name,
        cuKernelGetName=name,
    )
