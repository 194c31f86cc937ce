// network.h - the network is a list of layers: what such a list is made of.
#pragma once
#include "config.h"

// How a parameter is initialised (init_params).
enum ParamInit { INIT_UNIFORM, INIT_NORMAL, INIT_ONE, INIT_ZERO };

// A parameter. Its offset, counted in elements, is the same in all flat arrays: weights, their copies, gradients.
struct Param {
    std::string name;
    std::vector<int> shape; // as in PyTorch
    size_t size, offset;
    ParamInit init;
    int heads;            // of a qkv convolution's weight and bias: the number of attention heads; else 0
    bool of_conv = false; // whether it is the weight of a layer of kind CONV
};

// An activation (B, H, W, C).
struct Tensor {
    int H = 0, W = 0, C = 0;
    Element element = Element::FP32; // act_element; FP32 if the kind of the layer that writes it has fp32 (LayerKind),
                                     // and for the network's input and the last convolution's output; FP8: see plan_fp8
    int buffer = -1;                 // the buffer of its values
    int stats = -1;                  // if a group norm reads this tensor: the buffer of Stats::sums
    bool fp8 = false;                // a convolution reads this tensor in FP8, if the Walk has weights in FP8
    int parts = 1;                   // Stats::parts, as the forward pass has last set it
    bool needs_grad = false; // whether the backward pass of the layer that writes this tensor reads its gradient
};

// The buffers for the gradient of one input of a layer: d = this layer's part of the gradient + add1 + add2. fp8: a
// copy of d in FP8. -1: there is no such buffer.
struct GradPlan {
    int d = -1, add1 = -1, add2 = -1, fp8 = -1;
};

struct LayerKind; // what a layer computes: CONV, GROUPNORM, ...
// A layer of the list. If the comment after a member begins with a kind (such as CONV), it is only for layers of this
// kind.
struct Layer {
    const LayerKind* kind = nullptr;
    std::string name;
    int x1 = -1, x2 = -1, out = -1;                 // tensors: the layer reads [x1 | x2] and writes out
    int weight = -1;                                // a parameter; the bias, if there is one, is the next parameter
    int residual = -1;                              // CONV: a tensor that is added to the result; -1: none (see skip)
    int emb = -1, emb_offset = 0;                   // the tensor UNet::emb or -1, and this layer's first column in it
    int kernel = 1, stride = 1, upsample = 0;       // CONV
    bool fp8 = false;                               // CONV: forward product and weight gradient are in FP8 (choose_fp8)
    bool fp8_gradient = false;                      // CONV: the input gradient is computed in FP8 (choose_fp8)
    Nonlinearity nonlinearity = Nonlinearity::NONE; // GROUPNORM
    int dropout_block = -1;                         // GROUPNORM: if dropout follows, index of the residual block
    int heads = 0;                                  // ATTENTION, and the CONV that makes its qkv: the number of heads
    int saved = -1;     // the buffer of what the forward pass keeps: GROUPNORM mean and rstd, ATTENTION SoftmaxRows
    int block_end = -1; // --use_checkpoint: this layer is computed again before the backward pass of layer block_end

    // The plan (plan_gradients, plan_fp8_gradients, plan_waits, plan_fusions).
    GradPlan d1{}, d2{};      // the buffers of the gradients of x1 and x2
    int dout = -1, demb = -1; // the buffers of the gradients of out, and of UNet::emb (with the columns of all layers)
    int dout_fp8 = -1;        // CONV with fp8_gradient: the buffer of dout in FP8
    bool rounds_dout = false; // CONV with fp8_gradient: unet_backward makes dout_fp8 from dout; false: a norm writes it
    int after = -1;           // backward: this layer waits until the weight gradient of layer `after` is complete
    int skip = -1;            // CONV: the skip connection (a layer) that this layer's forward function also computes
    bool fused = false;       // a skip connection that the next layer's forward function computes
};

// A part of the arena: the memory of a tensor, a gradient, or something else that a layer keeps.
struct Buffer {
    size_t bytes; // for one sample
    // The first and the last time at which the buffer is in use (plan_lifetimes).
    int first_use = INT_MAX, last_use = -1;
    size_t offset = 0; // the buffer's first byte in the arena
    // --use_checkpoint: if the tensor is computed again, the buffer of the new result. Otherwise this buffer itself.
    int again;
};

struct UNet {
    Config config;
    std::vector<Param> params;
    std::vector<Tensor> tensors;
    std::vector<Layer> layers;
    std::vector<Buffer> buffers;
    size_t num_params = 0;                 // numbers of all parameters together, without gaps
    size_t flat_size = 0;                  // floats of a flat array before the padding at its end (Slice::n)
    size_t plain_size = 0;                 // kernels read the first plain_size weights in fp32, not from a copy
    int input = -1, emb = -1, output = -1; // indices of tensors; emb: the embedding's projections for all blocks
    int residual_blocks = 0;
    double flops = 0; // floating-point operations of one image's forward pass; a multiply-add is 2 of them
    // Set by plan_memory. B: the largest batch that the arena has room for.
    int B = 0;
    size_t arena_bytes = 0;
    char* arena = nullptr;
    // Set by the caller before a forward pass, in device memory:
    float* t = nullptr;      // (B): what the network is told of each sample's noise level
    int* labels = nullptr;   // (B): the classes of the samples
    float* values = nullptr; // (B, num_values): an image's own numbers, then those that describe its augmentation
    float* cond = nullptr;   // (B, H, W, cond_channels): the pictures that the images are conditioned on

    Tensor tensor(int i) const { return i < 0 ? Tensor{.parts = 0} : tensors[i]; } // i < 0: a tensor with C = 0
};

// Null if the index is -1 or the network has no memory yet.
template <class T = act> static T* buffer_data(const UNet* net, int buffer, size_t first_byte = 0) {
    if (buffer < 0 || !net->arena) return nullptr;
    return (T*)(net->arena + net->buffers[buffer].offset + first_byte);
}

template <class T> static T* tensor_data(const UNet* net, int t) { return buffer_data<T>(net, net->tensors[t].buffer); }

// --precision fp8: weights and factors (make_fp8_weights, make_fp8_training). If `weights` is null, a walk uses no FP8.
// If only `turned` is null, the walk is for sampling.
struct Fp8Weights {
    const uint8_t* weights = nullptr;
    const float* factors = nullptr; // the factors of norms' results and of convolutions' sums: see make_fp8_weights
    // Training:
    const uint8_t* turned = nullptr;        // weights in the order in which input gradients read them
    const float* gradient_factor = nullptr; // (1): gradients are multiplied by this before they are rounded
    const float* dx_factors = nullptr;      // for each input channel: sums of an input gradient are multiplied by it
};
// fp32: all parameters. copy: the convolutions' weights in the activations' type (if that is fp32, the same array).
struct Weights {
    const float* fp32 = nullptr;
    const act* copy = nullptr;
    Fp8Weights fp8{};
};

// Adds a buffer, and returns its index. bytes: its size for one sample.
static int add_buffer(UNet* net, size_t bytes) {
    const int buffer = (int)net->buffers.size();
    net->buffers.push_back(Buffer{.bytes = bytes, .again = buffer});
    return buffer;
}

// `mark` is called before each operation is started. dev/bench replaces it by a function that takes time stamps.
enum Pass { FORWARD, BACKWARD, BACKWARD_WEIGHT }; // BACKWARD: all gradients except a convolution's weight gradient
struct Operation {
    const char* name = nullptr; // the operation's name, or null if the operation belongs to `layer`
    const Layer* layer = nullptr;
    Pass pass = FORWARD;
};
static void (*mark)(const Operation&) = [](const Operation&) {};

static std::string describe(const UNet& net) {
    const Config& c = net.config;
    const int p = c.patch();
    const std::string squares = p > 1 ? text(", in squares of %dx%d pixels", p, p) : "";
    return text("model: %dx%dx%d, %.2f M parameters, %zu layers, %.3f GFLOP forward an image%s", c.H, c.W,
                c.in_channels, net.num_params / 1e6, net.layers.size(), net.flops / 1e9, squares.c_str());
}
