"""In exact mode on a GPU, replacements of torch's functions give torch's results, however they are called."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from radixkv.errors import ConfigError
from radixkv.model.exactness import ExactFunctions
from radixkv.model.exactness_on_gpu import require_exact_gpu, row_functions
from tests.kernels.gpu.interpreter import interpret_kernels


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    if torch.cuda.is_available():
        return "cuda"
    interpret_kernels(monkeypatch)
    return "cpu"


@pytest.mark.parametrize(
    "call",
    [
        lambda rows: rows.mean(-1),
        lambda rows: rows.mean(-1, keepdim=True),
        lambda rows: rows.mean(dim=2, keepdim=True),
        lambda rows: torch.mean(rows, dim=(-1,)),
        lambda rows: rows.mean(),
        lambda rows: rows.mean(0),
        lambda rows: rows.mean((0, 1), keepdim=True),
        lambda rows: rows.mean(-1, dtype=torch.float64),
        lambda rows: rows.sum().mean(),
        lambda rows: functional.rms_norm(rows, (8,), torch.arange(8.0).to(rows), 1e-5),
        lambda rows: functional.rms_norm(rows, (8,)),
        lambda rows: functional.rms_norm(rows, (5, 8), eps=1e-5),
        lambda rows: rows.double().mean(-1),
        lambda rows: functional.rms_norm(rows.double(), (8,), eps=1e-5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_torch(dtype: torch.dtype, call, device: str) -> None:
    rows = 0.01 * torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected = call(rows)
    with ExactFunctions(row_functions()):
        got = call(rows)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected)


def test_gpus_that_the_tiles_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="A GPU", shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    require_exact_gpu(torch.device("cuda"))
    gpu.shared_memory_per_block_optin = 166_912
    with pytest.raises(ConfigError, match=r"^model\.exactness: expected a GPU with 232448 .*, got A GPU with 166912;"):
        require_exact_gpu(torch.device("cuda"))


@pytest.mark.parametrize(("override", "is_refused"), [("1", True), ("0", False), ("", False)])
def test_tf32_set_by_the_environment_is_rejected(
    override: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(name="A GPU", shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    if not is_refused:
        require_exact_gpu(torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match=r"expected NVIDIA_TF32_OVERRIDE to be 0 or not set for exact, got 1"):
        require_exact_gpu(torch.device("cuda"))


def test_exact_mode_disables_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="A GPU", shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    usual_precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        require_exact_gpu(torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(usual_precision)
