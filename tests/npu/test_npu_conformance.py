"""Our aclnn calls are those of torch_npu's own operators, argument by argument.

torch_npu calls the same functions of the same library: an oracle that nobody here wrote.
"""

from __future__ import annotations

from typing import Any

import cann_simulator
import pytest
import torch
from ascend_attn_check.samples.fused_infer_attention_score import INT8_CASES, InferCase
from ascend_attn_ops.reference.call import lengths
from device_samples import is_pack_gradient
from support.samples import OPERATORS, RECIPES, Recipe, Sample

ND, NCL, NCHW, NCDHW = 2, 47, 0, 30

# Every difference that is meant: (function, argument): ours, torch_npu's, why. "*" is any value.
DELIBERATE: dict[tuple[str, str], tuple[Any, Any, str]] = {
    ("aclnnSparseFlashAttentionGrad", "deterministic"): (
        False, True,
        "torch_npu always asks for determinism by this argument, which the device ignores: its "
        "context counts. We ask for it when the caller does, and then switch the context on",
    ),
    ("aclnnLightningIndexerGrad", "headNum"): (
        "*", 0,
        "torch_npu leaves it at 0; we pass the number of heads, which the name asks for",
    ),
    ("aclnnSparseLightningIndexerGradKLLoss", "deterministic"): (
        False, True,
        "as aclnnSparseFlashAttentionGrad",
    ),
    ("aclnnPromptFlashAttentionV3", "innerPrecise"): (
        2, 1,
        "1 has a float16 softmax for float16 inputs, and the mean of the values in a row that the "
        "mask masks whole; 2 has a float32 softmax and zeros, as on the CPU",
    ),
}  # fmt: skip


def call_theirs(sample: Sample) -> None:
    """torch_npu's own operator; an argument that the sample leaves out has its default."""
    operator = OPERATORS[sample.operator]
    assert operator.torch_npu is not None
    defaults = {a.name: a.default_value for a in operator.overload._schema.arguments}
    operator.torch_npu({**defaults, **sample.arguments})


# With which torch_npu draws a dropout mask; ours is given one.
DRAWS = "aclnnDropoutGenMaskV2"


def attention_calls(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in log if entry.get("function", DRAWS) != DRAWS]


def comparable(value: Any) -> Any:
    """A logged argument without what may differ between two equal calls."""
    if isinstance(value, list):
        return [comparable(x) for x in value]
    if not isinstance(value, dict) or "sizes" not in value:
        return value
    # torch_npu tags tensors NCL, NCHW and NCDHW, for convolutions. Attention knows its axes
    # from the layout argument: ND claims no more.
    assert value["format"] in (ND, NCL, NCHW, NCDHW)
    return {name: x for name, x in value.items() if name not in ("address", "format")}


def with_its_drop_mask(sample: Sample) -> Sample:
    """torch_npu draws its own dropout mask, of whole 16 bytes: the content cannot be compared."""
    drop_mask = sample.options.get("drop_mask")
    if drop_mask is None:
        return sample
    return sample.replace(drop_mask=drop_mask.new_zeros(-(-drop_mask.numel() // 16) * 16))


def with_its_lengths(sample: Sample) -> Sample:
    """A padded pack ends in 0 for the device. Users of torch_npu append it; ours leave it to us,
    but for tensors with one row per sequence."""
    if not sample.operator.startswith("flash_attention") or sample.options["layout"] != "TND":
        return sample
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
    lists = [sample.options[name].tolist() for name in names]
    tokens = (sample.inputs["query"].shape[0], sample.inputs["key"].shape[0])
    if not all(0 < ends[-1] < count for ends, count in zip(lists, tokens, strict=True)):
        return sample
    mask, slopes = (sample.options.get(name) for name in ("atten_mask", "pse_shift"))
    if (mask is not None and mask.dim() == 4) or (slopes is not None and slopes.dim() == 2):
        return sample
    closed = {name: lengths([*x, 0]) for name, x in zip(names, lists, strict=True)}
    if "prefix" in sample.options:
        closed["prefix"] = lengths([*sample.options["prefix"].tolist(), 0])
    return sample.replace(**closed)


def is_closed(sample: Sample) -> bool:
    ends = sample.options.get("actual_seq_lengths_query")
    return ends is not None and len(ends) > 1 and bool(ends[-1] == 0)


FUSED = "fused_infer_attention_score"


def is_launched_as_given(case: InferCase) -> bool:
    """Without what our launch changes for the device."""
    decoding = not case.packed and case.s[0] == 1 and not case.rope
    longer = not case.packed and any(len(x or ()) not in (0, case.b) for x in case.lengths)
    return not (decoding or longer or case.mask or case.sink == "float32")


def is_comparable(recipe: Recipe) -> bool:
    """Whether torch_npu makes the same call."""
    name, case = recipe.operator.name, recipe.case
    if recipe.operator.torch_npu is None:
        return False
    if name == "attention_update":
        return bool(case.d % 8 == 0)
    if name.startswith("flash_attention_score"):
        # It launches ropes alone by an older version.
        return not case.rope or (case.sink and case.layout == "TND")
    # CANN's functions take no paged keys beside statistics either: no sample has both.
    if name in ("sparse_flash_attention", "sparse_lightning_indexer_grad_kl_loss"):
        return recipe.on_device and case.rope > 0
    if name == FUSED:
        return (recipe.on_device or case in INT8_CASES) and is_launched_as_given(case)
    return recipe.on_device


COMPARABLE = [recipe for recipe in RECIPES if is_comparable(recipe)]


@pytest.mark.parametrize("recipe", COMPARABLE, ids=lambda recipe: recipe.id)
@pytest.mark.usefixtures("no_limits")
def test_our_call_is_torch_npus(recipe: Recipe) -> None:
    sample = with_its_drop_mask(recipe.make(torch.bfloat16)).to("npu")
    its_sample = with_its_lengths(sample)
    # torch_npu takes the 0 for a sequence when it sizes the dropout mask that it draws.
    ignored = {"dropMaskOptional"} if is_closed(its_sample) else set()
    with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
        call_theirs(its_sample)
    theirs = attention_calls(log)
    with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
        sample.call(torch.ops.ascend)
    ours = attention_calls(log)

    unequal = is_pack_gradient(recipe) and len(set(zip(*recipe.case.lengths, strict=True))) > 1
    if unequal:
        # In parts, because the kernel computes sequences of unequal lengths wrong.
        assert {entry["function"] for entry in ours} == {entry["function"] for entry in theirs}
        return
    assert [entry["function"] for entry in ours] == [entry["function"] for entry in theirs]
    for our_entry, their_entry in zip(ours, theirs, strict=True):
        function = our_entry["function"]
        assert our_entry.keys() == their_entry.keys()
        for key in our_entry.keys() - {"arguments"}:
            assert our_entry[key] == their_entry[key], (function, key)
        for name, value in our_entry.get("arguments", {}).items():
            mine, their = (comparable(x) for x in (value, their_entry["arguments"][name]))
            if name in ignored:
                continue
            if (function, name) in DELIBERATE:
                expected_mine, expected_their, _reason = DELIBERATE[function, name]
                assert expected_mine in ("*", mine), (function, name)
                assert expected_their in ("*", their), (function, name)
            else:
                assert mine == their, (function, name)
