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
from ascend_attn_ops.check.gradients import outputs_and_gradients
from fuzz.calls import threads
from support.samples import OPERATORS, Operator, Recipe
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
