import pytest
import torch

from cgprof.measure.accounting import growth, witness
from cgprof.measure.memory import MemoryReader

MIB = 1 << 20


def test_memory_reader_on_the_cpu_reads_nothing():
    reader = MemoryReader(torch.device("cpu"))
    assert reader.read() is None
    assert reader.read_between() is None


@pytest.mark.gpu
def test_memory_reader_sees_a_general_segment_and_its_return():
    reader = MemoryReader(torch.device("cuda"))
    before = reader.read()
    held = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    after = reader.read()
    assert growth(before.general_by_stream, after.general_by_stream) == {"default": 64 * MIB}
    assert growth(before.pool_by_stream, after.pool_by_stream) == {}
    assert witness(before, after).allocator_bytes == 64 * MIB
    assert witness(before, after).device_delta_bytes >= 64 * MIB
    del held
    again = reader.read()
    assert again.allocator_bytes == before.allocator_bytes


@pytest.mark.gpu
def test_memory_reader_keeps_graph_pools_apart_and_names_streams():
    stream = torch.cuda.Stream()
    reader = MemoryReader(torch.device("cuda"), streams={stream.cuda_stream: "compute"})
    before = reader.read()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    after = reader.read()
    assert growth(before.pool_by_stream, after.pool_by_stream) == {"compute": 64 * MIB}
    del result
    assert reader.read().pool_by_stream == after.pool_by_stream  # the graph holds its pool
    graph.reset()
    assert reader.read().pool_by_stream == before.pool_by_stream
