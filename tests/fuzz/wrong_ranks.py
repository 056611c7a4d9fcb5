"""Distributed calls on two ranks, of which one makes a changed call.

Both raise, and the same, or neither; soon in either case; and they stay in step. Without a change
the results are those of one process, which the tests of ascend_attn_ops.distributed compare.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.device_limits import limits
from ascend_attn_ops.distributed import SequenceShards
from support.processes import on_ranks
from torch import Tensor
from torch.distributed import ProcessGroup

from .case import Case, Finding
from .copies import Once, twin
from .wrong_calls import change

Random = random.Random
Arguments = dict[str, Any]

_RANKS = 2
# A call takes milliseconds. Long before the time-out of the collectives, which a hang waits for.
_SECONDS = 30.0
_HEADS, _DEPTH, _ROPE, _COUNT = 4, 8, 4, 3
_RATIO = 2


def _tensors(r: Random, tokens: int, dtype: torch.dtype, **shapes: tuple[int, ...]) -> Arguments:
    generator = torch.Generator().manual_seed(r.getrandbits(32))
    return {
        name: torch.randn(tokens, *shape, generator=generator).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def _indices(shards: SequenceShards) -> Tensor:
    """Every token selects itself, and the first keys."""
    positions = shards.positions()[:, None, None].int()
    return torch.cat((positions, torch.zeros_like(positions), -torch.ones_like(positions)), -1)


def _dense(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    heads = (_HEADS, _DEPTH)
    x = _tensors(r, shards.local_tokens, dtype, query=heads, key=heads, value=heads)
    method = r.choice(("allgather", "ring", "ulysses"))
    return {**x, "num_heads": _HEADS, "method": method, "sparse_mode": r.choice((0, 3))}


def _indexer(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    x = _tensors(
        r, shards.local_tokens, dtype, query=(2, _DEPTH), key=(1, _DEPTH), weights=(2,),
        next_key=(1, _DEPTH), next_rope=(1, _ROPE),
    )  # fmt: skip
    ahead = [x.pop("next_key"), x.pop("next_rope")][: r.randrange(3)]
    prefetch = Once(ahead) if r.randrange(2) else ahead
    return {**x, "sparse_count": _COUNT, "return_values": r.random() < 0.5, "prefetch": prefetch}


def _sparse(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    x = _tensors(
        r, shards.local_tokens, dtype, query=(_HEADS, _DEPTH), key=(1, _DEPTH),
        query_rope=(_HEADS, _ROPE), key_rope=(1, _ROPE),
    )  # fmt: skip
    return {**x, "value": x["key"], "sparse_indices": _indices(shards), "scale_value": 0.3}


def _loss(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    x = _tensors(
        r, shards.local_tokens, dtype, query=(_HEADS, _DEPTH), key=(1, _DEPTH),
        query_index=(2, _DEPTH), key_index=(1, _DEPTH), weights=(2,),
    )  # fmt: skip
    statistic = torch.ones(1, shards.local_tokens, _HEADS)
    return {
        **x, "sparse_indices": _indices(shards), "softmax_max": statistic,
        "softmax_sum": statistic.clone(), "scale_value": 0.3,
        **r.choice(({"reduction": "mean"}, {"normalizer": 3.0}, {"reduction": "sum"})),
    }  # fmt: skip


def _compress(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    x = _tensors(r, shards.local_tokens, dtype, values=(_DEPTH,), logits=(_DEPTH,))
    bias = torch.zeros(_RATIO, _DEPTH, dtype=dtype).requires_grad_()
    return {**x, "position_bias": bias, "overlap": r.random() < 0.5}


def _compressed_keys(shards: SequenceShards) -> int:
    return shards.compressed(_RATIO).local_tokens


def _mla(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    x = _tensors(r, shards.local_tokens, dtype, query=(_HEADS, _DEPTH), ori_kv=(1, _DEPTH))
    keys = _tensors(r, _compressed_keys(shards), dtype, cmp_kv=(1, _DEPTH))
    selected = {"cmp_sparse_indices": -torch.ones(shards.local_tokens, 1, _COUNT).int()}
    kind = r.choice(({}, keys, keys | selected))
    return {
        **x, **kind, "cmp_ratio": _RATIO, "scale_value": 0.3, "sink": torch.zeros(_HEADS),
        "ori_win_left": r.choice((-1, 1, 127)),
    }  # fmt: skip


def _compressed_indexer(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    x = _tensors(r, shards.local_tokens, dtype, query=(2, _DEPTH), weights=(2,))
    key = _tensors(r, _compressed_keys(shards), dtype, key=(1, _DEPTH))
    return {**x, **key, "sparse_count": _COUNT, "cmp_ratio": _RATIO}


def _loss_with_target(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    x = _tensors(r, shards.local_tokens, dtype, query_index=(2, _DEPTH), weights=(2,))
    key = _tensors(r, _compressed_keys(shards), dtype, key_index=(1, _DEPTH))
    return {
        "query": None, "key": None, **x, **key, "cmp_ratio": _RATIO,
        "sparse_indices": -torch.ones(shards.local_tokens, 1, _COUNT).int(),
        "target": torch.zeros(shards.local_tokens, 1, _COUNT),
        "normalize_target": r.random() < 0.5,
        **r.choice(({"reduction": "mean"}, {"normalizer": 3.0}, {"reduction": "sum"})),
    }  # fmt: skip


def _mla_with_loss(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    x = _tensors(
        r, shards.local_tokens, dtype, query=(_HEADS, _DEPTH), ori_kv=(1, _DEPTH),
        query_index=(2, _DEPTH), weights=(2,),
    )  # fmt: skip
    keys = _tensors(r, _compressed_keys(shards), dtype, cmp_kv=(1, _DEPTH), key_index=(1, _DEPTH))
    factor = r.choice((0.5, torch.tensor(0.5)))
    return {
        **x, **keys, "cmp_sparse_indices": -torch.ones(shards.local_tokens, 1, _COUNT).int(),
        "cmp_ratio": _RATIO, "scale_value": 0.3, "indexer_loss_weight": factor,
        "on_loss": r.choice((None, len)),
    }  # fmt: skip


def _unshard(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    return {**_tensors(r, shards.local_tokens, dtype, x=(3,)), "dim": 0}


def _shards(r: Random, shards: SequenceShards, dtype: torch.dtype) -> Arguments:
    lengths = list(shards.lengths)
    return {
        "lengths": Once(lengths) if r.randrange(2) else lengths,
        "order": r.choice(("zigzag", "contiguous")),
    }  # fmt: skip


class _Function(NamedTuple):
    signature: Callable[..., Any]
    call: Callable[..., Any]  # shards and the arguments
    valid: Callable[[Random, SequenceShards, torch.dtype], Arguments]


def _of_shards(
    function: Callable[..., Any], valid: Callable[[Random, SequenceShards, torch.dtype], Arguments]
) -> _Function:
    return _Function(function, lambda shards, **x: function(**x, shards=shards), valid)


FUNCTIONS = {
    "flash_attention_score": _of_shards(distributed.flash_attention_score, _dense),
    "lightning_indexer": _of_shards(distributed.lightning_indexer, _indexer),
    "sparse_flash_attention": _of_shards(distributed.sparse_flash_attention, _sparse),
    "lightning_indexer_kl_loss": _of_shards(distributed.lightning_indexer_kl_loss, _loss),
    "lightning_indexer with compressed keys": _of_shards(
        distributed.lightning_indexer, _compressed_indexer
    ),
    "lightning_indexer_kl_loss with a target": _of_shards(
        distributed.lightning_indexer_kl_loss, _loss_with_target
    ),
    "compress_keys": _of_shards(distributed.compress_keys, _compress),
    "sparse_flash_mla": _of_shards(distributed.sparse_flash_mla, _mla),
    "sparse_flash_mla_with_indexer_loss": _of_shards(
        distributed.sparse_flash_mla_with_indexer_loss, _mla_with_loss
    ),
    "SequenceShards.unshard": _Function(SequenceShards.unshard, SequenceShards.unshard, _unshard),
    "SequenceShards": _Function(
        SequenceShards,
        lambda shards, **options: SequenceShards(**options, group=shards.group),
        _shards,
    ),
}  # fmt: skip
# Without these there is no group to tell of an error.
_NOT_CHANGED = ("self", "shards", "group", "check_calls")


class Answer(NamedTuple):
    kinds: list[str]
    error: str
    where: str


def _outputs(returned: object) -> list[Tensor]:
    every = returned if isinstance(returned, tuple) else (returned,)
    return [x for x in every if isinstance(x, Tensor) and x.requires_grad]


def on_this_rank(group: ProcessGroup, name: str, seed: int) -> Answer:
    """One case: a call, changed if this rank is the wrong one, its backward, and a valid call."""
    r = Random(seed)
    function = FUNCTIONS[name]
    lengths = [r.choice((0, 1, 2, 5, 8)) for _ in range(r.randint(1, 3))]
    dtype = r.choice((torch.float32, torch.bfloat16))
    wrong_rank = r.randrange(_RANKS)
    region = r.choice((None, None, None, "all", "one"))
    backward = r.randrange(3) > 0
    written = r.randrange(8) == 0  # by the wrong rank, between forward and backward
    here = group.rank() == wrong_rank
    with limits(None):
        shards = SequenceShards(lengths, group)
        arguments = function.valid(r, shards, dtype)
        good = twin(arguments)
        kinds: list[str] = []
        if here and r.randrange(8):
            parameters = inspect.signature(function.signature).parameters
            may_change = {n: x for n, x in parameters.items() if n not in _NOT_CHANGED}
            kinds = change(r, arguments, may_change)
            if name == "SequenceShards":
                # Python refuses other arguments before the group is known.
                arguments = {
                    **twin(good),
                    **{n: x for n, x in arguments.items() if n in may_change},
                }
            for argument in _NOT_CHANGED:
                arguments.pop(argument, None)
        error, where = "", "forward"
        enabled = region == "all" or (region == "one" and here)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outputs = _outputs(function.call(shards, **arguments))
            if backward and outputs:
                where = "backward"
                if here and written:
                    for x in arguments.values():
                        if isinstance(x, Tensor) and x.requires_grad:
                            x.detach().zero_()
                torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        function.call(shards, **good)
    return Answer(kinds, error, where if error else "")


def _case(name: str, r: Random) -> str:
    seed = r.getrandbits(64)
    try:
        answers = on_ranks(_RANKS, on_this_rank, name, seed, seconds=_SECONDS)
    except AssertionError as failure:
        raise Finding(f"{failure} -- {name}") from None
    kinds = next((x.kinds for x in answers if x.kinds), ["valid"])
    first, second = ((x.error, x.where) for x in answers)
    if first != second:
        raise Finding(f"one rank: {first!r}, the other: {second!r} -- {' + '.join(kinds)}, {name}")
    return f"{kinds[0]}: {'refused' if first[0] else 'worked'}"


CASES: dict[str, Case] = {f"ranks/{name}": partial(_case, name) for name in FUNCTIONS}
