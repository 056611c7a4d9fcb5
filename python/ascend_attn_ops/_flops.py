"""FLOPs of the operators, for torch.utils.flop_counter: two per multiply-add of a matrix product,
over the keys that each query really reads.

`register` is called when the package is imported; `unregister` undoes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ascend_attn_ops import _C
from ascend_attn_ops._operators import ALL_TOKENS, signature_of
from ascend_attn_ops._packing import Lengths, lengths_between
from ascend_attn_ops._torch import FakeTensor

# By the names of their operators.
_FORMULAS: dict[str, Callable[..., int]] = {}


def register() -> None:
    """Let torch.utils.flop_counter count the operators. Calling it again has no effect."""
    unregister()
    for operator, count in _FORMULAS.items():
        register_flop_formula(getattr(torch.ops.ascend, operator), get_raw=True)(count)


def unregister() -> None:
    """Undo `register`."""
    for operator in _FORMULAS:
        flop_registry.pop(getattr(torch.ops.ascend, operator), None)


def _formula(*operators: str) -> Callable[[Callable[[SimpleNamespace], int]], None]:
    """Name the operators that a formula, of the arguments of a call by name, is for."""

    def add(formula: Callable[[SimpleNamespace], int]) -> None:
        for operator in operators:
            signature = signature_of(operator)

            @wraps(formula)
            def count(
                *args: Any,
                out_val: Any = None,
                signature: inspect.Signature = signature,
                **kwargs: Any,
            ) -> int:
                # torch has matched the outputs of an `out=` overload with its schema.
                read = {name: x for name, x in kwargs.items() if name in signature.parameters}
                call = signature.bind(*args, **read)
                call.apply_defaults()
                return formula(SimpleNamespace(**call.arguments))

            _FORMULAS[operator] = count

    return add


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) or x.is_meta


def _values(lengths: Lengths, tokens: int, packed: bool) -> Sequence[int]:
    """The lengths of sequences. A fake tensor has none: they count as equal."""
    if lengths is None or not len(lengths):
        return ()
    if isinstance(lengths, Tensor):
        if _is_fake(lengths):
            count = lengths.shape[0]
            return [tokens // count if packed else tokens] * count
        lengths = lengths.tolist()
    return lengths_between(lengths, closed=True) if packed else lengths


def _sequences(a: SimpleNamespace, tokens: int, packed: bool) -> list[tuple[int, int]]:
    """The number of queries and keys of every sequence."""
    batch = 1 if packed else a.query.shape[_C.layout_axes[a.layout][0]]
    sides = []
    for x, lengths in (
        (a.query, a.actual_seq_lengths_query),
        (a.key, a.actual_seq_lengths_key),
    ):
        values = _values(lengths, x.shape[tokens], packed)
        if not packed and len(values) <= 1:
            values = [values[0] if values else x.shape[tokens]] * batch
        sides.append(values)
    # PromptFlashAttention takes longer lists, and reads as much of them as there are batches.
    return list(zip(*sides, strict=packed))[: None if packed else batch]


def _of_sparse(a: SimpleNamespace) -> list[tuple[int, int]]:
    if getattr(a, "block_table", None) is not None:
        return _of_pages(a)
    return _sequences(a, tokens=-3, packed=a.layout == "TND")


def _of_pages(a: SimpleNamespace) -> list[tuple[int, int]]:
    packed = a.layout == "TND"
    # The lengths of the keys are counts in both layouts.
    room = a.block_table.shape[1] * a.key.shape[1]
    keys = _values(a.actual_seq_lengths_key, room, packed=False)
    queries = _values(a.actual_seq_lengths_query, a.query.shape[-3], packed)
    return list(zip(queries or [a.query.shape[1]] * len(keys), keys, strict=True))


def _read_keys(a: SimpleNamespace, most: int | None = None) -> int:
    """The number of pairs of a query and a key that it reads, at most `most` for each query."""
    pairs = 0
    sequences = _of_sparse(a)
    ratio = getattr(a, "cmp_ratio", 1)
    for (queries, keys), tokens in zip(sequences, _tokens(a, ratio, sequences), strict=True):
        limit = keys if most is None else min(keys, most)
        causal = a.sparse_mode != 0
        pairs += _causal_pairs(queries, tokens, limit, ratio) if causal else queries * limit
    return pairs


def _tokens(a: SimpleNamespace, ratio: int, sequences: list[tuple[int, int]]) -> list[int]:
    """The tokens that the keys of every sequence stand for. A fake residual counts as 0."""
    residual = getattr(a, "cmp_residual_key", None)
    if residual is None:
        return [keys if ratio == 1 else queries for queries, keys in sequences]
    residuals = [0] * len(sequences) if _is_fake(residual) else residual.tolist()
    return [ratio * keys + x for (_, keys), x in zip(sequences, residuals, strict=True)]


def _causal_pairs(queries: int, tokens: int, most: int, ratio: int) -> int:
    """The number of keys that the last queries of a sequence see, at most `most` each: the last one
    those of all tokens, and each before it those of one token fewer."""

    def up_to(count: int) -> int:
        """The sum of min(i // ratio, most) for i = 1 ... count."""
        full = min(count // ratio, most)
        return ratio * full * (full - 1) // 2 + full * (count - full * ratio + 1)

    return up_to(tokens) - up_to(max(tokens - queries, 0))


@_formula("lightning_indexer")
def _(a: SimpleNamespace) -> int:
    heads, size = a.query.shape[-2:]
    return _read_keys(a) * heads * (2 * size + 2)


@_formula("lightning_indexer_grad")
def _(a: SimpleNamespace) -> int:
    heads, size = a.query.shape[-2:]
    # The scores again, d_query and d_key; and d_weights.
    return _read_keys(a, a.sparse_indices.shape[-1]) * heads * (3 * 2 * size + 2)


def _selected_keys(a: SimpleNamespace) -> int:
    return _read_keys(a, a.sparse_indices.shape[-1] * a.sparse_block_size)


def _sizes(a: SimpleNamespace) -> tuple[int, int, int]:
    """Heads, the size of the scores' products with their ropes, and that without."""
    heads, size = a.query.shape[-2:]
    rope = 0 if a.query_rope is None else a.query_rope.shape[-1]
    return heads, size + rope, size


@_formula("sparse_flash_attention")
def _(a: SimpleNamespace) -> int:
    heads, joined, size = _sizes(a)
    return _selected_keys(a) * heads * 2 * (joined + size)


@_formula("sparse_flash_attention_grad")
def _(a: SimpleNamespace) -> int:
    heads, joined, size = _sizes(a)
    # The scores again, d_query and d_key; the gradient of the weights, and d_value.
    return _selected_keys(a) * heads * 2 * (3 * joined + 2 * size)


def _joined_pairs(a: SimpleNamespace) -> int:
    """The number of pairs of a query and a key of sparse_flash_mla, original or compressed."""
    most = None if a.cmp_sparse_indices is None else a.cmp_sparse_indices.shape[-1]
    sequences = _joined_sequences(a)
    residuals: Sequence[int | None] = [None] * len(sequences)
    residual = a.cmp_residual_kv
    if a.cmp_kv is not None and residual is not None and not _is_fake(residual):
        residuals = residual.tolist()
    left, right = (ALL_TOKENS if x < 0 else x for x in (a.ori_win_left, a.ori_win_right))
    mode = a.ori_mask_mode or 1  # 1 keeps all keys
    pairs = 0
    for (queries, keys, compressed), rest in zip(sequences, residuals, strict=True):
        tokens = keys if rest is None else compressed * a.cmp_ratio + rest
        window = _C.kept_keys(mode, queries, keys, left, right, 0, False)
        first = 0 if a.ori_mask_mode == 0 else min(max(queries - keys, 0), queries)
        pairs += sum(end - begin for begin, end in window[first:])
        limit, seeing = compressed if most is None else min(compressed, most), queries - first
        causal = a.cmp_mask_mode == 3
        pairs += _causal_pairs(seeing, tokens, limit, a.cmp_ratio) if causal else seeing * limit
    return pairs


def _joined_sequences(a: SimpleNamespace) -> list[tuple[int, int, int]]:
    """The number of queries, original keys and compressed keys of every sequence."""
    packed = a.layout == "TND"
    paged = getattr(a, "layout_kv", None) == "PA_BSND"
    queries = _values(a.actual_seq_lengths_query, a.query.shape[-3], packed)
    batch = len(queries) if packed else a.query.shape[0]
    sides = [queries or [a.query.shape[-3]] * batch]
    for part in ("ori", "cmp"):
        x, lengths = getattr(a, f"{part}_kv"), getattr(a, f"actual_seq_lengths_{part}_kv")
        if x is None:
            sides.append([0] * batch)
            continue
        room = x.shape[-3]
        if paged:
            room *= getattr(a, f"{part}_block_table").shape[1]
        sides.append(_values(lengths, room, packed and not paged) or [room] * batch)
    return list(zip(*sides, strict=True))


@_formula("sparse_flash_mla")
def _(a: SimpleNamespace) -> int:
    heads, size = a.query.shape[-2:]
    return _joined_pairs(a) * heads * 2 * 2 * size


@_formula("sparse_flash_mla_grad")
def _(a: SimpleNamespace) -> int:
    heads, size = a.query.shape[-2:]
    # The scores again, d_query, and both parts of the gradient of a key; that of the weights.
    return _joined_pairs(a) * heads * 2 * 5 * size


@_formula("sparse_lightning_indexer_grad_kl_loss")
def _(a: SimpleNamespace) -> int:
    heads, joined, _size = _sizes(a)
    index_heads, index_size = a.query_index.shape[-2:]
    # The attention's scores; the indexer's scores and their gradients.
    of_key = heads * 2 * joined + index_heads * (3 * 2 * index_size + 2 * 2)
    return _read_keys(a, a.sparse_indices.shape[-1]) * of_key


@_formula("sparse_lightning_indexer_kl_loss_grad")
def _(a: SimpleNamespace) -> int:
    a.query, a.key = a.query_index, a.key_index
    heads, size = a.query.shape[-2:]
    # The scores and their gradients.
    return _read_keys(a, a.sparse_indices.shape[-1]) * heads * (3 * 2 * size + 2 * 2)


def _kept_pairs(a: SimpleNamespace, sequences: list[tuple[int, int]]) -> int:
    """The number of pairs that the sparse_mode keeps; all without a mask. The values of a mask are
    not looked at."""
    whole = a.atten_mask is None and a.sparse_mode not in _C.compressed_modes
    mode = 1 if whole else a.sparse_mode
    # The band of modes 7 and 8 is in the last and in the first sequence that is not empty.
    filled = [i for i, (queries, keys) in enumerate(sequences) if queries and keys]
    band = {7: filled[-1:], 8: filled[:1]}.get(mode, [])
    prefix = _values(getattr(a, "prefix", None), 0, packed=False)
    counts: dict[tuple[Any, ...], int] = {}

    def kept(queries: int, keys: int, prefix: int, is_band: bool) -> int:
        call = (mode, queries, keys, a.pre_tokens, a.next_tokens, prefix, is_band)
        if call not in counts:
            counts[call] = sum(end - begin for begin, end in _C.kept_keys(*call))
        return counts[call]

    return sum(
        kept(queries, keys, prefix[i] if prefix else 0, i in band)
        for i, (queries, keys) in enumerate(sequences)
    )


def _dense(a: SimpleNamespace) -> tuple[int, int, int]:
    """Pairs of queries and keys over all heads, D with its rope, and the D of value."""
    heads_axis = _C.layout_axes[a.layout][2]
    merged = heads_axis == a.query.dim() - 1
    if a.num_heads is None:
        a.num_heads = a.query.shape[heads_axis]
    size = a.query.shape[-1] // a.num_heads if merged else a.query.shape[-1]
    value_size = a.value.shape[-1]
    if merged:
        value_size = value_size * size // a.key.shape[-1]
    rope = getattr(a, "query_rope", None)
    if rope is not None:
        size += rope.shape[-1] // a.num_heads if merged else rope.shape[-1]
    sequences = _sequences(a, _C.layout_axes[a.layout][1], packed=a.layout == "TND")
    return _kept_pairs(a, sequences) * a.num_heads, size, value_size


# The gradient of the bias needs the scores and the gradient of the weights: as much as the forward.
@_formula("flash_attention_score", "prompt_flash_attention", "_flash_attention_score_pse_grad")
def _(a: SimpleNamespace) -> int:
    pairs, size, value_size = _dense(a)
    return pairs * 2 * (size + value_size)


@_formula("fused_infer_attention_score")
def _(a: SimpleNamespace) -> int:
    # NTD is a layout of this operator alone.
    inputs = a.layout.partition("_")[0]
    batch, tokens, heads = {**_C.layout_axes, "NTD": (-1, 1, 0)}[inputs]
    if a.num_heads is None:
        a.num_heads = a.query.shape[heads]
    key_heads, pages = a.num_key_value_heads or a.num_heads, a.block_table is not None
    page = {3: 1, 4: 2, 5: 3}.get(a.key.dim(), 0)  # the axis of block_size
    room = a.block_table.shape[1] * a.key.shape[page] if pages else a.key.shape[tokens]
    queries = _values(a.actual_seq_lengths_query, a.query.shape[tokens], batch < 0)
    keys = _values(a.actual_seq_lengths_key, room, batch < 0 and not pages)
    if batch >= 0:
        count = a.query.shape[batch]
        queries, keys = (
            list(x)[:count] if len(x) > 1 else [*x, most][:1] * count
            for x, most in ((queries, a.query.shape[tokens]), (keys, room))
        )

    def size(x: Tensor | None, heads: int, merged: bool) -> int:
        if x is None:
            return 0
        return 16 * x.shape[2] if x.dim() == 5 else x.shape[-1] // (heads if merged else 1)

    merged = heads == a.query.dim() - 1
    of_scores = sum(size(x, a.num_heads, merged) for x in (a.query, a.query_rope))
    of_values = size(a.value, key_heads, a.value.dim() == 3 if pages else merged)
    pairs = _kept_pairs(a, list(zip(queries, keys, strict=True))) * a.num_heads
    return pairs * 2 * (of_scores + of_values)


@_formula("flash_attention_score_grad", "_flash_attention_score_extended_grad")
def _(a: SimpleNamespace) -> int:
    pairs, size, value_size = _dense(a)
    # The scores again, dq and dk; the gradient of the weights, and dv.
    return pairs * 2 * (3 * size + 2 * value_size)


@_formula("attention_update", "_attention_update_grad")
def _(a: SimpleNamespace) -> int:
    # A sum over the parts, weighted in each row; in the gradient, as many products of rows.
    return 2 * sum(part.numel() for part in a.local_out)


register()
