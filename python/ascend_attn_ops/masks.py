"""The masks of sparse_mode: the rule as a matrix, the compressed masks, and a drawing."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ascend_attn_ops import _C

_ALL_TOKENS = 2147483647
_COMPRESSED = 2048
_COMPRESSED_PREFIX_ROWS = 1024

# What each sparse_mode keeps; i is the query and j the key, both counted from 0.
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


def sparse_mode_mask(
    sparse_mode: int,
    sq: int,
    skv: int,
    *,
    pre_tokens: int = _ALL_TOKENS,
    next_tokens: int = _ALL_TOKENS,
    prefix: int = 0,
    band: bool = True,
) -> Tensor:
    """The keys that each query keeps under a sparse_mode, by the rule that the kernels use.

    Args:
        sparse_mode: 0 to 8. What the atten_mask of the modes 0 and 1 masks out comes on top.
        sq: number of queries of the sequence.
        skv: number of keys of the sequence.
        pre_tokens: read by the modes 0 and 4, and by 7 and 8 for the sequence that has the band.
        next_tokens: as pre_tokens.
        prefix: leading keys that all queries keep, in the modes 5 and 6.
        band: in the modes 7 and 8, whether this is the sequence that has the band: the last of
            those that have queries and keys, and the first.

    Returns:
        bool (sq, skv), True where a key is kept: the polarity of scaled_dot_product_attention,
        and the opposite of atten_mask's.

    Raises:
        ValueError: for an unknown mode or a negative length.

    Example:
        >>> import ascend_attn_ops
        >>> ascend_attn_ops.sparse_mode_mask(3, 2, 4).int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    mask = torch.zeros(sq, skv, dtype=torch.bool)
    intervals = _C.kept_keys(sparse_mode, sq, skv, pre_tokens, next_tokens, prefix, band)
    for row, (begin, end) in enumerate(intervals):
        mask[row, begin:end] = True
    return mask


def needs_compressed_mask(sparse_mode: int) -> bool:
    return sparse_mode in (2, 3, 4, 6, 7, 8)


def compressed_mask(sparse_mode: int, device: torch.device) -> Tensor:
    """The atten_mask that a sparse_mode wants: (2048, 2048), of mode 6 (3072, 2048); True masks.

    One tensor per form and device, made when it is first asked for.
    """
    return _kept_mask(_COMPRESSED_PREFIX_ROWS if sparse_mode == 6 else 0, device)


# Compiled code would make it anew in every call.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kept_mask(prefix_rows: int, device: torch.device) -> Tensor:
    # Under FakeTensorMode all tensors are fake, and none may be kept.
    real = type(torch.empty(0)) is Tensor
    return (_new_mask if real else _new_mask.__wrapped__)(prefix_rows, device)


@functools.cache
@torch.inference_mode(False)  # what is made in inference mode could not be saved for a backward
def _new_mask(prefix_rows: int, device: torch.device) -> Tensor:
    mask = torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)
    right_half = torch.arange(_COMPRESSED, device=device) >= _COMPRESSED // 2
    return torch.cat((mask, right_half.expand(prefix_rows, _COMPRESSED)))


def draw(mask: Tensor) -> str:
    """A mask as text: a row of marks per query, the keys above it."""
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


_CELL = 16
_KEPT, _MASKED, _LINE = (38, 100, 171), (236, 239, 244), (255, 255, 255)


def write_png(masks: Sequence[Tensor], path: Path) -> None:
    """Masks side by side as an image: kept keys dark, one cell per pair of query and key."""
    cells = [_image(mask) for mask in masks]
    height = max(x.shape[0] for x in cells)
    padded = []
    for x in cells:
        canvas = torch.full((height, x.shape[1] + _CELL, 3), 255, dtype=torch.uint8)
        canvas[: x.shape[0], : x.shape[1]] = x
        padded.append(canvas)
    image = torch.cat(padded, 1)[:, :-_CELL]
    rows = torch.cat((image.new_zeros(height, 1), image.flatten(1)), 1)  # no filter
    header = struct.pack(">IIBBBBB", image.shape[1], height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(rows.flatten().tolist()), 9)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks))


def _image(mask: Tensor) -> Tensor:
    colours = torch.tensor([_MASKED, _KEPT], dtype=torch.uint8)[mask.long()]
    image = colours.repeat_interleave(_CELL, 0).repeat_interleave(_CELL, 1)
    line = torch.tensor(_LINE, dtype=torch.uint8)
    image[_CELL - 1 :: _CELL] = line
    image[:, _CELL - 1 :: _CELL] = line
    return image


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
