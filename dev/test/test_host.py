"""unet/host/: what any program needs. Its headers stand on their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image

# What ranks.h asks of the program that includes it.
DEVICES = """
static const char* ranks_need() { return nullptr; }
static std::string device_trouble() { return ""; }
static void leave_devices() {}
"""


def compiled(folder: Path, source: str) -> Path:
    """The program, without a word from the compiler but for functions that it does not use."""
    (folder / "own.cpp").write_text(source)
    words = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", f"-I{ROOT}", "own.cpp", "-o", "own", "-pthread"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return folder / "own"


@pytest.mark.long
def test_another_program_can_use_files_and_png(tmp_path: Path) -> None:
    own = compiled(
        tmp_path,
        """#include "unet/host/png.h"
        int main() {
            std::vector<float> images(3 * 4 * 4, 1.0f);
            for (int i = 0; i < 16; i++) images[16 + i] = -1 + i / 7.5f; // the second one of three
            must(try_write_file(open_folder("."), "grid.png", grid_png(images, 3, 4, 4, 1)).empty(), "grid.png", "can't be written");
            die("%s: is enough", "it");
        }""",
    )
    done = subprocess.run([own], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "train_unet: it: is enough\n")
    with Image.open(tmp_path / "grid.png") as image:
        assert image.size == (2 + 2 * 66, 2 + 2 * 66)  # 2 x 2 cells of 64 pixels, white lines of 2 between them
        corners = [image.getpixel((68 + 16 * (i % 4) + 8, 2 + 16 * (i // 4) + 8)) for i in range(16)]
    assert corners == [17 * i for i in range(16)]  # from -1 to 1, as 0 to 255


@pytest.mark.long
def test_another_program_can_use_ranks(tmp_path: Path) -> None:
    own = compiled(
        tmp_path,
        f"""#include "unet/host/ranks.h"
        {DEVICES}
        int main(int, char** argv) {{
            if (argv[1]) start_ranks(2, (argv[1] = nullptr, argv));
            find_ranks();
            const int sum = gather_host("the sum", world.rank + 1)[0] + any_rank("the largest", world.rank + 1);
            printf("rank %d of %d: %d\\n", world.rank, world.size, sum);
        }}""",
    )
    done = subprocess.run([own, "two"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 of 2: 3\n", "")
