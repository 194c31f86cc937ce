// patches.cu - the way into a network and out of it: a picture beside the image (--cond_channels), and squares of p x p
// pixels as channels of one, and back (--patch_size p).
//
//   joined[b, y, x] = [x[b, y, x] | cond[b, y, x]], C + K channels, fp32
//   taken[b, y, x, k] = pictures[b, k, y, x], which are bytes or floats, mirrored where the image is; zeros where left out
//   made of the images (--cond): small, means of squares, with noise, and large, these enlarged as F.interpolate does it;
//   grey; holed, with rectangles and strokes left out, and one more channel that says where
//   out[b, y, x, (c p + i) p + j] = x[b, y p + i, x p + j, c], PyTorch's pixel_unshuffle, fp32;  back: pixel_shuffle
//   bytes    8 B H W C each way: memory-bound; an image has 3 channels where the network's first level has 32 or more
//
//   version 0   a number of the result at a time
//   shipped     to_patches, from_patches: a number of the pixels at a time, the same both ways; join_channels,
//               take_pictures, shrink_images, enlarge_pictures, grey_images: a number of the result at a time; mask_images:
//               a pixel
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
    const RandomKey key{(uint64_t)io.integer("seed"), 0, io.memory.upload(&step, 1), io.integer("sample0")};
    const PictureDraws training{key, true, 0.4f, 0.5f}, plain{key};
    const float* const pictures = io.input<float>("pictures");
    const uint8_t* const bytes = io.input<uint8_t>("bytes");
    take_pictures(io.output<float>("taken", {B, H, W, K}), pictures, training, B, K, H, W, sizeof(float));
    take_pictures(io.output<float>("taken_bytes", {B, H, W, K}), bytes, plain, B, K, H, W, 1);

    float* const small = io.output<float>("small", {B, H / p, W / p, K});
    float* const small_bytes = io.output<float>("small_bytes", {B, H / p, W / p, K});
    shrink_images(small, pictures, p, training, B, K, H, W, sizeof(float));
    enlarge_pictures(io.output<float>("large", {B, H, W, K}), small, p, training, B, K, H, W);
    shrink_images(small_bytes, bytes, p, plain, B, K, H, W, 1);
    enlarge_pictures(io.output<float>("large_bytes", {B, H, W, K}), small_bytes, p, plain, B, K, H, W);
    grey_images(io.output<float>("grey", {B, H, W, 1}), io.input<float>("colours"), training, B, H, W, sizeof(float));
    mask_images(io.output<float>("holed", {B, H, W, K + 1}), pictures, training, B, K, H, W, sizeof(float));
    mask_images(io.output<float>("holed_bytes", {B, H, W, K + 1}), bytes, plain, B, K, H, W, 1);
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
