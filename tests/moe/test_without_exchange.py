"""An exchange that is left out for timing: no collective, and each layer has its own work."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cgprof.batch.context import PlainHandoff
from cgprof.config.schema import All2AllBackend
from cgprof.errors import ReplayError
from cgprof.moe.kept_routing import KeptRouting
from tests.moe.exchanges import Case, Layer, expert_sums
from tests.support.ranks import run_ranks

CASE = Case(loads=(6, 4), num_tokens=6)
LAYERS = 3


class Collectives(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def one_pass(ranks, layer, case):
    """Of each layer, whose tokens have experts of their own: ids, and the result; collectives."""
    ids, outs = [], []
    with Collectives() as seen:
        for number in range(LAYERS):
            hidden, expert_ids, weights = case.batch(ranks.rank)
            shifted = torch.where(expert_ids < 0, -1, (expert_ids + number) % case.num_experts)
            handle = layer.dispatcher.dispatch(hidden, shifted, weights, PlainHandoff())
            ids.append(handle.expert_ids.clone())
            sums = expert_sums(handle.hidden, handle.expert_ids, handle.weights, *layer.weights)
            outs.append(layer.dispatcher.combine(handle, sums, PlainHandoff()).clone())
    return torch.stack(ids), torch.stack(outs), seen.count


def passes(ranks, backend, case):
    """With the exchange, with it and kept, twice without it, and with it again."""
    layer = Layer(ranks, backend, case)
    found = [one_pass(ranks, layer, case)]
    kept = layer.dispatcher.kept = KeptRouting()
    for complete in (False, True, True):
        kept.complete = complete
        kept.begin_pass()
        found.append(one_pass(ranks, layer, case))
    layer.dispatcher.kept = None
    return [*found, one_pass(ranks, layer, case)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "backend", [All2AllBackend.ALLGATHER_REDUCESCATTER, All2AllBackend.ALL_TO_ALL]
)
def test_each_layer_without_exchange_has_its_own_experts_and_no_collective(backend):
    for real, kept, bare, bare_again, again in run_ranks(2, passes, backend, CASE):
        both_ways = 2 * LAYERS
        assert [one[2] for one in (real, kept, bare, bare_again, again)] == [
            *(both_ways, both_ways, 0, 0, both_ways)
        ]
        assert not torch.equal(real[0][0], real[0][1])  # layers differ
        for other in (kept, bare, bare_again, again):
            assert torch.equal(real[0], other[0])
        assert bare[1].shape == real[1].shape
        assert bare[1].isfinite().all()
        for other in (kept, again):
            assert torch.equal(real[1], other[1])


def test_pass_that_was_not_kept_cannot_leave_its_exchange_out():
    kept, routing = KeptRouting(), (torch.zeros(4, 2), torch.zeros(4, 2))
    kept.begin_pass()
    kept.routed(1, routing)
    kept.complete = True
    kept.begin_pass()
    with pytest.raises(ReplayError, match="no routing was kept"):
        kept.routed(0, routing)  # another microbatch
    with pytest.raises(ReplayError, match="no routing was kept"):
        kept.routed(1, (torch.zeros(3, 2), torch.zeros(3, 2)))
    kept.begin_pass()
    assert kept.routed(1, routing)[0].shape == (4, 2)
    with pytest.raises(ReplayError, match="dispatch 1"):
        kept.routed(1, routing)


def test_pass_that_is_kept_anew_forgets_the_one_before():
    kept, routing = KeptRouting(), (torch.zeros(4, 2), torch.zeros(4, 2))
    for _ in range(2):
        kept.begin_pass()
        kept.routed(0, routing)
    kept.complete = True
    kept.begin_pass()
    kept.routed(0, routing)
    with pytest.raises(ReplayError):
        kept.routed(0, routing)
