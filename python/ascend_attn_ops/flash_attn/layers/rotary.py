"""flash-attn's rotary position embedding, by its names, over torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ascend_attn_ops._core.arguments import check_tensor, shown, wrong

__all__ = ["RotaryEmbedding", "apply_rotary_emb"]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate pairs of a head's elements by angles that grow with the position, with gradients.

    The rotation is computed in float32 (float64 for a float64 x).

    Args:
        x: (batch_size, seqlen, nheads, headdim), or with cu_seqlens (total, nheads, headdim).
        cos, sin: (positions, rotary_dim / 2), where rotary_dim is at most headdim. The elements
            behind rotary_dim stay as they are.
        interleaved: whether a pair is two neighbours; otherwise it has one number in each half of
            rotary_dim.
        inplace: write into x, and return it.
        seqlen_offsets: the position of the first token, one for all or int (batch_size,).
        cu_seqlens: the cumulative sequence lengths of a pack, int32 (batch_size + 1,).
        max_seqlen: not needed: cu_seqlens say it.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError, ValueError: an argument is wrong. IndexError: a position that cos does not have.

    Example:
        >>> import torch
        >>> from ascend_attn_ops.flash_attn.layers.rotary import apply_rotary_emb
        >>> angles = torch.tensor([[0.0], [torch.pi / 2]])
        >>> x = torch.tensor([3.0, 4.0]).expand(1, 2, 1, 2)
        >>> apply_rotary_emb(x, angles.cos(), angles.sin())[0, 1, 0].round().tolist()
        [-4.0, 3.0]
    """
    name = "apply_rotary_emb"
    packed = cu_seqlens is not None
    axes = "(total, nheads, headdim)" if packed else "(batch_size, seqlen, nheads, headdim)"
    check_tensor(name, "x", x, 3 if packed else 4, axes)
    for argument, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, argument, table, 2, "(positions, rotary_dim / 2)")
        if table.shape != cos.shape or 2 * table.shape[1] > x.shape[-1]:
            expected = f"the shape of cos, at most {x.shape[-1] // 2} elements in a row"
            raise wrong(ValueError, name, argument, expected, shown(table))
    offset = seqlen_offsets
    if cu_seqlens is None:
        position = torch.arange(x.shape[1], device=x.device)
        if isinstance(offset, Tensor):
            offset = offset[:, None]
    else:
        token = torch.arange(len(x), device=x.device)
        sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
        position = token - cu_seqlens[sequence]
        if isinstance(offset, Tensor):
            # Tokens behind the last sequence take the last offset.
            offset = offset[sequence.clamp(max=len(offset) - 1)]
    position = position + offset
    out = _rotated(x, cos[position].unsqueeze(-2), sin[position].unsqueeze(-2), interleaved)
    return x.copy_(out) if inplace else out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x rotated by angles whose cos and sin broadcast to (..., nheads, rotary_dim / 2)."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(wide), sin.to(wide)
    rotary, rest = x.tensor_split([2 * cos.shape[-1]], -1)
    pairs = rotary.to(wide)
    first, second = pairs.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else pairs.chunk(2, -1)
    both = first * cos - second * sin, first * sin + second * cos
    out = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat((out.to(x.dtype), rest), -1)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions, as :func:`apply_rotary_emb` does.

    Position p rotates pair i by ``p * base ** (-2 * i / dim)``.

    Args:
        dim: how many elements of a head are rotated.
        base: of the angles.
        interleaved: as in :func:`apply_rotary_emb`.
        scale_base: only None.
        device: of the angles.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if scale_base is not None:
            raise wrong(
                NotImplementedError, "RotaryEmbedding", "scale_base", "None", shown(scale_base)
            )
        self.dim, self.base, self.interleaved = dim, base, interleaved
        exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", base**-exponents, persistent=False)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates queries and keys; values stay. Returns qkv, or (q, kv).

        qkv is (batch_size, seqlen, 3, nheads, headdim), with num_heads_q (batch_size, seqlen,
        num_heads_q + 2 * nheads_k, headdim), and beside kv, (batch_size, seqlen, 2, nheads_k,
        headdim), the queries alone. max_seqlen is not needed.
        """
        position = torch.arange(qkv.shape[1], device=qkv.device)
        if isinstance(seqlen_offset, Tensor):
            seqlen_offset = seqlen_offset[:, None]
        position = position + seqlen_offset
        angles = position[..., None, None].float() * self.inv_freq
        tables = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)

        def rotated(x: Tensor) -> Tensor:
            return _rotated(x, *tables, self.interleaved)

        if kv is not None:
            key, value = kv.unbind(2)
            return rotated(qkv), torch.stack((rotated(key), value), 2)
        if num_heads_q is not None:
            heads = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
            rotating, value = qkv.tensor_split([heads], 2)
            return torch.cat((rotated(rotating), value), 2)
        query, key, value = qkv.unbind(2)
        return torch.stack((rotated(query), rotated(key), value), 2)
