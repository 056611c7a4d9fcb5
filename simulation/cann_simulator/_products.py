"""The simulated devices: their names, which ascend_attn_ops knows, and the functions they lack."""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache
from types import ModuleType

import cann_simulator

# The SoC that is simulated where a product is asked for.
SOC_OF_PRODUCT = {
    "A2": "Ascend910B2", "A3": "Ascend910_9391", "950": "Ascend950PR_9579", "310P": "Ascend310P3",
}  # fmt: skip
DEFAULT = SOC_OF_PRODUCT["A2"]

_INDEXER_GRAD = ("aclnnLightningIndexerGrad",)
_SPARSE = (
    "aclnnSparseFlashAttention", "aclnnSparseFlashAttentionGrad", "aclnnLightningIndexer",
    *_INDEXER_GRAD, "aclnnSparseLightningIndexerGradKLLoss", "aclnnKvQuantSparseFlashAttention",
)  # fmt: skip

# Dense attention with sinks or ropes: of A2 and A3, and of Ascend 950.
_EXTENDED = (
    "aclnnFlashAttentionScoreV3", "aclnnFlashAttentionScoreGradV3",
    "aclnnFlashAttentionVarLenScoreV3", "aclnnFlashAttentionUnpaddingScoreGradV3",
    "aclnnFlashAttentionVarLenScoreV5", "aclnnFlashAttentionUnpaddingScoreGradV5",
)  # fmt: skip
_EXTENDED_950 = ("aclnnFlashAttentionScoreV4", "aclnnFlashAttentionScoreGradV4")

# Attention for inference: of A2 and A3, and of Ascend 950.
_INFER = ("aclnnFusedInferAttentionScoreV4",)
_INFER_950 = ("aclnnFusedInferAttentionScoreV5",)

# A2 and A3 have them from CANN 9.1 on.
_MLA = (
    "aclnnSparseFlashMla", "aclnnSparseFlashMlaMetadata", "aclnnSparseFlashMlaGrad",
    "aclnnLightningIndexerV2", "aclnnSparseLightningIndexerKLLossGrad",
)  # fmt: skip

# Ascend 950 has it from CANN 9.0 on, for float8.
_QUANT = ("aclnnQuantLightningIndexer",)

# The aclnn functions that the libraries of a product, or of one of its releases, lack.
WITHOUT = {
    "A2": _INFER_950,
    "A2-8.5": _MLA,
    "A2-9.0": _MLA,
    "A3": _INFER_950,
    "A3-8.5": _MLA,
    "A3-9.0": _MLA,
    "950": (*_INFER, *_MLA),
    "950-8.5": (*_SPARSE, *_QUANT, *_EXTENDED, *_EXTENDED_950, *_INFER_950),
    "950-9.0": (*_SPARSE, *_EXTENDED),
    "950-9.1": _INDEXER_GRAD,
    "310P": (
        *_SPARSE, *_QUANT, *_MLA, *_EXTENDED, *_EXTENDED_950, *_INFER, *_INFER_950,
        "aclnnFlashAttentionScoreV2", "aclnnFlashAttentionScoreGradV2",
        "aclnnFlashAttentionVarLenScoreV2", "aclnnFlashAttentionUnpaddingScoreGradV2",
        "aclnnScatterPaKvCache",
    ),
}  # fmt: skip


@cache
def operators() -> ModuleType | None:
    """Return `_C` of ascend_attn_ops, which has the operators and the names of the products.

    None: ascend_attn_ops is not installed.
    """
    if importlib.util.find_spec("ascend_attn_ops") is None:
        return None
    version = importlib.import_module("ascend_attn_ops").__version__
    if version != cann_simulator.__version__:
        raise ImportError(
            f"cann_simulator {cann_simulator.__version__} needs ascend_attn_ops "
            f"{cann_simulator.__version__}, and ascend_attn_ops {version} is installed; install "
            "both from the same sources"
        )
    return importlib.import_module("ascend_attn_ops._C")


def device_of(product: str) -> tuple[str, str]:
    """Return the product and the SoC that are meant: ("A2", "Ascend910B2").

    Args:
        product: A product, or the name of a SoC.

    Raises:
        ValueError: The name is unknown. Without ascend_attn_ops, which knows the products, every
            name of a SoC is taken, and its product is "".
    """
    library = operators()
    if library is None:
        if not product.startswith("Ascend"):
            raise ValueError(
                f"product: expected the name of a SoC, such as {DEFAULT}, because ascend_attn_ops, "
                f"which knows the products, is not installed; got {product}"
            )
        return "", product
    soc = SOC_OF_PRODUCT.get(product, product)
    for name, prefix in library.products:
        if soc.startswith(prefix):
            return name, soc
    known = ", ".join([*SOC_OF_PRODUCT, *SOC_OF_PRODUCT.values()])
    raise ValueError(f"product: expected a product or the name of a SoC: {known}; got {product}")


def check_version(cann: str) -> None:
    """Raise ValueError for a release of CANN that ascend_attn_ops does not know."""
    library = operators()
    if library is None:
        if not re.fullmatch(r"\d+\.\d+", cann):
            raise ValueError(f"cann: expected a release, such as 9.1; got {cann}")
    elif cann not in library.cann_versions:
        raise ValueError(f"cann: expected one of {', '.join(library.cann_versions)}; got {cann}")


def missing_functions(product: str, cann: str) -> tuple[str, ...]:
    """Return the aclnn functions that a device lacks, of those that the simulation has."""
    return tuple(x for key in (product, f"{product}-{cann}") for x in WITHOUT.get(key, ()))
