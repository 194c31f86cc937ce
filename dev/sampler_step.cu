// sampler_step.cu - one step from x_t towards x_0, given the network's answer. All samplers are one formula with other coefficients, a row per step:
//
//   x0 = clip(x0_x x - x0_eps eps),  eps' = (x0_x x - x0) / x0_eps,  x = next_x0 x0 + next_x x + next_eps eps' + sigma z
//   ddpm   next_x0, next_x: the mean of q(x_s | x_t, x0); sigma^2 = beta                  (Ho et al. 2020, eq. 7)
//   ddim   next_x0 = sqrt(alpha_bar_s), next_eps = sqrt(1 - alpha_bar_s - sigma^2)        (Song et al. 2021, eq. 12)
//   x (B, HW, C) in place; out (B, HW, Cout), eps its first C channels; z from Philox(seed, SAMPLE_NOISE, k, image), k = steps taken so far
//   bytes    12 B HW C: memory-bound, and nothing beside the network's forward pass
//
//   version 0   ddpm as the paper writes it, from alpha_bar, in double, with the noise in memory; NAME.py has ddim's
//   shipped     draw_normals (x_T), sampler_timesteps, sampler_step, and next_step to count: no number comes from the host in between
//
//   make -C dev sampler_step && dev/sampler_step       python dev/sampler_step.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "harness.h"

// alpha_bar_t, alpha_bar_s: of this step and of the next, z: noise, or null in the last step
static void ddpm_step_v0(float* x, const float* eps, double alpha_bar_t, double alpha_bar_s, bool clip, const float* z, size_t n) {
    const double alpha = alpha_bar_t / alpha_bar_s, beta = 1 - alpha;
    each(n, [=] HD(size_t i) {
        double x0 = (x[i] - sqrt(1 - alpha_bar_t) * eps[i]) / sqrt(alpha_bar_t);
        if (clip) x0 = fmin(fmax(x0, -1.0), 1.0);
        const double mean = (sqrt(alpha_bar_s) * beta * x0 + sqrt(alpha) * (1 - alpha_bar_s) * x[i]) / (1 - alpha_bar_t);
        x[i] = (float)(mean + (z ? sqrt(beta) * z[i] : 0));
    });
}

// Each step of the sampler from an x of its own, so that errors do not add up: x (K, B, H, W, C), out (K, B, H, W, Cout).
static void check(Arrays& io) {
    const int K = io.dim("x", 0), B = io.dim("x", 1), H = io.dim("x", 2), W = io.dim("x", 3), C = io.dim("x", 4), Cout = io.dim("out", 4);
    const size_t n = (size_t)B * H * W * C, n_out = (size_t)B * H * W * Cout;
    Config config;
    config.diffusion_steps = (int)io.integer("diffusion_steps");
    config.noise_schedule = io.string("noise_schedule");
    config.sampler = io.string("sampler");
    config.timestep_respacing = io.string("timestep_respacing");
    config.eta = (float)io.real("eta");
    const bool clip = io.integer("clip") != 0;
    const std::vector<SamplerStep> steps = sampler_steps(config);
    if ((int)steps.size() != K) die("%zu steps, expected %d", steps.size(), K);

    const int64_t zero = 0, sample0 = io.integer("sample0");
    const uint64_t seed = (uint64_t)io.integer("seed");
    int64_t *k = io.memory.upload(&zero, 1), *device_zero = io.memory.upload(&zero, 1);
    const SamplerStep* device_steps = io.memory.upload(steps.data(), steps.size());
    draw_normals(io.output<float>("start", {B, H, W, C}), B, H * W * C, RandomKey{seed, RANDOM_SAMPLE_START, device_zero, sample0});
    float *x = io.updated<float>("next", "x"), *t = io.output<float>("t", {K, B});
    const float* out = io.input<float>("out");
    for (int i = 0; i < K; i++) {
        sampler_timesteps(t + i * B, device_steps, k, B);
        sampler_step(x + i * n, out + i * n_out, device_steps, clip, RandomKey{seed, RANDOM_SAMPLE_NOISE, k, sample0}, B, H * W, C, Cout);
        next_step(k);
    }

    if (config.sampler != "ddpm" || Cout != C) return;
    const std::vector<double> alpha_bar = alpha_bars(config);
    float *x0 = io.updated<float>("next.v0", "x"), *z = io.memory.poisoned<float>(n);
    for (int64_t i = 0; i < K; i++) {
        const bool last = i + 1 == K;
        draw_normals(z, B, H * W * C, RandomKey{seed, RANDOM_SAMPLE_NOISE, io.memory.upload(&i, 1), sample0});
        ddpm_step_v0(x0 + i * n, out + i * n, alpha_bar[(int)steps[i].t], last ? 1 : alpha_bar[(int)steps[i + 1].t], clip, last ? nullptr : z, n);
    }
}

static void bench() {
    const int64_t zero = 0;
    for (const BenchModel& model : bench_models()) {
        const Config& c = model.net.config;
        const int B = model.B, C = c.in_channels, HW = c.H * c.W;
        const size_t n = (size_t)B * HW * C;
        const Work work{0, 12.0 * n};
        BenchArrays a(work.bytes);
        const std::vector<SamplerStep> steps = sampler_steps(c);
        const SamplerStep* device_steps = a.memory.upload(steps.data(), steps.size());
        const int64_t* step = a.memory.upload(&zero, 1);
        const auto x = a.floats(n), out = a.floats(n);
        const float* z = random_floats(a.memory, n);
        const std::string shape = text("B=%d HW=%d C=%d", B, HW, C);
        bench_row(shape, "step.v0", work, a, [&](int k) { ddpm_step_v0(x[k], out[k], 0.5, 0.6, true, z, n); });
        bench_row(shape, "step", work, a, [&](int k) {
            sampler_step(x[k], out[k], device_steps, true, RandomKey{0, RANDOM_SAMPLE_NOISE, step, 0}, B, HW, C, C);
        });
    }
}

int main(int argc, char** argv) {
    return pair_main(argc, argv, check, bench);
}
