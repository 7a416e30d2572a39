from cgprof.stats.pace import MOST_SLOWER, slower


def test_slower_is_by_over_the_bound_and_says_by_how_much():
    paces = {"a": 300, "b": round(300 * MOST_SLOWER), "c": 600}
    assert slower(paces, 300) == {"c": 2.0}
    assert slower(paces, 600) == {}
    assert slower({}, 0) == {}
