"""Hand-made scores of tasks with their items."""

from cgprof.record.scores import AccuracyResult, ItemScore
from cgprof.stats.paired import proportion_error, wilson_interval


def items_for(correct, *, kind="generate", phase="replay", task="arithmetic"):
    """One item a truth value."""
    return [
        ItemScore(
            task=task,
            kind=kind,
            phase=phase,
            item_id=str(index),
            prompt="1+1=",
            gold="2",
            output="2" if right else "3",
            token_ids=(50,) if right else (51,),
            score=float(right),
            correct=bool(right),
        )
        for index, right in enumerate(correct)
    ]


def score_of(items, **fields):
    """The accuracy of these items, as a replay score of twins by default."""
    n, correct = len(items), sum(item.correct for item in items)
    low, high = wilson_interval(correct, n)
    known = {
        "task": items[0].task,
        "kind": items[0].kind,
        "phase": items[0].phase,
        "n": n,
        "correct": correct,
        "value": correct / n,
        "se": proportion_error(correct / n, n),
        "low": low,
        "high": high,
        "subset_rule": f"first {n} of 1319",
        "prompt_rule": "zero-shot",
        "scoring_rule": "exact text",
        "items_fingerprint": f"of {n}",
    }
    if items[0].phase == "replay":
        known |= {
            "about": "twin",
            "replays": {"FULL-8x8q1-mb2": 40},
            "tokens_by_key": {"FULL-8x8q1-mb2": 300, "NONE-64": 20},
            "tokens_twin": 300,
            "tokens_eager": 20,
        }
    return AccuracyResult(**{**known, **fields})
