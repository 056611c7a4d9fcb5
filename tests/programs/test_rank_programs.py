"""Programs on two ranks, against one process with all sequences in float64."""

from __future__ import annotations

import copy
from unittest.mock import patch

import dense_model
import dsa_model
import plain
import pytest
import rank_programs
import torch
from support.processes import on_ranks, skip_unless_gloo_averages
from torch.distributed import ProcessGroup


def fully_sharded(group: ProcessGroup, sparse: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if sparse else torch.float32
    model = (dsa_model.SparseLM() if sparse else dense_model.DenseLM()).to(dtype)
    judge = copy.deepcopy(model).double()
    text = torch.randint(dense_model.VOCABULARY, (4, 24))
    rank_programs.shard_model(model, group.size(), compiled)
    with plain.compiling_anew():
        dense_model.train_step(model, text.chunk(2)[group.rank()])
    with (
        patch.object(dsa_model, "sparse_attention", plain.of_all_keys),
        patch.object(dense_model, "attention", plain.attention),
    ):
        dense_model.train_step(judge, text)
    parameters = dict(model.named_parameters())
    for name, parameter in judge.named_parameters():
        plain.assert_close(parameters[name].grad.full_tensor(), parameter.grad, dtype, name)


@pytest.mark.parametrize("compiled", [False, True])
def test_fully_sharded_dense_model(compiled: bool) -> None:
    skip_unless_gloo_averages()
    on_ranks(2, fully_sharded, False, compiled)


@pytest.mark.smoke
def test_fully_sharded_sparse_model() -> None:
    skip_unless_gloo_averages()
    on_ranks(2, fully_sharded, True, False)


def shared(group: ProcessGroup) -> None:
    torch.manual_seed(0)
    model = dsa_model.SparseLM().bfloat16()
    judge = copy.deepcopy(model).double()
    text = torch.randint(dense_model.VOCABULARY, (26,))
    losses = rank_programs.shared_sequences(model, text, [26], group)
    expected = []

    def attention(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, loss = plain.of_all_keys(*args)
        expected.append(loss.detach())
        return out, loss

    with patch.object(dsa_model, "sparse_attention", attention):
        dense_model.train_step(judge, text[None])
    plain.assert_close(losses, torch.stack(expected), torch.bfloat16, "losses of the indexers")
    plain.assert_same_gradients(model, judge, torch.bfloat16)


@pytest.mark.smoke
def test_shared_sequences() -> None:
    on_ranks(2, shared)
