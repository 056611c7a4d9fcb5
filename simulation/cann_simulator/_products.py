"""What differs between the simulated devices: their names, and the functions that they lack."""

from __future__ import annotations

SOCS = {
    "A2": "Ascend910B2", "A3": "Ascend910_9391", "950": "Ascend950PR_9579", "310P": "Ascend310P3",
}  # fmt: skip
VERSIONS = ("8.5", "9.0", "9.1")

# How the name of a SoC begins, by product.
_BEGINNINGS = {"A2": "Ascend910B", "A3": "Ascend910_93", "950": "Ascend950", "310P": "Ascend310P"}

_INDEXER_GRAD = ("aclnnLightningIndexerGrad",)
_SPARSE = (
    "aclnnSparseFlashAttention", "aclnnSparseFlashAttentionGrad", "aclnnLightningIndexer",
    *_INDEXER_GRAD, "aclnnSparseLightningIndexerGradKLLoss",
)  # fmt: skip

# The aclnn functions that the libraries of a product, or of one of its releases, lack.
WITHOUT = {
    "A3": ("aclnnPromptFlashAttentionV2",),
    "950-8.5": _SPARSE,
    "950-9.0": _SPARSE,
    "950-9.1": _INDEXER_GRAD,
    "310P": (
        *_SPARSE, "aclnnFlashAttentionScoreV2", "aclnnFlashAttentionScoreGradV2",
        "aclnnFlashAttentionVarLenScoreV2", "aclnnFlashAttentionUnpaddingScoreGradV2",
        "aclnnScatterPaKvCache",
    ),
}  # fmt: skip


def soc_name(text: str) -> str:
    """Return the SoC that is meant: a name, or a product for its usual one."""
    name = SOCS.get(text, text)
    product_of(name)
    return name


def product_of(soc: str) -> str:
    """Return the product that a SoC belongs to, as "A2"."""
    for product, beginning in _BEGINNINGS.items():
        if soc.startswith(beginning):
            return product
    known = ", ".join([*SOCS.values(), *SOCS])
    raise ValueError(f"soc: expected the name of a SoC, such as {known}; got {soc}")


def missing_functions(soc: str, cann: str) -> tuple[str, ...]:
    """Return the aclnn functions that a device lacks, of those that the simulation has."""
    product = product_of(soc)
    return tuple(x for key in (product, f"{product}-{cann}") for x in WITHOUT.get(key, ()))
