import torch

from cgprof.measure.expert_time import expert_matmul_ns, matmul_ns


def test_matmuls_are_summed_and_other_kernels_are_not():
    kernels = [("_gate_up_kernel", 10.0), ("_down_kernel", 5.5), ("_sum_kernel", 99.0)]
    kernels += [("ncclDevKernel_SendRecv", 50.0), ("_gate_up_kernel", 10.0)]
    assert matmul_ns(kernels, steps=3) == 8_500


def test_no_matmul_is_nothing():
    assert matmul_ns([("_group_kernel", 3.0)], steps=3) is None


def test_a_cpu_has_no_kernels():
    steps = []
    assert expert_matmul_ns(lambda: steps.append(torch.ones(2) + 1)) is None
    assert len(steps) == 3
