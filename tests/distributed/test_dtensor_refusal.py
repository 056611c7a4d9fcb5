"""Where torch lacks what the operators need of DTensor, enable_dtensor() says so."""

from __future__ import annotations

import pytest
from ascend_attn_ops.distributed import dtensor


def test_a_torch_without_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtensor, "EXPLICIT", None)
    with pytest.raises(RuntimeError, match=r"torch: expected a version .* 2\.10 to 2\.15 have"):
        dtensor.enable_dtensor()
