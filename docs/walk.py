# %% [markdown]
# # A walk through a diffusion model
#
# Ten cells and a few minutes, on any computer: you train a small model that draws clothes, and look at what it does. You need no GPU, but
# the program (`make train_unet`), the data (`make data`) and `pip install torch numpy matplotlib tqdm`. Run the cells from top to bottom, in
# Jupyter or in VS Code. (`docs/walk.ipynb` is made from `docs/walk.py`, which holds the same cells.)

# %%
import os
import subprocess
import sys
from pathlib import Path

if not Path("train_unet.py").exists():  # a notebook begins in its own folder, docs/
    os.chdir("..")
sys.path.insert(0, os.getcwd())

import matplotlib.pyplot as plt
import numpy as np
import torch

import train_unet
from common.samples import grid_pixels
from train_unet import load, sample

PROGRAM, FOLDER, STEPS = "./train_unet", "out_walk", 150


def show(images: torch.Tensor, title: str) -> None:
    """A grid of images (N, C, H, W) in [-1, 1]."""
    plt.figure(figsize=(5, 5))
    plt.imshow(grid_pixels(images).squeeze(), cmap="gray")
    plt.title(title)
    plt.axis("off")
    plt.show()


# %% [markdown]
# ## What the model learns from
#
# 10,000 photographs of clothes, 32 pixels high and wide, in ten classes. A model sees numbers: each pixel is one from -1 (black) to 1 (white).

# %%
data = train_unet.open_data("data/fashion32.bin")
KINDS = ["T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
photographs = torch.from_numpy(data.read_floats(np.arange(16)))
print(f"{len(data.images)} images, of shape {tuple(photographs.shape[1:])}; the first is of the class {KINDS[data.labels[0]]}")
show(photographs, "photographs")

# %% [markdown]
# ## Training
#
# In every step the program takes 64 photographs, adds noise to them, some to one and a lot to another, and asks the network what they were like
# without it. Then it moves the network's 1.2 million weights a little, so that the answers become better. 150 steps take about a minute on two
# cores. (The full run of 400 steps draws better pictures.) Checkpoints go into the folder, one every 50 steps.

# %%
if not Path(FOLDER).exists():
    flags = f"--preset quick32 --max_steps {STEPS} --save_interval {STEPS // 3} --sample_interval 0 --output_dir {FOLDER}"
    subprocess.run([PROGRAM, *flags.split()], check=True)
checkpoints = sorted(Path(FOLDER).glob("model_*.bin"))
print(*checkpoints)

# %% [markdown]
# ## Did it learn?
#
# `log.csv` has a row for each step. The loss is the squared distance between the network's answers and the photographs. It also depends on
# luck, because each step draws its own noise. So look at where it goes, not at single steps. The columns `loss_q0` to `loss_q3` tell it
# apart by the amount of noise, from little to much. Much noise counts less, since any answer can only be a guess there.

# %%
log = np.genfromtxt(f"{FOLDER}/log.csv", delimiter=",", names=True)
for name, told in ("loss", "all"), ("loss_q0", "little noise"), ("loss_q3", "much noise"):
    plt.semilogy(log["step"], log[name], label=told)
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()
plt.show()

# %% [markdown]
# ## Drawing
#
# `load` gives you a `torch.nn.Module`, `sample` what `./train_unet --sample 16 --init model.bin` would draw: a tensor. It begins with noise alone
# and takes a little of it away in each of 50 steps (here 20, which is faster). The same seed gives the same pictures.

# %%
model = load(checkpoints[-1], device="cpu")
print(f"{sum(p.numel() for p in model.parameters()):,} weights; images of {model.config.image_size}, {model.config.num_classes} classes")
images = sample(model, 16, steps=20, seed=1)
show(images, "drawn from noise, all classes in turns")

# %% [markdown]
# ## Asking for something
#
# The model was told the class of each photograph. So you can ask for one. Guidance exaggerates the difference between what it
# would draw for this class and what it would draw for none: with more of it the pictures are clearer, and more alike.

# %%
for guidance_scale in 1, 4:
    boots = sample(model, 9, classes=9, guidance_scale=guidance_scale, steps=20)
    show(boots, f"ankle boots, guidance_scale={guidance_scale}")

# %% [markdown]
# ## What noise does to a picture
#
# The model knows 1000 levels of noise, t = 0 to 999. `Diffusion` has their numbers: a noisy picture is `signal * x0 + sigma * noise`. Below each
# is what the network makes of it. (A network may answer with the picture, the noise or a mixture; `x0_x` and `x0_out` turn that into a picture.)
# It is asked once. Where there is much noise its best answer is the blurred mean of all pictures that could have been there. That is why
# drawing takes many steps.

# %%
diffusion = train_unet.Diffusion(model.config)
t = torch.tensor([0, 200, 400, 600, 800, 999])
level = diffusion.level(t).float32()
x0 = photographs[:1].expand(len(t), -1, -1, -1)
noisy = level.signal * x0 + level.sigma * torch.randn(x0[:1].shape)
with torch.no_grad():
    output = model(noisy, level.t.flatten(), torch.full((len(t),), int(data.labels[0])))
answer = level.x0_x * noisy + level.x0_out * output
rows = torch.cat([torch.cat([*pictures.clamp(-1, 1)], dim=2) for pictures in (noisy, answer)], dim=1)
plt.figure(figsize=(9, 3))
plt.imshow(rows[0].numpy(), cmap="gray")
plt.xticks([32 * i + 16 for i in range(len(t))], [f"t = {i}" for i in t.tolist()])
plt.yticks([16, 48], ["noisy", "answer"])
plt.show()

# %% [markdown]
# ## Changing a picture
#
# Drawing need not begin with noise alone. Here a photograph gets so much noise that only its rough shape is left, and the model draws on from
# there. `strength` says how much: 0.3 changes details, 0.8 leaves little. `image` takes tensors and files, a `.png` of your own, too.

# %%
for strength in 0.3, 0.5, 0.8:
    changed = sample(model, 4, image=photographs[:1], classes=int(data.labels[0]), strength=strength, steps=20)
    show(torch.cat([photographs[:1], changed]), f"a photograph, and four changes with strength={strength}")

# %% [markdown]
# ## A look inside
#
# The network is a U: blocks that halve the picture, and blocks that double it again, which also see what the first half saw (so they get 128
# channels). A forward hook shows each block's input and output, as in any PyTorch model. This network sees each square of 2x2 pixels as one
# position (`--patch_size 2`), so the first layer has 4 channels of 16x16. The grid shows what 16 of its 64 filters make of the boot.

# %%
outputs = []


def look(block: torch.nn.Module, given: tuple, output: torch.Tensor) -> None:
    print(f"{tuple(given[0].shape)} -> {tuple(output.shape)}")
    outputs.append(output)


hooks = [block.register_forward_hook(look) for block in [*model.input_blocks, model.middle_block, *model.output_blocks]]
with torch.no_grad():
    model(noisy[:1], level.t.flatten()[:1], torch.tensor([data.labels[0]]))
for hook in hooks:
    hook.remove()
channels = outputs[0][0, :16, None]  # (16, 1, 16, 16)
show(channels / channels.abs().max(), "the first layer's first 16 channels")

# %% [markdown]
# ## The same step once more, in PyTorch
#
# `train_unet.py` is the program's twin. Every random number is a function of the seed, the step and the image. So the twin draws the very numbers
# that the program drew, and can do any single step of a run again. Here it takes the checkpoint of two thirds of the run, and does the
# step that follows. Compare its loss with the program's row of that step: they agree in six digits or more. `training_batch` gives you the
# batch. If you write a network of your own, train it on the same batches and compare loss by loss.

# %%
checkpoint = train_unet.read_model(str(checkpoints[-2]))
trainer = train_unet.Trainer(checkpoint.config, "cpu", checkpoint)
step = checkpoint.state.step
batch = train_unet.training_batch(checkpoint.config, data, step)
result = trainer.train_step(*batch)
row = log[step]
print(f"step {result.step}: loss {result.loss:.9f} and gradient norm {result.grad_norm:.6f} in PyTorch")
print(f"step {int(row['step'])}: loss {row['loss']:.9f} and gradient norm {row['grad_norm']:.6f} in the program")

# %% [markdown]
# ## What next
#
# - Draw better clothes: `./train_unet`, the full run, with a live page in `out/index.html` (three minutes on two cores).
# - Your own pictures: `./train_unet --data_dir my_pictures`; a folder for each class, if there are classes. `docs/GUIDE.md` tells all.
# - How it works: `docs/DIFFUSION.md` has the formulas, `docs/READING.md` says in which order to read the code. `train_unet.py` is a good start.
# - Change something: a sampler is four lines of `train_unet.py`, the loss is one function, `Diffusion.losses`.
