"""Where a browser puts the texts of a page, at several widths: boxes of elements, not pixels."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from html import escape
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NARROW, MIDDLE, WIDE = WIDTHS = (360, 768, 1280)  # of a phone, a tablet and a desk
SLACK = 1.0  # pixels that boxes may share or stick out, since a browser rounds
SMALLEST = 9.0  # pixels that a text of a chart is high at least, to be read
MEASURE = """
<script>onload = () => {
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const of = e => { const range = document.createRange(); range.selectNodeContents(e); return box(range); };
const frames = [...document.querySelectorAll('iframe')].map(frame => {
  const page = frame.contentDocument, all = what => [...page.querySelectorAll(what)];
  const shown = e => getComputedStyle(e).display != 'none' && e.getClientRects().length && e.textContent.trim();
  return {
    width: page.documentElement.clientWidth, scroll: page.documentElement.scrollWidth,
    charts: all('svg').map(e => (
      {box: box(e), texts: [...e.querySelectorAll('text')].map(t => [t.textContent, box(t)])})),
    texts: all('h1, h2, p, figcaption, th, td').filter(shown).map(e => [e.textContent.slice(0, 60), box(e), of(e)]),
    images: all('img').map(e => ({box: box(e.parentNode), complete: e.naturalWidth > 0, width: box(e)[2] - box(e)[0]})),
    background: getComputedStyle(page.body).backgroundColor,
    fetched: frame.contentWindow.performance.getEntriesByType('resource').map(r => r.name.slice(0, 5))
      .filter(name => name != 'data:'),
  }; });
document.title = JSON.stringify(frames); }</script>
"""


class Title(HTMLParser):
    """The first title of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside, self.found = False, ""
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        self.inside = tag == "title" and not self.found

    def handle_data(self, data) -> None:
        self.found += data if self.inside else ""

    def handle_endtag(self, tag) -> None:
        self.inside = False


def measured(html: str, folder: Path, *options: str) -> dict[int, dict]:
    """What a browser says of the page ``html``, by the widths that it is shown at.

    Each is a frame, since no window of a browser is as narrow as a phone; ``options``: of the browser's command line.
    """
    frames = "".join(
        f'<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{escape(html)}"></iframe>'
        for width in WIDTHS
    )
    path = folder / "frames.html"
    path.write_text(f"<!DOCTYPE html><html><head><title></title>{MEASURE}</head><body>{frames}</body></html>")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run(
        [*command, *options, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=150, check=True
    )
    return dict(zip(WIDTHS, json.loads(Title(done.stdout).found), strict=True))


def wrong(found: Mapping) -> Iterator[str]:
    """What can't be read of a page that is shown at one width: text that is cut off, covered, or too small."""
    width = found["width"]
    if found["scroll"] > width:
        yield f"the page is {found['scroll']} wide, and there is room for {width}"
    for text, box, inside in found["texts"]:
        if not _within(inside, (box[0], box[1], min(box[2], width), box[3])):
            yield f"{text!r} sticks out of its element or of the page"
    for (one, _, its), (two, _, of_two) in combinations(found["texts"], 2):
        if _overlap(its, of_two):
            yield f"{one!r} and {two!r} cover each other"
    for chart in found["charts"]:
        for text, box in chart["texts"]:
            if not _within(box, chart["box"]):
                yield f"{text!r} sticks out of its chart"
            if box[3] - box[1] < SMALLEST:
                yield f"{text!r} is {box[3] - box[1]:.1f} pixels high"
        for (one, its), (two, of_two) in combinations(chart["texts"], 2):
            if _overlap(its, of_two):
                yield f"{one!r} and {two!r} cover each other in a chart"
    for image in found["images"]:
        if image["box"][2] > width + SLACK or not image["complete"]:
            yield "a picture is cut off, or not there"


def _within(box: list[float], outer: tuple | list[float]) -> bool:
    return all(box[side] >= outer[side] - SLACK and box[side + 2] <= outer[side + 2] + SLACK for side in (0, 1))


def _overlap(one: list[float], two: list[float]) -> bool:
    return all(min(one[side + 2], two[side + 2]) - max(one[side], two[side]) > SLACK for side in (0, 1))
