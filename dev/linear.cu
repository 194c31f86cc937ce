// linear.cu - fully connected layer on embeddings: the time embedding's two layers and the projections of all residual blocks (one matrix).
//
//   out (B, Cout) = x (B, Cin) weight (Cout, Cin)^T + bias (Cout);  dx = dout weight,  dweight += dout^T x,  dbias += column sums of dout
//   FLOPs    2 B Cin Cout for each of the three products
//   bytes    4 Cin Cout, each weight is used B times only: memory-bound, in fp32 in every build, and far too small to matter on a CPU
//
//   version 0   a dot product per output; backward: the same loop nest, scattering
//   shipped     linear_forward, linear_backward
//
//   make -C dev linear && dev/linear       python dev/linear.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "harness.h"

static void linear_forward_v0(float* out, const float* x, const float* weight, const float* bias, int B, int Cin, int Cout) {
    for (int b = 0; b < B; b++)
        for (int o = 0; o < Cout; o++) {
            float sum = bias[o];
            for (int i = 0; i < Cin; i++) sum += x[b * Cin + i] * weight[o * Cin + i];
            out[b * Cout + o] = sum;
        }
}

static void linear_backward_v0(float* dx, float* dweight, float* dbias, const float* dout, const float* x, const float* weight, int B, int Cin,
                               int Cout) {
    for (int i = 0; i < B * Cin; i++) dx[i] = 0;
    for (int b = 0; b < B; b++)
        for (int o = 0; o < Cout; o++) {
            const float d = dout[b * Cout + o];
            dbias[o] += d;
            for (int i = 0; i < Cin; i++) {
                dx[b * Cin + i] += d * weight[o * Cin + i];
                dweight[o * Cin + i] += d * x[b * Cin + i];
            }
        }
}

static void check(Arrays& io) {
    const int B = io.dim("x", 0), Cin = io.dim("x", 1), Cout = io.dim("weight", 0);
    const float *x = io.input<float>("x"), *weight = io.input<float>("weight"), *bias = io.input<float>("bias"), *dout = io.input<float>("dout");
    linear_forward(io.output<float>("out", {B, Cout}), x, weight, bias, B, Cin, Cout);
    linear_backward(io.plain_gradient("dx", {B, Cin}), io.updated<float>("dweight", "dweight"), io.updated<float>("dbias", "dbias"), dout, x, weight,
                    B, Cin, Cout);

    linear_forward_v0(io.host_output("out.v0", {B, Cout}), io.host("x"), io.host("weight"), io.host("bias"), B, Cin, Cout);
    if (io.has("dx")) return; // an addend: the naive version knows none
    linear_backward_v0(io.host_output("dx.v0", {B, Cin}), io.host_updated("dweight.v0", "dweight"), io.host_updated("dbias.v0", "dbias"),
                       io.host("dout"), io.host("x"), io.host("weight"), B, Cin, Cout);
}

static void bench() {
    auto describe = [](const ModelLayer& m) { return text("B=%d Cin=%d Cout=%d", m.B, m.tensor(m.layer->x1).C, m.tensor(m.layer->out).C); };
    for_each_shape(LINEAR, describe, [](const ModelLayer& m, const std::string& shape) {
        const int B = m.B, Cin = m.tensor(m.layer->x1).C, Cout = m.tensor(m.layer->out).C;
        const size_t nw = (size_t)Cin * Cout;
        Memory memory;
        const float *x = random_floats(memory, B * Cin), *weight = random_floats(memory, nw), *bias = random_floats(memory, Cout),
                    *dout = random_floats(memory, B * Cout);
        float *out = memory.poisoned<float>(B * Cout), *dx = memory.poisoned<float>(B * Cin), *dweight = random_floats(memory, nw),
              *dbias = random_floats(memory, Cout);
        const std::vector<float> hx = random_values(B * Cin), hw = random_values(nw), hb = random_values(Cout);
        std::vector<float> host_out(B * Cout);
        const double flop = 2.0 * B * nw;
        bench_row(shape, "forward.v0", flop, 4.0 * nw, [&] { linear_forward_v0(host_out.data(), hx.data(), hw.data(), hb.data(), B, Cin, Cout); });
        bench_row(shape, "forward", flop, 4.0 * nw, [&] { linear_forward(out, x, weight, bias, B, Cin, Cout); });
        bench_row(shape, "backward", 2 * flop, 8.0 * nw, [&] {
            linear_backward(GradOf<float>{dx, nullptr, nullptr}, dweight, dbias, dout, x, weight, B, Cin, Cout);
        });
    });
}

int main(int argc, char** argv) {
    return pair_main(argc, argv, check, bench);
}
