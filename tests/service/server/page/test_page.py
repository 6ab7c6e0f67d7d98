"""The page over HTTP, and in a browser if there is one: it shows the state of the engine."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from radixkv.api.stats import TierStats
from radixkv.config import Config
from radixkv.namespace import Namespace
from radixkv.service.server.metrics_port import Telemetry
from radixkv.service.server.page import state_feed
from tests.fakes import lease_text, publish
from tests.patience import PATIENCE_S
from tests.service.diagnosed import diagnosed_engine
from tests.service.fake_engine import FakeEngine
from tests.service.http_get import get
from tests.service.server.auth.certificates import CredentialFiles
from tests.service.server.page.browser import BROWSER

in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@contextlib.contextmanager
def serving(engine: FakeEngine, *settings: str) -> Iterator[str]:
    with Telemetry(Config.load(settings=["server.metrics_port=0", *settings])).serving(engine) as address:
        assert address is not None
        yield address


@pytest.fixture
def address(engine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


def test_the_page_is_one_file_that_loads_no_other(address):
    status, html, headers = get(address, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", html) == []
    assert set(re.findall(r"https?://[^\"'`\s]+", html)) == {"http://www.w3.org/2000/svg"}


def test_the_policy_allows_what_is_in_the_file_and_nothing_else(address):
    _, html, headers = get(address, "/")
    policy = headers["Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert ' style="' not in html, "the policy would refuse it"


def test_the_state_is_json_that_no_cache_keeps(address):
    status, text, headers = get(address, "/state.json")
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert json.loads(text)["model"] == "fake"


def test_an_engine_that_does_not_respond_gives_503(address, engine, monkeypatch):
    monkeypatch.setattr(state_feed, "_TIMEOUT_S", 0.01)
    engine.is_hanging = True
    assert get(address, "/state.json")[:2] == (503, "the engine does not respond\n")
    assert get(address, "/")[0] == 200


def test_nothing_is_changed_by_the_page(address):
    for path in ("/", "/state.json"):
        assert get(address, path, "HEAD")[:2] == (200, "")
        status, _, headers = get(address, path, "POST")
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


class DrawnPage(HTMLParser):
    """Parses what a browser has drawn.

    Attributes:
        texts: all texts, by the id of the nearest element around them that has one.
        classes: the attribute `class` of each element.
        hidden: ids of the hidden elements.
    """

    VOID = frozenset({"meta", "link", "input", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.classes: list[str] = []
        self.hidden: set[str] = set()
        self._ids: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        fields = dict(attrs)
        self.classes.append(fields.get("class") or "")
        if "hidden" in fields:
            self.hidden.add(fields.get("id") or "")
        if tag not in self.VOID:
            self._ids.append(fields.get("id") or (self._ids[-1] if self._ids else ""))

    def handle_endtag(self, tag):
        if tag not in self.VOID and self._ids:
            self._ids.pop()

    def handle_data(self, data):
        element_id = self._ids[-1] if self._ids else ""
        self.texts[element_id] = " ".join(f"{self.texts.get(element_id, '')} {data}".split())


def draw(address: str, profile: Path) -> DrawnPage:
    """Open the page in a browser, and return what it has drawn four seconds later, by the browser's virtual clock."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--virtual-time-budget=4000", "--dump-dom", f"http://{address}/"]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True)
    return DrawnPage(done.stdout.decode())


@in_a_browser
def test_a_browser_draws_what_the_engine_holds(address, engine, tmp_path):
    cache, namespace = engine.cache, Namespace("model", "acme <b>")
    publish(cache, "abcdefgh", namespace)
    publish(cache, "abcdxy", namespace)
    lease_text(cache, "abcdefghi", namespace)
    page = draw(address, tmp_path)
    stats = engine.stats().result()
    assert page.texts["state"] == "serving"
    assert page.texts["model"].startswith("fake on cpu")
    segments = [name for name in page.classes if name.split()[:1] == ["segment"]]
    assert page.texts["drawn"] == f"{len(segments)} segments" == "3 segments"
    assert segments.count("segment pinned") == 2
    assert "acme <b>" in page.texts["tree"], "a name is text, whatever is in it"
    tokens, blocks = stats.tokens, stats.load.blocks
    assert f"{100 * tokens.cached / tokens.prompt:.1f} %" in page.texts["hits"]
    assert f"{blocks.published} published" in page.texts["states"]
    assert f"{blocks.free} free" in page.texts["states"]
    assert "bounded" not in page.texts["tenants"]
    # The name; cached, pinned, retained and evicted blocks; the hit rate.
    assert "a 3 2 2 4 60.0 %" in page.texts["tenants"]
    assert page.texts["largest"] == f"the {len(stats.tenants)} largest of {stats.known_tenants:,}"
    assert page.texts["wait"].startswith("Time to first token 67 ms")
    assert "alert" in page.hidden


@in_a_browser
def test_a_browser_draws_what_stores_hold(address, engine, tmp_path):
    engine.offload = SimpleNamespace(stats=lambda: [TierStats("host", False, 7, 700, 1000, *range(9))])
    page = draw(address, tmp_path)
    assert "host: 7 blocks, disabled" in page.texts["states"]
    assert "in host" in page.texts["tenants"]


@in_a_browser
def test_a_browser_lists_the_causes_of_misses(address, engine, tmp_path):
    assert "causes" in draw(address, tmp_path / "before").hidden
    engine.misses = diagnosed_engine("acme <b>").misses
    page = draw(address, tmp_path / "after")
    assert "causes" not in page.hidden
    assert page.texts["examined"] == "6 of 12 examined in the last 1 min; 1 had nothing similar in the cache"
    assert page.texts["missed"].startswith(
        "a random id changes (7 hexadecimal digits, tokens 16 to 255, tenant acme <b>) Remove the id from the prompt"
    )
    assert "lost 183k tokens of 3 prompts" in page.texts["missed"]
    assert "lost at most 500 tokens of 1 prompts" in page.texts["missed"]


@in_a_browser
def test_a_browser_says_when_nothing_is_cached(address, tmp_path):
    assert draw(address, tmp_path).texts["tree"].startswith("Nothing is cached yet. Try")


@in_a_browser
def test_a_browser_says_when_the_engine_does_not_respond(address, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(state_feed, "_TIMEOUT_S", 0.01)
    engine.is_hanging = True
    page = draw(address, tmp_path)
    assert page.texts["alert"].startswith("No response from the service: the engine is busy")
    assert (page.texts["state"], "main" in page.hidden) == ("no response", True)


@in_a_browser
def test_a_browser_asks_for_a_token_where_one_is_needed(engine, tmp_path):
    CredentialFiles(tmp_path)
    settings = (f"server.tokens_file={json.dumps(str(tmp_path / 'tokens.toml'))}", "server.insecure=true")
    with serving(engine, *settings) as address:
        page = draw(address, tmp_path / "profile")
    assert page.texts["alert"] == "This page requires the token of a reader or an admin."
    assert (page.texts["state"], "main" in page.hidden) == ("locked", True)


@in_a_browser
def test_a_browser_draws_the_hottest_of_ten_thousand(tmp_path):
    engine = FakeEngine(num_blocks=30_000)
    for number in range(10_000):
        publish(engine.cache, f"same{number:08}")
    with serving(engine) as address:
        page = draw(address, tmp_path)
    assert page.texts["drawn"] == "250 segments, the hottest of 10,001"
    assert "+9.75k" in page.texts["tree"], "the shared segment and 249 of its 10,000 children are drawn"
