"""index.html, the run in a browser: opened from the disk in a headless Chromium, whose console must stay empty."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, TINY, binary_path, column, environment, flags, model_name, read_log, seal_model, shown_run, with_slot

from common.data_files import write_data

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

    def failed(request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page's own reload, in a window that closes
            complaints.append(f"{request.url} failed: {request.failure}")

    def open_page(folder: Path, query: str = "?reload=0", **context: Any) -> Any:
        contexts.append(browser.new_context(**context))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", failed)
        page.on("request", asked)
        page.goto((folder / "index.html").as_uri() + query)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def change_page(folder: Path, **values: object) -> None:
    """Another page, as a run of which these things are so would have written it."""
    html = (folder / "index.html").read_text()
    for name, value in values.items():
        html, count = re.subn(rf'"{name}":("[^"]*"|[^,]*)', lambda _: f'"{name}":{json.dumps(value)}', html, count=1)
        assert count
    (folder / "index.html").write_text(html)


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
    drawn = page.evaluate("charts[0].curves.find((curve) => curve.name === 'raw').values")
    assert np.allclose(drawn, column(trained, "loss"), rtol=1e-5)
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
        page.wait_for_function("run.image.complete && run.image.naturalWidth > 0")
        assert (
            page.locator("#pictures img").get_attribute("src") == f"samples_{steps[k]:07d}.png"
            and f"step {steps[k]} " in page.locator("#at").inner_text()
        )
    page.locator("#play").click()
    page.wait_for_function("$('at').textContent.startsWith('step 12 ')", timeout=3000)


JUDGED = """step,distance,spread,other_judge,to_held_out,precision,recall,copies
3,9.5,0.4,9.25,nan,0.1,0.2,0
10,4.25,0.3,4.5,nan,0.5,0.6,0.125
"""


def test_what_a_judge_says(run: Callable, open_page: Callable, trained: Path, data: Path) -> None:
    """judge.csv becomes a curve: read by a run that goes on, and put into the page of one that has ended. Without it there is none. Copies stand at the grid."""
    page = open_page(trained)
    until_drawn(page)
    assert not page.locator("#judge").is_visible() and shown_run(trained)["judge"] == ""
    copies = column(trained, "copies")
    assert np.flatnonzero(np.isfinite(copies)).tolist() == [2, 5, 8, 11]
    assert f", {100 * copies[-1]:.0f} % are copies of training images" in page.locator("#at").inner_text()
    (trained / "judge.csv").write_text(JUDGED)
    run(flags("--resume_checkpoint", trained / model_name(12), "--max_steps 14 --output_dir", NAME))
    page = open_page(trained)
    until_drawn(page)
    assert shown_run(trained)["judge"] == JUDGED and page.locator("#judge").is_visible() and ink(page, "distance") > 300
    distances = [9.5 if step == 3 else 4.25 if step == 10 else np.nan for step in range(1, 15)]
    assert np.allclose(shown(page, "distance"), distances, equal_nan=True)
    told = "step 10: 4.25 ± 0.3, another judge 4.5, precision 0.5, recall 0.6, copies 13 %"
    assert page.locator("#judged").inner_text() == told


def test_classes_below_a_grid(run: Callable, open_page: Callable, tmp_path: Path) -> None:
    """The name of each picture's class, where the picture stands in the grid."""
    write_data(
        str(tmp_path / "d.bin"), np.zeros((4, 1, 8, 8), np.uint8), [0, 1, 1, 0], 2, class_names=["a <b>", "a name that is longer than its picture"]
    )
    words = "--max_steps 1 --sample_interval 1 --num_samples 7 --class_cond True --use_scale_shift_norm True"
    run(flags(TINY, "--data_file", tmp_path / "d.bin", words))
    page = open_page(tmp_path / "out")
    page.wait_for_function("run.image.complete && run.image.naturalWidth > 0")
    a, b = "a <b>", "a name that is longer than its picture"
    assert page.locator(".classes td").all_inner_texts() == [a, b, a, b, a, b, a]
    image, first, last = (page.locator(what).bounding_box() for what in ("#pictures img", ".classes td >> nth=0", ".classes td >> nth=2"))
    assert abs(first["x"] - image["x"]) < 2 and abs(last["x"] + last["width"] - image["x"] - image["width"]) < 2
    assert first["y"] >= image["y"] + image["height"]


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
    page.locator("#loss").hover()
    page.mouse.wheel(0, -200)
    page.wait_for_function("choice.view && !keeping")
    page.evaluate("scrollTo(0, 150)")
    view = page.evaluate("view()")
    for again in page.reload, lambda: page.evaluate("location.reload()"):  # as the reader does, and as the page does
        with page.expect_navigation():
            again()
        page.wait_for_function("scrollY === 150")
        assert page.evaluate("choice.off").count("raw") == 1 and page.evaluate("view()") == view


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
    change_page(tmp_path / "out", state="running")
    page.reload()
    assert page.locator("#state").inner_text() == "training" and "to go" in page.locator("#figures").inner_text()
    run(["--resume_checkpoint", "latest", "--max_steps", 115])
    page.wait_for_function("run.step === 115 && run.state === 'done'", timeout=60_000)
    assert np.flatnonzero(shown(page, "skipped")).tolist() == [4, 103] and np.isnan(shown(page, "loss")[[4, 103]]).all()
    assert "steps skipped" in page.locator("#figures").inner_text() and page.locator("#state").inner_text() == "done"


def test_no_news(open_page: Callable, trained: Path) -> None:
    """How long the page waits is what the run said: when it would be heard of at the latest."""
    for age, news, told in ((100, 60, "training"), (200, 60, "no news since"), (200, 300, "training"), (86400, 300, "no news since")):
        change_page(trained, state="running", written=int(time.time()) - age, news=news)
        assert open_page(trained).locator("#state").inner_text().startswith(told), (age, news)


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_as_many_as_a_million_steps(run: Callable, open_page: Callable, data: Path, tmp_path: Path, count: int) -> None:
    """Rows are put together until at most 4096 are left; their means, least and largest are those of the log."""
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


# ----------------------------------------------------------------------------------------------------------------------
# when it is written


def until(reached: Callable[[], Any], seconds: float = 60) -> Any:
    """Waits for something, and returns what it is."""
    end = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.fixture
def long_run(data: Path, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A run that draws and saves nothing for a long time."""
    data = shutil.copy(data, tmp_path / "d.bin")
    words = flags(TINY, "--data_file", data, "--max_steps 100000000 --save_interval 100000000")
    process = subprocess.Popen(
        [binary_path("cpu"), *words], cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until(lambda: (tmp_path / "out/log.csv").exists() and len((tmp_path / "out/log.csv").read_text().splitlines()) > 5)
    yield process
    process.kill()
    process.wait()


@pytest.mark.long  # the page is written every ten seconds
def test_it_follows_a_run_that_draws_and_saves_nothing(long_run: subprocess.Popen, tmp_path: Path) -> None:
    first = until(lambda: (run := shown_run(tmp_path / "out"))["step"] and run, 25)
    assert first["state"] == "running" and len(first["rows"]) > 5 and first["rows"][-1][1] == first["step"]
    assert 10 <= first["interval"] <= first["news"] < 100 and first["started"] <= first["written"] - 9
    then = until(lambda: (run := shown_run(tmp_path / "out"))["step"] > first["step"] and run, 25)
    assert then["written"] - first["written"] >= 9 and then["seconds"] - first["seconds"] == pytest.approx(then["written"] - first["written"], abs=2)


@pytest.mark.long  # the page is written every ten seconds
def test_an_open_page_follows_a_run_to_its_end(long_run: subprocess.Popen, open_page: Callable, tmp_path: Path) -> None:
    """It reads itself again as often as the file says, without anybody's help; and then no more."""
    step = shown_run(tmp_path / "out")["step"]
    page = open_page(tmp_path / "out", query="")
    patience = 200_000  # ms: beside others the page is written less often than every ten seconds, for it may take a thousandth of the time
    told = "$('state').textContent === 'training' && $('figures').textContent.includes(run.step + ' of 100000000')"
    page.wait_for_function(f"run.step > {step} && {told}", timeout=patience)  # at once, for the page may read itself again at any moment
    long_run.send_signal(signal.SIGTERM)
    page.wait_for_function("run.state === 'stopped'", timeout=patience)
    assert page.locator("#state").inner_text() == "stopped" and "stopped by SIGTERM" in page.locator("#why").inner_text()
    page.evaluate("window.unread = true")
    time.sleep(12)
    assert page.evaluate("window.unread")


def test_it_says_why_a_run_was_stopped(long_run: subprocess.Popen, tmp_path: Path) -> None:
    long_run.send_signal(signal.SIGTERM)
    long_run.wait()
    run = shown_run(tmp_path / "out")
    assert run["state"] == "stopped" and run["why"].startswith(f"stopped by SIGTERM after step {run['step']}; saved is step")
    assert run["rows"][-1][1] == run["step"] == len(read_log(tmp_path / "out")) and run["checkpoints"] == [run["step"]]


def test_the_page_shows_what_is_there(run: Callable, data: Path, tmp_path: Path) -> None:
    """No checkpoint that the end of the run has removed, and no grid of a step that the run has given up."""
    run(flags(TINY, "--max_steps 7 --save_interval 2 --sample_interval 3 --num_samples 1 --timestep_respacing 2 --data_file", data))
    of_page = shown_run(tmp_path / "out")
    assert of_page["checkpoints"] == [4, 6, 7] and of_page["grids"] == [3, 6, 7] and of_page["state"] == "done" and of_page["step"] == 7
    for step in 6, 7:
        (tmp_path / "out" / model_name(step)).unlink()
    run(flags("--resume_checkpoint latest --sample_interval 5 --num_samples 1 --timestep_respacing 2 --max_steps 5"))
    assert shown_run(tmp_path / "out")["grids"] == [3, 5]


def test_it_says_that_data_can_not_be_read(long_run: subprocess.Popen, open_page: Callable, tmp_path: Path) -> None:
    os.truncate(tmp_path / "d.bin", 1500)
    error = long_run.communicate()[1]
    run = shown_run(tmp_path / "out")
    assert run["state"] == "failed" and "d.bin" in run["why"] and error == f"train_unet: {run['why']}\n"
    page = open_page(tmp_path / "out")
    assert page.locator("#state").inner_text() == "ended by an error" and page.locator("#why").inner_text() == run["why"]


def test_it_says_that_a_run_diverged(run: Callable, data: Path, tmp_path: Path) -> None:
    given = flags(TINY, "--data_file", data, "--lr 100 --weight_decay 10 --grad_clip 0 --save_interval 1000 --max_steps 1000 --max_bad_steps 3")
    error = run(given, code=1).err
    shown = shown_run(tmp_path / "out")
    assert shown["state"] == "failed" and "steps in a row had to be skipped" in shown["why"] and error == f"train_unet: {shown['why']}\n"
    assert sum(row[2] for row in shown["rows"]) == 3 and len(shown["rows"]) == len(read_log(tmp_path / "out"))


def test_it_says_that_the_disk_is_full(data: Path, tmp_path: Path) -> None:
    words = flags(TINY, "--data_file", data, "--max_steps 5 --save_interval 2")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, resource.RLIM_INFINITY))  # noqa: E731
    p = subprocess.run([binary_path("cpu"), *words], cwd=tmp_path, env=environment(), capture_output=True, text=True, preexec_fn=limit)
    shown = shown_run(tmp_path / "out")
    assert p.returncode == 1 and shown["state"] == "failed" and model_name(2) in shown["why"] and p.stderr == f"train_unet: {shown['why']}\n"
    assert not list((tmp_path / "out").glob("*.tmp*"))


@pytest.mark.long  # a rank is lost after five seconds
@pytest.mark.skipif(not (shutil.which("mpicxx") and shutil.which("mpirun")), reason="there is no MPI")
def test_it_says_that_a_rank_was_lost(data: Path, tmp_path: Path) -> None:
    subprocess.run(["make", "train_unet_mpi"], cwd=ROOT, check=True, capture_output=True)
    words = flags(TINY, "--data_file", data, "--max_steps 100000000 --save_interval 100000000 --rank_timeout 5")
    mpirun = ["mpirun", "-q", "--oversubscribe", "--allow-run-as-root", "-n", "2", str(ROOT / "train_unet_mpi")]
    p = subprocess.Popen([*mpirun, *map(str, words)], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (tmp_path / "out/log.csv").exists() and len((tmp_path / "out/log.csv").read_text().splitlines()) > 5)
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(p.pid)], capture_output=True, text=True).stdout.split()
        rank_1 = next(child for child in children if b"OMPI_COMM_WORLD_RANK=1" in Path(f"/proc/{child}/environ").read_bytes())
        os.kill(int(rank_1), signal.SIGSTOP)
        until(lambda: p.poll() is not None)
    finally:
        p.kill()
    shown = shown_run(tmp_path / "out")
    assert shown["state"] == "failed" and shown["why"].startswith("rank 1 ") and "silent for 5 s" in shown["why"]


# ----------------------------------------------------------------------------------------------------------------------
# time


def seconds_of(folder: Path) -> np.ndarray:
    """That column of log.csv; NaN where it is empty."""
    with open(folder / "log.csv") as f:
        return np.array([float(row["seconds"] or "nan") for row in csv.DictReader(f)])


@pytest.mark.long
def test_seconds_add_up_over_resumes(run: Callable, open_page: Callable, data: Path, tmp_path: Path) -> None:
    """Rows of logs that lack them, as older programs wrote, count with their ms."""
    run(flags(TINY, "--data_file", data, "--max_steps 4 --save_interval 4"))
    log = tmp_path / "out/log.csv"
    header, *rows = log.read_text().splitlines()
    old = [f"{step},{','.join(row.split(',')[1:4])},{1000 * step},,,,," for step, row in enumerate(rows, 1)]
    log.write_text("\n".join([header.removesuffix(",seconds,copies"), *old]) + "\n")
    run(["--resume_checkpoint", "latest", "--max_steps", 6])
    table = log.read_text().splitlines()
    assert table[0] == header and table[1:5] == [row + ",," for row in old]
    ours = seconds_of(tmp_path / "out")
    assert np.isnan(ours[:4]).all() and 10 < ours[4] < ours[5] < 20
    shown = shown_run(tmp_path / "out")
    assert [row[-2] for row in shown["rows"]] == pytest.approx([1, 3, 6, 10, *ours[4:]], abs=1e-3) and shown["resumed"] == 4
    run(["--resume_checkpoint", "latest", "--max_steps", 8])
    more = seconds_of(tmp_path / "out")
    assert (more[4:6] == ours[4:]).all() and ours[5] < more[6] < more[7] < 60
    run(["--resume_checkpoint", "latest", "--max_steps", 9])
    assert seconds_of(tmp_path / "out")[8] > more[7]
    # the axis by time ends with the last row's seconds
    page = open_page(tmp_path / "out")
    assert "resumed at step 8" in page.locator("#figures").inner_text() and "resumes added up" in page.locator("#figures").inner_text()
    page.locator("#axis").click()
    assert page.evaluate("view()") == [0, pytest.approx(seconds_of(tmp_path / "out")[8], rel=1e-4)]
    page.wait_for_function("$('axis').textContent === 'by time' && !keeping")
    page.reload()
    assert page.evaluate("choice.axis") == "time"


# ----------------------------------------------------------------------------------------------------------------------
# what one takes from it


def test_its_command_can_be_pasted(run: Callable, open_page: Callable, data: Path, tmp_path: Path) -> None:
    """Into a shell, whatever the flags hold; and no flag ends the page's script."""
    for name in ('it\'s $HOME `id` "q" \\ !x; rm *.bin', "</script><script>alert(1)</script><!--", "two\nlines\tand\x1b[31m", "-", "ü ~ #"):
        file, folder = name + ".bin", "o" + name
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(data, tmp_path / file)
        given = flags(TINY, "--data_file", data, "--max_steps 1 --lr 0.001234567", ["--classes", "", "--output_dir", folder, "--val_data_file", file])
        run(given)
        page = open_page(tmp_path / folder)
        assert page.locator("#name").text_content() == folder
        command = page.evaluate("command(run)")
        assert command in page.locator("#about").text_content()
        words = subprocess.run(["bash", "-c", command.replace("./train_unet", r"printf '%s\0'", 1)], capture_output=True, text=True).stdout.split(
            "\0"
        )[:-1]
        assert words[0::2] == sorted(given[0::2], key=words[0::2].index) and dict(zip(words[::2], words[1::2])) == dict(zip(given[::2], given[1::2]))


def test_its_links(run: Callable, open_page: Callable, data: Path, trained: Path) -> None:
    """To the log, the checkpoints, and the best of them, if the run keeps that."""

    def linked() -> list[str]:
        return open_page(trained).evaluate("[...document.querySelectorAll('#links a')].map((a) => a.href)")

    names = ["log.csv", model_name(10), model_name(12)]
    assert linked() == [(trained / name).as_uri() for name in names]
    run(flags("--resume_checkpoint", trained / model_name(12), "--max_steps 14 --keep_best True --val_data_file", data, "--output_dir", NAME))
    assert (trained / "best.bin").exists()
    assert linked() == [(trained / name).as_uri() for name in [*names, model_name(14), "best.bin"]]


# ----------------------------------------------------------------------------------------------------------------------
# several runs


def test_compare_runs(run: Callable, refused: Callable, open_page: Callable, data: Path, tmp_path: Path) -> None:
    """Curves with a legend, final figures, the flags in which they differ, and the grids of both, from another folder, too."""
    for name, lr in ("a", 1e-3), ("b's", 2e-3):
        run(flags(TINY, "--data_file", data, "--max_steps 6 --sample_interval 3 --output_dir", f"runs/{name}", "--lr", lr))
    refused(["--compare_runs", "runs/a,runs/none"], "runs/none", "holds no run")
    refused(["--compare_runs", "runs/a"], "folders with commas")
    refused(["--compare_runs", "runs/a,runs/b's", "--output", "x.png"], ".html")
    refused(["--compare_runs", "runs/a,runs/b's", "--lr", "1"], "--lr")
    for replaced in "runs/a/index.html", "runs/../runs/b's/index.html":
        refused(["--compare_runs", "runs/a,runs/b's", "--output", replaced], f"--output {replaced}: is a name for files of the run in that folder")
    (tmp_path / "pages").mkdir()
    for name in "a", "b":  # a page that is read, in a folder that has nothing of the run but this page
        (tmp_path / "web" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "runs" / ("a" if name == "a" else "b's") / "index.html", tmp_path / "web" / name)
    refused(["--compare_runs", "web/a,web/b", "--output", "web/b/index.html"], "--output web/b/index.html")
    run(["--compare_runs", "runs/a,runs/b's", "--output", "pages/index.html"])
    page = open_page(tmp_path / "pages", viewport={"width": 1200, "height": 900})
    until_drawn(page)
    table = page.locator("#compared").inner_text()
    assert re.search(r"--lr\s+0.001\s+0.002", table) and "--batch_size" not in table and "--seed" not in table
    assert table.count("6 of 6") == 2 and table.count("done") == 2
    assert page.locator("#run_keys .key").all_inner_texts() == ["runs/a", "runs/b's"]
    page.wait_for_function("runs.every((r) => r.image.complete && r.image.naturalWidth > 0)")
    assert np.allclose(page.evaluate("charts[1].curves[1].values"), column(tmp_path / "runs/b's", "lr"), rtol=1e-5)
    page.locator("#run_keys .key").first.click()
    page.wait_for_function("charts[1].curves.length === 1")
    phone = open_page(tmp_path / "pages", viewport={"width": 360, "height": 700}, is_mobile=True, has_touch=True)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 360
