"""The report in a real browser: it fits the screen, fetches nothing, says the verdict first, and does what keys and clicks
ask for.
"""

import contextlib
import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

import reports
from layerproof.paths import TEMPLATES
from layerproof.report import plots
from layerproof.report.page import render

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HEIGHT = 800


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("Chromium is not installed: run make setup-dev")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield launched
        launched.close()


def write(directory, comparisons, chains=(), diagnoses=()):
    """A report with its plots, and what it was made of."""
    images = {name: directory / f"{name}.svg" for name in ("depth", *(one["stage"] for one in comparisons[:4]))}
    for comparison in comparisons[:4]:
        plots.plot_stage(comparison, images[comparison["stage"]])
    plots.plot_depth(comparisons, chains, images["depth"])
    run = reports.page_inputs(comparisons, chains, images, diagnoses=diagnoses, results=directory)
    path = directory / "report.html"
    path.write_text(render(TEMPLATES[0], run), encoding="utf-8")
    return path, run


@pytest.fixture(scope="module", params=["good", "bad"])
def written(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    comparisons, chains = {"good": reports.good, "bad": reports.bad}[request.param]()
    diagnoses = [reports.diagnosis("layer_000", ("router.scores", "a softmax"), ("out", None))]
    return write(directory, comparisons, chains, diagnoses if request.param == "bad" else [])


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """62 layers that fail alike, with four chains."""
    stages = [f"layer_{layer:03d}" for layer in range(62)]
    comparisons = [reports.compared(stage, wrong=("router.scores", "out")) for stage in stages]
    comparisons = [reports.compared("embed"), *comparisons, reports.compared("norm"), reports.compared("lm_head")]
    chains = [reports.chain(comparisons) | {"chain": name} for name in ("all", "0-61", "0-30", "31-61")]
    diagnoses = [reports.diagnosis(stage, ("router.scores", "a softmax"), ("out", None)) for stage in stages]
    return write(tmp_path_factory.mktemp("many"), comparisons, chains, diagnoses)


@contextlib.contextmanager
def showing(browser, path, **options):
    """The report as a browser shows it; fails if the page complains or asks for anything but itself."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": HEIGHT}, "accept_downloads": True} | options)
    opened = context.new_page()
    opened.set_default_timeout(5000)
    complaints, requests = [], []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda asked: requests.append(asked.url))
    opened.goto(path.as_uri())
    yield opened
    context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]


@pytest.fixture(params=[1280, 400])
def page(request, browser, written):
    with showing(browser, written[0], viewport={"width": request.param, "height": HEIGHT}) as opened:
        yield opened


@pytest.fixture
def wide(browser, many):
    with showing(browser, many[0]) as opened:
        yield opened


@pytest.fixture
def bad(browser, tmp_path):
    comparisons, chains = reports.bad()
    diagnoses = [reports.diagnosis("layer_000", ("router.scores", "a softmax"), ("out", None))]
    with showing(browser, write(tmp_path, comparisons, chains, diagnoses)[0]) as opened:
        yield opened


def visible(page):
    return [
        section.locator("summary").first.get_attribute("id")
        for section in page.locator("section.stage").all()
        if section.is_visible()
    ]


def test_the_page_is_no_wider_than_the_screen(page):
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_the_verdict_comes_first_and_is_seen_without_scrolling(page, written):
    headings = page.get_by_role("heading", level=1)
    assert headings.count() == 1
    assert headings.inner_text() == written[1].verdicts["headline"]
    box = headings.bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= HEIGHT


def test_the_first_screen_has_the_verdict_what_to_do_next_and_the_map(bad):
    for seen in (
        bad.get_by_role("heading", level=1),
        bad.get_by_role("heading", name="Do this next"),
        bad.locator(".map"),
    ):
        box = seen.bounding_box()
        assert box["y"] + box["height"] <= HEIGHT, seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 1024, 400])
def test_nobody_is_shut_out(browser, written, width, scheme):
    with showing(browser, written[0], viewport={"width": width, "height": 900}, color_scheme=scheme) as opened:
        opened.get_by_role("button", name="Open all").click()
        found = Axe().run(opened).response["violations"]
    assert not found, [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found]


def test_a_page_of_62_equal_failures_is_short(wide, many):
    assert many[0].stat().st_size < 3_000_000
    assert wide.evaluate("document.documentElement.scrollHeight") <= 10 * HEIGHT
    assert wide.locator(".finding").count() == 1
    assert wide.locator(".map thead th").count() == 65, "every layer can be found"
    box = wide.locator(".map").bounding_box()
    assert box["x"] + box["width"] <= 1280, "and seen at once"


def test_a_cell_of_the_map_leads_to_its_tap(bad):
    bad.get_by_title("layer_000 router.scores: fail").click()
    row = bad.locator("[id='layer_000/router.scores']")
    row.wait_for(state="visible")
    assert "target" in row.get_attribute("class")
    assert bad.locator("details:has(> summary#layer_000)").get_attribute("open") is not None


def test_a_link_to_a_tap_opens_it(browser, written):
    path, _ = written
    with showing(browser, path) as opened:
        opened.evaluate("location.hash = '#layer_001/out'")
        opened.wait_for_function("document.querySelector('#layer_001').parentElement.open")


def test_arrows_move_through_the_map(wide):
    start = wide.get_by_title("layer_000 router.scores: fail")
    start.focus()
    wide.keyboard.press("ArrowRight")
    assert wide.evaluate("document.activeElement.title").startswith("layer_001 router.scores: fail")
    wide.keyboard.press("ArrowDown")
    assert wide.evaluate("document.activeElement.title").startswith("layer_001 mlp.out: ")
    wide.keyboard.press("Enter")
    wide.wait_for_function("document.querySelector('#layer_001').parentElement.open")
    assert wide.evaluate("document.querySelectorAll('.map [tabindex=\"0\"]').length") == 1


def test_counts_are_filters_and_search_finds_stages(bad):
    assert len(visible(bad)) == 5
    bad.get_by_role("button", name="1 failed").click()
    assert visible(bad) == ["layer_000"]
    bad.get_by_role("button", name="3 passed").click()
    assert visible(bad) == ["embed", "layer_000", "norm", "lm_head"]
    bad.get_by_role("searchbox").fill("norm")
    assert visible(bad) == ["norm"]
    assert bad.get_by_text("1 of 5 stages", exact=True).is_visible()


def test_stages_come_worst_first_if_asked_for(bad):
    bad.get_by_label("Order").select_option("worst")
    assert visible(bad)[:2] == ["layer_001", "layer_000"], "an error comes before a failure"
    bad.get_by_label("Order").select_option("model")
    assert visible(bad) == ["embed", "layer_000", "layer_001", "norm", "lm_head"]


def test_keys_go_to_the_next_and_the_previous_failure(bad):
    for key, expected in (("n", "finding-1"), ("n", "finding-2"), ("p", "finding-1"), ("p", "finding-2")):
        bad.keyboard.press(key)
        assert bad.evaluate("document.activeElement.id") == expected
    bad.keyboard.press("/")
    assert bad.evaluate("document.activeElement.type") == "search"


def test_columns_can_be_chosen_and_sorted(bad):
    bad.locator("summary#layer_000").click()
    taps = bad.get_by_role("region", name="Taps of layer_000")
    assert taps.get_by_role("columnheader", name="cosine").count() == 0
    bad.get_by_text("Columns").first.click()
    bad.get_by_label("cosine").first.check()
    assert taps.get_by_role("columnheader", name="cosine").count() == 1
    taps.get_by_role("button", name="times too far off").click()
    first = taps.locator("tbody tr").first
    assert first.get_attribute("class") == "fail"
    sorted_by = taps.get_by_role("columnheader", name="times too far off").get_attribute("aria-sort")
    assert sorted_by == "descending"
    bad.get_by_role("link", name="What R, noise and the others mean").first.click()
    bad.wait_for_function("document.querySelector('#words + details').open")


def test_a_plot_can_be_taken_along_and_its_numbers_read(bad):
    with bad.expect_download() as started:
        bad.get_by_role("button", name="Download").first.click()
    assert started.value.suggested_filename == "layer_000.svg"
    bad.locator("summary#layer_000").click()
    bad.get_by_text("Numbers of the plot").click()
    assert bad.get_by_role("region", name="Quantiles of the errors").locator("tbody tr").count() > 5


def test_commands_and_findings_can_be_copied(browser, tmp_path):
    comparisons, chains = reports.bad()
    path, _ = write(tmp_path, comparisons, chains)
    with showing(browser, path, permissions=["clipboard-read", "clipboard-write"]) as opened:
        opened.locator(".next").get_by_role("button", name="Copy", exact=True).click()
        opened.get_by_role("button", name="Copied").wait_for()
        assert opened.evaluate("navigator.clipboard.readText()") == "layerproof run results/compare/layer_000.json"
        opened.locator(".finding").first.get_by_role("button", name="Copy link").click()
        link = f"{path.as_uri()}#layer_000/router.scores"
        opened.wait_for_function(f"navigator.clipboard.readText().then((text) => text === '{link}')")
        opened.locator(".finding").first.get_by_role("button", name="Copy as Markdown").click()
        opened.wait_for_function(
            "navigator.clipboard.readText().then((text) => text.startsWith('| stages | status |'))"
        )


def test_the_theme_follows_the_system_and_can_be_switched(browser, written):
    with showing(browser, written[0], color_scheme="dark") as opened:
        shown = "getComputedStyle(document.body).backgroundColor"
        dark = opened.evaluate(shown)
        opened.get_by_role("button", name="Theme: system").click()
        light = opened.evaluate(shown)
        assert light != dark
        opened.get_by_role("button", name="Theme: light").click()
        assert opened.evaluate(shown) == dark
        opened.get_by_role("button", name="Theme: dark").click()
        assert opened.evaluate(shown) == dark


def test_every_plot_is_drawn_and_described(page):
    for image in page.locator("img").all():
        assert image.get_attribute("alt")
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300


def test_data_cannot_inject_markup(browser, tmp_path):
    comparison = reports.compared("layer_000", wrong=("out",))
    nasty = "</script><img src=x onerror=alert(1)>"
    comparison["taps"]["out"]["reason"] = nasty
    diagnosis = reports.diagnosis("layer_000", ("out", nasty))
    with showing(browser, write(tmp_path, [comparison], diagnoses=[diagnosis])[0]) as opened:
        opened.locator("summary#layer_000").click()
        assert opened.locator("img[src=x]").count() == 0
        assert opened.get_by_role("region", name="Taps of layer_000").get_by_text(nasty).count() == 1


def test_the_verdict_and_what_to_do_need_no_javascript(browser, written):
    path, run = written
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(path.as_uri())
    assert plain.get_by_role("heading", level=1).inner_text() == run.verdicts["headline"]
    assert plain.locator("button:visible").count() == 0, "what does nothing is not shown"
    plain.locator("summary#norm").click()
    assert plain.get_by_text("results/logs/port/norm.log").is_visible()
    context.close()


def test_the_page_prints(browser, many, tmp_path):
    with showing(browser, many[0]) as opened:
        opened.emulate_media(media="print")
        assert not opened.locator(".bar").is_visible() and opened.get_by_role("heading", level=1).is_visible()
        opened.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 10_000
