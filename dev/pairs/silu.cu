// silu.cu - x * sigmoid(x), alone: in the time embedding only. Where it follows a group norm it is part of that operation.
//
//   out (n) = x / (1 + exp(-x));  with s = sigmoid(x):  dx = dout s (1 + x (1 - s))
//   bytes    8 n forward, 12 n backward; one exp each, so on a CPU the exponential decides, on a GPU memory does
//
//   version 0   an element at a time, with the library's expf: on a CPU a call per element unless the compiler has a vector library
//   version 1   (GPU) four elements to a thread: a quarter of the instructions for the same bytes. On an H200 17 us instead of 28 for 8.4 M elements
//   shipped     silu_forward, silu_backward: on a CPU an inlined exp that vectorises; on a GPU version 0 with the hardware's reciprocal, since in the
//               network n is 8,192 and the launch is what it costs: 1 us, whichever version
//
//   make -C dev silu && dev/silu       python dev/pairs/silu.py [--bench]
#include "harness.h"

static void silu_forward_v0(float* out, const float* x, size_t n) {
    each(n, [=] HD(size_t i) { out[i] = x[i] / (1 + expf(-x[i])); });
}

static void silu_backward_v0(GradOf<float> dx, const float* dout, const float* x, size_t n) {
    each(n, [=] HD(size_t i) {
        const float s = 1 / (1 + expf(-x[i]));
        dx.dx[i] = dout[i] * s * (1 + x[i] * (1 - s)) + (dx.add1 ? dx.add1[i] : 0);
    });
}

#ifdef __CUDACC__
static void silu_forward_v1(float* out, const float* x, size_t n) {
    each((n + 3) / 4, [=] HD(size_t i) {
        if (4 * i + 4 > n) { // the rest
            for (size_t k = 4 * i; k < n; k++) out[k] = x[k] / (1 + expf(-x[k]));
            return;
        }
        const float4 v = ((const float4*)x)[i];
        ((float4*)out)[i] =
            make_float4(v.x / (1 + expf(-v.x)), v.y / (1 + expf(-v.y)), v.z / (1 + expf(-v.z)), v.w / (1 + expf(-v.w)));
    });
}
#endif

static void check(Arrays& io) {
    const int n = io.dim("x", 0);
    const float *x = io.input<float>("x"), *dout = io.input<float>("dout");
    silu_forward(io.output<float>("out", {n}), x, n);
    silu_backward(io.plain_gradient("dx", {n}), dout, x, n);
    silu_forward_v0(io.output<float>("out.v0", {n}), x, n);
#ifdef __CUDACC__
    silu_forward_v1(io.output<float>("out.v1", {n}), x, n);
#endif
    silu_backward_v0(io.plain_gradient("dx", {n}, ".v0"), dout, x, n);
}

static void bench_size(size_t n) {
    const std::string shape = text("n=%zu", n);
    const Work forward_work{0, 8.0 * n}, backward_work{0, 12.0 * n};
    BenchArrays a(12.0 * n);
    const auto x = a.floats(n), dout = a.floats(n), out = a.floats(n);
    bench_row(shape, "forward.v0", forward_work, a, [&](int k) { silu_forward_v0(out[k], x[k], n); });
#ifdef __CUDACC__
    bench_row(shape, "forward.v1", forward_work, a, [&](int k) { silu_forward_v1(out[k], x[k], n); });
#endif
    bench_row(shape, "forward", forward_work, a, [&](int k) { silu_forward(out[k], x[k], n); });
    bench_row(shape, "backward.v0", backward_work, a, [&](int k) {
        silu_backward_v0(GradOf<float>{out[k], nullptr, nullptr}, dout[k], x[k], n);
    });
    bench_row(shape, "backward", backward_work, a, [&](int k) {
        silu_backward(GradOf<float>{out[k], nullptr, nullptr}, dout[k], x[k], n);
    });
}

static void bench() {
    auto describe = [](const ModelLayer& m) { return text("n=%d", m.B * m.tensor(m.layer->out).C); };
    for_each_shape(SILU, describe,
                   [](const ModelLayer& m, const std::string&) { bench_size((size_t)m.B * m.tensor(m.layer->out).C); });
    bench_size((size_t)32 * 64 * 64 * 64); // the size of an activation, for its bandwidth
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
