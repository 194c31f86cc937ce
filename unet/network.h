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

// A walk over the list of layers: a forward pass if grads is null, and else a backward pass. Layers that are computed
// again (--use_checkpoint) are a part of the backward pass.
struct Walk {
    UNet* net;
    Weights weights{};
    Dropout dropout{}; // the dropout of all residual blocks
    int B;
    float* grads = nullptr;
    Stream* stream = MAIN_STREAM;
};

// The argument of all functions of a LayerKind. Where a Layer has an index, there is a pointer here, or null for -1.
struct LayerArgs {
    UNet* net;
    const Layer* layer;
    Stream* stream;

    // x1 (B, H, W, Cin), x2 (B, H, W, C2), out (B, Hout, Wout, Cout)
    int B, H, W, Cin, C2;
    int Hout, Wout, Cout;

    const act *x1, *x2, *residual;
    act* out;
    Stats stats1, stats2, out_stats;
    const float *weight, *bias;
    const act* copy;  // the weight in the activations' type
    const float* emb; // (B, emb_stride), from this layer's first column on
    int emb_stride;
    float* saved;
    Dropout dropout; // the dropout that follows this layer
    ConvSkip skip;   // CONV: the skip connection that this layer also computes

    // The backward pass.
    const act* dout;
    Grad d1, d2;
    float *dweight, *dbias, *demb;

    // For FP8. Null if the walk or the layer does not use it; so is `bytes` of each Fp8Copy.
    const act *weight_fp8, *turned_fp8;        // CONV: its weights. If weight_fp8 is not null, x1 is FP8, too
    const float *factors_fp8, *dx_factors_fp8; // CONV: factors of the sums of products
    Fp8Copy out_fp8;                           // GROUPNORM: its result, which is then written only in FP8
    Fp8Copy dout_fp8;                          // CONV: dout in FP8
    Fp8Copy d1_fp8, d2_fp8;                    // GROUPNORM: the gradients of x1 and x2 in FP8

    int tokens() const { return H * W; } // attention's T
    Stats* stats() { return out_stats.sums ? &out_stats : nullptr; }
    float* rstd() const { return saved + B * 32; } // of a norm: `saved` holds the means (B, 32), and then rstd
    ConvShape conv() const {
        const Element in = net->tensor(layer->x1).element, to = net->tensor(layer->out).element;
        return {B, H, W, Cin, C2, Cout, layer->kernel, layer->stride, layer->upsample, in, to};
    }
    // CONV: the weight gradient is computed from FP8 numbers if the layer's forward product was (choose_fp8).
    WeightWork weight_work() const {
        WeightWork w{dweight, dbias, demb, emb_stride, dout, x1, x2, conv()};
        if (!weight_fp8) return w;
        w.dout = (const act*)dout_fp8.bytes;
        w.dout_factor = dout_fp8.factor;
        w.shape.in = Element::FP8;
        w.shape.out = Element::FP8_GRADIENT;
        return w;
    }
    NormShape norm() const { return {B, H * W, Cin, C2, 32, layer->nonlinearity, 1e-5f}; }

    // For the layers whose tensors are always fp32: those of the embedding, JOIN, PATCHES and PIXELS.
    const float* x_fp32() const { return (const float*)x1; }
    float* out_fp32() const { return (float*)out; }
    const float* dout_fp32() const { return (const float*)dout; }
    GradOf<float> d1_fp32() const { return {(float*)d1.dx, (const float*)d1.add1, (const float*)d1.add2}; }
};

// The address of a tensor's buffer. In a backward walk, that of the new result if the tensor was computed again.
static act* memory_of(const Walk& walk, int buffer) {
    const bool again = walk.grads && buffer >= 0;
    return buffer_data(walk.net, again ? walk.net->buffers[buffer].again : buffer);
}

// All that is special about a kind of layer. The list, its plan and the walks (build_unet, plan_memory, unet_forward)
// only use these members. A few functions test for CONV or GROUPNORM itself.
//
// A kind must keep these promises:
//   backward_reads names every tensor that its backward function reads. The memory of others is used again.
//   Its backward function overwrites each gradient, and adds add1 and add2 to it. If an input's dx is null, it writes
//   nothing there.
//   If it reads the embedding (Layer::emb), its backward function writes its columns of LayerArgs::demb.
//   Its kernels add floats in a fixed order, without atomics. So several ranks compute the bits of one rank.
//   It reads its weights in fp32, because only the weights of convolutions have a copy.
//   It reads no tensor that a 3x3 convolution reads, because such a tensor may be FP8 (plan_fp8), and its gradient may
//   have no addends (conv_backward_input_fp8).
//   It does not read the output of a skip connection, which the next convolution may compute itself (plan_fusions).
//   Layers of the embedding stand before all others. Their forward function launches on a.stream and uses no workspace,
//   because layers on the main stream run at the same time and use it.
static double no_flops(const LayerArgs&) { return 0; }
static Workspace no_workspace(const LayerArgs&) { return {}; }
struct LayerKind {
    const char* name;
    void (*forward)(LayerArgs&);
    void (*backward)(LayerArgs&) = nullptr; // null: it has no weights, and its input needs no gradient
    enum Reads { INPUT = 1, OUTPUT = 2, EMB = 4 };
    int backward_reads = 0; // which tensors of the forward pass the backward pass reads
    bool embedding = false; // its layers make the embedding, while other layers run (unet_forward)
    bool fp32 = embedding;  // its tensors are FP32, whatever act_element is
    bool sums = false;      // it writes out_stats, so a group norm may read its output

    double (*flops)(const LayerArgs&) = no_flops;            // operations of a forward pass; a multiply-add is 2
    Workspace (*workspace)(const LayerArgs&) = no_workspace; // the workspaces that its functions need
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
