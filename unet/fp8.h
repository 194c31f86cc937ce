// fp8.h - FP8 in the plan: which convolutions, buffers, factors, weights.
#pragma once
#include "trainer.h"

// Fills the members of LayerArgs that are for FP8. Only convolutions and norms use them.
static void add_fp8_args(LayerArgs* a, const Walk& walk, const Layer& layer) {
    const UNet* const net = walk.net;
    const Fp8Weights& fp8 = walk.weights.fp8;
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

// --precision fp8: how many 3x3 convolutions at each end of the network do not multiply in FP8 in the forward pass.
// Their weight gradients are not in FP8 either. The results of training suffer most if the operands of these
// convolutions are rounded to FP8 (docs/LEARNT.md).
constexpr int FP8_SPARED = 4;

// --precision fp8: chooses the 3x3 convolutions that multiply in FP8. All of them have stride 1 and do not enlarge
// their input (conv_product_fp8 needs both). The function sets two members of Layer:
//   fp8            The forward product is in FP8, and so is the weight gradient. The convolution reads the result of a
//                  group norm. Such a result is a tensor of values of about 1, so one factor is right for all of them.
//                  The norm itself can write FP8. (make_fp8_weights and make_fp8_training look for that norm.)
//   fp8_gradient   In training, the input gradient is computed in FP8, from the gradient of the convolution's output.
//                  One factor is right for the gradients of all layers (choose_gradient_factor). Input gradients in FP8
//                  did no damage, even at the ends of the network (docs/LEARNT.md). Only the first and the last
//                  convolution are left out. The first one has no input gradient. The last one has few output channels,
//                  and their gradient is fp32.
// All other tensors, among them the convolutions' results, keep their element. What is rounded in training:
//
//   what                  format   its factor               rounded by                         undone by
//   output of a norm: x   e4m3     FP8_X_FACTOR             store_out, in the norm's kernel    factors
//   weights               e4m3     FP8_WEIGHT_FACTOR        round_weights, once a step         factors, dx_factors
//   gradients: dout       e5m2     choose_gradient_factor   store_gradient_fp8, in the norm's  dx_factors
//                                                           kernels; else round_gradient
//
// The sums of the products are multiplied by factors (in the forward pass) or by dx_factors (make_fp8_training).
// conv_weight_fp8 divides a weight gradient by the factors of x and dout.
static void choose_fp8(UNet* net) {
    std::vector<Layer*> convs; // all 3x3 convolutions, from the first to the last
    for (Layer& l : net->layers)
        if (l.kind == &CONV && l.kernel == 3) convs.push_back(&l);
    const int last = (int)convs.size() - FP8_SPARED;
    for (int i = 1; i + 1 < (int)convs.size(); i++) {
        Layer& conv = *convs[i];
        const auto writer = std::ranges::find(net->layers, conv.x1, &Layer::out);
        const bool reads_norm = writer != net->layers.end() && writer->kind == &GROUPNORM;
        // The smallest network has 12 convolutions of 3x3. Even there, 4 are not spared, 3 of them in middle_block. So
        // every network has convolutions that multiply in FP8.
        const bool is_spared = i < FP8_SPARED || i >= last;
        conv.fp8_gradient = conv.stride == 1 && !conv.upsample;
        conv.fp8 = conv.fp8_gradient && reads_norm && !is_spared;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --- FP8: its buffers, its factors, and weights in FP8
// --precision fp8: plans the memory of the inputs that convolutions read in FP8. A group norm makes such an input, and
// writes either FP8 or the activations' type, never both. When sampling, the input's buffer has one byte for each
// number. In training the buffer stays as large as without FP8, because validation and grids compute without FP8, with
// the same buffers.
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

// --precision fp8, in training: some convolutions compute their input gradient from an FP8 copy of the gradient of
// their output. This function plans a buffer for each such FP8 copy. If the backward function of a group norm writes
// the gradient of the convolution's output, it also writes the FP8 copy. Otherwise unet_backward makes the copy
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

// --sample with --precision fp8: returns the factor that a group norm's output is multiplied by before it is rounded to
// FP8. weight, bias: the parameters of the norm, which has n channels. The norm first makes values with a standard
// deviation of 1, and then multiplies them by weight and adds bias. So |weight| + |bias| estimates the size of a
// channel's output. Single values are several times larger. With --use_scale_shift_norm, the embedding multiplies them
// by a scale that is not known here. So the factor leaves room: 32 times the largest of these estimates still fits in
// FP8. Larger values become e4m3's largest number, 448. Small values keep their precision, because FP8 is a
// floating-point format: its largest number is almost 2^15 times its smallest normal number. The factor is a power of
// 2, so multiplying by it rounds nothing.
static float fp8_factor(const float* weight, const float* bias, int n) {
    float size = 0;
    for (int c = 0; c < n; c++) size = std::max(size, std::fabs(weight[c]) + std::fabs(bias[c]));
    if (size == 0) return 1;
    int exponent;
    // frexp finds the exponent for which 2^(exponent - 1) is the largest power of 2 that does not exceed this quotient.
    std::frexp(E4M3.largest / 32.0 / size, &exponent);
    return (float)std::ldexp(1.0, exponent - 1);
}

// --sample with --precision fp8: rounds the weights of the convolutions that read FP8. The result is two arrays. What
// belongs to a parameter lies at the index that the parameter has in a flat array (Param::offset):
//   weights   the rounded weights. The weights of an output channel are first divided by a scale, so that the largest
//             |weight| of the channel becomes FP8's largest number
//   factors   an array of plain_size floats. It is as long as the first part of a flat array, which kernels read in
//             fp32. The factor of a norm (fp8_factor) lies at the index of the norm's first weight. For each output
//             channel of a convolution, scale / factor lies at the index of the channel's bias, where `factor` is that
//             of the norm whose result the convolution reads. The channel's sums of products are multiplied by this
//             quotient, which undoes both scalings
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
        const size_t inputs = conv_params->size / outputs; // the number of weights of an output channel, over all taps
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

// Returns how large gradients of the network's output may usually become, in units of 1 / n. Here n is how many numbers
// a batch of images has. If the loss is a mean of n squares of errors, a gradient is 2 / n times an error. The errors
// are about 1 or smaller, so the result is 1. (It is only an estimate, so the factor 2 does not matter.)
static double usual_gradient(const Config& c) {
    if (c.objective != "ect") {
        // If the loss has a variational bound, the bound is multiplied by its weight and by diffusion_steps / log 2
        // (make_objective). So the gradients of the bound may be about as many times as large as those of a mean of
        // squares. Its weight is 1 with --use_kl, and else --vlb_weight.
        double bound = 0;
        if (c.use_kl) bound = 1;
        else if (c.learned_variance()) bound = c.vlb_weight;
        return std::max(1.0, bound * c.diffusion_steps / std::log(2.0));
    }
    // The loss of a sample is its weight times a distance (tuning_loss), not a mean. If the network's answer changes by
    // a vector, the image that is made of it changes by |x0_out| times this vector. The distance then changes by at
    // most the length of this change. So for images of any size, the length of the loss's gradient is at most the
    // weight times |x0_out|. This gradient has C H W numbers, so each of them is about that length / sqrt(C H W). In
    // the gradient of a mean, each is about 1 / (C H W). So the numbers of the distance's gradient are larger than
    // these, by a factor of about the weight times |x0_out| times sqrt(C H W).
    const double length = std::sqrt((double)c.H * c.W * c.in_channels);
    // With --ect_weight gap, weight |x0_out| is at most q^a: the weight is 1 / (t - r), t - r is at least t / q^a
    // (teacher_sigma), and |x0_out| is at most t. last_a is the largest a of the run. With --ect_weight snr,
    // weight |x0_out| is about 1 / t if t is small. Of a thousand t that are drawn, about one is below smallest_t.
    const double last_a = 1 + (double)c.last_ect_stage();
    const double smallest_t = std::exp((double)c.P_mean - 3 * (double)c.P_std);
    return length * (c.ect_weight == "gap" ? std::pow((double)c.ect_q, last_a) : 1 / smallest_t);
}

// Training with --precision fp8: returns the factor that gradients are multiplied by before they are rounded to FP8. It
// is 256 times the largest power of 2 that does not exceed n / usual_gradient. So for a mean of squares it is at most
// 256 n, and above 128 n. (e5m2's largest number is 57344. So all gradients up to 57344 / (256 n) = 224 / n fit.)
// The factor depends only on the configuration. So it is the same on all ranks, in all microbatches, and after a run is
// resumed. Nothing is measured in one step and used in the next, so a checkpoint need not keep anything for FP8.
static float choose_gradient_factor(const Config& c) {
    const double n = (double)c.batch_size * c.H * c.W * c.in_channels;
    return (float)std::ldexp(1.0, 8 + std::ilogb(n / usual_gradient(c)));
}

// Training with --precision fp8: returns memory for the convolutions' weights in FP8, and all factors. Each step writes
// the weights (round_weights). The factors never change. The array `factors` is laid out as in make_fp8_weights. The
// number at the index of a norm's first weight is the factor of the norm's result (FP8_X_FACTOR). The numbers at the
// indices of a convolution's biases undo the scaling: the convolution multiplies its sums of products by them.
// dx_factors undo the scaling of the sums of input gradients.
static Fp8Weights make_fp8_training(const UNet& net) {
    if (net.config.precision != "fp8") return {};
    std::vector<float> factors(net.plain_size);
    int most = 0; // the largest number of input channels: dx_factors has an element for each of these channels
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

// Returns which weights round_weights has to round: those of each convolution that computes its input gradient in FP8.
// (All convolutions that multiply in FP8 in the forward pass are among them.)
static std::vector<WeightRounding> weights_to_round(const UNet& net) {
    std::vector<WeightRounding> works;
    for (const Layer& conv : net.layers) {
        if (!conv.fp8_gradient) continue;
        const size_t offset = net.params[conv.weight].offset;
        works.push_back({offset, net.tensors[conv.out].C, net.tensors[conv.x1].C, !conv.fp8});
    }
    return works;
}
