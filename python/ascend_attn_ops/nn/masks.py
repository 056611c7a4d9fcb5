"""Masks by name, in place of sparse_mode and its integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import check_count, shown, wrong
from ascend_attn_ops._core.operators import ALL_TOKENS
from ascend_attn_ops._core.packing import lengths_of
from ascend_attn_ops._core.sparse_modes import sparse_mode_mask

Align = Literal["top-left", "bottom-right"]
Size = int | None
_OF_EACH = (Tensor, list, tuple)


class Mask:
    """The base of the masks that :func:`attention` takes."""

    def __post_init__(self) -> None:
        align = getattr(self, "align", "bottom-right")
        if align not in ("top-left", "bottom-right"):
            expected = "'top-left' or 'bottom-right'"
            raise wrong(ValueError, _name(self), "align", expected, shown(align))
        for name in ("left", "right", "lengths"):
            x = getattr(self, name, None)
            if x is not None and not isinstance(x, _OF_EACH):
                least = 0 if name == "lengths" else -ALL_TOKENS
                check_count(_name(self), name, x, least, ALL_TOKENS)

    def arguments(self, sq: Size = None, skv: Size = None, batch: int = 1) -> dict[str, Any]:
        """The keywords that say the same to the dense operators, sparse_mode and its integers.

        `sq` and `skv` are the queries and keys of each of `batch` sequences, None in a pack.
        """
        raise NotImplementedError

    def dense(self, sq: int, skv: int) -> Tensor:
        """The mask as a matrix: bool (sq, skv), True where a key is kept."""
        return sparse_mode_mask(sq=sq, skv=skv, **self.arguments(sq, skv))


@dataclass(frozen=True)
class Causal(Mask):
    """No query sees a later key: sparse_mode 3, or 2 from the top left.

    Args:
        align: "bottom-right", the last query sees the last key, as decoding beside a cache needs
            it; "top-left", the first query sees the first key alone, as `is_causal` says it.

    Raises:
        ValueError: align is neither of the two.

    Example:
        >>> import ascend_attn_ops
        >>> ascend_attn_ops.Causal().dense(2, 4).int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """

    align: Align = "bottom-right"

    def arguments(self, sq: Size = None, skv: Size = None, batch: int = 1) -> dict[str, Any]:
        return {"sparse_mode": 3 if self.align == "bottom-right" else 2}


@dataclass(frozen=True)
class Band(Mask):
    """A query sees the keys from `left` before the diagonal to `right` after it: sparse_mode 4.

    Args:
        left: how many keys before the diagonal; None for all. Negative: the band begins after it.
        right: how many keys after it, in the same way.
        align: where the diagonal ends or begins: "bottom-right" or, not in a pack, "top-left".

    Raises:
        TypeError: a bound is not a whole number.
        ValueError: align is neither of the two.

    Example:
        >>> import ascend_attn_ops
        >>> ascend_attn_ops.Band(1, 0).dense(3, 4).int()
        tensor([[1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """

    left: int | None
    right: int | None
    align: Align = "bottom-right"

    def arguments(self, sq: Size = None, skv: Size = None, batch: int = 1) -> dict[str, Any]:
        shift = 0
        if self.align == "top-left":
            if sq is None or skv is None:
                expected = "'bottom-right', where sequences have several lengths"
                raise wrong(ValueError, _name(self), "align", expected, repr(self.align))
            # The operators' band without a mask ends at the bottom right.
            shift = skv - sq
        before = ALL_TOKENS if self.left is None else self.left + shift
        after = ALL_TOKENS if self.right is None else self.right - shift
        return {"sparse_mode": 4, "pre_tokens": before, "next_tokens": after}


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Causal to the bottom right, and every query sees the first keys: sparse_mode 6.

    Args:
        lengths: how many keys; of all sequences, or of each: a list, or a tensor, for which an NPU
            waits if it is there.

    Raises:
        TypeError: lengths are not whole numbers.

    Example:
        >>> import ascend_attn_ops
        >>> ascend_attn_ops.Prefix(2).dense(3, 3).int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """

    lengths: int | Sequence[int] | Tensor

    def arguments(self, sq: Size = None, skv: Size = None, batch: int = 1) -> dict[str, Any]:
        each = isinstance(self.lengths, _OF_EACH)
        return {"sparse_mode": 6, "prefix": self.lengths if each else [self.lengths] * batch}

    def dense(self, sq: int, skv: int) -> Tensor:
        """The mask as matrices: bool (sq, skv), or (B, 1, sq, skv) for the lengths of each."""
        lengths = self.arguments()["prefix"]
        lengths = lengths_of(lengths, where=(_name(self), "lengths")) or ()
        each = torch.stack([sparse_mode_mask(6, sq, skv, prefix=x) for x in lengths])
        return each.unsqueeze(1) if isinstance(self.lengths, _OF_EACH) else each[0]


@dataclass(frozen=True)
class CutCausal(Mask):
    """Causal in a pack of which one sequence is cut, and has a band: sparse_mode 7 and 8.

    For packs that are divided among ranks. The band is to the bottom right of its sequence.

    Args:
        left: how many keys before the diagonal of the band: at least the keys of its sequence.
        right: how many after it; negative for keys that a query does not see yet.
        align: "bottom-right", the last sequence has the band, the others are causal to the bottom
            right; "top-left", the first has it, the others are causal from the top left.

    Raises:
        TypeError: a bound is not a whole number.
        ValueError: align is neither of the two.

    Example:
        >>> import ascend_attn_ops
        >>> ascend_attn_ops.CutCausal(4, -1).dense(2, 4).int()  # of the sequence with the band
        tensor([[1, 1, 0, 0],
                [1, 1, 1, 0]], dtype=torch.int32)
    """

    left: int
    right: int
    align: Align = "bottom-right"

    def arguments(self, sq: Size = None, skv: Size = None, batch: int = 1) -> dict[str, Any]:
        mode = 7 if self.align == "bottom-right" else 8
        return {"sparse_mode": mode, "pre_tokens": self.left, "next_tokens": self.right}


def _name(mask: Mask) -> str:
    return f"ascend::{type(mask).__name__}"
