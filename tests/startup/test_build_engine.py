"""Startup before the engine exists: early refusals, and a log line per stage."""

import logging
import re
import threading
import time
from pathlib import Path

import pytest

from radixkv.api.statement import DAY_S, day_name
from radixkv.config import Config
from radixkv.errors import ConfigError, StoreUnavailable
from radixkv.startup import build_engine as build_engine_module
from radixkv.startup.build_engine import build_engine
from radixkv.startup.progress import StartProgress
from radixkv.statements.day_files import DayFiles
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint


def config(*settings: str) -> Config:
    return Config.load(None, ["model.device=cpu", "cache.capacity_tokens=1024", "cache.block_size=16", *settings])


def test_the_log_has_each_stage_with_its_duration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_checkpoint(CONFIGS["llama"], tmp_path / "llama")
    with caplog.at_level(logging.INFO, logger="radixkv"):
        build_engine(config(f"model.path={directory}"))
    # Lines of the first start on a machine, which compiles and measures kernels.
    first_start = ("compil", "using kernels", "waiting for another process", "choosing a matmul", "tried matmuls")
    stages = [message for message in caplog.messages if not message.startswith(first_start)]
    patterns = [
        r"computing with \d+ threads?: .+",
        "loading the model",
        r"read 0\.\d MB of weights for the model's fingerprint in \d+\.\d+ s",
        r"matmuls by library: \w+ \d+(, \w+ \d+)*",
        r"loaded llama in \d+\.\d s: LlamaForCausalLM with 0\.1 million parameters in float32 on cpu",
        "checking attention and the model",
        r"checked attention and model in exact mode in \d+\.\d s",
        "allocating the pool of K/V blocks",
        r"allocated a pool of 64 blocks of 16 tokens: 0\.8 MB in fp32 on cpu",
        "opening the stores of blocks, and building the engine",
    ]
    assert len(stages) == len(patterns)
    for stage, pattern in zip(stages, patterns, strict=True):
        assert re.fullmatch(pattern, stage)


def test_the_last_line_describes_the_server(caplog: pytest.LogCaptureFixture) -> None:
    progress = StartProgress()
    build_engine(config("model.path=tiny"), progress=progress)
    with caplog.at_level(logging.INFO, logger="radixkv"):
        progress.ready()
    assert re.fullmatch(
        r"ready after \d+\.\d s: model tiny on cpu in float32, exact mode, \d+ threads?, (native|torch's) attention, "
        r"pool of 1024 tokens in blocks of 16 \(\d+\.\d MB\)",
        caplog.messages[-1],
    )


def test_a_ceiling_below_its_floor_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_engine_module, "load_model", lambda *_: pytest.fail("a model was loaded"))
    low_ceiling = config("tenants.acme.floor_tokens=33", "tenants.acme.ceiling_tokens=47")
    with pytest.raises(ConfigError, match=r"tenants\.acme\.ceiling_tokens: expected room for at least 3 whole blocks"):
        build_engine(low_ceiling)


def test_floors_beyond_the_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"floor_tokens: expected at most the pool's 64 blocks in all, got 65"):
        build_engine(config("tenants.a.floor_tokens=1001", "tenants.b.floor_tokens=17"))


def fail(*_: object, **__: object) -> None:
    raise ConfigError("it failed")


@pytest.mark.parametrize("failing_function", ["load_model", "Engine", "load_adapters"])
def test_an_engine_that_cannot_be_built_leaves_its_statements_to_the_next_one(
    failing_function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_statements = config(f"server.statement_path={tmp_path}", "tenants.acme.ceiling_tokens=512")
    with monkeypatch.context() as patched:
        patched.setattr(build_engine_module, failing_function, fail)
        with pytest.raises(ConfigError, match="it failed"):
            build_engine(with_statements)
    assert "radixkv-quota-shadows" not in [thread.name for thread in threading.enumerate()]
    engine = build_engine(with_statements)
    engine.stop()  # the engine was never started
    DayFiles.open(tmp_path).close()


def test_a_day_that_cannot_be_read_leaves_the_statements_to_the_next_engine(tmp_path: Path) -> None:
    today = int(time.time() // DAY_S)
    for day in (today, today + 1):  # the day may end during the test
        (tmp_path / f"{day_name(day)}.json").mkdir()
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        build_engine(config(f"server.statement_path={tmp_path}"))
    DayFiles.open(tmp_path).close()
