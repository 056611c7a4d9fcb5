"""The compressed keys of DeepSeek-V4: one for each window of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import check_tensor, wrong

_NAME = "ascend::compress_keys"


def compress_keys(
    values: Tensor,
    logits: Tensor,
    position_bias: Tensor,
    *,
    overlap: bool = False,
    previous: tuple[Tensor, Tensor] | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Compressed keys before their norm and rope: for each window of tokens a weighted mean.

    With r = position_bias.shape[0], window w of a sequence holds its tokens w * r to w * r + r - 1.
    For each feature by itself, key[w] is the mean of values over the tokens t of the window, with
    the weights softmax(logits + position_bias[t mod r]), in float32. With `overlap`, values and
    logits have 2 * D features, and a window also has the r tokens before it: theirs are the first D
    features, its own the last D. The last L mod r tokens of a sequence of L make no key yet.
    Differentiable.

    Args:
        values: (B, S, F), or (T, F) with actual_seq_lengths; F is D, or 2 * D with `overlap`.
        logits: as values.
        position_bias: (r, F).
        overlap: whether windows reach back over the one before.
        previous: of (B, S, F) with `overlap`: values, and logits with their bias, both (B, r, D),
            of the window before the first one, as a cache keeps it.
        actual_seq_lengths: the end of each sequence in T, on the host.

    Returns:
        (B, S // r, D), or (sum of L // r over the sequences, D) of packed sequences.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape disagrees.

    Example:
        >>> import torch, ascend_attn_ops
        >>> values, logits = torch.arange(10.0).view(1, 10, 1), torch.zeros(1, 10, 1)
        >>> ascend_attn_ops.compress_keys(values, logits, torch.zeros(4, 1)).flatten().tolist()
        [1.5, 5.5]

    Source: the compressor of transformers' deepseek_v4.
    """
    check_compression(
        values, logits, position_bias, overlap, axes=3 if actual_seq_lengths is None else 2
    )
    ratio = len(position_bias)
    if actual_seq_lengths is not None:
        ends = [0, *actual_seq_lengths]
        if ends != sorted(ends) or ends[-1] > len(values):
            expected = f"ends that do not decrease, of at most {len(values)} tokens"
            raise wrong(ValueError, _NAME, "actual_seq_lengths", expected, f"{ends[1:]}")

    if actual_seq_lengths is None:
        windows = values.shape[1] // ratio
        values, logits = (
            x[:, : windows * ratio].unflatten(1, (windows, ratio)) for x in (values, logits)
        )
        first = [0] if windows else []
    else:
        starts, first = _windows_of(actual_seq_lengths, ratio)
        index = torch.tensor(starts, dtype=torch.long)[:, None] + torch.arange(ratio)
        index = index.to(values.device)
        values, logits = (x[index].unsqueeze(0) for x in (values, logits))
    logits = logits + position_bias
    if overlap:
        values, logits = _with_windows_before(values, logits, first, previous)
    weights = logits.softmax(dim=2, dtype=torch.float32).to(values.dtype)
    compressed = (values * weights).sum(dim=2)
    return compressed if actual_seq_lengths is None else compressed.squeeze(0)


def check_compression(
    values: Tensor, logits: Tensor, position_bias: Tensor, overlap: bool, axes: int
) -> None:
    """Raises unless these are arguments of compress_keys, the first two with so many axes."""
    for name, x in (("values", values), ("logits", logits), ("position_bias", position_bias)):
        check_tensor(_NAME, name, x)
    if values.ndim != axes:
        raise wrong(ValueError, _NAME, "values", f"{axes} axes", f"shape {tuple(values.shape)}")
    if logits.shape != values.shape:
        expected = f"values' shape {tuple(values.shape)}"
        raise wrong(ValueError, _NAME, "logits", expected, f"{tuple(logits.shape)}")
    features = values.shape[-1]
    fits = position_bias.shape[1:] == (features,) and len(position_bias) > 0
    if not fits or (overlap and features % 2):
        expected = f"shape (r, {features}), with overlap of an even number of features"
        raise wrong(ValueError, _NAME, "position_bias", expected, f"{tuple(position_bias.shape)}")


def first_tokens(ends: Sequence[int], ratio: int) -> list[int]:
    """The first token of each whole window of packed sequences, which end at `ends`."""
    return _windows_of(ends, ratio)[0]


def _windows_of(ends: Sequence[int], ratio: int) -> tuple[list[int], list[int]]:
    """The first tokens of whole windows, and the numbers of those that are a sequence's first."""
    starts: list[int] = []
    first = []
    for begin, end in pairwise([0, *ends]):
        if end - begin >= ratio:
            first.append(len(starts))
        starts += range(begin, end - ratio + 1, ratio)
    return starts, first


def _with_windows_before(
    values: Tensor, logits: Tensor, first: list[int], previous: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(B, W, r, 2 * D) as (B, W, 2 * r, D): a window's tokens, behind those of the one before."""
    results = []
    for x, given, absent in zip(
        (values, logits), previous or (None, None), (0.0, -torch.inf), strict=True
    ):
        early, own = x.chunk(2, dim=-1)
        before = early.roll(1, dims=1)
        if first and given is not None:
            before = torch.cat([given.to(x.dtype).unsqueeze(1), before[:, 1:]], dim=1)
        elif first:
            before = before.index_fill(1, torch.tensor(first).to(x.device), absent)
        results.append(torch.cat([before, own], dim=2))
    return results[0], results[1]
