"""Autograd gives the bits of the gradient operators, for whatever tensors are asked for."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from ascend_attn_check.gradients import (
    differentiable_names,
    incoming_gradients,
    outputs_and_gradients,
)
from ascend_attn_check.samples import lightning_indexer
from ascend_attn_check.samples import sparse_lightning_indexer_grad_kl_loss as kl_loss
from support.samples import OPERATORS, Sample, bytes_of, named_tensors

from . import draw
from .calls import poisoned_memory
from .case import Case, Finding
from .valid_dense import flash_call, flash_case
from .valid_sparse import forward_of, mla_call, mla_with_lse, sparse_case
from .valid_update import update_call


def flash(random: Random, dtype: torch.dtype) -> Sample:
    case = flash_case(random)
    while case.pse == "key" and case.b > 1:  # the gradient wants a bias for each batch
        case = flash_case(random)
    return flash_call(random, case, dtype)


def sparse(random: Random, dtype: torch.dtype) -> Sample:
    return forward_of(random, sparse_case(random, gradient=True), dtype)


def mla(random: Random, dtype: torch.dtype) -> Sample:
    return mla_call(random, mla_with_lse(random), dtype)


def indexer(random: Random, dtype: torch.dtype) -> Sample:
    return lightning_indexer.build(sparse_case(random), dtype)


def loss(random: Random, dtype: torch.dtype) -> Sample:
    patterns = ("random", "padded", "duplicates")
    return kl_loss.build(sparse_case(random, patterns, loss=True, gradient=True), dtype)


def case_of(build: Callable[[Random, torch.dtype], Sample]) -> Case:
    def autograd(random: Random) -> str:
        sample = build(random, random.choice(draw.DTYPES))
        every = differentiable_names(sample)
        # Gradients come in the order of the arguments, so names must, too.
        chosen = set(random.sample(every, random.randint(1, len(every))))
        names = [name for name in every if name in chosen]
        with poisoned_memory(0x80):
            outputs, actual = outputs_and_gradients(sample, names)
        gradient = OPERATORS[sample.operator].gradient
        assert gradient is not None
        assert gradient.backward is not None
        with poisoned_memory(0xFF):
            plain = sample.call(torch.ops.ascend)
            results = gradient.backward(sample, plain, *incoming_gradients(sample, plain))
        expected = named_tensors(dict(zip(gradient.inputs, results, strict=True)))
        pairs = [
            (f"gradient of {name}", x, expected[name])
            for name, x in zip(names, actual, strict=True)
        ]
        pairs += [(f"output {i}", x, plain[i]) for i, x in enumerate(outputs)]
        for name, x, y in pairs:
            if (
                x.dtype != y.dtype
                or x.shape != y.shape
                or not torch.equal(bytes_of(x), bytes_of(y))
            ):
                raise Finding(f"{sample.operator} {sample.id}, of {names}: {name} differs")
        return f"{len(names)} of {len(every)}"

    return autograd


CASES: dict[str, Case] = {
    "valid/autograd/attention_update": case_of(update_call),
    "valid/autograd/flash_attention_score": case_of(flash),
    "valid/autograd/lightning_indexer": case_of(indexer),
    "valid/autograd/sparse_flash_attention": case_of(sparse),
    "valid/autograd/sparse_flash_mla": case_of(mla),
    "valid/autograd/sparse_lightning_indexer_grad_kl_loss": case_of(loss),
}
