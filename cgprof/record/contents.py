"""What is inside a graph: its nodes as a whole, and its work against an eager step's."""

from __future__ import annotations

from pydantic import Field

from cgprof.record.strict import NonNegative, Record

Counts = dict[str, NonNegative]


class GraphContents(Record):
    """The shape of one graph, child graphs counted through; every node is in nodes.parquet."""

    kinds: Counts = Field(default_factory=dict)  # kind -> nodes, copies to a peer apart
    edges: NonNegative
    roots: NonNegative  # nodes without a predecessor
    forks: NonNegative  # nodes with more than one successor
    joins: NonNegative  # nodes with more than one predecessor
    width: NonNegative  # most nodes that stand equally far from a root
    longest_path: NonNegative  # nodes on it
    kernels: Counts = Field(default_factory=dict)  # name -> nodes
    off_path: Counts = Field(default_factory=dict)  # of them, beside the longest path
    communication: NonNegative = 0  # kernels and copies between devices
    peer_copies: NonNegative = 0  # of them, copies made by the driver


class WorkDifference(Record):
    """Kernels of one replay against those of an eager step in a process of its own."""

    missing: Counts = Field(default_factory=dict)  # an eager step runs them, the graph does not
    surplus: Counts = Field(default_factory=dict)
    excepted: dict[str, str] = Field(default_factory=dict)  # name -> why it may differ
    equal: bool | None = None  # None: not compared
    note: str = ""
    process_id: NonNegative | None = None
