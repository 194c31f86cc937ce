// augment.cu - a training image is flipped, scaled, turned, stretched and shifted, and the network is told how (--augment, Karras et al. 2022).
//
//   out (B, C, H, W): the image, at twice the resolution by the filter sym6, read between four pixels at A (x, y) + b, and halved by the same filter
//   told (B, 9): the numbers of the change, behind whatever else an image's row has
//   bytes    16 B C (H + 6) (W + 6) for the canvas, written and read once; 49 pixels of the image and 144 of the canvas a value come from caches
//
//   version 0   each value of the result by itself: 144 values of the canvas, of which none is kept
//   shipped     augment_images: three launches, for the draws, for the canvas, for the result
//
//   make -C dev augment && dev/augment       python dev/pairs/augment.py [--bench]
#include "harness.h"

static void augment_images_v0(float* out, const Augmentation* drawn, const float* images, int B, int C, int H, int W) {
    each((size_t)B * C * H * W, [=] HD(size_t i) {
        const size_t plane = i / ((size_t)H * W);
        const int y = i / W % H, x = i % W;
        float sum = 0;
        for (int k = 0; k < FILTER * FILTER; k++) {
            const int fine_y = 2 * y + 1 + k / FILTER, fine_x = 2 * x + 1 + k % FILTER;
            const float* channel = images + plane * H * W;
            const CanvasPlace place = canvas_place(drawn[plane / C], fine_y, fine_x, H, W);
            const float value = canvas_value(place, channel, sizeof(float), W);
            sum += sym6(k / FILTER) * sym6(k % FILTER) * value;
        }
        out[i] = sum;
    });
}

static void check(Arrays& io) {
    const int B = io.dim("images", 0), C = io.dim("images", 1), H = io.dim("images", 2), W = io.dim("images", 3);
    const int own = (int)io.integer("own"), stride = own + AUGMENT_NUMBERS;
    const float p = io.integer("percent") / 100.0f;
    const int64_t step = io.integer("step");
    const RandomKey key{(uint64_t)io.integer("seed"), RANDOM_AUGMENT, io.memory.upload(&step, 1),
                        io.integer("sample0")};
    Augmentation* const drawn = io.memory.poisoned<Augmentation>(B);
    float* const canvas = io.memory.poisoned<float>((size_t)B * C * fine_size(H) * fine_size(W));
    float* const told = io.updated<float>("told", "start");
    augment_images(io.output<float>("out", {B, C, H, W}), drawn, canvas, told + own, stride, io.input<float>("images"),
                   p, key, B, C, H, W, sizeof(float));
    augment_images_v0(io.output<float>("out.v0", {B, C, H, W}), drawn, io.input<float>("images"), B, C, H, W);
    augment_images(io.output<float>("out_bytes", {B, C, H, W}), drawn, canvas, told + own, stride,
                   io.input<uint8_t>("bytes"), p, key, B, C, H, W, 1);
}

static void bench() {
    const int B = 32, C = 3, H = 64;
    const size_t n = (size_t)B * C * H * H, fine = (size_t)B * C * fine_size(H) * fine_size(H);
    const Work work{2 * (fine * 56.0 + n * 156.0), 8.0 * n + 8.0 * fine, true};
    BenchArrays a(work.bytes);
    const auto images = a.floats(n), out = a.floats(n), canvas = a.floats(fine);
    Augmentation* const drawn = a.memory.poisoned<Augmentation>(B);
    float* const told = a.memory.poisoned<float>(B * AUGMENT_NUMBERS);
    const int64_t zero = 0;
    const RandomKey key{0, RANDOM_AUGMENT, a.memory.upload(&zero, 1), 0};
    const std::string shape = text("B=%d H=%d W=%d C=%d", B, H, H, C);
    auto shipped = [&](int k) {
        augment_images(out[k], drawn, canvas[k], told, AUGMENT_NUMBERS, images[k], 0.12f, key, B, C, H, H, 4);
    };
    bench_row(shape, "forward", work, a, shipped);
    bench_row(shape, "forward.v0", work, a, [&](int k) { augment_images_v0(out[k], drawn, images[k], B, C, H, H); });
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
