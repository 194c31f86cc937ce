// upsample.cu - nearest neighbour, twice the height and width, no parameters. Alone where unet.cu's models (--conv_resample False) and the skip
// path of resblock_updown have it; elsewhere the convolution that follows reads its input upsampled and nothing is stored.
//
//   out[b, y, x, c] = x[b, y / 2, x / 2, c];  dx = the sum of the four copies' gradients (+ addends);  stats: sums for the next group norm
//   bytes    4 (1 + 4) B H W C each way: memory-bound
//
//   version 0   the definition, an output (or a gradient) at a time; the sums in a pass of their own, for which out is read again,
//               by one thread per image and channel: on a GPU most of the time
//   shipped     upsample_forward, upsample_backward; on a GPU 16 bytes of channels to a thread, each input read once and written four times, and summed up
//               on the way
//
//   make -C dev upsample && dev/upsample       python dev/pairs/upsample.py [--bench]
#include "resample.h"

static void upsample_forward_v0(act* out, Stats* stats, const act* x, int B, int H, int W, int C) {
    const Values o = values(out), in = values(x);
    each((size_t)B * 4 * H * W * C, [=] HD(size_t i) {
        const size_t c = i % C, w = i / C % (2 * W), h = i / C / (2 * W) % (2 * H), b = i / C / (2 * W) / (2 * H);
        o.set(i, in[((b * H + h / 2) * W + w / 2) * C + c]);
    });
    channel_stats_v0(stats, out, B, 4 * H * W, C);
}

static void upsample_backward_v0(Grad dx, const act* dout, int B, int H, int W, int C) {
    const Values to = values(dx.dx), d = values(dout), add1 = values(dx.add1), add2 = values(dx.add2);
    each((size_t)B * H * W * C, [=] HD(size_t i) {
        const size_t c = i % C, w = i / C % W, row = i / C / W; // row = b * H + h
        float sum = (add1.p ? add1[i] : 0) + (add2.p ? add2[i] : 0);
        for (size_t k = 0; k < 4; k++) sum += d[((2 * row + k / 2) * 2 * W + 2 * w + k % 2) * C + c];
        to.set(i, sum);
    });
}

static void check(Arrays& io) {
    const int B = io.dim("x", 0), H = io.dim("x", 1), W = io.dim("x", 2), C = io.dim("x", 3);
    const act *x = io.activation("x"), *dout = io.activation("dout");
    const Dims out_dims{B, 2 * H, 2 * W, C};
    upsample_forward(io.activation_output("out", out_dims), io.stats("stats", B, 2 * H, 2 * W, C), x, B, H, W, C);
    upsample_backward(io.gradient("dx", {B, H, W, C}), dout, B, H, W, C);
    upsample_forward_v0(io.activation_output("out.v0", out_dims), io.stats("stats", B, 2 * H, 2 * W, C, ".v0"), x, B, H,
                        W, C);
    upsample_backward_v0(io.gradient("dx", {B, H, W, C}, act_element, ".v0"), dout, B, H, W, C);
}

static void bench() {
    auto describe = [](const ModelLayer& m) {
        const Tensor& x = m.tensor(m.layer->x1);
        return text("B=%d H=%d W=%d C=%d", m.B, x.H, x.W, x.C);
    };
    for_each_shape(UPSAMPLE, describe, [](const ModelLayer& m, const std::string& shape) {
        const Tensor& t = m.tensor(m.layer->x1);
        const int B = m.B, H = t.H, W = t.W, C = t.C;
        const size_t n = (size_t)B * H * W * C;
        const Work work{0, 5.0 * n * act_bytes()};
        BenchArrays a(work.bytes);
        const auto x = a.activation(n), out = a.activation(4 * n); // backward: dout in out's place, dx in x's
        Stats stats = poisoned_stats(a.memory, B, 2 * H, 2 * W, C);
        auto grad = [&](int k) { return Grad{x[k], nullptr, nullptr}; };
        bench_row(shape, "forward.v0", work, a, [&](int k) { upsample_forward_v0(out[k], &stats, x[k], B, H, W, C); });
        bench_row(shape, "forward", work, a, [&](int k) { upsample_forward(out[k], &stats, x[k], B, H, W, C); });
        bench_row(shape, "backward.v0", work, a, [&](int k) { upsample_backward_v0(grad(k), out[k], B, H, W, C); });
        bench_row(shape, "backward", work, a, [&](int k) { upsample_backward(grad(k), out[k], B, H, W, C); });
    });
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
