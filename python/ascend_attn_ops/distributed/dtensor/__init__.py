"""DTensors as arguments of the operators.

torch's own ways to register sharding rules do not carry these operators: they leave tensors among
keywords where they are, lose writes to a second argument, and know nothing of num_heads, of lists
with one number per batch, or of keys that a mask hides. So each operator has one handler instead,
which decides from one line of axes (`_axes.py`), moves the local tensors, calls the operator, and
wraps its results.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ascend_attn_ops._core.device_limits import device_in_force
from ascend_attn_ops._core.torch_private import without_modes
from ascend_attn_ops.distributed.dtensor._axes import LINES
from ascend_attn_ops.distributed.dtensor._plan import EXPLICIT, Plan
from ascend_attn_ops.distributed.dtensor._signature import Signature, sizes_of

_signatures: dict[Any, Signature] = {}
# Lengths are part of the key, and may be others in every step: the oldest plan goes first. Plans go
# with the process group in which they communicate: equal meshes may have others.
_Plans = dict[tuple[Any, ...], Plan]
_plans: WeakKeyDictionary[Any, _Plans] = WeakKeyDictionary()
_MOST_PLANS = 4096


def enable_dtensor() -> None:
    """Make all operators accept DTensors, forward and backward. A second call changes nothing.

    Each call runs the operator on local tensors and returns DTensors. These axes divide its work,
    on a device mesh of any number of dimensions, in parts of any size:

    ============================  ==================================================================
    lightning_indexer             batch, query tokens; its gradient also heads
    sparse_flash_attention        batch, query tokens, heads; its gradient as well
    lightning_indexer_kl_loss     batch, query tokens
    flash_attention_score         batch, heads, in layout TND heads; its gradient as well
    prompt_flash_attention        batch, heads
    scatter_pa_kv_cache\\_         heads of both caches
    attention_update              any axis of lse
    ============================  ==================================================================

    Arguments with other placements are moved, by the choice that needs the fewest bytes: sharded
    heads of the KL loss become tokens by an all-to-all. A gradient that is a sum over the sharded
    axis is ``Partial()``. The device's limits are those of the part that a rank computes.

    All tensors must be DTensors of one device mesh, except atten_mask and sequence lengths, which
    are taken to be the same on all ranks. Every rank must pass the same numbers and lists.

    Raises:
        RuntimeError: this version of torch does not let a library handle DTensors; 2.10 and later
            do. Earlier ones cannot redistribute every tensor, and compiled steps come out wrong.
    """
    dispatcher = getattr(DTensor, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if not isinstance(handlers, dict) or EXPLICIT is None:
        raise RuntimeError(
            "ascend_attn_ops.distributed.enable_dtensor: torch: expected a version whose DTensor "
            "has _op_dispatcher._custom_op_handlers and ExplicitRedistributionContext, as 2.10 to "
            f"2.15 have, got torch {torch.__version__}"
        )
    overloads = [getattr(torch.ops.ascend, name).default for name in LINES]
    _signatures.update({overload: Signature(overload) for overload in overloads})
    handlers.update(dict.fromkeys(overloads, _call))


def _call(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handles a call of `overload` with DTensors."""
    signature = _signatures[overload]
    values = signature.bind(args, kwargs)
    plans = _plans.setdefault(dist.group.WORLD or DTensor, {})
    key = (overload, device_in_force(), *map(_described, values.values()))
    try:
        plan = plans.get(key)
    except TypeError:
        # Symbolic sizes of torch.compile have no hash. A decision, as its graph, is for numbers.
        described = (_described(x, numbers=True) for x in values.values())
        key = (overload, device_in_force(), *described)
        plan = plans.get(key)
    if plan is None:
        # While torch.compile traces, the decision is no part of the graph.
        with without_modes():
            plan = Plan(signature, values)
        if len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
    return plan.run(values)


def _described(value: Any, numbers: bool = False) -> Any:
    """All of an argument that a decision may depend on; with `numbers` for symbolic sizes."""
    if isinstance(value, DTensor):
        spec = value._spec
        groups = tuple(getattr(spec.mesh, "_dim_group_names", ()))
        if not numbers:
            return spec, groups
        strides = tuple(map(int, value.stride()))
        return (
            groups,
            spec.mesh,
            spec.placements,
            spec.shard_order,
            sizes_of(value),
            strides,
            value.dtype,
        )
    if isinstance(value, torch.Tensor):
        return sizes_of(value) if numbers else value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple(_described(x, numbers) for x in value)
    return int(value) if numbers and isinstance(value, torch.SymInt) else value
