import pytest

from cgprof.fresh.node_model import fit
from cgprof.record.alone import ARENA_STEP_BYTES, NodeModel, StandAlone
from cgprof.record.graph import GraphMemory, MemoryWitness
from tests.graphs.test_chosen import key

MIB = 1024**2


def alone(size, nodes, driver_bytes, *, pool=8 * MIB, rest=0, neighbours="none", **changes):
    total = pool + driver_bytes
    facts = {
        "key": key(size),
        "label": str(key(size)),
        "nodes": nodes,
        "memory": GraphMemory(
            pool_by_stream={"compute": pool},
            instantiate_bytes=driver_bytes - rest,
            rest_bytes=rest,
        ),
        "witness": MemoryWitness(
            allocator_bytes=pool, device_delta_bytes=total, neighbours=neighbours
        ),
    }
    return StandAlone(**(facts | changes))


def stepped(nodes, per_node=3000, base=5 * MIB):
    """What a driver takes that gives out whole steps."""
    return -(-(base + per_node * nodes) // ARENA_STEP_BYTES) * ARENA_STEP_BYTES


def test_line_is_that_of_the_drivers_part_whatever_the_pools_are():
    measured = [
        alone(size, nodes, 4 * MIB + 3000 * nodes, pool=pool, rest=MIB)
        for size, nodes, pool in ((256, 1500, 64 * MIB), (64, 900, 8 * MIB), (1, 700, 0))
    ]
    model, reason = fit(measured)
    assert reason == ""
    assert model.base_bytes == pytest.approx(4 * MIB)
    assert model.per_node_bytes.value == pytest.approx(3000)
    assert model.largest_error_bytes <= 1
    assert model.fitted_on == tuple(one.label for one in measured)
    assert model.notes == ()


def test_estimates_from_figures_in_whole_steps_hold_the_truth_within_their_error():
    model, _ = fit([alone(s, n, stepped(n)) for s, n in ((256, 914), (8, 770), (64, 1538))])
    low, high = model.per_node_bytes.low, model.per_node_bytes.high
    assert low < 3000 < high
    for nodes in (800, 1200, 1800):
        value, error = model.estimate(nodes)
        assert error >= ARENA_STEP_BYTES
        assert abs(value - stepped(nodes)) <= error


def test_error_is_never_below_a_step_even_where_all_points_lie_on_the_line():
    model, _ = fit([alone(n, n, 1000 * n + 4 * MIB) for n in (100, 200, 300)])
    assert model.estimate(250) == (4 * MIB + 250_000, ARENA_STEP_BYTES)


def test_error_grows_away_from_what_was_measured():
    model, _ = fit([alone(s, n, stepped(n)) for s, n in ((256, 900), (8, 770), (64, 1540))])
    assert model.estimate(60_000)[1] > 5 * model.estimate(1000)[1]


def test_two_numbers_of_nodes_give_a_model_that_says_what_it_assumes():
    model, _ = fit([alone(256, 770, stepped(770)), alone(1, 770, stepped(770)), alone(64, 1538, 0)])
    assert model is None
    model, _ = fit(
        [alone(256, 770, stepped(770)), alone(1, 770, stepped(770)), alone(64, 9000, stepped(9000))]
    )
    assert "only two unlike numbers of nodes" in model.notes[0]


def test_bad_points_are_left_out_and_named():
    good = [alone(s, n, stepped(n)) for s, n in ((256, 900), (8, 7700), (64, 15400))]
    bad = [
        alone(32, 5000, 900 * MIB, neighbours="moved"),
        alone(16, 5000, -MIB),
        StandAlone(key=key(4), label=str(key(4)), nodes=0, failure="was killed"),
    ]
    model, _ = fit([*good, *bad])
    assert model == fit(good)[0].model_copy(update={"notes": model.notes})
    told = "; ".join(model.notes)
    assert "FULL-32x32q1: another process" in told
    assert "FULL-16x16q1: its driver's part" in told
    assert "FULL-4x4q1: was killed" in told


def test_tape_has_no_model_and_the_reason_is_told():
    on_tape = [
        alone(s, s, 0, memory=None, witness=MemoryWitness(allocator_bytes=s)) for s in (1, 2, 3)
    ]
    model, reason = fit(on_tape)
    assert model is None
    assert "0 usable keys" in reason
    assert "a tape has no driver" in reason


@pytest.mark.parametrize(
    ("nodes", "sizes", "words"),
    [
        ((700, 800), (4, 6), "2 usable keys alone, 3 are needed"),
        ((770, 770, 770), (4, 6, 4), "all measured keys have 770 nodes"),
        ((700, 800, 900), (4, 4, 4), "larger graphs took no more"),
    ],
)
def test_no_model_without_enough_to_fit(nodes, sizes, words):
    measured = [
        alone(index + 1, count, size * MIB)
        for index, (count, size) in enumerate(zip(nodes, sizes, strict=True))
    ]
    model, reason = fit(measured)
    assert model is None
    assert words in reason


def test_model_of_a_record_estimates_as_before():
    model, _ = fit([alone(s, n, stepped(n)) for s, n in ((256, 900), (8, 770), (64, 1540))])
    again = NodeModel.model_validate_json(model.model_dump_json())
    assert again.estimate(1234) == model.estimate(1234)
