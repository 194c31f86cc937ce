// silu.cu - x * sigmoid(x), alone: in the time embedding only. Where it follows a group norm it is part of that operation.
//
//   out (n) = x / (1 + exp(-x));  with s = sigmoid(x):  dx = dout s (1 + x (1 - s))
//   bytes    8 n forward, 12 n backward; one exp each, so on a CPU the exponential decides, on a GPU memory does
//
//   version 0   with the C library's expf: a call per element unless the compiler has a vector library
//   shipped     silu_forward, silu_backward: on a CPU an inlined exp that vectorises
//
//   make -C dev silu && dev/silu       python dev/silu.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "harness.h"

static void silu_forward_v0(float* out, const float* x, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = x[i] / (1 + expf(-x[i]));
}

static void silu_backward_v0(float* dx, const float* dout, const float* x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float s = 1 / (1 + expf(-x[i]));
        dx[i] = dout[i] * s * (1 + x[i] * (1 - s));
    }
}

static void check(Arrays& io) {
    const int n = io.dim("x", 0);
    const float *x = io.input<float>("x"), *dout = io.input<float>("dout");
    silu_forward(io.output<float>("out", {n}), x, n);
    silu_backward(io.plain_gradient("dx", {n}), dout, x, n);
    silu_forward_v0(io.host_output("out.v0", {n}), io.host("x"), n);
    if (!io.has("dx")) silu_backward_v0(io.host_output("dx.v0", {n}), io.host("dout"), io.host("x"), n);
}

static void bench_size(size_t n) {
    Memory memory;
    const float *x = random_floats(memory, n), *dout = random_floats(memory, n);
    float *out = memory.poisoned<float>(n), *dx = memory.poisoned<float>(n);
    const std::vector<float> host_x = random_values(n);
    std::vector<float> host_out(n);
    const std::string shape = text("n=%zu", n);
    bench_row(shape, "forward.v0", 0, 8.0 * n, [&] { silu_forward_v0(host_out.data(), host_x.data(), n); });
    bench_row(shape, "forward", 0, 8.0 * n, [&] { silu_forward(out, x, n); });
    bench_row(shape, "backward", 0, 12.0 * n, [&] { silu_backward(GradOf<float>{dx, nullptr, nullptr}, dout, x, n); });
}

static void bench() {
    auto describe = [](const ModelLayer& m) { return text("n=%d", m.B * m.tensor(m.layer->out).C); };
    for_each_shape(SILU, describe, [](const ModelLayer& m, const std::string&) { bench_size((size_t)m.B * m.tensor(m.layer->out).C); });
    bench_size((size_t)32 * 64 * 64 * 64); // the size of an activation, for its bandwidth
}

int main(int argc, char** argv) {
    return pair_main(argc, argv, check, bench);
}
