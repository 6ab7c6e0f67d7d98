"""The page on the HTTP port, in a browser: it asks the model, and shows what the answer reused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from radixkv.errors import QueueFull
from tests.patience import PATIENCE_S, wait_until
from tests.service.fake_engine import FakeEngine
from tests.service.server.page.browser import BROWSER, Browser
from tests.service.server.page.test_page_layout import FIND_OVERFLOWING, SIZES
from tests.service.serving import serving

in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
# A file of credentials with the tokens "tenant" and "reader".
CREDENTIALS = "\n".join(
    f'[[credentials]]\nname = "{name}"\ntoken_sha256 = "{sha256(name.encode()).hexdigest()}"\n{rights}\n'
    for name, rights in (("tenant", 'tenant = "a"'), ("reader", 'role = "reader"'))
)


@contextlib.contextmanager
def http_port(engine: FakeEngine, **config: object) -> Iterator[str]:
    """Serve on a thread of its own, and yield the address of the HTTP port."""
    loop, is_over = asyncio.new_event_loop(), asyncio.Event()
    addresses: list[str] = []
    is_listening = threading.Event()

    async def main() -> None:
        async with serving(engine, model_path="tiny", http_port=0, **config) as (server, _):
            assert server.http_address is not None
            addresses.append(server.http_address)
            is_listening.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert is_listening.wait(PATIENCE_S)
        yield f"http://{addresses[0]}"
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(PATIENCE_S)
        loop.close()


def get(url: str, token: str = "") -> tuple[int, str, dict[str, str]]:
    """Return the status, the body and the headers of a response; no headers if it is an error."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as response:
            return (
                response.status,
                response.read().decode(),
                {name.lower(): value for name, value in response.headers.items()},
            )
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), {}


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def becomes_true(browser: Browser, condition: str) -> bool:
    """Return true as soon as a JavaScript condition holds."""
    is_true: bool = browser.evaluate(
        f"new Promise((done) => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 10); look(); }})"
    )
    return is_true


def open_page(browser: Browser, url: str, condition: str) -> None:
    """Open the page, and wait until a JavaScript condition holds."""
    browser.call("Page.navigate", url=f"{url}/")
    assert becomes_true(browser, f"typeof byId === 'function' && {condition}")


def ask(browser: Browser, question: str) -> str:
    """Ask a question, and return the text of its turn after the answer."""
    browser.evaluate(f"byId('question').value = {json.dumps(question)}; byId('send').click()")
    assert becomes_true(browser, "asking === null")
    turn: str = browser.evaluate("byId('turns').lastChild.innerText")
    return turn


def test_the_page_on_the_http_port_has_the_same_policy(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(CREDENTIALS)
    with http_port(FakeEngine(), tokens_file=str(tokens), insecure=True) as url:
        status, html, headers = get(f"{url}/")
        statuses = [get(f"{url}/state.json", token)[0] for token in ("", "tenant", "reader")]
    assert (status, '<html lang="en" data-api>' in html) == (200, True)
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in headers["content-security-policy"]
    assert statuses == [401, 403, 200]


@in_a_browser
def test_a_browser_shows_the_answer_and_what_it_reused(browser: Browser) -> None:
    engine = FakeEngine()
    with http_port(engine) as url:
        open_page(browser, url, "!byId('main').hidden")
        first = ask(browser, "<b>Hello</b>")
        second = ask(browser, "So?")
        for width, height in SIZES:
            browser.show(width, height, "light")
            assert becomes_true(browser, f"innerWidth === {width}")
            wait_until(
                lambda: browser.evaluate(FIND_OVERFLOWING) == []
            )  # the page adapts to a size when it is drawn again
    assert first.startswith("<b>Hello</b>\n")
    assert "first token after " in first
    assert " prompt tokens cached, " in first
    assert "miss reason cold; 512 tokens generated, the maximum" in first
    assert second.startswith("So?\n")
    lengths = [params.num_tokens for params in engine.params]
    assert lengths[1] > lengths[0] + 512, "the conversation continues"


@in_a_browser
def test_a_browser_shows_why_a_question_is_refused(browser: Browser) -> None:
    engine = FakeEngine()
    engine.refusal = QueueFull("queue: <i>full</i>")
    with http_port(engine) as url:
        open_page(browser, url, "!byId('main').hidden")
        assert ask(browser, "Hello").endswith("queue: <i>full</i>")


@in_a_browser
def test_a_browser_stops_an_answer(browser: Browser) -> None:
    engine = FakeEngine(is_gated=True)
    with http_port(engine) as url:
        open_page(browser, url, "!byId('main').hidden")
        browser.evaluate("byId('question').value = 'Hello'; byId('send').click()")
        assert becomes_true(browser, "byId('turns').innerText.length > 100")
        browser.evaluate("byId('send').click()")
        assert becomes_true(browser, "asking === null")
        assert browser.evaluate("byId('turns').innerText").endswith("stopped")


@in_a_browser
def test_a_tenant_may_ask_but_not_see_others(browser: Browser, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(CREDENTIALS)
    engine = FakeEngine()
    with http_port(engine, tokens_file=str(tokens), insecure=True) as url:
        open_page(browser, url, "byId('state').textContent === 'locked'")
        browser.evaluate(
            "byId('alert').querySelector('input').value = 'tenant';"
            "byId('alert').querySelector('input').dispatchEvent(new Event('change'))"
        )
        assert becomes_true(browser, "byId('state').textContent === 'state hidden'")
        assert "512 tokens generated" in ask(browser, "Hello")
        assert browser.evaluate("byId('tree').getClientRects().length") == 0
    assert engine.params[0].caller.tenant == "a"
