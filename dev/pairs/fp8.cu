// fp8.cu - what training in FP8 rounds in kernels of its own: weights (e4m3, in two orders) and gradients (e5m2). (Norms write their outputs in FP8
// themselves: groupnorm.cu.)
//
//   weights (Cout, 9, Cin)       = e4m3(128 w)
//   turned  (Cin, 9, Cout)       = the same numbers: turned[ci, 8 - tap, co] = weights[co, tap, ci]. Of the second convolution they are made alone
//   out     (n)                  = e5m2(factor dout)
//   bytes    weights: 2 w read, 2 written; gradients: 2 n read, n written
//
//   version 0   a number at a time: neighbouring threads write turned weights Cout numbers apart, or read them so
//   shipped     round_weights: tiles of 64 x 64 go through shared memory, and one launch rounds all layers. round_gradient: 16 numbers to a thread
//
//   make -C dev fp8 && dev/fp8       python dev/pairs/fp8.py [--bench]
#include "harness.h"

static void check(Arrays& io) {
    const size_t n = count_of(io.get("flat", "f4").dims);
    const std::vector<WeightRounding> works = {
        {(size_t)io.integer("offset1"), (int)io.integer("Cout1"), (int)io.integer("Cin1")},
        {(size_t)io.integer("offset2"), (int)io.integer("Cout2"), (int)io.integer("Cin2"), true},
    };
    // The bytes themselves are compared. Where nothing is written, 255 stays.
    auto output = [&](const char* name, size_t count) {
        uint8_t* const bytes = io.memory.poisoned<uint8_t>(count);
        io.out.push_back({name, [=] {
                              const std::vector<uint8_t> codes = download(bytes, count);
                              return Arrays::packed(std::vector<float>(codes.begin(), codes.end()), {(int)count});
                          }});
        return bytes;
    };
    uint8_t *const weights = output("weights", n), *const turned = output("turned", n);
    round_weights(weights, turned, io.activation("flat"), works);
    const size_t gradients = count_of(io.get("gradient", "f4").dims);
    const float factor = (float)io.real("factor");
    round_gradient({output("rounded", gradients), io.memory.upload(&factor, 1)}, io.activation("gradient"), gradients);
}

static void bench() {
    for (const int C : {192, 384, 768}) {
        const size_t n = (size_t)C * 9 * C;
        const std::string shape = text("Cout=%d Cin=%d", C, C);
        BenchArrays a((act_bytes() + 2.0) * n);
        const auto copy = a.activation(n);
        const auto bytes = a.copy([&] { return a.memory.poisoned<uint8_t>(2 * n); });
        const std::vector<WeightRounding> works = {{0, C, C}};
        bench_row(shape, "weights", Work{0, (act_bytes() + 2.0) * n}, a,
                  [&](int k) { round_weights(bytes[k], bytes[k] + n, copy[k], works); });
    }
    for (const int side : {8, 64}) {
        const size_t n = (size_t)32 * side * side * 192;
        BenchArrays a((act_bytes() + 1.0) * n);
        const auto dout = a.activation(n);
        const auto bytes = a.copy([&] { return a.memory.poisoned<uint8_t>(n); });
        const float one = 1;
        const float* const factor = a.memory.upload(&one, 1);
        bench_row(text("n=%zu", n), "gradient", Work{0, (act_bytes() + 1.0) * n}, a, [&](int k) {
            round_gradient({bytes[k], factor}, dout[k], n);
        });
    }
}

int main(int argc, char** argv) { return pair_main(argc, argv, check, bench); }
