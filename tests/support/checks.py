"""Checks made by hand: everything passes; what a test is about is changed."""

from cgprof.record.scores import (
    AccuracyResult,
    CheckRecord,
    GreedyResult,
    PairedVerdict,
    PlantedFault,
    TokenDivergence,
    WeightsResult,
)
from tests.support.runs import key, run_record, tape_graph


def greedy(**changes):
    facts = {
        "passed": True,
        "requests": 12,
        "steps": 70,
        "longest_context": 95,
        "replays": {str(key(8)): 30, str(key(8, 2)): 20},
        "tokens_compared": 400,
        "max_logit_diff": 0.0,
        "noise_logit_diff": 1e-6,
        "identical": 4,
        "identical_outputs": 1,
        "identical_outputs_eager": 1,
    }
    return GreedyResult(**(facts | changes))


def divergence(**changes):
    facts = {"request": "late-3", "index": 5, "tokens": (7, 9), "gaps": (0.25, 0.5)}
    return TokenDivergence(**(facts | {"explained": False} | changes))


def weights(**changes):
    return WeightsResult(**({"passed": True, "source": "seed 0", "tensors": 33} | changes))


def score(phase, **changes):
    facts = {
        "task": "arithmetic",
        "kind": "generate",
        "phase": phase,
        "n": 200,
        "correct": 190,
        "value": 0.95,
        "se": 0.0154,
        "low": 0.9104,
        "high": 0.9726,
        "subset_rule": "200 held-out problems",
        "prompt_rule": "the question alone",
        "scoring_rule": "exact text",
        "seed": 0,
        "items_fingerprint": "abc",
    }
    if phase == "replay":
        facts |= {"about": "twin", "replays": {str(key(8, 2)): 40}, "tokens_twin": 900}
    return AccuracyResult(**(facts | changes))


def verdict(word="same", **changes):
    facts = {
        "task": "arithmetic",
        "kind": "generate",
        "a": "eager",
        "b": "replay",
        "test": "mcnemar-exact",
        "n_a": 200,
        "n_b": 200,
        "value_a": 0.95,
        "value_b": 0.95,
        "delta": 0.0,
        "only_a": 0,
        "only_b": 0,
        "items_different": 0,
        "p_value": 1.0,
        "verdict": word,
        "rule": "the rule",
    }
    return PairedVerdict(**(facts | changes))


def plant(**changes):
    facts = {
        "name": "stale-output",
        "place": "replay",
        "what": "every replay is stale",
        "stated_red": ("replay-eager",),
        "stated_green": ("weights",),
        "red": ("greedy", "replay-eager"),
        "green": ("weights",),
        "as_stated": True,
        "task": verdict("different", a="clean", b="faulty", value_b=0.1, p_value=1e-9),
    }
    return PlantedFault(**(facts | changes))


def checked_run(graphs=None, *, check=None, **changes):
    """A tape run of a plain key and a twin whose check passed."""
    graphs = (tape_graph(key(8)), tape_graph(key(8, 2))) if graphs is None else graphs
    part = {
        "checked": tuple(graph.label for graph in graphs),
        "captured": len(graphs),
        "greedy": greedy(),
        "weights": weights(),
    }
    facts = {
        "dbo": True,
        "accuracy": (score("eager"), score("replay")),
        "verdicts": (verdict(),),
        "check": CheckRecord(**(part | (check or {}))),
    }
    return run_record("tape", graphs, **(facts | changes))
