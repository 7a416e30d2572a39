import pytest

from cgprof.config.schema import MeasureConfig, MicrobatchConfig, RunConfig
from cgprof.errors import UnsupportedError
from cgprof.record.place import Device
from cgprof.report.comparable import other_differences, require_comparable
from tests.support.runs import MODEL, cuda_dbo_run, cuda_run, tape_dbo_run


def with_environment(**changes):
    record = cuda_run()
    return cuda_run(environment=record.environment.model_copy(update=changes))


OTHERS = {
    "device: NVIDIA H200 in A, NVIDIA H100 in B": with_environment(
        device=Device(index=0, name="NVIDIA H100")
    ),
    "cpu: Xeon 8480 in A, EPYC in B": with_environment(cpu="EPYC"),
    "torch: 2.11.0 in A, 2.13.0 in B": with_environment(torch="2.13.0"),
    "cuda: 13.0 in A, 12.9 in B": with_environment(cuda="12.9"),
    "model.num_layers: 2 in A, 3 in B": cuda_run(model=MODEL.model_copy(update={"num_layers": 3})),
    "dtype: bfloat16 in A, float32 in B": cuda_run(
        model=MODEL.model_copy(update={"dtype": "float32"})
    ),
    "measure.context_len: 64 in A, 65 in B": cuda_run(
        config=RunConfig(measure=MeasureConfig(context_len=65))
    ),
}


@pytest.mark.parametrize("different", OTHERS)
def test_incomparable_runs_are_refused_by_field_with_both_values(different):
    with pytest.raises(UnsupportedError) as refusal:
        require_comparable(cuda_run(), OTHERS[different], force=False)
    assert str(refusal.value).startswith(f"compare: {different}; ")
    assert "--force" in str(refusal.value)


@pytest.mark.parametrize("different", OTHERS)
def test_forced_runs_keep_what_would_have_refused_them(different):
    forced = require_comparable(cuda_run(), OTHERS[different], force=True)
    assert [difference.to_text() for difference in forced] == [different]


@pytest.mark.parametrize("force", [False, True])
def test_tape_and_cuda_are_refused_even_when_forced(force):
    with pytest.raises(UnsupportedError, match="recorder: tape in A, cuda in B"):
        require_comparable(tape_dbo_run(), cuda_run(), force=force)


def test_plain_and_dbo_runs_of_one_model_are_comparable():
    assert require_comparable(cuda_run(), cuda_dbo_run(), force=False) == ()
    differences = other_differences(cuda_run(), cuda_dbo_run())
    assert [one.to_text() for one in differences] == ["microbatch.enabled: False in A, True in B"]


def test_same_device_asked_for_by_another_word_is_comparable():
    asked = cuda_run(config=RunConfig(measure=MeasureConfig(device="cuda")))
    assert require_comparable(cuda_run(), asked, force=False) == ()


def test_other_differences_name_settings_and_surroundings():
    config = RunConfig(seed=3, microbatch=MicrobatchConfig(decode_token_threshold=8))
    other = cuda_run(
        config=config,
        environment=cuda_run().environment.model_copy(update={"variables": {"A": "1"}}),
    )
    assert [one.to_text() for one in other_differences(cuda_run(), other)] == [
        "microbatch.decode_token_threshold: 32 in A, 8 in B",
        "seed: 0 in A, 3 in B",
        "variables.A: absent in A, 1 in B",
    ]


def test_renamed_card_is_comparable_and_named():
    renamed = cuda_run(model=MODEL.model_copy(update={"name": "other"}))
    assert require_comparable(cuda_run(), renamed, force=False) == ()
    differences = other_differences(cuda_run(), renamed)
    assert [one.to_text() for one in differences] == ["model.name: tiny-moe in A, other in B"]


def test_what_is_measured_after_all_that_is_compared_makes_no_run_incomparable():
    other = cuda_run(config=RunConfig(measure=MeasureConfig(replay_samples=7, eager_work=False)))
    assert require_comparable(cuda_run(), other, force=False) == ()
    assert [one.to_text() for one in other_differences(cuda_run(), other)] == [
        "measure.replay_samples: 30 in A, 7 in B",
        "measure.eager_work: True in A, False in B",
    ]


def test_runs_beside_caches_of_unlike_sizes_say_so_though_their_settings_agree():
    a, (rank,) = cuda_run(), cuda_run().ranks
    larger = rank.totals.model_copy(update={"kv_cache_bytes": 1024**3})
    b = cuda_run(ranks=(rank.model_copy(update={"totals": larger}),))
    assert require_comparable(a, b, force=False) == ()
    assert [one.to_text() for one in other_differences(a, b)] == [
        "KV cache: 8 MiB in A, 1.00 GiB in B"
    ]
    before = cuda_run(ranks=(rank.model_copy(update={"totals": None}),))
    assert [one.b for one in other_differences(a, before)] == ["unknown"]


def test_a_setting_that_later_versions_dropped_is_told_as_a_difference():
    older = cuda_run(dropped_settings={"measure.pin_host": "True"})
    told = [difference.to_text() for difference in other_differences(older, cuda_run())]
    assert told == ["measure.pin_host: True in A, absent in B"]
