"""Which axes the tensors of every operator have, and which of them may be sharded.

One letter per axis of a tensor: B batch, S query tokens, T key tokens, N query heads, K key heads,
H heads of the indexer. Lower case letters and digits are never sharded. The N and K of a merged
axis (H of layout BSH) stand for the whole axis.

A sharded axis X determines the placements of a call: tensors with X are Shard, inputs without it
Replicate, and outputs without it are sums over X, hence Partial. That is why the heads of the
indexer cannot be sharded in the forward: the selection is no sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ascend_attn_ops._core.sparse_modes import COMPRESSED_MODES
from ascend_attn_ops.distributed.dtensor._signature import sizes_of

# The statistics of flash_attention_score in TND: declared (T1, N, 8), but stored as (N, Sq, 8) of
# one sequence after another, so that no axis of theirs is that of the heads.
PER_SEQUENCE = "?"
# An output without elements.
ABSENT = "0"


class Line(NamedTuple):
    inputs: str
    outputs: str  # behind "argument=" those that are absent without it
    shardable: str


# Lengths of more batches than a call has.
MORE = "x"
_LENGTHS = "actual_seq_lengths_query B, actual_seq_lengths_key B"
_RESIDUAL = "cmp_residual_key B"
_SPARSE = "query BSNd, key {keys}d, value {keys}d, sparse_indices BS1k"
_ROPES = "query_rope BSNr, key_rope {keys}r"
_STATISTICS = "softmax_max B1SN, softmax_sum B1SN"
_DENSE = (
    "query {q}, key {k}, value {k}, atten_mask {mask}, pse_shift {pse}, sink N, query_rope {q}, "
    f"key_rope {{k}}, prefix B, {_LENGTHS}"
)
_DENSE_SAVED = (
    "dy {out}, softmax_max {stats}, softmax_sum {stats}, attention_in {out}, d_softmax_sum {stats}"
)

# In layout BSND; TND is the same without B, and S and T are its packed tokens.
LINES = {
    "lightning_indexer": Line(
        f"query BSHi, key {{keys}}i, weights BSH, block_table Bm, {_LENGTHS}, {_RESIDUAL}",
        "BS1k return_values=BS1k",
        "{queries}",
    ),
    "lightning_indexer_grad": Line(
        f"query BSHi, key BT1i, d_values BS1k, sparse_indices BS1k, weights BSH, {_LENGTHS}",
        "BSHi BT1i BSH",
        "BSH",
    ),
    "sparse_flash_attention": Line(
        f"{_SPARSE}, {_ROPES}, block_table Bm, {_LENGTHS}",
        "BSNd return_softmax_lse=B1SN return_softmax_lse=B1SN",
        "{queries}N",
    ),
    "sparse_flash_attention_grad": Line(
        f"{_SPARSE}, d_out BSNd, out BSNd, {_STATISTICS}, d_softmax_sum B1SN, {_ROPES}, {_LENGTHS}",
        "BSNd BT1d BT1d query_rope=BSNr key_rope=BT1r",
        "BNS",
    ),
    "sparse_lightning_indexer_grad_kl_loss": Line(
        "query BSNd, key BT1d, query_index BSHi, key_index BT1i, weights BSH, sparse_indices BS1k, "
        f"{_STATISTICS}, {_ROPES}, token_weight BS, {_LENGTHS}",
        "BSHi BT1i BSH 1",
        "BS",
    ),
    "sparse_lightning_indexer_kl_loss_grad": Line(
        "query_index BSHi, key_index BT1i, weights BSH, sparse_indices BS1k, "
        f"attn_softmax_l1_norm BS1k, {_LENGTHS}, {_RESIDUAL}",
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
    "prompt_flash_attention": Line(
        "query {q}, key {k}, value {k}, atten_mask {mask}, quant_scale2 {scale}, "
        "quant_offset2 {scale}, actual_seq_lengths_query {queries_of}, "
        "actual_seq_lengths_key {keys_of}",
        "{out}",
        "BN",
    ),
    "scatter_pa_kv_cache_": Line(
        "key tNd, key_cache bpNd, value tNd, value_cache bpNd", "", "{scatter}"
    ),
    "attention_update": Line("lse {rows}, local_out {rows}d", "{rows}d {rows}", "{rows}"),
    "_attention_update_grad": Line(
        "d_out {rows}d, d_lse_out {rows}, lse {rows}, local_out {rows}d",
        "p{rows} p{rows}d",
        "{rows}",
    ),
}

# The axes of query, key and out.
_DENSE_LAYOUTS = {
    "BSH": ("BSN", "BTK", "BSN"),
    "SBH": ("SBN", "TBK", "SBN"),
    "BSND": ("BSNd", "BTKd", "BSNd"),
    "BNSD": ("BNSd", "BKTd", "BNSd"),
    "BNSD_BSND": ("BNSd", "BKTd", "BSNd"),
    "TND": ("SNd", "TKd", "SNd"),
}
_MERGED_LAYOUTS = ("BSH", "SBH")


@dataclass(frozen=True)
class Axes:
    """The axes of one call."""

    inputs: Mapping[str, str]  # where the argument is a list, of every tensor in it
    outputs: tuple[str, ...]
    shardable: str
    sizes: Mapping[str, int]
    even: bool  # whether all ranks must have as many heads


def axes_of(name: str, call: Mapping[str, Any]) -> Axes:
    """The axes of a call whose tensors have passed the operator's checks."""
    line = LINES[name]
    # The dense layouts have lines of their own.
    packed = call.get("layout") == "TND" and "{q}" not in line.inputs

    def axes(text: str) -> str:
        text = re.sub(r"{(\w+)}", lambda word: _WORDS[word[1]](call), text)
        return text.replace("B", "") if packed else text

    pairs = [item.split(" ") for item in line.inputs.split(", ")]
    inputs = {argument: axes(text) for argument, text in pairs if call.get(argument) is not None}
    sizes: dict[str, int] = {}
    for argument, letters in inputs.items():
        value = call[argument]
        shape = sizes_of(value if isinstance(value, Tensor) else value[0])
        for axis, size in zip(letters, shape, strict=False):
            sizes.setdefault(axis, size)
    even = False
    if "num_heads" in call:
        if call["num_heads"] is not None:
            sizes["N"] = call["num_heads"]
        sizes["K"] = _key_heads(call, sizes["N"])
        # Unequal parts of a merged axis would end within a head, and unequal parts of query heads
        # that share key heads would not be those of the key heads.
        grouped = sizes["K"] not in (1, sizes["N"])
        merged = call["layout"] in _MERGED_LAYOUTS or call.get("quant_scale2") is not None
        even = grouped or merged
    shardable = axes(line.shardable)
    # A rank's first queries may then see no key, and a call without keys is refused.
    if not packed and sizes.get("S", 0) > sizes.get("T", 0):
        shardable = shardable.replace("S", "")
    absent = {argument for argument, value in call.items() if value is None or value is False}
    outputs = tuple(
        ABSENT if argument in absent else axes(text)
        for argument, _, text in (word.rpartition("=") for word in line.outputs.split())
    )
    return Axes(inputs, outputs, shardable, sizes, even)


def _key_heads(call: Mapping[str, Any], heads: int) -> int:
    if "num_key_value_heads" in call:
        return call["num_key_value_heads"] or heads
    shape = sizes_of(call["key"])
    if call["layout"] in _MERGED_LAYOUTS:
        return shape[-1] // (sizes_of(call["query"])[-1] // heads)
    return shape[_DENSE_LAYOUTS[call["layout"]][1].index("K")]


def _mask(call: Mapping[str, Any]) -> str:
    mask = call["atten_mask"]
    if call["sparse_mode"] in COMPRESSED_MODES:
        return ""
    if call["layout"] == "TND":
        # Its axis has the tokens of the longest sequence, or all: not those of a rank.
        return _broadcast("zNzz", mask) if mask.dim() == 4 else ""
    return _broadcast({2: "ST", 3: "BST", 4: "BNST"}[mask.dim()], mask)


def _pse(call: Mapping[str, Any]) -> str:
    pse = call["pse_shift"]
    packed = call["layout"] == "TND"
    if call["pse_type"] in (2, 3):
        return ("zN" if packed else "BN")[-pse.dim() :]
    return "z" if packed else _broadcast("BNST", pse)


def _broadcast(axes: str, tensor: Tensor) -> str:
    sizes = zip(axes, sizes_of(tensor), strict=True)
    return "".join("1" if size == 1 else axis for axis, size in sizes)


def _counts(call: Mapping[str, Any], name: str) -> str:
    """One number for all batches, or none; one for each; more, of which the first are used."""
    batch = sizes_of(call["query"])[_DENSE_LAYOUTS[call["layout"]][0].index("B")]
    (size,) = sizes_of(call[name])
    return "1" if size < 2 else "B" if size == batch else MORE


def _dense(call: Mapping[str, Any]) -> str:
    # Dropout's bits and TND's bias are flat, with the heads in the middle.
    flat_bias = call["pse_shift"] is not None and _pse(call) == "z"
    if call["drop_mask"] is not None or flat_bias:
        return ""
    return "N" if call["layout"] == "TND" else "BN"


def _scale(call: Mapping[str, Any]) -> str:
    """One value, or one for each channel: the heads are the first axis that is not 1."""
    shape = sizes_of(call["quant_scale2"])
    first = next((axis for axis, size in enumerate(shape) if size > 1), None)
    return "".join("N" if axis == first else "z" for axis in range(len(shape)))


def _scatter(call: Mapping[str, Any]) -> str:
    plain = call["cache_mode"] == "Norm" and call["scatter_mode"] == "None"
    # Every other mode has slots or a buffer of its own for each head.
    return "N" if plain and call["key"].dim() == 3 else ""


# The letters that replace a word in braces.
_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "q": lambda call: _DENSE_LAYOUTS[call["layout"]][0],
    "k": lambda call: _DENSE_LAYOUTS[call["layout"]][1],
    "out": lambda call: _DENSE_LAYOUTS[call["layout"]][2],
    "stats": lambda call: PER_SEQUENCE if call["layout"] == "TND" else "BNSz",
    "mask": _mask,
    "pse": _pse,
    "dense": _dense,
    "queries_of": lambda call: _counts(call, "actual_seq_lengths_query"),
    "keys_of": lambda call: _counts(call, "actual_seq_lengths_key"),
    "scale": _scale,
    "scatter": _scatter,
    "rows": lambda call: "ABCDEFGHIJKLM"[: call["lse"][0].dim()],
    # The blocks of a cache belong to no sequence, and a part of the queries sees other keys than
    # the lengths of the call say, or their number.
    "keys": lambda call: "bp1" if call.get("block_table") is not None else "BT1",
    "queries": lambda call: (
        "B" if call["block_table"] is not None or call.get("cmp_ratio", 1) > 1 else "BS"
    ),
}
