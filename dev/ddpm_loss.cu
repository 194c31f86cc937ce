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
//   shipped     draw_timesteps, q_sample_forward, mse_forward_backward. No naive version: in ddpm_loss.py each is one line
//
//   make -C dev ddpm_loss && dev/ddpm_loss       python dev/ddpm_loss.py [--bench]
#define TRAIN_UNET_NO_MAIN
#include "../train_unet.cu"
#include "harness.h"

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
    mse_forward_backward(io.output<double>("loss", {B}), io.output<float>("dout", {B, H, W, Cout}), io.input<float>("out"), noise,
                         (float)io.real("factor"), B, H * W, C, Cout);
    device_free(diffusion.signal);
    device_free(diffusion.sigma);
}

static void bench() {
    const int64_t zero = 0;
    for (const BenchModel& model : bench_models()) {
        const Config& c = model.net.config;
        const int B = model.B, C = c.in_channels, HW = c.H * c.W;
        const size_t n = (size_t)B * HW * C;
        Memory memory;
        const Diffusion diffusion = make_diffusion(c);
        const int64_t* step = memory.upload(&zero, 1);
        float *t = memory.poisoned<float>(B), *x_t = memory.poisoned<float>(n), *noise = memory.poisoned<float>(n), *dout = memory.poisoned<float>(n);
        const float* out = random_floats(memory, n);
        const uint8_t* images = memory.poisoned<uint8_t>(n);
        double* loss = memory.poisoned<double>(B);
        const RandomKey key{0, RANDOM_NOISE, step, 0};
        const std::string shape = text("B=%d H=%d W=%d C=%d", B, c.H, c.W, C);
        draw_timesteps(t, B, c.diffusion_steps, key);
        bench_row(shape, "q_sample", 0, 9.0 * n, [&] {
            q_sample_forward(x_t, noise, t, images, diffusion.signal, diffusion.sigma, true, key, key, ImageShape{B, C, c.H, c.W, 1});
        });
        bench_row(shape, "mse", 0, 12.0 * n, [&] { mse_forward_backward(loss, dout, out, noise, 1, B, HW, C, C); });
        device_free(diffusion.signal);
        device_free(diffusion.sigma);
    }
}

int main(int argc, char** argv) {
    return pair_main(argc, argv, check, bench);
}
