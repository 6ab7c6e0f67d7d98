import dataclasses
import itertools
from pathlib import Path

import pytest

from radixkv.config import (
    AdapterConfig,
    CacheConfig,
    Config,
    EngineConfig,
    ModelConfig,
    ServerConfig,
    TenantConfig,
)
from radixkv.errors import ConfigError


@pytest.fixture
def write_toml(tmp_path):
    """A function that writes a configuration file and returns its path."""

    def write(text):
        file = tmp_path / "radixkv.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_the_defaults_apply_without_a_file():
    assert Config.load() == Config(ModelConfig(), CacheConfig(), EngineConfig(), ServerConfig())


def test_a_file_changes_only_the_keys_it_names(write_toml):
    config = Config.load(write_toml("[cache]\nblock_size = 16\n[server]\nport = 0\n"))
    assert config.cache == CacheConfig(block_size=16)
    assert config.server == ServerConfig(port=0)
    assert config.model == ModelConfig()


def test_the_defaults_apply_with_an_empty_file(write_toml):
    assert Config.load(write_toml("")) == Config()


def test_settings_override_the_file_and_the_last_setting_of_a_key_wins(write_toml):
    file = write_toml('[model]\npath = "file"\ndevice = "cpu"\n[server]\nport = 1\n')
    config = Config.load(file, ["model.path=first", "model.path=second", "server.port=2"])
    assert (config.model.path, config.model.device, config.server.port) == ("second", "cpu", 2)


@pytest.mark.parametrize(
    "settings",
    [
        ["kv_sources.a.tls_ca=ca.pem", "kv_sources.a.address=h:1"],
        ["cache.capacity_tokens=32", "cache.block_size=16"],
        ["tenants.low.floor_tokens=640", "tenants.low.ceiling_tokens=640"],
        ["adapters.a.path=/a", "adapters.b.path=/b", "model.max_adapters=2"],
        ["default_tenant.rate_burst_s=1", "tenants.low.weight=2", "stores.other.place=x"],
    ],
)
def test_the_order_of_different_keys_does_not_matter(write_toml, settings):
    file = write_toml("[tenants.low]\nceiling_tokens = 64\n[model]\nmax_adapters = 1\n")
    for order in itertools.permutations(settings):
        assert Config.load(file, order) == Config.load(file, settings)


def test_only_the_merged_result_is_validated(write_toml):
    file = write_toml("[tenants.low]\nceiling_tokens = 64\n")
    with pytest.raises(ConfigError, match=r"^tenants\.low\.ceiling_tokens: expected at least 65, got 64$"):
        Config.load(file, ["tenants.low.floor_tokens=65", "cache.block_size=16"])


@pytest.mark.parametrize(
    ("text", "setting", "path"),
    [("model = 1", "model.path=x", "model"), ("[tenants]\na = 1", "tenants.a.weight=2", "tenants.a")],
)
def test_a_section_that_is_not_a_table_is_refused_even_if_settings_replace_it(write_toml, text, setting, path):
    with pytest.raises(ConfigError, match=f"^{path}: expected a table of keys, got 1$"):
        Config.load(write_toml(text), [setting])


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("model.path=tiny", "tiny"),
        ("model.path = tiny ", "tiny"),
        ('model.path="a b"', "a b"),
        ("model.path=/models/a=b", "/models/a=b"),
        ("model.path=a.b", "a.b"),
    ],
)
def test_a_bare_word_is_a_string(setting, path):
    assert Config.load(settings=[setting]).model.path == path


def test_a_float_key_accepts_an_integer():
    assert Config.load(settings=["server.drain_timeout_s=3"]).server.drain_timeout_s == 3


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("cache.block_sise=16", "cache.block_size"),
        ("cache.capacity=16", "cache.capacity_tokens"),
        ("server.prot=1", "server.port"),
        ("engine.max_step_token=1", "engine.max_step_tokens"),
        ("engine.qqqq=1", "engine."),
        ("modell.path=x", "model"),
        ("zzz.path=x", ""),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(setting, nearest):
    with pytest.raises(ConfigError, match=f"unknown key; the nearest is {nearest}"):
        Config.load(settings=[setting])


def test_an_unknown_key_in_a_file_is_refused_too(write_toml):
    with pytest.raises(ConfigError, match=r"^cache\.block_sise: unknown key; the nearest is cache\.block_size$"):
        Config.load(write_toml("[cache]\nblock_sise = 16\n"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("server.port=abc", "server.port: expected an integer, got 'abc'"),
        ("server.port=1.5", "server.port: expected an integer, got 1.5"),
        ("server.port=true", "server.port: expected an integer, got True"),
        ('server.port="1"', "server.port: expected an integer, got '1'"),
        ("engine.cuda_graphs=1", "engine.cuda_graphs: expected a boolean, got 1"),
        ("server.drain_timeout_s=true", "server.drain_timeout_s: expected a number, got True"),
        ('model.dtype=""', "model.dtype: expected one of auto, float32, bfloat16, float16, got ''"),
        ("model.path=7", "model.path: expected a string, got 7"),
        ("model.path=[1]", r"model.path: expected a string, got \[1\]"),
    ],
)
def test_a_wrong_type_is_refused(setting, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        Config.load(settings=[setting])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("server.port=-1", "server.port: expected 0 to 65535, got -1"),
        ("server.port=65536", "server.port: expected 0 to 65535, got 65536"),
        ("server.metrics_port=-1", "server.metrics_port: expected 0 to 65535, got -1"),
        ("server.metrics_port=65536", "server.metrics_port: expected 0 to 65535, got 65536"),
        ("server.drain_timeout_s=-0.1", "server.drain_timeout_s: expected 0 to 31622400, got -0.1"),
        ("server.drain_timeout_s=nan", "server.drain_timeout_s: expected 0 to 31622400, got nan"),
        ("server.max_message_bytes=1023", "server.max_message_bytes: expected 1024 to 2147483647, got 1023"),
        ("cache.block_size=48", "cache.block_size: expected one of 16, 32, 64, got 48"),
        ("cache.capacity_tokens=63", "cache.capacity_tokens: expected 64 to 137438953408, got 63"),
        ("cache.kv_dtype=int3", "cache.kv_dtype: expected one of auto, bf16, fp8, int8, k8v4, got int3"),
        (
            "cache.kv_dtype=int4",
            "cache.kv_dtype: .* got int4, .* keys of 4 bits .* k8v4 has keys of 8 bits and values of 4",
        ),
        ("cache.policy=fifo", "cache.policy: expected one of adaptive, lru, slru, lfu, priority, got fifo"),
        ("cache.policy=optimal", "cache.policy: expected one of adaptive, lru, slru, lfu, priority, got optimal"),
        ("cache.evicted_prefixes=-1", "cache.evicted_prefixes: expected at least 0, got -1"),
        ("engine.max_step_tokens=0", "engine.max_step_tokens: expected at least 1, got 0"),
        ("engine.max_running_requests=0", "engine.max_running_requests: expected at least 1, got 0"),
        ("engine.max_waiting_requests=0", "engine.max_waiting_requests: expected at least 1, got 0"),
        ("engine.held_lease_ttl_s=-1", "engine.held_lease_ttl_s: expected 0 to 31622400, got -1"),
        ("model.device=tpu", "model.device: expected one of auto, cpu, cuda, got tpu"),
        ("model.dtype=int8", "model.dtype: expected one of auto, float32, bfloat16, float16, got int8"),
    ],
)
def test_a_value_out_of_range_is_refused(setting, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        Config.load(settings=[setting])


@pytest.mark.parametrize("setting", ["model.path", "path=x", "=x", "model.=x", ".path=x", ""])
def test_a_setting_without_section_key_and_value_is_refused(setting):
    with pytest.raises(ConfigError, match=r"setting: expected section\.key=value, got"):
        Config.load(settings=[setting])


@pytest.mark.parametrize("text", ["model = 1\n", "[[model]]\npath = 'a'\n"])
def test_a_section_that_is_not_a_table_is_refused(write_toml, text):
    with pytest.raises(ConfigError, match="model: expected a table of keys, got"):
        Config.load(write_toml(text))


def test_a_file_with_invalid_toml_is_refused(write_toml):
    file = write_toml("[model\n")
    with pytest.raises(ConfigError, match=rf"config file {file}: "):
        Config.load(file)


def test_a_file_with_invalid_utf_8_is_refused(tmp_path):
    file = tmp_path / "radixkv.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=rf"config file {file}: "):
        Config.load(file)


def test_a_number_with_too_many_digits_is_refused(write_toml):
    digits = "9" * 5000
    with pytest.raises(ConfigError, match=r"^server\.port: expected an integer, got '999"):
        Config.load(settings=[f"server.port={digits}"])
    file = write_toml(f"[server]\nport = {digits}\n")
    with pytest.raises(ConfigError, match=rf"^config file {file}: "):
        Config.load(file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=rf"config file {tmp_path / 'none.toml'}: "):
        Config.load(tmp_path / "none.toml")


def test_a_capacity_is_validated_with_the_block_size_of_the_same_file(write_toml):
    config = Config.load(write_toml("[cache]\nblock_size = 16\ncapacity_tokens = 16\n"))  # less than a default block
    assert config.cache.num_blocks == 1


def test_capacity_is_rounded_down_to_whole_blocks():
    assert CacheConfig(block_size=64, capacity_tokens=1000).num_blocks == 15


def test_a_section_created_in_code_is_validated_too():
    with pytest.raises(ConfigError):
        ServerConfig(port=-1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServerConfig(metrics_port="80"), "server.metrics_port: expected an integer, got '80'"),
        (lambda: EngineConfig(cuda_graphs=1), "engine.cuda_graphs: expected a boolean, got 1"),
        (lambda: ModelConfig(path=None), "model.path: expected a string, got None"),
        (lambda: Config(tenants={"a": TenantConfig(weight="x")}), "tenants.a.weight: expected a number, got 'x'"),
        (lambda: Config(tenants={"a": TenantConfig(5, 4)}), "tenants.a.ceiling_tokens: expected at least 5, got 4"),
    ],
)
def test_an_invalid_value_in_code_is_reported_with_its_key(make, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        make()


def test_a_configuration_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().server.port = 1


def test_every_key_can_be_set():
    for section in dataclasses.fields(Config):
        if section.name in (
            "stores",
            "kv_sources",
            "adapters",
            "tenants",
        ):  # their sections are named by users; see the classes below
            continue
        defaults = getattr(Config(), section.name)
        for key in dataclasses.fields(defaults):
            value = getattr(defaults, key.name)
            if value is None:  # which TOML cannot express
                value = "text" if "str" in key.type else 6400
            elif value is True:
                value = False
            changed_section = dataclasses.replace(defaults, **{key.name: value})
            expected = dataclasses.replace(Config(), **{section.name: changed_section})
            toml_value = "false" if value is False else value
            assert Config.load(settings=[f"{section.name}.{key.name}={toml_value}"]) == expected, key.name


class TestAdapters:
    def test_the_number_of_sections_is_the_default_of_max_adapters(self, tmp_path: Path) -> None:
        file = tmp_path / "config.toml"
        file.write_text('[adapters.law]\npath = "/a"\n[adapters."b.c"]\npath = "/b"\n')
        config = Config.load(file, ["adapters.law.path=/c"])
        assert config.adapters == {"law": AdapterConfig("/c"), "b.c": AdapterConfig("/b")}
        assert config.max_adapters == 2
        assert Config.load(file, ["model.max_adapters=5"]).max_adapters == 5
        assert Config().max_adapters == 0

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (["adapters.law.pth=1"], "adapters.law.pth: unknown key; the nearest is adapters.law.path"),
            (["adapters.law.path=1"], "adapters.law.path: expected a string, got 1"),
            (['adapters.law.path=""'], "adapters.law.path: a directory is required"),
            (["adapters.law=x"], "adapters.law: expected a table of keys, got 'x'"),
            (["adapters.a.path=x", "model.max_adapters=1", "adapters.b.path=x"], "model.max_adapters: expected at"),
            (["model.max_adapters=-1"], "model.max_adapters: expected 0 to 4096, got -1"),
            (["model.adapter_bytes=0"], "model.adapter_bytes: expected at least 1, got 0"),
        ],
    )
    def test_an_invalid_section_is_refused(self, settings: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Config.load(settings=settings)

    def test_an_adapter_needs_a_name(self) -> None:
        with pytest.raises(ConfigError, match="adapters: each section needs a name"):
            Config(adapters={"": AdapterConfig("/a")})


class TestTenants:
    def test_settings_change_single_keys_of_a_tenant(self, tmp_path: Path) -> None:
        file = tmp_path / "config.toml"
        file.write_text('[tenants.acme]\nfloor_tokens = 64\n[tenants."a b"]\nceiling_tokens = 640\n')
        config = Config.load(file, ["tenants.acme.ceiling_tokens=128"])
        assert config.tenants == {"acme": TenantConfig(64, 128), "a b": TenantConfig(0, 640)}

    def test_default_tenant_and_named_tenants_are_separate_sections(self) -> None:
        config = Config.load(settings=["default_tenant.max_calls_per_s=2.5", "tenants.acme.weight=2"])
        assert config.default_tenant == TenantConfig(max_calls_per_s=2.5)
        assert config.tenants == {"acme": TenantConfig(weight=2)}

    def test_a_name_with_dots_is_quoted(self) -> None:
        config = Config.load(settings=['tenants."a.example.com".weight=2', "tenants.a b.weight=3"])
        assert config.tenants == {"a.example.com": TenantConfig(weight=2), "a b": TenantConfig(weight=3)}

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ('tenants."a.b.weight=2', "setting: expected section.key=value"),
            ('tenants."a.b"c.weight=2', "setting: expected section.key=value"),
            ('tenants."a.b".weight=0', r"tenants.a\.b.weight: expected 0.001 to 1000.0, got 0"),
            ("tenants.acme.flor_tokens=1", "tenants.acme.flor_tokens: unknown key; the nearest is tenants.acme.floor"),
            ("tenants.acme=1", "tenants.acme: expected a table of keys, got 1"),
            ("tenants.acme.floor_tokens=-1", "tenants.acme.floor_tokens: expected at least 0, got -1"),
            ("tenants.acme.ceiling_tokens=0", "tenants.acme.ceiling_tokens: expected at least 1, got 0"),
            ("default_tenant.floor_tokens=1", "default_tenant.floor_tokens: expected 0, since the number of"),
            ("default_tenant.max_calls_per_s=0", "default_tenant.max_calls_per_s: expected 0.001 to 1000000000000.0"),
            ("tenants.acme.floor_tokens=6401", r"expected a total of at most cache.capacity_tokens, 6400, got 6401"),
        ],
    )
    def test_an_invalid_section_is_refused(self, setting: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Config.load(settings=["cache.capacity_tokens=6400", setting])
