"""Statements of docs/device.md, which were read in CANN's code and never seen.

A probe calls torch_npu's own operator, which has none of the workarounds of this library. Where
torch_npu has none, it makes the call that this library launches without a workaround. It passes if
the device does what the page says, and differs if it does something else; where the page has a
report of a device, if it computes right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from ascend_attn_ops import reference
from ascend_attn_ops._core.device_limits import limits, table
from ascend_attn_ops.reference.bounds import BOUNDS
from ascend_attn_ops.reference.call import Sample
from torch import Tensor

from ascend_attn_check.limits import refusal_of_device
from ascend_attn_check.numbers import compare
from ascend_attn_check.probe import PASS, Context, Outcome, Probe, Skip, skipping
from ascend_attn_check.samples import OPERATORS
from ascend_attn_check.samples.flash_attention_score import FlashCase
from ascend_attn_check.samples.fused_infer_attention_score import InferCase
from ascend_attn_check.samples.sparse import SparseCase
from ascend_attn_check.samples.sparse_flash_mla import MlaCase

SECTION = "known facts"
HALF = torch.bfloat16
SPARSE = ("A2", "A3", "950")
ATLAS = ("A2", "A3")

ATTENTION = SparseCase(heads=8, d=512, rope=64, k=16, absorbed=True)
PACK = replace(ATTENTION, layout="TND", lengths=((3, 2), (5, 3)), tail=(2, 1))
PAGED = replace(ATTENTION, s=(1, 48), lengths=((1, 1), (48, 33)), page=32)
LOSS = replace(ATTENTION, heads=64, k=2048, index_heads=64, index_d=128)
INDEXER = SparseCase(heads=64, d=128, k=1024)
MLA_CALL = MlaCase(b=1, s=(20, 20, 5), heads=8, d=512, ratio=4, k=512, left=127)
MASKED_DECODING = InferCase(
    layout="BSH", b=1, s=(1, 1000), lengths=(None, (1000,)), heads=(12, 12), pages="rows",
    block_size=128, mask="B1S",
)  # fmt: skip
UNMASKED_PACK = InferCase(layout="TND", lengths=((512,), (512,)), heads=(16, 16), d=128)
INDEXER_PACK = replace(INDEXER, layout="TND", lengths=((3, 2), (5, 3)), tail=(2, 1))


@dataclass(frozen=True)
class Fact:
    """A row of the page, whose last column has this id."""

    id: str
    operator: str
    run: Callable[[Context], Outcome]
    products: tuple[str, ...]
    danger: str = ""
    releases: tuple[str, ...] = ("8.5", "9.0", "9.1")


def probes(context: Context) -> Iterator[Probe]:
    device = context.product
    if device is None:
        yield skipping(SECTION, "all facts", "the facts are those of an NPU, and this is the CPU")
        return
    for fact in FACTS:
        if device.product in fact.products and device.cann in fact.releases:
            run = partial(_run, fact)
            yield Probe(SECTION, fact.operator, fact.id, run, quick=True, danger=fact.danger)


def _run(fact: Fact, context: Context) -> Outcome:
    missing = [x for x in _functions(fact.operator) if not context.has_aclnn(x)]
    if len(missing) == len(_functions(fact.operator)):
        raise Skip(f"{missing[0]} is not in this CANN")
    return fact.run(context)


def _functions(operator: str) -> list[str]:
    return next(row["aclnn"] for row in table() if row["operator"] == operator)


def theirs(sample: Sample, context: Context) -> tuple[Tensor, ...]:
    """Call torch_npu's own operator; an argument that the sample leaves out has its default."""
    operator = OPERATORS[sample.operator]
    if operator.torch_npu is None:
        raise Skip(f"torch_npu has no operator for {sample.operator}")
    defaults = {x.name: x.default_value for x in operator.overload._schema.arguments}
    placed = sample.copied_to(context.device)
    try:
        returned = operator.torch_npu({**defaults, **placed.arguments})
    except AttributeError as error:
        raise Skip(f"this torch_npu lacks it: {error}") from None
    outputs = (returned,) if isinstance(returned, Tensor) else returned
    return tuple(x.cpu() for x in outputs if isinstance(x, Tensor))


def made(operator: str, case: Any, **changes: Any) -> Sample:
    with limits(None):
        return OPERATORS[operator].make(case, HALF).given(**changes)


def as_said(seen: bool, otherwise: str) -> Outcome:
    return PASS if seen else Outcome("differs", otherwise)


def fails_instead(error: RuntimeError) -> Outcome:
    """A call that should give wrong results: the simulated device never does without an error."""
    return Outcome("note", f"the call fails instead: {str(error).splitlines()[0]}")


def ours(sample: Sample, context: Context) -> tuple[Tensor, ...]:
    """Call this library's operator, whose launch changes nothing of such a sample."""
    outputs = sample.copied_to(context.device).call(torch.ops.ascend)
    return tuple(x.cpu() for x in outputs)


def is_wrong(
    sample: Sample,
    context: Context,
    call: Callable[[Sample, Context], tuple[Tensor, ...]] = theirs,
) -> bool:
    """Whether a call of a sample gives other results than the reference, or fails."""
    try:
        outputs = call(sample, context)
        compare(sample, outputs[: len(BOUNDS[sample.operator].output_names)])
    except (AssertionError, RuntimeError):
        return True
    return False


# A number that no sample has.
PATTERN = 12345.0


def poison(shapes: list[tuple[tuple[int, ...], torch.dtype]], context: Context) -> None:
    """Leave a pattern in the memory that the allocator hands out next for these tensors."""
    tensors = [torch.full(x, PATTERN, dtype=dtype, device=context.device) for x, dtype in shapes]
    context.synchronize()
    del tensors


def padding_rows(operator: str, case: SparseCase, written: float, context: Context) -> Outcome:
    sample = made(operator, case)
    with limits(None):
        shapes = [(tuple(x.shape), x.dtype) for x in sample.call(torch.ops.ascend)]
    poison(shapes, context)
    padding = theirs(sample, context)[0][-case.tail[0] :].double()
    if bool((padding == written).all()):
        return Outcome("differs", f"the device writes {written:g} into padding rows")
    if bool((padding == torch.tensor(PATTERN).to(shapes[0][1]).double()).all()):
        return PASS
    return Outcome("pass", f"neither {written:g} nor the pattern that was left in the memory")


def unequal_packs(context: Context) -> Outcome:
    """Several packs, because a pack is computed right where no core begins in the wrong row."""
    wrong = 0
    packs = [((3, 5), (5, 9)), ((17, 40, 3), (30, 64, 3)), ((64, 1, 90), (70, 128, 90))]
    for lengths in packs:
        case = replace(INDEXER_PACK, lengths=lengths, tail=(0, 0))
        sample = made("lightning_indexer_grad", case)
        wrong += is_wrong(sample, context)
    text = f"{wrong} of {len(packs)} packs of unequal lengths are computed wrong"
    return Outcome("pass" if wrong else "note", text)


def lengths_in_bsnd(operator: str, case: SparseCase, context: Context) -> Outcome:
    """Whether lengths in BSND change nothing."""
    short = replace(case, s=(5, 7), b=2, lengths=((5, 3), (7, 4)))
    sample = made(operator, short)
    try:
        given = theirs(sample, context)
    except RuntimeError as error:
        return fails_instead(error)
    without = sample.replace(actual_seq_lengths_query=None, actual_seq_lengths_key=None)
    ignored = theirs(without, context)
    same = all(torch.equal(x, y) for x, y in zip(given, ignored, strict=True))
    return as_said(same, "the lengths change the results")


def slots_behind_padding(context: Context) -> Outcome:
    """In a row of 32 slots, of which the third is -1."""
    case = replace(ATTENTION, s=(1, 32), b=1, k=32, mode=0)
    sample = made("sparse_flash_attention", case)
    indices = torch.arange(32, dtype=torch.int32).view(sample.arguments["sparse_indices"].shape)
    indices.view(-1)[2] = -1
    sample = sample.replace(sparse_indices=indices)
    return as_said(is_wrong(sample, context), "the first -1 ends the row")


def cut_block(context: Context) -> Outcome:
    """With the cut block in the first slot of each row."""
    block = 16
    case = replace(ATTENTION, s=(4, 5 * block + 1), block=block, k=6, mode=0, b=1)
    sample = made(SFA, case)
    indices = torch.arange(5, -1, -1, dtype=torch.int32)
    indices = indices.expand(sample.arguments["sparse_indices"].shape).contiguous()
    sample = sample.replace(sparse_indices=indices)
    outputs = sample.call(reference)
    saved = dict(zip(("out", "softmax_max", "softmax_sum"), outputs, strict=True))
    sample = sample.of_gradient(d_out=outputs[0], **saved)
    return as_said(is_wrong(sample, context), "a cut block may stand anywhere")


def nothing_selected(block: int, context: Context) -> Outcome:
    case = replace(ATTENTION, s=(4, 8 * block), block=block, k=4, mode=0, b=1)
    sample = made("sparse_flash_attention", case)
    indices = torch.full_like(sample.arguments["sparse_indices"], -1)
    try:
        out, softmax_max, *_ = theirs(sample.replace(sparse_indices=indices), context)
    except RuntimeError as error:
        return Outcome("pass", str(error))
    if block >= 8:
        return as_said(bool(out.isinf().all()), f"the output is {float(out.flatten()[0]):g}")
    seen = bool((softmax_max < -1e38).all()) and bool((out.abs() < 1e-20).all())
    return as_said(seen, f"softmax_max is {float(softmax_max.flatten()[0]):g}")


def mask_beside_tokens(context: Context) -> Outcome:
    """A mask that lets everything through, and tokens that exclude most of a tile."""
    sample = made("flash_attention_score", FlashCase(s=(16, 16), mode=0, mask="", d=(16, 16)))
    open_mask = torch.zeros_like(sample.arguments["atten_mask"])
    sample = sample.replace(atten_mask=open_mask, pre_tokens=2, next_tokens=1)
    try:
        outputs = theirs(sample, context)[:1]
    except RuntimeError as error:
        return fails_instead(error)
    everything = sample.replace(pre_tokens=2**31 - 1, next_tokens=2**31 - 1)
    expected = theirs(everything, context)[:1]
    return as_said(torch.equal(outputs[0], expected[0]), "the tokens count within a tile")


def gaps_between_rows(context: Context) -> Outcome:
    """A slice of a fused qkv, through torch_npu's operator."""
    npu = torch.ops.npu
    if not hasattr(npu, "npu_scatter_pa_kv_cache"):
        raise Skip("this torch_npu lacks npu_scatter_pa_kv_cache")
    fused = torch.arange(5 * 3 * 2 * 32).view(5, 3, 2, 32).to(torch.float16)
    placed = fused.to(context.device)
    caches = [torch.zeros(4, 16, 2, 32, dtype=fused.dtype, device=context.device) for _ in range(2)]
    slots = torch.arange(5, dtype=torch.int32, device=context.device)
    try:
        npu.npu_scatter_pa_kv_cache(placed[:, 1], placed[:, 2], *caches, slots, cache_mode="Norm")
        written = caches[0].cpu().view(64, 2, 32)[:5]
    except RuntimeError as error:
        return Outcome("refused", str(error))
    return as_said(not torch.equal(written, fused[:, 1]), "the rows are right")


def masked_rows(context: Context) -> Outcome:
    """Rows that the content of a mask masks whole, through this library's launch of V3."""
    if not context.has_aclnn("aclnnPromptFlashAttentionV3"):
        raise Skip("aclnnPromptFlashAttentionV3 is not in this CANN")
    query = torch.ones(1, 2, 4, 16, dtype=torch.float16, device=context.device)
    mask = torch.ones(4, 4, dtype=torch.bool, device=context.device)
    try:
        out = torch.ops.ascend.prompt_flash_attention(
            query, query, query, num_heads=2, layout="BNSD", scale_value=0.25, atten_mask=mask
        )
    except NotImplementedError as error:  # of the limits
        return Outcome("refused", str(error))
    return as_said(bool((out.cpu() == 0).all()), f"such a row is {float(out.flatten()[0]):g}")


def every_prompt_call(context: Context) -> Outcome:
    """By torch_npu's operator: this library launches another function there."""
    query = torch.ones(1, 2, 4, 16, dtype=torch.float16, device=context.device)
    try:
        torch.ops.npu.npu_prompt_flash_attention(
            query, query, query, num_heads=2, input_layout="BNSD", scale_value=0.25
        )
        context.synchronize()
    except RuntimeError as error:
        return Outcome("pass", str(error))
    return Outcome("differs", "the call is accepted")


def gradient_of_wide_keys(context: Context) -> Outcome:
    """In layout SBH from B * N = 256 on, by torch_npu's operator."""
    case = FlashCase(layout="SBH", b=4, s=(1, 1), heads=(64, 64), d=(192, 128))
    sample = made("flash_attention_score_grad", case)
    try:
        theirs(sample, context)
    except RuntimeError as error:
        return Outcome("pass", str(error))
    return Outcome("differs", "the gradient is accepted")


def takes(operator: str, case: SparseCase, accepted: bool, context: Context) -> Outcome:
    """Whether CANN takes a call of torch_npu's operator."""
    sample = made(operator, case)
    if case.page:
        sample = sample.replace(return_softmax_lse=True)
    try:
        theirs(sample, context)
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
        return Outcome("differs", refused) if accepted else Outcome("pass", refused)
    return as_said(accepted, "the call is accepted")


def dangerous(operator: str, case: SparseCase, context: Context) -> Outcome:
    """A call that the page says the device does not survive, or computes wrong."""
    return as_said(is_wrong(made(operator, case), context), "the device computes it right")


def wrong_of_mla(operator: str, case: MlaCase, context: Context) -> Outcome:
    return as_said(is_wrong(made(operator, case), context, ours), "the device computes it right")


def deterministic_context(context: Context) -> Outcome:
    """In its first phase, without the limits, which refuse the call as well."""
    arguments = made("sparse_flash_mla_grad", MLA_CALL).given(deterministic=True).arguments
    with limits(None):
        refused = refusal_of_device("sparse_flash_mla_grad", arguments, context)
    return Outcome("pass", refused) if refused else Outcome("differs", "the call is accepted")


def reported(case: InferCase, context: Context) -> Outcome:
    """A call of this library that a report says a device computes wrong. A mask keeps 600 keys."""
    sample = made(FIA, case)
    if case.mask:
        mask = torch.arange(case.room).view(1, 1, 1, -1) >= 600
        sample = sample.replace(atten_mask=mask)
    wrong = is_wrong(sample, context, ours)
    return as_said(not wrong, "the report holds here: the results are wrong")


def minus_inf_in_a_bias(context: Context) -> Outcome:
    query, key = (
        torch.ones(1, 2, s, 64, dtype=torch.float16, device=context.device) for s in (1, 768)
    )
    bias = torch.zeros(1, 2, 1, 768, dtype=query.dtype, device=context.device)
    bias[..., 700:] = -torch.inf
    try:
        out, _ = torch.ops.npu.npu_fused_infer_attention_score(
            query, key, key, pse_shift=bias, num_heads=2, input_layout="BNSD", scale=0.125
        )
        nan = bool(out.cpu().isnan().any())
    except RuntimeError as error:
        return fails_instead(error)
    return as_said(not nan, "the report holds here: the results are NaN")


def sparse(id: str, operator: str, run: Any, danger: str = "", **options: Any) -> Fact:
    return Fact(id, operator, run, options.pop("products", SPARSE), danger, **options)


def of_mla(id: str, operator: str, case: MlaCase, danger: str = "") -> Fact:
    run = partial(wrong_of_mla, operator, case)
    return Fact(id, operator, run, ATLAS, danger, ("9.1",))


LI, LIG = "lightning_indexer", "lightning_indexer_grad"
SFA, SFAG = "sparse_flash_attention", "sparse_flash_attention_grad"
KL = "sparse_lightning_indexer_grad_kl_loss"
FA, FAG = "flash_attention_score", "flash_attention_score_grad"
MLA, MLAG = "sparse_flash_mla", "sparse_flash_mla_grad"
PFA, SCATTER = "prompt_flash_attention", "scatter_pa_kv_cache_"
FIA = "fused_infer_attention_score"

NO_PAIRS = replace(INDEXER_PACK, lengths=((3, 0), (0, 5)), tail=(0, 0))
FACTS = [
    sparse("li-padding-rows", LI, partial(padding_rows, LI, INDEXER_PACK, -1)),
    sparse("li-no-pairs", LI, partial(dangerous, LI, NO_PAIRS),
           "the device writes over other tensors"),
    sparse("li-grad-k-2048", LIG, partial(dangerous, LIG, replace(INDEXER, s=(4, 4096), k=3072)),
           "the device writes over its own buffers", releases=("8.5", "9.0")),
    sparse("li-grad-mode-0", LIG, partial(dangerous, LIG, replace(INDEXER, mode=0)),
           "the device reads and writes out of bounds"),
    sparse("li-grad-tnd-unequal", LIG, unequal_packs),
    sparse("li-grad-empty-sequence", LIG, partial(dangerous, LIG, NO_PAIRS), "the process ends"),
    sparse("li-grad-lengths", LIG, partial(lengths_in_bsnd, LIG, INDEXER)),
    sparse("sfa-padding-rows", SFA, partial(padding_rows, SFA, PACK, 0)),
    sparse("sfa-slots-behind-padding", SFA, slots_behind_padding, products=ATLAS),
    sparse("sfa-without-ropes", SFA, partial(takes, SFA, replace(ATTENTION, rope=0), False),
           products=ATLAS),
    sparse("sfa-paged-statistics", SFA, partial(takes, SFA, PAGED, False), products=ATLAS),
    sparse("sfa-nothing-selected", SFA, partial(nothing_selected, 8), products=ATLAS),
    sparse("sfa-nothing-selected-small", SFA, partial(nothing_selected, 1), products=ATLAS),
    sparse("sfag-few-keys", SFAG,
           partial(dangerous, SFAG, replace(ATTENTION, s=(4, 64), pattern="padded")),
           "the device reads out of bounds"),
    sparse("sfag-cut-block", SFAG, cut_block, products=ATLAS),
    sparse("sfag-lengths", SFAG, partial(lengths_in_bsnd, SFAG, ATTENTION)),
    sparse("sfag-without-ropes", SFAG,
           partial(takes, SFAG, replace(ATTENTION, k=2048, rope=0), True), products=ATLAS),
    sparse("kl-lengths", KL, partial(lengths_in_bsnd, KL, LOSS)),
    sparse("kl-without-ropes", KL, partial(takes, KL, replace(LOSS, rope=0), False),
           products=ATLAS),
    of_mla("mla-few-indices", MLA, replace(MLA_CALL, pattern="first")),
    of_mla("mla-grad-padding", MLAG,
           replace(MLA_CALL, layout="TND", lengths=((9, 13), (9, 13), (2, 3)), tail=(3, 2, 1)),
           "the device reads behind the lengths"),
    of_mla("mla-grad-few-indices", MLAG, replace(MLA_CALL, pattern="first"),
           "the device reads out of bounds"),
    of_mla("mla-grad-residuals", MLAG, replace(MLA_CALL, b=2, residual=(0, 3))),
    of_mla("mla-grad-before-keys", MLAG, replace(MLA_CALL, s=(20, 12, 5), residual=(0,))),
    Fact("mla-grad-deterministic", MLAG, deterministic_context, ATLAS, releases=("9.1",)),
    Fact("fa-mask-beside-tokens", FA, mask_beside_tokens, ATLAS),
    Fact("fa-grad-wide-keys", FAG, gradient_of_wide_keys, ATLAS),
    Fact("pfa-masked-rows", PFA, masked_rows, ATLAS),
    Fact("pfa-950", PFA, every_prompt_call, ("950",)),
    Fact("fia-mask-behind-512", FIA, partial(reported, MASKED_DECODING), ATLAS),
    Fact("fia-pack-without-mask", FIA, partial(reported, UNMASKED_PACK), ATLAS),
    Fact("fia-minus-inf", FIA, minus_inf_in_a_bias, ATLAS),
    Fact("scatter-gaps", SCATTER, gaps_between_rows, ATLAS),
]  # fmt: skip
