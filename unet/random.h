// random.h - every draw is a pure function of (seed, purpose, step, sample).
#pragma once
#include "elements.h"

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//   key = seed, counter = (quartet, sample, step, purpose)
// A quartet is a group of four random words that are drawn together. The counter holds its number within the sample.
// Philox has no state, so any step of any run can be reproduced alone.

// What is drawn, the last word of the counter. For dropout this word also contains the residual block's index, from bit
// 8 on. common/random_numbers.py has the same numbers. All draws depend on them, so append new purposes at the end.
enum RandomPurpose : uint32_t {
    RANDOM_INIT = 0,
    RANDOM_TIMESTEP,
    RANDOM_NOISE,
    RANDOM_FLIP,
    RANDOM_ORDER, // the order of the images
    RANDOM_DROPOUT,
    RANDOM_SAMPLE_START, // the noise that a sampler begins with
    RANDOM_SAMPLE_NOISE, // the noise that a sampler adds in its steps
    RANDOM_VAL_TIMESTEP,
    RANDOM_VAL_NOISE,
    RANDOM_CLASS_DROPOUT,
    RANDOM_KNOWN_NOISE, // --inpaint: the noise on the part of the image that is known
    RANDOM_BACK_NOISE,  // --inpaint: the noise that leads back to an earlier step
    RANDOM_AUGMENT,
    RANDOM_COND_DROPOUT,
    RANDOM_COND_NOISE, // the noise on a small picture (--cond lowres)
    RANDOM_MASK,       // the holes of --cond mask
    RANDOM_HELD_OUT,   // the images of --val_fraction
};

struct Words {
    uint32_t w[4];
};

// Returns four random words of 32 bits.
HD static inline Words philox(uint64_t seed, uint32_t quartet, uint32_t sample, uint32_t step, uint32_t purpose) {
    Words c{{quartet, sample, step, purpose}};
    uint32_t key0 = (uint32_t)seed;
    uint32_t key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = 0xD2511F53ull * c.w[0];
        const uint64_t product1 = 0xCD9E8D57ull * c.w[2];
        const uint32_t high0 = (uint32_t)(product0 >> 32);
        const uint32_t high1 = (uint32_t)(product1 >> 32);
        c = {{high1 ^ c.w[1] ^ key0, (uint32_t)product1, high0 ^ c.w[3] ^ key1, (uint32_t)product0}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

// Makes four standard normal numbers of four random words (Box & Muller 1958). Each pair u, v in (0, 1) gives
//   sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v)
// u and v are multiples of 2^-24, which fp32 holds without rounding. So a GPU and a CPU compute with the same u and v.
// Their results agree to 1e-6.
HD static inline void normals(float z[4], const Words& r) {
    for (int k = 0; k < 4; k += 2) {
        const float u = ((r.w[k] >> 9) + 0.5f) * 0x1p-23f;
        const float v = ((r.w[k + 1] >> 9) + 0.5f) * 0x1p-23f;
#ifdef __CUDA_ARCH__
        float sine, cosine;
        const float radius = sqrtf(-2 * logf(u));
        sincospif(2 * v, &sine, &cosine);
#else
        const double radius = std::sqrt(-2 * std::log((double)u));
        const double angle = 2 * M_PI * v;
        const double sine = std::sin(angle);
        const double cosine = std::cos(angle);
#endif
        z[k] = (float)(radius * cosine);
        z[k + 1] = (float)(radius * sine);
    }
}

// Something is left out with probability p if its random word is below this threshold.
HD static inline uint32_t dropout_threshold(float p) { return (uint32_t)((double)p * 4294967296.0); }

// In each epoch the images 0 to n - 1 are in another order. Returns the number of the image at position pos. A Feistel
// network of four rounds permutes the numbers of 2 * half_bits bits: it mixes the left half of a number with a random
// function of the right half, and exchanges the halves. If the result is not below n, it is permuted again.
static inline int64_t permuted_index(uint64_t seed, int64_t pos, int64_t epoch, int64_t n,
                                     RandomPurpose purpose = RANDOM_ORDER) {
    int half_bits = 1; // how many bits a half has: two halves must be able to hold all numbers below n
    while ((int64_t)1 << 2 * half_bits < n) half_bits++;
    const uint32_t mask = (1u << half_bits) - 1;
    int64_t x = pos;
    do {
        uint32_t left = (uint32_t)(x >> half_bits);
        uint32_t right = (uint32_t)x & mask;
        for (uint32_t round = 0; round < 4; round++) {
            const Words random = philox(seed, right, round, (uint32_t)epoch, purpose);
            const uint32_t mixed = left ^ (random.w[0] & mask);
            left = right;
            right = mixed;
        }
        x = (int64_t)left << half_bits | right;
    } while (x >= n);
    return x;
}
