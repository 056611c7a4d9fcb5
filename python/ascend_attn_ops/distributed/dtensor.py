"""DTensors as arguments of the operators.

Each operator has a rule for DTensors, registered with torch.library, and a line that says which
axes its tensors have. One letter per axis: B batch, S query tokens, T key tokens, N query heads, K
key heads, H heads of the indexer. The N and K of a merged axis (H of layout BSH) stand for the
whole axis. The first tensor decides: where it is Shard of axis X, tensors with X are Shard, inputs
without it Replicate, and outputs without it are sums over X, hence Partial.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import pad

from ascend_attn_ops._core.arguments import wrong
from ascend_attn_ops._core.sparse_modes import COMPRESSED_MODES

_QUERY, _KEY = _LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
# Plain tensors that stand for the whole tensor, the same on all ranks: the library builds the
# compressed masks by itself, and lengths were numbers.
_PLAIN = ("atten_mask", "prefix", *_LENGTHS)
# Gradients that come in have the placements that autograd gives them: they are moved.
_INCOMING = ("d_", "dy")
_CAUSAL = 3
_WHOLE = Replicate()

# The statistics of flash_attention_score in TND: declared (T1, N, 8), but stored as (N, Sq, 8) of
# one sequence after another, so that no axis of theirs is that of the heads.
PER_SEQUENCE = "?"
# An output without elements.
ABSENT = "0"
NAMES = {"B": "batch", "S": "query tokens", "N": "heads"}


class Line(NamedTuple):
    inputs: str
    outputs: str  # behind "argument=" those that are absent without it
    shardable: str
    # The axis that is divided where heads are sharded: the KL loss is no sum over heads.
    of_heads: str = "N"


# The axes of arguments that are the same in every operator.
_EVERYWHERE = (
    "block_table Bm, prefix B, sink N, cmp_residual_key B, token_weight BS, sparse_indices BS1k, "
    + ", ".join(f"{name} {{{name}}}" for name in _LENGTHS)
)
_SPARSE = "query BSNd, key {keys}d, value {keys}d, query_rope BSNr, key_rope {keys}r"
_STATISTICS = "softmax_max B1SN, softmax_sum B1SN, d_softmax_sum B1SN"
_DENSE = (
    "query {q}, key {k}, value {k}, atten_mask {mask}, pse_shift {pse}, query_rope {q}, "
    "key_rope {k}, quant_scale2 {scale}, quant_offset2 {scale}, key_antiquant_scale {scales}, "
    "value_antiquant_scale {scales}, dequant_scale_query {scales_of_query}"
)
_DENSE_SAVED = (
    "dy {out}, softmax_max {stats}, softmax_sum {stats}, attention_in {out}, d_softmax_sum {stats}"
)
# In layout BSND; TND is the same without B, and S and T are its packed tokens.
LINES = {
    "lightning_indexer": Line(
        "query BSHi, key {keys}i, weights BSH", "BS1k return_values=BS1k", "{queries}"
    ),
    "lightning_indexer_grad": Line(
        "query BSHi, key BT1i, d_values BS1k, weights BSH", "BSHi BT1i BSH", "BS"
    ),
    "quant_lightning_indexer": Line(
        "query BSHi, key {keys}i, weights BSH, query_dequant_scale BSH, key_dequant_scale {keys}",
        "BS1k",
        "{queries}",
    ),
    "sparse_flash_attention": Line(
        _SPARSE, "BSNd return_softmax_lse=B1SN return_softmax_lse=B1SN", "{queries}N"
    ),
    "sparse_flash_attention_grad": Line(
        f"{_SPARSE}, d_out BSNd, out BSNd, {_STATISTICS}",
        "BSNd BT1d BT1d query_rope=BSNr key_rope=BT1r",
        "BSN",
    ),
    "sparse_lightning_indexer_grad_kl_loss": Line(
        f"{_SPARSE}, query_index BSHi, key_index BT1i, weights BSH, {_STATISTICS}",
        "BSHi BT1i BSH 1",
        "BSN",
        of_heads="S",
    ),
    "sparse_lightning_indexer_kl_loss_grad": Line(
        "query_index BSHi, key_index BT1i, weights BSH, attn_softmax_l1_norm BS1k",
        "BSHi BT1i BSH BS1k",
        "B",
    ),
    "flash_attention_score": Line(_DENSE, "{out} {stats} {stats}", "{dense}"),
    "flash_attention_score_grad": Line(f"{_DENSE}, {_DENSE_SAVED}", "{q} {k} {k}", "{dense}"),
    "_flash_attention_score_extended_grad": Line(
        f"{_DENSE}, {_DENSE_SAVED}",
        "{q} {k} {k} sink=N query_rope={q} key_rope={k} pse_grad={pse}",
        "{dense}",
    ),
    "prompt_flash_attention": Line(_DENSE, "{out}", "BN"),
    "fused_infer_attention_score": Line(_DENSE, "{out} return_softmax_lse={lse}", "BN"),
    "scatter_pa_kv_cache_": Line(
        "key_cache bpNd, value_cache bpNd, key tNd, value tNd", "", "{scatter}"
    ),
    "attention_update": Line("lse {rows}, local_out {rows}d", "{rows}d {rows}", "{rows}"),
    "_attention_update_grad": Line(
        "lse {rows}, local_out {rows}d, d_out {rows}d, d_lse_out {rows}",
        "p{rows} p{rows}d",
        "{rows}",
    ),
}
_INPUTS = {
    name: [item.split(" ") for item in f"{line.inputs}, {_EVERYWHERE}".split(", ")]
    for name, line in LINES.items()
}
_OUTPUTS = {
    name: [word.rpartition("=") for word in line.outputs.split()] for name, line in LINES.items()
}


@dataclass(frozen=True, init=False)  # torch's class is one of C++, which begins its objects
class HeadsOfSequences(Placement):
    """The statistics of flash_attention_score in layout TND, sharded by heads.

    Each rank has (T1, N / ranks, 8), stored as (N / ranks, Sq, 8) of one sequence after another,
    which its backward reads. No Shard() says that: torch refuses to redistribute it.
    """


@cache
def enable_dtensor() -> None:
    """Make all operators accept DTensors, forward and backward. A second call changes nothing.

    Each call runs the operator on local tensors and returns DTensors. Every mesh dimension may
    shard one axis of the call in equal parts: the batch, heads, or in the sparse operators query
    tokens. docs/tutorials/long_sequences.md has a table; other placements are errors. Nothing is
    communicated but gradients that arrive in the backward with another placement, and heads of the
    KL loss, which become query tokens by an all-to-all. A gradient that is a sum over the sharded
    axis is ``Partial()``. The device's limits are those of the part that a rank computes.

    All tensors must be DTensors of one device mesh, except atten_mask and sequence lengths, which
    are taken to be the same on all ranks. Every rank must pass the same numbers and lists.

    Raises:
        RuntimeError: torch is older than 2.10: its compiled steps with DTensors come out wrong.
    """
    if torch.__version__ < "2.10":
        where = "ascend_attn_ops.distributed.enable_dtensor"
        raise wrong(RuntimeError, where, "torch", "2.10 or later", torch.__version__)
    for name in LINES:
        rule = partial(_call, _Operator(name))
        torch.library.register_torch_dispatch(f"ascend::{name}", DTensor, rule)
    # From 2.14 on, torch lists the placements that detach() keeps, and autograd detaches what it
    # saves.
    propagator, detach = DTensor._op_dispatcher.sharding_propagator, torch.ops.aten.detach.default
    listed = getattr(propagator, "op_single_dim_strategy_funcs", {})
    if known := listed.get(detach):
        kept = [HeadsOfSequences(), HeadsOfSequences()]
        listed[detach] = replace(known, func=lambda *schemas: [*known(*schemas), kept])


class _Operator:
    """The schema of an operator, for all its calls."""

    def __init__(self, name: str) -> None:
        schema = getattr(torch.ops.ascend, name).default._schema
        self.name, self.where = name, f"ascend::{name}"
        self.defaults = {
            x.name: x.default_value if x.has_default_value() else None for x in schema.arguments
        }
        self.positional = sum(not x.kwarg_only for x in schema.arguments)
        self.written = {x.name for x in schema.arguments if x.is_write}


@torch.no_grad()
def _call(operator: _Operator, cls: Any, overload: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Handles a call of `overload` with DTensors."""
    call = operator.defaults | dict(zip(operator.defaults, args, strict=False)) | kwargs
    sharding = _Sharding(operator, call)
    local = list(sharding.local().items())
    positional, keywords = local[: operator.positional], local[operator.positional :]
    results = overload(*(value for _, value in positional), **dict(keywords))
    if isinstance(results, tuple):
        return tuple(map(sharding.wrap, results, sharding.outputs))
    return None if results is None else sharding.wrap(results, sharding.outputs[0])


class _Sharding:
    """Which axes of a call the dimensions of its mesh shard."""

    def __init__(self, operator: _Operator, call: Mapping[str, Any]) -> None:
        self.operator, self.call = operator, call
        self.inputs, self.outputs, shardable = axes_of(operator.name, call)
        self.tensors = {name: x for name, value in call.items() if (x := _tensors_of(value))}
        for name, tensors in self.tensors.items():
            if name not in _PLAIN and not all(isinstance(x, DTensor) for x in tensors):
                got = "a plain tensor; DTensor.from_local() makes one of what all ranks have"
                raise wrong(TypeError, operator.where, name, "a DTensor beside DTensors", got)
        # The first tensor decides.
        self.leader, letters = next(iter(self.inputs.items()))
        leader = self.tensors[self.leader][0]
        self.mesh: DeviceMesh = leader.device_mesh
        self.sizes = dict(zip(letters, leader.shape, strict=False))
        allowed = {Shard(i): x for i, x in enumerate(letters) if x in shardable}
        # The axis that each mesh dimension shards; None where all ranks compute the same.
        self.given: list[str | None] = []
        for placement in leader.placements:
            if not any(_same(placement, x) for x in (_WHOLE, *allowed)):
                shards = (f"{shard!r} ({_name(axis)})" for shard, axis in allowed.items())
                self._refuse(self.leader, " or ".join((repr(_WHOLE), *shards)), placement)
            self.given.append(allowed.get(placement))
        self.divided = [LINES[operator.name].of_heads if x == "N" else x for x in self.given]
        self.ranks: dict[str | None, int] = {}
        for dim, axis in enumerate(self.divided):
            self.ranks[axis] = self.ranks.get(axis, 1) * self.mesh.size(dim)
        self.key_heads = key_heads_of(call) if "N" in self.ranks else 1
        if "N" in self.ranks:
            self._check_size("num_heads", "N", call.get("num_heads") or 0)
            self._check_size("key", "N", self.key_heads if self.key_heads > 1 else 0)
        # Key and value may be one tensor, and stay one. Torch 2.10 would detach results in place.
        self.moved = cache(lambda x, at: x.detach().redistribute(placements=at).to_local())

    def _refuse(self, argument: str, expected: str, got: object) -> NoReturn:
        raise wrong(ValueError, self.operator.where, argument, expected, repr(got))

    def _check_size(self, argument: str, axis: str, size: int) -> None:
        ranks, whole = self.ranks[axis], size if axis == "N" else self.sizes[axis]
        if size != whole or size % ranks:
            self._refuse(argument, f"{whole} {_name(axis)} in {ranks} equal parts", size)

    def _placement(self, letters: str, axis: str | None) -> Placement | None:
        """Returns the placement that shards an axis; None if the tensor does not have the axis."""
        if axis == "N" and letters == PER_SEQUENCE:
            return HeadsOfSequences()
        if axis == "N" and "N" not in letters and self.key_heads > 1:
            axis = "K"
        return Shard(letters.index(axis)) if axis is not None and axis in letters else None

    def local(self) -> dict[str, Any]:
        """The arguments of this rank."""
        local = dict(self.call)
        for name, tensors in self.tensors.items():
            parts = [self._part(name, x) for x in tensors]
            local[name] = parts[0] if isinstance(self.call[name], Tensor) else parts
        for name in ("num_heads", "num_key_value_heads") if "N" in self.ranks else ():
            if local.get(name) and (name == "num_heads" or self.key_heads > 1):
                local[name] //= self.ranks["N"]
        if "S" in self.ranks:
            self._cut_tokens(local)
        return local

    def _part(self, name: str, x: Any) -> Any:
        """This rank's part of a tensor; it is an error if that takes communication."""
        letters = self.inputs.get(name, "")
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, run_check=False)
        elif x.device_mesh != self.mesh:
            self._refuse(name, f"the device mesh of {self.leader}, {self.mesh}", x.device_mesh)
        elif not name.startswith(_INCOMING):
            for axis, placement in zip(self.given, x.placements, strict=True):
                wanted = self._placement(letters, axis) or _WHOLE
                taken = type(placement) is Replicate and type(wanted) is Shard
                if not _same(placement, wanted) and (name in self.operator.written or not taken):
                    how = f"sharded by {_name(axis)}" if axis else "replicated"
                    self._refuse(name, f"{wanted!r}, as {self.leader} is {how}", placement)
        target = tuple(self._placement(letters, axis) or _WHOLE for axis in self.divided)
        for axis, placement in zip(self.divided, target, strict=True):
            if type(placement) is Shard and axis is not None:
                self._check_size(name, axis, x.shape[placement.dim])
        return x.to_local() if all(map(_same, x.placements, target)) else self.moved(x, target)

    def _cut_tokens(self, local: dict[str, Any]) -> None:
        """Replace the lengths by those of a rank that has some query tokens, and all keys.

        In the causal mode the last query sees the last key: a sequence that goes on after this part
        loses the keys that only its later queries see.
        """
        query, key = local[_QUERY], local[_KEY]
        causal = self.call["sparse_mode"] == _CAUSAL
        index = 0
        for dim, axis in enumerate(self.divided):
            if axis == "S":
                index = index * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        size = self.sizes["S"] // self.ranks["S"]
        begin, end = index * size, (index + 1) * size
        if self.call["layout"] == "TND":
            local[_QUERY], local[_KEY] = packed_lengths(query, key, begin, end, causal)
            return
        if causal:
            if key is None:
                count, keys = local[self.leader].shape[0], self.call["key"].shape[1]
                key = torch.full((count,), keys) if query is None else torch.full_like(query, keys)
            later = self.sizes["S"] - end if query is None else (query - end).clamp(min=0)
            local[_KEY] = (key - later).clamp(min=0)
        if query is not None:
            local[_QUERY] = (query - begin).clamp(0, size)

    def wrap(self, result: Tensor, letters: str) -> DTensor:
        """Wraps a result; what has no part of a sharded axis is a sum over it."""
        without = _WHOLE if letters == ABSENT else Partial()
        placements = [
            _WHOLE if axis is None else self._placement(letters, axis) or without
            for axis in self.divided
        ]
        shape = stride = None
        if letters == PER_SEQUENCE:  # whose whole torch does not know
            tokens, heads, lanes = result.shape
            shape = torch.Size((tokens, heads * self.ranks.get("N", 1), lanes))
            stride = (shape[1] * lanes, lanes, 1)
        return DTensor.from_local(
            result, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )


def packed_lengths(
    query: Tensor, key: Tensor, begin: int, end: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Returns cumulative lengths of the sequences cut to [begin, end), their keys where they are.

    A sequence without queries here keeps its keys, which nothing reads.
    """
    cut = query.clamp(begin, end) - begin
    if not causal or len(query) == 0:
        return cut, key
    before_query, before_key = (pad(ends[:-1], (1, 0)) for ends in (query, key))
    later = (query - end).clamp(min=0) * (before_query < end)
    return cut, torch.maximum(key - later, before_key)


def _name(axis: str) -> str:
    return NAMES.get(axis, "rows")


def _same(x: Placement, y: Placement) -> bool:
    """Not only equal: torch's _StridedShard may equal a Shard of the same dimension."""
    return type(x) is type(y) and x == y


def _tensors_of(value: Any) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return (value,)
    return value if isinstance(value, list) and value and isinstance(value[0], Tensor) else ()


def axes_of(name: str, call: Mapping[str, Any]) -> tuple[dict[str, str], list[str], str]:
    """The axes of a call's inputs, the first of which decides, of its outputs, and the shardable.

    Where an argument is a list, they are those of every tensor in it.
    """
    packed = _layouts(call)[0] in ("TND", "NTD")

    def letters(word: re.Match[str]) -> str:
        if word[1] in call:  # lengths: one number for all batches, or none, is that of all ranks
            return "B" if call[word[1]].shape[0] > 1 else "1"
        return _WORDS[word[1]](call)

    def axes(text: str) -> str:
        text = re.sub(r"{(\w+)}", letters, text) if "{" in text else text
        return text.replace("B", "") if packed else text

    inputs = {x: axes(text) for x, text in _INPUTS[name] if call.get(x) is not None}
    absent = {x for x, value in call.items() if value is None or value is False}
    outputs = [ABSENT if x in absent else axes(text) for x, _, text in _OUTPUTS[name]]
    return inputs, outputs, axes(LINES[name].shardable)


def key_heads_of(call: Mapping[str, Any]) -> int:
    """The key heads of a call that has some; 1 where its operator has but one."""
    if "num_heads" not in call:
        return 1
    query, layout = call["query"], _layouts(call)[0]
    heads = call["num_heads"] or query.shape[layout.index("N")]
    if "num_key_value_heads" in call:
        return call["num_key_value_heads"] or heads
    if "N" in layout:
        return call["key"].shape[layout.index("N")]
    return call["key"].shape[-1] // (query.shape[-1] // heads)


def _layouts(call: Mapping[str, Any]) -> tuple[str, str]:
    """The layouts of query and of out."""
    first, _, second = str(call.get("layout", "")).partition("_")
    return first, second or first


def _letters(layout: str) -> str:
    # The heads of a merged axis are those of H.
    return layout.replace("H", "N").replace("T", "S").replace("D", "d")


def _keys(call: Mapping[str, Any]) -> str:
    if call.get("block_table") is not None:
        return {3: "bpK", 4: "bKpd", 5: "bKdpd"}[call["key"].dim()]
    return _letters(_layouts(call)[0]).replace("S", "T").replace("N", "K")


def _mask(call: Mapping[str, Any]) -> str:
    mask = call["atten_mask"]
    if call["sparse_mode"] in COMPRESSED_MODES:
        return ""
    if call["layout"] == "TND":
        # Its axis has the tokens of the longest sequence, or all: not those of a rank.
        return _broadcast("zNzz", mask) if mask.dim() == 4 else ""
    one_query = call["query"].shape[_layouts(call)[0].index("S")] == 1
    if mask.dim() == 2 and one_query and "block_size" in call:
        return "BT"
    return _broadcast({2: "ST", 3: "BST", 4: "BNST"}[mask.dim()], mask)


def _pse(call: Mapping[str, Any]) -> str:
    pse, packed = call["pse_shift"], call["layout"] == "TND"
    if call["pse_type"] in (2, 3):
        return ("zN" if packed else "BN")[-pse.dim() :]
    return "z" if packed else _broadcast("BNST", pse)


def _dense(call: Mapping[str, Any]) -> str:
    # Dropout's bits and TND's bias are flat, with the heads in the middle.
    flat_bias = call["pse_shift"] is not None and _pse(call) == "z"
    return "" if call["drop_mask"] is not None or flat_bias else "BN"


def _scale(call: Mapping[str, Any]) -> str:
    """One value, or one for each channel: the heads are the first axis that is not 1."""
    axes = _broadcast("z" * call["quant_scale2"].dim(), call["quant_scale2"])
    return axes.replace("z", "N", 1)


def _scales(call: Mapping[str, Any]) -> str:
    """The scales of int8 keys, for each token or each channel."""
    if call["dequant_scale_query"] is not None:
        return "1"
    if call["key_antiquant_mode"] == 1:
        return "Bz"
    return {"BSH": "K", "BNSD": "K1d"}.get(_layouts(call)[0], "Kd")


def _scatter(call: Mapping[str, Any]) -> str:
    plain = call["cache_mode"] == "Norm" and call["scatter_mode"] == "None"
    # Every other mode has slots or a buffer of its own for each head.
    return "N" if plain and call["key"].dim() == 3 else ""


def _broadcast(axes: str, tensor: Tensor) -> str:
    sizes = zip(axes, tensor.shape, strict=True)
    return "".join("1" if size == 1 else axis for axis, size in sizes)


# The letters that replace a word in braces.
_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "q": lambda call: _letters(_layouts(call)[0]),
    "k": _keys,
    "out": lambda call: _letters(_layouts(call)[1]),
    "stats": lambda call: PER_SEQUENCE if call["layout"] == "TND" else "BNSz",
    "lse": lambda call: "BNSz" if "B" in _layouts(call)[0] else "SNz",
    "mask": _mask,
    "pse": _pse,
    "dense": _dense,
    "scale": _scale,
    "scales": _scales,
    "scales_of_query": lambda call: _letters(_layouts(call)[0]).replace("d", ""),
    "scatter": _scatter,
    "rows": lambda call: "ABCDEFGHIJKLM"[: call["lse"][0].dim()],
    # The blocks of a cache belong to no sequence, and a part of the queries sees other keys than
    # the lengths of the call say, or their number.
    "keys": lambda call: "bp1" if call.get("block_table") is not None else "BT1",
    "queries": lambda x: "B" if x["block_table"] is not None or x.get("cmp_ratio", 1) > 1 else "BS",
}
