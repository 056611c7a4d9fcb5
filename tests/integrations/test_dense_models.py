"""attn_implementation="ascend" in dense models, against transformers' own eager attention."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ascend_attn_ops import ops
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
masking_utils = pytest.importorskip("transformers.masking_utils")

from ascend_attn_ops.transformers import _dense, _paged, register, unregister  # noqa: E402
from support.small_models import generated, make, packing, padding, targets, tokens  # noqa: E402
from support.torch_defects import NOT_WITH_2_7  # noqa: E402
from support.turns import nightly  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_limits")

# Errors of some 40 roundings in series, on logits of up to 10; norms compute in float32 everywhere.
CLOSE = {torch.float64: {"rtol": 1e-10, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 1e-4}}
DENSE = ["Llama", "Qwen3", "Mistral", "GptOss"]
PACKS = ["Llama", "Mistral", "PhiMoE"]
# MiMo has sinks in its sliding layers only, and values smaller than keys; Gemma3 no soft cap.
OTHERS = ["GraniteMoeSWA", "Flint", "MiMo-V2-Flash", "Gemma3", "Doge"]
# Full attention is causal, and sliding windows are a band. GptOss has both in turns.
MODES = {"Mistral": {4}, "GptOss": {3, 4}}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


@pytest.fixture(params=DENSE)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def pair(
    name: str, dtype: torch.dtype | None = None, **changes: Any
) -> tuple[nn.Module, nn.Module]:
    """transformers' eager model and ours, with sinks of some weight beside the scores.

    Only GptOss has a softmax that is not computed in float32.
    """
    dtype = dtype or (torch.float64 if name == "GptOss" else torch.float32)
    models = [make(name, attention, **changes).to(dtype) for attention in ("eager", "ascend")]
    for model in models:
        for parameter, x in model.named_parameters():
            if parameter.endswith("sinks"):
                x.data = torch.linspace(-1, 3, len(x), dtype=dtype)
    return models[0], models[1]


def assert_close(actual: Any, expected: Any) -> None:
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, **CLOSE[y.dtype])


def assert_same_gradients(ours: nn.Module, eager: nn.Module) -> None:
    assert_close(*([x.grad for x in model.parameters()] for model in (ours, eager)))


def valid_tokens(batch: dict[str, Any]) -> Tensor:
    return batch.get("attention_mask", torch.ones_like(tokens())).bool()


COMPILED_PER_COMMIT = [("Llama", "plain"), ("Mistral", "left padding"), ("GptOss", "packed")]
CALL = ops.flash_attention_score

BATCHES = {
    "plain": {},
    "left padding": padding("left"),
    "right padding": padding("right"),
    "packed": packing(),
}


@pytest.mark.parametrize(
    ("name", "batch"), [*product(DENSE, BATCHES), *product(OTHERS, ["plain", "left padding"])]
)
def test_logits_and_gradients_are_those_of_eager(name: str, batch: str) -> None:
    """Also where ours makes a cache, beside which transformers looks for no packed sequences."""
    arguments = BATCHES[batch]
    text, valid = tokens(), valid_tokens(arguments)
    eager, ours = pair(name)
    with mock.patch.object(ops, "flash_attention_score", wraps=CALL) as recorded:
        results = [eager(text, **arguments), ours(text, **{**arguments, "use_cache": True})]
    if name in DENSE:
        # No mask of all pairs, and a layout with lengths only where there are some.
        calls = [x.kwargs for x in recorded.call_args_list]
        assert len(calls) == 2
        assert not any("attn_mask" in options for options in calls)
        assert {x["layout"] for x in calls} == {"BNSD" if batch == "plain" else "TND"}
        assert {x["sparse_mode"] for x in calls} == MODES.get(name, {3})
    logits = [x.logits for x in results]
    if (name, batch) == ("GptOss", "packed"):
        # transformers does not tell its masks that positions start over.
        logits[0] = alone(eager, text, arguments)
    assert_close([logits[1][valid]], [logits[0][valid]])
    for x in logits:
        nn.functional.cross_entropy(x[:, :-1].mT, targets(text, valid)[:, 1:]).backward()
    assert_same_gradients(ours, eager)


LENGTHS = (15, 1, 24)


def alone(model: nn.Module, text: Tensor, pack: dict[str, Any]) -> Tensor:
    """The logits of each sequence of a pack by itself."""
    parts = zip(text.split(LENGTHS, 1), pack["position_ids"].split(LENGTHS, 1), strict=True)
    return torch.cat([model(x, position_ids=y, use_cache=False).logits for x, y in parts], 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_the_librarys_caches(name: str, cache: str, padded: bool) -> None:
    expected, actual = (generated(x, cache, padded, max_new_tokens=9) for x in pair(name))
    assert torch.equal(actual.sequences, expected.sequences)
    # transformers returns logits in float32.
    close = 1e-6 if name == "GptOss" else 1e-4
    torch.testing.assert_close(actual.logits, expected.logits, rtol=close, atol=close)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("batch", ["plain", "left padding", "packed"])
def test_chunks_of_a_prompt(name: str, batch: str, static: bool) -> None:
    """Several tokens beside a cache, which for a window holds the last keys only.

    The first sequence of a chunk goes on with all of them, those that begin in it with none.
    """
    eager, ours = pair(name)
    text, arguments = tokens(), BATCHES[batch]
    cache = transformers.DynamicCache(config=ours.config)
    if static:
        cache = transformers.StaticCache(config=ours.config, max_cache_len=48)
    logits = []
    chunks = ((0, 9), (9, 40)) if batch == "packed" else ((0, 19), (19, 33), (33, 40))
    for first, behind in chunks:
        given = {
            key: x[:, :behind] if key == "attention_mask" else x[:, first:behind]
            for key, x in arguments.items()
            if key != "use_cache"
        }
        part = ours(text[:, first:behind], past_key_values=cache, **given)
        logits.append(part.logits)
    valid = valid_tokens(arguments)
    expected = (
        alone(eager, text, arguments) if batch == "packed" else eager(text, **arguments).logits
    )
    assert_close([torch.cat(logits, 1)[valid]], [expected[valid]])


def test_padding_with_gaps(name: str) -> None:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 11:14] = 0
    eager, ours = pair(name)
    expected, actual = (x(tokens(), attention_mask=mask).logits for x in (eager, ours))
    assert_close([actual[mask.bool()]], [expected[mask.bool()]])


def masks_of_all_pairs() -> dict[str, Tensor]:
    """A prefix attends both ways: True keeps a key, or numbers are added to the scores."""
    kept = torch.ones(40, 40).tril().bool()
    kept[:9, :9] = True
    kept = kept.expand(2, 1, 40, 40)
    smallest = torch.where(kept, 0.0, torch.finfo(torch.float32).min)
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(1, 4, 40, 40, generator=generator)
    return {
        "bool": kept, "smallest": smallest, "infinite": torch.where(kept, 0.0, -torch.inf),
        "one for all": smallest[:1], "biased": smallest + bias, "bias": bias,
        "a trained bias": smallest + bias.requires_grad_(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", masks_of_all_pairs())
@pytest.mark.parametrize("compiled", [False, True])
def test_mask_of_all_pairs(kind: str, compiled: bool) -> None:
    eager, ours = pair("Llama")
    of_eager = masks_of_all_pairs()["smallest" if kind == "bool" else kind]
    given = masks_of_all_pairs()[kind]
    torch.compiler.reset()
    call = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    biases: list[Tensor] = []

    def record(*args: Tensor, **kwargs: Any) -> Any:
        biases.extend([kwargs["pse_shift"]] if "pse_shift" in kwargs else [])
        return CALL(*args, **kwargs)

    with nullcontext() if compiled else mock.patch.object(ops, "flash_attention_score", record):
        results = [
            model(tokens(), attention_mask=x, labels=tokens(), use_cache=False)
            for model, x in ((eager, of_eager), (call, given))
        ]
    assert_close([results[1].logits], [results[0].logits])
    for result in results:
        result.loss.backward()
    assert_same_gradients(ours, eager)
    # A device makes NaN of an infinite bias. Where only zeros are left, it gets none.
    assert len(biases) == (2 if "bias" in kind and not compiled else 0)
    assert all(x.abs().max() < 100 for x in biases)
    with pytest.raises(TypeError, match=r"bool where True keeps .* got a tensor of int64"):
        ours(tokens(), attention_mask=torch.ones(2, 1, 40, 40).long())


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
    text, valid = tokens(), valid_tokens(arguments)
    eager, ours = pair(name)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    # torch 2.7 cannot trace how transformers makes a cache, whatever the attention.
    arguments = {"use_cache": False, **arguments}
    results = [model(text, labels=text, **arguments) for model in (eager, compiled)]
    assert_close([results[1].logits[valid]], [results[0].logits[valid]])
    if batch == "plain":
        for result in results:
            result.loss.backward()
        assert_same_gradients(ours, eager)


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
    "Gemma2": r"softcap: .* a soft cap of the scores, got one from Gemma2Attention",
    "ImageGPT": "got ImageGPTConfig, whose models compute it themselves",
    "Inkling2": "got Inkling2TextConfig, whose models compute it themselves",
    "DeepSeek-V4": r"without an indexer .* got DeepseekV4Config; .* enable_dsa\(model\)",
    "DeepSeek-V3.2": r"without an indexer .* got DeepseekV32Config; .* enable_dsa\(model\)",
    "A.X-K2": r"without an indexer .* got AXK2Config; .* enable_dsa\(model\)",
    "HY-V4": r"got HYV4Config; .* of a kind that this library does not compute",
    "GLM-MoE-DSA": r"without an indexer .* got GlmMoeDsaConfig; .* enable_dsa\(model\)",
}


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


def test_attention_weights_are_refused() -> None:
    _, ours = pair("Llama")
    with pytest.raises((NotImplementedError, ValueError), match="output_attentions"):
        ours(tokens(), output_attentions=True)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("lengths", [torch.tensor([0, 15, 40]), [0, 15, 40]], ids=type)
def test_lengths_of_a_collator(name: str, positions: bool, lengths: Any) -> None:
    """Beside positions that start over, or that do not."""
    _, ours = pair(name, torch.float32)
    text = tokens(1)
    arguments = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    if positions:
        arguments["position_ids"] = packing(1, (15, 25), gap=0)["position_ids"]
    packed = ours(text, **arguments).logits
    assert_close([packed], [torch.cat([ours(x).logits for x in text.split((15, 25), 1)], 1)])
    cache = ours(text).past_key_values
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: .* got \d+ keys .* use_cache=False"):
        ours(text, past_key_values=cache, **arguments)


@pytest.mark.parametrize(("window", "images"), [(None, True), (4, True), (7, False)])
def test_layers_that_are_called_without_a_mask(window: int | None, images: bool) -> None:
    """They keep their window. Vision towers pack images whose patches attend both ways, as they
    call an attention with "flash" in its name."""
    query, (key, value) = torch.randn(1, 4, 40, 16), torch.randn(2, 1, 2, 40, 16)
    options: dict[str, Any] = {}
    seen = torch.ones(40, 40).tril()
    if images:
        ends = torch.tensor([0, 15, 40])
        options = {"is_causal": False, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        seen = torch.block_diag(torch.ones(15, 15), torch.ones(25, 25))
    out, _ = _dense.attention(
        nn.Module(), query, key, value, None, sliding_window=window, **options
    )
    if window:
        seen = seen.triu(1 - window).tril(window - 1)
    expected = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen.bool(), enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_lengths_beside_a_mask_of_all_pairs() -> None:
    _, ours = pair("Llama")
    masks, ends = masks_of_all_pairs(), torch.tensor([0, 15, 40])
    mask = masks["bool"][:1].clone()
    packed = ours(tokens(1), attention_mask=mask, cu_seq_lens_q=ends).logits
    mask[:, :, 15:, :15] = False
    assert_close([packed], [ours(tokens(1), attention_mask=mask).logits])
    with pytest.raises(NotImplementedError, match="attention_mask: expected bool, the same for"):
        ours(tokens(1), attention_mask=masks["bias"], cu_seq_lens_q=ends)


@pytest.mark.parametrize(
    ("name", "batch", "with_lengths"),
    [pytest.param("Llama", 1, True, marks=NOT_WITH_2_7), *product(PACKS, [1, 2], [False])],
)
def test_a_pack_compiles(name: str, batch: int, with_lengths: bool) -> None:
    """In one graph: by the lengths of a collator, also beside a cache, or by its positions, without
    a mask of all pairs. Other values do not compile it again."""
    _, ours = pair(name)
    masked = mock.patch.object(masking_utils, "sdpa_mask", side_effect=AssertionError)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for lengths in ([15, 1, 24], [9, 11, 20], [40])[: 2 if with_lengths else 3]:
        positions = torch.cat([torch.arange(n) for n in lengths]).expand(batch, -1)
        ends = torch.tensor([0, *accumulate(lengths)])
        of_collator = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        options = of_collator if with_lengths else {"use_cache": False}
        with (
            torch._dynamo.config.patch(error_on_recompile=lengths != [15, 1, 24]),
            nullcontext() if with_lengths else masked,
        ):
            results = [
                model(tokens(batch), position_ids=positions, labels=tokens(batch), **options)
                for model in (compiled, ours)
            ]
        gradients = [
            torch.autograd.grad(x.loss, ours.model.layers[0].self_attn.q_proj.weight)
            for x in results
        ]
        assert_close([results[0].logits, *gradients[0]], [results[1].logits, *gradients[1]])


def test_registering_can_be_undone() -> None:
    """Changes by another library, before or after, stay."""
    interfaces = (transformers.AttentionInterface(), transformers.AttentionMaskInterface())
    utils = transformers.modeling_flash_attention_utils

    def another(*_: Any) -> None: ...

    try:
        for _ in range(2):
            unregister()
        assert not any("ascend" in interface for interface in interfaces)
        with mock.patch.object(utils, "_lazy_imports", another):
            register()
            assert utils._lazy_imports is not another
            transformers.AttentionInterface.register("ascend", another)
            unregister()
            assert utils._lazy_imports is another
        assert transformers.AttentionInterface._global_mapping.pop("ascend") is another
        with (
            mock.patch.object(_paged, "let_models_load", side_effect=LookupError),
            pytest.raises(LookupError),
        ):
            register()
        assert not any("ascend" in interface for interface in interfaces)
    finally:
        for _ in range(2):
            register()
    assert all("ascend" in interface for interface in interfaces)


@pytest.mark.parametrize("batch", ["packed", "left padding"])
def test_lengths_are_read_once_for_all_layers(batch: str) -> None:
    _, ours = pair("Llama")
    text, arguments = tokens(), {key: x for key, x in BATCHES[batch].items() if key != "use_cache"}
    arguments["position_ids"] = arguments["position_ids"].clone()
    with mock.patch.object(_dense, "begins_of_runs", wraps=_dense.begins_of_runs) as read:
        ours(text, **arguments)
        assert read.call_count == 1
        before = ours(text, **arguments).logits
        assert read.call_count == 2
        if batch == "packed":
            arguments["position_ids"].data.copy_(torch.arange(40))  # as communication writes
            after = ours(text, **arguments).logits
            assert read.call_count == 3
            assert_close([after], [ours(text).logits])
            assert not torch.allclose(after, before)


def test_a_layer_that_is_called_alone_reads_positions_anew() -> None:
    query, key, value = torch.randn(3, 1, 2, 8, 16)
    layer, positions = nn.Module(), torch.arange(8)[None]
    whole, _ = _dense.attention(layer, query, key, value, None, position_ids=positions)
    positions.data.copy_(torch.arange(8) % 4)
    packed, _ = _dense.attention(layer, query, key, value, None, position_ids=positions)
    torch.testing.assert_close(packed[:, :4], whole[:, :4])
    last = (x[:, :, 4:] for x in (query, key, value))
    torch.testing.assert_close(packed[:, 4:], _dense.attention(layer, *last, None)[0])


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


def test_sinks_of_every_token_are_refused() -> None:
    """Inkling2 computes them from its tokens."""
    query = torch.randn(1, 4, 8, 16)
    with pytest.raises(NotImplementedError, match=r"sinks: .* sinks that differ between tokens"):
        _dense.attention(nn.Module(), query, query, query, None, sinks=torch.zeros(1, 4, 8, 1))
