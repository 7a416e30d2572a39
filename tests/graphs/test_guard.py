import pytest

from cgprof.errors import CaptureError, ReplayError
from cgprof.graphs.guard import check_addresses, check_nodes
from tests.support.graphs import decode_key

PLAIN, TWIN = decode_key(64), decode_key(64, num_microbatches=2)


def kernels(count):
    return {"kernel": count}


@pytest.mark.parametrize("nodes", [{}, {"memcpy": 3, "event-record": 1}, {"kernel": 0}])
def test_check_nodes_refuses_a_graph_without_kernels(nodes):
    with pytest.raises(CaptureError, match="FULL-64x64q1 failed: invalid: empty,") as caught:
        check_nodes(PLAIN, nodes, {})
    assert ("3 memcpy" in str(caught.value)) == ("memcpy" in nodes)


def test_check_nodes_allows_the_first_key_any_count():
    check_nodes(PLAIN, kernels(1), {})
    check_nodes(TWIN, kernels(1), {})


@pytest.mark.parametrize(("count", "fine"), [(76, True), (74, False), (133, True), (135, False)])
def test_check_nodes_compares_with_the_nearest_of_its_kind(count, fine):
    captured = {decode_key(72): kernels(100), decode_key(8): kernels(1000), TWIN: kernels(5000)}
    if fine:
        check_nodes(PLAIN, kernels(count), captured)
        return
    with pytest.raises(CaptureError) as caught:
        check_nodes(PLAIN, kernels(count), captured)
    message = str(caught.value)
    for said in (f"{count} kernels", "FULL-72x72q1 has 100", f"{count / 100:.2f}", "0.75"):
        assert said in message


def test_check_nodes_lets_pass_what_was_measured_between_two_sizes():
    check_nodes(PLAIN, kernels(2598), {decode_key(128): kernels(2550)})


def test_check_nodes_expects_of_a_twin_its_plain_key_times_the_microbatches():
    captured = {PLAIN: kernels(100), decode_key(72): kernels(900)}
    check_nodes(TWIN, kernels(204), captured)
    with pytest.raises(CaptureError, match=r"102 kernels where 2 x 100 of FULL-64x64q1 are 200"):
        check_nodes(TWIN, kernels(102), captured)
    three = decode_key(64, num_microbatches=3)
    check_nodes(three, kernels(306), captured)
    with pytest.raises(CaptureError, match="3 x 100"):
        check_nodes(three, kernels(204), captured)


def test_check_nodes_compares_a_twin_with_the_nearest_plain_key_when_its_own_is_absent():
    with pytest.raises(CaptureError, match="2 x 100 of FULL-72x72q1"):
        check_nodes(TWIN, kernels(100), {decode_key(72): kernels(100)})


def test_check_nodes_compares_a_twin_with_its_neighbour_too():
    neighbour = decode_key(72, num_microbatches=2)
    with pytest.raises(CaptureError, match="FULL-72x72q1-mb2 has 200"):
        check_nodes(TWIN, kernels(100), {neighbour: kernels(200)})


def test_check_nodes_weighs_kernels_alone_beside_the_collectives_of_a_tape():
    captured = {PLAIN: {"kernel": 100, "collective": 96}}
    check_nodes(TWIN, {"kernel": 200, "collective": 192}, captured)
    check_nodes(decode_key(32), {"kernel": 100}, captured)
    with pytest.raises(CaptureError, match="100 kernels where 2 x 100"):
        check_nodes(TWIN, {"kernel": 100, "collective": 192}, captured)


def twin(num_reqs, num_microbatches):
    return decode_key(num_reqs, num_microbatches=num_microbatches)


def of_size(layers, merges):
    """Kernels of a graph of `layers` layers of 17, `merges` more in each."""
    return kernels(2 + layers * (17 + merges))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16])
def test_one_lost_or_doubled_microbatch_is_seen_for_any_number_of_them(count):
    key = twin(256, count)
    captured = {decode_key(256): of_size(48, 0), decode_key(256 // count): of_size(48, 1)}
    each = of_size(48, 1)["kernel"]
    check_nodes(key, kernels(count * each), captured)
    for wrong in (count - 1, count + 1):
        with pytest.raises(CaptureError, match=f"{count} x {each} of FULL-{256 // count}x"):
            check_nodes(key, kernels(wrong * each), captured)
        with pytest.raises(CaptureError, match="some of the work was lost"):
            check_nodes(key, kernels(wrong * each), {twin(248, count): kernels(count * each)})


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("merges", [0, 1, 2])
def test_merge_kernels_of_small_batches_do_not_refuse_a_twin(count, merges):
    key = twin(256, count)
    captured = {
        decode_key(256): of_size(48, 0),
        decode_key(256 // count + 8): of_size(48, 0),
        decode_key(256 // count - 8): of_size(48, 2),
        twin(272, count): kernels(count * of_size(48, 0)["kernel"]),
    }
    check_nodes(key, kernels(count * of_size(48, merges)["kernel"]), captured)


def test_merge_kernels_of_small_batches_do_not_refuse_a_plain_key():
    check_nodes(decode_key(8), of_size(48, 2), {decode_key(256): of_size(48, 0)})


def test_check_addresses_names_only_what_moved():
    check_addresses(PLAIN, (16, 32), (16, 32), ("input_ids", "positions"))
    with pytest.raises(ReplayError, match="positions moved from 0x20 to 0x30") as caught:
        check_addresses(PLAIN, (16, 48), (16, 32), ("input_ids", "positions"))
    assert "input_ids" not in str(caught.value)
