import subprocess
import sys

import pytest

from cgprof.config.schema import MicrobatchConfig
from cgprof.parallel.canonical import canonical_hash, canonical_json
from cgprof.shapes import DecisionReason
from tests.support.children import environment
from tests.support.graphs import decode_key

SCRIPT = """
from cgprof.config.schema import MicrobatchConfig
from cgprof.parallel.canonical import canonical_hash, code_version
from cgprof.shapes import GraphKey, RuntimeMode
key = GraphKey(mode=RuntimeMode.FULL, num_tokens=8)
print(canonical_hash([key, MicrobatchConfig(), "text"]), code_version())
"""


def test_canonical_json_has_keys_in_order_and_plain_values():
    value = {"b": (1, DecisionReason.GRAPH), "a": decode_key(2)}
    assert canonical_json(value) == (
        '{"a":{"mode":2,"num_microbatches":1,"num_reqs":2,"num_tokens":2,"uniform_query_len":1},'
        '"b":[1,"graph"]}'
    )


def test_canonical_hash_is_the_same_in_processes_of_unlike_hash_seeds():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**environment(), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_canonical_hash_sees_every_field():
    hashes = {
        canonical_hash(value)
        for value in (
            decode_key(8),
            decode_key(8, num_microbatches=2),
            MicrobatchConfig(),
            MicrobatchConfig(decode_token_threshold=33),
            [],
            None,
        )
    }
    assert len(hashes) == 6


def test_canonical_json_refuses_what_has_no_order():
    with pytest.raises(TypeError, match="set has no canonical JSON"):
        canonical_json({1, 2})
