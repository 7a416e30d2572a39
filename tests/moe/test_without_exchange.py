"""An exchange that is left out for timing: no collective, the same shapes, the same work."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cgprof.batch.context import PlainHandoff
from cgprof.config.schema import All2AllBackend
from cgprof.moe.dispatcher import LocalDispatcher
from tests.moe.exchanges import Case, Layer, expert_sums
from tests.support.ranks import run_ranks

CASE = Case(loads=(6, 4), num_tokens=6)


class Collectives(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def passes(ranks, backend, case):
    """With the exchange, without it and with it again: rows, ids, result, collectives."""
    layer = Layer(ranks, backend, case)
    found = []
    for exchanging in (True, False, True):
        layer.dispatcher.exchanging = exchanging
        with Collectives() as seen:
            handle = layer.dispatcher.dispatch(*case.batch(ranks.rank), PlainHandoff())
            ids = handle.expert_ids.clone()
            sums = expert_sums(handle.hidden, handle.expert_ids, handle.weights, *layer.weights)
            out = layer.dispatcher.combine(handle, sums, PlainHandoff())
        found.append((handle.hidden.shape, ids, out.clone(), seen.count))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "backend", [All2AllBackend.ALLGATHER_REDUCESCATTER, All2AllBackend.ALL_TO_ALL]
)
def test_step_without_exchange_has_the_rows_of_the_one_before_and_no_collective(backend):
    for real, bare, again in run_ranks(2, passes, backend, CASE):
        assert (real[3], bare[3], again[3]) == (2, 0, 2)
        assert real[0] == bare[0]
        assert torch.equal(real[1], bare[1])  # experts have as much to do
        assert real[2].shape == bare[2].shape
        assert bare[2].isfinite().all()
        assert torch.equal(real[2], again[2])


def test_loopback_is_left_out_as_well():
    dispatcher = LocalDispatcher(loopback=True)
    hidden, ids, weights = torch.ones(2, 4), torch.zeros(2, 1), torch.ones(2, 1)
    assert dispatcher.dispatch(hidden, ids, weights, PlainHandoff()).hidden is not hidden
    dispatcher.exchanging = False
    assert dispatcher.dispatch(hidden, ids, weights, PlainHandoff()).hidden is hidden
