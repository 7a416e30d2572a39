"""Each fault must turn red what is stated of it, leave green what is stated, and leave no trace."""

import pytest

from cgprof.accuracy.faults import FAULTS, LEGS, PADDING, REFERENCE, REPLAY, find_fault, planted
from cgprof.accuracy.faults import stale_twin_half as stale_half
from cgprof.accuracy.greedy import check_greedy
from cgprof.accuracy.parity import ParityChecker
from cgprof.accuracy.sensitivity import judge_fault, leg_colours
from cgprof.accuracy.weights import check_weights
from cgprof.errors import ConfigError
from cgprof.record.graph import GraphRecord
from cgprof.shapes import GraphKey, RuntimeMode
from tests.support.builders import captured_engine, tiny_model, tiny_run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLAIN = GraphKey(mode=RuntimeMode.FULL, num_tokens=8, num_reqs=8, uniform_query_len=1)
TWIN = GraphKey(
    mode=RuntimeMode.FULL, num_tokens=8, num_reqs=8, uniform_query_len=1, num_microbatches=2
)


@pytest.fixture(scope="module", params=DEVICES)
def engine(request):
    with captured_engine(tiny_run(dbo=True, device=request.param, max_model_len=96)) as engine:
        yield engine


def failed(results):
    return {result.leg for result in results if result.passed is False}


def colours(engine):
    checker = ParityChecker(engine)
    graphs = [
        GraphRecord(key=key, label=str(key), parity=checker.check(key)) for key in (PLAIN, TWIN)
    ]
    return leg_colours(graphs, check_greedy(engine, steps=64), check_weights(engine))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_turns_red_what_is_stated_and_nothing_that_must_stay_green(engine, name):
    with planted(engine, FAULTS[name]):
        found = colours(engine)
    judged = judge_fault(FAULTS[name], found, None, ())
    assert judged.as_stated, judged
    assert found.red


def test_engine_is_sound_after_all_faults(engine):
    for fault in FAULTS.values():
        with planted(engine, fault):
            pass
    found = colours(engine)
    assert found.red == frozenset()
    assert found.green == frozenset(LEGS)


def test_every_fault_states_known_legs_and_at_least_one_red():
    for name, fault in FAULTS.items():
        assert fault.name == name
        assert fault.red
        assert fault.red | fault.green <= set(LEGS)
        assert not fault.red & fault.green
    assert {fault.place for fault in FAULTS.values()} == {"replay", "prepare", "weights", "kv"}


@pytest.mark.parametrize("index", [0, 1])
def test_stale_half_of_a_twin_is_seen_whichever_half_it_is(engine, index):
    with stale_half(engine, index=index):
        checker = ParityChecker(engine)
        checker.check(PLAIN)
        assert REPLAY in failed(checker.check(TWIN))
        assert not failed(checker.check(PLAIN))


def test_writing_padding_is_named_by_its_block(engine):
    with planted(engine, FAULTS["writing-padding"]):
        results = ParityChecker(engine).check(PLAIN)
    assert failed(results) == {PADDING}
    assert f"KV blocks [{engine.pool.num_blocks - 1}] changed" in results[2].note


@pytest.mark.parametrize("key", [PLAIN, TWIN], ids=str)
@pytest.mark.parametrize("name", ["shifted-positions", "overwritten-kv-row"])
def test_faults_before_the_launch_are_seen_by_the_reference_alone(engine, name, key):
    with planted(engine, FAULTS[name]):
        assert failed(ParityChecker(engine).check(key)) == {REFERENCE}


def test_fault_of_a_twin_needs_a_twin():
    with (
        captured_engine(tiny_run(), tiny_model(num_experts=0)) as engine,
        pytest.raises(ConfigError, match="--dbo"),
        planted(engine, FAULTS["stale-twin-half"]),
    ):
        pass


def test_dense_model_has_rows_to_swap():
    with captured_engine(tiny_run(), tiny_model(num_experts=0)) as engine:
        with planted(engine, FAULTS["swapped-rows"]):
            assert check_weights(engine).passed is False
        assert check_weights(engine).passed is True


def test_unknown_fault_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="stale-output"):
        find_fault("nothing")


SIZED = [name for name, fault in FAULTS.items() if fault.spares_keys and not fault.needs_twin]


@pytest.mark.parametrize("name", SIZED)
def test_fault_at_one_size_is_named_at_that_size_and_nowhere_else(engine, name):
    fault = find_fault(f"{name}@8")
    with planted(engine, fault):
        checker = ParityChecker(engine)
        found = {key: failed(checker.check(key)) for key in engine.graphs.keys}
    assert {key.num_tokens for key in found} == {1, 2, 4, 8}
    for key, legs in found.items():
        assert bool(legs) is (key.num_tokens == 8), (key, legs)
        assert fault.red <= legs or key.num_tokens != 8


@pytest.mark.gpu
def test_fault_at_496_of_512_tokens_is_named_there_alone():
    limits = {"max_num_seqs": 512, "max_num_batched_tokens": 512, "max_model_len": 64}
    run = tiny_run(device="cuda", sizes=(1, 256, 488, 496, 504, 512), **limits)
    with captured_engine(run) as engine, planted(engine, find_fault("stale-output@496")):
        checker = ParityChecker(engine)
        found = {key.num_tokens: failed(checker.check(key)) for key in engine.graphs.keys}
    assert found.pop(496) >= {REPLAY, REFERENCE}
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stale-output@x", "'x' is no number of tokens; write stale-output@8"),
        ("stale-output@", "'' is no number of tokens"),
        ("nothing@8", "no fault is called 'nothing'"),
        ("swapped-rows@8", "swapped-rows is in what all keys share; leave @ out"),
        ("overwritten-kv-row@8", "overwritten-kv-row is in what all keys share"),
    ],
)
def test_size_of_a_fault_that_cannot_be_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        find_fault(name)


def test_size_that_no_captured_key_has_is_refused_with_those_that_there_are(engine):
    with (
        pytest.raises(ConfigError, match="stale-output@3: the captured sizes are 1-2, 4, 8"),
        planted(engine, find_fault("stale-output@3")),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="stale-twin-half@2 needs a twin"),
        planted(engine, find_fault("stale-twin-half@2")),
    ):
        pass
