"""The page in a browser, at the widths of a phone, a tablet and a desktop, in light and dark colors."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.api.stats import EngineStats, TenantStats, TierStats
from radixkv.config import Config
from radixkv.namespace import Namespace
from radixkv.service.server.metrics_port import Telemetry
from tests.fakes import lease_text, publish
from tests.service.fake_engine import FakeEngine
from tests.service.server.page.browser import BROWSER, Browser

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")

TENANTS = ("acme", "globex", "initech-with-a-very-long-name-that-no-column-holds", "umbrella")
SIZES = ((390, 844), (768, 1024), (1280, 900))
MIN_CONTRAST = 4.5  # WCAG 2, level AA, of text of any size
MIN_FONT_PX = 11

# A script that returns the elements that reach beyond the window, or beyond the box of the nearest element that would
# clip or scroll them.
FIND_OVERFLOWING = """[...document.body.querySelectorAll("*")].filter((each) => {
  if (!each.getClientRects().length) return false;
  let box = each.parentElement;
  while (box !== document.body && getComputedStyle(box).overflowX === "visible") box = box.parentElement;
  const mine = each.getBoundingClientRect(), its = box.getBoundingClientRect();
  return mine.left < its.left - 0.5 || mine.right > its.right + 0.5;
}).map((each) => `${each.tagName} ${each.className.baseVal ?? each.className} ${each.textContent.slice(0, 40)}`)"""

# A script that returns all visible texts, with the size of their letters in the window, their color, and the colors
# that are painted behind them.
FIND_TEXTS = """(() => {
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    const range = document.createRange();
    range.selectNode(node);
    const box = range.getBoundingClientRect();
    if (!node.textContent.trim() || !box.width || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element), svg = element.closest("svg");
    const scale = svg ? svg.getBoundingClientRect().width / (svg.viewBox.baseVal.width || svg.clientWidth) : 1;
    const behind = [];
    if (svg) {  // the last shape under the middle of the text is painted over the others
      const x = box.left + box.width / 2, y = box.top + box.height / 2;
      for (const shape of svg.querySelectorAll("rect.segment")) {
        const its = shape.getBoundingClientRect();
        const isBehind = its.left <= x && x <= its.right && its.top <= y && y <= its.bottom;
        if (isBehind) behind.unshift(numbers(shape.getAttribute("fill")));
      }
    }
    let opacity = 1;
    for (let each = element; each; each = each.parentElement) {
      opacity *= Number(getComputedStyle(each).opacity);
      const [red, green, blue, alpha = 1] = numbers(getComputedStyle(each).backgroundColor);
      if (alpha) behind.push([red, green, blue]);
    }
    texts.push({ text: node.textContent.trim(), font_px: parseFloat(style.fontSize) * scale, opacity,
      color: numbers(svg ? style.fill : style.color).slice(0, 3), behind: behind[0] });
  }
  return texts;
})()"""


class BusyEngine(FakeEngine):
    """An engine with trees of several tenants, leases and stores."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4000)
        self.offload: Any = SimpleNamespace(
            tiers={},
            stats=lambda: [TierStats(name, name == "host", 7, 700, 1000, *range(9)) for name in ("host", "disk")],
        )
        rng = random.Random(1)
        # Each tenant's tree has a stem, from which leaves branch at three places.
        for number, name in enumerate(TENANTS):
            namespace = Namespace("model", name)
            stem = "".join(rng.choices("abcdef", k=60))
            for _ in range(30 // (number + 1)):
                publish(self.cache, stem[: rng.choice((20, 40, 60))] + "".join(rng.choices("xyz", k=20)), namespace)
        lease_text(self.cache, stem[:40], namespace)

    def stats(self, max_tenants: int = 100, tenant: str | None = None) -> Future[EngineStats]:
        tenants = [
            TenantStats(name, 1234, 20, 10, 44_000, 700_000, 40, 2, 0, None, {"disk": 7777, "host": 12_345})
            for name in TENANTS
        ]
        future: Future[EngineStats] = Future()
        future.set_result(dataclasses.replace(super().stats().result(), tenants=tuple(tenants)))
        return future


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    telemetry = Telemetry(Config.load(settings=["server.metrics_port=0"]))
    with (
        telemetry.serving(BusyEngine()) as address,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        Browser(Path(profile)) as browser,
    ):
        browser.call("Page.navigate", url=f"http://{address}/")
        yield browser


def wait_until_drawn(browser: Browser, width: int, height: int, scheme: str) -> None:
    """Show the page, and wait until it is drawn for this window."""
    browser.show(width, height, scheme)
    becomes_drawn = f"""new Promise((done) => {{
      const look = () => innerWidth === {width} && document.querySelector("svg.tree")
        ? requestAnimationFrame(() => done(true)) : setTimeout(look, 20);
      look();
    }})"""
    assert browser.evaluate(becomes_drawn)


def contrast(color: list[float], other: list[float]) -> float:
    """Return the contrast ratio of two sRGB colors by WCAG 2; channels are from 0 to 255."""

    def linear(channel: float) -> float:
        share = channel / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    def luminance(channels: list[float]) -> float:
        red, green, blue = (linear(channel) for channel in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(color), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_reaches_beyond_its_container(browser: Browser, width: int, height: int) -> None:
    wait_until_drawn(browser, width, height, "light")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(FIND_OVERFLOWING) == []
    clipped = (
        """[...document.querySelectorAll(".scroll, .card")].filter((each) => each.scrollWidth > each.clientWidth)"""
    )
    assert browser.evaluate(f"{clipped}.map((each) => each.id)") == []


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_tree_fills_its_card_without_being_scaled(browser: Browser, width: int, height: int) -> None:
    wait_until_drawn(browser, width, height, "light")
    drawn_size, card_width, view_size = browser.evaluate("""(() => {
      const tree = document.querySelector("svg.tree"), size = (each) => [each.width, each.height];
      return [size(tree.getBoundingClientRect()), tree.parentElement.clientWidth, size(tree.viewBox.baseVal)];
    })()""")
    assert drawn_size == pytest.approx(view_size, abs=0.1), "a pixel of the drawing is one of the window"
    assert drawn_size[0] == card_width


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_text_can_be_read(browser: Browser, width: int, height: int, scheme: str) -> None:
    wait_until_drawn(browser, width, height, scheme)
    texts = browser.evaluate(FIND_TEXTS)
    assert {"Hit rate", "acme", "12,345", "serving"} <= {each["text"] for each in texts}
    assert [each["text"] for each in texts if each["font_px"] < MIN_FONT_PX] == []
    assert {each["opacity"] for each in texts} == {1}
    ratios = {each["text"]: round(contrast(each["color"], each["behind"]), 2) for each in texts}
    assert {text: ratio for text, ratio in ratios.items() if ratio < MIN_CONTRAST} == {}
    assert len({tuple(each["behind"]) for each in texts}) > 4, "labels on segments are missing"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_can_be_read_on_segments_of_any_heat(browser: Browser, scheme: str) -> None:
    wait_until_drawn(browser, 1280, 900, scheme)
    # As the page does: above a luminance of 0.179, a label is black, below it white.
    colors = browser.evaluate(
        "Array.from({ length: 201 }, (_, index) => [heatColor(index / 200), luminance(heatColor(index / 200)) > 0.179])"
    )
    for color, is_bright in colors:
        assert contrast([0, 0, 0] if is_bright else [255, 255, 255], color) >= MIN_CONTRAST
