"""flash-attn's functions between padded batches and packs, by its names."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import shown, wrong

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of a tensor, with gradients, as :func:`unpad_input` takes the tokens.

    Args:
        input: (rows, ...).
        indices: int64 (n,), each at most once if gradients are to be fast.

    Returns:
        (n, ...).
    """
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, one sequence after another.

    Args:
        hidden_states: (batch_size, seqlen, ...).
        attention_mask: bool or integer (batch_size, seqlen), true or 1 for tokens.
        unused_mask: the same for tokens that are kept in the pack but not counted as used.

    Returns:
        The tokens, (total, ...); their indices in the flattened batch, int64 (total,); cu_seqlens,
        int32 (batch_size + 1,); the largest length, which is read on the host; and the number of
        used tokens of each sequence, int32 (batch_size,).

    Raises:
        ValueError: a mask has another shape than the first two axes of hidden_states.

    Example:
        >>> import torch
        >>> from ascend_attn_ops.flash_attn.bert_padding import pad_input, unpad_input
        >>> x, mask = torch.arange(6.).view(2, 3, 1), torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask)
        >>> tokens.flatten().tolist(), cu_seqlens.tolist(), longest
        ([0.0, 1.0, 3.0], [0, 2, 3], 2)
        >>> pad_input(tokens, indices, 2, 3)[0].flatten().tolist()
        [0.0, 1.0, 0.0]
    """
    masks = {"attention_mask": attention_mask, "unused_mask": unused_mask}
    for argument, mask in masks.items():
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            expected = f"shape {list(hidden_states.shape[:2])}, that of the tokens"
            raise wrong(ValueError, "unpad_input", argument, expected, shown(mask))
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        int(lengths.max()) if len(lengths) else 0,
        attention_mask.sum(1, dtype=torch.int32),
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch of which :func:`unpad_input` took the tokens, with zeros between them.

    Args:
        hidden_states: (total, ...).
        indices: int64 (total,), from :func:`unpad_input`.
        batch, seqlen: the first two axes of the result.

    Returns:
        (batch, seqlen, ...).
    """
    rows = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return rows.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
