"""The context of a call changes what is documented, and no other bit: autocast, inference mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random

import ascend_attn_ops
import torch
from ascend_attn_check.gradients import differentiable_names, outputs_and_gradients
from ascend_attn_check.samples import (
    fused_infer_attention_score,
    prompt_flash_attention,
    scatter_pa_kv_cache,
)
from support.autocast import cast
from support.samples import OPERATORS, Sample, bytes_of
from torch import Tensor

from . import draw, valid_autograd
from .case import Case, Finding
from .outcome import Outcome, run
from .valid_dense import prompt_case
from .valid_infer import infer_case
from .valid_update import cache_case, update_call

HALF = (torch.bfloat16, torch.float16)

Build = Callable[[Random, torch.dtype], Sample]


def prompt(random: Random, dtype: torch.dtype) -> Sample:
    return prompt_flash_attention.build(prompt_case(random, quantized=False), dtype)


def infer(random: Random, dtype: torch.dtype) -> Sample:
    return fused_infer_attention_score.build(infer_case(random), dtype)


CAST: dict[str, Build] = {
    "flash_attention_score": valid_autograd.flash, "fused_infer_attention_score": infer,
    "lightning_indexer": valid_autograd.indexer, "prompt_flash_attention": prompt,
    "sparse_flash_attention": valid_autograd.sparse,
    "sparse_lightning_indexer_grad_kl_loss": valid_autograd.loss,
}  # fmt: skip
ALL: dict[str, Build] = {**CAST, "attention_update": update_call}


def outcome(call: Callable[[], Sequence[Tensor]]) -> Outcome:
    return run(lambda: tuple(call()), (), {})


def compare(what: str, actual: Outcome, expected: Outcome) -> None:
    """Results of the same bits, or errors of the same text."""
    if (actual.error is None) != (expected.error is None) or actual.text != expected.text:
        raise Finding(f"{what}: {actual.text}, expected {expected.text}")
    for number, (x, y) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        if x.dtype != y.dtype or x.shape != y.shape or not torch.equal(bytes_of(x), bytes_of(y)):
            raise Finding(f"{what}: result {number} differs, {x.dtype} and {y.dtype}")


def mixed(sample: Sample, random: Random) -> Sample:
    """Some of its tensors of floating point in other dtypes; one that is passed twice stays one."""

    def change(x: Tensor) -> Tensor:
        if not x.is_floating_point() or random.random() < 0.6:
            return x
        return x.to(random.choice((*HALF, torch.float32)))

    return sample.map(change)


def autocast_case(build: Build) -> Case:
    """As of tensors that were cast by hand; gradients have the dtype of their tensor."""

    def autocast(random: Random) -> str:
        sample = build(random, random.choice((torch.float32, torch.float32, *draw.DTYPES)))
        if random.random() < 0.5:
            sample = mixed(sample, random)
        region, enabled = random.choice(HALF), random.random() < 0.8
        namespace = random.choice((ascend_attn_ops, torch.ops.ascend))
        by_hand = cast(sample, region) if enabled else sample
        gradient = OPERATORS[sample.operator].gradient
        every = differentiable_names(sample) if gradient else ()
        names = random.sample(every, random.randint(0, len(every)))
        regions = [
            (random.choice(HALF), random.random() < 0.5) for _ in range(random.randint(0, 1))
        ]

        def call(leaf: Sample) -> tuple[Tensor, ...]:
            with ExitStack() as stack:
                for dtype, on in (*regions, (region, enabled)):
                    stack.enter_context(torch.autocast("cpu", dtype, enabled=on))
                return leaf.call(namespace)

        def results(x: Sample, call: Callable[[Sample], tuple[Tensor, ...]]) -> list[Tensor]:
            outputs, gradients = outputs_and_gradients(x, names, call)
            dtypes = [sample.tensors[name].dtype for name in names]
            # The cast of a result loses the same digits on both sides.
            return [*outputs, *(g.to(d) for g, d in zip(gradients, dtypes, strict=True))]

        expected = outcome(lambda: results(by_hand, lambda leaf: leaf.call(namespace)))
        what = f"{sample.operator} {sample.id} in {region}, enabled {enabled}, of {names}"
        compare(what, outcome(lambda: results(sample, call)), expected)
        label = f"{draw.name_of(region)} {'on' if enabled else 'off'}"
        return f"{label} refused" if expected.error else label

    return autocast


def inference_case(build: Build) -> Case:
    """The results are those of grad mode, in both modes also of tensors made in the other."""

    def inference(random: Random) -> str:
        sample = build(random, random.choice(draw.DTYPES))
        namespace = random.choice((ascend_attn_ops, torch.ops.ascend))
        expected = outcome(lambda: sample.call(namespace))
        with torch.inference_mode():
            made = sample.map(lambda x: x.clone() if random.random() < 0.6 else x)
        inside = random.random() < 0.6
        with torch.inference_mode(inside):
            actual = outcome(lambda: made.call(namespace))
            if any(x.is_inference() != inside for x in actual.outputs):
                raise Finding(f"{sample.operator} {sample.id}: a result of the other mode")
        compare(f"{sample.operator} {sample.id}, inside {inside}", actual, expected)
        return "inside" if inside else "outside"

    return inference


def inference_cache(random: Random) -> str:
    """Writes to caches: in grad mode torch refuses it of tensors that inference mode made."""
    dtype = random.choice((torch.float16, torch.bfloat16, torch.int8))
    sample = scatter_pa_kv_cache.build(cache_case(random, dtype), dtype)
    caches = [name for name in sample.tensors if name.endswith("_cache")]

    def written(x: Sample) -> list[Tensor]:
        x.call(random.choice((ascend_attn_ops, torch.ops.ascend)))
        return [x.tensors[name].clone() for name in caches]

    def copied() -> Sample:
        return sample.replace(**{name: sample.tensors[name].clone() for name in caches})

    expected = outcome(lambda: written(copied()))
    made_inside, inside = random.random() < 0.5, random.random() < 0.5
    with torch.inference_mode(made_inside):
        copy = copied()
    with torch.inference_mode(inside):
        actual = outcome(lambda: written(copy))
    if made_inside and not inside:
        if "_cache: expected a tensor that may be written to here" not in actual.text:
            raise Finding(f"{sample.id}: {actual.text}, expected no write to an inference tensor")
    else:
        compare(f"{sample.id}, made {made_inside}, inside {inside}", actual, expected)
    return f"made {'inside' if made_inside else 'outside'}, {'inside' if inside else 'outside'}"


CASES: dict[str, Case] = {
    **{f"contexts/autocast/{name}": autocast_case(build) for name, build in CAST.items()},
    **{f"contexts/inference/{name}": inference_case(build) for name, build in ALL.items()},
    "contexts/inference/scatter_pa_kv_cache_": inference_cache,
}
