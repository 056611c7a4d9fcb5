"""attn_implementation="ascend_flash": transformers' own server, against generate()."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from ascend_attn_ops._core import device_limits  # noqa: E402
from ascend_attn_ops.transformers import register, unregister  # noqa: E402
from support.small_models import VOCABULARY, make  # noqa: E402
from transformers import ContinuousBatchingConfig  # noqa: E402
from transformers import modeling_flash_attention_utils as flash  # noqa: E402
from transformers.generation.continuous_batching import PagedAttentionCache  # noqa: E402

# The longest prompt goes through in chunks of 24 tokens, and the window of 7 keys goes round.
LENGTHS = (40, 3, 17, 61)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
CALL = ops.fused_infer_attention_score


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Without limits in every thread: transformers serves in one of its own."""
    before = device_limits.device_in_force()
    assert before is not None
    ops.set_limits(None)
    register()
    yield
    ops.set_limits(*before)  # type: ignore[arg-type]


def model_of(name: str) -> nn.Module:
    """As users make it: models with a list of flash implementations refuse other names."""
    if name != "GptOss":
        return make(name, "ascend_flash")
    model = make(name, "ascend")
    model.config._attn_implementation = "ascend_flash"
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def served(
    model: nn.Module, texts: list[list[int]] | None = None, page_size: int = 16, **options: Any
) -> list[list[int]]:
    config = ContinuousBatchingConfig(
        page_size=page_size, num_blocks=384 // page_size, max_batch_tokens=24,
        max_requests_per_batch=options.pop("max_requests_per_batch", None),
    )  # fmt: skip
    generation = transformers.GenerationConfig(**{**GREEDY, "eos_token_id": -1, **options})
    results = model.generate_batch(
        texts or prompts(), generation_config=generation, continuous_batching_config=config
    )
    assert {result.error for result in results.values()} == {None}
    return [result.generated_tokens for result in results.values()]


def generated(model: nn.Module, texts: list[list[int]] | None = None) -> list[list[int]]:
    results = []
    for prompt in texts or prompts():
        text = torch.tensor([prompt])
        tokens = model.generate(text, attention_mask=torch.ones_like(text), **GREEDY)
        results.append(tokens[0, len(prompt) :].tolist())
    return results


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of the operator."""
    seen = []

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append({"query": query, "key": key, **options})
        return CALL(query, key, value, **options)

    monkeypatch.setattr(ops.ops, "fused_infer_attention_score", call)
    return seen


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "PhiMoE", "Gemma4", "GptOss"])
def test_tokens_are_those_of_generate(name: str, calls: list[dict[str, Any]]) -> None:
    expected = generated(make(name))
    assert served(model_of(name)) == expected
    assert {call["layout"] for call in calls} == {"TND"}
    modes = {call["sparse_mode"]: call["block_table"] is not None for call in calls}
    # Keys of a window are copied; all others are read where they are once some are cached.
    known = {"Llama": {3: True}, "Qwen3": {3: True}, "Mistral": {4: False}, "PhiMoE": {4: False}}
    assert modes == known.get(name, {4: False, 3: True})
    # Chunks of prompts and single tokens share steps.
    counts = [torch.tensor([0, *x["actual_seq_lengths_query"]]).diff() for x in calls]
    assert any(len(x) > 1 and x.min() == 1 and x.max() > 1 for x in counts)


def test_pages_are_read_in_place(calls: list[dict[str, Any]]) -> None:
    served(make("Llama", "ascend_flash"))
    paged = [call["key"] for call in calls if call["block_table"] is not None]
    layers = {key.data_ptr() for key in paged}
    assert len(layers) == 2
    assert len({key.untyped_storage().data_ptr() for key in paged}) == 1


@pytest.mark.parametrize("page_size", [8, 32])
def test_sizes_of_pages(page_size: int, calls: list[dict[str, Any]]) -> None:
    """The operator takes multiples of 16, and the keys of other pages are copied."""
    expected = generated(make("Llama"))
    assert served(make("Llama", "ascend_flash"), page_size=page_size) == expected
    assert any(call["block_table"] is not None for call in calls) == (page_size == 32)


def test_requests_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request begins with the pages of an earlier one, and answers fork one prompt."""
    matched = []
    search = PagedAttentionCache.search_prefix_match

    def seen(cache: PagedAttentionCache, *arguments: Any) -> int:
        matched.append(search(cache, *arguments))
        return matched[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", seen)
    start = list(range(50))
    texts = [[*start, 1, 2], [*start, 3], [*start[:40], 9, 9]]
    expected = generated(make("Llama"), texts)
    model = make("Llama", "ascend_flash")
    assert served(model, texts, max_requests_per_batch=1) == expected
    assert matched == [0, 48, 32]
    forked = served(model, texts[:1], num_return_sequences=2, do_sample=True, top_k=1)
    assert forked == [expected[0]] * 2


def test_without_a_paged_cache_it_is_the_other_attention() -> None:
    first, second = make("Llama", "ascend"), make("Llama", "ascend_flash")
    assert generated(second) == generated(first)


def test_other_attention_is_served_as_before() -> None:
    assert served(make("Llama", "sdpa")) == generated(make("Llama"))


LACKING = {"Gemma2": "softcap", "ImageGPT": "models compute it themselves", "Doge": "mask"}
if transformers.__version__ >= "5.24":  # which updates a cache before the attention
    LACKING["DiffLlama"] = "expected what the model caches"


@pytest.mark.parametrize("name", LACKING)
def test_features_that_it_lacks(name: str) -> None:
    model = make(name, "ascend_flash")
    config = ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=24)
    results = model.generate_batch(prompts()[:1], continuous_batching_config=config)
    (result,) = results.values()
    assert LACKING[name] in result.error


def test_unregister_leaves_nothing() -> None:
    unregister()
    assert not hasattr(flash._lazy_imports, "__wrapped__")
    assert PagedAttentionCache.update.__code__.co_name != "leave_to_attention"
    with pytest.raises(ValueError, match="ascend_flash"):
        make("Llama", "ascend_flash")
    register()
    register()
    make("Llama", "ascend_flash")
    assert flash._lazy_imports.__wrapped__.__module__ == flash.__name__
