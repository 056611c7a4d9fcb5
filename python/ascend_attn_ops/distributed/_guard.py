"""A wrong call of a distributed function is an error on all ranks, before anything travels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ascend_attn_ops import _C
from ascend_attn_ops._arguments import check_memory, readable, shown, tensors_in
from ascend_attn_ops.distributed._layout import Layout, Tensors
from ascend_attn_ops.distributed._parts import (
    ONE_TOKEN,
    DifferentiableOperation,
    Operation,
    Source,
)
from ascend_attn_ops.distributed._ranges import Ranges
from ascend_attn_ops.distributed.shards import SequenceShards, check_local

Named = Mapping[str, "Tensor | None"]

# These have the tokens second to last, (1, T, N) in TND.
_STATISTICS = ("softmax_max", "softmax_sum")
# All tokens share these, which have no axis of tokens.
_SHARED = ("sink", "position_bias", "indexer_loss_weight")
# These keep their dtype under autocast, as in the operators.
_NEVER_CAST = (*_STATISTICS, "token_weight", *_SHARED)


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
) -> tuple[list[Any], list[Any]]:
    """Raise if the call is wrong on this rank or on another. Kept keys begin to travel.

    Args:
        operation: with options that must be equal on all ranks.
        shards: which tokens are local.
        layout: of the tensors.
        queries, keys: arguments of the operation by name.
        ahead: keys of the next operation, by kind.
        options: further options that must be equal.

    Returns:
        Queries and keys with the local tokens first, in the dtype of autocast.
    """
    where = f"ascend::{operation.name}"
    if is_compiling():
        _check_graphs(where, shards)
    kinds = {f"prefetch ({kind})": kind for kind in ahead or {}}
    others = dict(zip(kinds, (ahead or {}).values(), strict=True))
    kinds |= dict(zip(keys, operation.kinds, strict=False))
    sources = operation.sources(shards, list(keys.values()))
    holds = dict(zip(keys, sources, strict=True))
    given = _local_tokens(where, shards, layout, {**queries, **keys, **others}, holds)
    keeps = (*_NEVER_CAST, *operation.never_cast())
    cast = {name: x if name in keeps else _cast(x) for name, x in given.items()}
    if not is_compiling():
        chosen = {**vars(operation), **(options or {})}
        for name, option in chosen.items():
            for x in tensors_in(option):
                check_memory(where, name, x)
        facts = {**chosen, **_facts(given)}
        if facts["gradient"] and isinstance(operation, DifferentiableOperation):
            _check_saved(where, given)
        kept = {name: x for name, x in given.items() if name in kinds and x is not None}
        _check(operation, shards, facts, [cast[x] for x in queries], [cast[x] for x in keys])
        alike, lacking = shards.agreement.vote(
            where,
            facts,
            wish=[x if x is None else x.dtype for x in cast.values()],
            missing=[
                not shards._gathered.has(kinds[name], x, cast[name].dtype)
                for name, x in kept.items()
            ],
        )
        if not alike:
            warnings.warn(
                f"{where}: torch.autocast: expected the same on all ranks; this call ignores it",
                stacklevel=4,
            )
            cast = given
            _check(operation, shards, facts, [cast[x] for x in queries], [cast[x] for x in keys])
        for (name, x), some_rank_lacks_it in zip(kept.items(), lacking, strict=True):
            # Either all ranks gather a kind of keys, or none.
            if some_rank_lacks_it or not alike:
                shards._gathered.drop(shards, kinds[name])
            shards._gathered.start(_whole(holds.get(name, shards)), kinds[name], x, cast[name])
    return [cast[x] for x in queries], [cast[x] for x in keys]


def check_call(
    where: str,
    shards: SequenceShards,
    layout: str,
    tensors: Named,
    options: Mapping[str, Any],
    check: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """`guard` for a function that is no operator: `check` raises for wrong tensors of one rank."""
    if is_compiling():
        _check_graphs(where, shards)
    given = _local_tokens(where, shards, layout, tensors, {})
    check(given)
    if not is_compiling():
        facts = {**options, **_facts(given)}
        if facts["gradient"]:
            _check_saved(where, given)
        shards.agreement.vote(where, facts)
    return given


def _check_graphs(where: str, shards: SequenceShards) -> None:
    """A rank with nothing to compute would get other collectives in its graph than the others."""
    idle = [rank for rank in range(shards.world_size) if not shards.rows(rank)]
    if shards.tokens and idle:
        raise NotImplementedError(
            f"{where}: shards: expected tokens on every rank under torch.compile, got none on rank "
            f"{idle[0]}; disable torch.compile for batches with fewer tokens than ranks"
        )


def without_autocast(shards: SequenceShards) -> AbstractContextManager[object]:
    """Keeps the tensors of `guard` in their dtype."""
    for kind in shards.device_types:
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
    return nullcontext()


def _whole(source: Source) -> Layout:
    assert isinstance(source, Layout)
    return source


def _local_tokens(
    where: str, shards: SequenceShards, layout: str, tensors: Named, holds: Mapping[str, Source]
) -> dict[str, Any]:
    """The tensors with the local tokens first; None marks an omitted one.

    `holds`: how tensors are spread that do not have the tokens of `shards`.
    """
    if layout not in ("TND", "BSND"):
        raise ValueError(f"{where}: layout: expected 'TND' or 'BSND', got {shown(layout)}")
    result: dict[str, Any] = {}
    device = None
    for argument, x in tensors.items():
        if x is None:
            result[argument] = None
            continue
        check_local(where, argument, x)
        device = device or x.device
        if x.device.type not in shards.device_types or x.device != device:
            raise ValueError(
                f"{where}: {argument}: expected device {_devices(shards, device)}, got {x.device}"
            )
        if argument in _SHARED:
            result[argument] = x
            continue
        leading = (1,) * ((argument in _STATISTICS) + (layout == "BSND"))
        source = holds.get(argument, shards)
        count = source.local_tokens
        shape = (*leading, count)
        if tuple(x.shape[: len(shape)]) != shape:
            of_tokens = source is shards or isinstance(source, Ranges)
            what = "tokens" if of_tokens else "compressed keys"
            raise ValueError(
                f"{where}: {argument}: expected the {count} local {what} of shards, "
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


def _cast(x: Any) -> Any:
    """The argument as autocast casts it: all floating-point dtypes but float64 become one."""
    if x is None or not torch.is_autocast_enabled(x.device.type):
        return x
    keeps = x.dtype == torch.float64 or not x.is_floating_point()
    return x if keeps else x.to(torch.get_autocast_dtype(x.device.type))


def _facts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the tensors that have to be equal on all ranks."""
    facts: dict[str, Any] = {
        name: x if x is None else (*x.shape[name not in _SHARED :], str(x.dtype))
        for name, x in tensors.items()
    }
    recorded = torch.is_grad_enabled()
    facts["gradient"] = [
        name for name, x in tensors.items() if x is not None and x.requires_grad and recorded
    ]
    if any(x is not None and x.is_cpu for x in tensors.values()):
        # Ranks that round differently would drift apart without a word.
        facts["matrix products (set ASCEND_ATTN_OPS_CPU_CAPABILITY)"] = _C.matrix_products()
    return facts


def _check_saved(where: str, tensors: Mapping[str, Any]) -> None:
    """Raise for a tensor that autograd cannot save for the backward."""
    for argument, x in tensors.items():
        if x is not None and x.is_inference():
            raise ValueError(
                f"{where}: {argument}: expected no inference tensor where gradients are recorded, "
                "got one; clone it outside of torch.inference_mode, or call under torch.no_grad"
            )


def _check(
    operation: Operation,
    shards: SequenceShards,
    facts: Mapping[str, Any],
    queries: Tensors,
    keys: Tensors,
) -> None:
    """Let the operator check the call: all rules are its own.

    Only the parts with the most queries and with the most keys can break a limit.
    """
    dtypes = [x if x is None else x.dtype for x in (*queries, *keys)]
    call = (operation.name, repr((facts, dtypes)), _C.limits_override())
    parts = shards.rows()
    if call not in shards._checked:
        some = parts or [ONE_TOKEN]
        for part in {max(some, key=lambda x: x.count), max(some, key=lambda x: x.end)}:
            operation.on_meta(part, queries, keys)
        shards._checked.add(call)
    if parts and readable(queries[0]):
        operation.check_values(parts, queries)
