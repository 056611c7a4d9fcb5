"""Multi-head latent attention in its absorbed form, with an indexer that selects keys or without.

All heads attend to the latents themselves. The projections that make keys and values of them are
folded into the queries and into the output, so that keys and values per head never exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ascend_attn_ops import ops
from ascend_attn_ops._core.arguments import check_count, wrong
from ascend_attn_ops.nn.lightning_indexer import (
    IndexerProjections,
    LightningIndexer,
    rotary_embedding,
)
from ascend_attn_ops.nn.paged_cache import LayerPages
from ascend_attn_ops.nn.quantization import quantize_index_keys

_NAME = "ascend::LatentAttention"


def absorb(query: Tensor, key_weight: Tensor) -> Tensor:
    """Queries (..., N, D) of keys that (N, D, C) makes of latents, as queries of latents."""
    return torch.einsum("...nd,ndc->...nc", query, key_weight)


def expand(attended: Tensor, value_weight: Tensor) -> Tensor:
    """Latents (..., N, C) that heads attended to, as their values, which (N, C, Dv) makes."""
    return torch.einsum("...nc,ncv->...nv", attended, value_weight)


class LatentInputs(NamedTuple):
    """Queries and keys in a layout of the operators: BSND, with one axis T for B and S in TND.

    Attributes:
        query: (B, S, N, C), absorbed.
        query_rope: (B, S, N, Dr).
        latent: (B, S, 1, C), key and value.
        key_rope: (B, S, 1, Dr).
        projections: of the indexer.
    """

    query: Tensor
    query_rope: Tensor
    latent: Tensor
    key_rope: Tensor
    projections: IndexerProjections | None = None

    def attend(
        self, indices: Tensor, scale: float, operators: Any = ops, **options: Any
    ) -> tuple[Tensor, ...]:
        """The results of sparse_flash_attention over the selected keys; of keys in int8 the output
        alone."""
        if self.latent.dtype == torch.int8:
            query = torch.cat((self.query, self.query_rope), -1)
            out: Tensor = operators.kv_quant_sparse_flash_attention(
                query, self.latent, self.latent, indices, scale_value=scale,
                rope_head_dim=self.query_rope.shape[-1], **options,
            )  # fmt: skip
            return (out,)
        results: tuple[Tensor, ...] = operators.sparse_flash_attention(
            self.query, self.latent, self.latent, indices, scale_value=scale,
            query_rope=self.query_rope, key_rope=self.key_rope, **options,
        )  # fmt: skip
        return results

    def indexer_loss(
        self, indices: Tensor, statistics: Any, scale: float, operators: Any = ops, **options: Any
    ) -> Tensor:
        """The mean KL loss of the indexer over the selected keys, computed in its dtype."""
        assert self.projections is not None
        dtype = self.projections.query_index.dtype
        # Keys that travel between ranks are no tensors yet.
        query, query_rope, latent, key_rope = (
            x.to(dtype) if isinstance(x, Tensor) else x
            for x in (self.query, self.query_rope, self.latent, self.key_rope)
        )
        loss: Tensor = operators.lightning_indexer_kl_loss(
            query, latent, *self.projections, indices, softmax_max=statistics[0],
            softmax_sum=statistics[1], scale_value=scale, query_rope=query_rope, key_rope=key_rope,
            reduction="mean", **options,
        )  # fmt: skip
        return loss


class LatentAttention(nn.Module):
    """Causal attention to one latent and one rotary key for each token, as in DeepSeek-V2 and V3.

    With c the normed latent of a token and r its rotary key, head n has the key
    (absorbed_key[n] @ c, r) and the value c @ absorbed_value[n]. With an indexer, a query attends
    to the `top_k` keys that the indexer prefers (DeepSeek-V3.2), and the indexer learns by its KL
    loss to prefer those that the attention does.

    Args:
        hidden_size: size of the hidden states.
        num_heads: N; with an indexer the NPU accepts powers of two up to 128.
        head_dim: size of a head's query and value without rope.
        rope_dim: size of the rotary part; the NPU accepts 64.
        latent_dim: C; the NPU accepts 512.
        query_rank: size of a latent of the queries (q_lora_rank), with a norm; None: without.
        index_heads: heads of the indexer, a :class:`LightningIndexer`; 0 for none.
        index_dim: size of its heads, of which one half is rotary.
        top_k: how many keys it selects.
        rope_theta: base of the rotary embeddings.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: a size is not a whole number.
        ValueError: a size is less than 1.

    Example:
        >>> import torch, ascend_attn_ops
        >>> layer = ascend_attn_ops.LatentAttention(64, 32, index_heads=8).bfloat16()
        >>> hidden = torch.randn(1, 16, 64, dtype=torch.bfloat16)
        >>> out, indexer_loss = layer(hidden)
        >>> (out.float().square().mean() + indexer_loss).backward()
        >>> pages = {"latent": (1, 512), "rope": (1, 64), "index": (1, 128)}
        >>> cache = ascend_attn_ops.PagedCache(2, 16, pages, dtype=torch.bfloat16)
        >>> step = cache.append({cache.add(): 16})
        >>> with torch.no_grad():
        ...     paged, _ = layer(hidden[0], step.positions, pages=cache.layer(0, step))
        >>> bool((paged - out[0]).abs().max() < 0.01), cache.free_blocks
        (True, 1)
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, head_dim: int = 128, rope_dim: int = 64,
        latent_dim: int = 512, query_rank: int | None = None, index_heads: int = 0,
        index_dim: int = 128, top_k: int = 2048, rope_theta: float = 1e4,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden_size, self.heads, head_dim, rope_dim, latent_dim, self.top_k = (
            check_count(_NAME, name, x, least=1)
            for name, x in (
                ("hidden_size", hidden_size), ("num_heads", num_heads), ("head_dim", head_dim),
                ("rope_dim", rope_dim), ("latent_dim", latent_dim), ("top_k", top_k),
            )
        )  # fmt: skip
        self.widths, self.kv_widths = (head_dim, rope_dim), (latent_dim, rope_dim)
        self.scale, self.rope_theta = sum(self.widths) ** -0.5, rope_theta
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        rank, compress = hidden_size, list[nn.Module]()
        if query_rank is not None:
            rank = check_count(_NAME, "query_rank", query_rank, least=1)
            compress = [nn.Linear(hidden_size, rank, bias=False, **factory)]
            compress.append(nn.RMSNorm(rank, **factory))
        self.compress_query = nn.Sequential(*compress)
        self.query = nn.Linear(rank, self.heads * sum(self.widths), bias=False, **factory)
        self.latent = nn.Linear(hidden_size, sum(self.kv_widths), bias=False, **factory)
        self.latent_norm = nn.RMSNorm(latent_dim, **factory)
        shape = (self.heads, head_dim, latent_dim)
        self.absorbed_key = nn.Parameter(torch.empty(*shape, **factory))
        self.absorbed_value = nn.Parameter(torch.empty(shape[0], *shape[:0:-1], **factory))
        self.out = nn.Linear(self.heads * head_dim, hidden_size, bias=False, **factory)
        self.indexer = None
        if check_count(_NAME, "index_heads", index_heads):
            self.indexer = LightningIndexer(
                hidden_size, num_heads=index_heads, head_dim=index_dim,
                rope_dim=index_dim // 4 * 2, rope_theta=rope_theta, **factory,
            )  # fmt: skip
        for weight in (self.absorbed_key, self.absorbed_value):
            nn.init.normal_(weight, std=latent_dim**-0.5)

    def project(self, hidden: Tensor, positions: Tensor | None = None) -> LatentInputs:
        """Projects hidden states (B, S, hidden_size) or (T, hidden_size) to queries and keys.

        `positions` are (S,), (B, S) or (T,); the default is 0, 1, 2, ...
        """
        query = self.query(self.compress_query(hidden)).unflatten(-1, (self.heads, -1))
        query, query_rope = query.split(self.widths, dim=-1)
        latent, key_rope = self.latent(hidden).unsqueeze(-2).split(self.kv_widths, dim=-1)
        normed = self.latent_norm(latent.to(self.latent_norm.weight.dtype))
        query_rope, key_rope = (
            rotary_embedding(x, positions, theta=self.rope_theta) for x in (query_rope, key_rope)
        )
        # The indexer imitates the attention, and must not change it.
        indexed = None if self.indexer is None else self.indexer(hidden.detach(), positions)
        query = absorb(query, self.absorbed_key)
        return LatentInputs(query, query_rope, normed.to(latent.dtype), key_rope, indexed)

    def forward(
        self, hidden: Tensor, positions: Tensor | None = None, *, indices: Tensor | None = None,
        pages: LayerPages | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend, and train the indexer.

        Args:
            hidden: (B, S, hidden_size); packed and with pages (T, hidden_size).
            positions: as in :meth:`project`; with pages those of the step.
            indices: keys to attend to, (B, S, 1, K) or (T, 1, K), in place of the indexer's.
            pages: a layer of a :class:`PagedCache` with the parts "latent", "rope" and, for an
                indexer, "index", or those of int8: the rows of `hidden` are written, and all keys
                are read there. Keys in int8 have to be selected.
            options: further keywords of the operators: layout="TND" and lengths of a pack.

        Returns:
            The output, as hidden; and the mean KL loss of the indexer in nats per token, None
            without an indexer, with pages, and in eval mode without gradients.

        Raises:
            ValueError: pages beside options; and the errors of the operators.
        """
        return self.attend(self.project(hidden, positions), indices, pages=pages, **options)

    def attend(
        self, inputs: LatentInputs, indices: Tensor | None = None, *,
        pages: LayerPages | None = None, operators: Any = ops, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """:meth:`forward` of what is projected. `operators`: the module whose functions to call,
        ascend_attn_ops.distributed beside its shards."""
        of_indexer: dict[str, Any] = {}
        of_attention: dict[str, Any] = {}
        if pages is not None:
            if options:
                expected = "None beside lengths and layouts, which a step has"
                raise wrong(ValueError, f"{_NAME}.forward", "pages", expected, str([*options]))
            inputs, options = _in_pages(inputs, pages), pages.step.options
            of_indexer, of_attention = {"layout_key": "PA_BSND"}, {"layout_kv": "PA_BSND"}
        projections, loss = inputs.projections, None
        if projections is None and indices is None:
            attended = self._attend_to_all(inputs, pages, options)
        else:
            if indices is None:
                assert projections is not None
                indices = self._select(projections, pages, operators, **of_indexer, **options)
            attended, *statistics = inputs.attend(
                indices, self.scale, operators, **of_attention, **options
            )
            if projections and pages is None and (self.training or torch.is_grad_enabled()):
                loss = inputs.indexer_loss(indices, statistics, self.scale, operators, **options)
        return self.out(expand(attended, self.absorbed_value).flatten(-2)), loss

    def _select(
        self, projections: IndexerProjections, pages: LayerPages | None, operators: Any,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        query, key, weights = (x.detach() if isinstance(x, Tensor) else x for x in projections)
        options["sparse_count"] = self.top_k
        if pages is None or key.dtype != torch.int8:
            indices: Tensor = operators.lightning_indexer(query, key, weights, **options)[0]
            return indices
        query, scales = quantize_index_keys(query)
        # Devices take weights of float16 alone.
        selected: Tensor = operators.quant_lightning_indexer(
            query, key, weights.half(), scales, pages.pages["index_scale"].squeeze(-1), **options
        )
        return selected

    def _attend_to_all(
        self, inputs: LatentInputs, pages: LayerPages | None, options: dict[str, Any]
    ) -> Tensor:
        query, query_rope, latent, rope, _ = inputs
        if latent.dtype == torch.int8:
            expected = "selected keys, of an indexer or of this argument, beside pages of int8"
            raise wrong(ValueError, f"{_NAME}.forward", "indices", expected, "None")
        options = {"layout": "BSND", **options, "sparse_mode": 3, "scale_value": self.scale}
        ropes: dict[str, Any] = {"query_rope": query_rope, "key_rope": rope}
        if pages is None:
            return ops.flash_attention_score(query, latent, latent, **ropes, **options)[0]
        latent, ropes["key_rope"] = pages.dense("latent"), pages.dense("rope")
        return ops.fused_infer_attention_score(
            query, latent, latent, num_key_value_heads=1, **ropes, **options
        )[0]

    def extra_repr(self) -> str:
        return f"heads={self.heads}, widths={self.widths}, latent_dim={self.kv_widths[0]}"


def _in_pages(inputs: LatentInputs, pages: LayerPages) -> LatentInputs:
    """Writes the keys, and returns the queries beside all pages."""
    rows = {"latent": inputs.latent, "rope": inputs.key_rope}
    if inputs.projections is not None:
        rows["index"] = inputs.projections.key_index
    pages.write(**rows)
    latent = pages.pages["latent"]
    rope = pages.pages.get("rope", latent)  # rows of int8 have their ropes
    projections = inputs.projections
    if projections is not None:
        query_index, _, weights = projections
        projections = IndexerProjections(query_index, pages.pages["index"], weights)
    return LatentInputs(inputs.query, inputs.query_rope, latent, rope, projections)
