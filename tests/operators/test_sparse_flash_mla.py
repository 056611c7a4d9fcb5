"""sparse_flash_mla against one masked softmax over all pairs, in float64, and its own rules."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.samples.sparse_flash_mla import DEVICE, SPARSE_FLASH_MLA, MlaCase
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

# Windows and compressed keys of six queries, by hand: left = 2, four tokens per compressed key.
PICTURE = ["o.....|.", "oo....|.", "ooo...|.", ".ooo..|c", "..ooo.|c", "...ooo|c"]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def picture_mask() -> Tensor:
    rows = [[x in "oc" for x in line.replace("|", "")] for line in PICTURE]
    return torch.tensor(rows)


def masked_softmax(
    query: Tensor, kv: Tensor, mask: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Out (S, N, D) and probabilities (N, S, keys) of kv (keys, D), with a sink."""
    scores = scale * torch.einsum("snd,kd->nsk", query, kv)
    scores = scores.masked_fill(~mask, -torch.inf)
    logits = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:2], 1)), -1)
    probabilities = torch.softmax(logits, -1)[..., :-1]
    return torch.einsum("nsk,kd->snd", probabilities, kv), probabilities


@pytest.mark.parametrize("indices", [None, [[0]] * 6, [[-1]] * 3 + [[0]] * 3], ids=str)
def test_the_picture_of_the_specification(indices: list[list[int]] | None) -> None:
    query, kv, sink = normal(6, 4, 8), normal(7, 8, seed=1), normal(4, seed=2)
    leaves = [x.requires_grad_() for x in (query, kv, sink)]
    given = None if indices is None else torch.tensor([indices], dtype=torch.int32)
    out, lse = ops.sparse_flash_mla(
        query[None], kv[None, :6, None], kv[None, 6:, None], given,
        scale_value=0.3, sink=sink, cmp_ratio=4, ori_win_left=2,
    )  # fmt: skip
    d_out = normal(6, 4, 8, seed=3)
    gradients = torch.autograd.grad(out, leaves, d_out[None])
    expected, probabilities = masked_softmax(query, kv, picture_mask(), sink, 0.3)
    torch.testing.assert_close(out[0], expected, rtol=1e-12, atol=1e-12)
    kept = probabilities.sum(-1).detach()
    torch.testing.assert_close(
        torch.exp(sink.detach()[:, None] - lse[0, 0].T), 1 - kept, rtol=1e-11, atol=1e-12
    )
    wanted = torch.autograd.grad(expected, leaves, d_out)
    torch.testing.assert_close(gradients, wanted, rtol=1e-11, atol=1e-12)


def test_the_target_of_the_indexer_is_the_mean_probability() -> None:
    query, kv, sink = normal(6, 4, 8), normal(7, 8, seed=1), normal(4, seed=2)
    indices = torch.tensor([[[0, -1]] * 6], dtype=torch.int32)
    options: dict[str, Any] = {
        "scale_value": 0.3, "sink": sink, "cmp_ratio": 4, "ori_win_left": 2,
    }  # fmt: skip
    inputs = query[None], kv[None, :6, None], kv[None, 6:, None], indices
    out, lse = ops.sparse_flash_mla(*inputs, **options)
    *_, mass = ops.sparse_flash_mla_grad(*inputs, torch.zeros_like(out), out, lse, **options)
    _, probabilities = masked_softmax(query, kv, picture_mask(), sink, 0.3)
    expected = torch.stack((probabilities[:, :, 6].mean(0), torch.zeros(6)), -1)
    torch.testing.assert_close(mass[0], expected, rtol=1e-12, atol=1e-12)


def sample(**changes: Any) -> Any:
    return SPARSE_FLASH_MLA.make(MlaCase(**changes), torch.float64)


def test_a_derived_residual_is_that_of_the_original_keys() -> None:
    made = sample()
    derived = made.call(torch.ops.ascend)
    given = made.replace(cmp_residual_kv=torch.tensor([1, 1], dtype=torch.int32))
    assert all(map(torch.equal, derived, given.call(torch.ops.ascend)))
    other = made.replace(cmp_residual_kv=torch.tensor([0, 0], dtype=torch.int32))
    assert not torch.equal(derived[0], other.call(torch.ops.ascend)[0])


def test_sequences_shorter_than_the_ratio_see_their_window() -> None:
    short = sample(kind="hca", ratio=4, s=(3, 3, 0))
    window = short.replace(cmp_kv=None)
    assert all(map(torch.equal, *(x.call(torch.ops.ascend) for x in (short, window))))


def test_arguments_of_compressed_keys_are_ignored_without_them() -> None:
    made = sample(kind="swa")
    other = made.given(cmp_ratio=7, cmp_mask_mode=2)
    assert all(map(torch.equal, *(x.call(torch.ops.ascend) for x in (made, other))))


def test_a_gradient_needs_no_returned_lse() -> None:
    made = sample().requires_grad(("query", "ori_kv"))
    gradients = []
    for returned in (True, False):
        out, lse = made.given(return_softmax_lse=returned).call(torch.ops.ascend)
        assert lse.requires_grad == (lse.numel() > 0) == returned
        leaves = [made.inputs["query"], made.inputs["ori_kv"]]
        gradients.append(torch.autograd.grad(out.sum(), leaves))
    assert all(map(torch.equal, *gradients))


def test_pages_have_no_gradient() -> None:
    made = sample(lengths=((5, 3), (7, 4), (3, 2)), page=16).requires_grad(("query",))
    with pytest.raises(NotImplementedError, match="sparse_flash_mla: layout_kv: expected keys"):
        made.call(torch.ops.ascend)


def test_a_sink_of_minus_infinity_is_none() -> None:
    made = sample()
    none = made.replace(sink=None).call(torch.ops.ascend)
    infinite = made.replace(sink=torch.full((4,), -torch.inf, dtype=torch.float64))
    assert all(map(torch.equal, none, infinite.call(torch.ops.ascend)))


@pytest.mark.parametrize("warn_only", [True, False])
def test_deterministic_algorithms_on_a2(warn_only: bool, set_determinism: Any) -> None:
    made = SPARSE_FLASH_MLA.make(DEVICE, torch.bfloat16).requires_grad(("query",))
    set_determinism(True, warn_only=warn_only)
    with ops.limits("A2"):
        out, _ = made.call(torch.ops.ascend)
        if warn_only:
            out.sum().backward()
        else:
            with pytest.raises(ValueError, match="sparse_flash_mla_grad: deterministic"):
                out.sum().backward()


@pytest.mark.parametrize(
    ("device", "has"), [(("A2", "9.1"), True), (("A3", "9.1"), True), (("A2", "9.0"), False),
                        (("950", "9.1"), False)], ids=str,
)  # fmt: skip
def test_devices_that_have_it(device: tuple[str, str], has: bool) -> None:
    made = SPARSE_FLASH_MLA.make(DEVICE, torch.bfloat16)
    with ops.limits(*device):
        if has:
            made.call(torch.ops.ascend)
        else:
            with pytest.raises(NotImplementedError, match="aclnnSparseFlashMla"):
                made.call(torch.ops.ascend)
