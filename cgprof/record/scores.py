"""What checks and tasks found: tokens, weights, scores, and verdicts over pairs of scores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cgprof.record.strict import NonNegative, Record


class TokenDivergence(Record):
    """Where the greedy tokens of a request first differ between two runs of one schedule."""

    request: str
    index: NonNegative  # of the generated token
    tokens: tuple[int, int]
    gaps: tuple[float | None, float | None]  # best logit minus second best, in each run
    explained: bool  # a gap so small that the noise floor alone can turn it


class GreedyResult(Record):
    """One schedule served with graphs, eager at equal padding and split, and eager unpadded."""

    passed: bool | None  # None: nothing replayed, or only explained differences
    requests: NonNegative
    steps: NonNegative
    longest_context: NonNegative
    replays: dict[str, NonNegative] = Field(default_factory=dict)  # key -> steps
    tokens_compared: NonNegative = 0
    divergences: tuple[TokenDivergence, ...] = ()  # replay against eager
    max_logit_diff: float | None = None  # of the best logits, up to each first difference
    noise_divergences: tuple[TokenDivergence, ...] = ()  # eager padded against unpadded
    noise_logit_diff: float | None = None
    identical: NonNegative = 0  # requests with the same prompt, side by side
    identical_outputs: NonNegative = 0  # different outputs among them, with graphs
    identical_outputs_eager: NonNegative = 0
    nonfinite: NonNegative = 0  # values of hidden states and logits, with graphs
    note: str = ""


class WeightsResult(Record):
    """The model's weights against a second reading of where they came from, bit by bit."""

    passed: bool | None
    source: str
    tensors: NonNegative
    different: tuple[str, ...] = ()
    note: str = ""


class ItemScore(Record):
    """One item of a task as one phase answered it; a row of items.parquet."""

    task: str
    kind: Literal["generate", "likelihood", "multiple-choice"]
    phase: Literal["eager", "replay"]
    item_id: str
    prompt: str
    gold: str
    output: str  # generated text, the chosen choice, or the gold text that was scored
    token_ids: tuple[int, ...]  # of the output
    score: float | None  # 1 or 0, log-probability or margin, by kind; None: not finite
    correct: bool | None = None  # None: likelihood
    answered: bool = True
    choice_scores: tuple[float | None, ...] = ()


class AccuracyResult(Record):
    """The score of one task in one phase, never without its size, error and origin."""

    task: str
    kind: Literal["generate", "likelihood", "multiple-choice"]
    phase: Literal["eager", "replay"]
    n: Annotated[int, Field(gt=0)]
    correct: NonNegative | None = None  # None: likelihood
    no_answer: NonNegative = 0
    value: float | None  # share of right items, or negative log-likelihood a token
    se: float | None = None
    low: float | None = None  # of the 95 % interval: Wilson, or normal for a likelihood
    high: float | None = None
    perplexity: float | None = None
    nonfinite: NonNegative = 0  # scores that are not finite
    subset_rule: str
    prompt_rule: str
    scoring_rule: str
    seed: int | None = None
    items_fingerprint: str  # of ids, prompts and golds
    about: Literal["plain", "twin"] | None = None  # what a replay score is meant to test
    replays: dict[str, NonNegative] = Field(default_factory=dict)  # key -> steps
    tokens_by_key: dict[str, NonNegative] = Field(
        default_factory=dict
    )  # scored tokens, eager steps included
    tokens_plain: NonNegative = 0  # scored tokens from replays of plain keys
    tokens_twin: NonNegative = 0
    tokens_eager: NonNegative = 0
    process_id: NonNegative | None = None

    @property
    def verified(self) -> bool | None:
        """Whether any scored token came from a replay of the kind it is about; None for eager."""
        if self.phase == "eager":
            return None
        return {"plain": self.tokens_plain, "twin": self.tokens_twin}.get(self.about or "", 0) > 0


class PairedVerdict(Record):
    """Two scores of one task beside each other: by items where both have them, else by errors."""

    task: str
    kind: Literal["generate", "likelihood", "multiple-choice"]
    a: str
    b: str
    test: Literal["mcnemar-exact", "paired-bootstrap", "unpaired-z", "none"]
    n_a: NonNegative
    n_b: NonNegative
    value_a: float | None
    value_b: float | None
    delta: float | None = None  # B - A
    low: float | None = None  # of the 95 % interval of delta
    high: float | None = None
    only_a: NonNegative | None = None  # items that A alone has right
    only_b: NonNegative | None = None
    items_different: NonNegative | None = None  # in output, tokens or score
    p_value: float | None = None
    detectable: float | None = None  # true difference found with 80 % power
    seed: int | None = None  # of the bootstrap
    flags: tuple[str, ...] = ()  # why the two are unlike
    verdict: Literal["same", "different", "inconclusive", "not verified"]
    rule: str


class PlantedFault(Record):
    """What a fault was stated to turn red, what it did, and whether the task alone would tell."""

    name: str
    place: str
    what: str
    stated_red: tuple[str, ...]
    stated_green: tuple[str, ...]  # legs in neither may go either way
    red: tuple[str, ...]
    green: tuple[str, ...]
    as_stated: bool
    task: PairedVerdict | None = None  # replay scores, without the fault and with it


class CheckRecord(Record):
    """What a check saw beside the parity of each key."""

    checked: tuple[str, ...]  # labels of the keys whose parity was checked
    captured: NonNegative
    sample_seed: int | None = None  # None: every captured key
    greedy: GreedyResult | None = None
    weights: WeightsResult | None = None
    plant: PlantedFault | None = None
