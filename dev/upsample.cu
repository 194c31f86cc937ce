// upsample.cu - nearest neighbour, twice the height and width, no parameters. Alone where unet.cu's models (--conv_resample False) and the skip
// path of resblock_updown have it; elsewhere the convolution that follows reads its input upsampled and nothing is stored.
//
//   out[b, y, x, c] = x[b, y / 2, x / 2, c];  dx = the sum of the four copies' gradients (+ addends);  stats: sums for the next group norm
//   bytes    4 (1 + 4) B H W C each way: memory-bound
//
//   shipped     upsample_forward, upsample_backward; the definition is the program here, so there is no naive version
//
//   make -C dev upsample && dev/upsample       python dev/upsample.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "harness.h"

static void check(Arrays& io) {
    const int B = io.dim("x", 0), H = io.dim("x", 1), W = io.dim("x", 2), C = io.dim("x", 3);
    upsample_forward(io.activation_output("out", {B, 2 * H, 2 * W, C}), io.stats("stats", B, C), io.activation("x"), B, H, W, C);
    upsample_backward(io.gradient("dx", {B, H, W, C}), io.activation("dout"), B, H, W, C);
}

static void bench() {
    auto describe = [](const ModelLayer& m) {
        const Tensor& x = m.tensor(m.layer->x1);
        return text("B=%d H=%d W=%d C=%d", m.B, x.H, x.W, x.C);
    };
    for_each_shape(UPSAMPLE, describe, [](const ModelLayer& m, const std::string& shape) {
        const Tensor& x = m.tensor(m.layer->x1);
        const size_t n = (size_t)m.B * x.H * x.W * x.C;
        Memory memory;
        const act *in = random_activation(memory, n), *dout = random_activation(memory, 4 * n);
        act *out = memory.poisoned_activation(4 * n), *dx = memory.poisoned_activation(n);
        bench_row(shape, "forward", 0, 5.0 * n * act_bytes(), [&] { upsample_forward(out, nullptr, in, m.B, x.H, x.W, x.C); });
        bench_row(shape, "backward", 0, 5.0 * n * act_bytes(), [&] { upsample_backward(Grad{dx, nullptr, nullptr}, dout, m.B, x.H, x.W, x.C); });
    });
}

int main(int argc, char** argv) {
    return pair_main(argc, argv, check, bench);
}
