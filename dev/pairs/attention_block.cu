// attention_block.cu - an attention block, put together from the operations of the seam exactly as the trainer's list of layers has them.
//
//   x (B, H, W, C) -> norm -> 1x1 convolution to q, k, v (3C) -> attention over the T = H W pixels -> 1x1 convolution + bias + x -> out
//   FLOPs    8 B T C^2 for the two convolutions, 4 B T^2 C for the attention, forward; twice and 2.5 times that backward
//   qkv's rows are q, k, v of all heads (guided-diffusion's "new attention order"); the other order is a permutation when files are read and written.
//
//   shipped     the composition below; whatever it is made of has a pair of its own, with its naive versions
//
//   make -C dev attention_block && dev/attention_block       python dev/pairs/attention_block.py [--bench]
#include "block.h"

struct AttentionBlock {
    int B, H, W, C, heads;
    const act* x;
    Stats stats_x;
    NormParams norm;
    ConvParams qkv, proj_out;
    // what forward leaves for backward
    act *h, *q, *a; // norm's, qkv's and attention's output
    NormSaved saved;
    SoftmaxRow* rows;

    size_t size() const { return (size_t)B * H * W * C; }
    NormShape norm_shape() const { return NormShape{B, H * W, C, 0, 32, Nonlinearity::NONE, 1e-5f}; }
    ConvShape qkv_shape() const { return ConvShape{B, H, W, C, 0, 3 * C, 1, 1, 0}; }
    ConvShape proj_shape() const { return ConvShape{B, H, W, C, 0, C, 1, 1, 0}; }
};

static void allocate(AttentionBlock* r, Memory& memory) {
    r->h = memory.poisoned_activation(r->size());
    r->q = memory.poisoned_activation(3 * r->size());
    r->a = memory.poisoned_activation(r->size());
    r->saved = norm_saved(memory, r->B);
    r->rows = memory.poisoned<SoftmaxRow>((size_t)r->B * r->heads * r->H * r->W);
}

static void attention_block_forward(act* out, Stats* stats, const AttentionBlock& r) {
    groupnorm_forward(r.h, r.saved.mean, r.saved.rstd, r.x, r.stats_x, nullptr, Stats{}, r.norm.weight, r.norm.bias,
                      nullptr, 0, Dropout{}, r.norm_shape());
    conv_forward(r.q, nullptr, r.h, nullptr, r.qkv.weight, r.qkv.bias, nullptr, 0, nullptr, r.qkv_shape());
    attention_forward(r.a, r.rows, r.q, r.B, r.H * r.W, r.C, r.heads);
    conv_forward(out, stats, r.a, nullptr, r.proj_out.weight, r.proj_out.bias, nullptr, 0, r.x, r.proj_shape());
}

// da, dq: scratch. The residual's gradient is dout itself; the norm adds it to its own.
static void attention_block_backward(act* dx, const act* dout, const AttentionBlock& r, act* da, act* dq) {
    conv_backward_weight(r.proj_out.dweight, r.proj_out.dbias, nullptr, 0, dout, r.a, nullptr, r.proj_shape());
    conv_backward_input(Grad{da, nullptr, nullptr}, Grad{}, dout, r.proj_out.weight, r.proj_shape());
    attention_backward(dq, da, r.q, r.a, r.rows, r.B, r.H * r.W, r.C, r.heads);
    conv_backward_weight(r.qkv.dweight, r.qkv.dbias, nullptr, 0, dq, r.h, nullptr, r.qkv_shape());
    conv_backward_input(Grad{da, nullptr, nullptr}, Grad{}, dq, r.qkv.weight, r.qkv_shape());
    groupnorm_backward(Grad{dx, dout, nullptr}, Grad{}, r.norm.dweight, r.norm.dbias, nullptr, da, r.x, nullptr,
                       r.saved.mean, r.saved.rstd, r.norm.weight, r.norm.bias, nullptr, 0, Dropout{}, r.norm_shape());
}

static void check(Arrays& io) {
    AttentionBlock r{};
    r.B = io.dim("x", 0);
    r.H = io.dim("x", 1);
    r.W = io.dim("x", 2);
    r.C = io.dim("x", 3);
    r.heads = (int)io.integer("heads");
    r.x = io.activation("x");
    r.stats_x = Stats{io.input<double>("stats_x"), 1};
    r.norm = norm_params(io, "norm");
    r.qkv = conv_params(io, "qkv");
    r.proj_out = conv_params(io, "proj_out");
    allocate(&r, io.memory);
    const Dims dims{r.B, r.H, r.W, r.C};
    attention_block_forward(io.activation_output("out", dims), io.stats("stats", r.B, r.H, r.W, r.C), r);
    attention_block_backward(io.activation_output("dx", dims), io.activation("dout"), r,
                             io.memory.poisoned_activation(r.size()), io.memory.poisoned_activation(3 * r.size()));
}

static void bench() {
    auto describe = [](const ModelLayer& m) {
        const Tensor& out = m.tensor(m.layer->out);
        return text("B=%d H=%d W=%d C=%d heads=%d", m.B, out.H, out.W, out.C, m.layer->heads);
    };
    for_each_shape(ATTENTION, describe, [](const ModelLayer& m, const std::string& shape) {
        const Tensor& t = m.tensor(m.layer->out);
        AttentionBlock r{};
        r.B = m.B;
        r.H = t.H;
        r.W = t.W;
        r.C = t.C;
        r.heads = m.layer->heads;
        const std::vector<double> sums((size_t)r.B * r.C * 2, r.H * r.W / 3.0);
        BenchArrays a(1e9); // one copy: what one operation leaves in a cache the next one reads there, as in training
        Memory& memory = a.memory;
        r.x = random_activation(memory, r.size());
        r.stats_x = Stats{memory.upload(sums.data(), sums.size()), 1};
        r.norm = random_norm_params(memory, r.C, r.C);
        r.qkv = random_conv_params(memory, r.C, 3 * r.C, 1);
        r.proj_out = random_conv_params(memory, r.C, r.C, 1);
        allocate(&r, memory);
        act *out = memory.poisoned_activation(r.size()), *dx = memory.poisoned_activation(r.size());
        act *da = memory.poisoned_activation(r.size()), *dq = memory.poisoned_activation(3 * r.size());
        const act* dout = random_activation(memory, r.size());
        Stats stats = poisoned_stats(memory, r.B, r.H, r.W, r.C);
        const double convs = 8.0 * r.size() * r.C, attention = 4.0 * r.size() * r.H * r.W;
        bench_row(shape, "forward", Work{convs + attention, 0}, a,
                  [&](int) { attention_block_forward(out, &stats, r); });
        bench_row(shape, "backward", Work{2 * convs + 2.5 * attention, 0}, a,
                  [&](int) { attention_block_backward(dx, dout, r, da, dq); });
    });
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
