"""Modules with parameters, built on the operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ascend_attn_ops._core.arguments import (
    check_count,
    check_memory,
    check_number,
    check_tensor,
    dtype_name,
    shown,
    wrong,
)
from ascend_attn_ops.ops.lightning_indexer import lightning_indexer

_NAME = "ascend::LightningIndexer"
_LARGEST_SIZE = 2**31 - 1


class IndexerProjections(NamedTuple):
    """Inputs of the indexer operators, in layout BSND (TND: one axis T instead of B and S).

    Attributes:
        query_index: (B, S, Nidx, Didx).
        key_index: (B, S, 1, Didx), same dtype.
        weights: (B, S, Nidx), same dtype. They include the scale, as the operators apply none.
    """

    query_index: Tensor
    key_index: Tensor
    weights: Tensor


def rotary_embedding(x: Tensor, positions: Tensor | None = None, *, theta: float = 1e4) -> Tensor:
    """Rotates elements d and d + D/2 of x, (..., S, N, D), in float32.

    `positions` are integers, (S,) or (..., S), by default 0, 1, ..., S - 1.
    """
    half = x.shape[-1] // 2
    if positions is None:
        positions = torch.arange(x.shape[-3], device=x.device)
    frequency = theta ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions[..., None].float() * frequency).unsqueeze(-2)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


class LightningIndexer(nn.Module):
    """The indexer of DeepSeek Sparse Attention, which selects the keys that a query attends to.

    ::

        score[i, s] = sum over heads h of weights[i, h] * relu(query_index[i, h] . key_index[s])

    Many small query heads share one key. :meth:`forward` computes the three tensors, :meth:`select`
    takes the best keys, and :func:`ascend_attn_ops.lightning_indexer_kl_loss` trains the
    projections to rank keys as the attention does. Pass detached hidden states: the indexer should
    imitate the attention without changing it. (DeepSeek-V3.2 itself projects the queries from its
    compressed query: :func:`ascend_attn_ops.transformers.enable_dsa` trains that one.)

    Args:
        hidden_size: size of the hidden states.
        num_heads: Nidx; the NPU accepts up to 64, and 8, 16, 32 and 64 for the KL loss.
        head_dim: Didx; the NPU accepts 128.
        rope_dim: number of leading elements of each head that get a rotary embedding; 0 for none.
        rope_theta: base of the rotary embedding.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: a size is not a whole number, rope_theta no number, or dtype not floating point.
        ValueError: a size is less than 1, rope_dim is odd or not in 0..head_dim, or rope_theta not
            positive.

    Example:
        >>> import torch, ascend_attn_ops
        >>> indexer = ascend_attn_ops.LightningIndexer(256, num_heads=8, dtype=torch.bfloat16)
        >>> projections = indexer(torch.randn(1, 6, 256, dtype=torch.bfloat16))
        >>> indexer.select(projections, sparse_count=4)[0, 0, 0].tolist()  # a token sees itself
        [0, -1, -1, -1]
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 32,
        head_dim: int = 128,
        rope_dim: int = 64,
        rope_theta: float = 1e4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size = check_count(_NAME, "hidden_size", hidden_size, 1, _LARGEST_SIZE)
        num_heads = check_count(_NAME, "num_heads", num_heads, 1, _LARGEST_SIZE)
        head_dim = check_count(_NAME, "head_dim", head_dim, 1, _LARGEST_SIZE)
        rope_dim = check_count(_NAME, "rope_dim", rope_dim, least=-_LARGEST_SIZE)
        if rope_dim % 2 or not 0 <= rope_dim <= head_dim:
            expected = f"an even number in 0..{head_dim} (head_dim)"
            raise wrong(ValueError, _NAME, "rope_dim", expected, str(rope_dim))
        check_number(_NAME, "rope_theta", rope_theta)
        theta = float(rope_theta)  # torch compares no unsigned tensors
        if not theta > 0:
            raise wrong(ValueError, _NAME, "rope_theta", "a positive number", shown(rope_theta))
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise wrong(TypeError, _NAME, "dtype", "a floating point dtype", shown(dtype))
        self.num_heads, self.head_dim = num_heads, head_dim
        self.rope_dim, self.rope_theta = rope_dim, theta
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Linear(hidden_size, num_heads * head_dim, bias=False, **factory)
        self.key = nn.Linear(hidden_size, head_dim, bias=False, **factory)
        # One key serves all heads: without the norm, its length would dominate the ranking.
        self.key_norm = nn.LayerNorm(head_dim, **factory)
        self.weights = nn.Linear(hidden_size, num_heads, bias=False, **factory)

    def forward(self, hidden: Tensor, positions: Tensor | None = None) -> IndexerProjections:
        """Project hidden states to the inputs of the indexer operators.

        Args:
            hidden: (B, S, hidden_size), or (T, hidden_size) for layout TND.
            positions: (S,) or (B, S); (T,) for TND. Default: 0, 1, 2, ...; that suits packed
                sequences too, since only differences of positions matter.

        Returns:
            query_index (B, S, Nidx, Didx), key_index (B, S, 1, Didx), weights (B, S, Nidx), in the
            dtype of the projections (under autocast, the autocast dtype).

        Raises:
            TypeError: hidden or positions is not a tensor, or hidden not of a floating point dtype.
            ValueError: hidden has another size than hidden_size or no axis of tokens, or positions
                are not those of its tokens.
        """
        self._check(hidden, positions)
        query = self.query(hidden).unflatten(-1, (self.num_heads, self.head_dim))
        key = self.key(hidden).to(self.key_norm.weight.dtype)
        key = self.key_norm(key).to(query.dtype).unsqueeze(-2)
        # The usual 1/sqrt(Didx), and 1/sqrt(Nidx) for the sum over heads.
        weights = self.weights(hidden) * (self.num_heads * self.head_dim) ** -0.5
        return IndexerProjections(
            self._rotate(query, positions), self._rotate(key, positions), weights
        )

    def select(self, projections: IndexerProjections, sparse_count: int, **options: Any) -> Tensor:
        """Select the keys that each query attends to, with :func:`lightning_indexer`.

        Args:
            projections: from :meth:`forward`.
            sparse_count: K, the number of keys to select.
            options: keywords of :func:`lightning_indexer` (layout, sequence lengths, ...).

        Returns:
            sparse_indices (B, S, 1, K), int32, best first, padded with -1. No gradient flows
            through them: the KL loss trains the indexer.

        Raises:
            TypeError: projections are not three tensors; and the errors of
                :func:`lightning_indexer`.
        """
        if not isinstance(projections, (tuple, list)) or len(projections) != 3:
            expected = "three tensors, as forward returns them"
            raise wrong(TypeError, f"{_NAME}.select", "projections", expected, shown(projections))
        # The operator refuses what is no tensor.
        query, key, weights = (x.detach() if isinstance(x, Tensor) else x for x in projections)
        return lightning_indexer(query, key, weights, sparse_count=sparse_count, **options)[0]

    def _check(self, hidden: Tensor, positions: Tensor | None) -> None:
        function = f"{_NAME}.forward"
        check_tensor(function, "hidden", hidden)
        size = self.query.in_features
        if hidden.dim() < 2 or hidden.shape[-1] != size:
            expected = f"shape (B, S, {size}) or (T, {size})"
            raise wrong(ValueError, function, "hidden", expected, str(list(hidden.shape)))
        if not hidden.is_floating_point():
            got = dtype_name(hidden.dtype)
            raise wrong(TypeError, function, "hidden", "a floating point dtype", got)
        check_memory(function, "hidden", hidden)
        if positions is None:
            return
        check_tensor(function, "positions", positions)
        check_memory(function, "positions", positions)
        tokens, given = hidden.shape[:-1], positions.shape
        pairs = list(zip(given[::-1], tokens[::-1], strict=False))
        if (
            not 0 < len(given) <= len(tokens)
            or given[-1] != tokens[-1]
            or any(x not in (1, size) for x, size in pairs)
        ):
            expected = f"shape ({tokens[-1]},) or {tuple(tokens)}"
            raise wrong(ValueError, function, "positions", expected, str(list(given)))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, rope_dim={self.rope_dim}"

    def _rotate(self, x: Tensor, positions: Tensor | None) -> Tensor:
        if self.rope_dim == 0:
            return x
        rotated = rotary_embedding(x[..., : self.rope_dim], positions, theta=self.rope_theta)
        return torch.cat([rotated, x[..., self.rope_dim :]], dim=-1)
