"""A wrong call of a distributed function is an error on all ranks, before anything travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor

from ascend_attn_ops import _C
from ascend_attn_ops._arguments import shown
from ascend_attn_ops.distributed._agreement import agree
from ascend_attn_ops.distributed._parts import Operation
from ascend_attn_ops.distributed.shards import SequenceShards

Named = Mapping[str, "Tensor | None"]

# These have the tokens second to last, (1, T, N) in TND.
_STATISTICS = ("softmax_max", "softmax_sum")


def tokens_first(x: Tensor, layout: str) -> Tensor:
    return x.squeeze(0) if layout == "BSND" else x


def batch_first(x: Tensor, layout: str) -> Tensor:
    return x.unsqueeze(0) if layout == "BSND" else x


def guard(
    operation: Operation,
    shards: SequenceShards,
    layout: str,
    *,
    queries: Named,
    keys: Named,
    ahead: Named | None = None,
    options: Mapping[str, Any] | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Raise on all ranks if the call is wrong on any. Otherwise, kept keys begin to travel.

    Args:
        operation: with options that must be equal on all ranks.
        shards: which tokens are local.
        layout: of the tensors.
        queries, keys: arguments of the operation by name.
        ahead: keys of the next operation, by kind.
        options: further options that must be equal.
        check: raises what else is wrong.

    Returns:
        Queries and keys with the local tokens first.
    """
    where = f"ascend::{operation.name}"
    tensors = {**queries, **keys, **{f"prefetch ({kind})": x for kind, x in (ahead or {}).items()}}
    facts: dict[str, Any] = {}
    kept: dict[str, Tensor] = {}
    error: Exception | None = None
    try:
        tensors = _local_tokens(where, shards, layout, tensors)
        if check is not None:
            check()
        names = [*operation.kinds, *(ahead or {})]
        travelling = [tensors[name] for name in list(tensors)[len(queries) :]]
        if not is_compiling():
            kept = {
                kind: x for kind, x in zip(names, travelling, strict=bool(names)) if x is not None
            }
            facts = {**vars(operation), **(options or {})}
            facts |= {
                name: x if x is None else (*x.shape[1:], str(x.dtype))
                for name, x in tensors.items()
            }
            facts["gradient"] = [
                name
                for name, x in tensors.items()
                if x is not None and x.requires_grad and torch.is_grad_enabled()
            ]
            call = (operation.name, repr(facts), _C.limits_override())
            if call not in shards._checked:
                _run_on_meta(operation, shards, *([tensors[n] for n in x] for x in (queries, keys)))
                shards._checked.add(call)
    except (TypeError, ValueError, NotImplementedError) as wrong:
        error = wrong
    missing = [not shards._gathered.has(kind, x) for kind, x in kept.items()]
    answers = agree(shards.hosts, where, error, facts, missing)
    for (kind, x), some_rank_lacks_it in zip(kept.items(), answers, strict=True):
        # Either all ranks gather a kind of keys, or none.
        if some_rank_lacks_it:
            shards._gathered.drop(shards, kind)
        shards._gathered.start(shards, kind, x)
    return [tensors[name] for name in queries], [tensors[name] for name in keys]


def _local_tokens(
    where: str, shards: SequenceShards, layout: str, tensors: Named
) -> dict[str, Tensor | None]:
    """The tensors with the local tokens first."""
    if layout not in ("TND", "BSND"):
        raise ValueError(f"{where}: layout: expected 'TND' or 'BSND', got {shown(layout)}")
    result: dict[str, Tensor | None] = {}
    device = None
    for argument, x in tensors.items():
        if x is None:
            result[argument] = None
            continue
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            raise TypeError(
                f"{where}: {argument}: expected a tensor of this rank's tokens, "
                f"got {type(x).__name__}"
            )
        device = device or x.device
        if x.device.type not in shards.device_types or x.device != device:
            raise ValueError(
                f"{where}: {argument}: expected device {_devices(shards, device)}, got {x.device}"
            )
        leading = (1,) * ((argument in _STATISTICS) + (layout == "BSND"))
        shape = (*leading, shards.local_tokens)
        if tuple(x.shape[: len(shape)]) != shape:
            raise ValueError(
                f"{where}: {argument}: expected the {shards.local_tokens} local tokens of shards, "
                f"shape ({', '.join(map(str, shape))}, ...), got {tuple(x.shape)}"
            )
        for _ in leading:
            x = x.squeeze(0)
        result[argument] = x
    return result


def _devices(shards: SequenceShards, device: torch.device) -> str:
    if device.type in shards.device_types:
        return f"{device} (the first tensor's)"
    return f"{' or '.join(sorted(shards.device_types))} (the group's)"


def _run_on_meta(
    operation: Operation, shards: SequenceShards, queries: list[Any], keys: list[Any]
) -> None:
    """Let the operator check the call, without data: all rules are its own.

    Only the parts with the most queries and with the most keys can break a limit.
    """
    parts = shards.rows()
    for part in (
        {max(parts, key=lambda x: x.count), max(parts, key=lambda x: x.end)} if parts else ()
    ):
        operation.on_meta(part, queries, keys)
