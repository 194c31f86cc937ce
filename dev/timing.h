// timing.h - what the GPU could do at most, and a launch that does nothing: for harness.h and bench.cu, behind train_unet.cu.
#pragma once

#ifdef __CUDACC__
// What an H200 was seen to reach: a copy in bytes/s, matrix products of 8192^3 in FLOP/s.
constexpr double CEILING_BYTES = 4.27e12, CEILING_BF16 = 787e12, CEILING_FP32 = 51e12;

static void do_nothing() { // in a launch of its own
    launch(nothing_kernel, 1, 32, 0);
}
#else
constexpr double CEILING_BYTES = 0, CEILING_BF16 = 0, CEILING_FP32 = 0; // not known
static void do_nothing() {}
#endif
