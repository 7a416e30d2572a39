from cgprof.fresh.afresh import measure_afresh
from cgprof.graphs.plan_record import resolve_plan
from cgprof.record.contents import GraphContents
from tests.support.builders import tiny_model, tiny_run


def request(**parts):
    run, model = tiny_run(), tiny_model()
    run = run.model_copy(update=parts)
    return run, model, resolve_plan(run, model)[1].keys


def test_what_cannot_be_measured_alone_is_told_key_by_key_and_once_for_the_model():
    two_ranks = tiny_run().parallel.model_copy(update={"data_parallel_size": 2})
    run, model, keys = request(parallel=two_ranks)
    shape = {"edges": 0, "roots": 1, "forks": 0, "joins": 0, "width": 1, "longest_path": 1}
    contents = {str(key): GraphContents(**shape) for key in keys}
    said = []
    found = measure_afresh(run, model, keys, contents, said.append)
    assert [one.key for one in found.stand_alone] == [keys[0], keys[-1], *keys[1:-1]][: len(keys)]
    assert all("2 ranks" in one.failure for one in found.stand_alone)
    assert found.node_model is None
    (note,) = found.notes
    assert note.count("no model of bytes by nodes") == 1
    assert set(found.against_eager) == set(contents)
    assert all("2 ranks" in one.note for one in found.against_eager.values())
    assert len(said) == len(found.stand_alone) + 1


def test_nothing_asked_for_starts_nothing():
    run, model, keys = request()
    off = run.measure.model_copy(update={"stand_alone_keys": 0, "eager_work": False})
    said = []
    found = measure_afresh(run.model_copy(update={"measure": off}), model, keys, {}, said.append)
    assert (found.stand_alone, found.node_model, found.against_eager) == ((), None, None)
    assert (found.notes, said) == ((), [])
