"""trl's SFTTrainer with packs of datasets and peft's LoRA, against the stock package unpacked.

`make test-all` installs them: trl, peft and datasets.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from test_trainer_programs import DENSE, SPARSE
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed: make test-all installs it")
peft = pytest.importorskip("peft", reason="peft is not installed: make test-all installs it")
datasets = pytest.importorskip(
    "datasets", reason="datasets is not installed: make test-all installs it"
)

from ascend_attn_ops.transformers import enable_dsa, register  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

STEPS = 3
LENGTHS = (24, 9, 17)


def train(
    model: nn.Module, folder: Path, packing: bool, **options: Any
) -> tuple[list[float], nn.Module]:
    """The loss of each step over the same texts, and what is trained: a LoRA of all layers."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 64, (n,), generator=generator).tolist() for n in LENGTHS]
    words = {f"w{i}": i for i in range(64)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="w0", eos_token="w1",
    )  # fmt: skip
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=STEPS, learning_rate=0.05, max_grad_norm=0, optim="sgd",
        per_device_train_batch_size=1 if packing else len(texts), lr_scheduler_type="constant",
        packing=packing, max_length=sum(LENGTHS), use_cpu=True, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True,
        **{"bf16": False, **options},
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model, arguments, processing_class=tokenizer, peft_config=lora,
        train_dataset=datasets.Dataset.from_dict({"input_ids": texts}),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model


@pytest.mark.parametrize("implementation", ["ascend", "ascend_flash"])
def test_packed_dense_model(implementation: str, tmp_path: Path) -> None:
    register()
    stock = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**DENSE, attn_implementation="eager")
    )
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation(implementation)
    expected, stock = train(stock, tmp_path, packing=False)
    losses, ours = train(ours, tmp_path, packing=True)
    assert len(expected) == STEPS
    assert losses == pytest.approx(expected, rel=1e-4)
    parameters = dict(ours.named_parameters())
    trained = {name: x for name, x in stock.named_parameters() if x.requires_grad}
    assert len(trained) == 2 * 7 * DENSE["num_hidden_layers"]
    for name, x in trained.items():
        plain.assert_close(parameters[name], x, torch.float32, name)


def test_packed_sparse_model(tmp_path: Path) -> None:
    stock = transformers.DeepseekV32ForCausalLM(
        transformers.DeepseekV32Config(**SPARSE, attn_implementation="eager")
    )
    ours = copy.deepcopy(stock)
    expected, _ = train(stock, tmp_path, packing=False)
    enable_dsa(ours)
    losses, trained = train(ours, tmp_path, packing=True, bf16=True)
    assert losses == pytest.approx(expected, rel=5e-3)
    indexers = {n: x for n, x in trained.named_parameters() if "indexer" in n and "lora_B" in n}
    assert len(indexers) == 3 * SPARSE["num_hidden_layers"]
    assert all(x.any() for x in indexers.values()), "they start at 0"
    assert list(ours.indexer_losses()) == [0, 1]
