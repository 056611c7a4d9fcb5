"""attn_implementation="ascend" in models with attention sinks, against transformers' own eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from ascend_attn_ops.integrations.transformers import _dense, register  # noqa: E402
from support.small_models import make, packing, padding, targets, tokens  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_limits")

BATCHES = {
    "plain": {},
    "left padding": padding("left"),
    "right padding": padding("right"),
}
LENGTHS = (15, 1, 24)
# Errors of float64; the layers' norms compute in float32 in both models.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def pair(name: str, dtype: torch.dtype, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """Models with sinks of some weight beside the scores."""
    models = [make(name, attention, **changes).to(dtype) for attention in ("eager", "ascend")]
    for model in models:
        for parameter, x in model.named_parameters():
            if parameter.endswith("sinks"):
                x.data = torch.linspace(-1, 3, len(x), dtype=dtype)
    return models[0], models[1]


def trained(model: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits of the valid tokens, and the loss, after its backward."""
    text = tokens()
    valid = arguments.get("attention_mask", torch.ones_like(text)).bool()
    result = model(text, labels=targets(text, valid), **arguments)
    result.loss.backward()
    return result.logits[valid], result.loss


@pytest.mark.parametrize("batch", BATCHES)
def test_gpt_oss_in_float64(batch: str) -> None:
    eager, ours = pair("GptOss", torch.float64)
    expected, actual = (trained(model, BATCHES[batch]) for model in (eager, ours))
    torch.testing.assert_close(actual, expected, **EXACT)
    for (name, x), y in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert y.grad.any()
        torch.testing.assert_close(x.grad, y.grad, **EXACT, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("window", [7, 64])
def test_packed_sequences_are_those_of_eager_alone(window: int) -> None:
    """transformers does not tell the masks of gpt_oss that positions start over."""
    eager, ours = pair("GptOss", torch.float64, sliding_window=window)
    text, packed = tokens(), packing(lengths=LENGTHS, gap=0)
    out = ours(text, **packed).logits
    expected = torch.cat(
        [eager(part, use_cache=False).logits for part in text.split(LENGTHS, 1)], 1
    )
    torch.testing.assert_close(out, expected, **EXACT)
    d_out = torch.randn(out.shape, dtype=torch.float64)
    torch.autograd.backward((out, expected), (d_out, d_out))
    for x, y in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, **EXACT)


def test_positions_are_read_once_for_all_layers() -> None:
    _, ours = pair("GptOss", torch.float32)
    packed = packing(lengths=LENGTHS, gap=0)
    with mock.patch.object(_dense, "packed", wraps=_dense.packed) as read:
        ours(tokens(), **packed)
        assert read.call_count == 1
        before = ours(tokens(), **packed).logits
        assert read.call_count == 1
        packed["position_ids"] = packed["position_ids"].clone()
        ours(tokens(), **packed)
        packed["position_ids"].copy_(torch.arange(40))
        after = ours(tokens(), **packed).logits
        assert read.call_count == 3
    torch.testing.assert_close(after, ours(tokens(), use_cache=False).logits)
    assert not torch.allclose(after, before)


def test_lengths_of_flash_attention_beside_positions() -> None:
    """As transformers' collators make them for packed sequences."""
    _, ours = pair("GptOss", torch.float32)
    packed = packing(1, LENGTHS, gap=0)
    ends = torch.tensor([0, 15, 16, 40])
    actual = ours(tokens(1), **packed, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
    torch.testing.assert_close(actual, ours(tokens(1), **packed).logits)


@pytest.mark.parametrize("batch", ["plain", "left padding"])
@pytest.mark.parametrize("name", ["GraniteMoeSWA", "Flint", "MiMo-V2-Flash"])
def test_other_models(name: str, batch: str) -> None:
    """MiMo has sinks in its sliding layers only, and values smaller than keys."""
    eager, ours = pair(name, torch.float32)
    expected, actual = (trained(model, BATCHES[batch]) for model in (eager, ours))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for x, y in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_a_mask_of_all_pairs() -> None:
    """Padding with gaps is no pattern of lengths."""
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 11:14] = 0
    eager, ours = pair("GptOss", torch.float64)
    expected, actual = (x(tokens(), attention_mask=mask).logits[mask.bool()] for x in (eager, ours))
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generated_logits_in_float64(cache: str, padded: bool) -> None:
    arguments = {"attention_mask": padding("left")["attention_mask"]} if padded else {}
    options = {
        "max_new_tokens": 9, "do_sample": False, "output_logits": True, "disable_compile": True,
        "return_dict_in_generate": True, "cache_implementation": cache,
    }  # fmt: skip
    models = pair("GptOss", torch.float64)
    expected, actual = (x.generate(tokens(), **arguments, **options) for x in models)
    assert torch.equal(actual.sequences, expected.sequences)
    # transformers returns logits in float32.
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_of_transformers_is_loaded_as_it_is(tmp_path: Path) -> None:
    eager, _ = pair("GptOss", torch.float32)
    eager.save_pretrained(tmp_path / "eager")
    kind = transformers.AutoModelForCausalLM
    ours = kind.from_pretrained(tmp_path / "eager", attn_implementation="ascend")
    ours.set_experts_implementation("batched_mm")
    sinks = [layer.self_attn.sinks for layer in ours.model.layers]
    assert all(torch.equal(x, torch.linspace(-1, 3, 4)) for x in sinks)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()).logits, eager(tokens()).logits)
    ours.save_pretrained(tmp_path / "ours")
    again = kind.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert all(map(torch.equal, again.state_dict().values(), eager.state_dict().values()))


def test_sinks_of_half_precision_get_gradients_of_it() -> None:
    _, ours = pair("GptOss", torch.bfloat16)
    trained(ours, {})
    for layer in ours.model.layers:
        gradient = layer.self_attn.sinks.grad
        assert gradient.dtype == torch.bfloat16
        assert gradient.any()


def test_a_sink_for_every_head_is_expected() -> None:
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"sink: expected shape \(4\), .* got \[2\]"):
        _dense.attention(nn.Module(), query, key, key, None, s_aux=torch.zeros(2))


def test_sinks_of_every_token_are_refused() -> None:
    """Inkling2 computes them from its tokens."""
    query = torch.randn(1, 4, 8, 16)
    with pytest.raises(NotImplementedError, match=r"sinks: .* sinks that differ between tokens"):
        _dense.attention(nn.Module(), query, query, query, None, sinks=torch.zeros(1, 4, 8, 1))
