// block.h - what resblock.cu and attention_block.cu share: the parameters of a layer inside a block, from a file or random.
#pragma once
#include "harness.h"

struct ConvParams {
    const act* weight = nullptr; // null: there is no such layer
    const float* bias = nullptr;
    float *dweight = nullptr, *dbias = nullptr;
};

struct NormParams {
    const float *weight, *bias;
    float *dweight, *dbias;
};

static ConvParams conv_params(Arrays& io, const std::string& name) {
    if (!io.has(name + ".weight")) return ConvParams{};
    return ConvParams{io.activation(name + ".weight"), io.input<float>(name + ".bias"),
                      io.parameter_gradient(name + ".weight"), io.parameter_gradient(name + ".bias")};
}

// Also of a linear layer, whose weights are fp32 in every build.
static NormParams norm_params(Arrays& io, const std::string& name) {
    return NormParams{io.input<float>(name + ".weight"), io.input<float>(name + ".bias"),
                      io.parameter_gradient(name + ".weight"), io.parameter_gradient(name + ".bias")};
}

static ConvParams random_conv_params(Memory& memory, int Cin, int Cout, int kernel) {
    const size_t n = (size_t)Cout * Cin * kernel * kernel;
    return ConvParams{random_activation(memory, n), random_floats(memory, Cout), random_floats(memory, n),
                      random_floats(memory, Cout)};
}

static NormParams random_norm_params(Memory& memory, size_t weights, size_t biases) {
    return NormParams{random_floats(memory, weights), random_floats(memory, biases), random_floats(memory, weights),
                      random_floats(memory, biases)};
}

// What a group norm keeps for its backward pass.
struct NormSaved {
    float *mean, *rstd;
};

static NormSaved norm_saved(Memory& memory, int B) {
    return NormSaved{memory.poisoned<float>(B * 32), memory.poisoned<float>(B * 32)};
}
