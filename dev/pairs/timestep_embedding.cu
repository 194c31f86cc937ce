// timestep_embedding.cu - what the network knows of t (and of the class, and of numbers): sinusoids, and what is added to them two layers later.
//
//   out (B, dim) = [cos(t f_i) | sin(t f_i)], f_i = max_period^(-i / (dim / 2)), i < dim / 2       no gradient: t is not learned
//   label: out (B, C) = x + table[label];  dx = dout, dtable[label] = the sum of dout (two samples of one class add up; a row without any is 0)
//   values: out (B, C) = x + values (B, K) weight (C, K)^T;  dx = dout, dweight = dout^T values (the values are given)
//   A few thousand numbers per step; what matters is that t f_i, up to 1000 radians, does not lose digits: half an ulp of 1000 is 3e-5.
//   (unet.cu's Python half broadcasts (B,) against (1, half) and makes one wrong embedding of 32; see ../shared/ANCHORS.md.)
//
//   version 0   everything in float, as PyTorch's code does it
//   shipped     timestep_embedding_forward: f_i rounded to float, the product and its sine in double; label_embedding_forward and _backward,
//               values_embedding_forward and _backward: a thread for an element, which sums in the order of k or of the samples
//
//   make -C dev timestep_embedding && dev/timestep_embedding       python dev/pairs/timestep_embedding.py [--bench]
#include "harness.h"

static void timestep_embedding_forward_v0(float* out, const float* t, int B, int dim, int max_period) {
    const int half = dim / 2;
    const float log_period = logf((float)max_period);
    each((size_t)B * half, [=] HD(size_t i) {
        const size_t b = i / half, k = i % half;
        const float angle = t[b] * expf(-log_period * (float)k / (float)half);
        out[b * dim + k] = cosf(angle);
        out[b * dim + half + k] = sinf(angle);
    });
}

static void check(Arrays& io) {
    const int B = io.dim("t", 0), dim = (int)io.integer("dim"), max_period = (int)io.integer("max_period"),
              C = io.dim("x", 1);
    const float* t = io.input<float>("t");
    timestep_embedding_forward(io.output<float>("sinusoids", {B, dim}), t, B, dim, max_period);
    timestep_embedding_forward_v0(io.output<float>("sinusoids.v0", {B, dim}), t, B, dim, max_period);

    const int* labels = io.input<int>("labels");
    label_embedding_forward(io.output<float>("out", {B, C}), io.input<float>("x"), io.input<float>("table"), labels, B,
                            C);
    label_embedding_backward(io.plain_gradient("dx", {B, C}), io.parameter_gradient("table"), io.input<float>("dout"),
                             labels, B, io.dim("table", 0), C);

    const int K = io.dim("values", 1);
    const float *values = io.input<float>("values"), *x2 = io.input<float>("x2"), *dout2 = io.input<float>("dout2");
    values_embedding_forward(io.output<float>("out2", {B, C}), x2, io.input<float>("weight"), values, B, K, C);
    values_embedding_backward(io.plain_gradient("dx2", {B, C}), io.parameter_gradient("weight"), dout2, values, B, K,
                              C);
}

static void bench() {
    auto describe = [](const ModelLayer& m) { return text("B=%d dim=%d", m.B, m.tensor(m.layer->out).C); };
    for_each_shape(TIMESTEP, describe, [](const ModelLayer& m, const std::string& shape) {
        const int B = m.B, dim = m.tensor(m.layer->out).C;
        const Work work{0, 4.0 * B * dim};
        BenchArrays a(work.bytes);
        const float* t = random_floats(a.memory, B);
        const auto out = a.floats((size_t)B * dim);
        bench_row(shape, "forward.v0", work, a,
                  [&](int k) { timestep_embedding_forward_v0(out[k], t, B, dim, 10000); });
        bench_row(shape, "forward", work, a, [&](int k) { timestep_embedding_forward(out[k], t, B, dim, 10000); });
    });
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
