"""What a tape does with an operator: refuse it, leave it out of replays, or run it again."""

from __future__ import annotations

from enum import Enum
from functools import cache

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

# Operators that read a tensor's values on the host although torch does not tag them so.
_NEEDS_HOST = frozenset(
    {
        "aten::is_nonzero",
        "aten::nonzero_numpy",
        "aten::tensor_split.tensor_indices_or_sections",
        "aten::where",  # the form with a condition alone
    }
)
# The same, unless they are told the size of their result.
_NEEDS_SIZE_ON_HOST = frozenset(
    {"aten::repeat_interleave.Tensor", "aten::repeat_interleave.self_Tensor"}
)
_HOST_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
# Functional collectives return before their result is there; the tape waits for c10d's own only.
_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")
_ALL_TO_ALL = "c10d::alltoall_base_"
# From one tensor of a fixed size to one: all that a tape, like a CUDA graph, can hold.
_COLLECTIVES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::_allgather_base_": "all_gather_into_tensor",
    "c10d::_reduce_scatter_base_": "reduce_scatter_tensor",
    _ALL_TO_ALL: "all_to_all_single",
}
_UNINITIALISED = ("empty", "new_empty")
_MASK_DTYPES = (torch.bool, torch.uint8)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class OpEffect(Enum):
    """What a replay must do."""

    NOTHING = 0  # a view, uninitialised memory, or a change of metadata alone
    RUN = 1
    COLLECTIVE = 2  # run, then wait; its schema does not say what it writes

    @property
    def node_kind(self) -> str:
        """How a recording counts it."""
        return "collective" if self is OpEffect.COLLECTIVE else "kernel"


def refusal(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> str | None:
    """Returns why an operation cannot be recorded, or None."""
    name = func.name()
    if func.namespace in _FUNCTIONAL:
        return f"operation {name} is not permitted while recording: use torch.distributed's own"
    if func.namespace == "c10d":
        return _collective_refusal(func, args, kwargs)
    masked = _indexes_with_mask(func, args, kwargs)
    if masked or name in _NEEDS_HOST or _is_data_dependent(func, args, kwargs):
        what = f"{name} with a mask" if masked else name
        return f"operation {what} is not permitted while recording: it needs the host"
    return None


def classify(func: OpOverload, *, returns_views_only: bool) -> OpEffect:
    """Returns the effect of an operation, given whether all it returned aliases its inputs."""
    if func.namespace == "c10d":
        return OpEffect.COLLECTIVE
    if func._schema.is_mutable:
        metadata_only = torch.Tag.inplace_view in func.tags
        return OpEffect.NOTHING if metadata_only else OpEffect.RUN
    base = func.overloadpacket.__name__
    if returns_views_only or (func.namespace == "aten" and base.startswith(_UNINITIALISED)):
        return OpEffect.NOTHING
    return OpEffect.RUN


@cache
def out_overload(func: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """Returns the overload that writes into given tensors, and their names, or None.

    Composite operators have none: their out= form may take another path than the plain one.
    """
    if func._schema.is_mutable or func.has_kernel_for_dispatch_key(
        DispatchKey.CompositeImplicitAutograd
    ):
        return None
    if any(str(value.type) != "Tensor" for value in func._schema.returns):
        return None
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        arguments = candidate._schema.arguments
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        names = tuple(a.name for a in arguments if a.is_out)
        if len(names) == len(func._schema.returns) and rest == wanted:
            return candidate, names
    return None


def _collective_refusal(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> str | None:
    name = func.name()
    if name not in _COLLECTIVES:
        *others, last = _COLLECTIVES.values()
        return (
            f"operation {name} is not permitted while recording: of the collectives, those from "
            f"one tensor to one are ({', '.join(others)} and {last})"
        )
    if name != _ALL_TO_ALL:
        return None
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    splits = [given.get("output_split_sizes"), given.get("input_split_sizes")]
    if any(len(set(sizes)) > 1 for sizes in splits if isinstance(sizes, (list, tuple))):
        return (
            f"operation {name} with unequal split sizes is not permitted while recording: they "
            "need the host, and a replay would keep them; give every rank the same number of rows"
        )
    return None


def _is_data_dependent(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> bool:
    if func.name() in _NEEDS_SIZE_ON_HOST:
        return kwargs.get("output_size") is None
    if func.name() == "aten::one_hot":
        return kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1
    if func.overloadpacket.__name__ in _INDEXING:
        return False  # of a dynamic shape only with masks
    return bool(_HOST_TAGS.intersection(func.tags))


def _indexes_with_mask(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> bool:
    if func.namespace != "aten" or func.overloadpacket.__name__ not in _INDEXING:
        return False
    indices = kwargs.get("indices", args[1] if len(args) > 1 else ())
    if not isinstance(indices, (list, tuple)):
        return False
    return any(isinstance(i, torch.Tensor) and i.dtype in _MASK_DTYPES for i in indices)
