"""Arguments of torch_npu's operators that the simulation does not compute are errors.

They name the aclnn function and its argument. torch_npu itself leaves handles behind when a first
phase fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu
from support.simulated_npu import TASK_QUEUE, captured
from test_torch_npu_operators_others import HEADS, S1, B, sparse_tensors
from torch import Tensor
from torch_npu_calls import takes, values

N, NK, D = 4, 2, 16
NAME = r"npu::_?npu_\w+: aclnn\w+: the simulation does not compute "


def tensors(queries: int = 1) -> list[Tensor]:
    shapes = (2, N, queries, D), (2, NK, 20, D), (2, NK, 20, D)
    return [values(*shape).half().npu() for shape in shapes]


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
        (FUSED, "key_antiquant_offset", "keyAntiquantOffsetOptional"),
        (FUSED, "value_antiquant_offset", "valueAntiquantOffsetOptional"),
        (FUSED, "dequant_scale1", "deqScale1Optional"),
        (FUSED, "quant_scale2", "quantScale2Optional"),
        (FUSED, "key_rope_antiquant_scale", "keyRopeAntiquantScaleOptional"),
        (FUSED_V2, "dequant_scale_key_rope", "keyRopeAntiquantScaleOptional"),
        (FUSED_V2, "dequant_offset_key", "keyAntiquantOffsetOptional"),
        (FUSED_V2, "quant_scale_out", "quantScale2Optional"),
        (INCREMENTAL, "antiquant_scale", "antiquantScale"),
        (INCREMENTAL, "dequant_scale1", "dequantScale1"),
    ],
)
def test_quantised_forms(operator: Any, argument: str, name: str) -> None:
    heads = "num_query_heads" if operator is FUSED_V2 else "num_heads"
    options = {heads: N, "num_key_value_heads": NK, "input_layout": "BNSD"}
    with pytest.raises(NotImplementedError, match=NAME + name):
        operator(*tensors(), **{argument: torch.ones(1).npu()}, **options)


@captured
def test_a_call_that_fails_in_a_capture() -> None:
    """The error is that of the call, and the calls behind it are not those of the capture."""
    options = {"num_heads": N, "num_key_value_heads": NK, "input_layout": "BNSD"}
    given, scale = tensors(), torch.ones(1).npu()
    with (
        pytest.raises(NotImplementedError, match=NAME + "antiquantScaleOptional"),
        torch.npu.graph(torch.npu.NPUGraph(), auto_dispatch_capture=True),
    ):
        FUSED(*given, antiquant_scale=scale, **options)
    assert torch.isfinite(FUSED(*given, **options)[0].float()).all()


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
    (query, query_rope, *index), (key, key_rope, index_key), chosen = sparse_tensors()
    statistics = [torch.ones(B, 1, S1, HEADS) for _ in range(2)]
    given = [query, key, index[0], index_key, index[1], chosen, *statistics]
    options = {"query_rope": query_rope, "key_rope": key_rope, "sinks": torch.zeros(HEADS)}
    operator = torch_npu.npu_sparse_lightning_indexer_grad_kl_loss
    with pytest.raises(NotImplementedError, match=NAME + "sinksOptional"):
        operator(*(x.npu() for x in given), 1.0, **{n: x.npu() for n, x in options.items()})


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
