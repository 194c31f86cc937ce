"""The network: guided-diffusion's UNetModel (Dhariwal & Nichol 2021), with its module names, hence its state_dict."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.flags import Config
from common.random_numbers import DROPOUT, INIT, random_words, to_normals


class GroupNorm32(nn.GroupNorm):
    """Statistics in float32 even where activations are bf16."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype == torch.bfloat16 else x
        # not F.group_norm, which refuses one image of 1x1 with a channel a group: its output is then the bias
        return torch.group_norm(wide, self.num_groups, self.weight, self.bias, self.eps).to(x.dtype)


class PhiloxDropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, sample, layer). draw: see UNetModel.dropout_draw."""

    layer = 0  # which of the model's it is

    def __init__(self, p: float):
        super().__init__()
        self.threshold = int(float(np.float32(p)) * 2**32)
        self.scale = float(np.float32(1) / (np.float32(1) - np.float32(p)))

    def forward(self, x: Tensor, draw: Tensor) -> Tensor:
        if not self.training or self.threshold == 0:
            return x
        B, C, H, W = x.shape
        seed, step, first_sample = draw.unbind()
        words = random_words(seed, DROPOUT | self.layer << 8, step, first_sample + torch.arange(B, device=x.device), H * W * C)
        keep = (words >= self.threshold).view(B, H, W, C).permute(0, 3, 1, 2)
        return torch.where(keep, x * self.scale, 0)


class ResBlock(nn.Module):
    """x (B, C, H, W), emb (B, 4 * num_channels) -> (B, out, H, W), or half or twice H and W."""

    def __init__(self, config: Config, channels: int, out: int, up: bool = False, down: bool = False):
        super().__init__()
        self.use_scale_shift_norm = config.use_scale_shift_norm
        self.in_layers = nn.Sequential(GroupNorm32(32, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.resample = nn.Upsample(scale_factor=2) if up else nn.AvgPool2d(2) if down else nn.Identity()
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(4 * config.num_channels, 2 * out if config.use_scale_shift_norm else out))
        self.out_layers = nn.Sequential(GroupNorm32(32, out), nn.SiLU(), PhiloxDropout(config.dropout), nn.Conv2d(out, out, 3, padding=1))
        self.skip_connection = nn.Identity() if out == channels else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, emb: Tensor, draw: Tensor) -> Tensor:
        norm, silu, conv = self.in_layers
        h = conv(self.resample(silu(norm(x))))
        emb = self.emb_layers(emb).to(h.dtype)[:, :, None, None]
        norm, silu, dropout, conv = self.out_layers
        if self.use_scale_shift_norm:
            scale, shift = emb.chunk(2, dim=1)
            h = norm(h) * (1 + scale) + shift
        else:
            h = norm(self.add_embedding(h, emb))
        return self.skip_connection(self.resample(x)) + conv(dropout(silu(h), draw))

    def add_embedding(self, h: Tensor, emb: Tensor) -> Tensor:
        """h (B, out, H, W), what the first convolution has written, plus emb (B, out, 1, 1)."""
        conv = self.in_layers[-1]
        if self.training and isinstance(conv, Fp8TrainedConv) and conv.rounds_forward:
            return Fp8Addition.apply(h, emb, conv.gradient_factor)
        return h + emb


class AttentionBlock(nn.Module):
    """Self-attention over the H * W pixels of x (B, C, H, W)."""

    def __init__(self, config: Config, channels: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads if config.num_head_channels == -1 else channels // config.num_head_channels
        self.use_new_attention_order = config.use_new_attention_order
        self.norm = GroupNorm32(32, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        qkv = self.qkv(self.norm(x).reshape(B, C, H * W))
        if self.use_new_attention_order:  # rows: q, k, v, then heads
            q, k, v = qkv.view(B, 3, self.num_heads, -1, H * W).transpose(3, 4).unbind(1)
        else:  # rows: heads, then q, k, v
            q, k, v = qkv.view(B, self.num_heads, 3, -1, H * W).transpose(3, 4).unbind(2)
        if qkv.dtype == torch.bfloat16:  # flash attention, which fp32 does without, wants the channels of a pixel side by side
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        h = F.scaled_dot_product_attention(q, k, v)  # (B, heads, H * W, C / heads)
        return x + self.proj_out(h.transpose(2, 3).reshape(B, C, H * W)).view(B, C, H, W)


class EmbedSequential(nn.Sequential):
    """Layers in a row; residual blocks also see the embedding and the dropout draw."""

    def forward(self, x: Tensor, emb: Tensor, draw: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, emb, draw) if isinstance(layer, ResBlock) else layer(x)
        return x


class UNetModel(nn.Module):
    """x (B, in_channels, H, W), timesteps (B) [, y (B) class labels] [, values (B, up to num_values)] [, cond (B, cond_channels, H, W)]
    -> (B, out_channels, H, W)."""

    def __init__(self, config: Config):
        super().__init__()
        self.class_cond, self.use_checkpoint, self.bf16, self.patch = config.class_cond, config.use_checkpoint, False, config.patch
        width, levels = config.num_channels, len(config.channel_mult)
        learnt = config.conv_resample and not config.resblock_updown  # whether convolutions alone halve and double
        up_heads = config.num_heads if config.num_heads_upsample == -1 else config.num_heads_upsample
        self.time_embed = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        if config.class_cond:
            self.label_emb = nn.Embedding(config.num_classes + config.null_class, 4 * width)
        self.num_values = config.num_values
        if self.num_values:  # no bias: zeros add nothing
            self.cond_emb = nn.Linear(self.num_values, 4 * width, bias=False)

        def block(ch: int, level: int, heads: int) -> EmbedSequential:
            out = config.channels(level)
            attention = [AttentionBlock(config, out, heads)] if config.has_attention(level) else []
            return EmbedSequential(ResBlock(config, ch, out), *attention)

        ch = config.channels(0)
        self.input_blocks = nn.ModuleList([EmbedSequential(nn.Conv2d(config.seen_channels * self.patch**2, ch, 3, padding=1))])
        skips = [ch]
        for level in range(levels):
            for _ in range(config.num_res_blocks):
                self.input_blocks.append(block(ch, level, config.num_heads))
                ch = config.channels(level)
                skips.append(ch)
            if level < levels - 1:
                halve = nn.Conv2d(ch, ch, 3, stride=2, padding=1) if learnt else nn.AvgPool2d(2)
                down = ResBlock(config, ch, ch, down=True) if config.resblock_updown else nn.Sequential(OrderedDict(op=halve))
                self.input_blocks.append(EmbedSequential(down))
                skips.append(ch)
        self.middle_block = EmbedSequential(ResBlock(config, ch, ch), AttentionBlock(config, ch, config.num_heads), ResBlock(config, ch, ch))
        self.output_blocks = nn.ModuleList()
        for level in reversed(range(levels)):
            for _ in range(config.num_res_blocks + 1):
                self.output_blocks.append(block(ch + skips.pop(), level, up_heads))
                ch = config.channels(level)
            if level > 0:
                conv = nn.Conv2d(ch, ch, 3, padding=1) if learnt else nn.Identity()
                double = nn.Sequential(OrderedDict(up=nn.Upsample(scale_factor=2), conv=conv))
                self.output_blocks[-1].append(ResBlock(config, ch, ch, up=True) if config.resblock_updown else double)
        self.out = nn.Sequential(GroupNorm32(32, ch), nn.SiLU(), nn.Conv2d(ch, config.out_channels * self.patch**2, 3, padding=1))

        frequencies = np.exp(-math.log(config.max_period) * np.arange(width // 2) / (width // 2)).astype(np.float32)
        self.register_buffer("frequencies", torch.from_numpy(frequencies), persistent=False)
        # Which masks dropout draws: those of (seed, step, the batch's first sample in the step).
        self.register_buffer("dropout_draw", torch.zeros(3, dtype=torch.int64), persistent=False)
        for k, dropout in enumerate(module for module in self.modules() if isinstance(module, PhiloxDropout)):
            dropout.layer = k

    def timestep_embedding(self, t: Tensor) -> Tensor:
        angles = t[:, None].double() * self.frequencies.double()
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.time_embed[0].weight.dtype)

    def forward(self, x: Tensor, timesteps: Tensor, y: Tensor | None = None, values: Tensor | None = None, cond: Tensor | None = None) -> Tensor:
        def run(block: nn.Module, h: Tensor) -> Tensor:
            """With --use_checkpoint backward() computes it once more; dropout is a function of the draw, so no generator's state is kept."""
            if self.use_checkpoint and self.training:
                return checkpoint(block, h, emb, self.dropout_draw, use_reentrant=False, preserve_rng_state=False)
            return block(h, emb, self.dropout_draw)

        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            emb = self.time_embed(self.timestep_embedding(timesteps))
            if self.class_cond:
                emb = emb + self.label_emb(y)
            if values is not None:  # those of an augmentation may be left out: there is none
                emb = emb + self.cond_emb(F.pad(values, (0, self.num_values - values.shape[1])))
            seen = x if cond is None else torch.cat([x, cond], dim=1)
            h, skips = F.pixel_unshuffle(seen, self.patch) if self.patch > 1 else seen, []
            for block in self.input_blocks:
                h = run(block, h)
                skips.append(h)
            h = run(self.middle_block, h)
            for block in self.output_blocks:
                h = run(block, torch.cat([h, skips.pop()], dim=1))
            out = F.pixel_shuffle(self.out(h), self.patch) if self.patch > 1 else self.out(h)
            return out.to(x.dtype)


# ======================================================================================================================
# --precision fp8: some convolutions multiply numbers of 8 bits. Here such numbers stand in float32 or bf16, which hold them exactly.

FP8_MAX = 448.0  # of e4m3
FP8_SPARED = 4  # of how many 3x3 convolutions at each end of the network the operands of forward products and weight gradients stay as they are

# Training multiplies by these factors before it rounds. (Samples have factors of their own: fp8_factor and fp8_weight.)
FP8_X_FACTOR = 16.0  # what a norm has written: up to 28 fits in e4m3
FP8_WEIGHT_FACTOR = 128.0  # weights: up to 3.5 fits


def to_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Rounded to the nearest number of this type (gradients: of e5m2); what is larger than its largest number becomes that."""
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype).to(x.dtype)


def fp8_layers(model: UNetModel) -> list[nn.Sequential]:
    """Layers from a norm to a 3x3 convolution whose forward product is in FP8, and in training its weight gradient: those of train_unet.cu's
    choose_fp8 with `fp8`, in its order."""
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    chosen, found = set(convs[FP8_SPARED : len(convs) - FP8_SPARED]), []
    for block in [m for m in model.modules() if isinstance(m, ResBlock)]:
        if isinstance(block.resample, nn.Identity):  # else no norm writes what the first convolution reads
            found.append(block.in_layers)
        found.append(block.out_layers)
    return [layers for layers in found if layers[-1] in chosen]


def fp8_gradient_layers(model: UNetModel) -> list[nn.Sequential]:
    """Layers that end in a 3x3 convolution whose input gradient is in FP8: those of choose_fp8 with `fp8_gradient`. fp8_layers' are among them."""
    found = []
    for block in [m for m in model.modules() if isinstance(m, ResBlock)]:
        if not isinstance(block.resample, nn.Upsample):  # else the first convolution is a part of the upsampling
            found.append(block.in_layers)
        found.append(block.out_layers)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# samples


def fp8_factor(norm: GroupNorm32) -> float:
    """By what the norm's output is multiplied before it is rounded: 32 times its size must fit (fp8_factor in train_unet.cu says why)."""
    size = float((norm.weight.detach().abs() + norm.bias.detach().abs()).max())
    return 2.0 ** (math.frexp(FP8_MAX / 32 / size)[1] - 1) if size else 1.0


def fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (Cout, ...) in FP8, and what each output channel's were divided by (Cout)."""
    largest = weight.abs().amax(dim=tuple(range(1, weight.dim())))
    scale = torch.where(largest > 0, largest / FP8_MAX, 1)
    return to_fp8(weight / scale.view(-1, *[1] * (weight.dim() - 1))), scale


class Fp8Conv(nn.Module):
    """A 3x3 convolution that multiplies in FP8 what a norm has written."""

    def __init__(self, norm: GroupNorm32, conv: nn.Conv2d):
        super().__init__()
        self.factor = fp8_factor(norm)
        weight, scale = fp8_weight(conv.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", (scale / self.factor)[:, None, None])
        self.register_buffer("bias", conv.bias.detach()[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        return (F.conv2d(to_fp8(x * self.factor), self.weight, padding=1) * self.scale + self.bias).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# training. All factors are powers of two: a number that was multiplied by one, rounded and divided by it again is the number of FP8 in its own scale.


def usual_gradient(config: Config) -> float:
    """How large gradients of the network's output may usually become, in units of 1 / n for n numbers of a batch (usual_gradient in train_unet.cu says why)."""
    if config.objective != "ect":
        bound = config.vlb_weight if config.learned_variance else 0
        return max(1.0, (1 if config.use_kl else bound) * config.diffusion_steps / math.log(2))
    length = math.sqrt(config.in_channels * math.prod(config.image_size))
    last_a = 1 + config.last_ect_stage
    return length * (config.ect_q**last_a if config.ect_weight == "gap" else 1 / math.exp(config.P_mean - 3 * config.P_std))


def fp8_gradient_factor(config: Config) -> float:
    """By what gradients are multiplied before they are rounded: 256 times the largest power of two up to n / usual_gradient."""
    n = config.batch_size * config.in_channels * math.prod(config.image_size)
    return 2.0 ** (8 + math.frexp(n / usual_gradient(config))[1] - 1)


def round_gradient(dout: Tensor, gradient_factor: float) -> Tensor:
    return to_fp8(dout * gradient_factor, torch.float8_e5m2) / gradient_factor


class Fp8Products(torch.autograd.Function):
    """A 3x3 convolution whose gradient of x has operands in FP8. With rounds_forward its forward product and its weight gradient have such operands,
    too, and the gradient of its bias is a sum of the rounded dout. Without it the gradients of weight and bias are those without FP8."""

    @staticmethod
    def rounded_weight(weight: Tensor) -> Tensor:
        return to_fp8(weight * FP8_WEIGHT_FACTOR) / FP8_WEIGHT_FACTOR

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, gradient_factor: float, rounds_forward: bool) -> Tensor:
        read_x = to_fp8(x * FP8_X_FACTOR) / FP8_X_FACTOR if rounds_forward else x
        ctx.save_for_backward(read_x, weight)
        ctx.gradient_factor, ctx.rounds_forward = gradient_factor, rounds_forward
        return F.conv2d(read_x, Fp8Products.rounded_weight(weight) if rounds_forward else weight, bias, padding=1)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        read_x, weight = ctx.saved_tensors  # read_x: x as the forward product read it
        rounded_dout = round_gradient(dout, ctx.gradient_factor)
        # With autocast, dout is bf16, and x and weight may be fp32. Then the products are bf16's, as in the forward pass.
        rounded_weight = Fp8Products.rounded_weight(weight).to(dout.dtype)
        dx = torch.nn.grad.conv2d_input(read_x.shape, rounded_weight, rounded_dout, padding=1)
        read_dout = rounded_dout if ctx.rounds_forward else dout
        dweight = torch.nn.grad.conv2d_weight(read_x.to(dout.dtype), weight.shape, read_dout, padding=1)
        return dx, dweight, read_dout.sum((0, 2, 3)), None, None


class Fp8Addition(torch.autograd.Function):
    """h + emb, where h (B, C, H, W) is the output of Fp8Products with rounds_forward, and emb (B, C, 1, 1). The gradient of emb is a sum over the
    pixels of the rounded dout, like that of the bias. The gradient of h is dout itself: Fp8Products rounds it."""

    @staticmethod
    def forward(ctx, h: Tensor, emb: Tensor, gradient_factor: float) -> Tensor:
        ctx.gradient_factor = gradient_factor
        return h + emb

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        return dout, round_gradient(dout, ctx.gradient_factor).sum((2, 3), keepdim=True), None


class Fp8TrainedConv(nn.Module):
    """A 3x3 convolution with the parameters of `conv`. While it is trained, its input gradient is in FP8, and with rounds_forward its forward product
    and its weight gradient, too. In eval mode it is as it was."""

    def __init__(self, conv: nn.Conv2d, gradient_factor: float, rounds_forward: bool = True):
        super().__init__()
        self.weight, self.bias, self.gradient_factor, self.rounds_forward = conv.weight, conv.bias, gradient_factor, rounds_forward

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.conv2d(x, self.weight, self.bias, padding=1)
        return Fp8Products.apply(x, self.weight.to(x.dtype), self.bias.to(x.dtype), self.gradient_factor, self.rounds_forward)


def train_in_fp8(model: UNetModel, config: Config) -> None:
    """Parameters, their names and their order stay the same. Weights are rounded anew whenever they are read."""
    forward = {id(layers) for layers in fp8_layers(model)}
    for layers in fp8_gradient_layers(model):
        layers[-1] = Fp8TrainedConv(layers[-1], fp8_gradient_factor(config), id(layers) in forward)


# ======================================================================================================================
# its parameters: in a state_dict, and one after the other in a flat array


def parameter_shapes(config: Config) -> dict[str, torch.Size]:
    """Of the model's state_dict, in its order."""
    with torch.device("meta"):  # shapes without memory
        return {name: p.shape for name, p in UNetModel(config).named_parameters()}


def parameter_count(config: Config) -> int:
    return sum(shape.numel() for shape in parameter_shapes(config).values())


def to_state_dict(config: Config, flat: np.ndarray | Tensor) -> dict[str, Tensor]:
    """state_dict of a flat array (a view)."""
    shapes = parameter_shapes(config)
    parts = torch.as_tensor(flat).split([s.numel() for s in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}


def initial_weights(config: Config, device: torch.device | str = "cpu") -> np.ndarray:
    """A flat array, as in a .bin file: parameters one after the other in state_dict order. Distributed as guided-diffusion's: kaiming-uniform
    convolutions and linears, zeroed output projections. Element e of parameter p is a function of (seed, p, e), as in the C++ program.
    device: what draws the random words, which are whole numbers and so the same on all devices."""
    tensors = []
    with torch.device("meta"):
        model = UNetModel(config)
    for p, (name, parameter) in enumerate(model.named_parameters()):
        owner_name, _, kind = name.rpartition(".")
        owner, count = model.get_submodule(owner_name), parameter.numel()
        values = torch.zeros(count)
        if isinstance(owner, nn.GroupNorm):
            values.fill_(kind == "weight")
        elif not owner_name.endswith(("out_layers.3", "proj_out")) and owner_name != "out.2":
            words = random_words(config.seed, INIT, 0, torch.tensor([p], device=device), count + count % 2)[0].cpu()
            if isinstance(owner, nn.Embedding):
                values = to_normals(words)[:count]
            else:
                bound = float(np.float32(1 / math.sqrt(owner.weight[0].numel())))
                values = (2 * ((words[:count] >> 8).float() * 2.0**-24) - 1) * bound
        tensors.append(values)
    return torch.cat(tensors).numpy()


def build_model(config: Config, weights: np.ndarray | Tensor, device: torch.device | str = "cpu", precision: str = "fp32") -> UNetModel:
    """A model in eval mode whose parameters are views of weights, a flat array (if that is on the device already). With fp8 it is for samples alone:
    train_in_fp8 is for training."""
    model = UNetModel(config).to(device)
    model.bf16 = precision == "bf16" or (precision == "fp8" and torch.device(device).type == "cuda")
    flat = torch.as_tensor(weights).to(device)
    for p, part in zip(model.parameters(), to_state_dict(config, flat).values()):
        p.data = part
    if precision == "fp8":
        for layers in fp8_layers(model):
            layers[-1] = Fp8Conv(layers[0], layers[-1])
    return model.eval()
