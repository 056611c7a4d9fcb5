"""Models of transformers on the NPU: what they compute and learn on the CPU, to the last bit.

Our operators and their gradients are calls of aclnn, the rest of a model runs on the CPU.
"""

from __future__ import annotations

from typing import Any

import cann_simulator
import pytest
import torch
from support.simulated_npu import attention_functions
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from ascend_attn_ops.transformers import enable_dsa, register
from support.small_models import SPARSE, make, packing, padding, tokens

pytestmark = pytest.mark.usefixtures("no_limits", "no_leak")

BATCHES = {"plain": {}, "left padding": padding("left"), "packed": packing()}
SPARSE_FORWARD = {"aclnnLightningIndexer", "aclnnSparseFlashAttention"}
SPARSE_TRAINING = SPARSE_FORWARD | {
    "aclnnSparseFlashAttentionGrad", "aclnnSparseLightningIndexerGradKLLoss",
}  # fmt: skip
# Padding and packed sequences are lengths.
PACKED_FORWARD = {"aclnnFlashAttentionVarLenScoreV2"}
PADDED_GENERATION = PACKED_FORWARD | {"aclnnFlashAttentionScoreV2"}
PACKED_TRAINING = PACKED_FORWARD | {"aclnnFlashAttentionUnpaddingScoreGradV2"}
SINKS, PACKED_SINKS = {"aclnnFlashAttentionScoreV3"}, {"aclnnFlashAttentionVarLenScoreV5"}


def model_of(name: str) -> nn.Module:
    if name in SPARSE:
        # Without experts, whose counting of tokens the CPU cannot do as the NPU does.
        model = make(name, first_k_dense_replace=3).bfloat16()
        enable_dsa(model)
        return model
    register()
    return make(name, "ascend").bfloat16()


def trained(name: str, device: str, arguments: dict[str, Any]) -> Any:
    """Returns logits, losses and gradients of one training step."""
    model = model_of(name).to(device)
    text = tokens().to(device)
    there = {x: y.to(device) if isinstance(y, torch.Tensor) else y for x, y in arguments.items()}
    result = model(text, labels=text, **there)
    result.loss.backward()
    losses = getattr(model, "indexer_losses", dict)()
    found = [
        result.logits.detach(), result.loss.detach(), *losses.values(),
        *(x.grad for x in model.parameters()),
    ]  # fmt: skip
    return [x.cpu() for x in found if x is not None]


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("DeepSeek-V3.2", "plain"), ("DeepSeek-V3.2", "left padding"), ("GLM-MoE-DSA", "packed"),
        ("Llama", "packed"), ("Mistral", "left padding"), ("GptOss", "plain"),
        ("GptOss", "left padding"), ("GptOss", "packed"),
    ],
)  # fmt: skip
def test_training_step_is_that_of_the_cpu(name: str, batch: str) -> None:
    expected = trained(name, "cpu", BATCHES[batch])
    with cann_simulator.recorded_calls() as calls:
        actual = trained(name, "npu", BATCHES[batch])
    for x, y in zip(actual, expected, strict=True):
        # The kernel of the indexer's loss has no weights. Padding gets inputs whose loss is 0 but
        # for the rounding of probabilities, of up to half a step at 1 for each token.
        torch.testing.assert_close(x, y, rtol=0, atol=0 if x.dim() else 2.0**-23)
    functions = attention_functions(calls).keys()
    if name == "GptOss":
        # The gradient with sinks is no public operator.
        assert functions == (SINKS if batch == "plain" else PACKED_SINKS)
    else:
        assert functions == (SPARSE_TRAINING if name in SPARSE else PACKED_TRAINING)


@pytest.mark.parametrize(
    ("name", "cache", "padded"),
    [
        ("DeepSeek-V3.2", "static", False), ("DeepSeek-V3.2", "dynamic", True),
        ("GLM-MoE-DSA", "dynamic", True), ("Llama", "static", True), ("Mistral", "dynamic", True),
        ("GptOss", "static", True), ("GptOss", "dynamic", False),
    ],
)  # fmt: skip
def test_generated_text_is_that_of_the_cpu(name: str, cache: str, padded: bool) -> None:
    mask = padding("left")["attention_mask"] if padded else torch.ones(2, 40, dtype=torch.long)
    options = {
        "max_new_tokens": 3, "do_sample": False, "disable_compile": True,
        "cache_implementation": cache,
    }  # fmt: skip
    expected = model_of(name).generate(tokens(), attention_mask=mask, **options)
    with cann_simulator.recorded_calls() as calls:
        model = model_of(name).to("npu")
        actual = model.generate(tokens().npu(), attention_mask=mask.npu(), **options).cpu()
    assert torch.equal(actual, expected)
    functions = attention_functions(calls).keys()
    if name == "GptOss":
        assert functions == (SINKS | PACKED_SINKS if padded else SINKS)
    else:
        assert functions == (SPARSE_FORWARD if name in SPARSE else PADDED_GENERATION)


def served(device: str) -> list[list[int]]:
    """Returns the tokens of transformers' own server, within the NPU's limits."""
    model = make("Llama", "ascend_flash", head_dim=64).bfloat16().to(device)
    if device == "npu":
        # transformers' server writes inputs on the default stream and computes on another one.
        model.register_forward_pre_hook(
            lambda *_: torch.npu.current_stream().wait_stream(torch.npu.default_stream())
        )
    results = model.generate_batch(
        [list(range(40)), [7, 3, 5], list(range(20))],
        generation_config=transformers.GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=128, num_blocks=4, max_batch_tokens=24
        ),
    )
    assert [result.error for result in results.values()] == [None] * 3
    return [result.generated_tokens for result in results.values()]


def test_continuous_batching_is_that_of_the_cpu() -> None:
    register()
    expected = served("cpu")
    with cann_simulator.recorded_calls() as calls:
        assert served("npu") == expected
    functions = attention_functions(calls)
    # Keys and values are written apart, unless all keys of a step are new.
    assert 0 < functions["aclnnScatterPaKvCache"] < 2 * functions["aclnnFusedInferAttentionScoreV4"]
