"""A wrong call of a distributed function is an error on all ranks, before anything travels."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ascend_attn_ops import _C
from ascend_attn_ops._core.arguments import check_memory, readable, shown, tensors_in, wrong
from ascend_attn_ops.distributed._layout import GatheredKeys, Ranges, Source
from ascend_attn_ops.distributed._operations import (
    ONE_TOKEN,
    SHARED,
    STATISTICS,
    Operation,
    Tensors,
)
from ascend_attn_ops.distributed.shards import SequenceShards, check_local

# These keep their dtype under autocast, as in the operators.
_NEVER_CAST = (*STATISTICS, "token_weight", *SHARED)


def batch_first(x: Tensor, layout: str) -> Tensor:
    return x.unsqueeze(0) if layout == "BSND" else x


def guard(
    operation: Operation,
    shards: SequenceShards,
    layout: str,
    tensors: Tensors,
    *,
    options: Tensors,
) -> tuple[dict[str, Any], dict[str, GatheredKeys]]:
    """Raise if the call is wrong on this rank or on another.

    The ranks compare the options of the operation and the further ones. Returns the tensors with
    the local tokens first, in autocast's dtype, and those keys that have travelled ahead.
    """
    where = f"ascend::{operation.name}"
    if is_compiling():
        _check_graphs(where, shards)
    sources = {
        name: operation.source(shards, name)
        for name in operation.keys
        if tensors.get(name) is not None
    }
    ahead = {name: tensors[name] for name in sources if isinstance(tensors[name], GatheredKeys)}
    for name, keys in ahead.items():
        if keys.layout is not sources[name]:
            expected = "keys that were prefetched for the same shards, of which all are gathered"
            raise wrong(ValueError, where, name, expected, "others")
    tensors = {**tensors, **{name: keys.local for name, keys in ahead.items()}}
    given = _local_tokens(where, shards, layout, tensors, sources)
    keeps = {*_NEVER_CAST, *operation.never_cast, *(["weights"] if operation.ratio > 1 else [])}
    cast = {name: x if name in keeps else _cast(x) for name, x in given.items()}
    if not is_compiling():
        chosen = {**operation.options, **options}
        for name, option in chosen.items():
            for x in tensors_in(option):
                check_memory(where, name, x)
        facts = {**chosen, **_facts(given), "prefetched keys": [*ahead]}
        if facts["gradient"] and operation.differentiable is not None:
            _check_saved(where, given)
        _check(operation, shards, facts, cast)
        if not _agree(where, shards, facts, cast):
            cast = given
            _check(operation, shards, facts, cast)
        for name, keys in ahead.items():
            if keys.dtype != cast[name].dtype:
                expected = f"keys that were prefetched in {cast[name].dtype}, as autocast has it"
                raise wrong(ValueError, where, name, f"{expected} here", str(keys.dtype))
    return cast, ahead


def send_ahead(
    where: str, shards: SequenceShards, layout: str, keys: tuple[Tensor, ...]
) -> tuple[Any, ...]:
    """The handles of keys that begin to travel, or the keys where a compiler decides when."""
    named = {f"keys[{i}]": x for i, x in enumerate(keys)}
    given = _local_tokens(where, shards, layout, named, {})
    if is_compiling():
        return keys
    copies = {name: x.clone() for name, x in given.items()}
    sent = {name: _cast(x) for name, x in copies.items()}
    if not _agree(where, shards, _facts(given), sent):
        sent = copies
    pairs = zip(keys, copies.values(), sent.values(), strict=True)
    return tuple(GatheredKeys(shards, x.view(whole.shape), y) for whole, x, y in pairs)


def _agree(where: str, shards: SequenceShards, facts: Tensors, cast: Tensors) -> bool:
    """Whether autocast casts alike on all ranks, which raise where their facts differ."""
    dtypes = [x if x is None else x.dtype for x in cast.values()]
    alike = shards.agreement.vote(where, facts, wish=dtypes)
    if not alike:
        text = "expected the same on all ranks; this call ignores it"
        warnings.warn(f"{where}: torch.autocast: {text}", stacklevel=5)
    return alike


def _check_graphs(where: str, shards: SequenceShards) -> None:
    """A rank with nothing to compute would get other collectives in its graph than the others."""
    idle = [rank for rank in range(shards.world_size) if not shards.rows(rank)]
    if shards.tokens and idle:
        expected = "tokens on every rank under torch.compile"
        hint = "disable torch.compile for batches with fewer tokens than ranks"
        got = f"none on rank {idle[0]}; {hint}"
        raise wrong(NotImplementedError, where, "shards", expected, got)


def without_autocast(shards: SequenceShards) -> AbstractContextManager[object]:
    """Keeps the tensors of `guard` in their dtype."""
    for kind in shards.device_types:
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
    return nullcontext()


def _local_tokens(
    where: str,
    shards: SequenceShards,
    layout: str,
    tensors: Tensors,
    sources: Mapping[str, Source],
) -> dict[str, Any]:
    """The tensors with the local tokens first; None marks an omitted one."""
    if layout not in ("TND", "BSND"):
        raise wrong(ValueError, where, "layout", "'TND' or 'BSND'", shown(layout))
    result: dict[str, Any] = {}
    device = None
    for argument, x in tensors.items():
        if x is None:
            result[argument] = None
            continue
        check_local(where, argument, x)
        device = device or x.device
        types = shards.device_types
        if x.device.type not in types or x.device != device:
            expected = f"device {device} (the first tensor's)"
            if device.type not in types:
                expected = f"device {' or '.join(sorted(types))} (the group's)"
            raise wrong(ValueError, where, argument, expected, str(x.device))
        if argument in SHARED:
            result[argument] = x
            continue
        leading = (1,) * ((argument in STATISTICS) + (layout == "BSND"))
        source = sources.get(argument, shards)
        count = source.local_tokens
        shape = (*leading, count)
        if tuple(x.shape[: len(shape)]) != shape:
            of_tokens = source is shards or isinstance(source, Ranges)
            what = "tokens" if of_tokens else "compressed keys"
            sizes = ", ".join(map(str, shape))
            expected = f"the {count} local {what} of shards, shape ({sizes}, ...)"
            raise wrong(ValueError, where, argument, expected, str(tuple(x.shape)))
        for _ in leading:
            x = x.squeeze(0)
        result[argument] = x
    return result


def _cast(x: Any) -> Any:
    """The argument as autocast casts it: all floating-point dtypes but float64 become one."""
    if x is None or not torch.is_autocast_enabled(x.device.type):
        return x
    keeps = x.dtype == torch.float64 or not x.is_floating_point()
    return x if keeps else x.to(torch.get_autocast_dtype(x.device.type))


def _facts(tensors: Tensors) -> dict[str, Any]:
    """Facts of the tensors that have to be equal on all ranks."""
    facts: dict[str, Any] = {
        name: x if x is None else (*x.shape[name not in SHARED :], str(x.dtype))
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


def _check_saved(where: str, tensors: Tensors) -> None:
    """Raise for a tensor that autograd cannot save for the backward."""
    for argument, x in tensors.items():
        if x is not None and x.is_inference():
            expected = "no inference tensor where gradients are recorded"
            got = "one; clone it outside of torch.inference_mode, or call under torch.no_grad"
            raise wrong(ValueError, where, argument, expected, got)


def _check(
    operation: Operation, shards: SequenceShards, facts: Mapping[str, Any], tensors: Tensors
) -> None:
    """Let the operator check the call: all rules are its own.

    Only the parts with the most queries and with the most keys can break a limit.
    """
    dtypes = [x if x is None else x.dtype for x in tensors.values()]
    call = (operation.name, repr((facts, dtypes)), _C.limits_override())
    parts = shards.rows()
    if call not in shards._checked:
        some = parts or [ONE_TOKEN]
        for part in {max(some, key=lambda x: x.count), max(some, key=lambda x: x.end)}:
            operation.on_meta(part, tensors)
        shards._checked.add(call)
    if operation.keys and readable(next(iter(tensors.values()))):
        queries, _ = operation.split(tensors)
        for part in parts:
            operation.check_values(part, operation.queries(part, queries))
