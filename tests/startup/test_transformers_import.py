import subprocess
import sys

from tests.patience import PATIENCE_S

_PROGRAM = """
import sys
from radixkv.startup.transformers_import import import_transformers
import_transformers()
from radixkv.config import ModelConfig
from radixkv.model.loading import load_model
load_model(ModelConfig(device="cpu"))
assert "torch._dynamo" not in sys.modules
import torch
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
"""


def test_a_model_is_loaded_without_the_compiler_which_can_be_used_later() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], timeout=PATIENCE_S, check=True)
