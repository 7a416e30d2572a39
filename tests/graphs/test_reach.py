import pytest

from cgprof.config.schema import Limits, MicrobatchConfig
from cgprof.graphs.reach import reaching_batch
from cgprof.shapes import CapturePolicy, GraphKey, RuntimeMode
from tests.support.graphs import DBO, NO_DBO, decode_key, plan

LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048)
FOREIGN = GraphKey(mode=RuntimeMode.FULL, num_tokens=1024, num_microbatches=2)


@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
@pytest.mark.parametrize("seqs", [1, 64, 100, 256])
def test_every_planned_twin_has_a_batch_that_reaches_it(policy, seqs):
    keys = plan(policy, seqs=seqs, microbatch=DBO).keys
    limits = Limits(max_num_seqs=seqs, max_num_batched_tokens=2048)
    for key in keys:
        if key.is_twin:
            shape = reaching_batch(key, keys, limits, DBO)
            assert key.covers(shape)
            assert shape.num_reqs <= seqs


@pytest.mark.parametrize(
    ("twin", "config"),
    [
        (decode_key(256, query_len=2, num_microbatches=2), DBO),  # no step has that query length
        (decode_key(24, num_microbatches=2), DBO),  # below the threshold
        (decode_key(64, num_microbatches=2), NO_DBO),
        (decode_key(64, num_microbatches=4), DBO),  # steps split into two
    ],
)
def test_twin_that_no_decision_chooses_has_no_batch(twin, config):
    keys = (decode_key(256), decode_key(64), twin)
    assert reaching_batch(twin, keys, LIMITS, config) is None


def test_twin_above_the_most_requests_is_reached_only_as_far_as_smaller_keys_leave_room():
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=2048)
    large = decode_key(128, num_microbatches=2)
    assert reaching_batch(large, (large,), limits, DBO) is None  # the second half stays empty
    fitting = decode_key(96, num_microbatches=2)
    assert reaching_batch(fitting, (fitting,), limits, DBO).num_reqs == 64
    shadow = decode_key(64, num_microbatches=2)
    assert reaching_batch(fitting, (fitting, shadow), limits, DBO) is None


def test_twin_of_any_lengths_is_reached_by_a_prompt_of_its_size():
    shape = reaching_batch(FOREIGN, (FOREIGN,), LIMITS, DBO)
    assert (shape.num_tokens, shape.num_prefills) == (1024, 1)
    late = MicrobatchConfig(enabled=True, prefill_token_threshold=2000, decode_token_threshold=999)
    assert reaching_batch(FOREIGN, (FOREIGN,), LIMITS, late) is None
