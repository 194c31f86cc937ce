// patches.cu - the way into a network and out of it: a picture beside the image (--cond_channels), and squares of p x p
// pixels as channels of one, and back (--patch_size p).
//
//   joined[b, y, x] = [x[b, y, x] | cond[b, y, x]], C + K channels, fp32
//   taken[b, y, x, k] = pictures[b, k, y, x], which are bytes or floats, mirrored where the image is; zeros where left out
//   out[b, y, x, (c p + i) p + j] = x[b, y p + i, x p + j, c], PyTorch's pixel_unshuffle, fp32;  back: pixel_shuffle
//   bytes    8 B H W C each way: memory-bound; an image has 3 channels where the network's first level has 32 or more
//
//   version 0   a number of the result at a time
//   shipped     to_patches, from_patches: a number of the pixels at a time, the same both ways; join_channels and
//               take_pictures: a number of the result at a time
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

    const int K = io.dim("cond", 3);
    join_channels(io.output<float>("joined", {B, H, W, C + K}), x, io.input<float>("cond"), B, H * W, C, K);
    const int64_t step = io.integer("step");
    RandomKey flip{(uint64_t)io.integer("seed"), RANDOM_FLIP, io.memory.upload(&step, 1), io.integer("sample0")};
    RandomKey dropout = flip;
    dropout.purpose = RANDOM_COND_DROPOUT;
    take_pictures(io.output<float>("taken", {B, H, W, K}), io.input<float>("pictures"), true, flip, 0.4f, dropout, B, K,
                  H, W, sizeof(float));
    take_pictures(io.output<float>("taken_bytes", {B, H, W, K}), io.input<uint8_t>("bytes"), false, flip, 0, dropout, B,
                  K, H, W, 1);
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
