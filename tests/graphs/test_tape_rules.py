import pytest
import torch

from cgprof.graphs.tape_rules import OpEffect, classify, out_overload, refusal

aten, c10d = torch.ops.aten, torch.ops.c10d


@pytest.mark.parametrize(
    ("func", "names"),
    [
        (aten.mm.default, ("out",)),
        (aten.topk.default, ("values", "indices")),
        (aten.sort.stable, ("values", "indices")),
        (aten.cat.default, ("out",)),
        (aten.index.Tensor, ("out",)),
        (aten._softmax.default, ("out",)),
    ],
)
def test_out_overload_writes_into_what_the_plain_one_returns(func, names):
    overload, found = out_overload(func)
    assert found == names
    assert overload.overloadpacket is func.overloadpacket


@pytest.mark.parametrize(
    "func",
    [
        aten.linear.default,  # composite: its out= form may take another path
        aten.matmul.default,
        aten.reshape.default,
        aten.add_.Tensor,
        aten.split.Tensor,
        aten.scaled_dot_product_attention.default,
    ],
)
def test_out_overload_is_none_where_it_is_not_known_to_be_the_same(func):
    assert out_overload(func) is None


@pytest.mark.parametrize(
    ("func", "returns_views_only", "effect"),
    [
        (aten.mm.default, False, OpEffect.RUN),
        (aten.view.default, True, OpEffect.NOTHING),
        (aten.reshape.default, True, OpEffect.NOTHING),
        (aten.reshape.default, False, OpEffect.RUN),
        (aten.add_.Tensor, True, OpEffect.RUN),
        (aten.t_.default, True, OpEffect.NOTHING),
        (aten.empty.memory_format, False, OpEffect.NOTHING),
        (aten.new_empty_strided.default, False, OpEffect.NOTHING),
        (aten.zeros.default, False, OpEffect.RUN),
        (torch.ops.c10d.allreduce_.default, True, OpEffect.COLLECTIVE),
    ],
)
def test_classify_goes_by_what_was_returned_and_not_by_the_schema_alone(
    func, returns_views_only, effect
):
    assert classify(func, returns_views_only=returns_views_only) is effect


def test_refusal_names_functional_collectives_and_the_way_out():
    func = torch.ops._c10d_functional.all_reduce.default
    assert "use torch.distributed's own" in refusal(func, (), {})


def test_refusal_tells_masks_from_indices():
    x, index = torch.ones(4), torch.tensor([0, 1])
    assert refusal(aten.index.Tensor, (x, [index]), {}) is None
    assert refusal(aten.index_put_.default, (x, [None, index], x), {}) is None
    for mask in (x > 0, torch.ones(4, dtype=torch.uint8)):
        assert "with a mask" in refusal(aten.index.Tensor, (x, [mask]), {})
        assert "with a mask" in refusal(aten.index_put.default, (x,), {"indices": [mask]})


@pytest.mark.parametrize(
    "func", [c10d.allgather_.default, c10d.reduce_scatter_.default, c10d.barrier.default]
)
def test_refusal_names_the_collectives_that_a_tape_holds(func):
    assert "all_reduce, broadcast, all_gather_into_tensor" in refusal(func, (), {})


def test_refusal_tells_unequal_splits_from_equal_ones():
    func, x = c10d.alltoall_base_.default, torch.ones(4)
    for splits in ([], [2, 2]):
        assert refusal(func, (x, x, None, splits, splits), {}) is None
        assert refusal(func, (x, x, None), {"input_split_sizes": splits}) is None
    for splits in (([2, 2], [1, 3]), ([1, 3], [2, 2])):
        assert "unequal split sizes" in refusal(func, (x, x, None, *splits), {})


def test_node_kind_tells_collectives_from_other_work():
    assert OpEffect.COLLECTIVE.node_kind == "collective"
    assert OpEffect.RUN.node_kind == "kernel"
