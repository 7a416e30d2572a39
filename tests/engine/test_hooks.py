"""Forward hooks do not run in a replay: no part of the model can carry one."""

import gc

import pytest
import torch
from torch.nn.modules import module as torch_modules

from tests.support.builders import captured_engine, tiny_model, tiny_run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def parts_of(root):
    """All objects of this package and of torch.nn that the model is made of."""
    seen, pending, found = set(), [root], []
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        name = type(one).__module__
        if isinstance(one, torch.nn.Module) or name.startswith("cgprof."):
            found.append(one)
            pending += gc.get_referents(one)
        elif isinstance(one, dict | list | tuple):
            pending += gc.get_referents(one)
    return found


@pytest.mark.parametrize("experts", [0, 8])
def test_no_part_of_the_model_can_carry_a_forward_hook(experts):
    with captured_engine(tiny_run(sizes=(1,)), tiny_model(num_experts=experts)) as engine:
        parts = parts_of(engine.model)
    names = {type(part).__name__ for part in parts}
    assert {"Decoder", "DecoderLayer", "SelfAttention", "RMSNorm"} <= names
    for part in parts:
        assert not isinstance(part, torch.nn.Module), type(part).__name__
        assert not hasattr(part, "register_forward_hook"), type(part).__name__


def test_parts_would_show_a_module_that_can_carry_one():
    with captured_engine(tiny_run(sizes=(1,))) as engine:
        engine.model._layers[0].attention.planted = torch.nn.Linear(1, 1)
        assert any(isinstance(part, torch.nn.Module) for part in parts_of(engine.model))


@pytest.mark.parametrize("device", DEVICES)
def test_hook_on_all_modules_of_the_process_sees_neither_eager_steps_nor_replays(device):
    calls = []
    with captured_engine(tiny_run(sizes=(4,), device=device)) as engine:
        handle = torch_modules.register_module_forward_hook(lambda *args: calls.append(args))
        try:
            for key in engine.graphs.keys:
                step = engine.live_step(key)
                for wanted in (key, key.as_eager()):
                    for _ in range(10):
                        prepared = engine.runner.prepare(step, engine.decision_for(wanted))
                        engine.runner.launch(prepared)
                assert engine.graphs.captured[key].replays == 10
            torch.nn.Identity()(0)
        finally:
            handle.remove()
    assert len(calls) == 1
