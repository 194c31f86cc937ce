// resblock.cu - a residual block, put together from the operations of the seam exactly as the trainer's list of layers has them.
//
//   x = [x1 | x2] -> norm, SiLU [-> up or down] -> conv 3x3 + bias + emb -> norm [, scale and shift], SiLU, dropout
//     -> conv 3x3 + bias + shortcut -> out
//   emb (B, E) -> SiLU -> linear -> added to the first convolution's output, or, with use_scale_shift_norm, scale and shift of the second norm
//   shortcut = x [up or down], through a 1x1 convolution if its channels are not Cout
//   FLOPs    18 B H W (Cin Cout + Cout^2) [+ 2 B H W Cin Cout] forward, twice that backward
//   A framework writes seven tensors between x and out (norm, SiLU, conv, + emb, norm, SiLU, dropout); here there are three: a norm includes what
//   follows it, a convolution what is added to it, and the second norm's sums come from the first convolution.
//
//   shipped     the composition below; whatever it is made of has a pair of its own, with its naive versions
//
//   make -C dev resblock && dev/resblock       python dev/pairs/resblock.py [--bench]
#include "block.h"

struct ResBlock {
    int B, H, W, C1, C2, Cout, E;
    Resample resample;
    bool scale_shift;
    Dropout dropout;
    const act *x1, *x2;
    Stats stats1, stats2;
    const float* emb;
    NormParams norm1, projection, norm2;
    ConvParams conv1, conv2, skip;
    // what forward leaves for backward
    act *h1, *h1_small, *x_resampled, *shortcut, *h2, *h3;
    Stats stats_h2;
    NormSaved saved1, saved2;
    float *emb_silu, *emb_out;

    int Ho() const { return resample == UP ? 2 * H : resample == DOWN ? H / 2 : H; }
    int Wo() const { return resample == UP ? 2 * W : resample == DOWN ? W / 2 : W; }
    int Ce() const { return scale_shift ? 2 * Cout : Cout; }
    size_t size_in() const { return (size_t)B * H * W * (C1 + C2); }
    size_t size_out() const { return (size_t)B * Ho() * Wo() * Cout; }
    NormShape norm1_shape() const { return NormShape{B, H * W, C1, C2, 32, Nonlinearity::SILU, 1e-5f}; }
    NormShape norm2_shape() const { return NormShape{B, Ho() * Wo(), Cout, 0, 32, Nonlinearity::SILU, 1e-5f}; }
    ConvShape conv1_shape() const { // with UP it reads its input upsampled, with DOWN the pooled one
        const int shrink = resample == DOWN ? 2 : 1;
        return ConvShape{B, H / shrink, W / shrink, C1 + C2, 0, Cout, 3, 1, resample == UP};
    }
    ConvShape conv2_shape() const { return ConvShape{B, Ho(), Wo(), Cout, 0, Cout, 3, 1, 0}; }
    ConvShape skip_shape() const { return ConvShape{B, Ho(), Wo(), C1, C2, Cout, 1, 1, 0}; }
};

static void allocate(ResBlock* r, Memory& memory) {
    r->h1 = memory.poisoned_activation(r->size_in());
    r->h1_small = r->resample == DOWN ? memory.poisoned_activation(r->size_in() / 4) : r->h1;
    r->x_resampled = r->resample == SAME
                         ? nullptr
                         : memory.poisoned_activation(r->resample == UP ? 4 * r->size_in() : r->size_in() / 4);
    r->shortcut = memory.poisoned_activation(r->size_out());
    r->h2 = memory.poisoned_activation(r->size_out());
    r->h3 = memory.poisoned_activation(r->size_out());
    r->stats_h2 = poisoned_stats(memory, r->B, r->Ho(), r->Wo(), r->Cout);
    r->saved1 = norm_saved(memory, r->B);
    r->saved2 = norm_saved(memory, r->B);
    r->emb_silu = memory.poisoned<float>((size_t)r->B * r->E);
    r->emb_out = memory.poisoned<float>((size_t)r->B * r->Ce());
}

static void resblock_forward(act* out, Stats* stats, ResBlock& r) {
    const float *add = r.scale_shift ? nullptr : r.emb_out, *film = r.scale_shift ? r.emb_out : nullptr;
    silu_forward(r.emb_silu, r.emb, (size_t)r.B * r.E);
    linear_forward(r.emb_out, r.emb_silu, r.projection.weight, r.projection.bias, r.B, r.E, r.Ce());

    groupnorm_forward(r.h1, r.saved1.mean, r.saved1.rstd, r.x1, r.stats1, r.x2, r.stats2, r.norm1.weight, r.norm1.bias,
                      nullptr, 0, Dropout{}, r.norm1_shape());
    if (r.resample == DOWN) downsample_forward(r.h1_small, nullptr, r.h1, r.B, r.H, r.W, r.C1);
    if (r.resample == DOWN) downsample_forward(r.x_resampled, nullptr, r.x1, r.B, r.H, r.W, r.C1);
    if (r.resample == UP) upsample_forward(r.x_resampled, nullptr, r.x1, r.B, r.H, r.W, r.C1);
    conv_forward(r.h2, &r.stats_h2, r.h1_small, nullptr, r.conv1.weight, r.conv1.bias, add, r.Ce(), nullptr,
                 r.conv1_shape());
    groupnorm_forward(r.h3, r.saved2.mean, r.saved2.rstd, r.h2, r.stats_h2, nullptr, Stats{}, r.norm2.weight,
                      r.norm2.bias, film, r.Ce(), r.dropout, r.norm2_shape());

    const act* x = r.x_resampled ? r.x_resampled : r.x1;
    if (r.skip.weight && conv_takes_skip(r.conv2_shape(), r.skip_shape()))
        return conv_forward(out, stats, r.h3, nullptr, r.conv2.weight, r.conv2.bias, nullptr, 0, nullptr,
                            r.conv2_shape(), ConvSkip{x, r.x2, r.skip.weight, r.skip.bias, r.C1, r.C2});
    if (r.skip.weight)
        conv_forward(r.shortcut, nullptr, x, r.x2, r.skip.weight, r.skip.bias, nullptr, 0, nullptr, r.skip_shape());
    conv_forward(out, stats, r.h3, nullptr, r.conv2.weight, r.conv2.bias, nullptr, 0, r.skip.weight ? r.shortcut : x,
                 r.conv2_shape());
}

// Gradients that only live inside the backward pass.
struct ResBlockScratch {
    act *dh3, *dh2, *dh1_small, *dh1, *dshortcut;
    float *demb_out, *demb_silu;
};

static ResBlockScratch allocate_scratch(const ResBlock& r, Memory& memory) {
    ResBlockScratch s;
    s.dh3 = memory.poisoned_activation(r.size_out());
    s.dh2 = memory.poisoned_activation(r.size_out());
    s.dh1 = memory.poisoned_activation(r.size_in());
    s.dh1_small = r.resample == DOWN ? memory.poisoned_activation(r.size_in() / 4) : s.dh1;
    s.dshortcut = memory.poisoned_activation(r.size_out() / r.Cout * r.C1);
    s.demb_out = memory.poisoned<float>((size_t)r.B * r.Ce());
    s.demb_silu = memory.poisoned<float>((size_t)r.B * r.E);
    return s;
}

static void resblock_backward(act* dx1, act* dx2, float* demb, const act* dout, const ResBlock& r,
                              const ResBlockScratch& s) {
    const float* film = r.scale_shift ? r.emb_out : nullptr;
    auto only = [](act* dx) { return Grad{dx, nullptr, nullptr}; };
    auto also = [](act* dx, const act* waiting) { return Grad{dx, waiting, nullptr}; };

    conv_backward_weight(r.conv2.dweight, r.conv2.dbias, nullptr, 0, dout, r.h3, nullptr, r.conv2_shape());
    conv_backward_input(only(s.dh3), Grad{}, dout, r.conv2.weight, r.conv2_shape());
    groupnorm_backward(only(s.dh2), Grad{}, r.norm2.dweight, r.norm2.dbias, film ? s.demb_out : nullptr, s.dh3, r.h2,
                       nullptr, r.saved2.mean, r.saved2.rstd, r.norm2.weight, r.norm2.bias, film, r.Ce(), r.dropout,
                       r.norm2_shape());
    conv_backward_weight(r.conv1.dweight, r.conv1.dbias, film ? nullptr : s.demb_out, r.Ce(), s.dh2, r.h1_small,
                         nullptr, r.conv1_shape());
    conv_backward_input(only(s.dh1_small), Grad{}, s.dh2, r.conv1.weight, r.conv1_shape());
    if (r.resample == DOWN) downsample_backward(only(s.dh1), s.dh1_small, r.B, r.H, r.W, r.C1);

    // the shortcut's gradient of x waits in dshortcut, dx1 or dx2, and the first norm adds its own to it
    const act *waiting1 = dout, *waiting2 = nullptr;
    if (r.skip.weight) {
        act* d = r.resample == SAME ? dx1 : s.dshortcut;
        conv_backward_weight(r.skip.dweight, r.skip.dbias, nullptr, 0, dout, r.x_resampled ? r.x_resampled : r.x1, r.x2,
                             r.skip_shape());
        conv_backward_input(only(d), only(dx2), dout, r.skip.weight, r.skip_shape());
        waiting1 = d;
        waiting2 = dx2;
    }
    if (r.resample == DOWN) downsample_backward(only(dx1), waiting1, r.B, r.H, r.W, r.C1);
    if (r.resample == UP) upsample_backward(only(dx1), waiting1, r.B, r.H, r.W, r.C1);
    if (r.resample != SAME) waiting1 = dx1;
    groupnorm_backward(also(dx1, waiting1), also(dx2, waiting2), r.norm1.dweight, r.norm1.dbias, nullptr, s.dh1, r.x1,
                       r.x2, r.saved1.mean, r.saved1.rstd, r.norm1.weight, r.norm1.bias, nullptr, 0, Dropout{},
                       r.norm1_shape());

    linear_backward(GradOf<float>{s.demb_silu, nullptr, nullptr}, r.projection.dweight, r.projection.dbias, s.demb_out,
                    r.emb_silu, r.projection.weight, r.B, r.E, r.Ce());
    silu_backward(GradOf<float>{demb, nullptr, nullptr}, s.demb_silu, r.emb, (size_t)r.B * r.E);
}

static void check(Arrays& io) {
    const int64_t step = io.integer("step");
    ResBlock r{};
    r.B = io.dim("x1", 0);
    r.H = io.dim("x1", 1);
    r.W = io.dim("x1", 2);
    r.C1 = io.dim("x1", 3);
    r.C2 = io.dim("x2", 3);
    r.Cout = io.dim("in_layers.2.weight", 0);
    r.E = io.dim("emb", 1);
    r.resample = io.integer("up") ? UP : io.integer("down") ? DOWN : SAME;
    r.scale_shift = io.integer("scale_shift") != 0;
    r.dropout = Dropout{(float)io.real("p"), (uint64_t)io.integer("seed"), io.memory.upload(&step, 1),
                        io.integer("sample0"), (uint32_t)io.integer("layer")};
    r.x1 = io.activation("x1");
    r.x2 = io.activation("x2");
    r.stats1 = Stats{io.input<double>("stats_x1"), 1};
    r.stats2 = Stats{io.input<double>("stats_x2"), 1};
    r.emb = io.input<float>("emb");
    r.norm1 = norm_params(io, "in_layers.0");
    r.conv1 = conv_params(io, "in_layers.2");
    r.projection = norm_params(io, "emb_layers.1");
    r.norm2 = norm_params(io, "out_layers.0");
    r.conv2 = conv_params(io, "out_layers.3");
    r.skip = conv_params(io, "skip_connection");
    allocate(&r, io.memory);
    resblock_forward(io.activation_output("out", {r.B, r.Ho(), r.Wo(), r.Cout}),
                     io.stats("stats", r.B, r.Ho(), r.Wo(), r.Cout), r);
    act* dx1 = io.activation_output("dx1", {r.B, r.H, r.W, r.C1});
    act* dx2 = r.C2 ? io.activation_output("dx2", {r.B, r.H, r.W, r.C2}) : nullptr;
    resblock_backward(dx1, dx2, io.output<float>("demb", {r.B, r.E}), io.activation("dout"), r,
                      allocate_scratch(r, io.memory));
}

static void bench() {
    struct {
        int B, H, C1, C2, Cout, E;
    } shapes[] = {{16, 32, 32, 0, 32, 128},   {16, 16, 32, 0, 64, 128},   {16, 8, 64, 64, 64, 128},
                  {32, 64, 64, 0, 64, 256},   {32, 64, 64, 64, 64, 256},  {32, 32, 128, 64, 128, 256},
                  {32, 16, 192, 0, 192, 256}, {32, 8, 256, 192, 256, 256}};
    const std::vector<BenchModel> models = bench_models();
    for (const auto& s : shapes) {
        if (std::ranges::find(models, s.B, &BenchModel::B) == models.end()) continue;
        BenchArrays a(1e9); // one copy: what one operation leaves in a cache the next one reads there, as in training
        Memory& memory = a.memory;
        ResBlock r{};
        r.B = s.B;
        r.H = r.W = s.H;
        r.C1 = s.C1;
        r.C2 = s.C2;
        r.Cout = s.Cout;
        r.E = s.E;
        r.resample = SAME;
        const int Cin = s.C1 + s.C2;
        const std::vector<double> sums((size_t)s.B * Cin * 2, s.H * s.H / 3.0);
        r.x1 = random_activation(memory, (size_t)s.B * s.H * s.H * s.C1);
        r.x2 = s.C2 ? random_activation(memory, (size_t)s.B * s.H * s.H * s.C2) : nullptr;
        r.stats1 = r.stats2 = Stats{memory.upload(sums.data(), sums.size()), 1};
        r.emb = random_floats(memory, (size_t)s.B * s.E);
        r.norm1 = random_norm_params(memory, Cin, Cin);
        r.norm2 = random_norm_params(memory, s.Cout, s.Cout);
        r.projection = random_norm_params(memory, (size_t)s.Cout * s.E, s.Cout);
        r.conv1 = random_conv_params(memory, Cin, s.Cout, 3);
        r.conv2 = random_conv_params(memory, s.Cout, s.Cout, 3);
        if (Cin != s.Cout) r.skip = random_conv_params(memory, Cin, s.Cout, 1);
        allocate(&r, memory);
        const ResBlockScratch scratch = allocate_scratch(r, memory);
        act *out = memory.poisoned_activation(r.size_out()), *dx1 = memory.poisoned_activation(r.size_in()),
            *dx2 = s.C2 ? memory.poisoned_activation(r.size_in()) : nullptr;
        const act* dout = random_activation(memory, r.size_out());
        float* demb = memory.poisoned<float>((size_t)s.B * s.E);
        Stats stats = poisoned_stats(memory, s.B, r.Ho(), r.Wo(), s.Cout);
        const double flop = 2.0 * r.size_out() * (9.0 * Cin + 9.0 * s.Cout + (Cin != s.Cout ? Cin : 0));
        const std::string shape =
            text("B=%d H=%d W=%d C1=%d C2=%d Cout=%d E=%d", s.B, s.H, s.H, s.C1, s.C2, s.Cout, s.E);
        bench_row(shape, "forward", Work{flop, 0}, a, [&](int) { resblock_forward(out, &stats, r); });
        bench_row(shape, "backward", Work{2 * flop, 0}, a,
                  [&](int) { resblock_backward(dx1, dx2, demb, dout, r, scratch); });
    }
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
