"""Our aclnn calls are those of torch_npu's own operators, argument by argument.

torch_npu calls the same functions of the same library: an oracle that nobody here wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cann_sim
import pytest
import torch
from conftest import TASK_QUEUE
from device_samples import DEVICE_RECIPES
from samples import RECIPES, Recipe, Sample

ND, NCL, NCHW = 2, 47, 0

# Every difference that is meant: (function, argument): ours, torch_npu's, why. "*" is any value.
DELIBERATE: dict[tuple[str, str], tuple[Any, Any, str]] = {
    ("aclnnSparseFlashAttentionGrad", "deterministic"): (
        False, True,
        "torch_npu always asks for determinism; we ask for it when the caller does",
    ),
    ("aclnnLightningIndexerGrad", "headNum"): (
        "*", 0,
        "torch_npu leaves it at 0; we pass the number of heads, which the name asks for",
    ),
    ("aclnnSparseLightningIndexerGradKLLoss", "deterministic"): (
        False, True,
        "as aclnnSparseFlashAttentionGrad",
    ),
}  # fmt: skip


def sparse_flash_attention(x: dict[str, Any]) -> None:
    torch.ops.npu.npu_sparse_flash_attention(
        x["query"], x["key"], x["value"], x["sparse_indices"], x["scale_value"],
        actual_seq_lengths_query=x["actual_seq_lengths_query"],
        actual_seq_lengths_kv=x["actual_seq_lengths_key"],
        query_rope=x["query_rope"], key_rope=x["key_rope"],
        sparse_block_size=x["sparse_block_size"], layout_query=x["layout"], layout_kv=x["layout"],
        sparse_mode=x["sparse_mode"], attention_mode=2, return_softmax_lse=True,
    )  # fmt: skip


def sparse_flash_attention_grad(x: dict[str, Any]) -> None:
    torch.ops.npu.npu_sparse_flash_attention_grad(
        x["query"], x["key"], x["value"], x["sparse_indices"], x["d_out"], x["out"],
        x["softmax_max"], x["softmax_sum"], x["scale_value"], x["sparse_block_size"],
        query_rope=x["query_rope"], key_rope=x["key_rope"],
        actual_seq_qlen=x["actual_seq_lengths_query"],
        actual_seq_kvlen=x["actual_seq_lengths_key"],
        layout=x["layout"], sparse_mode=x["sparse_mode"],
        pre_tokens=2147483647, next_tokens=2147483647, attention_mode=2,
    )  # fmt: skip


def lightning_indexer(x: dict[str, Any]) -> None:
    torch.ops.npu.npu_lightning_indexer(
        x["query"], x["key"], x["weights"],
        actual_seq_lengths_query=x["actual_seq_lengths_query"],
        actual_seq_lengths_key=x["actual_seq_lengths_key"],
        layout_query=x["layout"], layout_key=x["layout"], sparse_count=x["sparse_count"],
        sparse_mode=x["sparse_mode"], return_value=x["return_values"],
    )  # fmt: skip


def lightning_indexer_grad(x: dict[str, Any]) -> None:
    torch.ops.npu.npu_lightning_indexer_grad(
        x["query"], x["key"], x["d_values"], x["sparse_indices"], x["weights"],
        actual_seq_lengths_query=x["actual_seq_lengths_query"],
        actual_seq_lengths_key=x["actual_seq_lengths_key"],
        layout=x["layout"], sparse_mode=x["sparse_mode"],
    )  # fmt: skip


def sparse_lightning_indexer_grad_kl_loss(x: dict[str, Any]) -> None:
    torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss(
        x["query"], x["key"], x["query_index"], x["key_index"], x["weights"],
        x["sparse_indices"], x["softmax_max"], x["softmax_sum"], x["scale_value"],
        query_rope=x["query_rope"], key_rope=x["key_rope"],
        actual_seq_qlen=x["actual_seq_lengths_query"],
        actual_seq_klen=x["actual_seq_lengths_key"],
        layout=x["layout"], sparse_mode=x["sparse_mode"],
    )  # fmt: skip


def fusion_options(x: dict[str, Any]) -> dict[str, Any]:
    """What both directions take, under torch_npu's names."""
    names = {
        "pse": "pse_shift", "atten_mask": "atten_mask", "keep_prob": "keep_prob",
        "pre_tokens": "pre_tokens", "next_tokens": "next_tokens", "prefix": "prefix",
        "actual_seq_qlen": "actual_seq_lengths_query", "actual_seq_kvlen": "actual_seq_lengths_key",
        "sparse_mode": "sparse_mode", "pse_type": "pse_type", "q_start_idx": "q_start_idx",
        "kv_start_idx": "kv_start_idx",
    }  # fmt: skip
    return {theirs: x[ours] for theirs, ours in names.items() if x.get(ours) is not None}


def flash_attention_score(x: dict[str, Any]) -> None:
    torch.ops.npu.npu_fusion_attention_v2(
        x["query"], x["key"], x["value"], x["num_heads"], x["layout"],
        scale=x["scale_value"], **fusion_options(x),
    )  # fmt: skip


def flash_attention_score_grad(x: dict[str, Any]) -> None:
    # It draws the dropout mask of the forward once more: of so many bits.
    bits = 8 * x["drop_mask"].numel() if x.get("drop_mask") is not None else 0
    torch.ops.npu.npu_fusion_attention_grad_v2(
        x["query"], x["key"], x["value"], x["dy"], x["num_heads"], x["layout"],
        softmax_max=x["softmax_max"], softmax_sum=x["softmax_sum"],
        attention_in=x["attention_in"], scale_value=x["scale_value"], numels=bits,
        **fusion_options(x),
    )  # fmt: skip


def prompt_flash_attention(x: dict[str, Any]) -> None:
    scales = ("deq_scale1", "quant_scale1", "deq_scale2", "quant_scale2", "quant_offset2")
    torch.ops.npu.npu_prompt_flash_attention(
        x["query"], x["key"], x["value"], atten_mask=x.get("atten_mask"),
        actual_seq_lengths=x["actual_seq_lengths_query"],
        actual_seq_lengths_kv=x["actual_seq_lengths_key"],
        **{name: x.get(name) for name in scales}, num_heads=x["num_heads"],
        scale_value=x["scale_value"], pre_tokens=x["pre_tokens"], next_tokens=x["next_tokens"],
        input_layout=x["layout"], num_key_value_heads=x["num_key_value_heads"],
        sparse_mode=x["sparse_mode"],
    )  # fmt: skip


THEIRS: dict[str, Callable[[dict[str, Any]], None]] = {
    function.__name__: function
    for function in (
        sparse_flash_attention, sparse_flash_attention_grad, lightning_indexer,
        lightning_indexer_grad, sparse_lightning_indexer_grad_kl_loss,
        flash_attention_score, flash_attention_score_grad, prompt_flash_attention,
    )
}  # fmt: skip


def named_arguments(sample: Sample) -> dict[str, Any]:
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key", "query_rope", "key_rope")
    return {**dict.fromkeys(names), **sample.arguments}


def attention_calls(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        entry
        for entry in log
        if "function" in entry and not entry["function"].startswith(("aclnnInplace", "aclnnCast"))
    ]


def comparable(value: Any) -> Any:
    """A logged argument without what may differ between two equal calls."""
    if not isinstance(value, dict) or "sizes" not in value:
        return value
    # torch_npu tags 3-D tensors NCL and 4-D ones NCHW, for convolutions. Attention knows its axes
    # from the layout argument: ND claims no more.
    assert value["format"] in (ND, NCL, NCHW)
    return {name: x for name, x in value.items() if name not in ("address", "format")}


def with_its_drop_mask(sample: Sample) -> Sample:
    """torch_npu draws its own dropout mask, of whole 16 bytes: the content cannot be compared."""
    drop_mask = sample.options.get("drop_mask")
    if drop_mask is None:
        return sample
    return sample.replace(drop_mask=drop_mask.new_zeros(-(-drop_mask.numel() // 16) * 16))


# torch_npu calls FlashAttentionScore for every sample, empty ones among them.
COMPARABLE = [
    r for r in RECIPES if r in DEVICE_RECIPES or r.operator.startswith("flash_attention_score")
]


@pytest.mark.parametrize("recipe", COMPARABLE, ids=lambda recipe: recipe.id)
@pytest.mark.usefixtures("no_limits")
def test_our_call_is_torch_npus(recipe: Recipe) -> None:
    sample = with_its_drop_mask(recipe.make(torch.bfloat16)).to("npu")
    with cann_sim.computing(False), cann_sim.recorded_calls() as log:
        THEIRS[sample.operator](named_arguments(sample))
    theirs = attention_calls(log)
    with cann_sim.computing(False), cann_sim.recorded_calls() as log:
        sample.call(torch.ops.ascend)
    ours = attention_calls(log)

    # torch_npu calls the next version, which asks how precise it is to be.
    for entry in theirs:
        if entry["function"] == "aclnnPromptFlashAttentionV3":
            entry["function"] = "aclnnPromptFlashAttentionV2"
            entry.get("arguments", {}).pop("innerPrecise", None)
    assert [entry["function"] for entry in ours] == [entry["function"] for entry in theirs]
    for our_entry, their_entry in zip(ours, theirs, strict=True):
        function = our_entry["function"]
        assert our_entry.keys() == their_entry.keys()
        for key in our_entry.keys() - {"arguments"}:
            assert our_entry[key] == their_entry[key], (function, key)
        for name, value in our_entry.get("arguments", {}).items():
            mine, their = (comparable(x) for x in (value, their_entry["arguments"][name]))
            if (function, name) in DELIBERATE:
                expected_mine, expected_their, _reason = DELIBERATE[function, name]
                assert expected_mine in ("*", mine), (function, name)
                assert expected_their in ("*", their), (function, name)
            else:
                assert mine == their, (function, name)


@pytest.mark.parametrize("recipe", DEVICE_RECIPES, ids=lambda recipe: recipe.id)
def test_determinism_reaches_the_device(recipe: Recipe) -> None:
    """torch.use_deterministic_algorithms, as it was when the operator was called."""
    sample: Sample = recipe.make(torch.bfloat16).to("npu")
    for on in (True, False):
        with cann_sim.computing(False), cann_sim.recorded_calls() as log:
            torch.use_deterministic_algorithms(on)
            try:
                sample.call(torch.ops.ascend)
            finally:
                # At level 2 the first phase runs later, on the thread of the queue.
                torch.use_deterministic_algorithms(False)
        (call,) = (entry for entry in attention_calls(log) if entry["phase"] == 1)
        assert call["deterministic"] == on
        assert call["arguments"].get("deterministic", on) == on


def steps(log: list[dict[str, Any]]) -> list[str]:
    return [str(entry.get("step", entry.get("phase"))) for entry in log]


@pytest.mark.parametrize("recipe", DEVICE_RECIPES, ids=lambda recipe: recipe.id)
def test_the_thread_is_prepared_as_torch_npu_prepares_it(recipe: Recipe) -> None:
    """Around the first phase: which functions reuse executors, and which switch that off."""
    sample: Sample = recipe.make(torch.bfloat16).to("npu")
    with cann_sim.computing(False), cann_sim.keeping_executors():
        with cann_sim.recorded_calls() as log:
            THEIRS[sample.operator](named_arguments(sample))
        theirs = steps(log)
    with cann_sim.computing(False), cann_sim.keeping_executors():
        with cann_sim.recorded_calls() as log:
            sample.call(torch.ops.ascend)
        ours = steps(log)
    # On the caller's thread the second phase and what follows it come when the queue gets there.
    assert sorted(ours) == sorted(theirs)
    assert ours[: ours.index("1") + 1] == theirs[: theirs.index("1") + 1]
    reuses = int(recipe.operator.startswith("flash_attention_score"))
    key = f"SetPTACacheHashKey {reuses}" if TASK_QUEUE == 2 else f"SetPTAHashKey {reuses}"
    assert key in ours[: ours.index("1")]


FLASH_RECIPES = [r for r in DEVICE_RECIPES if r.operator.startswith("flash_attention_score")]


@pytest.mark.parametrize("recipe", FLASH_RECIPES, ids=lambda recipe: recipe.id)
@pytest.mark.usefixtures("no_leak")
def test_a_call_with_other_tensors_reuses_the_executor(recipe: Recipe) -> None:
    """No first phase, as in torch_npu; the result is that of the tensors of this call."""
    sample: Sample = recipe.make(torch.bfloat16)
    with cann_sim.keeping_executors():
        sample.to("npu").call(torch.ops.ascend)
        sample = sample.replace(query=sample.arguments["query"].flip(0) * 0.5)
        on_npu = sample.to("npu")
        with cann_sim.recorded_calls() as log:
            outputs = on_npu.call(torch.ops.ascend)
        with cann_sim.computing(False), cann_sim.recorded_calls() as their_log:
            for _ in range(2):
                THEIRS[sample.operator](named_arguments(on_npu))
    assert [x["phase"] for x in attention_calls(log)] == [2]
    assert [x["phase"] for x in attention_calls(their_log)] == [1, 2, 2]
    for x, y in zip(outputs, sample.call(torch.ops.ascend), strict=True):
        assert torch.equal(x.cpu(), y)


def test_another_argument_has_an_executor_of_its_own() -> None:
    sample: Sample = FLASH_RECIPES[0].make(torch.bfloat16).to("npu")

    def call() -> None:
        sample.call(torch.ops.ascend)
        # Or the queue's second phase comes after the first phase of the next call.
        torch.npu.synchronize()

    with cann_sim.computing(False), cann_sim.keeping_executors(), cann_sim.recorded_calls() as log:
        call()
        for change in ({"scale_value": 0.375}, {"pre_tokens": 2147483646}):
            sample = sample.replace(**change)
            call()
        other_stream = torch.npu.Stream()
        with torch.npu.stream(other_stream):
            call()
        call()
    assert [x["phase"] for x in attention_calls(log)] == [1, 2] * 4 + [2]
