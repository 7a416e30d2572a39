import pytest
import torch

from cgprof.accuracy.weights import check_weights
from cgprof.config.model_card import load_model_card
from cgprof.errors import ConfigError
from tests.support.builders import build_engine, tiny_model, tiny_run
from tests.support.model_dir import write_model_dir


@pytest.fixture(params=["seeded", "loaded"])
def engine(request, tmp_path):
    model = tiny_model()
    if request.param == "loaded":
        model = load_model_card(str(write_model_dir(tmp_path / "model")))
    engine = build_engine(tiny_run(), model)
    yield engine
    engine.close()


def test_untouched_weights_pass(engine):
    with engine.active():
        result = check_weights(engine)
    assert result.passed is True
    assert result.tensors == len(list(engine.model.named_weights()))
    assert result.source


def test_one_changed_value_is_named(engine):
    name, weight = list(engine.model.named_weights())[7]
    with engine.active():
        weight.view(-1)[0] += 1e-3
        result = check_weights(engine)
    assert result.passed is False
    assert result.different == (name,)


def test_two_rows_that_changed_places_are_seen(engine):
    weights = dict(engine.model.named_weights())
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    with engine.active():
        weights[name][:2] = weights[name][:2].flip(0).clone()
        assert check_weights(engine).different == (name,)
        assert torch.isfinite(weights[name]).all()


def test_checkpoint_that_is_gone_is_an_error(tmp_path):
    folder = write_model_dir(tmp_path / "model")
    engine = build_engine(tiny_run(), load_model_card(str(folder)))
    (folder / "model.safetensors").unlink()
    with engine.active(), pytest.raises(ConfigError, match="no longer there"):
        check_weights(engine)
    engine.close()
