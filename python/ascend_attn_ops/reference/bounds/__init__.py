"""How far from exact the results of each operator may be: docs/numerics.md.

A module for each operator and its gradient states the exact results of a call, by the reference,
and a bound on every element. `expected.py` has what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_attn_ops.reference.bounds import (
    attention_update,
    flash_attention_score,
    fused_infer_attention_score,
    kv_quant_sparse_flash_attention,
    lightning_indexer,
    prompt_flash_attention,
    quant_lightning_indexer,
    scatter_pa_kv_cache,
    sparse_flash_attention,
    sparse_flash_mla,
    sparse_lightning_indexer_grad_kl_loss,
    sparse_lightning_indexer_kl_loss_grad,
)
from ascend_attn_ops.reference.bounds.expected import Expected
from ascend_attn_ops.reference.call import Outputs, Sample, as_tuple


@dataclass(frozen=True)
class Bounds:
    """The results that an operator should have."""

    operator: str
    # One for each result of a call.
    expected: Callable[[Sample], Sequence[Expected]] | None = None
    # In place of it, where it takes more than each element alone.
    compare: Callable[[Sample, Outputs], None] | None = None

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.ascend, self.operator).default

    @property
    def in_place(self) -> bool:
        """Whether it writes to its arguments and returns nothing."""
        return self.overload._schema.is_mutable

    @property
    def output_names(self) -> list[str]:
        """The names of its results, or of the arguments to which it writes."""
        schema = self.overload._schema
        if self.in_place:
            return [x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write]
        return [x.name for x in schema.returns]

    def results(self, sample: Sample, outputs: Any) -> dict[str, Tensor]:
        """By name what a call has returned, or written to the tensors of its sample."""
        if self.in_place:
            return {name: x for name, x in sample.tensors.items() if name in self.output_names}
        return dict(zip(self.output_names, as_tuple(outputs), strict=True))

    def check(self, sample: Sample, results: Sequence[Tensor]) -> float | None:
        """Compare the results of a call with the reference; `sample` is as it was before.

        Returns:
            The largest error as a share of the allowed one, where it is that of an element.
        """
        if self.expected is not None:
            return check(self.expected(sample), results)
        assert self.compare is not None
        self.compare(sample, tuple(results))
        return None


def check(expected: Sequence[Expected], results: Sequence[Tensor]) -> float:
    """Returns the largest error of all results, as a share of the allowed one."""
    largest = 0.0
    for one, x in zip(expected, results, strict=True):
        one.check(x)
        if x.is_floating_point():
            largest = max(largest, one.largest_error(x))
    return largest


BOUNDS: dict[str, Bounds] = {
    x.operator: x
    for x in (
        Bounds("attention_update", attention_update.expected),
        Bounds("flash_attention_score", flash_attention_score.expected),
        Bounds("flash_attention_score_grad", flash_attention_score.expected_gradient),
        Bounds("fused_infer_attention_score", fused_infer_attention_score.expected),
        Bounds("kv_quant_sparse_flash_attention", kv_quant_sparse_flash_attention.expected),
        Bounds("lightning_indexer", compare=lightning_indexer.assert_same_selection),
        Bounds("lightning_indexer_grad", lightning_indexer.expected_gradient),
        Bounds("prompt_flash_attention", prompt_flash_attention.expected),
        Bounds("quant_lightning_indexer", compare=quant_lightning_indexer.assert_same_selection),
        Bounds("scatter_pa_kv_cache_", scatter_pa_kv_cache.expected),
        Bounds("sparse_flash_attention", sparse_flash_attention.expected),
        Bounds("sparse_flash_attention_grad", sparse_flash_attention.expected_gradient),
        Bounds("sparse_flash_mla", sparse_flash_mla.expected),
        Bounds("sparse_flash_mla_grad", sparse_flash_mla.expected_gradient),
        Bounds(
            "sparse_lightning_indexer_grad_kl_loss", sparse_lightning_indexer_grad_kl_loss.expected
        ),
        Bounds(
            "sparse_lightning_indexer_kl_loss_grad", sparse_lightning_indexer_kl_loss_grad.expected
        ),
    )
}

__all__ = ["BOUNDS", "Bounds", "check"]
