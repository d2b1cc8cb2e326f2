"""The report in a real browser: on a wide and on a narrow screen it fits, fetches nothing, and says the verdict first."""

import shutil

import pytest
from playwright.sync_api import sync_playwright

import reports
from layerproof.paths import GLOSSARY
from layerproof.report import plots
from layerproof.report.page import TEMPLATE, render
from layerproof.report.sentences import verdict_sentences

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


@pytest.fixture(scope="module", params=["good", "bad"])
def written(request, tmp_path_factory):
    """A report with all its plots, and the headline and the stages that did not pass."""
    directory = tmp_path_factory.mktemp(request.param)
    comparisons, chains = {"good": reports.good, "bad": reports.bad}[request.param]()
    images = {name: directory / f"{name}.svg" for name in ("map", "depth", *(one["stage"] for one in comparisons))}
    for comparison in comparisons:
        plots.plot_stage(comparison, images[comparison["stage"]])
    plots.plot_map(comparisons, images["map"])
    plots.plot_depth(comparisons, chains, images["depth"])
    diagnoses = [reports.diagnosis("layer_000", ("router.scores", "a softmax"), ("out", None))]
    diagnoses = diagnoses if request.param == "bad" else []
    verdicts = reports.collect(comparisons, chains, diagnoses)
    books = reports.audit(comparisons), [], reports.preflights()
    settings, software = reports.config(), {"Python": "3.12.11"}
    html = render(TEMPLATE, GLOSSARY, verdicts, comparisons, chains, diagnoses, images, [], *books, settings, software)
    page = directory / "report.html"
    page.write_text(html, encoding="utf-8")
    headline = verdict_sentences(verdicts, comparisons, chains, diagnoses, reports.LIMIT)[0]
    return page, headline, {one["stage"]: one["status"] for one in comparisons}


@pytest.fixture(params=[1280, 400])
def page(request, browser, written):
    """The report on a screen of this width; fails if the page complains or asks for anything but itself."""
    path, _, _ = written
    opened = browser.new_page(viewport={"width": request.param, "height": HEIGHT})
    complaints, requests = [], []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda asked: requests.append(asked.url))
    opened.goto(path.as_uri())
    yield opened
    opened.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]


def test_the_page_is_no_wider_than_the_screen(page):
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_the_verdict_comes_first_and_is_seen_without_scrolling(page, written):
    headings = page.get_by_role("heading", level=1)
    assert headings.count() == 1
    assert headings.inner_text() == written[1]
    box = headings.bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= HEIGHT


def test_stages_that_do_not_pass_are_open(page, written):
    for stage, status in written[2].items():
        details = page.locator("section.stage > details").filter(has=page.locator(f"summary#{stage}"))
        assert (details.get_attribute("open") is not None) == (status != "pass")


def test_a_link_to_a_stage_opens_it(page):
    page.get_by_role("link", name="norm").click()
    page.wait_for_function("document.querySelector('#norm').parentElement.open")


def test_every_plot_is_drawn_and_described(page):
    page.get_by_role("button", name="Open all").click()
    for image in page.locator("img").all():
        assert image.get_attribute("alt")
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300


def test_stages_that_pass_can_be_hidden(page, written):
    page.get_by_role("button", name="Hide stages that pass").click()
    visible = [section for section in page.locator("section.stage").all() if section.is_visible()]
    assert len(visible) == sum(status != "pass" for status in written[2].values())


def test_the_page_is_whole_without_javascript(browser, written):
    path, headline, _ = written
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(path.as_uri())
    assert plain.get_by_role("heading", level=1).inner_text() == headline
    assert not plain.get_by_role("button", name="Open all").is_visible()
    plain.locator("summary#norm").click()
    assert plain.get_by_role("region", name="Taps of norm").is_visible()
    context.close()
