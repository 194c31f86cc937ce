// linear.cu - fully connected layer on embeddings: the time embedding's two layers and the projections of all residual blocks (one matrix).
//
//   out (B, Cout) = x (B, Cin) weight (Cout, Cin)^T + bias (Cout);  dx = dout weight,  dweight = dout^T x,  dbias = column sums of dout
//   FLOPs    2 B Cin Cout for each of the three products
//   bytes    4 Cin Cout, each weight is used B times only: memory-bound, in fp32 in every build, and far too small to matter on a CPU
//
//   version 0   a dot product per output, forward and backward; on a GPU a thread each, so that neighbouring threads read rows of weights Cin apart
//               (H200, 256 -> 3712, batch 32: 140 us)
//   version 1   (GPU, forward) a warp per output: its lanes read a row of weights side by side, and add up by shuffles (21 us)
//   shipped     linear_forward, linear_backward; on a GPU a weight that is read serves 32 rows of x at once
//   cublas      (GPU) cuBLASLt's fp32 products, in a column of their own: see cublas.h
//
//   make -C dev linear && dev/linear       python dev/pairs/linear.py [--bench]
#include "cublas.h"

static void linear_forward_v0(float* out, const float* x, const float* weight, const float* bias, int B, int Cin,
                              int Cout) {
    each((size_t)B * Cout, [=] HD(size_t i) {
        const size_t b = i / Cout, o = i % Cout;
        float sum = bias[o];
        for (int k = 0; k < Cin; k++) sum += x[b * Cin + k] * weight[o * Cin + k];
        out[i] = sum;
    });
}

static void linear_backward_v0(GradOf<float> dx, float* dweight, float* dbias, const float* dout, const float* x,
                               const float* weight, int B, int Cin, int Cout) {
    each((size_t)B * Cin, [=] HD(size_t i) {
        const size_t b = i / Cin, k = i % Cin;
        float sum = dx.add1 ? dx.add1[i] : 0;
        for (int o = 0; o < Cout; o++) sum += dout[b * Cout + o] * weight[(size_t)o * Cin + k];
        dx.dx[i] = sum;
    });
    each((size_t)Cout * Cin, [=] HD(size_t i) {
        const size_t o = i / Cin, k = i % Cin;
        for (int b = 0; b < B; b++) dweight[i] += dout[(size_t)b * Cout + o] * x[(size_t)b * Cin + k];
    });
    each(Cout, [=] HD(size_t o) {
        for (int b = 0; b < B; b++) dbias[o] += dout[(size_t)b * Cout + o];
    });
}

#ifdef __CUDACC__
static __global__ void __launch_bounds__(256) linear_forward_v1_kernel(float* out, const float* x, const float* weight,
                                                                       const float* bias, int B, int Cin, int Cout) {
    const int i = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, b = i / Cout, o = i % Cout;
    if (b >= B) return; // a whole warp
    float sum = 0;
    for (int k = lane; k < Cin; k += 32) sum += x[(size_t)b * Cin + k] * weight[(size_t)o * Cin + k];
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    if (lane == 0) out[i] = sum + bias[o];
}
static void linear_forward_v1(float* out, const float* x, const float* weight, const float* bias, int B, int Cin,
                              int Cout) {
    linear_forward_v1_kernel<<<ceil_div(B * Cout, 8), 256, 0, device.queue>>>(out, x, weight, bias, B, Cin, Cout);
    CUDA_CHECK(cudaGetLastError());
}
#endif

#ifdef CUBLASLT
struct CublasLinear {
    CublasProduct forward, dx, dweight;

    CublasLinear(int B, int Cin, int Cout)
        : forward(B, Cout, Cin, {Element::FP32, Cin}, {Element::FP32, Cin, true}, {Element::FP32, Cout}, true),
          dx(B, Cin, Cout, {Element::FP32, Cout}, {Element::FP32, Cin}, {Element::FP32, Cin}, false),
          dweight(Cout, Cin, B, {Element::FP32, Cout, true}, {Element::FP32, Cin}, {Element::FP32, Cin}, false) {}
};
#endif

static void check(Arrays& io) {
    const int B = io.dim("x", 0), Cin = io.dim("x", 1), Cout = io.dim("weight", 0);
    const float *x = io.input<float>("x"), *weight = io.input<float>("weight"), *bias = io.input<float>("bias"),
                *dout = io.input<float>("dout");
    linear_forward(io.output<float>("out", {B, Cout}), x, weight, bias, B, Cin, Cout);
    linear_backward(io.plain_gradient("dx", {B, Cin}), io.parameter_gradient("weight"), io.parameter_gradient("bias"),
                    dout, x, weight, B, Cin, Cout);

    linear_forward_v0(io.output<float>("out.v0", {B, Cout}), x, weight, bias, B, Cin, Cout);
#ifdef __CUDACC__
    linear_forward_v1(io.output<float>("out.v1", {B, Cout}), x, weight, bias, B, Cin, Cout);
#endif
    linear_backward_v0(io.plain_gradient("dx", {B, Cin}, ".v0"), io.parameter_gradient("weight", ".v0"),
                       io.parameter_gradient("bias", ".v0"), dout, x, weight, B, Cin, Cout);
#ifdef CUBLASLT
    if (!cublas_is_checked()) return;
    const CublasLinear cublas(B, Cin, Cout);
    cublas.forward(io.output<float>("out.cublas", {B, Cout}), x, weight, bias);
    if (!io.has("dx")) cublas.dx(io.output<float>("dx.cublas", {B, Cin}), dout, weight);
    cublas.dweight(io.parameter_gradient("weight", ".cublas"), dout, x);
#endif
}

static void bench() {
    auto describe = [](const ModelLayer& m) {
        return text("B=%d Cin=%d Cout=%d", m.B, m.tensor(m.layer->x1).C, m.tensor(m.layer->out).C);
    };
    for_each_shape(LINEAR, describe, [](const ModelLayer& m, const std::string& shape) {
        const int B = m.B, Cin = m.tensor(m.layer->x1).C, Cout = m.tensor(m.layer->out).C;
        const double n = (double)Cin * Cout;
        const Work forward_work{2 * B * n, 4 * n, true},
            backward_work{4 * B * n, 8 * n, true}; // backward reads weights, writes dweight
        BenchArrays a(8 * n);
        const auto weight = a.floats((size_t)n), dweight = a.floats((size_t)n);
        const float *x = random_floats(a.memory, B * Cin), *bias = random_floats(a.memory, Cout),
                    *dout = random_floats(a.memory, B * Cout);
        float *out = a.memory.poisoned<float>(B * Cout), *dx = a.memory.poisoned<float>(B * Cin),
              *dbias = random_floats(a.memory, Cout);
        const GradOf<float> grad{dx, nullptr, nullptr};
        const bool naive = n < 2e6; // of large ones they take long
        if (naive)
            bench_row(shape, "forward.v0", forward_work, a,
                      [&](int k) { linear_forward_v0(out, x, weight[k], bias, B, Cin, Cout); });
#ifdef __CUDACC__
        if (naive)
            bench_row(shape, "forward.v1", forward_work, a,
                      [&](int k) { linear_forward_v1(out, x, weight[k], bias, B, Cin, Cout); });
#endif
        if (naive)
            bench_row(shape, "backward.v0", backward_work, a,
                      [&](int k) { linear_backward_v0(grad, dweight[k], dbias, dout, x, weight[k], B, Cin, Cout); });
        std::function<void(int)> cublas_forward, cublas_backward;
#ifdef CUBLASLT
        CublasLinear cublas(B, Cin, Cout);
        cublas.forward.tune(out, x, weight[0], bias);
        cublas.dx.tune(dx, dout, weight[0]);
        cublas.dweight.tune(dweight[0], dout, x);
        cublas_forward = [&](int k) { cublas.forward(out, x, weight[k], bias); };
        cublas_backward = [&](int k) {
            cublas.dx(dx, dout, weight[k]);
            cublas.dweight(dweight[k], dout, x);
        };
#endif
        bench_row(
            shape, "forward", forward_work, a, [&](int k) { linear_forward(out, x, weight[k], bias, B, Cin, Cout); },
            cublas_forward);
        bench_row(
            shape, "backward", backward_work, a,
            [&](int k) { linear_backward(grad, dweight[k], dbias, dout, x, weight[k], B, Cin, Cout); },
            cublas_backward);
    });
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
