"""The layouts of torch_npu's operators for inference, and their paged caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from ascend_attn_ops._pages import gather_blocks, unknown_block
from ascend_attn_ops.npu_operators.translation import has_values


class Layout(NamedTuple):
    """The layout of the inputs, and of the output."""

    inputs: str
    out: str

    @property
    def packed(self) -> bool:
        return "T" in self.inputs


# The layouts of npu_fused_infer_attention_score.
LAYOUTS = {
    name: Layout(*(name.split("_") if "_" in name else (name, name)))
    for name in (
        "BSH", "BSND", "BNSD", "TND", "NTD", "NSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD",
        "NTD_TND", "TND_NTD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD",
    )
}  # fmt: skip

_RANKS = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3, "NTD": 3, "NSD": 3}

# To BSND or TND, and back from there.
_FROM: dict[str, Callable[[Tensor], Tensor]] = {
    "BSND": lambda x: x,
    "BNSD": lambda x: x.transpose(1, 2),
    "NSD": lambda x: x.transpose(0, 1)[None],
    "TND": lambda x: x,
    "NTD": lambda x: x.transpose(0, 1),
}
_TO: dict[str, Callable[[Tensor], Tensor]] = {
    **_FROM,
    "BSH": lambda x: x.flatten(2),
    "NSD": lambda x: x[0].transpose(0, 1),
    "NBSD": lambda x: x.permute(2, 0, 1, 3),
}


def tokens_first(name: str, argument: str, tensor: Tensor, layout: str, heads: int) -> Tensor:
    """As (B, S, N, D), packed sequences as (T, N, D)."""
    layout = LAYOUTS[layout].inputs
    if tensor.dim() != _RANKS[layout]:
        raise ValueError(
            f"{name}: {argument}: expected the {_RANKS[layout]} axes of {layout}, "
            f"got {list(tensor.shape)}"
        )
    if layout == "BSH":
        if heads < 1 or tensor.shape[2] % heads:
            raise ValueError(
                f"{name}: {argument}: expected a multiple of {heads} heads in the last axis, "
                f"got {list(tensor.shape)}"
            )
        return tensor.unflatten(2, (heads, -1))
    x = _FROM[layout](tensor)
    if x.shape[-2] != heads:
        raise ValueError(
            f"{name}: {argument}: expected {heads} heads in layout {layout}, "
            f"got {list(tensor.shape)}"
        )
    return x


def in_layout(out: Tensor, layout: str) -> Tensor:
    """(B, S, N, D) or (T, N, D) in another layout."""
    return _TO[layout](out).contiguous()


def check_ropes(name: str, query_rope: Tensor | None, key_rope: Tensor | None) -> None:
    if (query_rope is None) != (key_rope is None):
        missing = "query_rope" if query_rope is None else "key_rope"
        raise ValueError(f"{name}: {missing}: expected beside the other rope, got None")


def gathered(
    name: str,
    argument: str,
    cache: Tensor,
    heads: int,
    block_table: Tensor,
    block_size: int,
    lengths: Sequence[int],
) -> Tensor:
    """The blocks of each sequence side by side, (B, slots, N, D).

    A cache is (blocks, block_size, N * D), (blocks, N, block_size, D), or in fractal layout
    (blocks, N, D / L, block_size, L).
    """
    if cache.dim() == 3 and heads > 0 and cache.shape[2] % heads == 0:
        blocks = cache.unflatten(2, (heads, -1))
    elif cache.dim() == 4 and cache.shape[1] == heads:
        blocks = cache.transpose(1, 2)
    elif cache.dim() == 5 and cache.shape[1] == heads:
        blocks = cache.permute(0, 3, 1, 2, 4).flatten(3)
    else:
        raise ValueError(
            f"{name}: {argument}: expected blocks of {heads} heads, (blocks, block_size, N * D), "
            "(blocks, N, block_size, D) or (blocks, N, D / L, block_size, L), "
            f"got {list(cache.shape)}"
        )
    if block_size not in (0, blocks.shape[1]):
        raise ValueError(
            f"{name}: block_size: expected {blocks.shape[1]}, that of {argument}, got {block_size}"
        )
    if has_values(block_table) and block_table.dim() == 2 and len(block_table) == len(lengths):
        found = unknown_block(block_table, lengths, blocks.shape[1], blocks.shape[0])
        if found is not None:
            raise ValueError(
                f"{name}: block_table: expected blocks 0..{blocks.shape[0] - 1}, "
                f"got {found[0]} at {list(found[1:])}"
            )
    return gather_blocks(name, blocks, block_table, lengths)
