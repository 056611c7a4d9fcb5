"""Evaluate on held-out text whether the indexer selects what the attention attends to."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from ascend_attn_ops.nn.latent_attention import LatentAttention, LatentInputs
from precision import autocast
from sparse_lm import (
    Select,
    SparseLM,
    select_all,
    select_by_indexer,
)
from torch import Tensor


def _positions(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    positions = torch.arange(length, device=device)
    return positions[:, None], positions[None, :]


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the top-k causal keys by scores (B, S, S) as indices (B, S, 1, K), padded with -1."""
    query, key = _positions(scores.shape[-1], scores.device)
    values, indices = scores.masked_fill(key > query, -math.inf).topk(k)
    return indices.masked_fill(values == -math.inf, -1).int().unsqueeze(2)


def attention_probabilities(layer: LatentAttention, inputs: LatentInputs) -> Tensor:
    """Return the dense attention that the indexer imitates: mean over heads, (B, S, S) fp32."""
    keys = torch.cat([inputs.latent, inputs.key_rope], dim=-1).squeeze(2).float()
    queries = torch.cat([inputs.query, inputs.query_rope], dim=-1).float()
    query, key = _positions(keys.shape[1], keys.device)
    total = keys.new_zeros(len(keys), keys.shape[1], keys.shape[1])
    with torch.autocast(keys.device.type, enabled=False):
        # One head at a time: all of them together would not fit in memory at the NPU's sizes.
        for head in queries.unbind(2):
            scores = layer.scale * head @ keys.transpose(1, 2)
            total += scores.masked_fill(key > query, -math.inf).softmax(-1)
    return total / queries.shape[2]


def select_ideal(layer: LatentAttention, inputs: LatentInputs, shards: object = None) -> Tensor:
    """Select the k keys with the largest attention mass: no other k keys hold more."""
    return top_k(attention_probabilities(layer, inputs), layer.top_k)


def select_recent(layer: LatentAttention, inputs: LatentInputs, shards: object = None) -> Tensor:
    batch, length = inputs.query.shape[:2]
    query, key = _positions(length, inputs.query.device)
    return top_k((key - query).float().expand(batch, length, length), layer.top_k)


def select_random(layer: LatentAttention, inputs: LatentInputs, shards: object = None) -> Tensor:
    batch, length = inputs.query.shape[:2]
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(batch, length, length, generator=generator)
    return top_k(scores.to(inputs.query.device), layer.top_k)


SELECTIONS: dict[str, Select] = {
    "dense": select_all,
    "ideal": select_ideal,
    "indexer": select_by_indexer,
    "recent": select_recent,
    "random": select_random,
}


def captured_mass(probabilities: Tensor, indices: Tensor, k: int) -> float:
    """Mean share of attention on the keys at ``indices``, over queries with more than k keys."""
    indices = indices.squeeze(2).long()
    kept = probabilities.gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, 0.0)
    return kept.sum(-1)[:, k:].mean().item()


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


@torch.no_grad()
def evaluate(
    model: SparseLM, windows: Tensor, batch_size: int, dtype: str
) -> dict[str, dict[str, float]]:
    """Measure the attention mass each selection captures, and the LM's bits per byte with it.

    Mass is measured in a dense pass, so that all selections face the same attention. Queries with
    at most k keys are left out, because there every selection captures everything.

    Args:
        model: the trained model.
        windows: held-out text, (number of windows, S + 1) int64.
        batch_size: how many windows to run at once.
        dtype: of the activations, "bfloat16" or "float32".
    """
    mass: dict[str, list[float]] = defaultdict(list)
    bits: dict[str, list[float]] = defaultdict(list)

    def select_all_and_measure(
        layer: LatentAttention, inputs: LatentInputs, shards: object = None
    ) -> Tensor:
        probabilities = attention_probabilities(layer, inputs)
        for name, select in SELECTIONS.items():
            mass[name].append(
                captured_mass(probabilities, select(layer, inputs, None), layer.top_k)
            )
        return select_all(layer, inputs)

    model.eval()
    for batch in windows.split(batch_size):
        for name, select in SELECTIONS.items():
            chosen = select_all_and_measure if name == "dense" else select
            with autocast(batch.device, dtype):
                lm_loss, _ = model(batch, chosen)
            bits[name] += [lm_loss.item() / math.log(2)] * len(batch)
    return {
        "attention_mass": {name: mean(values) for name, values in mass.items()},
        "bits_per_byte": {name: mean(values) for name, values in bits.items()},
    }
