"""FLOPs of the operators, for torch.utils.flop_counter: two per multiply-add of a matrix product,
over the keys that each query really reads.

`register` is called when the package is imported; `unregister` undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ascend_attn_ops import _C
from ascend_attn_ops._core.arguments import has_values
from ascend_attn_ops._core.operators import ALL_TOKENS, signature_of
from ascend_attn_ops._core.packing import Lengths, lengths_between


def register() -> None:
    """Let torch.utils.flop_counter count the operators. Calling it again has no effect."""
    unregister()
    for operator, formula in _FORMULAS.items():
        counting = register_flop_formula(getattr(torch.ops.ascend, operator), get_raw=True)
        counting(_with_names(operator, formula))


def unregister() -> None:
    """Undo `register`."""
    for operator in _FORMULAS:
        flop_registry.pop(getattr(torch.ops.ascend, operator), None)


def _with_names(operator: str, formula: Callable[[SimpleNamespace], int]) -> Callable[..., int]:
    """Returns a formula that takes the arguments of a call as they are."""
    signature = signature_of(operator)

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        # torch has matched the outputs of an `out=` overload with its schema.
        read = {name: x for name, x in kwargs.items() if name in signature.parameters}
        call = signature.bind(*args, **read)
        call.apply_defaults()
        return formula(SimpleNamespace(**call.arguments))

    return count


def _attention(a: SimpleNamespace) -> int:
    heads, size, value_size = _sizes(a)
    return _pairs(a) * heads * 2 * (size + value_size)


def _attention_grad(a: SimpleNamespace) -> int:
    heads, size, value_size = _sizes(a)
    # The scores again, dq and dk; the gradient of the weights, and dv.
    return _pairs(a) * heads * 2 * (3 * size + 2 * value_size)


def _attention_over_rows(a: SimpleNamespace) -> int:
    heads, size = a.query.shape[-2:]
    return _pairs(a) * heads * 2 * (size + size - a.rope_head_dim)


def _indexer(a: SimpleNamespace) -> int:
    heads, size, _ = _sizes(a)
    return _pairs(a) * heads * (2 * size + 2)


def _indexer_grad(a: SimpleNamespace) -> int:
    heads, size, _ = _sizes(a)
    # The scores again, d_query and d_key; and d_weights.
    return _pairs(a) * heads * (3 * 2 * size + 2)


def _loss(a: SimpleNamespace) -> int:
    heads, size, _ = _sizes(a)
    index_heads, index_size = a.query_index.shape[-2:]
    # The attention's scores; the indexer's scores and their gradients.
    return _pairs(a) * (heads * 2 * size + index_heads * (3 * 2 * index_size + 2 * 2))


def _loss_with_target(a: SimpleNamespace) -> int:
    a.query, a.key = a.query_index, a.key_index
    heads, size, _ = _sizes(a)
    # The scores and their gradients.
    return _pairs(a) * heads * (3 * 2 * size + 2 * 2)


def _update(a: SimpleNamespace) -> int:
    # A sum over the parts, weighted in each row; in the gradient, as many products of rows.
    return 2 * sum(part.numel() for part in a.local_out)


# Each takes the arguments of a call by their names.
_FORMULAS: dict[str, Callable[[SimpleNamespace], int]] = {
    "flash_attention_score": _attention,
    "flash_attention_score_grad": _attention_grad,
    "_flash_attention_score_extended_grad": _attention_grad,
    "prompt_flash_attention": _attention,
    "fused_infer_attention_score": _attention,
    "sparse_flash_attention": _attention,
    "sparse_flash_attention_grad": _attention_grad,
    "kv_quant_sparse_flash_attention": _attention_over_rows,
    "sparse_flash_mla": _attention,
    "sparse_flash_mla_grad": _attention_grad,
    "lightning_indexer": _indexer,
    "lightning_indexer_grad": _indexer_grad,
    "quant_lightning_indexer": _indexer,
    "sparse_lightning_indexer_grad_kl_loss": _loss,
    "sparse_lightning_indexer_kl_loss_grad": _loss_with_target,
    "attention_update": _update,
    "_attention_update_grad": _update,
}


def _axes(a: SimpleNamespace) -> tuple[int, int, int]:
    """The axes of batch, -1 for a pack, tokens and heads in the layout of the queries."""
    # NTD is a layout of one operator alone.
    axes: dict[str, tuple[int, int, int]] = {**_C.layout_axes, "NTD": (-1, 1, 0)}
    return axes[a.layout.partition("_")[0]]


def _sizes(a: SimpleNamespace) -> tuple[int, int, int]:
    """Heads of the query, D with its rope, and the D of value; one that is the key has its D."""
    axis = _axes(a)[2]
    merged = axis == a.query.dim() - 1
    heads = a.num_heads if merged else a.query.shape[axis]
    size, rope = (
        0 if x is None else x.shape[-1] // (heads if merged else 1)
        for x in (a.query, getattr(a, "query_rope", None))
    )
    value = getattr(a, "value", None)
    if value is None:
        return heads, size + rope, size
    of_head = 2 if value.dim() == 5 else -1  # pages in fractals
    return heads, size + rope, value.shape[of_head] * size // max(a.key.shape[of_head], 1)


def _pairs(a: SimpleNamespace) -> int:
    """The number of pairs of a query and a key that one head reads."""
    if hasattr(a, "atten_mask"):
        return _kept_pairs(a)
    return _joined_pairs(a) if hasattr(a, "ori_kv") else _selected_pairs(a)


def _lengths(lengths: Lengths, batch: int | None, tokens: int) -> Sequence[int]:
    """The lengths of `batch` sequences, or of a pack for None. A fake tensor has none: they count
    as equal."""
    if isinstance(lengths, Tensor) and not has_values(lengths):
        count = lengths.shape[0]
        lengths = [tokens // max(count, 1)] * count if batch is None else [tokens] * count
    elif lengths is not None:
        lengths = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        lengths = lengths_between(lengths, closed=True) if batch is None else lengths
    if batch is None:
        return lengths or ()
    # PromptFlashAttention takes longer lists, and reads as much of them as there are batches.
    given = list(lengths or [tokens])
    return given * batch if len(given) == 1 else given[:batch]


def _sequences(a: SimpleNamespace, *keys: str) -> list[tuple[int, ...]]:
    """The number of queries, and of keys of each kind, of every sequence."""
    batch_axis, tokens, _ = _axes(a)
    batch = None if batch_axis < 0 else a.query.shape[batch_axis]
    sides = [_lengths(a.actual_seq_lengths_query, batch, a.query.shape[tokens])]
    for name in keys:
        x, lengths = getattr(a, name), getattr(a, f"actual_seq_lengths_{name}")
        table = getattr(a, _TABLES[name], None)
        if x is None:
            sides.append([0] * len(sides[0]))
        elif table is None:
            sides.append(_lengths(lengths, batch, x.shape[tokens]))
        else:
            # Pages of dense attention may be head by head, or in fractals.
            page = x.shape[-2 if hasattr(a, "atten_mask") else 1]
            sides.append(_lengths(lengths, len(table), table.shape[1] * page))
    return list(zip(*sides, strict=False))


_TABLES = {"key": "block_table", "ori_kv": "ori_block_table", "cmp_kv": "cmp_block_table"}


def _residuals(residual: Tensor | None, count: int) -> Sequence[int | None]:
    """The tokens of each sequence behind its last key; those of a fake tensor count as 0."""
    if residual is None:
        return [None] * count
    return residual.tolist() if has_values(residual) else [0] * count


def _selected_pairs(a: SimpleNamespace) -> int:
    ratio, sequences = getattr(a, "cmp_ratio", 1), _sequences(a, "key")
    selected = getattr(a, "sparse_indices", None)
    most = None if selected is None else selected.shape[-1] * getattr(a, "sparse_block_size", 1)
    residuals = _residuals(getattr(a, "cmp_residual_key", None), len(sequences))
    pairs = 0
    for (queries, keys), residual in zip(sequences, residuals, strict=True):
        tokens = keys if ratio == 1 else queries
        if residual is not None:
            tokens = ratio * keys + residual
        pairs += _visible_pairs(queries, keys, tokens, most, ratio, a.sparse_mode != 0)
    return pairs


def _joined_pairs(a: SimpleNamespace) -> int:
    """As `_pairs`, of keys that are original or compressed."""
    most = None if a.cmp_sparse_indices is None else a.cmp_sparse_indices.shape[-1]
    sequences = _sequences(a, "ori_kv", "cmp_kv")
    residuals = _residuals(None if a.cmp_kv is None else a.cmp_residual_kv, len(sequences))
    left, right = (ALL_TOKENS if x < 0 else x for x in (a.ori_win_left, a.ori_win_right))
    mode = a.ori_mask_mode or 1  # 1 keeps all keys
    pairs = 0
    for (queries, keys, compressed), residual in zip(sequences, residuals, strict=True):
        tokens = keys if residual is None else compressed * a.cmp_ratio + residual
        window = _C.kept_keys(mode, queries, keys, left, right, 0, False)
        first = 0 if a.ori_mask_mode == 0 else min(max(queries - keys, 0), queries)
        pairs += sum(end - begin for begin, end in window[first:])
        pairs += _visible_pairs(
            queries - first, compressed, tokens, most, a.cmp_ratio, a.cmp_mask_mode == 3
        )
    return pairs


def _visible_pairs(
    queries: int, keys: int, tokens: int, most: int | None, ratio: int, causal: bool
) -> int:
    """The number of keys that the last queries of a sequence see, at most `most` each: the last one
    those of all tokens, and in causal attention each before it those of one token fewer."""
    most = keys if most is None else min(keys, most)
    if not causal:
        return queries * most

    def up_to(count: int) -> int:
        """The sum of min(i // ratio, most) for i = 1 ... count."""
        full = min(count // ratio, most)
        return ratio * full * (full - 1) // 2 + full * (count - full * ratio + 1)

    return up_to(tokens) - up_to(max(tokens - queries, 0))


def _kept_pairs(a: SimpleNamespace) -> int:
    """The number of pairs that the sparse_mode keeps; all without a mask. The values of a mask are
    not looked at."""
    sequences = _sequences(a, "key")
    whole = a.atten_mask is None and a.sparse_mode not in _C.compressed_modes
    mode = 1 if whole else a.sparse_mode
    # The band of modes 7 and 8 is in the last and in the first sequence that is not empty.
    filled = [i for i, (queries, keys) in enumerate(sequences) if queries and keys]
    band = {7: filled[-1:], 8: filled[:1]}.get(mode, [])
    prefix = _lengths(getattr(a, "prefix", None), len(sequences), 0)
    counts: dict[tuple[Any, ...], int] = {}

    def kept(queries: int, keys: int, prefix: int, is_band: bool) -> int:
        call = (mode, queries, keys, a.pre_tokens, a.next_tokens, prefix, is_band)
        if call not in counts:
            counts[call] = sum(end - begin for begin, end in _C.kept_keys(*call))
        return counts[call]

    return sum(
        kept(queries, keys, prefix[i], i in band) for i, (queries, keys) in enumerate(sequences)
    )


register()
