import pytest

from cgprof.engine.room import device_memory
from cgprof.errors import DeviceError
from tests.support.builders import build_engine, tiny_model, tiny_run


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_model_that_cannot_fit_is_refused_before_its_weights_are_made(device):
    model = tiny_model(vocab_size=10**12)
    with pytest.raises(DeviceError, match=r"the weights of tiny take \d{15} bytes, the device has"):
        build_engine(tiny_run(device=device), model)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cache_that_cannot_fit_is_refused_with_its_bytes(device):
    run = tiny_run(device=device, num_gpu_blocks_override=10**9)
    with pytest.raises(DeviceError, match="lower --num-gpu-blocks-override"):
        build_engine(run)


def test_positions_that_cannot_fit_are_refused_with_their_bytes():
    model = tiny_model(num_layers=1, head_dim=2**16, hidden_size=8, max_positions=2**24)
    with pytest.raises(
        DeviceError,
        match="table of 16777216 positions for heads of 65536 takes 4398046511104 bytes",
    ):
        build_engine(tiny_run(), model)


def test_device_memory_of_the_host_is_what_is_available():
    import torch

    free, total = device_memory(torch.device("cpu"))
    assert 0 < free <= total


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_release_gives_memory_back_while_others_still_refer_to_it(device):
    engine = build_engine(tiny_run(device=device, num_gpu_blocks_override=4096))
    weights = [weight for _, weight in engine.model.named_weights()]
    before, _ = device_memory(engine.device)
    held = engine.kv_cache.nbytes + engine.weights_bytes
    engine.release()
    assert all(weight.untyped_storage().nbytes() == 0 for weight in weights)
    assert engine.kv_cache.untyped_storage().nbytes() == 0
    if device == "cuda":
        assert device_memory(engine.device)[0] - before > held / 2
