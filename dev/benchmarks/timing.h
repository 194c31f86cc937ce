// timing.h - what the GPU could do at most, a launch that does nothing, and BENCH_WITHOUT: for harness.h and bench.cu, behind train_unet.cu.
#pragma once
#include <sstream>

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

// BENCH_WITHOUT=early,graphs: what Allowed calls so is not done. For tests, before the device starts.
static void leave_out() {
    const std::map<std::string, bool*> names = {{"early", &allowed.early},       {"beside", &allowed.beside},
                                                {"batches", &allowed.batches},   {"graphs", &allowed.graphs},
                                                {"clusters", &allowed.clusters}, {"hopper", &allowed.hopper}};
    const char* const list = getenv("BENCH_WITHOUT");
    std::istringstream words(list ? list : "");
    for (std::string word; std::getline(words, word, ',');) {
        if (!names.count(word)) die("BENCH_WITHOUT: there is no %s", word.c_str());
        *names.at(word) = false;
    }
}
