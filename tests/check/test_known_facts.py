"""The facts that the check tries are those of the page, and their names are unique."""

from __future__ import annotations

import re

import pytest
from ascend_attn_check.known_facts import FACTS, Fact
from ascend_attn_check.samples import OPERATORS
from ascend_attn_check.unprobed_facts import UNPROBED, Unprobed
from support.checkout import ROOT

PAGE = (ROOT / "docs/specification/device.md").read_text(encoding="utf-8")
SECTIONS = {
    section.splitlines()[0]: section for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
}
STATEMENTS: list[Fact | Unprobed] = [*FACTS, *UNPROBED]

# Paragraphs that say what this library does, or that explain the statement before them.
EXPLANATIONS = {
    "lightning_indexer_grad": (
        "The limits refuse all of these", "The defect in TND is in the kernel",
        "every run of consecutive sequences",
    ),
    "sparse_flash_attention": (
        "executed off the device", "The last one runs on the device",
    ),
    "sparse_flash_attention_grad": ("**Gradient of the statistics.**",),
    "sparse_lightning_indexer_grad_kl_loss": ("**Weights of tokens.**",),
    "flash_attention_score": (
        "The launch passes pre_tokens and next_tokens",
        "The launch uses functions of CANN that take them", "Otherwise it calls the functions",
        "A graph that updates lengths", "The launch makes the compressed masks",
        "**Padded batches.**",
    ),
    "flash_attention_score_grad": (
        "launches such a gradient in layout BNSD", "**Gradient of the statistics.**",
    ),
    "fused_infer_attention_score": (
        "The launch calls `aclnnFusedInferAttentionScoreV4`", "The launch writes -inf, or the sink",
        "the launch says the same with the lengths", "**Reported from devices.**",
        "This library passes no pse_shift to the function",
    ),
    "sparse_flash_mla": (
        "The launch first computes the metadata", "The device requires residuals beside",
    ),
    "sparse_flash_mla_grad": (
        "The limits refuse the calls without a sink", "the launch turns determinism off",
        "**Gradient of the statistics.**",
    ),
    "sparse_lightning_indexer_kl_loss_grad": ("A pack is launched with one more sequence",),
    "scatter_pa_kv_cache_": ("the launch first makes key and value",),
}  # fmt: skip


def blocks(section: str) -> list[str]:
    """The paragraphs and the rows of tables, each on one line."""
    found = []
    for block in re.split(r"\n\s*\n", section)[1:]:
        if block.startswith("|"):
            found += [line.strip("| ") for line in block.splitlines()[2:]]
        elif not block.startswith("% "):
            found.append(" ".join(block.split()))
    return [x for x in found if x]


@pytest.mark.parametrize("fact", STATEMENTS, ids=lambda fact: fact.id)
def test_a_fact_is_quoted_from_the_page(fact: Fact | Unprobed) -> None:
    assert any(fact.quote in block for block in blocks(SECTIONS[fact.operator]))


@pytest.mark.parametrize("operator", [x for x in SECTIONS if x in OPERATORS])
def test_every_statement_of_the_page_is_probed_or_has_a_reason(operator: str) -> None:
    quotes = [x.quote for x in STATEMENTS if x.operator == operator]
    quotes += EXPLANATIONS.get(operator, ())
    assert [x for x in blocks(SECTIONS[operator]) if not any(y in x for y in quotes)] == []


def test_names_are_unique_and_every_reason_is_given() -> None:
    names = [fact.id for fact in STATEMENTS]
    assert len(names) == len(set(names))
    assert all(x.why for x in UNPROBED)
