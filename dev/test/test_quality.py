"""dev/benchmarks/quality.py: the figures on sets whose figures are known, the split, and what it refuses."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, binary_path, data_bytes, make_images

import generate
import train_unet as twin
from common import judge as judges
from common import model_files
from common.config import make_config
from common.samples import save_png

sys.path.insert(0, str(ROOT / "dev/benchmarks"))
import quality


@pytest.fixture(scope="session")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "fashion32.bin"
    path.write_bytes(gzip.decompress((ROOT / "data/fashion32.bin.gz").read_bytes()))
    return path


def with_moments(mean: list[float], covariance: list[list[float]], count: int, seed: int) -> torch.Tensor:
    """Points whose mean and (unbiased) covariance are exactly these."""
    x = torch.randn(count, len(mean), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = x - x.mean(0)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(torch.atleast_2d(x.T.cov()))).T
    return x @ torch.linalg.cholesky(torch.tensor(covariance, dtype=torch.float64)).T + torch.tensor(mean)


def test_frechet_of_gaussians() -> None:
    """By hand. In one dimension (m - m')^2 + (s - s')^2; covariances that commute: the same along each common axis; in general, Newton's
    iteration for the root of S S' instead of eigenvalues."""
    one = with_moments([1.0], [[4.0]], 100, 0), with_moments([-2.0], [[9.0]], 50, 1)
    assert judges.frechet(*one) == pytest.approx(9 + 1)
    # axes (1, 1) and (1, -1): variances 3 and 1 against 12 and 4, so (2 sqrt 3 - sqrt 3)^2 + (2 - 1)^2 = 4; means differ by (1, 2)
    two = with_moments([0.0, 0.0], [[2.0, 1.0], [1.0, 2.0]], 100, 2), with_moments([1.0, 2.0], [[8.0, 4.0], [4.0, 8.0]], 80, 3)
    assert judges.frechet(*two) == pytest.approx(4 + 5)
    random = np.random.default_rng(0)
    a, b = (torch.from_numpy(random.normal(size=(40, 5)) @ random.normal(size=(5, 5)) + random.normal(size=5)) for _ in range(2))
    product = a.T.cov() @ b.T.cov()
    root, inverse = product.clone(), torch.eye(5, dtype=torch.float64)
    for _ in range(60):  # Denman & Beavers 1976
        root, inverse = (root + torch.linalg.inv(inverse)) / 2, (inverse + torch.linalg.inv(root)) / 2
    expected = (a.mean(0) - b.mean(0)).square().sum() + a.T.cov().trace() + b.T.cov().trace() - 2 * root.trace()
    assert judges.frechet(a, b) == pytest.approx(expected.item(), rel=1e-9)
    assert judges.frechet(a, b) == pytest.approx(judges.frechet(b, a)) and abs(judges.frechet(a, a)) < 1e-9


def test_precision_and_recall_by_hand() -> None:
    """On a line, third neighbours. Real: 0 1 2 3 100 101 102 103, radii 3 2 2 3 each. Samples: 1.5 (covered), 50 (not), 105 (within 3 of 103?
    yes, 2), 107 (no), 5.9 (within 3 of 3: 2.9, yes)."""
    real = torch.tensor([[0.0], [1], [2], [3], [100], [101], [102], [103]])
    assert judges.radii(real).tolist() == [3, 2, 2, 3] * 2
    samples = torch.tensor([[1.5], [50], [105], [107], [5.9]])
    assert judges.covered(samples, real).tolist() == [1, 0, 1, 0, 1]
    # the samples' third neighbours: of 1.5 (4.4, 48.5, 103.5), of 50 (44.1, 48.5, 55), of 105 (2, 55, 99.1), of 107 (2, 57, 101.1), of 5.9 (4.4, 44.1, 99.1)
    assert judges.radii(samples).tolist() == pytest.approx([103.5, 55, 99.1, 101.1, 99.1], rel=1e-6)
    assert judges.covered(torch.tensor([[-98.0], [-103.0], [205.0], [208.5]]), samples).tolist() == [1, 0, 1, 0]


def test_precision_and_recall_tell_two_faults_apart() -> None:
    """Samples of half of the modes: precise, but without recall. Samples of all modes and as many of nonsense: the reverse."""
    draw = torch.Generator().manual_seed(0)
    centres = 20.0 * torch.eye(4)

    def blobs(modes: int, count: int) -> torch.Tensor:
        return centres[torch.arange(count) % modes] + torch.randn(count, 4, generator=draw)

    real = blobs(4, 1200)
    half, nonsense = blobs(2, 1200), torch.cat([blobs(4, 600), -50 + 10 * torch.randn(600, 4, generator=draw)])
    precise, wide = (judges.measure(x.double(), real.double()) for x in (half, nonsense))
    assert precise.values[1] > 0.9 and precise.values[2] == pytest.approx(0.5, abs=0.05)
    assert wide.values[1] == pytest.approx(0.5, abs=0.05) and wide.values[2] > 0.8


def test_the_bootstrap_is_the_spread_of_new_draws() -> None:
    """Of precision: a share of 400 points, so sqrt(p (1 - p) / 400). Of the Frechet distance: compared with forty new sets; the standard
    deviation of forty draws is itself known to 1 / sqrt(80) = 11 %, a bootstrap's about as well: within a factor of 1.5."""
    draw = torch.Generator().manual_seed(0)

    def sets() -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(400, 3, generator=draw, dtype=torch.float64) + shift for shift in (0.7, 0.0))

    found = judges.measure(*sets())
    p = found.values[1]
    assert found.spreads[1] == pytest.approx((p * (1 - p) / 400) ** 0.5, rel=0.2)
    anew = np.std([judges.frechet(*sets()) for _ in range(40)])
    assert anew / 1.5 < found.spreads[0] < anew * 1.5


def test_the_split(fashion: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """8,000 and 2,000 images, in order, with their labels; nothing in both, even by chance."""
    quality.run(["--split", str(tmp_path / "q"), "--data_file", str(fashion)])
    assert capsys.readouterr().out.split() == [f"{tmp_path}/q/train.bin", f"{tmp_path}/q/held_out.bin"]
    whole, train, held_out = (twin.open_data(str(p)) for p in (fashion, tmp_path / "q/train.bin", tmp_path / "q/held_out.bin"))
    assert np.array_equal(np.concatenate([train.images, held_out.images]), whole.images) and len(held_out.images) == 2000
    assert np.array_equal(np.concatenate([train.labels, held_out.labels]), whole.labels) and train.num_classes == 10
    assert not {x.tobytes() for x in train.images} & {x.tobytes() for x in held_out.images}


@pytest.fixture(scope="session")
def judged(fashion: Path) -> tuple[judges.Judge, float]:
    """Four epochs, for ten: fewer leave the figures to chance (and to the number of threads)."""
    return quality.judge_of(twin.open_data(str(fashion)), epochs=4)


@pytest.fixture(scope="session")
def judge(judged: tuple[judges.Judge, float]) -> judges.Judge:
    return judged[0]


@pytest.mark.long
def test_the_classifier(judged: tuple[judges.Judge, float], fashion: Path) -> None:
    """It has learnt, is the same every time, and leaves the caller's random numbers alone."""
    judge, accuracy = judged
    assert accuracy > 0.75 and judge.features(torch.randn(9, 1, 32, 32)).isfinite().all()
    images, labels = judges.to_floats(np.array(twin.open_data(str(fashion)).images[:640])), torch.arange(640) % 10
    state = torch.get_rng_state()
    a, b = (judges.train_classifier(images, labels, 1) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(p.numel() for p in a.parameters()) == 122_314


@pytest.mark.long
def test_worse_images_get_worse_figures(judge: judges.Judge, fashion: Path) -> None:
    """Training images, the same with more and more noise, shoes alone, noise alone."""
    data = twin.open_data(str(fashion))
    images = judges.to_floats(np.array(data.images[:1000]))
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(images.shape, generator=draw)
    clean, little, much, all_noise = (judge.figures((images + s * noise).clamp(-1, 1)) for s in (0, 0.1, 0.3, 100))
    distances = [f.values[0] for f in (clean, little, much, all_noise)]
    assert distances == sorted(distances) and distances[1] > 2 * distances[0]
    assert clean.values[1] > 0.8 and clean.values[2] > 0.7 and all_noise.values[1] < 0.1
    shoes = judge.figures(judges.to_floats(np.array(data.images[:8000])[np.array(data.labels[:8000]) == 7][:700]))
    assert shoes.values[1] > 0.7 and shoes.values[2] < 0.2


@pytest.mark.long
def test_runs_and_samples(judge: judges.Judge, fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """From the split to the table and the plot, with models of a few steps; and what has seen the held-out images is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_unet").symlink_to(binary_path("cpu"))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(quality, "judge_of", lambda data: (judge, 0.5))
    quality.run(["--split", "q", "--data_file", str(fashion)])
    words = (
        "--preset fashion32 --channel_mult 1 --attention_resolutions  --batch_size 2 --max_steps 2 --save_interval 1 --sample_interval 0 --compile 0"
    )
    for folder, seed in ("a", "0"), ("b", "1"):
        twin.run([*words.split(" "), "--data_file", "q/train.bin", "--output_dir", folder, "--seed", seed, "--device", "cpu"])
    capsys.readouterr()
    judged = ["--data_file", str(fashion), "--num_samples", "128", "--steps", "1"]
    quality.run(["--runs", "a", "b", *judged, "--plot", "p.png"])
    lines = capsys.readouterr().out.splitlines()
    names = [f"{folder}/model_000000{step}.bin" for folder in "ab" for step in (1, 2)]
    assert [line.split()[0] for line in lines[3:7]] == names
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

    # a file of the same samples is judged alike
    file = twin.read_model(names[0])
    config = make_config({"sampler": "ddim", "eta": 1.0, "timestep_respacing": "1", "batch_size": 128}, None, file)
    twin.save_samples(generate.BACKENDS["native"](file, config, 128), "x.bin")
    quality.run(["--samples", "x.bin", "--data_file", str(fashion)])
    assert capsys.readouterr().out.splitlines()[-1].split()[2:] == lines[3].split()[1:]

    twin.run([*words.split(" "), "--data_file", str(fashion), "--output_dir", "seen", "--device", "cpu"])
    with pytest.raises(twin.UserError, match="fashion32.bin"):
        quality.run(["--runs", "seen", *judged])


@pytest.fixture
def inception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random weights in the shape of Inception's."""
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    with monkeypatch.context() as patched:
        patched.setattr(fidelity, "load_state_dict_from_url", lambda *_, **__: {})
        patched.setattr(fidelity.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        network = fidelity.FeatureExtractorInceptionV3("any", ["64"])
    torch.save(network.state_dict(), tmp_path / "inception.pth")
    return tmp_path / "inception.pth"


@pytest.mark.long
def test_inception_sees_what_torch_fidelity_sees_in_pngs(
    inception: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples and data from their files, against its own reading of the same images as PNGs; of its first layer, since a test must end."""
    import torch_fidelity

    early = {f"feature_layer_{metric}": "64" for metric in ("fid", "kid", "prc")}
    whole = quality.inception_figures
    monkeypatch.setattr(quality, "inception_figures", lambda *words, **settings: whole(*words, **settings, **early))
    for channels in 1, 3:
        data = make_images(7, channels, 16, 16)
        samples = (make_images(6, channels, 16, 16, seed=1) / 127.5 - 1).astype(np.float32) * 1.1  # some reach beyond -1 and 1
        pixels = np.floor(np.clip((samples + 1) * 127.5, 0, 255) + 0.5).astype(np.uint8)
        (tmp_path / "data.bin").write_bytes(data_bytes(data))
        (tmp_path / "samples.bin").write_bytes(data_bytes(samples))
        for name, images in ("data", data), ("samples", pixels):
            (tmp_path / f"{name}{channels}").mkdir()
            for i, image in enumerate(images):
                save_png(image.transpose(1, 2, 0), str(tmp_path / f"{name}{channels}/{i:02d}.png"))
        quality.run(f"--features inception --weights {inception} --data_file {tmp_path}/data.bin --samples {tmp_path}/samples.bin".split())
        _, row = capsys.readouterr().out.splitlines()
        found = [float(word) for word in row.split()[2:] if word != "+-"]
        wanted = torch_fidelity.calculate_metrics(
            input1=f"{tmp_path}/samples{channels}", input2=f"{tmp_path}/data{channels}", fid=True, kid=True, prc=True, kid_subset_size=6, cuda=False, save_cpu_ram=True,
            feature_extractor="inception-v3-compat", feature_extractor_weights_path=str(inception), cache=False, verbose=False, **early
        )  # fmt: skip
        kid = [1000 * wanted[f"kernel_inception_distance_{name}"] for name in ("mean", "std")]
        assert found == pytest.approx([wanted["frechet_inception_distance"], *kid, wanted["precision"], wanted["recall"]], abs=6e-4)
    # the same of a checkpoint's, drawn by the program
    config = make_config({"preset": "fashion32", "image_size": (16, 16), "in_channels": 3, "channel_mult": (1,), "attention_resolutions": ()})
    (tmp_path / "run").mkdir()
    weights = model_files.ModelFile(config, twin.initial_weights(config))
    model_files.write_model(str(tmp_path / "run/model_0000001.bin"), weights)
    monkeypatch.setitem(generate.BACKENDS, "native", lambda file, config, count: torch.from_numpy(samples[:count]))
    quality.run(f"--features inception --weights {inception} --data_file {tmp_path}/data.bin --runs {tmp_path}/run --num_samples 6".split())
    drawn = capsys.readouterr().out.splitlines()[1]
    assert drawn.split()[2:] == row.split()[2:]


def test_what_inception_refuses(inception: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.bin").write_bytes(data_bytes(make_images(3)))
    (tmp_path / "some.bin").write_bytes(data_bytes(make_images(9)))
    (tmp_path / "latents.bin").write_bytes(data_bytes(make_images(9, 4)))
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("no weights")
    weights = ["--weights", str(inception)]
    for words, named in (
        ([], "--weights"),
        (["--weights", "other.pth"], "other.pth"),
        (["--weights", "text.pth"], "text.pth"),
        (["--samples", "few.bin", *weights], ""),
        (["--samples", "latents.bin", *weights], "latents.bin"),
        (["--samples", "no.bin", *weights], "no.bin"),
        ([*weights, "--plot", "p.png"], "--plot"),
    ):
        with pytest.raises(twin.UserError) as e:
            quality.run(["--features", "inception", "--data_file", "some.bin", *([] if "--samples" in words else ["--samples", "some.bin"]), *words])
        assert named in str(e.value) and "\n" not in str(e.value), str(e.value)


def test_what_is_refused(fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.bin").write_bytes(data_bytes(make_images(200, 1, 32, 32)))
    (tmp_path / "few.bin").write_bytes(data_bytes(make_images(20, 1, 32, 32)))
    (tmp_path / "nan.bin").write_bytes(data_bytes(np.full((200, 1, 32, 32), np.nan, np.float32)))
    (tmp_path / "empty").mkdir()
    whole = ["--data_file", str(fashion)]
    for words, named in (
        ([], "--samples"),
        (["--samples"], "--samples"),
        (["--split", "q", "--data_file", "small.bin"], "small.bin"),
        (["--split", "q", "--data_file", "no.bin"], "no.bin"),
        (["--runs", "empty", *whole], "empty"),
        (["--samples", "few.bin", *whole], "few.bin"),
        (["--samples", "small.bin", *whole, "--num_samples", "9"], "--num_samples"),
        (["--runs", "empty", *whole, "--backend", "abacus"], "--backend"),
        (["--samples", "small.bin", *whole, "--plot", "p.png"], "--plot"),
        (["--samples", "nan.bin", *whole], "nan.bin"),
    ):
        with pytest.raises(twin.UserError) as e:
            quality.run(words)
        assert named in str(e.value) and "\n" not in str(e.value), str(e.value)
    assert not (tmp_path / "q").exists()
