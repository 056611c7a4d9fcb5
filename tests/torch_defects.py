"""Tests that a defect of some versions of torch would fail, whatever operator they call."""

from __future__ import annotations

import pytest
import torch

# Any torch.library.custom_op shows it as well, with dynamic=False too.
INDUCTOR_LOSES_THE_OFFSET = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason=f"inductor of torch {torch.__version__} loses the offset of a view that is mutated",
)
# Any module does whose sizes are compared.
EXPORT_LOSES_STAR_ARGUMENTS = pytest.mark.skipif(
    (2, 9) <= torch.__version__ < (2, 10),
    reason=f"what torch {torch.__version__} exports of forward(*tensors) checks unknown names",
)
