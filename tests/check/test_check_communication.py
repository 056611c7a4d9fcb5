"""The section `communication` of the check: the distributed operators against one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ascend_attn_ops.check import communication
from ascend_attn_ops.check.probe import Context, Outcome
from ascend_attn_ops.distributed import _check

CPU = Context("cpu")


@pytest.fixture(autouse=True)
def fresh_ranks() -> Iterator[None]:
    communication._of_ranks.cache_clear()
    yield
    communication._of_ranks.cache_clear()


def outcomes(names: set[str]) -> dict[str, Outcome]:
    return {x.name: x.run(CPU) for x in communication.probes(CPU) if x.name in names}


def test_the_sparse_operators_equal_those_of_one_device() -> None:
    found = outcomes(set(communication.SPARSE_OPERATORS))
    assert {name: x.verdict for name, x in found.items()} == dict.fromkeys(
        communication.SPARSE_OPERATORS, "pass"
    )
    assert communication._of_ranks.cache_info().misses == 1, "the ranks start once"
    texts = {name: x.text for name, x in found.items()}
    assert "keys differs in 0 places" in texts["lightning_indexer"]
    for result in ("out", "softmax_max", "softmax_sum", "d_query", "d_latent", "d_key_rope"):
        assert f"{result} differs by" in texts["sparse_flash_attention"]
    for result in ("loss", "d_query_index", "d_key_index", "d_weights"):
        assert f"{result} differs by" in texts["lightning_indexer_kl_loss"]


@pytest.mark.parametrize("wrong", [1.0, float("nan"), float("inf")])
def test_one_wrong_result_is_a_difference(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: dict[str, Any] = {name: {"out": 0.0} for name in communication.SPARSE_OPERATORS}
    errors["lightning_indexer"] = {"keys": wrong, "values": 0.0}
    communication._of_ranks.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(communication, "_of_ranks", lambda kind, method: errors)
        found = outcomes(set(communication.SPARSE_OPERATORS))
    assert [name for name, x in found.items() if x.verdict == "differs"] == ["lightning_indexer"]


def test_an_error_is_relative_and_sees_what_is_missing() -> None:
    scores = torch.tensor([4.0, 2.0, -torch.inf])
    assert _check.error(scores, scores) == 0
    assert _check.error(scores + torch.tensor([0, 1, 0]), scores) == 0.25
    assert _check.error(torch.tensor([4.0, -torch.inf, -torch.inf]), scores) == torch.inf
    assert _check.error(torch.tensor([4.0, torch.nan, -torch.inf]), scores) != 0
    assert _check.error(torch.tensor([1, 2, -1]), torch.tensor([1, 3, -1])) == 1
