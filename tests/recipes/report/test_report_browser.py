"""The report in headless Chromium: sorting, no requests, readable without scripts and on a narrow screen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from draftsmith.recipes.report.page import run_report
from draftsmith.recipes.schema.results import load_results

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed: pip install 'draftsmith[test]'"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="Chromium and its driver are not installed (Debian: apt-get install chromium chromium-driver)",
)
QUIET = ("background-networking", "component-update", "sync", "extensions", "default-apps", "gpu", "dev-shm-usage")
ROWS: list[dict[str, Any]] = [
    {"method": "autoregressive"},
    {"method": "speculative", "label": "spec <script>document.title='broken'</script>", "options": {"gamma": 2}},
    {"method": "prompt-lookup"},
    {"method": "mjsd", "options": {"gamma": 3, "num_beams": 2, "likelihood_threshold": 0.1}},
    {"method": "autoregressive", "temperature": 1.0},
    {"method": "speculative", "temperature": 1.0},
]


@pytest.fixture(scope="module")
def page(evaluated: Callable[..., Path]) -> Path:
    """A report of a real evaluation of random models, with predictions and categories."""
    out = evaluated("browser", limit=4, methods=ROWS)
    found = load_results(out)
    for row in found["methods"]:
        (part,) = row["by_category"].values()
        row["by_category"] = dict.fromkeys(("writing", "a-very-long-category-name-that-does-not-break"), part)
        row["prediction"] = {"tokens_per_step": 1.01 * row["tokens_per_step"]}
    found["categories"] = dict.fromkeys(found["methods"][0]["by_category"], 2)
    found["errors"] = ["an error as long as a path: /" + "folder/" * 30]
    out.write_text(json.dumps(found))
    return run_report([out])


@pytest.fixture
def browse(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that opens a file in a fresh browser: `browse(path, width=1280, scripts=True)`."""
    opened = []

    def browse(path: Path, width: int = 1280, scripts: bool = True) -> Any:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        profile = tmp_path / f"profile{len(opened)}"
        flags = ["--headless=new", "--no-sandbox", "--no-first-run", f"--user-data-dir={profile}"]
        for flag in [*flags, *(f"--disable-{name}" for name in QUIET), f"--window-size={width},900"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        if not scripts:
            options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
        opened.append(driver)
        sizes = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)
        driver.get(path.as_uri())
        return driver

    yield browse
    for driver in opened:
        driver.quit()


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "")) for text in texts]


def column(driver: Any, table: Any, place: int) -> list[str]:
    """The texts of a column, from above."""
    script = "return [...arguments[0].tBodies[0].rows].map(r => r.cells[arguments[1]].innerText)"
    return list(driver.execute_script(script, table, place))


def test_sorting_changes_the_order(page: Path, browse: Callable[..., Any]) -> None:
    driver = browse(page)
    table = driver.find_element("css selector", "table.sortable")
    headings = table.find_elements("css selector", "thead th")
    names = [heading.text.split("\n")[0] for heading in headings]
    speed = names.index("speed")
    given = column(driver, table, speed)
    headings[speed].find_element("tag name", "button").click()
    falling = numbers(column(driver, table, speed))
    assert falling == sorted(numbers(given), reverse=True)
    assert falling != numbers(given)
    assert headings[speed].get_attribute("aria-sort") == "descending"
    headings[speed].find_element("tag name", "button").click()
    assert numbers(column(driver, table, speed)) == sorted(falling)
    rate = names.index("accepted")
    for _ in range(2):  # what is missing stands last, whichever way the others run
        headings[rate].find_element("tag name", "button").click()
        assert column(driver, table, rate)[-2:] == ["–", "–"]
    assert driver.get_log("browser") == []
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0  # nothing is asked for
    assert driver.title.startswith("Speculative decoding")  # no label ran


def test_the_page_reads_without_scripts(page: Path, browse: Callable[..., Any]) -> None:
    driver = browse(page, scripts=False)
    tables = driver.find_elements("css selector", "table")
    assert len(tables) == 6
    assert all(table.is_displayed() for table in tables)
    drawings = driver.find_elements("css selector", "figure svg")
    assert len(drawings) >= 2
    assert all(drawing.is_displayed() and drawing.size["height"] > 50 for drawing in drawings)
    assert "mjsd" in tables[0].text


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_never_wider_than_its_window(page: Path, browse: Callable[..., Any], width: int) -> None:
    driver = browse(page, width=width)
    assert driver.execute_script("return innerWidth") == width
    wide, room = driver.execute_script("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
    assert wide <= room
    script = """
      const held = (e) => e.closest('.wide, .drawn, pre');
      return [...document.querySelectorAll('main *')].filter((e) => !held(e) && e.getBoundingClientRect().right >
        document.documentElement.clientWidth + 1).map((e) => e.outerHTML.slice(0, 80));
    """
    assert driver.execute_script(script) == []
