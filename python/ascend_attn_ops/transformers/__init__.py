"""The operators in models of Hugging Face transformers."""

try:
    import transformers as _transformers  # noqa: F401
    from transformers.models import deepseek_v32, glm_moe_dsa  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ascend_attn_ops.transformers needs transformers 5.23 or 5.24: "
        f"pip install 'transformers>=5.23,<5.25' ({error})"
    ) from error

from ascend_attn_ops.transformers._dense import register, unregister
from ascend_attn_ops.transformers._dsa import disable_dsa, enable_dsa

__all__ = ["disable_dsa", "enable_dsa", "register", "unregister"]
