"""Models with indexers over our operators, against transformers' own eager attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from ascend_attn_ops.transformers import disable_dsa, enable_dsa  # noqa: E402
from support import fresh  # noqa: E402
from support.small_models import (  # noqa: E402
    SMALL_V4,
    SPARSE,
    generated,
    make,
    packing,
    padding,
    targets,
    tokens,
)
from support.turns import nightly  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_limits")

MODELS = [*SPARSE, pytest.param("A.X-K2", marks=nightly)]
every_model = pytest.mark.parametrize("name", [*MODELS, "DeepSeek-V4"])
# Some 60 roundings of float32 in series, on logits of up to 7.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def pair(
    name: str, dtype: torch.dtype | None = None, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """transformers' eager model, and the same one over our operators."""
    eager = make(name, **SMALL_V4).double() if name == "DeepSeek-V4" else make(name)
    eager.to(dtype)
    ours = copy.deepcopy(eager)
    enable_dsa(ours, **options)
    return eager, ours


@pytest.fixture
def ours(name: str) -> nn.Module:
    return pair(name)[1]


def indexer_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: x for name, x in model.named_parameters() if ".indexer." in name}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: x.grad for name, x in model.named_parameters()}


BATCHES = {
    "plain": {},
    "left padding": padding("left"),
    "right padding": padding("right"),
    "packed": packing(),
    "packed, with a cache": {**packing(), "use_cache": True},
}


@pytest.mark.parametrize("name", [*SPARSE, "A.X-K2"])
@pytest.mark.parametrize("batch", BATCHES)
def test_logits_and_gradients_are_those_of_eager(name: str, batch: str) -> None:
    arguments = BATCHES[batch]
    eager, ours = pair(name)
    text = tokens()
    valid = arguments.get("attention_mask", torch.ones_like(text)).bool()
    arguments = {**arguments, "labels": targets(text, valid)}
    # transformers finds packed sequences without a cache alone.
    results = [eager(text, **{**arguments, "use_cache": False}), ours(text, **arguments)]
    torch.testing.assert_close(results[1].logits[valid], results[0].logits[valid], **CLOSE)
    for result in results:
        result.loss.backward()
    expected, actual = gradients(eager), gradients(ours)
    learned = [x for x in expected if expected[x] is not None]
    assert learned == [x for x in expected if ".indexer." not in x]
    for x in learned:
        torch.testing.assert_close(actual[x], expected[x], **CLOSE)


@every_model
def test_the_indexers_gradient_is_the_losses_alone(name: str) -> None:
    """The loss of the model adds nothing to it, and the weight is its factor."""
    found = []
    for weight, of_model in ((1.0, 1.0), (1.0, 3.0), (0.25, 1.0), (torch.tensor(4.0), 1.0)):
        _, ours = pair(name, indexer_loss_weight=weight)
        (of_model * ours(tokens(), labels=tokens()).loss).backward()
        found.append({x: y.grad / weight for x, y in indexer_parameters(ours).items()})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_padding_has_no_part_in_the_indexers_loss(ours: nn.Module) -> None:
    text, mask = tokens(1), padding("right", 1)
    ours(text, **mask)
    with_padding = ours.indexer_losses()
    ours(text[:, :-7])
    torch.testing.assert_close(with_padding, ours.indexer_losses())


def test_loss_is_the_divergence_of_attention_and_indexer() -> None:
    """Written down from the eager model's weights: one layer, all of its keys selected."""
    eager, ours = pair("DeepSeek-V3.2")
    for model in (eager, ours):
        model.config.num_hidden_layers = 1
    text = tokens(1, 12)  # as many as index_topk
    ours(text)
    layer, seen = eager.model.layers[0].self_attn, {}
    hooks = [
        module.register_forward_hook(lambda _, args, out, key=key: seen.update({key: (args, out)}))
        for key, module in {
            "query": layer.indexer.wq_b, "key": layer.indexer.k_norm,
            "weights": layer.indexer.weights_proj, "rope": eager.model.rotary_emb,
        }.items()
    ]  # fmt: skip
    probabilities = eager(text, output_attentions=True).attentions[0].mean(1)
    for hook in hooks:
        hook.remove()
    module = transformers.models.deepseek_v32.modeling_deepseek_v32
    query = seen["query"][1].unflatten(-1, (16, 32))
    query_rope, key_rope = module.apply_rotary_pos_emb(
        query[..., :16], seen["key"][1][:, :, None, :16], *seen["rope"][1], unsqueeze_dim=2
    )
    query = torch.cat([query_rope, query[..., 16:]], -1)
    key = torch.cat([key_rope[:, :, 0], seen["key"][1][..., 16:]], -1)
    scores = torch.einsum("bsnd,btd->bsnt", query, key).relu() * 32**-0.5
    scores = torch.einsum("bsn,bsnt->bst", seen["weights"][1] * 16**-0.5, scores)
    causal = torch.ones(12, 12).tril().bool()
    log_y = scores.masked_fill(~causal, -torch.inf).log_softmax(-1)
    terms = probabilities * (probabilities.log() - log_y)
    expected = terms.masked_fill(~causal, 0).sum(-1).mean()
    torch.testing.assert_close(ours.indexer_losses()[0], expected, rtol=1e-5, atol=1e-6)


@every_model
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "dense"])
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool, warmup: bool) -> None:
    if name == "DeepSeek-V4" and warmup:
        pytest.skip("its layers have no dense warm-up")
    found = []
    for checkpointing in (False, True):
        _, ours = pair(name, dense_warmup=warmup)
        ours.train()
        if checkpointing:
            ours.activation_checkpointing_enable({"use_reentrant": reentrant})
        ours(tokens(), labels=tokens(), **packing()).loss.backward()
        found.append((gradients(ours), ours.indexer_losses()))
    torch.testing.assert_close(found[1], found[0])


def test_dense_warm_up_trains_the_indexers_on_all_keys(name: str) -> None:
    eager, ours = pair(name, dense_warmup=True)
    # More keys than there are: all of them are selected.
    dense = make(name, index_topk=64)
    text = tokens()
    result = ours(text, labels=text)
    torch.testing.assert_close(result.logits, dense(text).logits, **CLOSE)
    result.loss.backward()
    trained = {x for x, gradient in gradients(ours).items() if gradient is not None}
    assert trained == set(indexer_parameters(ours))

    everything = copy.deepcopy(dense)
    enable_dsa(everything)
    everything(text, labels=text).loss.backward()
    for x, parameter in indexer_parameters(everything).items():
        torch.testing.assert_close(gradients(ours)[x], parameter.grad, **CLOSE)

    enable_dsa(ours)
    assert all(x.requires_grad for x in ours.parameters())
    torch.testing.assert_close(ours(text).logits, eager(text).logits, **CLOSE)


@pytest.mark.parametrize("batch", BATCHES)
def test_dense_warm_up_sees_the_sequences(batch: str) -> None:
    arguments = BATCHES[batch]
    _, ours = pair("DeepSeek-V3.2", dense_warmup=True)
    valid = arguments.get("attention_mask", torch.ones_like(tokens())).bool()
    eager = make("DeepSeek-V3.2", index_topk=64)
    expected = eager(tokens(), **{**arguments, "use_cache": False}).logits[valid]
    actual = ours(tokens(), **arguments).logits[valid]
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_what_the_user_freezes_stays_frozen_after_the_warm_up(tmp_path: Path) -> None:
    """Before it or meanwhile, also in copies."""
    _, ours = pair("DeepSeek-V3.2")
    ours.lm_head.requires_grad_(False)
    enable_dsa(ours, dense_warmup=True)
    torch.save(ours, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for model in (loaded, copy.deepcopy(ours), ours):
        model.model.norm.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad = False
        disable_dsa(model)
        assert {x for x, y in model.named_parameters() if not y.requires_grad} == {
            "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight",
        }  # fmt: skip
        assert {type(x) for x in model.parameters()} == {nn.Parameter}


def test_all_or_nothing_is_enabled(name: str) -> None:
    """The last layer cannot be called: after an error the model is as it was."""
    eager, ours = make(name), make(name)
    last = ours.model.layers[2].mlp
    with (
        mock.patch.object(last, "register_forward_hook", side_effect=KeyError),
        pytest.raises(KeyError),
    ):
        enable_dsa(ours, dense_warmup=True)
    assert [type(x) for x in ours.modules()] == [type(x) for x in eager.modules()]
    assert all(x.requires_grad for x in ours.parameters())
    assert torch.equal(ours(tokens()).logits, eager(tokens()).logits)
    # A later stage of a pipeline has no embeddings.
    ours.model.embed_tokens = None
    enable_dsa(ours, dense_warmup=True)
    disable_dsa(ours)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_the_librarys_caches(name: str, cache: str, padded: bool) -> None:
    expected, actual = (generated(x, cache, padded, max_new_tokens=5) for x in pair(name))
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.logits, expected.logits, **CLOSE)
    assert type(actual.past_key_values) is type(expected.past_key_values)


@pytest.mark.parametrize("static", [False, True])
def test_chunks_of_a_prompt(name: str, static: bool) -> None:
    """Several tokens beside a cache, with which the first sequence of a pack goes on."""
    eager, ours = pair(name)
    text = tokens()
    for positions in (torch.arange(40), torch.cat([torch.arange(33), torch.arange(7)])):
        cache = transformers.DynamicCache(config=ours.config)
        if static:
            cache = transformers.StaticCache(config=ours.config, max_cache_len=48)
        parts = [
            ours(text[:, part], position_ids=positions[None, part], past_key_values=cache).logits
            for part in (slice(23), slice(23, None))
        ]
        whole = eager(text, position_ids=positions[None], use_cache=False).logits
        torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


COMPILED = [SPARSE[0], pytest.param(SPARSE[1], marks=nightly), "DeepSeek-V4"]


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled(name: str, checkpointing: bool) -> None:
    """In one graph, which also tells the losses; packs have the lengths of a collator."""
    torch.compiler.reset()
    _, ours = pair(name)
    ours.train()
    if checkpointing:
        ours.activation_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ends = {"cu_seq_lens_q": torch.tensor([0, 15, 16, 40]), "use_cache": False}
    plain = {"use_cache": False}
    padded = {**padding("left"), **plain}
    batches = [(plain, plain), (padded, padded), (ends, packing(1))]
    for arguments in batches[: 1 if name == "DeepSeek-V4" else 3]:
        text = tokens(1 if arguments[0] is ends else 2)
        valid = arguments[0].get("attention_mask", torch.ones_like(text)).bool()
        found = []
        for model, given in zip((compiled, ours), arguments, strict=True):
            ours.zero_grad()
            result = model(text, labels=targets(text, valid), **given)
            result.loss.backward()
            found.append((result.logits[valid], ours.indexer_losses(), gradients(ours)))
        assert len(found[0][1]) == {"DeepSeek-V4": 1, SPARSE[0]: 3, SPARSE[1]: 2}[name]
        torch.testing.assert_close(found[0], found[1], **CLOSE)


def test_lengths_of_a_collator_beside_a_cache(ours: nn.Module) -> None:
    cache = ours(tokens(1)).past_key_values
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: .* use_cache=False"):
        ours.model(tokens(1), past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 15, 40]))


def test_model_is_saved_as_it_was_and_loads_in_plain_transformers(
    name: str, tmp_path: Path
) -> None:
    eager, ours = pair(name)
    assert ours.config.to_dict() == eager.config.to_dict()
    assert list(ours.state_dict()) == list(eager.state_dict())
    ours.save_pretrained(tmp_path)
    plain = type(eager).from_pretrained(tmp_path)
    torch.testing.assert_close(plain(tokens()).logits, eager(tokens()).logits)


@every_model
def test_disable_restores(name: str) -> None:
    eager, ours = pair(name)
    assert list(ours.state_dict()) == list(eager.state_dict())
    disable_dsa(ours)
    assert torch.equal(ours(tokens()).logits, eager(tokens()).logits)
    assert [type(x) for x in ours.modules()] == [type(x) for x in eager.modules()]
    assert not hasattr(ours, "indexer_losses")


@every_model
def test_no_losses_where_nothing_learns(name: str, ours: nn.Module) -> None:
    ours(tokens(), labels=tokens()).loss.backward()
    learning = {SPARSE[1]: [0, 2], "DeepSeek-V4": [1]}.get(name, [0, 1, 2])
    assert list(ours.indexer_losses()) == learning
    with torch.no_grad():
        ours(tokens())
    assert not ours.indexer_losses()


def test_indexer_dtype(name: str) -> None:
    _, ours = pair(name, indexer_dtype=torch.bfloat16)
    ours(tokens(), labels=tokens()).loss.backward()
    in_float32 = make(name)
    enable_dsa(in_float32)
    in_float32(tokens())
    torch.testing.assert_close(
        ours.indexer_losses(), in_float32.indexer_losses(), rtol=0.05, atol=0.05
    )
    assert all(x.grad.dtype == torch.float32 for x in indexer_parameters(ours).values())


def test_models_in_bfloat16(name: str) -> None:
    eager, ours = make(name).bfloat16(), make(name).bfloat16()
    enable_dsa(ours)
    for model in (eager, ours):
        model(tokens(), labels=tokens()).loss.backward()
    x, y = (m.model.embed_tokens.weight.grad.float().flatten() for m in (eager, ours))
    # The selections differ in scores that bfloat16 does not tell apart.
    assert nn.functional.cosine_similarity(x, y, dim=0) > 0.985


WRONG_MASKS = {
    "gaps": (torch.tensor([[1, 0, 1, 1]]), ValueError, "zeros between them"),
    "not causal": (torch.ones(1, 1, 4, 4).bool(), ValueError, "expected a causal mask"),
    "shape": (torch.ones(1, 4, 4).bool(), ValueError, "expected shape"),
    "too long": (torch.ones(1, 5).long(), ValueError, r"rows of 4\.\.4 columns"),
    "too short": (torch.ones(1, 3).long(), ValueError, r"rows of 4\.\.4 columns"),
    "other batch": (torch.ones(2, 4).long(), ValueError, "expected 1 rows"),
}


@pytest.mark.parametrize("wrong", WRONG_MASKS)
def test_masks_that_no_lengths_describe(ours: nn.Module, wrong: str) -> None:
    mask, error, message = WRONG_MASKS[wrong]
    with pytest.raises(error, match=message):
        ours(tokens(1, 4), attention_mask=mask)


def test_mask_of_all_pairs(name: str) -> None:
    eager, ours = pair(name)
    causal = torch.ones(40, 40).tril().bool().expand(2, 1, 40, 40).clone()
    causal[0, :, :, :7] = False
    valid = padding("left")["attention_mask"].bool()
    in_floats = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
    expected = eager(tokens(), attention_mask=in_floats).logits[valid]
    for mask in (causal, in_floats):
        actual = ours(tokens(), attention_mask=mask).logits[valid]
        torch.testing.assert_close(actual, expected, **CLOSE)
    # One mask for all rows.
    expected = eager(tokens(), attention_mask=in_floats[:1]).logits[:, 7:]
    with torch.no_grad():
        actual = ours(tokens(), attention_mask=causal[:1]).logits[:, 7:]
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_wrong_models_say_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=r"got none in LlamaForCausalLM; .* register\(\)"):
        enable_dsa(make("Llama"))
    with pytest.raises(ValueError, match=r"none in HYV4ForCausalLM; its indexer .* not compute"):
        enable_dsa(make("HY-V4"))
    with pytest.raises(NotImplementedError, match=r"attention_dropout: expected 0, got 0\.1"):
        enable_dsa(make(name, attention_dropout=0.1))
    wrapped = make(name)
    wrapped.model.layers[1].self_attn.kv_b_proj = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=r"kv_b_proj: .* got Sequential; merge other"):
        enable_dsa(wrapped)
    _, ours = pair(name)
    with pytest.raises(NotImplementedError, match=r"output_attentions: .* disable_dsa"):
        ours(tokens(), output_attentions=True)
    for function in (enable_dsa, disable_dsa):
        with pytest.raises(ValueError, match="got a part of it"):
            function(ours.model)


def test_an_adapter_that_comes_later_is_refused(ours: nn.Module) -> None:
    adapter = nn.Sequential(nn.Linear(2, 2))
    layer = ours.model.layers[1].self_attn
    adapter.weight = layer.kv_b_proj.weight  # peft's have one, too
    layer.kv_b_proj = adapter
    with pytest.raises(NotImplementedError, match=r"kv_b_proj: .* got Sequential; merge other"):
        ours(tokens())


@pytest.mark.parametrize("after", [False, True])
def test_lora_of_all_projections(name: str, after: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    models = [make(name), make(name)]
    results = []
    for ours, model in enumerate(models):
        if ours and not after:
            enable_dsa(model)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        if ours and after:
            enable_dsa(model)
        result = adapted(tokens(), labels=tokens())
        result.loss.backward()
        learnt = {x: y.grad for x, y in adapted.named_parameters() if ".indexer." not in x}
        results.append((result.logits, learnt))
        with adapted.disable_adapter():
            torch.testing.assert_close(model(tokens()).logits, make(name)(tokens()).logits, **CLOSE)
    torch.testing.assert_close(results[1], results[0], **CLOSE)
    assert any(x.grad is not None for x in indexer_parameters(models[1]).values())


def test_generating_in_train_mode_computes_no_losses(ours: nn.Module) -> None:
    ours.train()
    ours(tokens(), labels=tokens())
    assert ours.indexer_losses()
    ours.generate(tokens(), max_new_tokens=2, do_sample=False)
    assert not ours.indexer_losses()


def test_saved_as_a_whole(ours: nn.Module, tmp_path: Path) -> None:
    torch.save(ours, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(tokens()).logits, ours(tokens()).logits)
    assert loaded.indexer_losses().keys() == ours.indexer_losses().keys()


def test_a_compiled_model_is_disabled_as_the_model_is(ours: nn.Module) -> None:
    disable_dsa(torch.compile(ours, backend="eager"))
    plain = {type(x) for x in ours.modules()}
    assert not any("Sparse" in kind.__name__ for kind in plain)
    assert not hasattr(ours, "indexer_losses")


def test_a_prompt_beside_a_static_cache_has_no_mask_of_all_pairs(ours: nn.Module) -> None:
    shapes: list[torch.Size] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            shapes.extend([result.shape] if isinstance(result, Tensor) else [])
            return result

    options = {"max_new_tokens": 2, "do_sample": False, "disable_compile": True}
    with Record():
        ours.generate(tokens(), cache_implementation="static", **options)
    assert shapes
    assert not [x for x in shapes if len(x) == 4 and x[:2] == (2, 1) and min(x[2:]) >= 40]


def test_only_the_module_of_the_model_is_imported() -> None:
    code = (
        "import sys\n"
        "from ascend_attn_ops.transformers import enable_dsa\n"
        "from support.small_models import make\n"
        "enable_dsa(make('DeepSeek-V3.2'))\n"
        "print([name for name in sys.modules if 'modeling_glm_moe_dsa' in name])\n"
    )
    ran = fresh.run(code)
    assert ran.out.strip() == "[]", ran.err
