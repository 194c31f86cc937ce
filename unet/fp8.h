// fp8.h - FP8 in the plan: which convolutions, buffers, factors, weights.
#pragma once
#include "trainer.h"

// Fills the members of LayerArgs (a) that are for FP8. Only convolutions and norms use them.
static void add_fp8_args(auto* a, const UNet* net, const Fp8Weights& fp8, const Layer& layer) {
    const Tensor out = net->tensor(layer.out);
    if (layer.fp8) {
        const size_t bias = net->params[layer.weight + 1].offset;
        a->weight_fp8 = (const act*)(fp8.weights + net->params[layer.weight].offset);
        a->factors_fp8 = fp8.factors + bias;
    }
    if (layer.fp8_gradient && fp8.turned) {
        a->turned_fp8 = (const act*)(fp8.turned + net->params[layer.weight].offset);
        a->dx_factors_fp8 = fp8.dx_factors;
    }
    if (out.fp8) { // the layer is a norm; its factor lies in fp8.factors, at the place of its weight
        const float* const factor = fp8.factors + net->params[layer.weight].offset;
        a->out_fp8 = {(uint8_t*)a->out, factor};
    }
    auto gradient = [&](int buffer) { return Fp8Copy{buffer_data<uint8_t>(net, buffer), fp8.gradient_factor}; };
    a->dout_fp8 = gradient(layer.dout_fp8);
    a->d1_fp8 = gradient(layer.d1.fp8);
    a->d2_fp8 = gradient(layer.d2.fp8);
}

// How many 3x3 convolutions at each end of the network do not multiply in FP8, neither in the forward pass nor for
// their weight gradients. The results of training suffer most if these operands are rounded (docs/LEARNT.md).
constexpr int FP8_SPARED = 4;

// Chooses the 3x3 convolutions that multiply in FP8. All have stride 1 and do not enlarge their input
// (hopper_conv_fp8).
//   fp8            The forward product and the weight gradient are in FP8. The convolution reads the result of a group
//                  norm, whose values are about 1, so one factor is right for all of them. The norm itself writes FP8.
//   fp8_gradient   In training, the input gradient is computed in FP8. One factor is right for the gradients of all
//                  layers (choose_gradient_factor). The first convolution has no input gradient. The last one has few
//                  output channels, and their gradient is fp32.
// What is rounded in training:
//
//   what                  format   its factor               rounded by                         undone by
//   output of a norm: x   e4m3     FP8_X_FACTOR             store_out, in the norm's kernel    factors
//   weights               e4m3     FP8_WEIGHT_FACTOR        round_weights, once a step         factors, dx_factors
//   gradients: dout       e5m2     choose_gradient_factor   store_gradient_fp8, in the norm's  dx_factors
//                                                           kernels; else round_gradient
static void choose_fp8(UNet* net) {
    std::vector<Layer*> convs; // all 3x3 convolutions, from the first to the last
    for (Layer& l : net->layers)
        if (l.kind == &CONV && l.kernel == 3) convs.push_back(&l);
    const int last = (int)convs.size() - FP8_SPARED;
    for (int i = 1; i + 1 < (int)convs.size(); i++) {
        Layer& conv = *convs[i];
        const auto writer = std::ranges::find(net->layers, conv.x1, &Layer::out);
        const bool reads_norm = writer != net->layers.end() && writer->kind == &GROUPNORM;
        // The smallest network has 12 convolutions of 3x3. Even there, 4 are not spared.
        const bool is_spared = i < FP8_SPARED || i >= last;
        conv.fp8_gradient = conv.stride == 1 && !conv.upsample;
        conv.fp8 = conv.fp8_gradient && reads_norm && !is_spared;
    }
}

// The memory of inputs that convolutions read in FP8. A norm writes such an input either in FP8 or in the activations'
// type. In training the buffer stays as large as without FP8, because validation and grids use it without FP8.
static void plan_fp8(UNet* net, bool training) {
    for (const Layer& conv : net->layers) {
        if (!conv.fp8) continue;
        Tensor& x = net->tensors[conv.x1];
        x.fp8 = true;
        if (training) continue;
        x.element = Element::FP8;
        net->buffers[x.buffer].bytes = (size_t)x.H * x.W * x.C * bytes_of(Element::FP8);
    }
}

// Plans a buffer for the FP8 copy of each output gradient from which a convolution computes its input gradient. If the
// backward function of a norm writes the gradient, it also writes the copy. Otherwise unet_backward makes it
// (round_gradient), before the convolution's weight gradient, which may read it, too.
static void plan_fp8_gradients(UNet* net) {
    for (Layer& conv : net->layers) {
        if (!conv.fp8_gradient || conv.dout < 0) continue;
        const Tensor& out = net->tensors[conv.out];
        conv.dout_fp8 = add_buffer(net, (size_t)out.H * out.W * out.C * bytes_of(Element::FP8_GRADIENT));
        conv.rounds_dout = true;
        for (Layer& l : net->layers) {
            if (l.kind != &GROUPNORM) continue;
            for (GradPlan* g : {&l.d1, &l.d2}) {
                if (g->d != conv.dout) continue;
                if (g->fp8 >= 0) die("internal error: two convolutions read one gradient in FP8");
                g->fp8 = conv.dout_fp8;
                conv.rounds_dout = false;
            }
        }
    }
}

// --sample: the factor that a group norm's output is multiplied by before it is rounded to FP8. weight, bias: the
// norm's parameters, of n channels. The norm's values have a standard deviation of 1 before they are multiplied by
// weight and bias is added, so |weight| + |bias| estimates the size of a channel's output. Single values are larger,
// and the embedding may scale them. So 32 times the largest estimate still fits in FP8. Small values keep their
// precision, because FP8 is a floating-point format. The factor is a power of 2, so multiplying by it rounds nothing.
static float fp8_factor(const float* weight, const float* bias, int n) {
    float size = 0;
    for (int c = 0; c < n; c++) size = std::max(size, std::fabs(weight[c]) + std::fabs(bias[c]));
    if (size == 0) return 1;
    int exponent;
    // 2^(exponent - 1) is the largest power of 2 that does not exceed the quotient
    std::frexp(E4M3.largest / 32.0 / size, &exponent);
    return (float)std::ldexp(1.0, exponent - 1);
}

// --sample: the weights of the convolutions that read FP8. What belongs to a parameter lies at Param::offset:
//   weights   the rounded weights. Those of an output channel are first divided by a scale, so that the largest
//             |weight| becomes FP8's largest number
//   factors   plain_size floats. At a norm's first weight: the norm's factor. At a convolution's biases: scale divided
//             by the factor of the norm that it reads. The sums of products are multiplied by it, which undoes both
static Fp8Weights make_fp8_weights(const UNet& net, const std::vector<float>& flat) {
    if (net.config.precision != "fp8") return {};
    std::vector<uint8_t> weights(net.flat_size);
    std::vector<float> factors(net.plain_size);
    for (const Layer& conv : net.layers) {
        if (!conv.fp8) continue;
        const Layer& norm = *std::ranges::find(net.layers, conv.x1, &Layer::out);
        const Param* const norm_params = &net.params[norm.weight]; // [0]: the norm's weight, [1]: its bias
        const Param* const conv_params = &net.params[conv.weight]; // [0]: the weight, [1]: the bias
        const int channels = norm_params->shape[0];
        const float factor = fp8_factor(&flat[norm_params[0].offset], &flat[norm_params[1].offset], channels);
        factors[norm_params->offset] = factor;

        const int outputs = conv_params->shape[0];
        const size_t inputs = conv_params->size / outputs; // weights of an output channel, over all taps
        for (int c = 0; c < outputs; c++) {
            const size_t row = conv_params->offset + c * inputs;
            float largest = 0;
            for (size_t i = row; i < row + inputs; i++) largest = std::max(largest, std::fabs(flat[i]));
            const float scale = largest > 0 ? largest / E4M3.largest : 1;
            for (size_t i = row; i < row + inputs; i++) weights[i] = fp8_bits(flat[i] / scale);
            factors[conv_params[1].offset + c] = scale / factor;
        }
    }
    return {device_copy(weights), device_copy(factors)};
}

// How large gradients of the network's output may usually become, in units of 1 / n. n is how many numbers a batch of
// images has. If the loss is a mean of n squares of errors of about 1, the result is 1. It is only an estimate.
static double usual_gradient(const Config& c) {
    if (c.objective != "ect") {
        // The bound is multiplied by its weight and by diffusion_steps / log 2 (make_objective), and so are its
        // gradients.
        double bound = 0;
        if (c.use_kl) bound = 1;
        else if (c.learned_variance()) bound = c.vlb_weight;
        return std::max(1.0, bound * c.diffusion_steps / std::log(2.0));
    }
    // The loss of a sample is its weight times a distance, not a mean. If the network's answer changes by a vector, the
    // distance changes by at most |x0_out| times the vector's length. So the length of the gradient is at most weight
    // |x0_out|, and each of its C H W numbers is about that / sqrt(C H W). In the gradient of a mean, each is about
    // 1 / (C H W).
    const double length = std::sqrt((double)c.H * c.W * c.in_channels);
    // gap: weight |x0_out| is at most q^a, because t - r is at least t / q^a (teacher_sigma), and |x0_out| is at most
    // t.
    // snr: it is about 1 / t if t is small. Of a thousand t that are drawn, about one is below smallest_t.
    const double last_a = 1 + (double)c.last_ect_stage();
    const double smallest_t = std::exp((double)c.P_mean - 3 * (double)c.P_std);
    return length * (c.ect_weight == "gap" ? std::pow((double)c.ect_q, last_a) : 1 / smallest_t);
}

// Training: the factor that gradients are multiplied by before they are rounded to FP8. For a mean of squares it is at
// most 256 n, and e5m2's largest number is 57344, so gradients up to 224 / n fit. It depends only on the configuration.
// So it is the same on all ranks, in all microbatches, and after a run is resumed.
static float choose_gradient_factor(const Config& c) {
    const double n = (double)c.batch_size * c.H * c.W * c.in_channels;
    return (float)std::ldexp(1.0, 8 + std::ilogb(n / usual_gradient(c)));
}

// Training: memory for the convolutions' weights in FP8, which each step writes (round_weights), and all factors, which
// never change. `factors` is laid out as in make_fp8_weights. dx_factors undo the scaling of input gradients.
static Fp8Weights make_fp8_training(const UNet& net) {
    if (net.config.precision != "fp8") return {};
    std::vector<float> factors(net.plain_size);
    int most = 0; // the largest number of input channels
    for (const Layer& conv : net.layers) {
        if (conv.fp8_gradient) most = std::max(most, net.tensors[conv.x1].C);
        if (!conv.fp8) continue;
        const Layer& norm = *std::ranges::find(net.layers, conv.x1, &Layer::out);
        factors[net.params[norm.weight].offset] = FP8_X_FACTOR;
        const Param& bias = net.params[conv.weight + 1];
        std::fill_n(&factors[bias.offset], bias.size, 1 / (FP8_X_FACTOR * FP8_WEIGHT_FACTOR));
    }
    const float factor = choose_gradient_factor(net.config);
    const std::vector<float> dx_factors(most, 1 / (factor * FP8_WEIGHT_FACTOR));
    return {.weights = device_alloc<uint8_t>(net.flat_size),
            .factors = device_copy(factors),
            .turned = device_alloc<uint8_t>(net.flat_size),
            .gradient_factor = device_copy(std::vector<float>{factor}),
            .dx_factors = device_copy(dx_factors)};
}

// The weights that round_weights rounds. All convolutions that multiply in FP8 in the forward pass are among them.
static std::vector<WeightRounding> weights_to_round(const UNet& net) {
    std::vector<WeightRounding> works;
    for (const Layer& conv : net.layers) {
        if (!conv.fp8_gradient) continue;
        const size_t offset = net.params[conv.weight].offset;
        works.push_back({offset, net.tensors[conv.out].C, net.tensors[conv.x1].C, !conv.fp8});
    }
    return works;
}
