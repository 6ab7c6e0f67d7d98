import json
import re

from radixkv.api.caller import Caller
from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine


def test_prefill_prints_a_table(capsys):
    code, out, err = run_cli(capsys, FakeEngine(), "prefill", "--tokens", "1,2,3")
    assert (code, err) == (0, "")
    assert re.search(r"^next token +6$", out, re.MULTILINE)
    assert re.search(r"^miss reason +COLD$", out, re.MULTILINE)


def test_prefill_prints_json(capsys):
    code, out, _ = run_cli(capsys, FakeEngine(), "prefill", "--tokens", "1, 2,3", "--top-logprobs", "2", "--json")
    answer = json.loads(out)
    assert code == 0
    usage = {"prompt_tokens": 3, "cached_tokens": 0, "computed_tokens": 3, "written_tokens": 3}
    other_counts = {"generated_tokens": 0, "recomputed_tokens": 0, "public_tokens": 0}
    tiers = {"device_tokens": 0, "host_tokens": 0, "disk_tokens": 0, "remote_tokens": 0}
    assert answer["usage"] == {**usage, **other_counts, **tiers}
    assert len(answer["top_logprobs"]) == 2


def test_prefill_passes_every_option(capsys):
    engine = FakeEngine()
    names = ["--tenant", "t", "--adapter", "a", "--salt", "s"]
    arguments = [*names, "--no-read-cache", "--no-write-cache", "--top-logprobs", "3", "--timeout-s", "30"]
    assert run_cli(capsys, engine, "prefill", "--tokens", "1", *arguments)[0] == 0
    params = engine.params[0]
    assert (params.caller, params.top_logprobs) == (Caller("t", "a", "s"), 3)
    assert (params.read_cache, params.write_cache) == (False, False)
    assert params.deadline_s is not None
