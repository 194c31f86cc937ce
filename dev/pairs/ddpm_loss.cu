// ddpm_loss.cu - what a training step asks of the network: t, noise, the noisy image, and how far off the answer is.
//
//   t (B): uniform on [0, T)                              Philox(seed, TIMESTEP, step, sample); for edm ln(sigma) / 4, sigma log-normal; for flow 1000 t, t in (0, 1)
//   or with --schedule_sampler loss-second-moment in proportion to the root mean square of the latest losses of each t, which then count by 1 / (T p)
//   noise (B, H, W, C): standard normals                  Philox(seed, NOISE, step, sample), Box-Muller
//   x_0 = images / 127.5 - 1, mirrored if Philox(seed, FLIP, ...) is odd; images (B, C, H, W) uint8, or float32 taken as they are
//   x_t = sqrt(alpha_bar[t]) x_0 + sqrt(1 - alpha_bar[t]) noise                           (Ho et al. 2020, eq. 4)
//   target = noise (eps), x_0, v, edm's or flow's, see NoiseLevel: each is a mixture of x_0 and noise, and so is x_t
//   loss (B) = mean over pixels and C channels of weight (out - target)^2                 (eq. 14); out (B, H, W, Cout), Cout = 2 C with learn_sigma
//              [+ the variational bound's term, which trains the other C channels         (Nichol & Dhariwal 2021, eq. 16)]
//   dout = gradient of factor * sum(loss)
//   ect: t is a sigma, and r < t its teacher's; x_r is made of the same image and noise, target = D(x_r), as an answer at t [a sum of x_0, noise and
//   the teacher's answer, so that what both images share cancels before it is rounded];
//   loss (B) = weight (sqrt(|D(x_t) - D(x_r)|^2 + c^2) - c)                               (Geng et al. 2024)
//   bytes    9 B H W C to draw and mix, 16 B H W C for the loss: memory-bound, if the generator (ten rounds for four numbers) keeps up
//
//   version 0   the unweighted squared error as three passes: squares, which go to memory, their mean, the gradient; 28 B H W C bytes, and a sum by one thread per image
//               (H200, 64x64x3, batch 32: 0.54 ms)
//   shipped     draw_levels, q_sample_forward (which draws the noise where it mixes it), loss_forward_backward (everything in one pass), update_rms_losses;
//               for ect draw_teachers, tuning_loss_forward_backward (two passes: the slope depends on the whole sample's distance)
//
//   make -C dev ddpm_loss && dev/ddpm_loss       python dev/pairs/ddpm_loss.py [--bench]
#include "harness.h"

// squares (B, HW, C): scratch
static void mse_v0(double* loss, float* dout, float* squares, const float* out, const float* target, float factor,
                   int B, int HW, int C, int Cout) {
    const int n = HW * C;
    auto difference = [=] HD(size_t i) { return out[i / C * Cout + i % C] - target[i]; };
    each((size_t)B * n, [=] HD(size_t i) { squares[i] = difference(i) * difference(i); });
    each(B, [=] HD(size_t b) {
        double sum = 0;
        for (int i = 0; i < n; i++) sum += squares[b * n + i];
        loss[b] = sum / n;
    });
    each((size_t)B * HW * Cout, [=] HD(size_t i) {
        const size_t pixel = i / Cout, c = i % Cout;
        dout[i] = c < (size_t)C ? 2 * factor / n * difference(pixel * C + c) : 0;
    });
}

static void check(Arrays& io) {
    const bool bytes = io.in.at("images").type == "u1";
    const int B = io.dim("images", 0), C = io.dim("images", 1), H = io.dim("images", 2), W = io.dim("images", 3),
              Cout = io.dim("out", 3);
    Config config;
    config.diffusion_steps = (int)io.integer("diffusion_steps");
    config.noise_schedule = io.string("noise_schedule");
    config.objective = io.string("objective");
    config.predict = io.string("predict");
    config.learn_sigma = Cout == 2 * C;
    config.use_kl = io.integer("use_kl") != 0;
    config.vlb_weight = (float)io.real("vlb_weight");
    config.min_snr_gamma = (float)io.real("min_snr_gamma");
    config.t_mean = (float)io.real("t_mean"), config.t_std = (float)io.real("t_std");
    std::istringstream words(io.has("flags") ? io.string("flags") : ""); // name=value ...
    for (std::string word; words >> word;)
        set_flag(&config, *find_flag(word.substr(0, word.find('='))), word.substr(word.find('=') + 1));
    Objective objective = make_objective(config);
    const bool weighted = io.in.count("history");
    const int T = config.diffusion_steps;
    StepState state{};
    state.ok = 1;
    StepState* device_state = io.memory.upload(&state, 1);
    float* history = weighted ? io.updated<float>("history_out", "history") : nullptr;
    double* rms_losses = weighted ? io.output<double>("rms_losses", {T}) : nullptr;
    objective.rms_losses = rms_losses;
    if (weighted) update_rms_losses(rms_losses, history, nullptr, nullptr, device_state, T, 0);
    const int64_t step = io.integer("step"), sample0 = io.integer("sample0");
    const int64_t* device_step = io.memory.upload(&step, 1);
    auto key = [&](uint32_t purpose) { return RandomKey{(uint64_t)io.integer("seed"), purpose, device_step, sample0}; };
    objective.tuning.step = device_step;

    float *t = io.output<float>("t", {B}), *x_t = io.output<float>("x_t", {B, H, W, C}),
          *target = io.output<float>("target", {B, H, W, C});
    NoiseLevel* levels = io.memory.poisoned<NoiseLevel>(B);
    const void* images = bytes ? (const void*)io.input<uint8_t>("images") : (const void*)io.input<float>("images");
    draw_levels(levels, t, io.output<int>("quarters", {B}), B, objective, key(RANDOM_TIMESTEP));
    auto mix = [&](float* x, const NoiseLevel* at, const float* teacher) {
        q_sample_forward(x, target, at, teacher, images, io.integer("random_flip") != 0, key(RANDOM_NOISE),
                         key(RANDOM_FLIP), B, C, H, W, bytes ? 1 : 4);
    };
    const float *out = io.input<float>("out"), factor = (float)io.real("factor");
    double* loss = io.output<double>("loss", {B});
    if (objective.tuning.on()) {
        NoiseLevel* teachers = io.memory.poisoned<NoiseLevel>(B);
        draw_teachers(teachers, io.output<float>("teacher_t", {B}), B, objective, key(RANDOM_TIMESTEP));
        mix(io.output<float>("x_r", {B, H, W, C}), teachers, nullptr);
        mix(x_t, levels, io.input<float>("teacher"));
        return tuning_loss_forward_backward(loss, io.output<float>("dout", {B, H, W, C}), out, target, levels,
                                            objective.tuning.c, factor, B, H * W * C);
    }
    mix(x_t, levels, nullptr);
    loss_forward_backward(loss, io.output<float>("dout", {B, H, W, Cout}), out, target, x_t, levels, objective, factor,
                          B, H * W, C, Cout);
    if (weighted) update_rms_losses(rms_losses, history, levels, loss, device_state, T, B);
    if (objective.bound == 0 && config.min_snr_gamma == 0 && !weighted)
        mse_v0(io.output<double>("loss.v0", {B}), io.output<float>("dout.v0", {B, H, W, Cout}),
               io.memory.poisoned<float>((size_t)B * H * W * C), out, target, factor, B, H * W, C, Cout);
    if (objective.levels) device_free((void*)objective.levels);
}

static void bench() {
    const int64_t zero = 0;
    for (const BenchModel& model : bench_models()) {
        const Config& c = model.net.config;
        const int B = model.B, C = c.in_channels, HW = c.H * c.W;
        const size_t n = (size_t)B * HW * C;
        const Work mix_work{0, 9.0 * n}, mse_work{0, 12.0 * n};
        BenchArrays a(12.0 * n);
        const Objective objective = make_objective(c);
        NoiseLevel* levels = a.memory.poisoned<NoiseLevel>(B);
        int* quarters = a.memory.poisoned<int>(B);
        const int64_t* step = a.memory.upload(&zero, 1);
        float *t = a.memory.poisoned<float>(B), *squares = random_floats(a.memory, n);
        const auto x_t = a.floats(n), target = a.floats(n), dout = a.floats(n), out = a.floats(n);
        const uint8_t* images = a.memory.poisoned<uint8_t>(n);
        double* loss = a.memory.poisoned<double>(B);
        const RandomKey key{0, RANDOM_NOISE, step, 0};
        const std::string shape = text("B=%d H=%d W=%d C=%d", B, c.H, c.W, C);
        draw_levels(levels, t, quarters, B, objective, key);
        bench_row(shape, "q_sample", mix_work, a, [&](int k) {
            q_sample_forward(x_t[k], target[k], levels, nullptr, images, true, key, key, B, C, c.H, c.W, 1);
        });
        bench_row(shape, "mse.v0", mse_work, a,
                  [&](int k) { mse_v0(loss, dout[k], squares, out[k], target[k], 1, B, HW, C, C); });
        bench_row(shape, "mse", mse_work, a, [&](int k) {
            loss_forward_backward(loss, dout[k], out[k], target[k], x_t[k], levels, objective, 1, B, HW, C, C);
        });
        const Work tuning_work{0, 20.0 * n};
        bench_row(shape, "tuning", tuning_work, a, [&](int k) {
            tuning_loss_forward_backward(loss, dout[k], out[k], target[k], levels, 0, 1, B, HW * C);
        });
        device_free((void*)objective.levels);
    }
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
