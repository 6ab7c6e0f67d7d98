import json

import pytest

from radixkv.config.model_directory import check_servable
from radixkv.errors import ConfigError

SHARDS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}


def test_a_directory_with_a_config_and_safetensors_is_servable(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    assert check_servable(tmp_path) == 10


def test_the_sizes_of_shards_add_up(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(SHARDS))
    (tmp_path / "model-1.safetensors").write_bytes(bytes(10))
    with pytest.raises(ConfigError, match=r"^model\.path: .* has no model-2\.safetensors$"):
        check_servable(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(bytes(5))
    assert check_servable(tmp_path) == 15


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"^model\.path: expected `tiny` or a directory with a config\.json, got "),
        ({"config.json": "{"}, r"config\.json: expected a JSON object: Expecting property name"),
        ({"config.json": "{}"}, r"^model\.path: .* has no model\.safetensors$"),
        (
            {"config.json": "{}", "model.safetensors.index.json": "{}"},
            r"weight_map: expected a table of file names",
        ),
    ],
)
def test_an_incomplete_directory_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_servable(tmp_path)


def test_a_path_that_is_too_long_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.path: expected `tiny` or a directory with a config\.json, got nnn"):
        check_servable(5000 * "n")
