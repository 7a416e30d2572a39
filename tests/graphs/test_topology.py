import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgprof.graphs.topology import (
    Node,
    RawGraph,
    RawNode,
    communicates,
    contents,
    difference,
    flatten,
    longest_path,
)

KINDS = ("kernel", "memcpy", "peer-copy", "event-record")


def kernel(*after, name="k"):
    return Node("kernel", name, after)


@st.composite
def graphs(draw):
    size = draw(st.integers(1, 12))
    nodes = []
    for index in range(size):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        kind = draw(st.sampled_from(KINDS))
        name = draw(st.sampled_from(("a", "ncclDevKernel", "b"))) if kind == "kernel" else ""
        nodes.append(Node(kind, name, tuple(sorted(after))))
    return tuple(nodes)


def all_paths(nodes, end):
    if not nodes[end].after:
        return [(end,)]
    return [(*path, end) for before in nodes[end].after for path in all_paths(nodes, before)]


@given(graphs())
def test_contents_bounds_every_path_and_adds_up(nodes):
    found = contents(nodes)
    lengths = [len(path) for end in range(len(nodes)) for path in all_paths(nodes, end)]
    path = longest_path(nodes)
    assert found.longest_path == max(lengths) == len(path)
    assert path in all_paths(nodes, path[-1])
    assert 1 <= found.width <= len(nodes)
    assert found.width * found.longest_path >= len(nodes)
    assert sum(found.kinds.values()) == len(nodes)
    assert sum(found.kernels.values()) == found.kinds.get("kernel", 0)
    beside = [node.name for i, node in enumerate(nodes) if i not in path and node.kind == "kernel"]
    assert found.off_path == {name: beside.count(name) for name in set(beside)}
    assert found.edges == sum(len(node.after) for node in nodes)
    assert found.peer_copies == found.kinds.get("peer-copy", 0)
    assert found.communication == found.kernels.get("ncclDevKernel", 0) + found.peer_copies


def test_straight_line_has_neither_forks_nor_joins():
    found = contents([kernel(*range(i - 1, i) if i else ()) for i in range(5)])
    assert (found.edges, found.roots, found.forks, found.joins) == (4, 1, 0, 0)
    assert (found.width, found.longest_path) == (1, 5)
    assert found.off_path == {}


def test_fork_and_join_leave_the_short_branch_beside_the_path():
    nodes = (kernel(), kernel(0, name="short"), kernel(0), kernel(2), kernel(1, 3))
    found = contents(nodes)
    assert (found.edges, found.roots, found.forks, found.joins) == (5, 1, 1, 1)
    assert (found.width, found.longest_path) == (2, 4)
    assert longest_path(nodes) == (0, 2, 3, 4)
    assert found.off_path == {"short": 1}


def test_of_equal_paths_the_lowest_indices_are_taken():
    nodes = (kernel(), kernel(), kernel(0, 1), kernel(0, 1))
    assert longest_path(nodes) == (0, 2)


def test_empty_graph_has_no_width_and_no_path():
    found = contents(())
    assert (found.width, found.longest_path, found.edges) == (0, 0, 0)
    assert longest_path(()) == ()


def test_contents_looks_at_each_edge_a_few_times_only():
    looks = 0

    class Watched(tuple):
        def __iter__(self):
            nonlocal looks
            looks += len(self)
            return super().__iter__()

    nodes = [kernel()._replace(after=Watched(range(max(0, i - 3), i))) for i in range(10_000)]
    found = contents(nodes)
    assert found.longest_path == 10_000
    assert found.edges <= looks <= 5 * found.edges


@pytest.mark.parametrize(
    ("node", "does"),
    [
        (kernel(name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"), True),
        (kernel(name="c10d::symmetric_memory::barrier_kernel(unsigned int**)"), True),
        (kernel(name="_send_kernel"), False),  # packs rows on its own device
        (Node("peer-copy", "", ()), True),
        (Node("collective", "c10d::alltoall_base_", ()), True),
        (Node("memcpy", "", ()), False),
        (Node("event-record", "", ()), False),
    ],
)
def test_communicates_knows_what_crosses_devices(node, does):
    assert communicates(node) is does
    assert contents([node]).communication == does


def test_difference_lists_what_a_twin_added_and_moved():
    plain = contents([kernel(name="gemm"), kernel(0, name="norm")])
    twin = contents(
        [kernel(name="gemm"), kernel(0, name="gemm"), kernel(1, name="gemm"), kernel(0, name="cat")]
    )
    rows = {change.name: change for change in difference(plain, twin)}
    assert [change.name for change in difference(plain, twin)] == ["gemm", "cat", "norm"]
    assert (rows["gemm"].plain, rows["gemm"].twin, rows["gemm"].added) == (1, 3, 2)
    assert (rows["cat"].added, rows["cat"].moved) == (1, 1)
    assert (rows["norm"].added, rows["norm"].moved, rows["gemm"].moved) == (-1, 0, 0)


def raw(*names, edges=()):
    return RawGraph([RawNode("kernel", name) for name in names], edges)


def test_flatten_puts_nodes_behind_those_they_wait_for():
    graph = raw("last", "first", "middle", edges=[(2, 0), (1, 2), (1, 0), (1, 0)])
    assert flatten(graph) == (
        kernel(name="first"),
        kernel(0, name="middle"),
        kernel(0, 1, name="last"),
    )


def test_flatten_keeps_a_possible_order():
    graph = raw("a", "b", "c", "d", edges=[(0, 3), (1, 2)])
    assert [node.name for node in flatten(graph)] == ["a", "b", "c", "d"]


def test_flatten_puts_a_child_graph_in_place_of_its_node():
    child = raw("root-1", "root-2", "leaf-1", "leaf-2", edges=[(0, 2), (0, 3)])
    nodes = [RawNode("kernel", "before"), RawNode("child", inner=child), RawNode("kernel", "after")]
    flat = flatten(RawGraph(nodes, [(0, 1), (1, 2)]))
    assert flat == (
        kernel(name="before"),
        kernel(0, name="root-1"),
        kernel(0, name="root-2"),
        kernel(1, name="leaf-1"),
        kernel(1, name="leaf-2"),
        kernel(2, 3, 4, name="after"),
    )


def test_flatten_passes_through_a_child_without_nodes():
    empty, child = RawGraph([], []), RawNode("child", inner=raw("inside"))
    nodes = [RawNode("kernel", "a"), RawNode("child", inner=empty), child, RawNode("kernel", "b")]
    flat = flatten(RawGraph(nodes, [(0, 1), (1, 2), (2, 3)]))
    assert flat == (kernel(name="a"), kernel(0, name="inside"), kernel(1, name="b"))
    assert flatten(RawGraph([RawNode("child", inner=empty)], [])) == ()


@given(graphs(), st.randoms(use_true_random=False))
def test_flatten_gives_any_shuffled_graph_back_in_an_order_that_holds(nodes, random):
    places = list(range(len(nodes)))
    random.shuffle(places)
    shuffled = sorted(range(len(nodes)), key=places.__getitem__)
    named = [RawNode("kernel", str(index)) for index in shuffled]
    edges = [(places[before], places[i]) for i, node in enumerate(nodes) for before in node.after]
    flat = flatten(RawGraph(named, edges))
    assert all(before < index for index, node in enumerate(flat) for before in node.after)
    found = {node.name: {flat[before].name for before in node.after} for node in flat}
    assert found == {str(i): {str(b) for b in node.after} for i, node in enumerate(nodes)}
