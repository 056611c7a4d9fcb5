"""Helpers for trainers, on NPU tensors."""

from __future__ import annotations

import re
from dataclasses import replace

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from ascend_attn_check.samples.sparse import SparseCase
from device_samples import as_launched
from support.samples import OPERATORS
from support.simulated_npu import once, run_in_new_process
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.func import grad, vmap

pytestmark = pytest.mark.usefixtures("no_limits")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name", ["lightning_indexer", "sparse_flash_attention", "flash_attention_score"]
)
def test_autocast(name: str) -> None:
    operator = OPERATORS[name]
    sample = as_launched(operator.make(operator.cases[0], torch.float32))
    half = sample.map(lambda x: x.bfloat16() if x.is_floating_point() else x)
    with torch.autocast("npu", torch.bfloat16):
        outputs = sample.to("npu").call(ops)
    assert_same_bits(tuple(x.cpu() for x in outputs), half.call(torch.ops.ascend))


def test_torch_func() -> None:
    x = torch.randn(3, 1, 8, 2, 16, dtype=torch.bfloat16)

    def loss(x: Tensor) -> Tensor:
        return ops.flash_attention_score(x, x, x, num_heads=2, layout="BSND")[0].sum()

    on_npu = vmap(grad(loss))(x.npu()).cpu()
    assert_same_bits((on_npu,), (vmap(grad(loss))(x),))


def attend_in_int8(tensors: list[Tensor], scale_dtype: torch.dtype) -> tuple[Tensor, ...]:
    inputs = ops.quantize_attention_inputs(*tensors, scale_dtype=scale_dtype)
    out = ops.prompt_flash_attention(**inputs._asdict(), num_heads=4, layout="BNSD", sparse_mode=3)
    return (*inputs, out)


@pytest.mark.usefixtures("no_leak")
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.uint64], ids=str)
def test_quantised_attention(scale_dtype: torch.dtype) -> None:
    """The device's int8 attention, as on the CPU to the last bit."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, 4, 50, 32, generator=generator, dtype=torch.bfloat16) for _ in range(3)
    ]
    on_npu = [x.npu() for x in tensors]
    with cann_simulator.recorded_calls() as calls:
        results = attend_in_int8(on_npu, scale_dtype)
    functions = [call["function"] for call in calls if call.get("phase") == 1]
    assert functions == ["aclnnPromptFlashAttentionV3"]
    assert {x.device.type for x in results} == {"npu"}
    assert_same_bits(tuple(x.cpu() for x in results), attend_in_int8(tensors, scale_dtype))


# Weights of tokens in the KL loss, whose kernel knows none.

KL_LOSS = OPERATORS["sparse_lightning_indexer_grad_kl_loss"]
BSND = SparseCase(s=(6, 9), rope=8)
PADDED = SparseCase(s=(6, 9), lengths=((6, 3), (9, 5)), rope=8)
TND = SparseCase(layout="TND", lengths=((3, 0, 6), (5, 2, 9)), tail=(2, 3), rope=8)


def weight_of(case: SparseCase) -> Tensor:
    shape = torch.Size(case.tokens(0))
    return (torch.arange(shape.numel()) % 3 > 0).view(shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [BSND, PADDED, TND, replace(BSND, selection_heads=False)], ids=lambda case: case.id
)
def test_bool_weights(case: SparseCase, dtype: torch.dtype) -> None:
    """The gradients to the bit. A token that is left out adds the rounding of 1/n to the loss."""
    sample, weight = KL_LOSS.make(case, dtype), weight_of(case)
    on_npu = sample.to("npu").given(token_weight=weight.npu()).call(torch.ops.ascend)
    *gradients, loss = (x.cpu() for x in on_npu)
    *expected_gradients, expected = sample.given(token_weight=weight).call(torch.ops.ascend)
    assert_same_bits(tuple(gradients), tuple(expected_gradients))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


def test_all_is_left_out() -> None:
    sample = KL_LOSS.make(BSND, torch.bfloat16).to("npu")
    nothing = torch.zeros(BSND.tokens(0), dtype=torch.bool).npu()
    *gradients, loss = sample.given(token_weight=nothing).call(torch.ops.ascend)
    assert not any(x.cpu().any() for x in gradients)
    assert loss.cpu().abs() < 1e-6


def test_other_factors_are_refused() -> None:
    sample = KL_LOSS.make(BSND, torch.bfloat16).to("npu")
    weight = torch.ones(BSND.tokens(0)).npu()
    message = "kl_loss: token_weight: expected dtype bool on the NPU, .* got float32; sum the los"
    with pytest.raises(NotImplementedError, match=message):
        ops.lightning_indexer_kl_loss(**sample.arguments, token_weight=weight)


# In a process of its own: a limited stream changes how torch_npu makes all its later calls.
LIMITED_STREAM = """
import ascend_attn_ops, torch
stream = torch.npu.Stream()
x = lambda *sizes: torch.ones(1, 12, *sizes, dtype=torch.bfloat16, device="npu")
statistics = torch.ones(1, 1, 12, 4, device="npu")
indices = torch.arange(12, dtype=torch.int32, device="npu").expand(1, 12, 1, 12).contiguous()
arguments = (x(4, 16), x(1, 16), x(3, 8), x(1, 8), x(3), indices, statistics, statistics)
torch.npu.synchronize()
loss = torch.ops.ascend.sparse_lightning_indexer_grad_kl_loss
for cores in (5, 6, 13):
    torch.npu.set_stream_limit(stream, cores, 2 * cores)
    with ascend_attn_ops.limits(None), torch.npu.stream(stream):
        loss(*arguments, scale_value=0.25)
        try:
            loss(*arguments, scale_value=0.25, deterministic=True)
        except NotImplementedError as error:
            print(error)
        else:
            print("ran")
"""


@once
def test_determinism_on_a_stream_with_few_cores() -> None:
    """With 12 tokens and an odd number of cores below that, the kernel waits for ever."""
    refused, *ran = run_in_new_process(LIMITED_STREAM)[0].splitlines()
    assert re.search(r"kl_loss: deterministic: expected .*, got True with 5;", refused)
    assert ran == ["ran", "ran"]
