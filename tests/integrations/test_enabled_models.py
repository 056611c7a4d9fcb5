"""Changes of a model between enable_dsa and disable_dsa."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from ascend_attn_ops.integrations.transformers import disable_dsa, enable_dsa  # noqa: E402
from support import fresh  # noqa: E402
from support.small_models import SPARSE, make, tokens  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_limits")


@pytest.fixture(params=SPARSE)
def ours(request: pytest.FixtureRequest) -> nn.Module:
    model = make(request.param)
    enable_dsa(model)
    return model


def test_an_adapter_that_comes_later_is_refused(ours: nn.Module) -> None:
    adapter = nn.Sequential(nn.Linear(2, 2))
    layer = ours.model.layers[1].self_attn
    adapter.weight = layer.kv_b_proj.weight  # peft's have one, too
    layer.kv_b_proj = adapter
    with pytest.raises(NotImplementedError, match=r"kv_b_proj .* got Sequential; merge adapters"):
        ours(tokens())


def test_chunk_whose_mask_leaves_out_the_cache(ours: nn.Module) -> None:
    cache = transformers.DynamicCache(config=ours.config)
    ours(tokens()[:, :20], past_key_values=cache)
    mask = torch.ones(2, 20, dtype=torch.long)
    with pytest.raises(ValueError, match="at least 40"):
        ours(tokens()[:, 20:], attention_mask=mask, past_key_values=cache)


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
        "from ascend_attn_ops.integrations.transformers import enable_dsa\n"
        "from support.small_models import make\n"
        "enable_dsa(make('DeepSeek-V3.2'))\n"
        "print([name for name in sys.modules if 'modeling_glm_moe_dsa' in name])\n"
    )
    ran = fresh.run(code)
    assert ran.out.strip() == "[]", ran.err
