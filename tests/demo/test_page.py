"""``report.html`` of the hand-written run as a page: what is on it, and that a browser shows all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from html import escape
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest

from recycle_plugin.cli import main
from recycle_plugin.observability import report
from recycle_plugin.render.page import Chart, Table, chart, page, ticks
from tests.support.run_folder import WHY, Read, rewrite, trace, two_at_once

# Where a browser puts the texts of a page, at several widths: boxes of elements, not pixels.
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
    for drawn in found["charts"]:
        for text, box in drawn["texts"]:
            if not _within(box, drawn["box"]):
                yield f"{text!r} sticks out of its chart"
            if box[3] - box[1] < SMALLEST:
                yield f"{text!r} is {box[3] - box[1]:.1f} pixels high"
        for (one, its), (two, of_two) in combinations(drawn["texts"], 2):
            if _overlap(its, of_two):
                yield f"{one!r} and {two!r} cover each other in a chart"
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
    assert len(found.links) == 1 and found.links[0].startswith("data:image/png;base64,iVBOR"), (
        "self-contained: nothing is fetched"
    )
    cells = found.texts["td"]
    assert {
        "0.1",
        "0.400 s",
        WHY,
        f"3 of 4 left; seat 0.1 (rank 2): {WHY}",
        "2 replicas of 2 stages, 4 micro-batches each",
    } <= set(cells)
    assert "34.78 samples/s, 0.23 s a step; at the end 20 samples/s, 0.4 s a step: 58%, predicted 60%" in cells
    assert found.texts["text"].count("0.1 lost") == 2, "on the throughput's and the loss's chart"
    assert any("As it ran, measured, when 0.1 was lost" in text for text in found.texts["p"]) == traced
    assert any("its times are no measurement" in text for text in found.texts["p"]) != traced


def test_what_events_say_is_text(folder):
    with (folder / "events.jsonl").open("a") as log:
        log.write(json.dumps({"time": 105.0, "event": "warning", "text": "<script>alert(1)</script> & co"}) + "\n")
    text = report.write(folder).read_text()
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in text


# --- the page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "low, high, expected",
    [(0, 9.4, [0, 5, 10]), (5.2, 5.6, [5.2, 5.3, 5.4, 5.5, 5.6]), (3, 3, [3, 4]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_hold_everything(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_long_line_is_thinned_out_and_keeps_its_peaks():
    points = {step: 100.0 if step == 54_321 else 1.0 for step in range(1, 100_001)}
    drawn = Read(chart(Chart("", points, 1, 100_000)))
    line = chart(Chart("", points, 1, 100_000)).partition('polyline points="')[2].partition('"')[0].split()
    assert drawn.links == [] and len(line) < 2500 and sum(float(point.partition(",")[2]) < 40 for point in line) == 1


def test_what_is_no_number_is_not_drawn():
    assert "No two steps" in chart(Chart("loss", {1: float("nan"), 2: 1.0}, 1, 2))


@pytest.mark.parametrize(
    "values", [(1.7e308, -1.7e308), (5e-324, 1e-323), (1e300, 1e-300), (1.0, 1.0 + 3e-16), (0.0, 0.0), (-3.0, -3.0)]
)
def test_numbers_at_the_edges_of_floats_are_drawn(values):
    for from_zero in (True, False):
        line = chart(Chart("", dict(enumerate(values, 1)), 1, 2, {}, "", from_zero)).partition('polyline points="')[2]
        points = [tuple(map(float, point.split(","))) for point in line.partition('"')[0].split()]
        assert len(points) == 2 and all(0 <= at <= 500 for point in points for at in point)


def drawn_texts(given: Chart) -> list[str]:
    return Read(chart(given)).texts["text"]


def test_axes_have_names_and_begin_at_0():
    """... but for a loss that would be a flat line then, which says where its axis begins."""
    flat, steep = {1: 9.0, 2: 8.5, 3: 8.2}, {1: 9.0, 2: 5.0, 3: 1.0}
    assert {"samples/s", "step", "0", "10"} <= set(drawn_texts(Chart("", flat, 1, 3, {}, "samples/s")))
    assert {"mean loss", "step", "0", "10"} <= set(drawn_texts(Chart("", steep, 1, 3, {}, "mean loss", False)))
    cut = drawn_texts(Chart("", flat, 1, 3, {}, "mean loss", False))
    assert {"mean loss (the axis begins at 8)", "step", "8.5", "9"} <= set(cut)
    assert cut.count("0") == 1, "of the steps"
    assert "100" in drawn_texts(Chart("", {101: 1.0, 140: 2.0}, 100, 140)), "a run that goes on begins where it does"


def test_marks_without_room_for_their_text_keep_their_line():
    marks = {step: f"{step}.0 lost" for step in range(1, 11)}
    drawn = Read(chart(Chart("", dict.fromkeys(range(1, 101), 1.0), 1, 100, marks)))
    assert drawn.texts["title"] == [*marks.values()]
    assert "1.0 lost" in drawn.texts["text"] and 1 < sum("lost" in text for text in drawn.texts["text"]) < 10


def test_no_line_goes_through_a_marks_text():
    """At the right edge a text is to the left of its line, and covers that of another mark."""
    drawn = chart(Chart("", dict.fromkeys(range(1, 19), 1.0), 1, 18, {14: "2.0 lost", 17: "2.0 back", 18: "1.0 lost"}))
    lines = [float(at) for at in re.findall(r'<line class="mark" x1="([^"]+)"', drawn)]
    texts = [
        (float(at), float(width)) for at, width in re.findall(r'<rect x="([^"]+)" y="[^"]+" width="([^"]+)"', drawn)
    ]
    assert len(lines) == len(texts) == 3
    assert not any(begin <= at <= begin + width for at, (begin, width) in zip(lines, texts))
    assert drawn.rindex("<line") < drawn.index("<rect"), "texts are over lines"


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
    table = {"time": 100.0, "event": "deadlines", "text": "who waits how long:\n" + "  15 s  a word of a worker\n" * 5}
    for event in events:
        if event["event"] == "confirmed":
            event["how"] = "its process was killed by signal 9 (SIGKILL) " * 8
    return [*events[:6], table, *events[6:-2], saved, *events[-2:]]


@pytest.fixture
def crowded() -> str:
    """A page of charts with the widest numbers and more marks than there is room for."""
    marks = {step: f"{step % 64}.{step % 7}, {step % 9}.1 lost" for step in range(40_000, 1_000_000, 30_000)}
    points = {step: 1.5e6 + step for step in range(1, 1_000_001, 1000)}
    late = Chart(
        "b", {step: 1 + step * 1e-9 for step in points}, 999_990, 1_000_000, {999_999: "1.1 lost"}, "loss", False
    )
    charts = [Chart("a", points, 1, 1_000_000, marks, "% of live workers' time, no micro-batch"), late]
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
        assert len(wide["charts"]) == 2 and len(wide["images"]) == 1 and len(narrow["texts"]) > 40
        assert wide["charts"][0]["box"][1] == pytest.approx(wide["charts"][1]["box"][1]), "side by side"
        assert narrow["charts"][0]["box"][3] <= narrow["charts"][1]["box"][1], "one below the other"
        assert narrow["images"][0]["width"] > NARROW, "it scrolls, and can be read"


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome to open the report with")
@pytest.mark.timeout(180)
def test_what_is_cut_off_or_covered_is_found(tmp_path):
    """The check of boxes itself, on a page with each mistake."""
    svg = '<svg viewBox="0 0 400 90" style="width: 300px"><text y="{}">one text</text><text y="{}">another</text></svg>'
    bad = {
        "the page is 2008 wide": '<p style="width: 2000px">text</p>',
        "sticks out of its element": f'<p style="width: 50px">{"a" * 40}</p>',
        "sticks out of its chart": svg.format(2, 60),
        "cover each other in a chart": svg.format(40, 45),
        "'here' and 'there' cover": '<p>here</p><p style="margin-top: -2.4em">there</p>',
        "pixels high": svg.replace("<text", '<text font-size="8"').format(30, 60),
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


def test_tables_and_paragraphs_are_escaped():
    read = Read(page("a < b", "lead <", [("x & y", [Table(("<",), [(">",)], {0: "bad"}), "c < d"])]))
    assert read.texts["h1"] == ["a < b"] and read.texts["th"] == ["<"] and read.texts["td"] == [">"]
    assert read.texts["p"] == ["lead <", "c < d"]
