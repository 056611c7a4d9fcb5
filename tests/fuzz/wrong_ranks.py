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
from ascend_attn_ops._core.device_limits import limits
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


class Drawing:
    """Draws valid arguments for the tokens of this rank."""

    def __init__(self, r: Random, shards: SequenceShards, dtype: torch.dtype) -> None:
        self.r, self.shards, self.dtype = r, shards, dtype
        self.tokens = shards.local_tokens

    def tensors(self, *, tokens: int | None = None, **shapes: tuple[int, ...]) -> Arguments:
        generator = torch.Generator().manual_seed(self.r.getrandbits(32))
        rows = self.tokens if tokens is None else tokens
        return {
            name: torch.randn(rows, *x, generator=generator).to(self.dtype).requires_grad_()
            for name, x in shapes.items()
        }

    def compressed(self, *names: str) -> Arguments:
        tokens = self.shards.compressed(_RATIO).local_tokens
        return self.tensors(tokens=tokens, **dict.fromkeys(names, (1, _DEPTH)))

    def indices(self) -> Tensor:
        """Every token selects itself, and the first keys."""
        x = self.shards.positions()[:, None, None].int()
        return torch.cat((x, torch.zeros_like(x), -torch.ones_like(x)), -1)

    def no_indices(self) -> Tensor:
        return -torch.ones(self.tokens, 1, _COUNT).int()

    def reduction(self) -> Arguments:
        return self.r.choice(({"reduction": "mean"}, {"normalizer": 3.0}, {"reduction": "sum"}))

    def indexer(self) -> Arguments:
        x = self.tensors(query=_INDEX_QUERY, key=_KEY, weights=(2,))
        return {**x, "sparse_count": _COUNT, "return_values": self.r.random() < 0.5}

    def mla_keys(self) -> Arguments:
        keys = self.compressed("cmp_kv")
        selected = keys | {"cmp_sparse_indices": self.no_indices()}
        return self.r.choice(({}, keys, selected))


_QUERY, _KEY, _INDEX_QUERY = (_HEADS, _DEPTH), (1, _DEPTH), (2, _DEPTH)
_CALLS: dict[str, Callable[[Drawing], Arguments]] = {
    "flash_attention_score": lambda d: {
        **d.tensors(query=_QUERY, key=_QUERY, value=_QUERY), "num_heads": _HEADS,
        "method": d.r.choice(("allgather", "ring", "ulysses")), "sparse_mode": d.r.choice((0, 3)),
    },
    "lightning_indexer": lambda d: d.indexer(),
    "sparse_flash_attention": lambda d: {
        **(x := d.tensors(query=_QUERY, key=_KEY, query_rope=(_HEADS, _ROPE), key_rope=(1, _ROPE))),
        "value": x["key"], "sparse_indices": d.indices(), "scale_value": 0.3,
    },
    "lightning_indexer_kl_loss": lambda d: {
        **d.tensors(
            query=_QUERY, key=_KEY, query_index=_INDEX_QUERY, key_index=_KEY, weights=(2,)
        ),
        "sparse_indices": d.indices(), "softmax_max": torch.ones(1, d.tokens, _HEADS),
        "softmax_sum": torch.ones(1, d.tokens, _HEADS), "scale_value": 0.3, **d.reduction(),
    },
    "lightning_indexer with compressed keys": lambda d: {
        **d.tensors(query=_INDEX_QUERY, weights=(2,)), **d.compressed("key"),
        "sparse_count": _COUNT, "cmp_ratio": _RATIO,
    },
    "lightning_indexer_kl_loss with a target": lambda d: {
        "query": None, "key": None, **d.tensors(query_index=_INDEX_QUERY, weights=(2,)),
        **d.compressed("key_index"), "cmp_ratio": _RATIO, "sparse_indices": d.no_indices(),
        "target": torch.zeros(d.tokens, 1, _COUNT), "normalize_target": d.r.random() < 0.5,
        **d.reduction(),
    },
    "compress_keys": lambda d: {
        **d.tensors(values=(_DEPTH,), logits=(_DEPTH,)),
        "position_bias": torch.zeros(_RATIO, _DEPTH, dtype=d.dtype).requires_grad_(),
        "overlap": d.r.random() < 0.5,
    },
    "sparse_flash_mla": lambda d: {
        **d.tensors(query=_QUERY, ori_kv=_KEY), **d.mla_keys(), "cmp_ratio": _RATIO,
        "scale_value": 0.3, "sink": torch.zeros(_HEADS), "ori_win_left": d.r.choice((-1, 1, 127)),
    },
    "sparse_flash_mla_with_indexer_loss": lambda d: {
        **d.tensors(query=_QUERY, ori_kv=_KEY, query_index=_INDEX_QUERY, weights=(2,)),
        **d.compressed("cmp_kv", "key_index"), "cmp_sparse_indices": d.no_indices(),
        "cmp_ratio": _RATIO, "scale_value": 0.3,
        "indexer_loss_weight": d.r.choice((0.5, torch.tensor(0.5))),
        "on_loss": d.r.choice((None, len)),
    },
    "SequenceShards.unshard": lambda d: {**d.tensors(x=(3,)), "dim": 0},
    "SequenceShards": lambda d: {
        "lengths": d.r.choice((list, Once))(d.shards.lengths),
        "order": d.r.choice(("zigzag", "contiguous")),
    },
}  # fmt: skip


class _Function(NamedTuple):
    signature: Callable[..., Any]
    call: Callable[..., Any]  # shards and the arguments
    valid: Callable[[Drawing], Arguments]


def _function(name: str, valid: Callable[[Drawing], Arguments]) -> _Function:
    if name == "SequenceShards":
        return _Function(
            SequenceShards, lambda shards, **x: SequenceShards(**x, group=shards.group), valid
        )
    if name == "SequenceShards.unshard":
        return _Function(SequenceShards.unshard, SequenceShards.unshard, valid)
    function = getattr(distributed, name.partition(" ")[0])
    return _Function(function, lambda shards, **x: function(**x, shards=shards), valid)


FUNCTIONS = {name: _function(name, valid) for name, valid in _CALLS.items()}
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
        arguments = function.valid(Drawing(r, shards, dtype))
        good = twin(arguments)
        kinds: list[str] = []
        if here and r.randrange(8):
            parameters = inspect.signature(function.signature).parameters
            may_change = {n: x for n, x in parameters.items() if n not in _NOT_CHANGED}
            kinds = change(r, arguments, may_change)
            if name == "SequenceShards":
                # Python refuses other arguments before the group is known.
                arguments = twin(good) | {n: x for n, x in arguments.items() if n in may_change}
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
        if arguments.get("on_loss") is object and error == "TypeError: object() takes no arguments":
            error = ""  # The callback's own, on this rank alone; the ranks stay in step.
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
