import pytest
import torch

from cgprof.attention.paged import PagedAttention
from cgprof.errors import UnsupportedError


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, "model.num_kv_heads"),
        ({"head_dim": 80}, "model.head_dim"),
        ({"head_dim": 8}, "model.head_dim"),
        ({"dtype": torch.float64}, "model.dtype"),
    ],
)
def test_paged_attention_refuses_what_its_kernels_lack(setting, where):
    good = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    with pytest.raises(UnsupportedError) as caught:
        PagedAttention(**(good | setting))
    assert caught.value.where == where
