// copies.h - how many samples are copies of training images.
#pragma once
#include "../data.h"
#include "../host/png.h"

// A sample is a copy of an image if the root of their mean square difference over pixels and channels is below this, in
// 255ths. common/samples.py has the same number.
constexpr int COPY = 16;
// Samples are not compared with data of more bytes than this, so that it takes a few seconds at most.
constexpr size_t MOST_COMPARED = (size_t)256 << 20;
static bool is_compared(const Dataset& d) { return d.count * d.image_bytes() <= MOST_COMPARED; }

// Returns whether one of two images of n values is a copy of the other. Most pairs are told apart early.
static bool is_copy(const uint8_t* a, const uint8_t* b, size_t n) {
    constexpr size_t PIECE = 256; // without a question in between, so that the compiler adds up vectors
    const uint64_t limit = (uint64_t)COPY * COPY * n;
    uint64_t sum = 0;
    for (size_t first = 0; first < n && sum < limit; first += PIECE) {
        uint32_t squares = 0;
        for (size_t i = first; i < std::min(first + PIECE, n); i++) squares += (a[i] - b[i]) * (a[i] - b[i]);
        sum += squares;
    }
    return sum < limit;
}

// Returns how many of the samples (n, H, W, C) are copies of images of d, or -1 if d has too many bytes or can't be
// read (d->error). mirrors: samples that are copies of mirrored images count, too.
static int count_copies(Dataset* d, const std::vector<float>& samples, bool mirrors) {
    if (!is_compared(*d)) return -1;
    const size_t size = (size_t)d->C * d->H * d->W;
    const int n = (int)(samples.size() / size);
    std::vector<uint8_t> levels; // the samples as (C, H, W), which data files have, and then the mirrored ones
    for (int mirrored = 0; mirrored <= mirrors; mirrored++)
        for (size_t e = 0; e < n * size; e++) {
            const size_t row = e / d->W % d->H;
            const size_t column = mirrored ? d->W - 1 - e % d->W : e % d->W;
            const size_t channel = e / d->W / d->H % d->C;
            const size_t pixel = (e / size * d->H + row) * d->W + column;
            levels.push_back(pixel_level(samples[pixel * d->C + channel]));
        }
    std::vector<bool> found(n);
    std::vector<uint8_t> values(d->image_bytes()), image(size);
    for (int64_t i = 0; i < d->count; i++) {
        if (!read_image(d, i, values.data())) return -1;
        for (size_t e = 0; e < size; e++)
            image[e] = d->bytes == 1 ? values[e] : pixel_level(image_value(values.data(), d->bytes, e));
        for (size_t k = 0; k < levels.size() / size; k++)
            found[k % n] = found[k % n] || is_copy(&levels[k * size], image.data(), size);
    }
    return (int)std::ranges::count(found, true);
}
