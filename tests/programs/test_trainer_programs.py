"""transformers.Trainer over this library, against the stock package with its own attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from ascend_attn_ops.transformers import disable_dsa, enable_dsa, register  # noqa: E402

STEPS = 4
DENSE = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
SPARSE = {
    **DENSE, "first_k_dense_replace": 2, "num_attention_heads": 32, "num_key_value_heads": 32,
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "index_n_heads": 8, "index_head_dim": 128, "index_topk": 1024,
}  # fmt: skip
del SPARSE["head_dim"]


def padded(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(x["input_ids"]) for x in batch)
    ids = torch.tensor([x["input_ids"] + [0] * (longest - len(x["input_ids"])) for x in batch])
    labels = ids.masked_fill(ids == 0, -100)
    labels[:, 0] = -100  # a pack has no target for the first token
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def train(
    model: nn.Module, folder: Path, collate: Callable[..., Any] = padded, **options: Any
) -> list[float]:
    """Returns the loss of each step, of texts of other lengths."""
    generator = torch.Generator().manual_seed(0)
    texts = [
        {"input_ids": torch.randint(1, 64, (length,), generator=generator).tolist()}
        for length in (24, 17, 9, 24, 30, 8, 12, 13)
    ]
    for text in texts:
        text["labels"] = text["input_ids"]

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2,
        learning_rate=0.05, max_grad_norm=0, optim="sgd", lr_scheduler_type="constant",
        use_cpu=True, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=texts, data_collator=collate)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_steps(
    model: nn.Module, stock: nn.Module, first: dict[str, Any], dtype: Any
) -> None:
    """Compares what the parameters learnt, except those that the stock package does not train."""
    parameters = dict(model.named_parameters())
    learnt = 0
    for name, expected in stock.named_parameters():
        if not torch.equal(expected, first[name]):
            learnt += 1
            plain.assert_close(parameters[name] - first[name], expected - first[name], dtype, name)
    assert learnt >= 15


@pytest.mark.parametrize("collator", ["padded", "packed", "packed with lengths"])
def test_dense_model(collator: str, tmp_path: Path) -> None:
    """Packs are rows of texts one after another, beside the model's default, a cache."""
    register()
    stock = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**DENSE, attn_implementation="eager")
    )
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation("ascend_flash" if collator == "packed" else "ascend")
    first = copy.deepcopy(stock.state_dict())
    expected = train(stock, tmp_path)
    collate = padded
    if collator != "padded":
        lengths = collator == "packed with lengths"
        collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
    assert train(ours, tmp_path, collate) == pytest.approx(expected, rel=1e-4)
    assert_same_steps(ours, stock, first, torch.float32)


def test_sparse_model(tmp_path: Path) -> None:
    """The model learns as in the stock package, and the indexers learn as well."""
    stock = transformers.DeepseekV32ForCausalLM(
        transformers.DeepseekV32Config(**SPARSE, attn_implementation="eager")
    )
    ours = copy.deepcopy(stock)
    first = copy.deepcopy(stock.state_dict())
    expected = train(stock, tmp_path)
    enable_dsa(ours)
    assert train(ours, tmp_path, bf16=True) == pytest.approx(expected, rel=5e-3)
    assert list(ours.indexer_losses()) == [0, 1]
    disable_dsa(ours)
    assert_same_steps(ours, stock, first, torch.bfloat16)
    learnt = {name for name, x in ours.named_parameters() if not torch.equal(x, first[name])}
    assert learnt == {name for name, _ in ours.named_parameters()}
