"""``report.html`` of the hand-written run as a page: what is on it, and that a browser shows all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from html import escape
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest
from PIL import Image

from recycle_plugin.cli import main
from recycle_plugin.commands.report import EVERY_S
from recycle_plugin.observability import report
from recycle_plugin.render.page import Chart, Table, page
from tests.support.run_folder import WHY, Read, rewrite, trace, two_at_once

# Where a browser puts the texts of a page, at several widths: boxes of elements, not pixels.
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NARROW, MIDDLE, WIDE = WIDTHS = (360, 768, 1280)  # of a phone, a tablet and a desk
SLACK = 1.0  # pixels that boxes may share or stick out, since a browser rounds
MEASURE = """
<script>onload = () => {
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const of = e => { const range = document.createRange(); range.selectNodeContents(e); return box(range); };
const frames = [...document.querySelectorAll('iframe')].map(frame => {
  const page = frame.contentDocument, all = what => [...page.querySelectorAll(what)];
  const shown = e => getComputedStyle(e).display != 'none' && e.getClientRects().length && e.textContent.trim();
  return {
    width: page.documentElement.clientWidth, scroll: page.documentElement.scrollWidth,
    charts: all('figure img').map(box),
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
    """What can't be read of a page that is shown at one width: text that is cut off or covered."""
    width = found["width"]
    if found["scroll"] > width:
        yield f"the page is {found['scroll']} wide, and there is room for {width}"
    for text, box, inside in found["texts"]:
        if not _within(inside, (box[0], box[1], min(box[2], width), box[3])):
            yield f"{text!r} sticks out of its element or of the page"
    for (one, _, its), (two, _, of_two) in combinations(found["texts"], 2):
        if _overlap(its, of_two):
            yield f"{one!r} and {two!r} cover each other"
    for image in found["images"]:
        if image["box"][2] > width + SLACK or not image["complete"]:
            yield "a picture is cut off, or not there"


def _within(box: list[float], outer: tuple | list[float]) -> bool:
    return all(box[side] >= outer[side] - SLACK and box[side + 2] <= outer[side + 2] + SLACK for side in (0, 1))


def _overlap(one: list[float], two: list[float]) -> bool:
    return all(min(one[side + 2], two[side + 2]) - max(one[side], two[side]) > SLACK for side in (0, 1))


@pytest.mark.parametrize("traced", (False, True))
def test_the_report(folder, traced, capsys):
    if traced:
        trace(folder)
    assert main(["report", str(folder)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == folder / "report.html"
    found = Read(path.read_text())
    assert found.texts["h2"] == ["Job", "Steps", "Failures", "Schedule", "Events"]
    assert len(found.links) == 2 + traced, "throughput, loss and the schedule"
    assert all(link.startswith("data:image/png;base64,iVBOR") for link in found.links), "nothing is fetched"
    cells = found.texts["td"]
    assert {
        "0.1",
        "0.400 s",
        WHY,
        f"3 of 4 left; seat 0.1 (rank 2): {WHY}",
        "2 replicas of 2 stages, 4 micro-batches each",
    } <= set(cells)
    assert "34.78 samples/s, 0.23 s a step; at the end 20 samples/s, 0.4 s a step: 58%, predicted 60%" in cells
    assert any("As it ran, measured, when 0.1 was lost" in text for text in found.texts["p"]) == traced
    assert any("No trace of these steps" in text for text in found.texts["p"]) != traced


def test_what_events_say_is_text(folder):
    with (folder / "events.jsonl").open("a") as log:
        log.write(json.dumps({"time": 105.0, "event": "warning", "text": "<script>alert(1)</script> & co"}) + "\n")
    text = report.write(folder).read_text()
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in text


# --- the page ------------------------------------------------------------------------------------------


def images(*charts: Chart) -> list[str]:
    return Read(page("", "", [("", charts)])).links


def test_what_is_no_number_is_not_drawn():
    one = Chart("loss", {1: float("nan"), 2: 1.0})
    assert images(one) == [] and "No two steps" in page("", "", [("", [one])])


@pytest.mark.parametrize(
    "values", [(1.7e308, -1.7e308), (5e-324, 1e-323), (1e300, 1e-300), (1.0, 1.0 + 3e-16), (0.0, 0.0), (-3.0, -3.0)]
)
def test_numbers_at_the_edges_of_floats_are_drawn(values):
    assert len(images(*(Chart("", dict(enumerate(values, 1)), from_zero=zero) for zero in (True, False)))) == 2


def test_losses_and_returns_are_marked():
    """By lines that take ink: what they say is in the table of failures, whose steps these are."""
    points = dict.fromkeys(range(1, 10), 1.0)
    plain, lost, back = images(Chart("", points), Chart("", points, lost=(4, 5)), Chart("", points, back=(4, 5)))
    assert len({plain, lost, back}) == 3


def test_the_page_is_light_or_dark_and_made_for_phones():
    text = page("", "", [])
    assert "@media (prefers-color-scheme: dark)" in text and "color-scheme: light dark" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "@media (max-width:" in text


def long_words(events: list[dict]) -> list[dict]:
    """Two losses in one step, a path without a blank, and a cause that is a paragraph."""
    events = two_at_once(events)
    path = "/scratch/" + "a-folder-with-a-long-name/" * 12 + "global_step9"
    saved = {"time": 104.38, "event": "checkpoint", "text": f"checkpoint in {path}", "path": path}
    table = {"time": 100.0, "event": "deadlines", "text": "deadlines:\n" + "  15 s  a message from a worker\n" * 5}
    for event in events:
        if event["event"] == "confirmed":
            event["how"] = "its process was killed by signal 9 (SIGKILL) " * 8
    return [*events[:6], table, *events[6:-2], saved, *events[-2:]]


@pytest.fixture
def crowded() -> str:
    """A page of long words, and of a chart with wide numbers."""
    points = {step: 1.5e6 + step for step in range(1, 1_000_001, 1000)}
    charts = [Chart("a", points, "% of live workers' time", [*range(40_000, 1_000_000, 30_000)])]
    return page("a" * 200, "b" * 400, [("c" * 100, charts), ("d", [Table(("e", "f"), [("g" * 300, "1.0")])])])


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report with")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("which", ("traced", "untraced", "crowded"))
def test_nothing_is_cut_off_or_covered_in_a_browser(folder, which, crowded):
    """Laid out by Chromium at the widths of a phone, a tablet and a desk."""
    if which == "traced":
        trace(folder)
    rewrite(folder, long_words)
    found = measured(crowded if which == "crowded" else report.write(folder).read_text(), folder)
    assert {width: (*wrong(at),) for width, at in found.items()} == dict.fromkeys(WIDTHS, ())
    assert [at["width"] for at in found.values()] == [*WIDTHS] and not any(at["fetched"] for at in found.values())
    if which != "crowded":
        wide, narrow = found[WIDE], found[NARROW]
        assert len(wide["charts"]) == 2 and len(wide["images"]) == 2 + (which == "traced") and len(narrow["texts"]) > 40
        assert wide["charts"][0][1] == pytest.approx(wide["charts"][1][1]), "side by side"
        assert narrow["charts"][0][3] <= narrow["charts"][1][1], "one below the other"
        assert all(at["width"] > NARROW for at in narrow["images"][2:]), "it scrolls, and can be read"


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report with")
@pytest.mark.timeout(180)
def test_what_is_cut_off_or_covered_is_found(tmp_path):
    """The check of boxes itself, on a page with each mistake."""
    bad = {
        "the page is 2008 wide": '<p style="width: 2000px">text</p>',
        "sticks out of its element": f'<p style="width: 50px">{"a" * 40}</p>',
        "'here' and 'there' cover": '<p>here</p><p style="margin-top: -2.4em">there</p>',
        "a picture is cut off": '<div style="width: 2000px; margin-right: -2000px"><img></div>',
    }
    for said, body in bad.items():
        found = measured(f"<!DOCTYPE html><html><body>{body}</body></html>", tmp_path)[WIDE]
        assert any(said in one for one in wrong(found)), (said, [*wrong(found)])


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report with")
@pytest.mark.timeout(180)
def test_a_browser_shows_it_light_or_dark(tmp_path):
    """As the reader's system is."""
    scheme = "--blink-settings=preferredColorScheme={}"
    dark, light = (measured(page("", "", []), tmp_path, scheme.format(number)) for number in (0, 1))
    assert dark[WIDE]["background"] == "rgb(21, 27, 33)" and light[WIDE]["background"] == "rgb(255, 255, 255)"


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report with")
@pytest.mark.timeout(180)
def test_a_chart_lies_on_the_pages_own_colour_in_the_dark(tmp_path):
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(page("", "", [("", [Chart("", {1: 1.0, 2: 2.0})])]))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=600,400"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    dark = "--blink-settings=preferredColorScheme=0"
    subprocess.run([*command, dark, path.as_uri()], capture_output=True, timeout=150, check=True)
    with Image.open(picture) as shown:
        found = sorted(((count, colour[:3]) for count, colour in shown.getcolors(1 << 24)), reverse=True)
    (most, colour), (next_most, _) = found[:2]
    assert colour == (21, 27, 33) and most > 50 * next_most, found[:5]


def test_tables_and_paragraphs_are_escaped():
    read = Read(page("a < b", "lead <", [("x & y", [Table(("<",), [(">",)], {0: "bad"}), "c < d"])]))
    assert read.texts["h1"] == ["a < b"] and read.texts["th"] == ["<"] and read.texts["td"] == [">"]
    assert read.texts["p"] == ["lead <", "c < d"]


def test_a_report_that_follows_a_job_is_loaded_anew_until_its_end(folder, capsys, monkeypatch):
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join(line for line in lines if '"finished"' not in line))
    pages = []

    def half_a_minute(seconds: float) -> None:
        pages.append((folder / "report.html").read_text())
        if len(pages) == 2:
            path.write_text("".join(lines))

    monkeypatch.setattr(time, "sleep", half_a_minute)
    assert main(["report", str(folder), "--follow"]) == 0
    for text in pages:
        assert f'<meta http-equiv="refresh" content="{EVERY_S}">' in text
        (seats,) = Read(text).texts["pre"]
        assert "goodput" in seats and re.search("^0.1 +2 +x its process was killed by signal 9", seats, re.MULTILINE)
    last = (folder / "report.html").read_text()
    assert len(pages) == 2 and "refresh" not in last and "<pre>" not in last
    assert capsys.readouterr().out.splitlines()[-1] == str(folder / "report.html")
    assert not [*folder.glob(".report*")]
