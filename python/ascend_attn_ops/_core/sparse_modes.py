"""The masks of sparse_mode: as a matrix, in compressed form, and drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops import _C
from ascend_attn_ops._core.arguments import INT64_MAX, check_count, check_flag, wrong
from ascend_attn_ops._core.operators import ALL_TOKENS

# The keys that each sparse_mode keeps; i is the query and j the key, both counted from 0.
MODES: dict[int, str] = {
    0: "default: i - pre_tokens <= j <= i + next_tokens, and what atten_mask keeps",
    1: "all mask: what atten_mask keeps",
    2: "left-up causal: j <= i",
    3: "right-down causal: j <= i + Skv - Sq",
    4: "band: i + Skv - Sq - pre_tokens <= j <= i + Skv - Sq + next_tokens",
    5: "prefix: j < prefix or j <= i + Skv - Sq",
    6: "prefix, compressed mask: j < prefix or j <= i + Skv - Sq",
    7: "TND: the last sequence as mode 4, the others as mode 3",
    8: "TND: the first sequence as mode 4, the others as mode 2",
}

# The modes whose atten_mask is compressed.
COMPRESSED_MODES = _C.compressed_modes

_NAME = "ascend::sparse_mode_mask"
# A matrix of this many bytes, and as many rows, is more than anybody looks at.
_MOST_ELEMENTS, _MOST_ROWS = 2**32, 2**24


def sparse_mode_mask(
    sparse_mode: int,
    sq: int,
    skv: int,
    *,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    prefix: int = 0,
    band: bool = True,
) -> Tensor:
    """Return the keys that each query keeps in a sparse_mode, by the rule that the kernels use.

    Args:
        sparse_mode: 0 to 8. In modes 0 and 1, atten_mask masks out further keys.
        sq: number of queries of the sequence.
        skv: number of keys of the sequence.
        pre_tokens: used in modes 0 and 4, and in 7 and 8 for the sequence with the band.
        next_tokens: as pre_tokens.
        prefix: modes 5 and 6: the number of leading keys that every query keeps.
        band: modes 7 and 8: whether this is the sequence with the band. That is the last sequence
            with both queries and keys in mode 7, and the first one in mode 8.

    Returns:
        bool (sq, skv), True where a key is kept: the polarity of scaled_dot_product_attention, the
        opposite of atten_mask's.

    Raises:
        TypeError: an argument is not a whole number, or band not a bool.
        ValueError: for an unknown mode, a negative length, a prefix that is not in 0..skv in modes
            5 and 6, and more than 2**24 queries or 2**32 elements.

    Example:
        >>> import ascend_attn_ops
        >>> ascend_attn_ops.sparse_mode_mask(3, 2, 4).int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    sparse_mode, pre_tokens, next_tokens, prefix = (
        check_count(_NAME, name, x, least=-INT64_MAX - 1)
        for name, x in (
            ("sparse_mode", sparse_mode),
            ("pre_tokens", pre_tokens),
            ("next_tokens", next_tokens),
            ("prefix", prefix),
        )
    )
    sq, skv = check_count(_NAME, "sq", sq, most=_MOST_ROWS), check_count(_NAME, "skv", skv)
    check_flag(_NAME, "band", band)
    if sq * skv > _MOST_ELEMENTS:
        expected = f"at most {_MOST_ELEMENTS} elements, sq * skv"
        raise wrong(ValueError, _NAME, "skv", expected, f"{sq} * {skv}")
    if sparse_mode in (5, 6):
        check_count(_NAME, "prefix", prefix, most=skv)
    intervals = _C.kept_keys(sparse_mode, sq, skv, pre_tokens, next_tokens, prefix, bool(band))
    mask = torch.zeros(sq, skv, dtype=torch.bool)
    for row, (begin, end) in enumerate(intervals):
        mask[row, begin:end] = True
    return mask


def compressed_mask(sparse_mode: int, device: torch.device) -> Tensor:
    """Return the atten_mask of one of COMPRESSED_MODES, where True masks a key out.

    A square, with further rows for the prefix in mode 6. Without a mask, the operators make it.
    """
    size = _C.compressed_mask_size
    mask = torch.ones(size, size, dtype=torch.bool, device=device).triu(1)
    right_half = torch.arange(size, device=device) >= size // 2
    rows = _C.compressed_mask_prefix_rows if sparse_mode == 6 else 0
    return torch.cat((mask, right_half.expand(rows, size)))


def draw(mask: Tensor) -> str:
    """Draw a mask as text: one line per query, one column per key."""
    sq, skv = mask.shape
    margin = len(str(max(sq - 1, 0))) + 1
    digits = len(str(max(skv - 1, 0)))
    lines = [
        " " * margin + " " + " ".join(str(j).rjust(digits)[line] for j in range(skv))
        for line in range(digits)
    ]
    for i, row in enumerate(mask.tolist()):
        lines.append(f"{i:>{margin}} " + " ".join("■" if kept else "·" for kept in row))
    return "\n".join(lines)
