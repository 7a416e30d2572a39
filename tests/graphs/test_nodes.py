import sys
from types import SimpleNamespace

import pytest
import torch

from cgprof.errors import DeviceError
from cgprof.graphs import nodes
from cgprof.graphs.node_names import demangled
from cgprof.graphs.topology import Node, contents
from tests.support.fake_cuda_graphs import (
    FakeGraph,
    FakeNode,
    MemoryType,
    RuntimeMemoryType,
    fake_driver,
    fake_runtime,
)

DEVICE, HOST = MemoryType.CU_MEMORYTYPE_DEVICE, MemoryType.CU_MEMORYTYPE_HOST
UNIFIED, ARRAY = MemoryType.CU_MEMORYTYPE_UNIFIED, MemoryType.CU_MEMORYTYPE_ARRAY
MEMORY = {
    0x10: (RuntimeMemoryType.cudaMemoryTypeDevice, 0),
    0x18: (RuntimeMemoryType.cudaMemoryTypeDevice, 0),
    0x20: (RuntimeMemoryType.cudaMemoryTypeDevice, 1),
    0x30: (RuntimeMemoryType.cudaMemoryTypeHost, 1),
    0x40: (RuntimeMemoryType.cudaMemoryTypeManaged, 1),
    0x50: (RuntimeMemoryType.cudaMemoryTypeUnregistered, -2),
}


@pytest.fixture(params=[12, 13])
def fake(request, monkeypatch):
    runtime, driver = fake_runtime(request.param, MEMORY), fake_driver()
    bindings = SimpleNamespace(runtime=runtime, driver=driver)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return bindings


def copy(source, target):
    return FakeNode("Memcpy", source=source, target=target)


def test_missing_cuda_bindings_is_a_device_error_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    calls = [lambda: nodes.count_nodes(1), lambda: nodes.read_nodes(1), lambda: nodes.upload(1, 0)]
    for call in (*calls, nodes.bindings):
        with pytest.raises(DeviceError, match=r"pip install 'cgprof\[gpu\]'"):
            call()


def test_read_nodes_gives_kinds_names_and_order_by_either_bindings(fake):
    last = FakeNode("Kernel", kern="_Z4lastPf")
    first = FakeNode("Kernel", func="first_kernel")
    event = FakeNode("EventRecord")
    graph = FakeGraph([last, first, event], [(first, event), (event, last), (first, last)])
    assert nodes.read_nodes(graph) == (
        Node("kernel", "first_kernel", ()),
        Node("event-record", "", (0,)),
        Node("kernel", "last(float*)", (0, 1)),
    )
    assert nodes.read_nodes(FakeGraph([])) == ()


def test_read_nodes_puts_a_child_graph_in_place_of_its_node(fake):
    inside = [FakeNode("Memset"), FakeNode("Host")]
    before, child, after = FakeNode("Empty"), FakeNode("Graph"), FakeNode("WaitEvent")
    child.child = FakeGraph(inside, [(inside[0], inside[1])])
    graph = FakeGraph([before, child, after], [(before, child), (child, after)])
    kinds = [("empty", ()), ("memset", (0,)), ("host", (1,)), ("event-wait", (2,))]
    assert nodes.read_nodes(graph) == tuple(Node(kind, "", after) for kind, after in kinds)
    assert nodes.count_nodes(graph)["child"] == 1


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ((DEVICE, 0x10), (DEVICE, 0x20), "peer-copy"),
        ((UNIFIED, 0x20), (UNIFIED, 0x10), "peer-copy"),
        ((DEVICE, 0x10), (DEVICE, 0x18), "memcpy"),
        ((UNIFIED, 0x10), (UNIFIED, 0x30), "memcpy"),  # pinned by the other device
        ((HOST, 0x10), (DEVICE, 0x20), "memcpy"),
        ((ARRAY, 0x10), (DEVICE, 0x20), "memcpy"),
        ((UNIFIED, 0x99), (DEVICE, 0x20), "memcpy"),  # refused
        ((UNIFIED, 0x50), (DEVICE, 0x20), "memcpy"),  # pageable
        ((UNIFIED, 0x10), (UNIFIED, 0x40), "memcpy"),  # moves by itself
        ((UNIFIED, 0), (UNIFIED, 0x20), "memcpy"),
    ],
)
def test_a_copy_between_two_devices_is_a_peer_copy(fake, source, target, kind):
    (node,) = nodes.read_nodes(FakeGraph([copy(source, target)]))
    assert node.kind == kind


def test_addresses_count_as_well_where_those_of_a_host_stand(fake):
    there, own = (copy((UNIFIED, 0x10), (UNIFIED, target)) for target in (0x20, 0x18))
    there.in_host_field = own.in_host_field = True
    kinds = [node.kind for node in nodes.read_nodes(FakeGraph([there, own]))]
    assert kinds == ["peer-copy", "memcpy"]


def test_a_driver_that_refuses_a_name_is_a_device_error(fake):
    with pytest.raises(DeviceError, match=r"cuKernelGetName failed: INVALID_VALUE \[1\]"):
        nodes.read_nodes(FakeGraph([FakeNode("Kernel")]))


def test_demangled_names_are_those_of_torch():
    fill = (
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE"
        "St5arrayIPcLm1EEEEviT0_T1_"
    )
    assert demangled(fill).startswith("void at::native::vectorized_elementwise_kernel<4, at::nat")
    for name in (
        fill,
        "attention_kernel",
        "_Znot a name",
        "_ZN3foo3barI" + "N1a1bE" * 300 + "EEvv",
    ):
        assert demangled(name) == torch._C._demangle(name)


@pytest.fixture
def compute():
    return torch.cuda.Stream()


@pytest.fixture
def recorder(compute):
    from cgprof.graphs.cuda import CudaRecorder

    return CudaRecorder(compute)


def recorded(recorder, work):
    recorder.warm_up(work)
    recording = recorder.record(work)
    recording.instantiate()
    return recording


def shape_of(recording):
    return [(node.kind, node.after) for node in recording.read_nodes()]


@pytest.mark.gpu
def test_one_stream_is_a_straight_line(recorder):
    x = torch.ones(64, device="cuda")
    recording = recorded(recorder, lambda: (x.mul_(2), x.add_(1), x.relu_()))
    assert shape_of(recording) == [("kernel", ()), ("kernel", (0,)), ("kernel", (1,))]
    recording.replay()
    assert len(recording.read_nodes()) == 3


@pytest.mark.gpu
def test_side_stream_is_a_fork_and_a_join(recorder, compute):
    side = torch.cuda.Stream()
    x, y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")

    def work():
        x.mul_(2)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            y.add_(1)
        x.add_(1)
        x.relu_()
        compute.wait_stream(side)
        x.add_(y)

    found = contents(recorded(recorder, work).read_nodes())
    assert found.kinds == {"kernel": 5}
    assert (found.edges, found.roots, found.forks, found.joins) == (5, 1, 1, 1)
    assert (found.width, found.longest_path, sum(found.off_path.values())) == (2, 4, 1)


@pytest.mark.gpu
def test_memory_sets_and_copies_have_their_kinds_and_no_names(recorder):
    block, other = (torch.ones(1 << 16, device="cuda") for _ in range(2))
    pinned = torch.ones(1 << 16).pin_memory()

    def work():
        block.zero_()
        other.copy_(block)
        other.add_(1)
        pinned.copy_(other, non_blocking=True)

    recording = recorded(recorder, work)
    found = recording.read_nodes()
    counts = contents(found).kinds
    assert sum(counts.values()) == 4
    assert counts["memcpy"] >= 1
    assert counts == dict(recording.nodes)
    assert all(bool(node.name) == (node.kind == "kernel") for node in found)


@pytest.mark.multigpu(2)
def test_copy_to_another_device_is_a_peer_copy():
    here, there = torch.ones(1 << 16, device="cuda:0"), torch.ones(1 << 16, device="cuda:1")
    own = torch.ones(1 << 16, device="cuda:0")
    cudart = nodes.bindings()
    error, graph = cudart.cudaGraphCreate(0)
    assert not error
    kind = cudart.cudaMemcpyKind.cudaMemcpyDefault
    for target in (there, own):
        arguments = (target.data_ptr(), here.data_ptr(), here.nbytes, kind)
        error, _ = cudart.cudaGraphAddMemcpyNode1D(graph, None, 0, *arguments)
        assert not error
    found = nodes.read_nodes(int(graph))
    assert sorted(node.kind for node in found) == ["memcpy", "peer-copy"]
    assert contents(found).communication == 1
    cudart.cudaGraphDestroy(graph)


@pytest.mark.gpu
def test_names_are_those_of_the_profiler(recorder, compute):
    from torch.profiler import ProfilerActivity, profile

    from tests.support.late_triton import make_late_kernel

    late = make_late_kernel()
    x, w = torch.ones(256, device="cuda"), torch.ones(256, 256, device="cuda")

    def work():
        x.add_(1)
        late[(1,)](x)
        torch.mv(w, x).softmax(0)

    names = sorted(node.name for node in recorded(recorder, work).read_nodes() if node.name)
    with (
        torch.cuda.stream(compute),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace,
    ):
        work()
        compute.synchronize()
    on_device = [event for event in trace.events() if event.device_type.name == "CUDA"]
    seen = [event.name for event in on_device if not event.name.startswith(("Mem", "Activity"))]
    assert names == sorted(seen)
    assert "late_kernel" in names
    assert any(name.startswith("void at::native::") for name in names)


@pytest.mark.gpu
def test_external_events_are_nodes(recorder, compute):
    x = torch.ones(64, device="cuda")
    event = torch.cuda.Event(external=True)

    def work():
        x.mul_(2)
        event.record(compute)
        x.add_(1)
        compute.wait_event(event)
        x.relu_()

    kinds = [node.kind for node in recorded(recorder, work).read_nodes()]
    assert kinds == ["kernel", "event-record", "kernel", "event-wait", "kernel"]


@pytest.mark.gpu
def test_child_graph_is_read_in_place_of_its_node():
    torch.ones(1, device="cuda")
    cudart = nodes.bindings()

    def make(call, *arguments):
        error, made = call(*arguments)
        assert not error
        return made

    child, graph = make(cudart.cudaGraphCreate, 0), make(cudart.cudaGraphCreate, 0)
    root = make(cudart.cudaGraphAddEmptyNode, child, None, 0)
    for _ in range(2):
        make(cudart.cudaGraphAddEmptyNode, child, [root], 1)
    before = make(cudart.cudaGraphAddEmptyNode, graph, None, 0)
    inner = make(cudart.cudaGraphAddChildGraphNode, graph, [before], 1, child)
    make(cudart.cudaGraphAddEmptyNode, graph, [inner], 1)
    found = nodes.read_nodes(int(graph))
    assert [node.kind for node in found] == ["empty"] * 5
    assert [node.after for node in found] == [(), (0,), (1,), (1,), (2, 3)]
    assert nodes.count_nodes(int(graph)) == {"empty": 5, "child": 1}
    for made in (graph, child):
        cudart.cudaGraphDestroy(made)
