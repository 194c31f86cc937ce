// sampler_step.cu - one step from x_t towards x_0, given the network's answer. All samplers are one formula with other coefficients, a row per step:
//
//   x0 = limit(x0_x x + x0_out out),  x' = next_x x + next_x0 x0 + next_m m + sigma z,  m' = m_x x + m_x0 x0
//   x (B, HW, C) in place; out (B, HW, Cout), of which C channels are the answer; z from Philox(seed, SAMPLE_NOISE, k, image), k = steps so far
//   The rows come from plan_sampler in train_unet.cu: ddpm, ddim, euler, heun, dpmpp_2m. Where the file has a mixture of normal
//   distributions instead of answers, its denoiser, known in closed form, stands for the network and whole samples are drawn.
//   keep_known, with --inpaint, after a step: x = known_x image + known_sigma z where mask <= 0; x' = back_x x + back_sigma z
//   bytes    12 B HW C: memory-bound, and nothing beside the network's forward pass
//
//   version 0   ddpm as the paper writes it, from alpha_bar, in double, with the noise in memory; NAME.py has ddim's
//   shipped     draw_normals (x_T), sampler_timesteps, sampler_step, and next_step to count: no number comes from the host in between
//
//   make -C dev sampler_step && dev/sampler_step       python dev/pairs/sampler_step.py [--bench]
#include "harness.h"

// alpha_bar_t, alpha_bar_s: of this step and of the next, z: noise, or null in the last step
static void ddpm_step_v0(float* x, const float* eps, double alpha_bar_t, double alpha_bar_s, bool clip, const float* z,
                         size_t n) {
    const double alpha = alpha_bar_t / alpha_bar_s, beta = 1 - alpha;
    each(n, [=] HD(size_t i) {
        double x0 = (x[i] - sqrt(1 - alpha_bar_t) * eps[i]) / sqrt(alpha_bar_t);
        if (clip) x0 = fmin(fmax(x0, -1.0), 1.0);
        const double mean =
            (sqrt(alpha_bar_s) * beta * x0 + sqrt(alpha) * (1 - alpha_bar_s) * x[i]) / (1 - alpha_bar_t);
        x[i] = (float)(mean + (z ? sqrt(beta) * z[i] : 0));
    });
}

// Each step of the sampler from an x of its own, so that errors do not add up: x (K, B, H, W, C), out (K, B, H, W, Cout). With guidance both hold
// 2 B samples.
static void check_steps(Arrays& io, const Config& config, const SamplerPlan& plan) {
    const int K = io.dim("x", 0), B = io.dim("x", 1) / (config.guided() ? 2 : 1), H = io.dim("x", 2),
              W = io.dim("x", 3), C = io.dim("x", 4), Cout = io.dim("out", 4);
    const size_t n = (size_t)io.dim("x", 1) * H * W * C, n_out = (size_t)io.dim("x", 1) * H * W * Cout;
    const std::vector<SamplerStep>& steps = plan.steps;
    const bool clip = io.integer("clip") != 0;
    const int rank = (int)io.integer("rank");
    const Denoising denoising{clip || rank >= 0, config.guided(), rank, io.memory.poisoned<float>(B), nullptr};
    if ((int)steps.size() != K) die("%zu steps, expected %d", steps.size(), K);

    const int64_t zero = 0, sample0 = io.integer("sample0");
    const uint64_t seed = (uint64_t)io.integer("seed");
    int64_t *k = io.memory.upload(&zero, 1), *device_zero = io.memory.upload(&zero, 1);
    const SamplerStep* device_steps = io.memory.upload(steps.data(), steps.size());
    draw_normals(io.output<float>("start", {B, H, W, C}), B, H * W * C,
                 RandomKey{seed, RANDOM_SAMPLE_START, device_zero, sample0});
    float *x = io.updated<float>("next", "x"), *t = io.output<float>("t", {K, B});
    const float* out = io.input<float>("out");
    for (int i = 0; i < K; i++) {
        sampler_timesteps(t + i * B, device_steps, k, B);
        sampler_step(x + i * n, out + i * n_out, device_steps, denoising,
                     RandomKey{seed, RANDOM_SAMPLE_NOISE, k, sample0}, B, H * W, C, Cout);
        next_step(k);
    }

    const bool v0_can = config.sampler == "ddpm" && config.predict == "eps" && !config.sigma_small && !config.guided();
    if (!v0_can || Cout != C || rank >= 0) return;
    const std::vector<double> alpha_bar = alpha_bars(config);
    float *x0 = io.updated<float>("next.v0", "x"), *z = io.memory.poisoned<float>(n);
    for (int64_t i = 0; i < K; i++) {
        const bool last = i + 1 == K;
        draw_normals(z, B, H * W * C, RandomKey{seed, RANDOM_SAMPLE_NOISE, io.memory.upload(&i, 1), sample0});
        ddpm_step_v0(x0 + i * n, out + i * n, alpha_bar[(int)steps[i].t], last ? 1 : alpha_bar[(int)steps[i + 1].t],
                     clip, last ? nullptr : z, n);
    }
}

// D(x; sigma) = E[x_0 | x_0 + sigma noise = x] of an image x (n), x_0 from K normal distributions: weight (K), mean (K, n), deviation (K).
static std::vector<double> mixture_denoiser(const std::vector<double>& x, double sigma, const float* weight,
                                            const float* mean, const float* deviation, size_t K) {
    const size_t n = x.size();
    std::vector<double> log_p(K), x0(n);
    double total = 0;
    for (size_t k = 0; k < K; k++) {
        const double variance = (double)deviation[k] * deviation[k] + sigma * sigma;
        log_p[k] = std::log((double)weight[k]) - 0.5 * (double)n * std::log(variance);
        for (size_t i = 0; i < n; i++) log_p[k] -= 0.5 * std::pow(x[i] - mean[k * n + i], 2) / variance;
    }
    const double most = *std::max_element(log_p.begin(), log_p.end());
    for (size_t k = 0; k < K; k++) {
        const double p = std::exp(log_p[k] - most), own = (double)deviation[k] * deviation[k];
        total += p;
        for (size_t i = 0; i < n; i++)
            x0[i] += p * (mean[k * n + i] + own / (own + sigma * sigma) * (x[i] - mean[k * n + i]));
    }
    for (double& v : x0) v /= total;
    return x0;
}

// Samples (B, n) by the shipped operations, where a network would be, an exact one: it sees its input and t, as any network. "noise": what the
// first x is made of.
static void check_mixture(Arrays& io, const Config& config, const SamplerPlan& plan) {
    const int B = (int)io.integer("B"), n = io.dim("mean", 1);
    const int64_t zero = 0, one = 1;
    const uint64_t seed = (uint64_t)io.integer("seed");
    int64_t *k = io.memory.upload(&zero, 1), *device_zero = io.memory.upload(&zero, 1),
            *device_one = io.memory.upload(&one, 1);
    const SamplerStep* steps = io.memory.upload(plan.steps.data(), plan.steps.size());
    float *x = io.output<float>("samples", {B, n}), *noise = io.output<float>("noise", {B, n}),
          *t = io.memory.poisoned<float>(B);
    const Denoising denoising{false, false, -1, nullptr, io.memory.poisoned<float>((size_t)B * n)};
    const RandomKey start{seed, RANDOM_SAMPLE_START, device_zero, 0}, churn{seed, RANDOM_SAMPLE_START, device_one, 0};
    draw_normals(noise, B, n, start);
    draw_normals(x, B, n, start, plan.start);
    if (plan.churn > 0) draw_normals(x, B, n, churn, plan.churn, true);
    const std::vector<double> alpha_bar = alpha_bars(config);
    auto log_sigma_at = [&](size_t i) { return 0.5 * std::log(1 / alpha_bar[i] - 1); };
    for (size_t step = 0; step < plan.steps.size(); step++) {
        sampler_timesteps(t, steps, k, B);
        const double told = download(t, 1)[0], data = config.sigma_data;
        const size_t i = std::min((size_t)told, alpha_bar.size() - 2);
        const bool edm = config.objective == "edm", flow = config.objective == "flow";
        const double sigma =
            flow ? told / (1000 - told)
                 : std::exp(edm ? 4 * told
                                : log_sigma_at(i) + (told - (double)i) * (log_sigma_at(i + 1) - log_sigma_at(i)));
        const double total = std::hypot(sigma, data), signal = flow ? 1 / (1 + sigma) : 1 / std::hypot(sigma, 1.0);
        const std::vector<float> input = download(x, (size_t)B * n);
        std::vector<float> answers(input.size());
        for (int b = 0; b < B; b++) {
            std::vector<double> noisy(n);
            for (int e = 0; e < n; e++) noisy[e] = input[(size_t)b * n + e] / (edm ? 1 / total : signal);
            const std::vector<double> x0 = mixture_denoiser(noisy, sigma, io.host("weight"), io.host("mean"),
                                                            io.host("deviation"), io.dim("mean", 0));
            for (int e = 0; e < n; e++) {
                const double eps = (noisy[e] - x0[e]) / sigma;
                answers[(size_t)b * n + e] =
                    (float)(edm    ? (x0[e] - data * data / (total * total) * noisy[e]) * total / (sigma * data)
                            : flow ? eps - x0[e]
                            : config.predict == "x0" ? x0[e]
                            : config.predict == "v"  ? signal * eps - signal * sigma * x0[e]
                                                     : eps);
            }
        }
        sampler_step(x, io.memory.upload(answers.data(), answers.size()), steps, denoising,
                     RandomKey{seed, RANDOM_SAMPLE_NOISE, k, 0}, B, 1, n, n);
        next_step(k);
    }
}

// keep_known after step 1 of 2: x, image, mask (B, n).
static void check_known(Arrays& io) {
    const int B = io.dim("mask", 0), n = io.dim("mask", 1);
    SamplerStep steps[2]{};
    steps[1].known_x = (float)io.real("known_x"), steps[1].known_sigma = (float)io.real("known_sigma");
    steps[1].back_x = (float)io.real("back_x"), steps[1].back_sigma = (float)io.real("back_sigma");
    const int64_t one = 1;
    const RandomKey key{(uint64_t)io.integer("seed"), RANDOM_KNOWN_NOISE, io.memory.upload(&one, 1),
                        io.integer("sample0")};
    keep_known(io.updated<float>("next", "x"), io.input<float>("image"), io.input<float>("mask"),
               io.memory.upload(steps, 2), key, io.integer("guided") != 0, B, n);
}

static void check(Arrays& io) {
    if (io.has("mask")) return check_known(io);
    Config config;
    std::istringstream words(io.string("flags")); // name=value ...
    for (std::string word; words >> word;)
        set_flag(&config, *find_flag(word.substr(0, word.find('='))), word.substr(word.find('=') + 1));
    const SamplerPlan plan = plan_sampler(config);
    if (io.has("mean")) check_mixture(io, config, plan);
    else check_steps(io, config, plan);
}

static void bench() {
    const int64_t zero = 0;
    for (const BenchModel& model : bench_models()) {
        const Config& c = model.net.config;
        const int B = model.B, C = c.in_channels, HW = c.H * c.W;
        const size_t n = (size_t)B * HW * C;
        const Work work{0, 12.0 * n};
        BenchArrays a(work.bytes);
        const std::vector<SamplerStep> steps = plan_sampler(c).steps;
        const SamplerStep* device_steps = a.memory.upload(steps.data(), steps.size());
        const int64_t* step = a.memory.upload(&zero, 1);
        const auto x = a.floats(n), out = a.floats(n);
        const float* z = random_floats(a.memory, n);
        const std::string shape = text("B=%d HW=%d C=%d", B, HW, C);
        bench_row(shape, "step.v0", work, a, [&](int k) { ddpm_step_v0(x[k], out[k], 0.5, 0.6, true, z, n); });
        bench_row(shape, "step", work, a, [&](int k) {
            sampler_step(x[k], out[k], device_steps, Denoising{true, false, -1, nullptr, nullptr},
                         RandomKey{0, RANDOM_SAMPLE_NOISE, step, 0}, B, HW, C, C);
        });
    }
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
