import pytest
import torch

from cgprof.moe.dispatcher import LocalDispatcher
from cgprof.moe.experts import Experts, run_experts_plain
from cgprof.moe.layer import MoELayer
from cgprof.moe.router import route
from tests.support.builders import tiny_model
from tests.support.models import make_context


@pytest.mark.parametrize("loopback", [False, True])
def test_layer_routes_then_runs_the_chosen_experts(loopback):
    card = tiny_model()
    experts = Experts(card, device=torch.device("cpu"), dtype=torch.float32, batch_invariant=False)
    experts.gate_up.normal_(0, 0.2)
    experts.down.normal_(0, 0.2)
    gate = torch.randn(card.num_experts, card.hidden_size)
    layer = MoELayer(
        card,
        gate=lambda x: x @ gate.T,
        experts=experts,
        dispatcher=LocalDispatcher(loopback=loopback),
    )
    context = make_context([[1, 2, 3], [4]], [0, 0], pad_tokens=2)
    x = torch.randn(6, card.hidden_size)
    weights, ids = route(x @ gate.T, context.batch.is_padding, top_k=2, norm_topk=True)
    expected = run_experts_plain(x, ids, weights, experts.gate_up, experts.down)
    found = layer.forward(x, context)
    assert torch.equal(found, expected)
    assert found[:4].abs().amin(dim=1).gt(0).any()
    assert not found[4:].any()
