import pytest

from bench.parts import environment
from bench.parts.environment import describe_cpu, describe_machine, describe_run


def test_outside_of_git_the_environment_names_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_COMMIT", "abc")
    monkeypatch.setattr(environment, "current_commit", lambda directory: None)
    assert describe_run("bench.rpc")["commit"] == "abc"
    monkeypatch.setattr(environment, "current_commit", lambda directory: "def")
    assert describe_run("bench.rpc")["commit"] == "def"


def test_a_run_is_described_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rpc.py", "--rounds", "2"])
    assert describe_run("bench.rpc")["command"] == "python -m bench.rpc --rounds 2"
    assert describe_run("bench.rpc", [])["command"] == "python -m bench.rpc"
    assert describe_run("bench.rpc", ["--json", "a b"])["command"] == "python -m bench.rpc --json 'a b'"


CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
flags\t\t: fpu fma avx2 avx512f avx512_bf16 amx_tiles

processor\t: 1
cpu family\t: 26
model\t\t: 2
model name\t: another
flags\t\t: fpu avx2 amx_tile
"""


def test_processors_with_the_same_name_are_distinguished() -> None:
    assert describe_cpu(CPUINFO) == {
        "cpu": "AMD EPYC",
        "cpu_family": 25,
        "cpu_model": 17,
        "instruction_sets": ["avx2", "fma", "avx512f", "avx512_bf16"],
    }


def test_a_machine_is_described_with_its_processor() -> None:
    assert describe_machine().keys() >= describe_cpu("").keys() | {"cores", "memory_gib", "gpu", "system"}
