"""Our aclnn calls are those of torch_npu's own operators, argument by argument.

torch_npu calls the same functions of the same library: an oracle that nobody here wrote.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import cann_simulator
import pytest
import torch
from conftest import TASK_QUEUE
from device_samples import DEVICE_RECIPES, first, is_divided, is_pack_gradient
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
    lists = [sample.options[name] for name in names]
    tokens = (sample.inputs["query"].shape[0], sample.inputs["key"].shape[0])
    if not all(0 < ends[-1] < count for ends, count in zip(lists, tokens, strict=True)):
        return sample
    mask, slopes = (sample.options.get(name) for name in ("atten_mask", "pse_shift"))
    if (mask is not None and mask.dim() == 4) or (slopes is not None and slopes.dim() == 2):
        return sample
    closed = {name: [*x, 0] for name, x in zip(names, lists, strict=True)}
    if sample.options.get("prefix"):
        closed["prefix"] = [*sample.options["prefix"], 0]
    return sample.replace(**closed)


def is_closed(sample: Sample) -> bool:
    lengths = sample.options.get("actual_seq_lengths_query")
    return isinstance(lengths, list) and len(lengths) > 1 and lengths[-1] == 0


COMPARABLE = [
    r
    for r in RECIPES
    if r.operator.torch_npu and (r.operator.torch_npu_takes or r.operator.on_device)(r.case)
]


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
    if unequal or is_divided(recipe):
        # In parts, because the kernel computes sequences of unequal lengths, or so many, wrong.
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


# The limits refuse a deterministic gradient that the device refuses.
NOT_DETERMINISTIC = ("sparse_flash_mla_grad", "sparse_lightning_indexer_kl_loss_grad")
CAN_BE_DETERMINISTIC = [r for r in DEVICE_RECIPES if r.operator.name not in NOT_DETERMINISTIC]


@pytest.mark.parametrize("recipe", CAN_BE_DETERMINISTIC, ids=lambda recipe: recipe.id)
def test_determinism_reaches_the_device(recipe: Recipe) -> None:
    """torch.use_deterministic_algorithms, as it was when the operator was called."""
    sample: Sample = recipe.make(torch.bfloat16).to("npu")
    for on in (True, False):
        with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
            torch.use_deterministic_algorithms(on)
            try:
                sample.call(torch.ops.ascend)
            finally:
                # At level 2 the first phase runs later, on the thread of the queue.
                torch.use_deterministic_algorithms(False)
        calls = [entry for entry in attention_calls(log) if entry["phase"] == 1]
        # The metadata of a call is another one.
        launches = [entry for entry in calls if not entry["function"].endswith("Metadata")]
        assert len(launches) == 1 or is_pack_gradient(recipe) or is_divided(recipe)
        for call in calls:
            assert call["deterministic"] == on
            assert call["arguments"].get("deterministic", on) == on


def steps(log: list[dict[str, Any]]) -> list[str]:
    return [str(entry.get("step", entry.get("phase"))) for entry in log]


@pytest.mark.parametrize(
    "recipe", [r for r in COMPARABLE if r.on_device], ids=lambda recipe: recipe.id
)
def test_the_thread_is_prepared_as_torch_npu_prepares_it(recipe: Recipe) -> None:
    """Around the first phase: which functions reuse executors, and which switch that off."""
    sample: Sample = recipe.make(torch.bfloat16).to("npu")
    with cann_simulator.computing(False), cann_simulator.keeping_executors():
        with cann_simulator.recorded_calls() as log:
            call_theirs(sample)
        theirs = steps(log)
    with cann_simulator.computing(False), cann_simulator.keeping_executors():
        with cann_simulator.recorded_calls() as log:
            sample.call(torch.ops.ascend)
        ours = steps(log)
    # On the caller's thread the second phase and what follows it come when the queue gets there.
    calls = Counter(x["phase"] for x in attention_calls(log))
    assert Counter(ours) >= Counter(theirs)
    # Ours computes some packed sequences one after another.
    assert calls[1] > 1 or len(ours) == len(theirs)
    assert ours[: ours.index("1") + 1] == theirs[: theirs.index("1") + 1]
    reuses = int(recipe.operator.keeps_executors)
    key = f"SetPTACacheHashKey {reuses}" if TASK_QUEUE == 2 else f"SetPTAHashKey {reuses}"
    assert key in ours[: ours.index("1")]


KEEPING_EXECUTORS = [r for r in DEVICE_RECIPES if r.operator.keeps_executors]


@pytest.mark.parametrize("recipe", KEEPING_EXECUTORS, ids=lambda recipe: recipe.id)
@pytest.mark.usefixtures("no_leak")
def test_a_call_with_other_tensors_reuses_the_executor(recipe: Recipe) -> None:
    """No first phase, as in torch_npu; the result is that of the tensors of this call."""
    sample: Sample = recipe.make(torch.bfloat16)
    with cann_simulator.keeping_executors():
        sample.to("npu").call(torch.ops.ascend)
        name, given = next(iter(sample.tensors.items()))
        sample = sample.replace(**{name: given * 0.5})
        on_npu = sample.to("npu")
        with cann_simulator.recorded_calls() as log:
            outputs = on_npu.call(torch.ops.ascend)
        with cann_simulator.computing(False), cann_simulator.recorded_calls() as their_log:
            for _ in range(2):
                call_theirs(on_npu)
    assert [x["phase"] for x in attention_calls(log)] == [2]
    assert [x["phase"] for x in attention_calls(their_log)] == [1, 2, 2]
    for x, y in zip(outputs, sample.call(torch.ops.ascend), strict=True):
        assert torch.equal(x.cpu(), y)


def test_another_argument_has_an_executor_of_its_own() -> None:
    sample: Sample = first("flash_attention_score").make(torch.bfloat16).to("npu")

    def call() -> None:
        sample.call(torch.ops.ascend)
        # Or the queue's second phase comes after the first phase of the next call.
        torch.npu.synchronize()

    with (
        cann_simulator.computing(False),
        cann_simulator.keeping_executors(),
        cann_simulator.recorded_calls() as log,
    ):
        call()
        for change in ({"scale_value": 0.375}, {"pre_tokens": 2147483646}):
            sample = sample.replace(**change)
            call()
        other_stream = torch.npu.Stream()
        with torch.npu.stream(other_stream):
            call()
        call()
    assert [x["phase"] for x in attention_calls(log)] == [1, 2] * 4 + [2]
