"""Scale, masks and dropout that the dense attention functions compute for their callers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_attn_ops import _C
from ascend_attn_ops._arguments import (
    check_memory,
    check_number,
    check_tensor,
    dtype_name,
    readable,
    shown,
    warn_once,
    whole,
    wrong,
)
from ascend_attn_ops._packing import Lengths, lengths_between, lengths_of
from ascend_attn_ops._torch import is_functorch_wrapped_tensor
from ascend_attn_ops.masks import COMPRESSED_MODES, compressed_mask

_NAME = "ascend::flash_attention_score"
# The axes of batch, tokens and heads, -1 for none. BSH and SBH share that of the heads with D.
_AXES = _C.layout_axes


def no_layout() -> TypeError:
    """The error to raise for dense attention without a layout, which would have to be guessed."""
    expected = (
        "the axes of query: BSND (batch, sequence, heads, head size), BNSD (batch, heads, "
        "sequence, head size), TND (tokens of all sequences, heads, head size), BSH or SBH"
    )
    return wrong(TypeError, _NAME, "layout", expected, "none")


def default_scale(
    query: Tensor, num_heads: int, layout: str, query_rope: Tensor | None = None
) -> float:
    """1 / sqrt(D), D with its rope. Arguments that have no D are left to the operator's errors."""
    shape = query.shape if isinstance(query, Tensor) else ()
    if not shape or not isinstance(layout, str) or layout not in _AXES:
        return 1.0
    size = shape[-1]
    if isinstance(query_rope, Tensor) and query_rope.dim() == len(shape):
        size = size + query_rope.shape[-1]
    if _AXES[layout][2] == len(shape) - 1:
        heads = whole(num_heads)
        size = size // heads if heads is not None and heads > 0 else 1
    return (size or 1) ** -0.5


def sink_of_statistics(sink: Tensor, query: Tensor) -> Tensor:
    """`sink` in the dtype of the softmax statistics, where that is one of numbers."""
    if not isinstance(sink, Tensor) or not isinstance(query, Tensor):
        return sink
    if not torch.compiler.is_compiling() and sink.layout != torch.strided:
        return sink  # refused, where some of torch's layouts cannot be converted
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return sink.to(dtype) if sink.is_floating_point() and sink.dtype != dtype else sink


def default_mask(sparse_mode: int, query: Tensor) -> Tensor | None:
    """The compressed mask, in the modes that read one."""
    if whole(sparse_mode) in COMPRESSED_MODES and isinstance(query, Tensor):
        return compressed_mask(sparse_mode, query.device)
    return None


def mask_of_either_polarity(
    atten_mask: Tensor | None, attn_mask: Tensor | None, sparse_mode: int, query: Tensor
) -> Tensor | None:
    """`atten_mask`, `attn_mask` inverted, or without either the default."""
    if attn_mask is None:
        return default_mask(sparse_mode, query) if atten_mask is None else atten_mask
    if atten_mask is not None:
        expected = "None beside atten_mask (True masks a key out)"
        raise wrong(ValueError, _NAME, "attn_mask", expected, "both")
    check_tensor(_NAME, "attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool:
        got = dtype_name(attn_mask.dtype)
        if attn_mask.is_floating_point():
            got += "; pass what is added to the scores as pse_shift with pse_type=0"
        raise wrong(TypeError, _NAME, "attn_mask", "dtype bool, where True keeps a key", got)
    check_memory(_NAME, "attn_mask", attn_mask)
    return ~attn_mask


def expanded_mask(
    name: str,
    atten_mask: Tensor | None,
    sparse_mode: int,
    query: Tensor,
    key: Tensor,
    num_heads: int,
    layout: str,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
) -> Tensor | None:
    """A full mask of four axes with its axes of 1 expanded to a shape that the operator takes.

    Expanding is a view and reads no value. Other masks are returned as they are, because the
    operator accepts or refuses them.
    """
    if not isinstance(atten_mask, Tensor) or atten_mask.is_nested or atten_mask.dim() != 4:
        return atten_mask
    # Dynamo reads no layouts in a backward.
    if not torch.compiler.is_compiling() and atten_mask.layout != torch.strided:
        return atten_mask
    if whole(sparse_mode) not in (0, 1) or 1 not in atten_mask.shape:
        return atten_mask
    if not have_scores(query, key, num_heads, layout):
        return atten_mask
    if layout == "TND":
        first, heads, *others = atten_mask.shape
        if 1 not in others and (first > 1 or heads == 1):
            return atten_mask  # without reading the lengths
        sizes = _sizes_of_pack(actual_seq_lengths_query, actual_seq_lengths_key)
        if sizes is None:
            return atten_mask
        batch, queries, keys = sizes
    else:
        batch_axis, tokens, _ = _AXES[layout]
        batch, queries, keys = query.shape[batch_axis], query.shape[tokens], key.shape[tokens]
    per_head = atten_mask.shape[1] != 1
    shape = (
        batch if per_head else atten_mask.shape[0],
        whole(num_heads) if per_head else 1,
        queries,
        keys,
    )
    if any(x not in (1, y) for x, y in zip(atten_mask.shape, shape, strict=True)):
        return atten_mask
    if not torch.compiler.is_compiling():
        check_memory(name, "atten_mask", atten_mask)
    return atten_mask.expand(shape)


def _sizes_of_pack(
    actual_seq_lengths_query: Lengths, actual_seq_lengths_key: Lengths
) -> tuple[int, int, int] | None:
    """The number of sequences, and their most queries and keys; None without readable lengths."""
    longest = []
    count = 0
    for ends in (actual_seq_lengths_query, actual_seq_lengths_key):
        read = lengths_of(ends)
        if read is None or not hasattr(read, "__iter__"):
            return None
        count = len(read)
        longest.append(max(lengths_between(read, closed=True), default=0))
    return count, longest[0], longest[1]


def warn_of_a_mask_without_keys(
    name: str, atten_mask: Tensor | None, sparse_mode: int, outputs: Sequence[Tensor]
) -> None:
    """Where a mask can be read at once: one of the other polarity often masks every key.

    Called with the outputs, after the operator has accepted and read the mask.
    """
    if not isinstance(atten_mask, Tensor) or whole(sparse_mode) not in (0, 1):
        return
    if not outputs[0].numel():
        return
    if atten_mask.dtype not in (torch.bool, torch.uint8) or not readable(atten_mask):
        return
    if is_functorch_wrapped_tensor(atten_mask) or not atten_mask.numel():
        return
    # Most masks keep the first key of the first row: the others are then not read.
    if atten_mask[(0,) * atten_mask.dim()] and bool(_each_element_once(atten_mask).all()):
        text = "masks every key, as True masks a key out; pass ~mask for one where True keeps a key"
        warn_once(name, "atten_mask", text)


def _each_element_once(tensor: Tensor) -> Tensor:
    """Returns the memory that an expanded or overlapping tensor spans; other tensors as they are.

    An expanded tensor can have more elements than a machine could read.
    """
    span = 1 + sum((n - 1) * x for n, x in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)) if span < tensor.numel() else tensor


def given_or_drawn_mask(
    drop_mask: Tensor | None,
    keep_prob: float,
    dropout_p: float,
    generator: torch.Generator | None,
    query: Tensor,
    key: Tensor,
    num_heads: int,
    layout: str,
    actual_seq_lengths_query: Lengths,
    actual_seq_lengths_key: Lengths,
) -> Tensor | None:
    """`drop_mask`, or with `dropout_p` one bit for each score."""
    if not isinstance(dropout_p, float):
        check_number(_NAME, "dropout_p", dropout_p)
        if isinstance(dropout_p, Tensor):
            # torch does not compare every dtype.
            dropout_p = float(dropout_p)
    if dropout_p == 0:
        return drop_mask
    if not 0 <= dropout_p < 1:
        expected = "a probability in [0, 1)"
        raise wrong(ValueError, _NAME, "dropout_p", expected, shown(dropout_p))
    check_number(_NAME, "keep_prob", keep_prob)
    if drop_mask is not None or keep_prob != 1:
        expected = "0 beside drop_mask and keep_prob"
        raise wrong(ValueError, _NAME, "dropout_p", expected, shown(dropout_p))
    if generator is not None and not isinstance(generator, torch.Generator):
        expected = "a torch.Generator or None"
        raise wrong(TypeError, _NAME, "generator", expected, type(generator).__name__)
    # The operator refuses what returns None here, before it looks for a mask.
    if not have_scores(query, key, num_heads, layout):
        return None
    num_heads = whole(num_heads)
    ends: list[Lengths] = [None, None]
    if layout == "TND":
        for i, (side, given) in enumerate(
            (("query", actual_seq_lengths_query), ("key", actual_seq_lengths_key))
        ):
            read = lengths_of(given, where=(_NAME, f"actual_seq_lengths_{side}"))
            if read is None or not hasattr(read, "__iter__"):
                return None
            ends[i] = list(read)
    scores = number_of_scores(query, key, num_heads, layout, *ends)
    # A mask for lengths beyond the tokens may not fit into memory.
    if layout == "TND" and isinstance(scores, int) and not torch.compiler.is_compiling():
        most = num_heads * query.shape[0] * key.shape[0]
        if not 0 <= scores <= most:
            return None
    if generator is not None and generator.device != query.device:
        expected = f"one of device {query.device} (query's)"
        raise wrong(ValueError, _NAME, "generator", expected, str(generator.device))
    return draw_drop_mask(scores, 1 - dropout_p, query.device, generator)


def have_scores(query: Tensor, key: Tensor, num_heads: int, layout: str) -> bool:
    """Whether `number_of_scores` can be told: the tensors have the layout, and query the heads."""
    if not (isinstance(layout, str) and layout in _AXES):
        return False
    if not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        return False
    heads: int | None = whole(num_heads)
    # A layout has a letter for each axis.
    if heads is None or heads <= 0 or not query.dim() == key.dim() == len(layout):
        return False
    axis = _AXES[layout][2]
    # In BSH and SBH, the heads share their axis.
    merged = axis == query.dim() - 1
    return query.shape[axis] % heads == 0 if merged else query.shape[axis] == heads


def number_of_scores(
    query: Tensor,
    key: Tensor,
    num_heads: int,
    layout: str,
    actual_seq_lengths_query: Lengths,
    actual_seq_lengths_key: Lengths,
) -> int:
    """The elements of (B, N, Sq, Skv), in TND of (N, Sq, Skv) of all sequences."""
    if layout == "TND":
        ends = [lengths_of(x) for x in (actual_seq_lengths_query, actual_seq_lengths_key)]
        lengths = [lengths_between(x or [], closed=True) for x in ends]
        pairs = sum(a * b for a, b in zip(*lengths, strict=False))
    else:
        # Another name is an error of the operator.
        batch, tokens, _ = _AXES.get(str(layout), (0, 1, 2))
        pairs = query.shape[batch] * query.shape[tokens] * key.shape[tokens]
    return num_heads * pairs


def draw_drop_mask(
    scores: int,
    keep_prob: float,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One bit per score, 1 with probability `keep_prob`, padded to a multiple of 16 bytes.

    Needs memory for the mask and one chunk of random numbers.
    """
    size = -(-scores // 128) * 16
    mask = torch.empty(size, dtype=torch.uint8, device=device)
    bit = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    # torch.compile would turn a number of chunks, and with it the size, into a constant.
    for part in (mask,) if torch.compiler.is_compiling() else mask.split(1 << 20):
        numbers = torch.empty((part.shape[0], 8), device=device)
        keep = numbers.uniform_(generator=generator) < keep_prob
        part.copy_((keep * bit).sum(1, dtype=torch.uint8))
    return mask
