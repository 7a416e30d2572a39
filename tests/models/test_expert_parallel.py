from dataclasses import replace

import pytest
import torch

from cgprof.attention.reference import ReferenceAttention
from cgprof.config.model_card import load_model_card
from cgprof.config.schema import All2AllBackend, ParallelConfig
from cgprof.errors import ConfigError
from cgprof.models.checkpoint import load_state, reread_weights
from cgprof.models.zoo import build_model, weight_bytes
from cgprof.moe.backends import make_dispatcher
from cgprof.moe.dispatcher import LocalDispatcher
from cgprof.parallel.ep import expert_range
from tests.support.builders import tiny_model
from tests.support.cards import MOE
from tests.support.checkpoints import save_model
from tests.support.models import BLOCK, make_context, make_model, run_hidden
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def build(config, experts, dispatcher=None):
    return build_model(
        config,
        device=CPU,
        dtype=torch.float32,
        dispatcher=dispatcher or LocalDispatcher(loopback=False),
        batch_invariant=False,
        seed=3,
        experts=experts,
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_ranks_hold_the_same_weights_as_one_between_them(family):
    config = tiny_model(num_experts=7, family=family)
    whole = dict(build(config, None).named_weights())
    parts = [dict(build(config, expert_range(7, 3, rank)).named_weights()) for rank in range(3)]
    for part in parts:
        assert all(torch.equal(whole[name], tensor) for name, tensor in part.items())
    owned = [{name for name in part if ".experts." in name} for part in parts]
    assert set().union(*owned) == {name for name in whole if ".experts." in name}
    assert sum(map(len, owned)) == 7 * 3 * config.num_layers
    shared = {name for name in whole if ".experts." not in name}
    assert all(shared <= part.keys() for part in parts)


def test_rank_weighs_what_its_experts_weigh():
    config = tiny_model()
    expert_bytes = config.num_layers * 3 * 32 * 32 * 4
    whole = weight_bytes(config, torch.float32)
    assert weight_bytes(config, torch.float32, range(2, 5)) == whole - 5 * expert_bytes
    assert build(config, range(2, 5)).num_weight_bytes == whole - 5 * expert_bytes


def test_rank_loads_its_part_of_a_checkpoint(tmp_path):
    save_model(tmp_path, MOE)
    config = load_model_card(str(tmp_path))
    whole = dict(build(config, None).named_weights())
    part = build(config, range(1, 3))
    loaded = dict(part.named_weights())
    assert len(loaded) < len(whole)
    assert all(torch.equal(whole[name], tensor) for name, tensor in loaded.items())
    reread = dict(reread_weights(part, 0))
    assert reread.keys() == loaded.keys()
    assert all(torch.equal(reread[name], tensor) for name, tensor in loaded.items())


def test_rank_refuses_a_checkpoint_that_any_rank_would_refuse():
    config = tiny_model()
    state = dict(build(config, None).named_weights())
    part = build(config, range(4))
    load_state(part, state)
    theirs = "model.layers.1.mlp.experts.7.up_proj.weight"
    without = {name: tensor for name, tensor in state.items() if name != theirs}
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.experts\.7\.up_proj"):
        load_state(part, without)
    with pytest.raises(ConfigError, match=r"experts\.7\.up_proj\.weight has shape"):
        load_state(part, state | {theirs: torch.zeros(32, 31)})
    with pytest.raises(ConfigError, match=r"unknown model\.layers\.1\.mlp\.experts\.8\."):
        load_state(part, state | {theirs.replace(".7.", ".8."): torch.zeros(32, 32)})


# Those that ranks on CPUs have.
BACKENDS = [b for b in All2AllBackend if b is not All2AllBackend.SYMMETRIC_MEMORY]
STEPS = (([5, 9, 2, 100, 7], [31]), ([1], [8, 8, 8, 8, 8, 8, 8]), ([64], []))


def rank_context(rank, step):
    """A prompt of each rank, padded to 8 tokens; a rank without one has only padding."""
    tokens = STEPS[step][rank]
    context = make_context([tokens or [0]], [0], pad_tokens=8 - max(1, len(tokens)))
    if not tokens:
        context.batch.is_padding[:] = True
    return context


def forward_on_ranks(ranks, config, backend):
    dispatcher = make_dispatcher(
        ParallelConfig(data_parallel_size=ranks.size, all2all_backend=backend),
        ranks,
        config,
        dtype=torch.float32,
        max_tokens=8,
        num_microbatches=1,
        loopback=False,
    )
    own = expert_range(config.num_experts, ranks.size, ranks.rank)
    model = build(config, own, dispatcher)
    shape = (config.num_layers, 32, 2, BLOCK, config.num_kv_heads, config.head_dim)
    results = []
    for step in range(len(STEPS)):
        model.bind_cache(torch.zeros(shape), ReferenceAttention())
        context = rank_context(ranks.rank, step)
        results.append(run_hidden(model, replace(context, tokens_per_rank=(8,) * ranks.size)))
    return results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm_topk", [False, True])
def test_two_ranks_give_the_hidden_states_of_one(backend, norm_topk):
    config = tiny_model(num_experts=5, experts_per_token=3, norm_topk=norm_topk)
    found = run_ranks(2, forward_on_ranks, config, backend)
    for rank in range(2):
        for step, hidden in enumerate(found[rank]):
            alone = run_hidden(make_model(config, ReferenceAttention()), rank_context(rank, step))
            real = slice(0, len(STEPS[step][rank]))
            # Two layers of sums of three parts in another order, at activations near one.
            torch.testing.assert_close(hidden[real], alone[real], rtol=1e-5, atol=1e-5)
