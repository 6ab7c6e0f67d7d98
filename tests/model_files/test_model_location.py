import json
import os

import pytest

from radixkv.errors import ConfigError
from radixkv.model_files.model_location import check_servable, files_directory, locate

SHARDS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub(tmp_path_factory, monkeypatch):
    """The local cache of Hugging Face, empty."""
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path_factory.mktemp("hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(directory))
    return directory


def write_snapshot(hub, name, files, revision="main", commit=COMMIT):
    """Write a model as `hf download` does, with links to blobs, and return the directory of the snapshot."""
    folder = hub / f"models--{name.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    for file_name, content in files.items():
        (folder / "blobs" / file_name).write_bytes(content)
        os.symlink(f"../../blobs/{file_name}", snapshot / file_name)
    return snapshot


def test_a_directory_with_a_config_and_safetensors_is_servable(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    assert check_servable(tmp_path) == 10
    assert (locate(tmp_path).name, locate(tmp_path).path) == (tmp_path.name, tmp_path)


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
        ({}, r"^model\.path: expected `tiny`, a directory with a config\.json, a GGUF file, or ORG/NAME .* got "),
        ({"config.json": "{"}, r"config\.json: expected a JSON object: Expecting property name"),
        ({"config.json": "{}"}, r"^model\.path: .* has no model\.safetensors$"),
        (
            {"config.json": "{}", "model.safetensors.index.json": "{}"},
            r"weight_map: expected a table of file names",
        ),
        ({"model.Q4_0.gguf": "x"}, r"which has GGUF files: name one of them, such as .*/model\.Q4_0\.gguf$"),
    ],
)
def test_an_incomplete_directory_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_servable(tmp_path)


@pytest.mark.parametrize("path", [5000 * "n", 5000 * "n" + ".gguf", "a/" + 5000 * "n"])
def test_a_path_that_is_too_long_is_refused(path):
    with pytest.raises(ConfigError, match=r"^model\.path: expected .* got (a/)?nnn"):
        check_servable(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ConfigError, match=r"^model\.path: expected .*, got the file .*/model\.bin$"):
        locate(tmp_path / "model.bin")


def test_a_missing_gguf_file_is_refused_with_a_way_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match=r"which does not exist: download one, for example by hf download ORG/NAME "):
        locate(tmp_path / "model.gguf")


def test_a_repository_may_be_named_like_a_gguf_file(hub):
    snapshot = write_snapshot(hub, "org/model.gguf", {"config.json": b"{}"})
    assert locate("org/model.gguf").path == snapshot
    with pytest.raises(ConfigError, match="which does not exist: download one"):
        locate("org/other.gguf")


def test_a_gguf_file_is_named_without_its_suffix(tmp_path):
    (tmp_path / "model.Q4_K_M.gguf").write_text("")
    location = locate(tmp_path / "model.Q4_K_M.gguf")
    assert (location.name, location.is_gguf) == ("model.Q4_K_M", True)


@pytest.mark.parametrize("name", ["model.GGUF", "sha256-0123abcd"])
def test_a_gguf_file_of_another_name_is_known_by_its_first_bytes(tmp_path, name):
    (tmp_path / name).write_bytes(b"GGUF")
    assert locate(tmp_path / name).is_gguf


def test_a_name_of_the_hub_is_found_in_the_local_cache(hub):
    snapshot = write_snapshot(hub, "org/model", {"config.json": b"{}", "model.safetensors": bytes(7)})
    location = locate("org/model")
    assert (location.name, location.path, location.directory()) == ("org/model", snapshot, snapshot)
    assert check_servable("org/model") == 7


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub):
    write_snapshot(hub, "org/model", {"config.json": b"{}"})
    other = write_snapshot(hub, "org/model", {"config.json": b"{}"}, "refs/pr/1", "f" * 40)
    for revision in ("refs/pr/1", "f" * 40):
        assert locate(f"org/model@{revision}").path == other
    with pytest.raises(ConfigError, match="has no revision v2 of such a model: to download it, hf download org/model "):
        locate("org/model@v2")


def test_a_directory_of_the_same_name_comes_first(hub, tmp_path, monkeypatch):
    write_snapshot(hub, "org/model", {"config.json": b"{}"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").write_text("{}")
    assert locate("org/model").name == "model"


def test_the_error_for_a_model_that_was_not_downloaded_says_how_to_download_it(hub):
    with pytest.raises(ConfigError) as caught:
        locate("org/model")
    assert str(caught.value) == (
        "model.path: expected `tiny`, a directory with a config.json, a GGUF file, or ORG/NAME of a downloaded model, "
        f"got org/model: there is no such directory, and {hub} has no revision main of such a model: to download it, "
        "hf download org/model"
    )


def test_the_error_for_an_incomplete_download_says_how_to_complete_it(hub):
    snapshot = write_snapshot(hub, "org/model", {"config.json": b"{}", "model.safetensors": b""}, "v1")
    (snapshot.parent.parent / "blobs" / "model.safetensors").unlink()  # the link is now broken
    with pytest.raises(
        ConfigError, match=r"has no model\.safetensors: to download it, hf download org/model --rev.* v1"
    ):
        check_servable("org/model@v1")
    (snapshot / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"org/model has neither a config.json nor a GGUF file in .*, hf download org/"
    ):
        check_servable("org/model@v1")


def test_a_repository_of_gguf_files_is_served_if_one_is_there(hub):
    snapshot = write_snapshot(hub, "org/model", {"a.gguf": b"x"})
    location = locate("org/model")
    assert (location.name, location.path) == ("org/model", snapshot / "a.gguf")
    write_snapshot(hub, "org/model", {"b.gguf": b"x"})
    with pytest.raises(ConfigError, match=r"org/model has 2 GGUF files: name one of them, such as .*/a\.gguf"):
        locate("org/model")


def test_the_cache_is_found_by_the_environment_variables_of_hugging_face(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE")
    places = {
        ".cache/huggingface/hub": {},
        "xdg/huggingface/hub": {"XDG_CACHE_HOME": f"{tmp_path}/xdg"},
        "home/hub": {"HF_HOME": "~/home"},
        "old": {"HUGGINGFACE_HUB_CACHE": "$HOME/old"},
        "new": {"HF_HUB_CACHE": str(tmp_path / "new")},
    }
    for place, variables in places.items():  # each variable has precedence over those before it
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        snapshot = write_snapshot(tmp_path / place, "org/model", {"config.json": b"{}"})
        assert locate("org/model").path == snapshot


@pytest.mark.parametrize(
    "name", ["org/../model", "org/model@../x", "org/model@", "org", "/org/model", "org/a/b", "o@r/m"]
)
def test_other_texts_are_not_looked_up_in_the_hub(hub, name):
    write_snapshot(hub, "org/model", {"config.json": b"{}"})
    with pytest.raises(ConfigError, match=r"^model\.path: expected .* got "):
        locate(name)


def test_a_damaged_reference_is_refused(hub):
    write_snapshot(hub, "org/model", {"config.json": b"{}"}, commit=COMMIT)
    reference = hub / "models--org--model" / "refs" / "main"
    for content in (b"../../..", b"\xff", b""):
        reference.write_bytes(content)
        with pytest.raises(ConfigError, match="has no revision main"):
            locate("org/model")


def test_a_tokenizer_may_be_all_that_was_downloaded(hub, tmp_path):
    snapshot = write_snapshot(hub, "org/model", {"tokenizer.json": b"{}"})
    assert files_directory("org/model") == snapshot
    assert files_directory(tmp_path) == tmp_path
    with pytest.raises(ConfigError, match="to download it, hf download org/other"):
        files_directory("org/other")
