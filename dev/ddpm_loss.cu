// ddpm_loss.cu - what a training step asks of the network: t, noise, the noisy image, and how far off the answer is.
//
//   t (B): uniform on [0, T)                              Philox(seed, TIMESTEP, step, sample)
//   noise (B, H, W, C): standard normals                  Philox(seed, NOISE, step, sample), Box-Muller
//   x_0 = images / 127.5 - 1, mirrored if Philox(seed, FLIP, ...) is odd; images (B, C, H, W) uint8, or float32 taken as they are
//   x_t = sqrt(alpha_bar[t]) x_0 + sqrt(1 - alpha_bar[t]) noise                           (Ho et al. 2020, eq. 4)
//   loss (B) = mean over pixels and C channels of (out - noise)^2                         (eq. 14); out (B, H, W, Cout), Cout = 2 C with learn_sigma
//   dout = gradient of factor * sum(loss)
//   bytes    9 B H W C to draw and mix, 16 B H W C for the loss: memory-bound, if the generator (ten rounds for four numbers) keeps up
//
//   version 0   the loss as three passes: squares, which go to memory, their mean, the gradient; 28 B H W C bytes, and a sum by one thread per image
//               (H200, 64x64x3, batch 32: 0.54 ms)
//   shipped     draw_timesteps, q_sample_forward (which draws the noise where it mixes it), mse_forward_backward (everything in one pass)
//
//   make -C dev ddpm_loss && dev/ddpm_loss       python dev/ddpm_loss.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "harness.h"

// squares (B, HW, C): scratch
static void mse_v0(double* loss, float* dout, float* squares, const float* out, const float* noise, float factor, int B, int HW, int C, int Cout) {
    const int n = HW * C;
    auto difference = [=] HD(size_t i) { return out[i / C * Cout + i % C] - noise[i]; };
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
    const int B = io.dim("images", 0), C = io.dim("images", 1), H = io.dim("images", 2), W = io.dim("images", 3), Cout = io.dim("out", 3);
    Config config;
    config.diffusion_steps = (int)io.integer("diffusion_steps");
    config.noise_schedule = io.string("noise_schedule");
    const Diffusion diffusion = make_diffusion(config);
    const int64_t step = io.integer("step"), sample0 = io.integer("sample0");
    const int64_t* device_step = io.memory.upload(&step, 1);
    auto key = [&](uint32_t purpose) { return RandomKey{(uint64_t)io.integer("seed"), purpose, device_step, sample0}; };

    float *t = io.output<float>("t", {B}), *x_t = io.output<float>("x_t", {B, H, W, C}), *noise = io.output<float>("noise", {B, H, W, C});
    const void* images = bytes ? (const void*)io.input<uint8_t>("images") : (const void*)io.input<float>("images");
    draw_timesteps(t, B, config.diffusion_steps, key(RANDOM_TIMESTEP));
    q_sample_forward(x_t, noise, t, images, diffusion.signal, diffusion.sigma, io.integer("random_flip") != 0, key(RANDOM_NOISE), key(RANDOM_FLIP),
                     ImageShape{B, C, H, W, bytes ? 1 : 4});
    const float *out = io.input<float>("out"), factor = (float)io.real("factor");
    mse_forward_backward(io.output<double>("loss", {B}), io.output<float>("dout", {B, H, W, Cout}), out, noise, factor, B, H * W, C, Cout);
    mse_v0(io.output<double>("loss.v0", {B}), io.output<float>("dout.v0", {B, H, W, Cout}), io.memory.poisoned<float>((size_t)B * H * W * C), out,
           noise, factor, B, H * W, C, Cout);
    device_free(diffusion.signal);
    device_free(diffusion.sigma);
}

static void bench() {
    const int64_t zero = 0;
    for (const BenchModel& model : bench_models()) {
        const Config& c = model.net.config;
        const int B = model.B, C = c.in_channels, HW = c.H * c.W;
        const size_t n = (size_t)B * HW * C;
        const Work mix_work{0, 9.0 * n}, mse_work{0, 12.0 * n};
        BenchArrays a(12.0 * n);
        const Diffusion diffusion = make_diffusion(c);
        const int64_t* step = a.memory.upload(&zero, 1);
        float *t = a.memory.poisoned<float>(B), *squares = random_floats(a.memory, n);
        const auto x_t = a.floats(n), noise = a.floats(n), dout = a.floats(n), out = a.floats(n);
        const uint8_t* images = a.memory.poisoned<uint8_t>(n);
        double* loss = a.memory.poisoned<double>(B);
        const RandomKey key{0, RANDOM_NOISE, step, 0};
        const std::string shape = text("B=%d H=%d W=%d C=%d", B, c.H, c.W, C);
        draw_timesteps(t, B, c.diffusion_steps, key);
        bench_row(shape, "q_sample", mix_work, a, [&](int k) {
            q_sample_forward(x_t[k], noise[k], t, images, diffusion.signal, diffusion.sigma, true, key, key, ImageShape{B, C, c.H, c.W, 1});
        });
        bench_row(shape, "mse.v0", mse_work, a, [&](int k) { mse_v0(loss, dout[k], squares, out[k], noise[k], 1, B, HW, C, C); });
        bench_row(shape, "mse", mse_work, a, [&](int k) { mse_forward_backward(loss, dout[k], out[k], noise[k], 1, B, HW, C, C); });
        device_free(diffusion.signal);
        device_free(diffusion.sigma);
    }
}

int main(int argc, char** argv) {
    return pair_main(argc, argv, check, bench);
}
