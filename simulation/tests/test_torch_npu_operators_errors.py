"""Arguments of torch_npu's operators that the simulation does not compute are errors.

They name the aclnn function and its argument.

torch_npu itself leaves handles behind when a first phase fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu
from plain_attention import takes, values
from support.simulated_npu import TASK_QUEUE
from torch import Tensor

N, NK, D = 4, 2, 16
NAME = r"aclnn\w+: the simulation does not compute "


def tensors(queries: int = 1) -> list[Tensor]:
    shapes = (2, N, queries, D), (2, NK, 20, D), (2, NK, 20, D)
    return [values(*shape).half().npu() for shape in shapes]


def one_value() -> Tensor:
    return torch.ones(1).npu()


# torch_npu drops all later work of the process after an error in its task queue.
RAISES_AT_ONCE = pytest.mark.skipif(TASK_QUEUE == 2, reason="the function is called in the queue")

INCREMENTAL = torch_npu.npu_incre_flash_attention
FUSED = torch_npu.npu_fused_infer_attention_score
FUSED_V2 = torch_npu.npu_fused_infer_attention_score_v2


@RAISES_AT_ONCE
@pytest.mark.parametrize(
    ("operator", "argument", "name"),
    [
        (FUSED, "antiquant_scale", "antiquantScaleOptional"),
        (FUSED, "key_antiquant_scale", "keyAntiquantScaleOptional"),
        (FUSED, "value_antiquant_offset", "valueAntiquantOffsetOptional"),
        (FUSED, "dequant_scale1", "deqScale1Optional"),
        (FUSED, "quant_scale2", "quantScale2Optional"),
        (FUSED, "key_rope_antiquant_scale", "keyRopeAntiquantScaleOptional"),
        (FUSED_V2, "dequant_scale_query", "dequantScaleQueryOptional"),
        (FUSED_V2, "dequant_scale_key", "keyAntiquantScaleOptional"),
        (FUSED_V2, "quant_scale_out", "quantScale2Optional"),
        (INCREMENTAL, "antiquant_scale", "antiquantScale"),
        (INCREMENTAL, "dequant_scale1", "dequantScale1"),
    ],
)
def test_quantised_forms(operator: Any, argument: str, name: str) -> None:
    heads = "num_query_heads" if operator is FUSED_V2 else "num_heads"
    options = {heads: N, "num_key_value_heads": NK, "input_layout": "BNSD"}
    with pytest.raises(NotImplementedError, match=NAME + name):
        operator(*tensors(), **{argument: one_value()}, **options)


@RAISES_AT_ONCE
@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_padding_mask(version: str) -> None:
    operator = getattr(torch_npu, f"npu_fusion_attention{version}")
    q, k, v = tensors(9)
    mask = torch.zeros(9, 20, dtype=torch.bool).npu()
    with pytest.raises(NotImplementedError, match=NAME + "paddingMaskOptional"):
        operator(q, k, v, N, "BNSD", padding_mask=mask)


@RAISES_AT_ONCE
@takes("npu_sparse_lightning_indexer_grad_kl_loss", "sinks")
def test_sinks_of_the_indexer_loss() -> None:
    heads, size, rope, queries, keys = 8, 512, 64, 3, 20
    shapes = [(heads, size), (1, size), (heads, 128), (1, 128)]
    main = [
        torch.zeros(2, s, *x).half().npu()
        for s, x in zip((queries, keys, queries, keys), shapes, strict=True)
    ]
    weights = torch.zeros(2, queries, heads).half().npu()
    indices = torch.zeros(2, queries, 1, 16, dtype=torch.int32).npu()
    statistics = [torch.ones(2, 1, queries, heads).npu() for _ in range(2)]
    ropes = {
        "query_rope": torch.zeros(2, queries, heads, rope).half().npu(),
        "key_rope": torch.zeros(2, keys, 1, rope).half().npu(),
    }
    options = {"sinks": torch.zeros(heads).npu(), **ropes}
    operator = torch_npu.npu_sparse_lightning_indexer_grad_kl_loss
    with pytest.raises(NotImplementedError, match=NAME + "sinksOptional"):
        operator(*main, weights, indices, *statistics, 1.0, **options)


@pytest.mark.parametrize("name", ["npu_transpose", "npu_gelu"])
def test_operators_that_are_missing(name: str) -> None:
    """The first is compiled by CANN: torch_npu would queue it. Later work goes on."""
    x = values(3, 4)
    arguments = ((1, 0),) if name == "npu_transpose" else ()
    missing = "aclnnGeluV2" if name == "npu_gelu" else "an operator that CANN compiles"
    message = f"npu::{name}: it calls {missing}, .*torch.library.impl"
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=message):
            getattr(torch_npu, name)(x.npu(), *arguments)
        torch.npu.synchronize()
        assert torch.equal((x.npu() * 2).cpu(), x * 2)


def test_operators_of_atb() -> None:
    x, positions = values(3, 64).half().npu(), torch.arange(3).npu()
    with pytest.raises(NotImplementedError, match=r"atb::_npu_rotary_embedding: .*torch\.library"):
        torch_npu._npu_rotary_embedding(positions, x, x, 64, x, True)


@RAISES_AT_ONCE
def test_what_is_not_computed_is_not_implemented() -> None:
    with pytest.raises(NotImplementedError, match=f"npu::npu_incre_flash_attention: {NAME}"):
        INCREMENTAL(*tensors(), num_heads=N, num_key_value_heads=NK, dequant_scale1=one_value())
