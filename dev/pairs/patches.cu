// patches.cu - squares of p x p pixels as channels of one, and back: the way into and out of a network of --patch_size p.
//
//   out[b, y, x, (c p + i) p + j] = x[b, y p + i, x p + j, c], PyTorch's pixel_unshuffle, fp32;  back: pixel_shuffle
//   bytes    8 B H W C each way: memory-bound; an image has 3 channels where the network's first level has 32 or more
//
//   version 0   a number of the result at a time
//   shipped     to_patches, from_patches: a number of the pixels at a time, the same both ways
//
//   make -C dev patches && dev/patches       python dev/pairs/patches.py [--bench]
#include "harness.h"

static void to_patches_v0(float* out, const float* x, int B, int H, int W, int C, int p) {
    const size_t h = H / p, w = W / p;
    each((size_t)B * H * W * C, [=] HD(size_t n) {
        const size_t j = n % p, i = n / p % p, c = n / p / p % C, place = n / p / p / C;
        out[n] = x[(((place / w / h * H) + place / w % h * p + i) * W + place % w * p + j) * C + c];
    });
}

static void check(Arrays& io) {
    const int B = io.dim("x", 0), H = io.dim("x", 1), W = io.dim("x", 2), C = io.dim("x", 3), p = io.dim("patch", 0);
    const float *x = io.input<float>("x"), *patches = io.input<float>("patches");
    to_patches(io.output<float>("out", {B, H / p, W / p, C * p * p}), x, B, H, W, C, p);
    to_patches_v0(io.output<float>("out.v0", {B, H / p, W / p, C * p * p}), x, B, H, W, C, p);
    from_patches(io.output<float>("back", {B, H, W, C}), patches, B, H, W, C, p);
}

static void bench() {
    const int B = 32, H = 256, C = 3, p = 2;
    const size_t n = (size_t)B * H * H * C;
    const Work work{0, 8.0 * n};
    BenchArrays a(work.bytes);
    const auto x = a.floats(n), out = a.floats(n);
    const std::string shape = text("B=%d H=%d W=%d C=%d p=%d", B, H, H, C, p);
    bench_row(shape, "forward.v0", work, a, [&](int k) { to_patches_v0(out[k], x[k], B, H, H, C, p); });
    bench_row(shape, "forward", work, a, [&](int k) { to_patches(out[k], x[k], B, H, H, C, p); });
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
