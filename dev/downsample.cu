// downsample.cu - average pool 2x2, no parameters: --conv_resample False (unet.cu's models) and resblock_updown.
//
//   out[b, y, x, c] = mean of x[b, 2y .. 2y+1, 2x .. 2x+1, c] (an odd last row or column is not read);  each of the four gets a quarter of dout
//   (+ addends);  stats: sums for the next group norm
//   bytes    4 (1 + 1/4) B H W C each way: memory-bound
//
//   shipped     downsample_forward, downsample_backward; the definition is the program here, so there is no naive version
//
//   make -C dev downsample && dev/downsample       python dev/downsample.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "harness.h"

static void check(Arrays& io) {
    const int B = io.dim("x", 0), H = io.dim("x", 1), W = io.dim("x", 2), C = io.dim("x", 3);
    downsample_forward(io.activation_output("out", {B, H / 2, W / 2, C}), io.stats("stats", B, C), io.activation("x"), B, H, W, C);
    downsample_backward(io.gradient("dx", {B, H, W, C}), io.activation("dout"), B, H, W, C);
}

static void bench() {
    auto describe = [](const ModelLayer& m) {
        const Tensor& x = m.tensor(m.layer->x1);
        return text("B=%d H=%d W=%d C=%d", m.B, x.H, x.W, x.C);
    };
    for_each_shape(DOWNSAMPLE, describe, [](const ModelLayer& m, const std::string& shape) {
        const Tensor& x = m.tensor(m.layer->x1);
        const size_t n = (size_t)m.B * x.H * x.W * x.C;
        Memory memory;
        const act *in = random_activation(memory, n), *dout = random_activation(memory, n / 4);
        act *out = memory.poisoned_activation(n / 4), *dx = memory.poisoned_activation(n);
        bench_row(shape, "forward", 0, 1.25 * n * act_bytes(), [&] { downsample_forward(out, nullptr, in, m.B, x.H, x.W, x.C); });
        bench_row(shape, "backward", 0, 1.25 * n * act_bytes(), [&] { downsample_backward(Grad{dx, nullptr, nullptr}, dout, m.B, x.H, x.W, x.C); });
    });
}

int main(int argc, char** argv) {
    return pair_main(argc, argv, check, bench);
}
