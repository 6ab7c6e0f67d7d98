"""Triton is needed on a GPU only."""

import subprocess
import sys

import pytest
import torch

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.model.loading import load_model
from tests.patience import PATIENCE_S
from tests.rules.house import ROOT, imported_modules, imported_names, modules

ONLY_IMPORTER = "radixkv.model.on_gpu"
NEED_TRITON = (
    "adapters.low_rank_kernels",
    "attention.flashinfer_kernels",
    "attention.triton_kernels",
    "exactness_on_gpu",
    "layers.gpu_layers",
)
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.config import Config
from radixkv.startup.build_engine import build_engine
prompt = PrefillParams(bytes(4 * 40))
for exactness in ("exact", "fast"):
    settings = [f"model.exactness={exactness}", "model.device=cpu", "cache.capacity_tokens=1024"]
    engine = build_engine(Config.load(None, settings))
    engine.start()
    cold, warm = (engine.prefill(prompt).result(500) for _ in range(2))
    assert (cold.usage.computed_tokens, warm.usage.cached_tokens) == (40, 39)
    assert cold.next_token_id == warm.next_token_id
    answer = engine.generate(prompt, Sampling(max_new_tokens=5), lambda chunk: None).result(500)
    assert answer.token_ids[0] == cold.next_token_id and len(answer.token_ids) == 5
    engine.stop()
print([name for name in sys.modules if name.startswith("triton.")])
"""


@pytest.mark.long
def test_a_model_is_served_on_a_cpu_without_triton() -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=4 * PATIENCE_S, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "[]\n"


def test_outside_the_kernels_one_module_imports_all_others_that_need_triton() -> None:
    def imports_triton(name: str) -> bool:
        return any(each.partition(".")[0] == "triton" for each in imported_names(name))

    def imports_any(name: str, imported: set[str]) -> bool:
        return name != ONLY_IMPORTER and bool(imported_modules(name) & (imported - {ONLY_IMPORTER}))

    ours = {name for name in modules() if not name.startswith("bench")}
    needing = {name for name in ours if imports_triton(name)}
    # Add the modules that import one of these, until there are no more.
    while importers := {name for name in ours - needing if imports_any(name, needing)}:
        needing |= importers
    assert ONLY_IMPORTER in needing
    assert "radixkv.model.attention.triton_kernels" in needing
    outside = {name for name in needing if not name.startswith("radixkv.kernels")}
    assert outside == {ONLY_IMPORTER, *(f"radixkv.model.{name}" for name in NEED_TRITON)}


def test_a_gpu_without_triton_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    for device in ("cuda", "auto"):
        with pytest.raises(
            ConfigError, match=r"^model\.device: expected Triton .*got none; .*pip install '\.\[cuda\]'"
        ) as refused:
            load_model(ModelConfig(device=device))
        assert "\n" not in str(refused.value)
