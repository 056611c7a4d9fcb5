"""attn_implementation="ascend" in dense models, against transformers' own eager attention."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import ascend_attn_ops as ops
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from ascend_attn_ops.integrations.transformers import _dense, register, unregister  # noqa: E402
from support.small_models import (  # noqa: E402
    make,
    packing,
    padding,
    targets,
    tokens,
)
from support.turns import nightly  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_limits")

# Some 40 roundings of float32 in series, on logits of up to 10.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
DENSE = ["Llama", "Qwen3", "Mistral", "GptOss"]
# Full attention is causal, and sliding windows are a band. GptOss has both in turns.
MODES = {"Mistral": {4}, "GptOss": {3, 4}}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


@pytest.fixture(params=DENSE)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def pair(name: str, **changes: Any) -> tuple[nn.Module, nn.Module]:
    return make(name, **changes), make(name, "ascend", **changes)


class Calls:
    """Records the arguments of the operator's calls."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __call__(self, *tensors: Tensor, **options: Any) -> Any:
        self.options.append(options)
        return CALL(*tensors, **options)


COMPILED_PER_COMMIT = [("Llama", "plain"), ("Mistral", "left padding"), ("GptOss", "packed")]
CALL = ops.flash_attention_score

BATCHES = {
    "plain": {},
    "left padding": padding("left"),
    "right padding": padding("right"),
    "packed": packing(),
}


# eager GptOss attends across packed sequences: test_models_with_sinks.py compares those.
@pytest.mark.parametrize(
    ("name", "batch"), [x for x in product(DENSE, BATCHES) if x != ("GptOss", "packed")]
)
def test_logits_and_gradients_are_those_of_eager(name: str, batch: str) -> None:
    arguments = BATCHES[batch]
    text = tokens()
    valid = arguments.get("attention_mask", torch.ones_like(text)).bool()
    labels = targets(text, valid)
    eager, ours = pair(name)
    calls = Calls()
    with mock.patch.object(ops, "flash_attention_score", calls):
        results = [model(text, labels=labels, **arguments) for model in (eager, ours)]
    # No mask of all pairs, and a layout with lengths only where there are some.
    assert len(calls.options) == 2
    assert not any("attn_mask" in options for options in calls.options)
    assert {x["layout"] for x in calls.options} == {"BNSD" if batch == "plain" else "TND"}
    assert {x["sparse_mode"] for x in calls.options} == MODES.get(name, {3})
    torch.testing.assert_close(results[1].logits[valid], results[0].logits[valid], **CLOSE)
    for result in results:
        result.loss.backward()
    for x, y in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_the_librarys_caches(name: str, cache: str, padded: bool) -> None:
    arguments = {"attention_mask": padding("left")["attention_mask"]} if padded else {}
    options = {
        "max_new_tokens": 5, "do_sample": False, "output_logits": True, "disable_compile": True,
        "return_dict_in_generate": True, "cache_implementation": cache,
    }  # fmt: skip
    expected, actual = (x.generate(tokens(), **arguments, **options) for x in pair(name))
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.logits, expected.logits, **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_chunks_of_a_prompt(name: str, padded: bool) -> None:
    """Several tokens beside a cache, which for a window holds the last keys only."""
    eager, ours = pair(name)
    text, arguments = tokens(), padding("left") if padded else {}
    cache = transformers.DynamicCache(config=ours.config)
    logits = []
    for first, behind in ((0, 19), (19, 33), (33, 40)):
        given = dict(arguments)
        if padded:
            given = {
                "attention_mask": arguments["attention_mask"][:, :behind],
                "position_ids": arguments["position_ids"][:, first:behind],
            }
        part = ours(text[:, first:behind], past_key_values=cache, **given)
        logits.append(part.logits)
    valid = arguments.get("attention_mask", torch.ones_like(text)).bool()
    expected = eager(text, **arguments).logits[valid]
    torch.testing.assert_close(torch.cat(logits, 1)[valid], expected, **CLOSE)


def test_padding_with_gaps(name: str) -> None:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 11:14] = 0
    eager, ours = pair(name)
    expected, actual = (x(tokens(), attention_mask=mask).logits for x in (eager, ours))
    valid = mask.bool()
    torch.testing.assert_close(actual[valid], expected[valid], **CLOSE)


def test_mask_of_all_pairs() -> None:
    eager, ours = pair("Llama")
    both_ways = torch.ones(40, 40).tril().bool()
    both_ways[:9, :9] = True
    both_ways = both_ways.expand(2, 1, 40, 40)
    in_floats = torch.where(both_ways, 0.0, torch.finfo(torch.float32).min)
    expected = eager(tokens(), attention_mask=in_floats).logits
    actual = ours(tokens(), attention_mask=both_ways).logits
    torch.testing.assert_close(actual, expected, **CLOSE)
    with pytest.raises(TypeError, match=r"bool .* True keeps a key, got torch\.float32"):
        ours(tokens(), attention_mask=in_floats)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        pytest.param(*x, marks=() if x in COMPILED_PER_COMMIT else nightly)
        for x in product(["Llama", "Mistral", "GptOss"], ["plain", "left padding", "packed"])
    ],
)
def test_compiled(name: str, batch: str) -> None:
    arguments = BATCHES[batch]
    torch.compiler.reset()
    text = tokens()
    valid = arguments.get("attention_mask", torch.ones_like(text)).bool()
    eager, ours = pair(name)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    # torch 2.7 cannot trace how transformers makes a cache, whatever the attention.
    arguments = {"use_cache": False, **arguments}
    results = [model(text, labels=text, **arguments) for model in (eager, compiled)]
    torch.testing.assert_close(results[1].logits[valid], results[0].logits[valid], **CLOSE)
    if batch == "plain":
        for result in results:
            result.loss.backward()
        for x, y in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(x.grad, y.grad, **CLOSE)


def test_dropout_is_applied() -> None:
    _, ours = pair("Llama", attention_dropout=0.5)
    ours.train()
    torch.manual_seed(0)
    first, second = (ours(tokens()).logits for _ in range(2))
    torch.manual_seed(0)
    again = ours(tokens()).logits
    assert torch.equal(first, again)
    assert (first - second).abs().max() > 0.1


def test_gradient_checkpointing(name: str) -> None:
    found = []
    for checkpointing in (False, True):
        _, ours = pair(name)
        ours.train()
        if checkpointing:
            ours.activation_checkpointing_enable({"use_reentrant": False})
        ours(tokens(), labels=tokens(), **packing()).loss.backward()
        found.append([x.grad for x in ours.parameters()])
    torch.testing.assert_close(found[1], found[0])


REFUSED = {
    "Gemma2": r"softcap: .* a soft cap of the scores, which Gemma2Attention asks for",
    "Inkling2": r"the models of Inkling2TextConfig compute their attention themselves",
    "DeepSeek-V4": r"DeepseekV4Config has an indexer or compressed keys; .* enable_dsa\(model\)",
    "DeepSeek-V3.2": r"DeepseekV32Config has an indexer or .* enable_dsa\(model\)",
    "GLM-MoE-DSA": r"GlmMoeDsaConfig has an indexer or .* enable_dsa\(model\)",
}


def test_models_that_compute_their_attention_themselves_are_refused() -> None:
    config = transformers.BloomConfig(
        vocab_size=97, hidden_size=64, n_layer=1, n_head=4, attn_implementation="ascend"
    )
    with pytest.raises(NotImplementedError, match="models of BloomConfig compute their attention"):
        transformers.BloomForCausalLM(config)(tokens())


def test_chunk_whose_mask_leaves_out_the_cache() -> None:
    _, ours = pair("Llama")
    cache = transformers.DynamicCache(config=ours.config)
    ours(tokens()[:, :20], past_key_values=cache)
    mask = torch.ones(2, 20, dtype=torch.long)
    with pytest.raises(ValueError, match="expected at least 40 columns"):
        ours(tokens()[:, 20:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("refused", REFUSED)
def test_what_the_operator_cannot_do_is_refused_by_name(refused: str) -> None:
    with pytest.raises(NotImplementedError, match=REFUSED[refused]):
        make(refused, "ascend")(tokens())


def test_gemma3_without_a_soft_cap() -> None:
    eager, ours = pair("Gemma3")
    torch.testing.assert_close(ours(tokens()).logits, eager(tokens()).logits, **CLOSE)


def test_attention_weights_are_refused() -> None:
    _, ours = pair("Llama")
    with pytest.raises((NotImplementedError, ValueError), match="output_attentions"):
        ours(tokens(), output_attentions=True)


def test_packed_lengths_without_positions_are_refused() -> None:
    _, ours = pair("Llama")
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: .* position_ids that start over"):
        ours(tokens(1), cu_seq_lens_q=torch.tensor([0, 15, 40]))


def test_window_that_only_the_layer_knows() -> None:
    """A layer called without a mask keeps its window."""
    query = torch.randn(1, 4, 40, 16)
    key, value = torch.randn(2, 1, 2, 40, 16)
    layer = nn.Module()
    out, _ = _dense.attention(layer, query, key, value, None, sliding_window=7)
    near = torch.ones(40, 40).tril().triu(-6).bool()
    expected = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=near, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_lengths_are_read_once_for_all_layers() -> None:
    _, ours = pair("Llama")
    with mock.patch.object(_dense, "_queries_before", wraps=_dense._queries_before) as read:
        ours(tokens(), **padding("left"))
    # Two sequences in the first row, one in the second: two ends before the last.
    assert read.call_count == 2


def test_registering_can_be_undone() -> None:
    interfaces = (transformers.AttentionInterface(), transformers.AttentionMaskInterface())
    try:
        for _ in range(2):
            unregister()
        assert not any("ascend" in interface for interface in interfaces)
    finally:
        for _ in range(2):
            register()
    assert all("ascend" in interface for interface in interfaces)
