"""Several threads call operators at a time, with tensors that nobody writes to."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import ascend_attn_ops
import pytest
import torch
from ascend_attn_check.gradients import outputs_and_gradients
from ascend_attn_check.samples.flash_attention_score import FlashCase
from ascend_attn_check.samples.prompt_flash_attention import PromptCase
from ascend_attn_check.samples.sparse_flash_mla import MlaCase
from fuzz.calls import check, threads
from support.samples import OPERATORS, Operator, Recipe, Sample, as_tuple
from support.tolerance import assert_same_bits
from support.turns import seed
from torch import Tensor

THREADS = 4
# Cases per operator, by turns.
CASES = 6

RETURNING = [operator for operator in OPERATORS.values() if not operator.in_place]


def results(recipe: Recipe) -> tuple[Tensor, ...]:
    """As torch.ops calls the operator, as Python does, and with its gradient."""
    sample = recipe.make(torch.float32)
    found = [*sample.call(torch.ops.ascend), *sample.call(ascend_attn_ops)]
    if recipe.differentiable:
        outputs, gradients = outputs_and_gradients(sample)
        found += [*outputs, *gradients]
    return tuple(found)


@pytest.mark.parametrize("threads_of_a_call", [1, 2])
@pytest.mark.parametrize("operator", RETURNING, ids=lambda operator: operator.name)
def test_the_bits_are_those_of_one_thread(operator: Operator, threads_of_a_call: int) -> None:
    turn = random.Random(f"{operator.name} {seed()}")
    recipes = turn.sample(operator.recipes, min(CASES, len(operator.recipes)))

    def work(first: int, together: Barrier) -> list[tuple[Tensor, ...]]:
        """Once with the recipe that the other threads have as well, once with another."""
        torch.set_num_threads(threads_of_a_call)  # of this thread
        together.wait()
        with ascend_attn_ops.limits(None):
            for number in range(len(recipes)):
                results(recipes[(first + number) % len(recipes)])
            return [results(recipe) for recipe in recipes]

    def all_of(threads: int) -> list[list[tuple[Tensor, ...]]]:
        together = Barrier(threads)
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, range(threads), [together] * threads))

    (expected,) = all_of(1)
    for found in all_of(THREADS):
        for x, y in zip(found, expected, strict=True):
            assert_same_bits(x, y)


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("before", [False, True], ids=["after import", "after a call"])
def test_a_forked_process_computes(before: bool) -> None:
    """As DataLoader's workers do. OpenMP's threads are not forked: a child that waited for them
    would be ended by the alarm."""
    x = torch.ones(1, 512, 4, 64)

    def call() -> Tensor:
        out: Tensor = ascend_attn_ops.flash_attention_score(
            x, x, x, num_heads=4, layout="BSND", scale_value=1.0
        )[0]
        return out

    with threads(2):
        if before:
            assert torch.equal(call(), x)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if torch.equal(call(), x) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(call(), x)


# The parts into which attention divides the keys of a row, and the groups of heads of a token, do

PARTED = [x for x in OPERATORS["sparse_flash_attention"].recipes if x.case.k * x.case.block > 512]

# These have more keys than one part of the dense operators.
DENSE = [
    FlashCase("BSND", b=1, s=(1, 9000), heads=(3, 3)),
    FlashCase("BSND", b=1, s=(1, 9000), heads=(8, 1)),
    FlashCase("BSND", b=2, s=(3, 8300), heads=(2, 1), mode=3),
    # Rows that keep one part, rows that keep both, and rows that keep none of the first.
    FlashCase("BNSD", b=1, s=(4200, 4200), heads=(1, 1), mode=3),
    FlashCase("BNSD", b=1, s=(600, 9000), heads=(1, 1), mode=4, pre=5000, next=-100),
    FlashCase("TND", lengths=((1, 0, 2), (8200, 0, 4097)), heads=(2, 2)),
    PromptCase("BNSD", b=1, s=(1, 9000), heads=(8, 2)),
    PromptCase("BNSD", b=1, s=(700, 9000), heads=(1, 1), mode=4, pre=5000, next=-100),
    PromptCase(
        "BNSD", b=1, s=(700, 9000), heads=(1, 1), mode=4, pre=5000, next=-100, inputs="int8"
    ),
]

# Tokens few enough for their heads to be divided, into 2 and more groups, or not at all.
FEW_TOKENS = [
    MlaCase(b=1, s=(1, 200, 50), heads=64, d=32, ratio=4, k=40, left=100),
    MlaCase(kind="hca", s=(1, 130, 1), heads=256, ratio=128, left=127),
    MlaCase(kind="swa", b=1, s=(3, 700, 0), heads=128, left=600),
    MlaCase(kind="swa", b=1, s=(1, 90, 0), heads=96, left=70, sink=False),
]


def same_for_any_number_of_threads(sample: Sample) -> tuple[torch.Tensor, ...]:
    with threads(1):
        expected = as_tuple(sample.call(torch.ops.ascend))
    for count in (2, 3, 7):
        with threads(count):
            assert all(map(torch.equal, as_tuple(sample.call(torch.ops.ascend)), expected))
    return expected


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("recipe", PARTED, ids=lambda x: x.id)
def test_any_number_of_threads(recipe: Recipe, dtype: torch.dtype) -> None:
    same_for_any_number_of_threads(recipe.make(dtype))


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", FEW_TOKENS, ids=lambda x: x.id)
def test_few_tokens_of_many_heads(case: MlaCase, dtype: torch.dtype) -> None:
    sample = OPERATORS["sparse_flash_mla"].make(case, dtype)
    check(sample, same_for_any_number_of_threads(sample))


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", DENSE, ids=lambda x: x.id)
def test_dense_attention(case: FlashCase | PromptCase, dtype: torch.dtype) -> None:
    name = "flash_attention_score" if isinstance(case, FlashCase) else "prompt_flash_attention"
    sample = OPERATORS[name].make(case, dtype)
    check(sample, same_for_any_number_of_threads(sample))


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("heads", [4, 64, 128])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_token_alone_and_among_others(count: int, heads: int) -> None:
    """Decoding one sequence, whose parts and heads threads share, and a batch of them."""
    batch, keys = 13, 1500
    query, cache = torch.randn(batch, 1, heads, 32), torch.randn(batch, keys, 1, 32)
    indices = torch.stack([torch.randperm(keys)[:1200] for _ in range(batch)])
    indices = indices.int().view(batch, 1, 1, 1200)
    with threads(count):
        together = torch.ops.ascend.sparse_flash_attention(
            query, cache, cache, indices, scale_value=0.2
        )
        for b in range(batch):
            alone = torch.ops.ascend.sparse_flash_attention(
                *(x[b : b + 1] for x in (query, cache, cache, indices)), scale_value=0.2
            )
            assert torch.equal(alone[0][0], together[0][b])
            for x, y in zip(alone[1:], together[1:], strict=True):
                assert torch.equal(x, y[b : b + 1])
