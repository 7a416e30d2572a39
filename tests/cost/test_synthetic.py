import pytest
import torch

from cgprof.cost.launch_model import fit
from cgprof.cost.launch_prediction import dominant, predict
from cgprof.cost.synthetic import measure_launch_model, time_graphs
from cgprof.cost.synthetic_graphs import graph_builder
from cgprof.cost.synthetic_layout import Spec, specs
from cgprof.errors import DeviceError

UNSEEN = (
    Spec(kind="memset", counts={"kernel": 300, "memset": 40}),
    Spec(kind="fork", counts={"kernel": 700, "fork": 50}),
)


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def records(model):
    return next(term.curve for term in model.terms if term.kind == "event-record")


def test_a_device_without_graphs_is_refused():
    with pytest.raises(DeviceError, match="CUDA devices, found cpu"):
        measure_launch_model(torch.device("cpu"), seed=0)


@pytest.mark.gpu
def test_every_synthetic_graph_has_the_nodes_and_forks_that_were_asked_for(device):
    with graph_builder(device) as builder:
        for spec in specs(with_peer=builder.has_peer):
            nodes = dict(builder.build(spec).nodes)  # forks are compared inside
            wanted = {kind: n for kind, n in spec.counts.items() if kind != "fork"}
            copies = wanted.pop("memcpy", 0) + wanted.pop("peer-copy", 0)
            assert nodes == wanted | ({"memcpy": copies} if copies else {})


@pytest.mark.gpu
def test_synthetic_graphs_run_all_their_kernels(device):
    with graph_builder(device) as builder:
        recording = builder.build(
            Spec(kind="fork", counts={"kernel": 31, "fork": 5, "event-record": 2})
        )
        before = builder._row.clone(), builder._side_row.clone()
        recording.replay()
        torch.cuda.synchronize()
        assert (builder._row - before[0]).unique().tolist() == [28]
        assert (builder._side_row - before[1]).unique().tolist() == [3]


@pytest.mark.gpu
def test_nothing_is_left_in_the_allocator_and_streams_are_as_before(device):
    stream = torch.cuda.Stream()
    small = [spec for spec in specs(with_peer=False) if sum(spec.counts.values()) <= 100]
    with torch.cuda.stream(stream):
        with graph_builder(device) as builder:  # workspaces of the stream stay
            builder.build(Spec(kind="kernel", counts={"kernel": 10}))
        del builder
        allocated = torch.cuda.memory_allocated()
        pools = {tuple(one["segment_pool_id"]) for one in torch.cuda.memory_snapshot()}
        with graph_builder(device) as builder:
            time_graphs(builder, small)
        del builder
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_device() == device.index
        assert torch.cuda.memory_allocated() == allocated
        after = {tuple(one["segment_pool_id"]) for one in torch.cuda.memory_snapshot()}
        assert after <= pools


@pytest.mark.gpu
def test_launch_model_of_this_device_is_whole_and_its_event_curve_grows(device):
    model, _ = measure_launch_model(device, seed=0)
    kinds = {term.kind for term in model.terms}
    assert {"kernel", "memset", "memcpy", "event-wait", "event-record", "fork"} <= kinds
    assert model.base_ns.value > 0
    assert len(model.waited) == 3
    assert all(point.count >= 10 for point in model.points)
    curve = records(model)
    assert curve[-1].ns.value > curve[0].ns.value
    halves = [point for point in curve if point.nodes in (50, 100)]
    assert halves[1].ns.value > halves[0].ns.value
    assert "event-record" in dominant(predict(model, {"event-record": 192, "fork": 192}))


@pytest.mark.gpu
def test_fitted_model_foretells_graphs_that_it_has_not_seen(device):
    with graph_builder(device) as builder:
        points = time_graphs(builder, (*specs(with_peer=False), *UNSEEN)).points
    seen, unseen = points[: -len(UNSEEN)], points[-len(UNSEEN) :]
    assert [dict(point.counts) for point in unseen] == [spec.in_graph for spec in UNSEEN]
    model = fit(seen, seed=0)
    for point in unseen:
        found = predict(model, point.counts, None, point.waited_ns)
        assert found.ns.value == pytest.approx(point.median_ns, rel=0.5), (point, found)


@pytest.mark.multigpu(2)
def test_copies_to_a_peer_are_captured_and_have_a_term(device):
    with graph_builder(device) as builder:
        assert builder.has_peer, builder.notes
        recording = builder.build(
            Spec(kind="peer-copy", counts={"kernel": 4, "memcpy": 3, "peer-copy": 5})
        )
        kinds = [node.kind for node in recording.read_nodes()]
        assert kinds.count("peer-copy") == 5
        assert kinds.count("memcpy") == 3
    assert torch.cuda.current_device() == device.index
    model, _ = measure_launch_model(device, seed=0)
    assert "peer-copy" in {term.kind for term in model.terms}
