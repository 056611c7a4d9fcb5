"""Programs of plain torch on the simulated NPU: what they compute on the CPU, to the last bit."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def on_cpu(result: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.detach().cpu(), result)


def same_on_both(program: Callable[..., Any]) -> Callable[..., None]:
    """Makes a test of a program, which gets a device before the test's own parameters."""
    _, *parameters = inspect.signature(program).parameters.values()

    def test(**options: Any) -> None:
        expected, actual = (on_cpu(program(device, **options)) for device in ("cpu", "npu"))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return test


def numbers(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 11)
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@same_on_both
def test_training(device: str, optimizer: str) -> Any:
    model = small_model().to(device)
    steps = OPTIMIZERS[optimizer](model.parameters())
    tokens = torch.arange(33).remainder(11).view(3, 11).to(device)
    losses = []
    for _ in range(3):
        steps.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.step()
        losses.append(loss)
    return [*losses, *model.parameters()]


@same_on_both
def test_matrix_products_and_their_gradients(device: str) -> Any:
    results = []
    for left, right in [((4, 5), (5,)), ((5,), (5, 3)), ((2, 4, 5), (5, 3)),
                        ((2, 1, 4, 5), (3, 5, 2)), ((5,), (5,))]:  # fmt: skip
        x, y = (numbers(*size).to(device).requires_grad_() for size in (left, right))
        out = x @ y
        out.sum().backward()
        results += [out, x.grad, y.grad]
    w = numbers(3, 2, 3, 3).to(device).requires_grad_()
    F.conv2d(numbers(1, 2, 8, 8).to(device), w, padding=1).square().sum().backward()
    return [*results, w.grad]


@same_on_both
def test_operators_that_torch_npu_differentiates_itself(device: str) -> Any:
    x = numbers(4, 6).to(device).requires_grad_()
    index = torch.tensor([[0, 2], [1, 1], [5, 0], [3, 3]]).to(device)
    target = (numbers(4, 6, seed=1) > 0).float().to(device)
    losses = [
        x.gather(1, index).sum(), F.binary_cross_entropy_with_logits(x, target),
        F.kl_div(x.log_softmax(1), target.softmax(1), reduction="batchmean"),
        F.l1_loss(x, target), x.repeat_interleave(2, 0).square().sum(), F.logsigmoid(x).sum(),
        torch.where(x > 0, x, x * 2).sum(), F.mish(x).sum(), F.silu(x).sum(),
        torch.cdist(x, target).sum(), torch.fft.rfft(x).abs().sum(), x.renorm(2, 0, 1).sum(),
        torch.stft(x.flatten(), 8, return_complex=True, window=torch.ones(8, device=device))
        .abs().sum(),
    ]  # fmt: skip
    with sdpa_kernel(SDPBackend.MATH):  # of several, the CPU takes another
        losses.append(F.scaled_dot_product_attention(x[None], x[None], x[None]).sum())
    return [*losses, *(torch.autograd.grad(loss, x, retain_graph=True) for loss in losses)]


@same_on_both
def test_complex_numbers(device: str) -> Any:
    x = torch.view_as_complex(numbers(3, 4, 2).to(device))
    product = x.conj() @ x.T
    return [product, torch.view_as_real(product), x.real, x.imag, x.abs(), torch.fft.fft(x)]


@same_on_both
def test_factories(device: str) -> Any:
    return [
        torch.arange(5, device=device), torch.linspace(0, 1, 7, device=device),
        torch.eye(3, device=device), torch.full((2,), 3, device=device),
        torch.tril(torch.ones(3, 3, device=device)), torch.zeros(2, device=device),
        torch.tril_indices(3, 3, device=device), torch.tensor([1, 2], device=device),
        torch.ones(2, 2, device=device).new_zeros(3),
    ]  # fmt: skip


def draws() -> list[Tensor]:
    x = torch.ones(50, device="npu")
    return [
        torch.randn(5, device="npu"), torch.rand(5, device="npu"), x.bernoulli(0.5),
        torch.randperm(9, device="npu"), F.dropout(x, 0.5), x.clone().normal_(),
        torch.multinomial(x, 4), torch.randint(9, (5,), device="npu"),
    ]  # fmt: skip


def test_random_numbers_are_those_of_the_seed() -> None:
    before = torch.get_rng_state()
    torch.npu.manual_seed(3)
    first = on_cpu(draws())
    second = on_cpu(draws())
    torch.npu.manual_seed(3)
    torch.testing.assert_close(on_cpu(draws()), first, rtol=0, atol=0)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[5][:5])
    # The CPU's own generator is left alone.
    assert torch.equal(torch.get_rng_state(), before)

    state = torch.npu.get_rng_state()
    after = on_cpu(draws())
    torch.npu.set_rng_state(state)
    torch.testing.assert_close(on_cpu(draws()), after, rtol=0, atol=0)

    torch.manual_seed(3)
    torch.testing.assert_close(on_cpu(draws()), first, rtol=0, atol=0)


def test_checkpointing_repeats_the_random_numbers() -> None:
    def gradient(recompute: bool) -> Tensor:
        torch.manual_seed(0)
        x = numbers(64).npu().requires_grad_()

        def layer(y: Tensor) -> Tensor:
            return F.dropout(y * y, 0.5)

        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        out.sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    assert torch.equal(gradient(True), gradient(False))


def test_autocast_and_the_gradient_scaler() -> None:
    model = small_model().npu()
    tokens = torch.arange(33).remainder(11).view(3, 11).npu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("npu", init_scale=4.0)
    for _ in range(2):
        with torch.autocast("npu", torch.float16):
            out = model(tokens)
            loss = F.cross_entropy(out.flatten(0, 1), tokens.flatten())
        assert out.dtype == torch.float16
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_saving_and_loading() -> None:
    file = io.BytesIO()
    torch.save({"x": numbers(3, 4).npu().t(), "model": small_model().npu().state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["x"].device == torch.device("npu:0")
    # torch_npu 2.8 saves rows one after another.
    assert loaded["x"].stride() == ((3, 1) if torch.__version__[:4] == "2.8." else (1, 4))
    assert torch.equal(loaded["x"].cpu(), numbers(3, 4).t())
    file.seek(0)
    assert torch.load(file, map_location="cpu", weights_only=True)["x"].is_cpu


def test_data_loaders_and_pinned_memory() -> None:
    data = TensorDataset(numbers(8, 3))
    batches = [x.to("npu", non_blocking=True) for (x,) in DataLoader(data, 4, pin_memory=True)]
    assert torch.equal(torch.cat(batches).cpu(), numbers(8, 3))
    assert numbers(3).pin_memory().is_pinned()


def test_threads() -> None:
    def work(seed: int) -> Tensor:
        x = numbers(16, 16, seed=seed).npu()
        for _ in range(20):
            x = torch.tanh(x @ x)
        return x.cpu()

    expected = [work(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        torch.testing.assert_close(list(pool.map(work, range(4))), expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    model = small_model()
    compiled = torch.compile(copy.deepcopy(model).npu(), backend=backend)
    tokens = torch.arange(11)[None]
    out = compiled(tokens.npu())
    out.sum().backward()
    assert torch.equal(out.detach().cpu(), model(tokens).detach())


def test_work_in_the_queue_comes_first() -> None:
    """torch's operators on the CPU read memory that queued operators of ours still write."""
    import ascend_attn_ops

    x = numbers(1, 256, 8, 64).bfloat16()

    def attend(y: Tensor) -> Tensor:
        return ascend_attn_ops.flash_attention_score(y, y, y, num_heads=8, layout="BSND")[0]

    assert torch.equal((attend(x.npu()) + 1).cpu(), attend(x) + 1)


def test_memory_statistics() -> None:
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated()
    x = torch.ones(1 << 20, device="npu")
    y = x + 1
    assert torch.npu.memory_allocated() - before == pytest.approx(8 << 20, rel=0.01)
    del x, y
    assert torch.npu.memory_allocated() == before


@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason=f"the profiler of torch {torch.__version__} asks a CUPTI, which is not there",
)
def test_profiler_and_deterministic_algorithms() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (torch.ones(4, device="npu") @ torch.ones(4, device="npu")).item()
    assert any("dot" in event.key for event in profile.key_averages())


@pytest.fixture
def another_device() -> Iterator[Tensor]:
    yield torch.ones(3, device="npu:1")
    torch.npu.set_device(0)


def test_tensors_of_other_devices(another_device: Tensor) -> None:
    here = torch.ones(3, device="npu:0")
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and npu:1"):
        here + another_device
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu"):
        here + torch.ones(3)
    assert (here + torch.tensor(1.0)).tolist() == [2.0] * 3
    assert (another_device + 1).device == torch.device("npu:1")
    assert another_device.to("npu:0").tolist() == [1.0] * 3


def test_an_operator_without_a_kernel() -> None:
    x = torch.ones(2, 3, 4, device="npu")
    with pytest.raises(NotImplementedError, match=r"aten::batch_norm_stats: .*torch\.library"):
        torch.batch_norm_stats(x, 1e-5)


def test_the_host_waits_for_what_another_thread_records() -> None:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    event = torch.npu.ExternalEvent()
    event.wait(main)
    recorder = Timer(0.05, event.record, (side,))
    recorder.start()
    main.synchronize()
    recorder.join()
    assert main.query()
