"""index.html, the run in a browser: opened from the disk in a headless Chromium, whose console must stay empty."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, column, flags, model_name, seal_model, with_slot

sync_api = pytest.importorskip("playwright.sync_api")
NAME = 'a "run"</script>\\u'  # of an output folder: nothing that the page would run
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; on Debian: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # which root can't have
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """open_page(folder, query="", **context): index.html in a window. Nothing may be asked of a network, fail to load, or be complained of."""
    complaints: list[str] = []
    contexts = []

    def asked(request: Any) -> None:
        if not request.url.startswith(("file://", "data:")):
            complaints.append(request.url)

    def open_page(folder: Path, query: str = "?reload=0", **context: Any) -> Any:
        contexts.append(browser.new_context(**context))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(f"{request.url} failed"))
        page.on("request", asked)
        page.goto((folder / "index.html").as_uri() + query)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def shown(page: Any, name: str) -> np.ndarray:
    """A column of the page's rows; NaN where there is nothing."""
    return np.array(page.evaluate(f"rows.map((row) => row.{name})"), np.float64)


def ink(page: Any, chart: str) -> int:
    """How many pixels of a chart are painted."""
    image = f"$('{chart}').getContext('2d').getImageData(0, 0, $('{chart}').width, $('{chart}').height).data"
    return page.evaluate(f"{image}.reduce((count, v, i) => count + (i % 4 === 3 && v > 100), 0)")


def until_drawn(page: Any) -> None:
    page.wait_for_function("!waiting && charts.every((chart) => chart.x)")


@pytest.fixture
def trained(run: Callable, data: Path, tmp_path: Path) -> Path:
    words = "--val_interval 5 --save_interval 10 --sample_interval 3 --output_dir"
    run(flags(TINY, "--data_file", data, "--val_data_file", data, "--max_steps 12", words, NAME))
    return tmp_path / NAME


def test_curves_and_grids(open_page: Callable, trained: Path) -> None:
    page = open_page(trained, viewport={"width": 1200, "height": 900})
    for ours, theirs in {"loss": "loss", "lr": "lr", "norm": "grad_norm", "q0": "loss_q0", "q3": "loss_q3", "val": "val_loss"}.items():
        assert np.allclose(shown(page, ours), column(trained, theirs), rtol=1e-5, equal_nan=True), ours
    assert shown(page, "first").tolist() == shown(page, "last").tolist() == [*range(1, 13)]
    assert shown(page, "skipped").tolist() == [0] * 12
    until_drawn(page)
    for chart in ("loss", "lr", "norm", "speed"):
        assert ink(page, chart) > 300, chart
    assert np.allclose(page.evaluate("charts[0].data.raw"), column(trained, "loss"), rtol=1e-5)  # what is drawn
    # words
    assert page.locator("#name").inner_text() == NAME and page.locator("#state").inner_text() == "done"
    assert "12 of 12" in page.locator("#figures").inner_text()
    about = page.locator("#about").inner_text()
    assert "8x8x1" in about and "M parameters" in about and "--max_steps 12" in about and "hardware: " in about
    page.locator("summary").click()
    assert "--grad_clip" in page.locator("#flags").inner_text()
    # the slider: the newest grid first, then any
    steps = [3, 6, 9, 12]
    assert page.locator("#slider").get_attribute("max") == "3"
    for k in (3, 0, 2):
        page.locator("#slider").fill(str(k))
        page.wait_for_function("$('grid').complete && $('grid').naturalWidth > 0")
        assert page.locator("#grid").get_attribute("src") == f"samples_{steps[k]:07d}.png" and f"step {steps[k]} " in page.locator("#at").inner_text()
    page.locator("#play").click()
    page.wait_for_function("$('at').textContent.startsWith('step 12 ')", timeout=3000)


def test_zoom(open_page: Callable, trained: Path) -> None:
    page = open_page(trained, viewport={"width": 1200, "height": 900})
    until_drawn(page)
    box = page.locator("#loss").bounding_box()
    x = page.evaluate("[3, 9].map((step) => charts[0].x(step))")
    page.mouse.move(box["x"] + x[0], box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + x[1], box["y"] + 120, steps=4)
    page.mouse.up()
    assert page.evaluate("view()") == pytest.approx([3, 9], abs=0.1)
    page.mouse.wheel(0, 400)
    page.wait_for_function("view()[1] - view()[0] > 8")
    page.locator("#whole").click()
    assert page.evaluate("view()") == [0, 12]
    page.mouse.move(box["x"] + x[0], box["y"] + 100)
    before = page.evaluate("range(charts[0])")
    page.locator(".key").first.click()  # single steps go, and the axis fits what is left
    page.wait_for_function(f"range(charts[0])[1] < {before[1]}")
    page.reload()
    assert page.evaluate("choice.off").count("raw") == 1


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_phone(open_page: Callable, trained: Path, scheme: str) -> None:
    """Nothing is wider than the screen; dark is dark; a touch chooses steps."""
    page = open_page(trained, viewport={"width": 360, "height": 700}, color_scheme=scheme, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert int(red) < 60 if scheme == "dark" else int(red) > 200
    page.locator("#loss").tap(position={"x": 60, "y": 50})
    assert page.locator("#at").inner_text().startswith("step 3 ")  # the grid nearest to the beginning


def test_skipped_steps_and_news(run: Callable, open_page: Callable, data: Path, tmp_path: Path) -> None:
    """Rows do not say that a step was skipped, the guard does. And the page takes in what the run has written meanwhile."""
    given = flags(TINY, "--data_file", data, "--save_interval 110 --max_steps 110")
    run(given)
    log = (tmp_path / "out/log.csv").read_text().splitlines()
    for step, loss in ((5, "nan"), (104, "77")):  # what a run that had these steps would have written
        fields = log[step].split(",")
        log[step] = ",".join([fields[0], loss, *fields[2:]])
    (tmp_path / "out/log.csv").write_text("\n".join(log) + "\n")
    page = open_page(tmp_path / "out", "?reload=1")
    assert page.locator("#state").inner_text() == "done" and shown(page, "skipped").sum() == 0
    html = (tmp_path / "out/index.html").read_text()
    (tmp_path / "out/index.html").write_text(html.replace('state: "done"', 'state: "running"'))
    page.reload()
    assert page.locator("#state").inner_text() == "training" and "to go" in page.locator("#figures").inner_text()
    run(["--resume_checkpoint", "latest", "--max_steps", 115])
    page.wait_for_function("run.step === 115 && run.state === 'done'", timeout=5000)
    assert np.flatnonzero(shown(page, "skipped")).tolist() == [4, 103] and np.isnan(shown(page, "loss")[[4, 103]]).all()
    assert "steps skipped" in page.locator("#figures").inner_text() and page.locator("#state").inner_text() == "done"
    # a run that nothing was heard of for a day
    (tmp_path / "out/index.html").write_text(html.replace('state: "done"', 'state: "running"').replace("time: 1", "time: 0 * 1"))
    page.reload()
    assert page.locator("#state").inner_text().startswith("no news since")


def test_a_million_steps(run: Callable, open_page: Callable, data: Path, tmp_path: Path) -> None:
    """Rows are put together until at most 4096 are left; their means, least and largest are those of the log."""
    count = 1_000_000
    run(flags(TINY, "--data_file", data, "--max_steps 2 --save_interval 2"))
    path = tmp_path / "out" / model_name(2)
    file = path.read_bytes()
    for slot, value, kind in ((64, count, "<i8"), (70, count + 1, "<i4"), (81, count, "<i4"), (88, float(count), "<f8")):
        file = with_slot(file, slot, value, kind)
    path.unlink()
    (path.parent / model_name(count)).write_bytes(seal_model(file))
    losses = 1 + np.random.default_rng(0).random(count) * 0.5
    rows = "".join(f"{step},{loss:.6g},0.001,0.5,8,{loss:.6g},,,,\n" for step, loss in enumerate(losses.tolist(), 1))
    header = (tmp_path / "out/log.csv").read_text().partition("\n")[0]
    (tmp_path / "out/log.csv").write_text(f"{header}\n{rows}")
    run(["--resume_checkpoint", "latest", "--max_steps", count + 1])
    assert (tmp_path / "out/index.html").stat().st_size < 700_000
    page = open_page(tmp_path / "out")
    until_drawn(page)
    first, last = shown(page, "first").astype(int), shown(page, "last").astype(int)
    assert 2048 < len(first) <= 4096 and first[0] == 1 and last[-1] == count + 1 and np.array_equal(first[1:], last[:-1] + 1)
    for k in (0, 1000, len(first) - 2):
        part = losses[first[k] - 1 : last[k]]
        assert [shown(page, name)[k] for name in ("low", "loss", "high")] == pytest.approx([part.min(), part.mean(), part.max()], rel=1e-5)
    assert page.evaluate("document.readyState") == "complete" and shown(page, "skipped")[:-1].sum() == 0  # the last norm is none of these
