// downsample.cu - average pool 2x2, no parameters: --conv_resample False (unet.cu's models) and resblock_updown.
//
//   out[b, y, x, c] = mean of x[b, 2y .. 2y+1, 2x .. 2x+1, c] (an odd last row or column is not read);  each of the four gets a quarter of dout
//   (+ addends);  stats: sums for the next group norm
//   bytes    4 (1 + 1/4) B H W C each way: memory-bound
//
//   version 0   the definition, an output (or a gradient) at a time; the sums in a pass of their own, for which out is read again,
//               by one thread per image and channel: on a GPU most of the time
//   shipped     downsample_forward, downsample_backward; on a GPU 16 bytes of channels to a thread, and the sums are taken on the way
//
//   make -C dev downsample && dev/downsample       python dev/pairs/downsample.py [--bench]
#include "resample.h"

static void downsample_forward_v0(act* out, Stats* stats, const act* x, int B, int H, int W, int C) {
    const Values o = values(out), in = values(x);
    const int Ho = H / 2, Wo = W / 2;
    each((size_t)B * Ho * Wo * C, [=] HD(size_t i) {
        const size_t c = i % C, w = i / C % Wo, h = i / C / Wo % Ho, b = i / C / Wo / Ho;
        float sum = 0;
        for (size_t k = 0; k < 4; k++) sum += in[((b * H + 2 * h + k / 2) * W + 2 * w + k % 2) * C + c];
        o.set(i, sum / 4);
    });
    channel_stats_v0(stats, out, B, Ho * Wo, C);
}

static void downsample_backward_v0(Grad dx, const act* dout, int B, int H, int W, int C) {
    const Values to = values(dx.dx), d = values(dout), add1 = values(dx.add1), add2 = values(dx.add2);
    const int Ho = H / 2, Wo = W / 2;
    each((size_t)B * H * W * C, [=] HD(size_t i) {
        const int c = (int)(i % C), w = (int)(i / C % W), h = (int)(i / C / W % H), b = (int)(i / C / W / H);
        const bool read = h / 2 < Ho && w / 2 < Wo;
        const float sum = (add1.p ? add1[i] : 0) + (add2.p ? add2[i] : 0);
        to.set(i, sum + (read ? d[(((size_t)b * Ho + h / 2) * Wo + w / 2) * C + c] / 4 : 0));
    });
}

static void check(Arrays& io) {
    const int B = io.dim("x", 0), H = io.dim("x", 1), W = io.dim("x", 2), C = io.dim("x", 3);
    const act *x = io.activation("x"), *dout = io.activation("dout");
    const Dims out_dims{B, H / 2, W / 2, C};
    downsample_forward(io.activation_output("out", out_dims), io.stats("stats", B, H / 2, W / 2, C), x, B, H, W, C);
    downsample_backward(io.gradient("dx", {B, H, W, C}), dout, B, H, W, C);
    downsample_forward_v0(io.activation_output("out.v0", out_dims), io.stats("stats", B, H / 2, W / 2, C, ".v0"), x, B,
                          H, W, C);
    downsample_backward_v0(io.gradient("dx", {B, H, W, C}, act_element, ".v0"), dout, B, H, W, C);
}

static void bench() {
    auto describe = [](const ModelLayer& m) {
        const Tensor& x = m.tensor(m.layer->x1);
        return text("B=%d H=%d W=%d C=%d", m.B, x.H, x.W, x.C);
    };
    for_each_shape(DOWNSAMPLE, describe, [](const ModelLayer& m, const std::string& shape) {
        const Tensor& t = m.tensor(m.layer->x1);
        const int B = m.B, H = t.H, W = t.W, C = t.C;
        const size_t n = (size_t)B * H * W * C;
        const Work work{0, 1.25 * n * act_bytes()};
        BenchArrays a(work.bytes);
        const auto x = a.activation(n), out = a.activation(n / 4); // backward: dout in out's place, dx in x's
        Stats stats = poisoned_stats(a.memory, B, H / 2, W / 2, C);
        auto grad = [&](int k) { return Grad{x[k], nullptr, nullptr}; };
        bench_row(shape, "forward.v0", work, a,
                  [&](int k) { downsample_forward_v0(out[k], &stats, x[k], B, H, W, C); });
        bench_row(shape, "forward", work, a, [&](int k) { downsample_forward(out[k], &stats, x[k], B, H, W, C); });
        bench_row(shape, "backward.v0", work, a, [&](int k) { downsample_backward_v0(grad(k), out[k], B, H, W, C); });
        bench_row(shape, "backward", work, a, [&](int k) { downsample_backward(grad(k), out[k], B, H, W, C); });
    });
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
