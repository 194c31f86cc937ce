// train_unet.cu - trains and samples diffusion UNets (guided-diffusion's models) in plain C++/CUDA.
//
//   make train_unet && ./train_unet          trains on data/, writes pictures, a log and checkpoints into out/
//   ./train_unet --help                      every flag, with units and defaults
//
// This file is the whole trainer, for any GPU, to be read from top to bottom:
//
//   Part I.  The program    data; the network, a list of layers; the plan of its memory; forward and backward, two
//                           walks over the list; DDPM's noise levels and loss; a training step; the loop; main
//   Part II. The device     kernels: small operations, group norm, attention, the tiled 3x3 convolution, AdamW; which
//                           kernel runs when; memory, streams and graphs
//
// Between the two stands an interface of some eighty operations, such as conv_forward (unet/interface.h). nvcc compiles
// the kernels of Part II. g++ takes the same operations from dev/reference.h, as plain loops, which are also the oracle
// of the tests. Read those loops first if you want to know what an operation computes.
//
// The headers in unet/ are pages to open when you want them. Part I needs unet/network.h beside it, for the structs of
// the list. The kernels of Part II are made of pieces that all kernels share, in unet/gpu/shared.h and conv.h. make one
// writes the program as one file. docs/READING.md is a route: an evening for Part I, others for the kernels.
//
// A training step (train_step; a drawing of its streams stands at "A training step"):
//
//   load_batch              x_0, the images of this step: a function of seed and step
//   draw_levels             t and what it means: how much noise each image gets
//   q_sample_forward        x_t = signal x_0 + sigma noise, and the target, such as the noise itself
//   unet_forward            answer = network(x_t, t): the layers of the list, first to last
//   loss_forward_backward   loss = mean of (answer - target)^2, and its gradient
//   unet_backward           the list, last to first: gradients of all weights
//   sum_gradients           over microbatches and GPUs, in one fixed order; judge_step: is this step sane?
//   adamw_update            the weights move, and their averages follow
//
// Words. B, C, H, W as in PyTorch; T = H W, attention's tokens; a d in front of a name: the gradient of it.
//   element             a number of a tensor as it lies in memory: fp32, bf16 or FP8; kernels know it as a type T
//   piece               16 bytes: 8 neighbouring channels in bf16, 4 in fp32
//   level               of noise: how noisy a sample is (NoiseLevel). Of resolution: the layers that have the same one
//   picture             what a model is conditioned on (--cond_file, --cond). What it learns to make is an image
//   skip                the U-Net's long way from its first half to its second. ConvSkip is the 1x1 convolution of a
//                       residual block's shortcut. A skipped step is another matter:
//   skipped step        a training step that changes nothing, because its loss or gradient looked wrong
//   rank                a process of a run, which has one GPU
//   flat array          all parameters one after the other, or their gradients, moments or averages, at the same places
//   workspace           an operation's own memory, which the next operation may overwrite
//   statistics          per image and channel, the sums of x and x^2 over pixels, for a group norm's mean and variance
//   addend              a gradient from another reader of the same tensor, added to the gradient that a kernel stores
//   tile                the part of a result that a block or a warp computes at a time
//   tap, halo, slice    of a convolution: one of a filter's nine positions; a tile's pixels with a border around them;
//                       the channels of a pixel that are in shared memory at a time. (A rank's Slice: its weights)
//   stage, ring         a part of shared memory that is filled while others are read; several of them in turn
//   epilogue            what a kernel does with a tile's sums before it stores them: bias, embedding, statistics
//   partial             a sum over a part of the pixels or keys; a second kernel adds partials up in a fixed order
//   fragment            the part of a tensor-core operand or result that lies in one thread's registers
//   swizzle             an order of a row's pieces in shared memory that brings a column of 8 rows into different banks
//
// Layouts: activations (B, H, W, C); convolution weights (Cout, kh, kw, Cin); files hold PyTorch's layouts.
// An empty // at the end of a line of code keeps clang-format from joining it with the next line.

// clang-format off
// The program: structs, and what papers add to DDPM
#include "unet/trainer.h"              // Dataset, UNet, Trainer; brings network.h, config.h (flags), interface.h
#include "unet/diffusion/verdict.h"    // the learning rate, the verdict on a step, averages of the weights
#include "unet/diffusion/objectives.h" // objectives beside DDPM: EDM, flow, consistency; the variational bound
#include "unet/diffusion/conditions.h" // what else the network is told about an image; augmentation
#include "unet/diffusion/pictures.h"   // pictures that a model is conditioned on
#include "unet/diffusion/samplers.h"   // from noise to images: ddpm, ddim, euler, heun, dpmpp_2m, consistency
#include "unet/fp8.h"                  // --precision fp8: FP8 in the plan: buffers, factors, weights
// A run and its folder
#include "unet/run/begin_end.h" // how a run begins and ends; brings checkpoints, grids, log.csv, the page index.html
#include "unet/run/prepare.h"   // --data_dir: a folder of pictures becomes a data file
#include "unet/run/samples.h"   // --sample: images of a trained model, without a run
#include "unet/run/settings.h"  // what the command line leaves open: presets, model files and the data decide it
// The device: a CPU with dev/reference.h, or a GPU
#include "unet/cpu.h"        // a CPU's operations
#include "unet/gpu/shared.h" // what kernels share: launches, pieces of 16 bytes, sums, tensor cores
// Hopper's kernels (sm_90a: TMA, wgmma, clusters, FP8). Part II asks them first: if (hopper_conv<BACKWARD>(c)) return;
#ifndef NO_HOPPER
#include "unet/gpu/hopper/attention_wgmma.h" // attention
#include "unet/gpu/hopper/weights.h"         // weight gradients; brings the convolutions
#else
#include "unet/gpu/no_hopper.h" // nothing is Hopper's
#endif
// Kernels of any GPU for special shapes and small layers
#include "unet/gpu/linear.h"            // linear layers of the embedding
#include "unet/gpu/attention_general.h" // attention for heads of any size
#include "unet/gpu/conv_any.h"          // convolutions of any kernel size and stride; the first and the last layer
#include "unet/gpu/conv_weight_plan.h"  // how a weight gradient's pixels are divided among blocks
#include "unet/gpu/groupnorm_whole.h"   // group norm's backward pass with an image's slab in shared memory
#include "unet/gpu/device.h"            // which GPU a process uses
#include "unet/gpu/ranks.h"             // between ranks, from device to device: NVLink, NCCL, MPI
#include "unet/muon.h"                  // --optimizer muon, and its kernels; brings Hopper's (gpu/hopper/muon_wgmma.h)
// clang-format on

// =====================================================================================================================
// Part I. The program

// =====================================================================================================================
// Data: .bin files that may be larger than memory, the order of their images
// A run begins with its data. A data file is a header and images (N, C, H, W) of uint8 or float32. Behind the images
// may follow labels (N), K numbers for each image (N, K) that a model may be conditioned on (--cond_dim), the names of
// these numbers, and checksums of the images (docs/FORMATS.md). Labels and numbers are kept in memory. The images stay
// on the disk: a step reads only its own, which the operating system is asked to fetch a few batches earlier.
// open_dataset checks a file, once. load_batch sends the images of a step to the device.

// Returns the first sample of this rank's k-th microbatch. Of all ranks' microbatches, it is number k * ranks + rank.
static int64_t first_sample(int k, int micro) { return ((int64_t)k * world.size + world.rank) * micro; }

// Returns which image is at a position of an endless stream. In training the stream consists of epochs, each in a new
// random order. In validation it is one order for all runs: that of the file or, if the loss is only that of a part of
// its images, a random one, since files are often sorted by class.
static int64_t image_at_position(const Dataset& d, const Config& c, bool training, int64_t position) {
    const int64_t epoch = position / d.count;
    const int64_t in_epoch = position % d.count;
    if (training) return permuted_index(c.seed, in_epoch, epoch, d.count);
    return d.count > VAL_IMAGES ? permuted_index(0, in_epoch, 0, d.count) : in_epoch;
}

static bool read_picture(Dataset* d, int64_t i, uint8_t* to) {
    Dataset* const cond = d->cond.get();
    if (!read_image(cond, i, to)) {
        d->error = cond->error;
        return false;
    }
    bool finite = true;
    const size_t values = cond->image_bytes() / cond->bytes;
    for (size_t k = 0; k < values; k++) finite = finite && std::isfinite(image_value(to, cond->bytes, k));
    if (finite) return true;
    d->error = cond->path + text(": image %ld holds a value that is not finite; make the file again", cond->in_file(i));
    if (world.size > 1) refuse(d->error); // as in read_image: the other ranks can't do this step without this rank
    return false;
}

// Sends this rank's n samples of a batch to the device: images (n, C, H, W), labels (n), numbers (n, num_values) and
// pictures (n, cond_channels, H, W). first: the stream's position of the batch's first sample. B: the size of the whole
// batch. In training n is B / ranks, otherwise B. Returns false if an image can't be used: then nothing was sent.
static bool load_batch(Upload* batch, Dataset* d, const Config& c, bool training, int64_t first, int B) {
    const int micro = c.micro();
    const int own_images = training ? B / world.size : B;
    auto sample = [&](int k) { return training ? first_sample(k / micro, micro) + k % micro : k; };
    auto image = [&](int64_t position) { return image_at_position(*d, c, training, position); };

    // Ask the operating system to fetch the images of this batch and of the next BATCHES_AHEAD, each batch once.
    const int64_t ahead = first + (BATCHES_AHEAD + 1) * (int64_t)B;
    for (d->asked = std::max(d->asked, first); d->asked < ahead; d->asked += B)
        for (int k = 0; k < own_images; k++) {
            const int64_t i = image(d->asked + sample(k));
            for (const Dataset* file : {d, d->cond.get()})
                if (file) posix_fadvise(file->file, file->image_at(i), file->image_bytes(), POSIX_FADV_WILLNEED);
        }

    wait_for_host_side(batch);
    int* labels = (int*)(batch->host + d->labels_at(own_images));
    float* values = (float*)(batch->host + d->values_at(own_images));
    uint8_t* pictures = batch->host + d->pictures_at(own_images, c);
    const uint32_t classless = dropout_threshold(training ? c.class_dropout : 0);
    // In training, `first` is the step's number times B.
    const uint32_t step = (uint32_t)(first / B);
    for (int k = 0; k < own_images; k++) {
        const int64_t b = sample(k);
        const int64_t i = image(first + b);
        if (!read_image(d, i, batch->host + k * d->image_bytes())) return false;
        if (d->cond && !read_picture(d, i, pictures + k * d->cond->image_bytes())) return false;
        labels[k] = d->labels.empty() ? 0 : d->labels[i];
        const Words random = philox(c.seed, 0, (uint32_t)b, step, RANDOM_CLASS_DROPOUT);
        const bool left_out = random.w[0] < classless;
        if (left_out) labels[k] = c.num_classes; // this label stands for no class
        for (int j = 0; j < c.num_values(); j++) {
            const bool is_known = j < c.cond_dim && !left_out;
            values[k * c.num_values() + j] = is_known ? d->values[i * c.cond_dim + j] : 0;
        }
    }
    send(batch); // on a GPU, the copy stream copies the batch to it, while the GPU computes the step before
    return true;
}

// =====================================================================================================================
// The network: a list of layers, made of guided-diffusion's flags
// What learns from these images is a U-Net. build_unet goes through the architecture once, as guided-diffusion's
// UNetModel does. It appends to two lists: parameters, in state_dict order, and layers, in the order of the forward
// pass. A layer has a kind (LayerKind), which says what it computes, and indices of tensors, parameters and buffers.
//
//   t, labels, values -> sinusoids, linear, SiLU, linear [+ label] [+ linear of the values], SiLU, linear:
//                        the embedding (B, columns): each residual block reads columns of its own
//
//   x -> conv --------------------------------- skip --------------------------------> [ | ] -> norm, SiLU, conv -> out
//          | residual block [+ attention] ------ skip -------> [ | ] residual block [+ attention]  ^
//          v half the resolution                                                      double it | 64 x 64
//          | residual block [+ attention] -- skip --> [ | ] residual block [+ attention]
//          v half                                                           double ^ | 32 x 32
//          +-----> middle: residual block, attention, residual block --------------+
//
//   residual block   [x1 | x2] -> norm, SiLU -> [half or double] -> conv 3x3 + embedding
//                              -> norm, SiLU, dropout -> conv 3x3 + shortcut
//   attention block  x -> norm -> qkv (conv 1x1) -> attention -> conv 1x1 + x
//
// [ | ] stands for the channels of the layer before, followed by those of the skip. Other brackets, except [x1 | x2],
// enclose what only some networks have. The numbers are the resolutions for images of 64 x 64. The shortcut is the
// block's input or, if the number of channels changes, a 1x1 convolution of it (a skip connection).
// The drawing is simplified. The output of each `half` is a skip, too, and every skip ends in a residual block. So in
// the second half of the network, a level has one residual block more than in the first half.

// unet/network.h has the structs of the list: a Param is learned, a Tensor is an activation, a Layer reads and writes
// tensors by their indices, and a UNet holds all of them. Here follows how a layer is computed: its LayerKind has the
// functions, which are called with LayerArgs.

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
//   It reads no tensor that choose_fp8 may make FP8: the input of a 3x3 convolution with stride 1. Such a tensor has
//   one reader, because the FP8 kernel of an input's gradient adds no other gradient to it (conv_backward_input_fp8).
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

// The shapes are right even if the network has no memory and the walk has no weights. build_unet needs only them.
static LayerArgs layer_args(const Walk& walk, const Layer& layer) {
    UNet* const net = walk.net;
    const Tensor x = net->tensor(layer.x1), out = net->tensor(layer.out);
    LayerArgs a{};
    a.net = net;
    a.layer = &layer;
    a.stream = walk.stream;
    a.B = walk.B;
    a.H = x.H;
    a.W = x.W;
    a.Cin = x.C;
    a.C2 = net->tensor(layer.x2).C;
    a.Hout = out.H;
    a.Wout = out.W;
    a.Cout = out.C;

    auto tensor = [&](int t) { return memory_of(walk, net->tensor(t).buffer); };
    auto stats = [&](int t) { return Stats{(double*)memory_of(walk, net->tensor(t).stats), net->tensor(t).parts}; };
    a.x1 = tensor(layer.x1);
    a.x2 = tensor(layer.x2);
    a.residual = tensor(layer.residual);
    a.out = tensor(layer.out);
    a.stats1 = stats(layer.x1);
    a.stats2 = stats(layer.x2);
    a.out_stats = stats(layer.out);

    if (layer.weight >= 0) {
        const size_t weight = net->params[layer.weight].offset;
        const bool last = layer.weight + 1 == (int)net->params.size(); // no parameter follows, so there is no bias
        const size_t bias = last ? weight : net->params[layer.weight + 1].offset;
        if (walk.weights.fp32) {
            a.weight = walk.weights.fp32 + weight;
            a.bias = walk.weights.fp32 + bias;
        }
        if (walk.weights.copy) a.copy = (const act*)((const char*)walk.weights.copy + weight * act_bytes());
        if (walk.grads) {
            a.dweight = walk.grads + weight;
            a.dbias = walk.grads + bias;
        }
    }

    // All residual blocks' projections of the embedding are one tensor. This layer's columns begin at emb_byte.
    const size_t emb_byte = layer.emb_offset * sizeof(float);
    a.emb = buffer_data<float>(net, net->tensor(layer.emb).buffer, emb_byte);
    a.emb_stride = net->tensor(net->emb).C; // how many columns all blocks have together
    a.demb = buffer_data<float>(net, layer.demb, emb_byte);
    a.saved = buffer_data<float>(net, layer.saved);
    a.dropout = walk.dropout;
    a.dropout.layer = (uint32_t)layer.dropout_block;
    if (layer.dropout_block < 0) a.dropout.p = 0; // no dropout follows this layer
    if (layer.skip >= 0) {
        const LayerArgs skip = layer_args(walk, net->layers[layer.skip]);
        a.skip = {skip.x1, skip.x2, skip.copy, skip.bias, skip.Cin, skip.C2};
    }

    auto grad = [&](const GradPlan& g) {
        return Grad{buffer_data(net, g.d), buffer_data(net, g.add1), buffer_data(net, g.add2)};
    };
    a.dout = buffer_data(net, layer.dout);
    a.d1 = grad(layer.d1);
    a.d2 = grad(layer.d2);
    if (walk.weights.fp8.weights) add_fp8_args(&a, net, walk.weights.fp8, layer);
    return a;
}

static void forward_timestep(LayerArgs& a) {
    const int max_period = a.net->config.max_period;
    timestep_embedding_forward(a.out_fp32(), a.net->t, a.B, a.Cout, max_period, a.stream);
}
constexpr LayerKind TIMESTEP{
    .name = "timestep embedding",
    .forward = forward_timestep,
    .embedding = true,
};

static void forward_linear(LayerArgs& a) {
    linear_forward(a.out_fp32(), a.x_fp32(), a.weight, a.bias, a.B, a.Cin, a.Cout, a.stream);
}
static void backward_linear(LayerArgs& a) {
    linear_backward(a.d1_fp32(), a.dweight, a.dbias, a.dout_fp32(), a.x_fp32(), a.weight, a.B, a.Cin, a.Cout);
}
static double linear_flops(const LayerArgs& a) { return 2.0 * a.B * a.Cin * a.Cout; }
static Workspace linear_workspace(const LayerArgs& a) {
    return {.main = linear_backward_workspace(a.B, a.Cin, a.Cout)};
}
constexpr LayerKind LINEAR{
    .name = "linear",
    .forward = forward_linear,
    .backward = backward_linear,
    .backward_reads = LayerKind::INPUT,
    .embedding = true,
    .flops = linear_flops,
    .workspace = linear_workspace,
};

static void forward_silu(LayerArgs& a) {
    const size_t n = (size_t)a.B * a.Cin;
    silu_forward(a.out_fp32(), a.x_fp32(), n, a.stream);
}
static void backward_silu(LayerArgs& a) {
    const size_t n = (size_t)a.B * a.Cin;
    silu_backward(a.d1_fp32(), a.dout_fp32(), a.x_fp32(), n);
}
constexpr LayerKind SILU{
    .name = "silu",
    .forward = forward_silu,
    .backward = backward_silu,
    .backward_reads = LayerKind::INPUT,
    .embedding = true,
};

static void forward_label(LayerArgs& a) {
    const float* const table = a.weight;
    label_embedding_forward(a.out_fp32(), a.x_fp32(), table, a.net->labels, a.B, a.Cin, a.stream);
}
static void backward_label(LayerArgs& a) {
    const int rows = a.net->params[a.layer->weight].shape[0];
    float* const dtable = a.dweight;
    label_embedding_backward(a.d1_fp32(), dtable, a.dout_fp32(), a.net->labels, a.B, rows, a.Cin);
}
constexpr LayerKind LABEL{
    .name = "label embedding",
    .forward = forward_label,
    .backward = backward_label,
    .embedding = true,
};

static void forward_values(LayerArgs& a) {
    const int K = a.net->config.num_values();
    values_embedding_forward(a.out_fp32(), a.x_fp32(), a.weight, a.net->values, a.B, K, a.Cin, a.stream);
}
static void backward_values(LayerArgs& a) {
    const int K = a.net->config.num_values();
    values_embedding_backward(a.d1_fp32(), a.dweight, a.dout_fp32(), a.net->values, a.B, K, a.Cin);
}
static double values_flops(const LayerArgs& a) { return 2.0 * a.B * a.net->config.num_values() * a.Cin; }
constexpr LayerKind VALUES{
    .name = "values embedding",
    .forward = forward_values,
    .backward = backward_values,
    .embedding = true,
    .flops = values_flops,
};

// A convolution, with all that is added to its result. backward_conv computes only the input's gradient: unet_backward
// computes the weight gradients of several convolutions together.
static void forward_conv(LayerArgs& a) {
    ConvShape s = a.conv();
    if (a.weight_fp8) s.in = Element::FP8;
    conv_forward(a.out, a.stats(), a.x1, a.x2, a.weight_fp8 ? a.weight_fp8 : a.copy, a.bias, a.emb, a.emb_stride,
                 a.residual, s, a.skip, a.factors_fp8);
}
static void backward_conv(LayerArgs& a) {
    ConvShape s = a.conv();
    if (!a.turned_fp8) return conv_backward_input(a.d1, a.d2, a.dout, a.copy, s);
    s.out = Element::FP8_GRADIENT;
    conv_backward_input(a.d1, a.d2, (const act*)a.dout_fp8.bytes, a.turned_fp8, s, a.dx_factors_fp8);
}
static double conv_flops(const LayerArgs& a) {
    const double weights = (double)a.net->params[a.layer->weight].size;
    return 2.0 * a.B * a.Hout * a.Wout * weights; // every weight is used once for every pixel of the output
}
static Workspace conv_layer_workspace(const LayerArgs& a) {
    ConvShape s = a.conv();
    size_t side = conv_workspace(s);
    // A weight gradient in FP8 divides the pixels among blocks in another way, and may need a larger workspace.
    if (a.layer->fp8) {
        s.in = Element::FP8;
        s.out = Element::FP8_GRADIENT;
        side = std::max(side, conv_workspace(s));
    }
    return {.main = conv_detour_bytes(a.conv()), .side = side};
}
constexpr LayerKind CONV{
    .name = "conv",
    .forward = forward_conv,
    .backward = backward_conv,
    .backward_reads = LayerKind::INPUT,
    .sums = true,
    .flops = conv_flops,
    .workspace = conv_layer_workspace,
};

static void forward_norm(LayerArgs& a) {
    float* const mean = a.saved;
    // If a convolution reads the result in FP8, the norm writes it in FP8 alone.
    groupnorm_forward(a.out_fp8.bytes ? nullptr : a.out, mean, a.rstd(), // what it writes, besides a.out_fp8
                      a.x1, a.stats1, a.x2, a.stats2,                    // its inputs and the sums of their channels
                      a.weight, a.bias, a.emb, a.emb_stride, a.dropout, a.norm(), a.out_fp8);
}
static void backward_norm(LayerArgs& a) {
    const float* const mean = a.saved;
    groupnorm_backward(a.d1, a.d2, a.dweight, a.dbias, a.demb, // what it writes, besides d1_fp8, d2_fp8
                       a.dout, a.x1, a.x2, mean, a.rstd(),     // dout, the inputs, and what the forward pass has saved
                       a.weight, a.bias, a.emb, a.emb_stride, a.dropout, a.norm(), a.d1_fp8, a.d2_fp8);
}
static Workspace norm_workspace(const LayerArgs& a) {
    return {.main = groupnorm_backward_workspace(a.norm()), .sums = norm_sums_bytes(a.norm())};
}
constexpr LayerKind GROUPNORM{
    .name = "group norm",
    .forward = forward_norm,
    .backward = backward_norm,
    .backward_reads = LayerKind::INPUT | LayerKind::EMB,
    .workspace = norm_workspace,
};

static void forward_attention(LayerArgs& a) {
    SoftmaxRow* const rows = (SoftmaxRow*)a.saved;
    attention_forward(a.out, rows, a.x1, a.B, a.tokens(), a.Cout, a.layer->heads);
}
static void backward_attention(LayerArgs& a) {
    const SoftmaxRow* const rows = (SoftmaxRow*)a.saved;
    act* const dqkv = a.d1.dx;
    attention_backward(dqkv, a.dout, a.x1, a.out, rows, a.B, a.tokens(), a.Cout, a.layer->heads);
}
static double attention_flops(const LayerArgs& a) {
    // Two products for each of the T x T pairs of tokens and each channel: q k^T and P v.
    const double products = 2;
    return products * 2 * a.B * a.tokens() * a.tokens() * a.Cout;
}
static Workspace attention_workspace(const LayerArgs& a) {
    return {.main = attention_backward_workspace(a.B, a.tokens(), a.Cout, a.layer->heads)};
}
constexpr LayerKind ATTENTION{
    .name = "attention",
    .forward = forward_attention,
    .backward = backward_attention,
    .backward_reads = LayerKind::INPUT | LayerKind::OUTPUT,
    .flops = attention_flops,
    .workspace = attention_workspace,
};

static void forward_downsample(LayerArgs& a) { downsample_forward(a.out, a.stats(), a.x1, a.B, a.H, a.W, a.Cin); }
static void backward_downsample(LayerArgs& a) { downsample_backward(a.d1, a.dout, a.B, a.H, a.W, a.Cin); }
constexpr LayerKind DOWNSAMPLE{
    .name = "downsample",
    .forward = forward_downsample,
    .backward = backward_downsample,
    .sums = true,
};

static void forward_upsample(LayerArgs& a) { upsample_forward(a.out, a.stats(), a.x1, a.B, a.H, a.W, a.Cin); }
static void backward_upsample(LayerArgs& a) { upsample_backward(a.d1, a.dout, a.B, a.H, a.W, a.Cin); }
constexpr LayerKind UPSAMPLE{
    .name = "upsample",
    .forward = forward_upsample,
    .backward = backward_upsample,
    .sums = true,
};

// Puts a picture's channels (--cond_channels) after the channels of the image.
static void forward_join(LayerArgs& a) {
    join_channels(a.out_fp32(), a.x_fp32(), a.net->cond, a.B, a.H * a.W, a.Cin, a.net->config.cond_channels);
}
constexpr LayerKind JOIN{
    .name = "condition",
    .forward = forward_join,
    .fp32 = true,
};

// --patch_size: squares of pixels become channels (PATCHES), and at the end channels become squares again (PIXELS).
static void forward_patches(LayerArgs& a) {
    const int p = a.net->config.patch();
    to_patches(a.out_fp32(), a.x_fp32(), a.B, a.H, a.W, a.Cin, p);
}
static void forward_pixels(LayerArgs& a) {
    const int p = a.net->config.patch();
    from_patches(a.out_fp32(), a.x_fp32(), a.B, a.Hout, a.Wout, a.Cout, p);
}
static void backward_pixels(LayerArgs& a) {
    const int p = a.net->config.patch();
    to_patches(a.d1_fp32().dx, a.dout_fp32(), a.B, a.Hout, a.Wout, a.Cout, p);
}
constexpr LayerKind PATCHES{
    .name = "patches",
    .forward = forward_patches,
    .fp32 = true,
};
constexpr LayerKind PIXELS{
    .name = "pixels",
    .forward = forward_pixels,
    .backward = backward_pixels,
    .fp32 = true,
};

static int add_tensor(UNet* net, int H, int W, int C, Element element) {
    const size_t values = (size_t)H * W * C;
    Tensor tensor{.H = H, .W = W, .C = C, .element = element};
    tensor.buffer = add_buffer(net, values * bytes_of(element));
    net->tensors.push_back(tensor);
    return (int)net->tensors.size() - 1;
}

typedef std::vector<int> Shape;
static int add_param(UNet* net, const std::string& name, Shape shape, ParamInit init, int heads = 0) {
    size_t size = 1;
    for (int n : shape) size *= n;
    net->params.push_back(Param{name, shape, size, 0, init, heads});
    net->num_params += size;
    return (int)net->params.size() - 1;
}

// Adds the parameters NAME.weight, whose index it returns, and NAME.bias, which has the next index.
static int add_params(UNet* net, const std::string& name, Shape shape, ParamInit init = INIT_UNIFORM, int heads = 0) {
    const ParamInit bias_init = init == INIT_ONE ? INIT_ZERO : init;
    const int weight = add_param(net, name + ".weight", shape, init, heads);
    add_param(net, name + ".bias", {shape[0]}, bias_init, heads);
    return weight;
}

// Adds the weight and the bias of a CONV. Such a weight is special: kernels read a copy of it in the activations' type,
// its gradient is computed together with others (WeightGradients), and files hold it in another order (permute_param).
static int add_conv_params(UNet* net, const std::string& name, Shape shape, ParamInit init, int heads = 0) {
    const int weight = add_params(net, name, shape, init, heads);
    net->params[weight].of_conv = true;
    return weight;
}

static void check_conv_params(const UNet& net) {
    for (size_t i = 0; i < net.params.size(); i++) {
        auto reads_it = [&](const Layer& l) { return l.kind == &CONV && l.weight == (int)i; };
        const bool is_read_by_conv = std::ranges::any_of(net.layers, reads_it);
        if (net.params[i].of_conv != is_read_by_conv)
            die("internal error: %s must come from add_conv_params if a layer of kind CONV has it, and else must not",
                net.params[i].name.c_str());
    }
}

static int add_layer(UNet* net, Layer l, int C, int H = 1, int W = 1, Element element = act_element) {
    const LayerKind& kind = *l.kind;
    if (l.weight >= 0 && !kind.backward) die("internal error: %s has weights but no backward pass", l.name.c_str());
    l.out = add_tensor(net, H, W, C, kind.fp32 ? Element::FP32 : element);
    net->tensors[l.out].needs_grad = kind.backward;
    net->layers.push_back(l);
    return l.out;
}

// Adds a convolution. l: all that differs from a plain 1x1 convolution. Its parameters may exist already (l.weight).
static int add_conv(UNet* net, Layer l, int Cout, ParamInit init = INIT_UNIFORM, Element element = act_element) {
    l.kind = &CONV;
    const ConvShape s = layer_args(Walk{.net = net, .B = 1}, l).conv();
    const Shape shape{Cout, s.C1 + s.C2, l.kernel, l.kernel};
    if (l.weight < 0) l.weight = add_conv_params(net, l.name, shape, init, l.heads);
    return add_layer(net, l, Cout, s.out_H(), s.out_W(), element);
}

// The nonlinearity after the norms of residual blocks, and after the norm before the last convolution.
constexpr Nonlinearity BEHIND_NORMS = Nonlinearity::SILU;

// Adds a group norm over [x1 | x2]. It needs sums of its inputs' channels, which the layers that write them compute.
static int add_norm(UNet* net, Layer l) {
    for (int input : {l.x1, l.x2}) {
        if (input < 0 || net->tensors[input].stats >= 0) continue; // no input, or its sums have a buffer already
        const auto writer = std::ranges::find(net->layers, input, &Layer::out);
        if (writer == net->layers.end() || !writer->kind->sums)
            die("internal error: %s reads a tensor whose layer leaves no sums of its channels", l.name.c_str());
        const Tensor x = net->tensors[input];
        const size_t sums = (size_t)x.C * 2 * max_stat_parts(x.H, x.W);
        net->tensors[input].stats = add_buffer(net, sums * sizeof(double));
    }
    const Tensor x = net->tensors[l.x1];
    const int C = x.C + net->tensor(l.x2).C;
    l.kind = &GROUPNORM;
    l.weight = add_params(net, l.name, {C}, INIT_ONE);
    l.saved = add_buffer(net, 2 * 32 * sizeof(float)); // mean and rstd of 32 groups
    return add_layer(net, l, C, x.H, x.W);
}

enum Resample { SAME, UP, DOWN };

static int add_resample(UNet* net, Resample resample, const std::string& name, int x) {
    const Tensor t = net->tensors[x];
    switch (resample) {
    case SAME: return x;
    case UP: return add_layer(net, {.kind = &UPSAMPLE, .name = name, .x1 = x}, t.C, 2 * t.H, 2 * t.W);
    case DOWN: return add_layer(net, {.kind = &DOWNSAMPLE, .name = name, .x1 = x}, t.C, t.H / 2, t.W / 2);
    }
    ALL_CASES_RETURN
}

// Ends a block: the layers from `first` on. With --use_checkpoint (Chen et al. 2016, arXiv:1604.06174) they are
// computed again before the block's backward pass. Two are not: the last layer, and the one whose result it adds to its
// own. No backward pass of the block reads what these two write.
static int end_block(UNet* net, size_t first) {
    const Layer last = net->layers.back();
    const int end = (int)net->layers.size() - 1;
    for (Layer& l : std::span(net->layers).subspan(first)) {
        const bool is_read = l.out != last.out && l.out != last.residual; // the block's backward pass needs l.out
        if (net->config.use_checkpoint && is_read) l.block_end = end;
    }
    return last.out;
}

// Adds a residual block. With --use_scale_shift_norm the embedding is not added: it scales and shifts the second norm's
// result. With UP or DOWN, the resolution changes after the first SiLU, and so does the shortcut's.
static int add_resblock(UNet* net, const std::string& name, int x1, int x2, int Cout, Resample resample = SAME) {
    const Config& c = net->config;
    const int Cin = net->tensor(x1).C + net->tensor(x2).C;
    const size_t first = net->layers.size();

    // With UP, the first convolution enlarges its input as it reads it.
    Layer norm1{.name = name + ".in_layers.0", .x1 = x1, .x2 = x2};
    norm1.nonlinearity = BEHIND_NORMS;
    int h = add_norm(net, norm1);
    if (resample == DOWN) h = add_resample(net, DOWN, name + ".h_upd", h);
    x1 = add_resample(net, resample, name + ".x_upd", x1);

    // One linear layer makes all blocks' projections of the embedding. This block's columns are added to it here.
    Layer conv1{.name = name + ".in_layers.2", .x1 = h, .kernel = 3};
    conv1.upsample = resample == UP;
    Layer norm2{.name = name + ".out_layers.0"};
    norm2.nonlinearity = BEHIND_NORMS;
    norm2.dropout_block = net->residual_blocks;
    net->residual_blocks++;
    const int columns = c.use_scale_shift_norm ? 2 * Cout : Cout; // a channel has scale and shift, or one addend
    Layer& reader = c.use_scale_shift_norm ? norm2 : conv1;
    reader.emb = net->emb;
    reader.emb_offset = net->tensor(net->emb).C;
    net->tensors[net->emb].C += columns;
    norm2.x1 = add_conv(net, conv1, Cout);
    add_params(net, name + ".emb_layers.1", {columns, 4 * c.num_channels});
    h = add_norm(net, norm2);

    // conv2 comes last in the block, but the state_dict has its parameters before those of the shortcut.
    Layer conv2{.name = name + ".out_layers.3", .x1 = h, .kernel = 3};
    conv2.weight = add_conv_params(net, conv2.name, {Cout, Cout, 3, 3}, INIT_ZERO);
    const Layer shortcut{.name = name + ".skip_connection", .x1 = x1, .x2 = x2};
    conv2.residual = Cin == Cout ? x1 : add_conv(net, shortcut, Cout);
    add_conv(net, conv2, Cout);
    return end_block(net, first);
}

static int add_attention_block(UNet* net, const std::string& name, int x, int num_heads) {
    const Config& c = net->config;
    const Tensor t = net->tensors[x];
    const int heads = c.num_head_channels > 0 ? t.C / c.num_head_channels : num_heads;
    const size_t first = net->layers.size();
    const int normed = add_norm(net, {.name = name + ".norm", .x1 = x});
    const Layer qkv{.name = name + ".qkv", .x1 = normed, .heads = heads};
    Layer attention{.kind = &ATTENTION, .name = name + ".attention", .heads = heads};
    attention.x1 = add_conv(net, qkv, 3 * t.C);
    attention.saved = add_buffer(net, (size_t)heads * t.H * t.W * sizeof(SoftmaxRow));
    const int out = add_layer(net, attention, t.C, t.H, t.W);
    add_conv(net, {.name = name + ".proj_out", .x1 = out, .residual = x}, t.C, INIT_ZERO);
    return end_block(net, first);
}

static void add_embedding(UNet* net) {
    const Config& c = net->config;
    const int F = c.num_channels; // how many sinusoids there are
    const int E = 4 * F;          // how many numbers the embedding has
    int h = add_layer(net, {.kind = &TIMESTEP, .name = "timestep_embedding"}, F);
    auto add = [&](const LayerKind& kind, const char* name, int weight = -1) {
        h = add_layer(net, {.kind = &kind, .name = name, .x1 = h, .weight = weight}, E);
    };
    add(LINEAR, "time_embed.0", add_params(net, "time_embed.0", {E, F}));
    add(SILU, "time_embed.1");
    add(LINEAR, "time_embed.2", add_params(net, "time_embed.2", {E, E}));
    if (c.class_cond) {
        const int classes = c.num_classes + c.null_class();
        add(LABEL, "label_emb", add_param(net, "label_emb.weight", {classes, E}, INIT_NORMAL));
    }
    const int K = c.num_values();
    if (K > 0) add(VALUES, "cond_emb", add_param(net, "cond_emb.weight", {E, K}, INIT_UNIFORM));
    add(SILU, "emb_layers.0");
    net->emb = add_layer(net, {.kind = &LINEAR, .name = "emb_layers.1", .x1 = h}, 0); // it has no columns yet
}

static int add_downsample(UNet* net, const std::string& name, int x, int ch) {
    const Config& c = net->config;
    if (c.resblock_updown) return add_resblock(net, name + ".0", x, -1, ch, DOWN);
    const std::string op = name + ".0.op";
    if (c.conv_resample) return add_conv(net, {.name = op, .x1 = x, .kernel = 3, .stride = 2}, ch);
    return add_resample(net, DOWN, op, x);
}

static int add_upsample(UNet* net, const std::string& name, int x, int ch) {
    const Config& c = net->config;
    if (c.resblock_updown) return add_resblock(net, name, x, -1, ch, UP);
    if (c.conv_resample) return add_conv(net, {.name = name + ".conv", .x1 = x, .kernel = 3, .upsample = 1}, ch);
    return add_resample(net, UP, name, x);
}

// Adds the encoder, and returns the tensors that the decoder reads. guided-diffusion numbers residual blocks and
// halvings in one row. Behind a number, .0 is the residual block or the halving, and .1 is attention.
static std::vector<int> add_input_blocks(UNet* net, int x) {
    const Config& c = net->config;
    int input_block = 0;
    auto next_name = [&] { return "input_blocks." + std::to_string(++input_block); };
    const int first = add_conv(net, {.name = "input_blocks.0.0", .x1 = x, .kernel = 3}, c.channels(0));
    std::vector<int> encoder_outputs{first}; // the outputs of all input_blocks, which the decoder reads
    const size_t lowest = c.mult.size() - 1;
    for (size_t level = 0; level <= lowest; level++) {
        const int ch = c.channels(level);
        for (int i = 0; i < c.num_res_blocks; i++) {
            const std::string name = next_name();
            int h = add_resblock(net, name + ".0", encoder_outputs.back(), -1, ch);
            if (c.has_attention(level)) h = add_attention_block(net, name + ".1", h, c.num_heads);
            encoder_outputs.push_back(h);
        }
        if (level < lowest) encoder_outputs.push_back(add_downsample(net, next_name(), encoder_outputs.back(), ch));
    }
    return encoder_outputs;
}

// Adds the decoder. Its residual blocks read [h | a tensor of the encoder], in reverse order. A level has one block
// more than in the encoder. This one reads what the encoder had before the level's blocks.
static int add_output_blocks(UNet* net, int h, std::vector<int> encoder_outputs) {
    const Config& c = net->config;
    const int heads = c.num_heads_upsample == -1 ? c.num_heads : c.num_heads_upsample;
    int output_block = 0;
    for (int level = (int)c.mult.size() - 1; level >= 0; level--) {
        const int ch = c.channels(level);
        const bool attention = c.has_attention(level);
        for (int i = 0; i <= c.num_res_blocks; i++) {
            const std::string name = "output_blocks." + std::to_string(output_block++);
            h = add_resblock(net, name + ".0", h, encoder_outputs.back(), ch);
            encoder_outputs.pop_back();
            if (attention) h = add_attention_block(net, name + ".1", h, heads);
            const bool level_ends = i == c.num_res_blocks && level > 0;
            if (level_ends) h = add_upsample(net, name + (attention ? ".2" : ".1"), h, ch);
        }
    }
    return h;
}

// Returns a parameter's group. In the flat arrays the groups follow each other:
//   0, 1  the projections of the embedding for all blocks. 0: the weights, which are one matrix. 1: the biases
//   2     all other parameters that kernels read in fp32
//   3     convolutions' weights, if the kernels read a copy of them
static int param_group(const Param& p) {
    if (p.name.ends_with(".emb_layers.1.weight")) return 0;
    if (p.name.ends_with(".emb_layers.1.bias")) return 1;
    return p.of_conv && weights_have_copy() ? 3 : 2;
}

// Chooses each parameter's place in the flat arrays. Those of groups 2 and 3 begin at multiples of 64 elements. So
// kernels can read them in pieces of 16 bytes, and Muon's is_matrix needs only one byte for 64 elements.
static void place_params(UNet* net) {
    auto round_to_64 = [](size_t floats) { return (floats + 63) / 64 * 64; };
    size_t end = 0;
    for (int group = 0; group < 4; group++) {
        for (Param& p : net->params) {
            if (param_group(p) != group) continue;
            p.offset = end;
            end += group < 2 ? p.size : round_to_64(p.size);
        }
        end = round_to_64(end);
        if (group == 2) net->plain_size = end;
    }
    net->flat_size = end;
}

static UNet build_unet(const Config& c) {
    UNet net;
    net.config = c;
    add_embedding(&net);

    const int H = c.H, W = c.W;
    const int p = c.patch();
    net.input = add_tensor(&net, H, W, c.in_channels, Element::FP32);
    int h = net.input;
    const int seen = c.seen_channels();
    if (c.cond_channels) h = add_layer(&net, {.kind = &JOIN, .name = "condition", .x1 = h}, seen, H, W);
    if (p > 1) h = add_layer(&net, {.kind = &PATCHES, .name = "patches", .x1 = h}, seen * p * p, H / p, W / p);
    const std::vector<int> encoder_outputs = add_input_blocks(&net, h);
    h = encoder_outputs.back();
    const int middle = net.tensor(h).C; // the lowest level's channels
    h = add_resblock(&net, "middle_block.0", h, -1, middle);
    h = add_attention_block(&net, "middle_block.1", h, c.num_heads);
    h = add_resblock(&net, "middle_block.2", h, -1, middle);
    h = add_output_blocks(&net, h, encoder_outputs);
    h = add_norm(&net, {.name = "out.0", .x1 = h, .nonlinearity = BEHIND_NORMS});
    h = add_conv(&net, {.name = "out.2", .x1 = h, .kernel = 3}, c.out_channels() * p * p, INIT_ZERO, Element::FP32);
    if (p > 1) h = add_layer(&net, {.kind = &PIXELS, .name = "pixels", .x1 = h}, c.out_channels(), H, W);
    net.output = h;

    // All blocks have been added now, so the number of the embedding's columns is known.
    const Tensor& emb = net.tensors[net.emb];
    net.buffers[emb.buffer].bytes = emb.C * sizeof(float);
    check_conv_params(net);
    if (c.precision == "fp8") choose_fp8(&net);
    place_params(&net);
    // All blocks' projections of the embedding are one matrix, which lies at offset 0 (param_group).
    Layer& projection = *std::ranges::find(net.layers, net.emb, &Layer::out);
    const auto first_param = std::ranges::find(net.params, 0u, &Param::offset);
    projection.weight = (int)(first_param - net.params.begin());

    for (const Layer& l : net.layers) net.flops += l.kind->flops(layer_args(Walk{.net = &net, .B = 1}, l));
    return net;
}

// =====================================================================================================================
// The plan: what the backward pass adds where, and where in memory each buffer lies
// The list is complete, but has no memory. plan_memory gives it one allocation for all activations and their gradients,
// the arena. A buffer is a part of it, for a tensor. Two buffers may share a place if they are never in use at the same
// time. Time is counted in layers:
//
//   0            1 ... L                     L + 1    L + 2 ... 2 L + 1
//   the batch    forward, layers 0 to L - 1  loss     backward, layers L - 1 to 0
//
// So layer i runs at time 1 + i, and backward at time 2 L + 1 - i.

// A tensor's gradient is the sum of what its readers contribute, the last one in the list first. Each reader writes its
// contribution plus the buffers that wait to be added to a new buffer. If a layer adds the tensor as its residual, it
// contributes the gradient of its output, unchanged. So nothing is copied: that buffer itself waits to be added.
static void plan_gradients(UNet* net) {
    // For each tensor: the buffers that the next contribution has to add.
    std::vector<std::vector<int>> waiting(net->tensors.size());
    // A contribution gets a new buffer, because weight gradients may still have to read a buffer that waits.
    auto contribute = [&](int x) {
        if (!net->tensor(x).needs_grad) return GradPlan{};
        const Buffer& values = net->buffers[net->tensors[x].buffer];
        const int d = add_buffer(net, values.bytes);
        std::vector<int> adds = waiting[x];
        waiting[x] = {d};
        if (adds.size() > 2) die("internal error: %zu gradients wait for one tensor", adds.size());
        adds.resize(2, -1);
        return GradPlan{d, adds[0], adds[1]};
    };
    // The loss contributes first. When the loop comes to a layer, all readers of its output have contributed.
    contribute(net->output);
    for (int i = (int)net->layers.size() - 1; i >= 0; i--) {
        Layer& l = net->layers[i];
        if (waiting[l.out].empty()) continue; // no gradient of l.out is planned, because l has no backward pass
        if (waiting[l.out].size() != 1) die("internal error: the gradient of %s is not complete", l.name.c_str());
        l.dout = waiting[l.out][0];
        if (l.residual >= 0) waiting[l.residual].push_back(l.dout);
        // All blocks' projections of the embedding have one gradient buffer. Each reader writes its own columns of it.
        if (l.emb >= 0) {
            if (waiting[l.emb].empty()) contribute(l.emb);
            l.demb = waiting[l.emb][0];
        }
        l.d1 = contribute(l.x1);
        l.d2 = contribute(l.x2);
    }
    // --use_checkpoint: tensors that are computed again get new buffers.
    for (const Layer& l : net->layers) {
        if (l.block_end < 0) continue;
        const Tensor& out = net->tensors[l.out];
        for (int b : {out.buffer, out.stats}) {
            if (b < 0) continue;
            // Two statements, because add_buffer may move net->buffers to other memory.
            const int again = add_buffer(net, net->buffers[b].bytes);
            net->buffers[b].again = again;
        }
    }
}

// A convolution's weight gradient is computed beside the backward passes of the layers that follow. It must be complete
// after so many of them, because its inputs stay in memory until then. Small tensors may stay longer, so that more
// weight gradients share a launch.
static int weights_lag(const UNet* net, const Layer& l) {
    const Tensor& x = net->tensors[l.x1];
    if (x.H * x.W <= 16 * 16) return 20;
    return net->config.use_checkpoint ? 2 : 6;
}

static int first_emb_reader(const UNet* net) {
    int i = 0;
    while (net->layers[i].emb < 0) i++;
    return i;
}

// Plans which weight gradients each layer waits for in the backward pass. The pass goes from the last layer to the
// first, and the side stream computes weight gradients in this order. So waiting for that of layer k is waiting for
// those of all layers behind k in the list, too.
static void plan_waits(UNet* net) {
    const int L = (int)net->layers.size();
    int done = L; // some layer already waits for the weight gradients of all layers from index `done` on
    for (int i = L - 1; i >= 0; i--) {
        Layer& l = net->layers[i];
        if (l.dout < 0) continue; // it has no backward pass
        for (int k = i + 1; k < done; k++) {
            const Layer& conv = net->layers[k];
            if (conv.kind != &CONV) continue;
            const bool too_old = k > i + weights_lag(net, conv);
            // The columns of the projections' gradient (demb) are computed together with conv's weight gradient.
            const bool has_demb = l.out == net->emb && conv.demb >= 0;
            if (!too_old && !has_demb) continue;
            l.after = k;
            done = k;
            break;
        }
    }
}

// Plans which convolutions also compute the skip connection whose result they add.
static void plan_fusions(UNet* net) {
    const Walk walk{.net = net, .B = net->B};
    for (size_t i = 1; i < net->layers.size(); i++) {
        Layer& l = net->layers[i];
        Layer& skip = net->layers[i - 1];
        // In the list, a skip connection comes directly before the convolution that adds its result.
        const bool adds_it = l.kind == &CONV && skip.kind == &CONV && l.residual == skip.out;
        if (!adds_it) continue;
        const ConvShape shape = layer_args(walk, l).conv();
        const ConvShape skip_shape = layer_args(walk, skip).conv();
        if (!conv_takes_skip(shape, skip_shape)) continue;
        skip.fused = true;
        l.skip = (int)i - 1;
        l.residual = -1;
    }
}

static void plan_lifetimes(UNet* net) {
    const int L = (int)net->layers.size();
    auto use = [&](int time, std::initializer_list<int> buffers) {
        for (int buffer : buffers) {
            if (buffer < 0) continue;
            // --use_checkpoint: after the loss, a tensor that is computed again lies in another buffer, `again`.
            const bool after_loss = time > L + 1;
            Buffer& b = net->buffers[after_loss ? net->buffers[buffer].again : buffer];
            b.first_use = std::min(b.first_use, time);
            b.last_use = std::max(b.last_use, time);
        }
    };
    auto data = [&](int tensor) { return net->tensor(tensor).buffer; };
    auto stats = [&](int tensor) { return net->tensor(tensor).stats; };
    auto use_forward = [&](const Layer& l, int time) {
        use(time, {data(l.x1), data(l.x2), data(l.residual), data(l.emb), l.saved});
        if (l.kind == &GROUPNORM) use(time, {stats(l.x1), stats(l.x2)});
        if (!l.fused) use(time, {data(l.out), stats(l.out)});
    };
    use(0, {data(net->input)});
    use(L + 1, {data(net->input), data(net->output)});
    for (int i = 0; i < L; i++) {
        const Layer& l = net->layers[i];
        const LayerKind& kind = *l.kind;
        use_forward(l, 1 + i + l.fused); // a fused layer is computed by the next layer, so at the next layer's time
        // The embedding's layers may still be running just before the first layer that reads the embedding.
        if (kind.embedding) use_forward(l, 1 + first_emb_reader(net));

        // `done` is the latest time at which a convolution's weight gradient may run.
        if (l.dout < 0) continue; // not in training, or it has no backward pass
        const int back = 2 * L + 1 - i;
        const int done = l.kind == &CONV ? back + weights_lag(net, l) : back;
        use(back, {l.dout, l.dout_fp8});
        for (int time : {back, done}) {
            if (kind.backward_reads & LayerKind::INPUT) use(time, {data(l.x1), data(l.x2)});
            use(time, {l.fp8 ? l.dout_fp8 : l.dout}); // the weight gradient reads dout in FP8 if l.fp8
        }
        if (kind.backward_reads & LayerKind::EMB) use(back, {data(l.emb)});
        if (kind.backward_reads & LayerKind::OUTPUT) use(back, {data(l.out)});
        use(back, {l.saved, l.demb});
        use(back, {l.d1.d, l.d1.add1, l.d1.add2, l.d1.fp8});
        use(back, {l.d2.d, l.d2.add1, l.d2.add2, l.d2.fp8});
        if (l.out == net->output) use(L + 1, {l.dout}); // the loss writes the gradient of the network's output
        const bool again = l.block_end >= 0;
        if (again) use_forward(l, 2 * L + 1 - l.block_end);
    }
}

// Chooses the offsets of all buffers for batches of B samples. From the largest buffer to the smallest, each gets the
// lowest place that is free as long as it is in use. Offsets are multiples of 256 bytes.
static void place_buffers(UNet* net, int B) {
    auto bytes = [&](const Buffer* b) { return (b->bytes * B + 255) / 256 * 256; };
    std::vector<Buffer*> order;
    for (Buffer& b : net->buffers)
        if (b.last_use >= 0) order.push_back(&b); // it is in use at some time
    // Stable: buffers of equal size have the same places on every machine.
    std::ranges::stable_sort(order, std::greater{}, bytes);

    std::multimap<size_t, const Buffer*> placed; // the buffers that have a place, sorted by offset
    net->arena_bytes = 0;
    for (Buffer* b : order) {
        b->offset = 0;
        for (const auto& [offset, other] : placed) {
            const bool overlap = other->first_use <= b->last_use && b->first_use <= other->last_use;
            if (!overlap) continue;
            if (b->offset + bytes(b) <= offset) break; // b fits into the gap before the other buffer
            b->offset = std::max(b->offset, offset + bytes(other));
        }
        placed.insert({b->offset, b});
        net->arena_bytes = std::max(net->arena_bytes, b->offset + bytes(b));
        if (net->arena_bytes > (size_t)1 << 46)
            die("more than 64 TiB of memory would be needed; a smaller --batch_size or a --microbatch needs less");
    }
}

static void check_memory(UNet* net, bool training) {
    const double GIB = 0x1p30;
    const Config& c = net->config;
    const double fp8_bytes = c.precision == "fp8" ? bytes_of(Element::FP8) : 0;
    const double of_muon = training && c.muon() ? muon_bytes(*net) : 0;
    const double copy_bytes = weights_have_copy() ? act_bytes() : 0;
    // GiB of the weights and of all arrays of their length, at most. Sampling: weights, copies in bf16 and FP8.
    // Training: also gradients (twice if several are added up), two moments and the averages (shared by ranks), the
    // first average in bf16, a second FP8 copy, and what Muon needs.
    auto weights_of = [&](int images) {
        const bool adds_up = world.size > 1 || c.batch_size > images;
        const double shared_arrays = (2.0 + (double)c.emas.size()) / world.size;
        const double arrays = 1 + (adds_up ? 2 : 1) + shared_arrays;
        const double sampling_bytes = sizeof(float) + copy_bytes + fp8_bytes;
        const double training_bytes = arrays * sizeof(float) + 2 * copy_bytes + 2 * fp8_bytes;
        return (net->flat_size * (training ? training_bytes : sampling_bytes) + of_muon) / GIB;
    };
    const int B = net->B;
    const double available = device_available() / GIB;
    const double needed = weights_of(B) + net->arena_bytes / GIB;
    int fits = B; // the largest of B, B / 2, B / 4, ... that fits; 0: not even one sample fits
    while (fits && weights_of(fits) + net->arena_bytes / GIB > available) {
        fits /= 2;
        place_buffers(net, fits);
    }
    const std::string both = text("%.2f GiB of memory and %.2f GiB are free", needed, available);
    if (!fits) die("this model needs %s: it does not fit, whatever the batch", both.c_str());
    if (fits < B)
        die("a batch of %d needs %s; %s %d fits", B, both.c_str(), training ? "--microbatch" : "--batch_size", fits);
    if (needed < 1) return;
    printf("memory: %.2f GiB are taken now, and %.2f GiB are free\n", needed, available);
    fflush(stdout);
}

static void plan_memory(UNet* net, int B, bool training) {
    const double pixels = (double)B * net->config.H * net->config.W;
    const char* const flag = training && net->config.given("microbatch") ? "microbatch" : "batch_size";
    if (pixels > MOST_PIXELS)
        die("--%s %d: so many images of %s at a time are more than %d pixels; "
            "a smaller --microbatch (or --batch_size) works",
            flag, B, net->config.image_size.c_str(), MOST_PIXELS);
    if (B > MOST_IMAGES)
        die("--%s %d: a GPU computes at most %d images at a time; "
            "a smaller --microbatch (or --batch_size) works",
            flag, B, MOST_IMAGES);
    // plan_gradients reads the `residual` that plan_fusions removes. plan_lifetimes must know all buffers and fusions.
    net->B = B;
    plan_fp8(net, training);
    if (training) {
        plan_gradients(net);
        plan_fp8_gradients(net);
        plan_waits(net);
    }
    plan_fusions(net);
    plan_lifetimes(net);
    place_buffers(net, B);
    check_memory(net, training);
    net->arena = device_alloc<char>(net->arena_bytes);

    // A stream's operations share a workspace, one after the other. But what they leave for finish_gradients
    // (Workspace::sums) is kept until the end of the backward pass, so these sizes are added up.
    Workspace most{loss_workspace(B)};
    const Walk walk{.net = net, .B = B};
    for (const Layer& l : net->layers) {
        const Workspace w = l.kind->workspace(layer_args(walk, l));
        most.main = std::max(most.main, w.main);
        most.side = std::max(most.side, w.side);
        most.sums += w.sums;
    }
    reserve(most, training);
}

// =====================================================================================================================
// Forward and backward: two walks over the list
// Now the list can run. unet_forward calls each layer's forward function, unet_backward goes from the last layer to the
// first and calls the backward functions. It does not compute the weight gradient of each convolution at once: it
// collects several of them, and computes these together on the side stream (WeightGradients). Samplers and validation
// call unet_forward alone.

static void forward_layer(const Walk& walk, const Layer& l) {
    if (l.fused) return; // the next layer also computes this one
    mark({.layer = &l});
    LayerArgs a = layer_args(walk, l);
    l.kind->forward(a); // for example forward_conv
    // If a norm reads the output, l.kind->forward has also summed it over the pixels, in this many parts (Stats).
    walk.net->tensors[l.out].parts = a.out_stats.parts;
}

// Computes net's output (B, H, W, out_channels) from its input, net->t (B) and, if the model uses them, net->labels
// (B), net->values (B, num_values) and net->cond (B, H, W, cond_channels). The embedding's layers come first in the
// list. They run on the side stream, beside other layers, until the first layer that reads the embedding.
static void unet_forward(UNet* net, Weights weights, Dropout dropout, int B) {
    const int L = (int)net->layers.size();
    const int reader = first_emb_reader(net);
    Walk walk{net, weights, dropout, B};
    int i = 0;
    // 0 is this work's ticket. WeightGradients' tickets are the indices of convolutions, and layer 0 is none.
    run_beside(0, [&](Stream* stream) {
        walk.stream = stream;
        for (; net->layers[i].kind->embedding; i++) forward_layer(walk, net->layers[i]);
    });
    walk.stream = MAIN_STREAM;
    for (; i < L; i++) {
        if (i == reader) wait_for_side(0);
        forward_layer(walk, net->layers[i]);
    }
}

static float* output_gradient(UNet* net) { return buffer_data<float>(net, net->layers.back().dout); }

// Collects weight gradients during the backward pass. They are computed together, on the side stream, when they fill
// the GPU or when a layer waits for one of them (plan_waits).
struct WeightGradients {
    UNet* net;
    const std::function<void(size_t, Stream*)>& done; // see unet_backward
    std::vector<WeightWork> waiting{};
    double load = 0; // how much of the device the waiting weight gradients would fill together; 1: all of it
    int last = -1;   // the layer whose weight gradient was added last
    // For each layer: the ticket with which wait_for_side waits for its weight gradient. -1: not launched yet.
    std::vector<int> ticket{};

    void launch_waiting() {
        // When this launch is finished, all gradients from complete_from on are complete. The weight gradients of the
        // convolutions before `last` are not launched yet, so complete_from is behind the last of their weights. From
        // plain_size on, the flat array holds convolutions' weights alone, not always in the order of the list.
        size_t complete_from = net->plain_size;
        for (int i = 0; i < last; i++) {
            const Layer& l = net->layers[i];
            if (l.kind != &CONV) continue;
            const Param& weight = net->params[l.weight];
            complete_from = std::max(complete_from, weight.offset + weight.size);
        }
        run_beside(last, [&](Stream* stream) {
            conv_backward_weights(waiting, stream);
            if (done) done(complete_from, stream);
        });
        std::replace(ticket.begin() + last, ticket.end(), -1, last);
        waiting.clear();
        load = 0;
    }
    void add(int layer, const LayerArgs& a) {
        waiting.push_back(a.weight_work());
        last = layer;
        load += conv_weight_load(waiting.back().shape);
        if (load >= 1 || !allowed.batches) launch_waiting();
    }
    void wait_for(int layer) {
        if (ticket[layer] < 0) launch_waiting();
        wait_for_side(ticket[layer]);
    }
};

// Computes grads, the gradients of the parameters, from output_gradient and from what the forward pass of these B
// samples left in memory. done(n, stream), if given, is called after each launch of weight gradients on `stream`. When
// that launch is finished, the gradients from grads[n] on are complete. So ranks can begin to send them.
static void unet_backward(UNet* net, Weights weights, float* grads, Dropout dropout, int B,
                          const std::function<void(size_t, Stream*)>& done = nullptr) {
    const Walk walk{net, weights, dropout, B, grads};
    WeightGradients weight_gradients{net, done};
    weight_gradients.ticket.assign(net->layers.size(), -1);
    for (int i = (int)net->layers.size() - 1; i >= 0; i--) {
        const Layer& l = net->layers[i];
        if (l.dout < 0) continue; // this layer has no backward pass
        if (l.after >= 0) weight_gradients.wait_for(l.after);
        // --use_checkpoint: if l ends a block, the results that were not kept are computed again now.
        for (const Layer& before : net->layers)
            if (before.block_end == i) forward_layer(walk, before);
        LayerArgs a = layer_args(walk, l);
        if (l.kind == &CONV) {
            // After the network's first convolution only the embedding's backward passes come, and they wait for demb.
            // In one launch with the weight gradient of l, demb would be complete later.
            if (l.x1 == net->input && !weight_gradients.waiting.empty()) weight_gradients.launch_waiting();
            mark({.layer = &l, .pass = BACKWARD_WEIGHT});
            if (l.rounds_dout) round_gradient(a.dout_fp8, a.dout, (size_t)B * a.Hout * a.Wout * a.Cout);
            weight_gradients.add(i, a);
            if (!a.d1.dx && !a.d2.dx) continue; // the network's first convolution: its input needs no gradient
        }
        mark({.layer = &l, .pass = BACKWARD});
        l.kind->backward(a); // for example backward_conv: the input's gradient, which is a convolution of dout
    }
    mark({"finish gradients"});
    finish_gradients(); // on a GPU, adds up the terms of the norms' dweight and dbias
    weight_gradients.wait_for(weight_gradients.last);
}

// =====================================================================================================================
// DDPM: noise levels and the loss
// The walks compute an answer and its gradient. DDPM (Ho et al. 2020) says what the network is asked, and what it
// should answer. A sample is an image x_0 with noise. Its timestep t is drawn uniformly from 0 to T - 1, and sets
// signal = sqrt(alpha_bar[t]) and sigma = sqrt(1 - alpha_bar[t]).
//
//   x_t    = signal x_0 + sigma noise               what the network is shown
//   target = target_x0 x_0 + target_noise noise     the noise, or x_0, or v = signal noise - sigma x_0 (--predict)
//   loss   = mean of weight * (answer - target)^2   over the values of an image
//
// A NoiseLevel (unet/interface.h) holds all that depends on t. q_sample_forward uses it to compute x_t and the target,
// loss_forward_backward to compute the loss. They know no objective. EDM, flow and consistency, the other objectives
// (unet/diffusion/objectives.h), fill a NoiseLevel in other ways: they make a Question, its numbers in double, which
// make_level rounds.

HD static inline NoiseLevel make_level(const Question& q) {
    return NoiseLevel{.t = (float)q.t,
                      .signal = (float)q.signal,
                      .sigma = (float)q.sigma,
                      .target_x0 = (float)q.target_x0,
                      .target_noise = (float)q.target_noise,
                      .x0_x = (float)q.x0_x,
                      .x0_out = (float)q.x0_out,
                      .weight = 1};
}

// Returns alpha_bar (T): the products of 1 - beta over the timesteps 0 to t.
//   linear: beta rises from 0.0001 to 0.02 (Ho et al. 2020, section 4); both limits are multiplied by 1000 / T
//   cosine: 1 - beta = f(t + 1) / f(t), where f(t) = cos^2((t / T + 0.008) / 1.008 pi / 2); beta is at most 0.999
//           (Nichol & Dhariwal 2021, eq. 17). In the code, `cosine` is f as a function of t / T
static std::vector<double> alpha_bars(const Config& c) {
    const int T = c.diffusion_steps;
    const double scale = 1000.0 / T, beta_start = 1e-4 * scale, beta_end = 0.02 * scale;
    const bool is_cosine = meaning<bool>("noise_schedule", c.noise_schedule, {{"linear", false}, {"cosine", true}});
    auto cosine = [](double t) { return std::pow(std::cos((t + 0.008) / 1.008 * M_PI / 2), 2); };
    std::vector<double> result;
    double product = 1;
    for (int t = 0; t < T; t++) {
        double beta = beta_start + (beta_end - beta_start) * t / (T - 1);
        if (is_cosine) beta = std::min(1 - cosine((t + 1.0) / T) / cosine((double)t / T), 0.999);
        product *= 1 - beta;
        result.push_back(product);
    }
    return result;
}

// What --predict decides. If the network's answer is wrong by e, the x_0 that is computed from it is wrong by d.
struct Prediction {
    double target_x0, target_noise; // as in NoiseLevel
    double x0_x, x0_out;            // as in NoiseLevel
    double error;                   // e^2 / d^2
};

// Makes the level of an alpha_bar. The network is told t, or 1000 t / T with --rescale_timesteps.
static NoiseLevel ddpm_level(const Config& c, double alpha_bar, double t) {
    const double signal = std::sqrt(alpha_bar), sigma = std::sqrt(1 - alpha_bar);
    const double snr = alpha_bar / (1 - alpha_bar);
    const Prediction eps{0, 1, 1 / signal, -sigma / signal, snr};
    const Prediction x0{1, 0, 0, 1, 1};
    const Prediction v{-sigma, signal, signal, -sigma, snr + 1}; // Salimans & Ho 2022, appendix D
    const Prediction p = meaning<Prediction>("predict", c.predict, {{"eps", eps}, {"x0", x0}, {"v", v}});
    NoiseLevel level{};
    level.t = (float)(c.rescale_timesteps ? t * 1000 / c.diffusion_steps : t);
    level.signal = (float)signal;
    level.sigma = (float)sigma;
    level.target_x0 = (float)p.target_x0;
    level.target_noise = (float)p.target_noise;
    level.x0_x = (float)p.x0_x;
    level.x0_out = (float)p.x0_out;
    // Min-SNR (Hang et al. 2023): the squared error of x_0 has the weight min(snr, gamma). The loss is the squared
    // error of the answer, which is p.error times as large.
    level.weight = c.min_snr_gamma > 0 ? (float)(std::min(snr, (double)c.min_snr_gamma) / p.error) : 1;
    return level;
}

static std::vector<NoiseLevel> ddpm_levels(const Config& c) {
    const int T = c.diffusion_steps;
    const std::vector<double> alpha_bar = alpha_bars(c);
    std::vector<NoiseLevel> levels;
    for (int t = 0; t < T; t++) {
        NoiseLevel level = ddpm_level(c, alpha_bar[t], t);
        level.t_is_0 = t == 0;
        level.index = t;
        level.importance = 1;
        level.quarter = 4 * t / T;
        // The variational bound compares q(x_s | x_t, x_0), s = t - 1, with the network's normal distribution. `small`
        // is q's variance (Ho et al. 2020, eq. 7). At t = 0 it would be 0, so that of t = 1 replaces it.
        const double a = alpha_bar[t], b = t ? alpha_bar[t - 1] : 1;
        const double beta = 1 - a / b, next = alpha_bar[1];
        double small = beta * (1 - b) / (1 - a);
        if (t == 0) small = (1 - next / a) * (1 - a) / (1 - next);
        const double mean_x0 = beta * std::sqrt(b) / (1 - a); // the coefficient of x_0 in q's mean
        const double log_ratio = std::log(beta / small);
        level.kl = (float)(std::pow(mean_x0 * level.x0_out, 2) / small);
        level.log_var = (float)std::log(small);
        if (c.learned_variance()) level.range = (float)log_ratio;
        else if (!c.sigma_small && t > 0) level.log_ratio = (float)log_ratio;
        levels.push_back(level);
    }
    return levels;
}

HD static inline NoiseLevel draw_level(const Objective& o, const Words& words) {
    if (o.rms_losses) return draw_weighted_level(o, words.w[0] * 0x1p-32);
    if (o.levels) return o.levels[((uint64_t)words.w[0] * o.steps) >> 32]; // all t have the same probability
    if (o.draws.uniform_t) {
        const double t = (words.w[0] + 0.5) * 0x1p-32;
        NoiseLevel level = make_level(ask(o.frame, t / (1 - t), o.sigma_data));
        level.quarter = (int)(4 * t);
        return level;
    }
    float z;
    const double sigma = draw_sigma(o, words, &z);
    NoiseLevel level;
    if (o.tuning.on()) level = student_level(o, sigma);
    else level = make_level(ask(o.frame, sigma, o.sigma_data));
    level.quarter = quarter_of_normal(z);
    return level;
}

// =====================================================================================================================
// The trainer: the network, and all arrays of a run
// A Trainer (unet/trainer.h) is the network with its plan, the objective, and all that a step reads or changes:
// weights, gradients, AdamW's moments, averages of the weights, two batches. With several ranks, each rank owns a slice
// of the flat arrays: it updates these weights, and keeps moments and averages only of them.

static AdamW optimiser_settings(const Config& c) {
    AdamW h{};
    h.lr = c.lr;
    h.weight_decay = c.weight_decay;
    h.beta1 = c.adam_beta1;
    h.beta2 = c.adam_beta2;
    h.eps = c.adam_eps;
    h.grad_clip = c.grad_clip;
    h.ema_rate = c.emas[0];
    h.lr_schedule = meaning<LrSchedule>(
        "lr_schedule", c.lr_schedule,
        {{"constant", LrSchedule::CONSTANT}, {"linear", LrSchedule::LINEAR}, {"cosine", LrSchedule::COSINE}});
    h.warmup_steps = c.warmup_steps;
    h.max_steps = c.max_steps;
    h.skip_outliers = c.max_bad_steps > 0;
    return h;
}

// Weights, averages and moments are zero here. start_weights or restore fills them.
static Trainer make_trainer(const Config& c, const Dataset& data) {
    Trainer tr{};
    tr.net = build_unet(c);
    tr.data = data;
    const int copies = c.guided() ? 2 : 1; // with guidance, the network computes each image of a grid twice
    plan_memory(&tr.net, std::max(c.micro(), copies), true);
    tr.objective = make_objective(c);
    tr.adamw = optimiser_settings(c);
    const int N = world.size;
    // Room for the samples of a step, or of one validation batch of each rank.
    const int samples = std::max(c.batch_size, N * tr.net.B);
    tr.own = slice_of(tr.net.flat_size, world.rank, N);
    const size_t whole = tr.own.whole(), stretches = whole / STRETCH;
    tr.grads = device_alloc<float>(whole);
    // open_alloc is for arrays to which other ranks write. params, squares and loss share one allocation.
    tr.params = (float*)open_alloc(whole * sizeof(float) + (stretches + samples) * sizeof(double));
    tr.squares = (double*)(tr.params + whole);
    tr.loss = tr.squares + stretches;
    tr.copy = weights_have_copy() ? (act*)open_alloc(whole * act_bytes()) : (act*)tr.params;
    tr.fp8 = make_fp8_training(tr.net);
    tr.fp8_works = weights_to_round(tr.net);
    tr.received = N > 1 ? (float*)open_alloc(whole * sizeof(float)) : nullptr;
    if (N > 1) tr.sum = tr.received;
    else if (c.batch_size > c.micro()) tr.sum = device_alloc<float>(whole);
    else tr.sum = tr.grads; // the gradients of the only microbatch are the sum
    while (tr.emas.size() < c.emas.size()) tr.emas.push_back(device_alloc<float>(tr.own.owned()));
    tr.m = device_alloc<float>(tr.own.owned());
    tr.v = device_alloc<float>(tr.own.owned());
    if (c.muon()) make_muon(&tr);
    // If activations are fp32, make_copy returns its argument: the array in which save_grid finds the average.
    tr.ema_copy = make_copy(N > 1 ? tr.grads : tr.emas[0], whole);
    tr.state = device_alloc<StepState>(1);
    tr.records = device_alloc<StepState>(RECORDS);
    for (Upload& batch : tr.batch) batch = make_upload(data.batch_bytes(c.batch_size / N, c));
    tr.target = device_alloc<float>((size_t)tr.net.B * c.H * c.W * c.in_channels);
    tr.levels = device_alloc<NoiseLevel>(samples);
    tr.t = device_alloc<float>(samples);
    tr.quarters = device_alloc<int>(samples);
    if (c.augment > 0) {
        const size_t pixels = (size_t)tr.net.B * c.H * c.W;
        // The canvas is used first for the images and then for the pictures.
        const size_t planes = (size_t)tr.net.B * std::max(c.in_channels, c.cond_channels);
        tr.augmentations = device_alloc<Augmentation>(tr.net.B);
        tr.canvas = device_alloc<float>(planes * fine_size(c.H) * fine_size(c.W));
        tr.augmented = device_alloc<float>(pixels * c.in_channels);
        if (c.cond_channels) tr.augmented_cond = device_alloc<float>(pixels * c.cond_channels);
    }
    const size_t all_pixels = (size_t)tr.net.B * c.H * c.W;
    if (c.cond_channels) tr.cond = device_alloc<float>(all_pixels * c.cond_channels);
    const int factor = c.picture_factor;
    if (factor) tr.small = device_alloc<float>(all_pixels / factor / factor * c.in_channels);
    if (tr.objective.tuning.on()) {
        tr.objective.tuning.step = &tr.state->step;
        tr.teachers = device_alloc<NoiseLevel>(tr.net.B);
        tr.teacher_t = device_alloc<float>(tr.net.B);
        tr.last_step = device_copy(std::vector<int64_t>{c.max_steps - 1});
    }
    const bool by_losses =
        meaning<bool>("schedule_sampler", c.schedule_sampler, {{"uniform", false}, {"loss-second-moment", true}});
    if (!by_losses) return tr;
    tr.history = device_alloc<float>((size_t)c.diffusion_steps * (HISTORY + 1));
    tr.rms_losses = device_alloc<double>(c.diffusion_steps); // while they are zeros, all t have the same probability
    tr.objective.rms_losses = tr.rms_losses;
    return tr;
}

// Returns a whole flat array. Its slices are gathered in tr.grads, where they stay until the next call or the next
// step, except those of the weights: they are gathered in tr.params itself.
static float* whole_array(const Trainer& tr, float* array) {
    if (world.size == 1) return array;
    float* const flat = array == tr.params ? array : tr.grads;
    come_to("gathering weights, averages or moments");
    gather(flat, array == flat ? nullptr : array, STRETCH * sizeof(float), tr.own, tr.own.n);
    return flat;
}

// --------------- TRAINING SECTION BEGIN -----------------
// =====================================================================================================================
// A training step, the loop over the steps, and main
// All parts are there. main opens the data, and train loops over the steps. Functions stand above those that call them,
// so you may also read this section from its end upwards: main, run_program, train, run_step, train_step,
// step_gradients, forward_and_loss. A training step runs like this:
//
//   copy stream   images of the next batch -> device
//   main stream   t | noise; q_sample | first ... last layer | loss | last ... first layer back | sum | judge | AdamW
//                   |                 |  ^ waits: embedding         |  ^ waits, before memory is reused
//   side stream     |                 +-> embedding                 +-> weight gradients of convolutions -+
//   other ranks     |                                                     these are sent when complete    |   weights
//                   \___ one microbatch; then the next one, whose gradients are added to the sum _________/
//                 (t is drawn once in a step, for the whole batch. judge and AdamW also come once in a step)
//   host          reads images; launches all of this, except the copies, as one graph (replay). The host may start up
//                 to STEPS_AHEAD steps before it reads the results of these steps for the log
//
// Time goes from left to right. At each ^ the main stream waits for the side stream. Gradients are sent during the
// backward pass only if GPUs write into each other's memory, otherwise after it. A CPU does all of this in order.

// ---------------------------------------------------------------------------------------------------------------------
// --- what a step is given: images, and what the network is told about them

struct Pixels {
    const void* data; // (B, channels, H, W)
    int bytes;        // the size of a value, 1 or 4
};

// --augment: changes B images into `out`. Only the key decides how, so an image and its picture change alike. told:
// where the network reads the numbers that describe the first image's change (UNet::values).
static Pixels augment_if_asked(Trainer* tr, float* out, Pixels images, float* told, int channels, int B,
                               RandomKey key) {
    const Config& c = tr->net.config;
    if (!c.augment) return images;
    key.purpose = RANDOM_AUGMENT;
    augment_images(out, tr->augmentations, tr->canvas, told, c.num_values(), images.data, c.augment, key, B, channels,
                   c.H, c.W, images.bytes);
    return Pixels{out, sizeof(float)};
}

// Puts B pictures where the network reads them: `pictures` or, with --cond, pictures made of the images. In training
// they are mirrored like their images, some are left out (--cond_dropout), and those of lowres get noise
// (--cond_noise).
static void put_pictures(Trainer* tr, Pixels images, Pixels pictures, int B, RandomKey key, bool training) {
    const Config& c = tr->net.config;
    const int C = c.in_channels;
    PictureDraws draws{.key = key};
    if (training) draws = {key, c.random_flip, c.cond_dropout, c.cond_noise};
    tr->net.cond = tr->cond;
    switch (c.picture_kind) {
    case PictureKind::FILE:
        take_pictures(tr->cond, pictures.data, draws, B, c.cond_channels, c.H, c.W, pictures.bytes);
        break;
    case PictureKind::LOWRES:
        shrink_images(tr->small, images.data, c.picture_factor, draws, B, C, c.H, c.W, images.bytes);
        enlarge_pictures(tr->cond, tr->small, c.picture_factor, draws, B, C, c.H, c.W);
        break;
    case PictureKind::GRAY: grey_images(tr->cond, images.data, draws, B, c.H, c.W, images.bytes); break;
    case PictureKind::MASK: mask_images(tr->cond, images.data, draws, B, C, c.H, c.W, images.bytes); break;
    }
}

// Returns microbatch k of this rank's images, and sets what the network is told about them: labels, values, cond.
static Pixels take_microbatch(Trainer* tr, const Upload& batch, int k, RandomKey key) {
    const Config& c = tr->net.config;
    const Dataset& data = tr->data;
    const int B = c.micro();
    const int images = c.batch_size / world.size; // the number of this rank's images
    tr->net.labels = (int*)(batch.device + data.labels_at(images)) + k * B;
    tr->net.values = (float*)(batch.device + data.values_at(images)) + (size_t)k * B * c.num_values();
    float* const told = tr->net.values + c.cond_dim;
    const Pixels stored{batch.device + k * B * data.image_bytes(), data.bytes};
    const Pixels x0 = augment_if_asked(tr, tr->augmented, stored, told, c.in_channels, B, key);
    Pixels pictures{};
    if (const Dataset* const cond = data.cond.get()) {
        const uint8_t* const first_picture = batch.device + data.pictures_at(images, c);
        pictures = {first_picture + k * B * cond->image_bytes(), cond->bytes};
        pictures = augment_if_asked(tr, tr->augmented_cond, pictures, told, c.cond_channels, B, key);
    }
    if (c.cond_channels) put_pictures(tr, x0, pictures, B, key, true);
    return x0;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- one training step: forward, loss, backward, sum, judge, update

// Computes the losses of samples first .. first + B - 1 of a step or of a round of validation (tr->loss + first), and
// the loss's gradient (output_gradient): in training, that of the mean loss of the step's whole batch. bytes: the size
// of an image's value. The caller has drawn the samples' noise levels, and set labels, values and cond in tr->net.
// Validation has random draws of its own, and neither dropout, nor flips, nor FP8.
static void forward_and_loss(Trainer* tr, const Objective& o, const void* images, int bytes, int first, int B,
                             RandomKey key, Dropout dropout, bool training) {
    const Config& c = tr->net.config;
    UNet* net = &tr->net;
    RandomKey level_key = key;
    RandomKey noise_key = key;
    RandomKey flip_key = key;
    // The level of a teacher (--objective ect) depends on that of its sample, which draw_teachers draws once more.
    level_key.purpose = training ? RANDOM_TIMESTEP : RANDOM_VAL_TIMESTEP;
    noise_key.purpose = training ? RANDOM_NOISE : RANDOM_VAL_NOISE;
    flip_key.purpose = RANDOM_FLIP;
    const bool flips = training && c.random_flip;
    float* const x = tensor_data<float>(net, net->input);
    float* const out = tensor_data<float>(net, net->output);
    // t: what the network is told about the noise. teacher: null, or with --objective ect the teacher's answer, which
    // is a part of the target. It may be `out`: q_sample_forward reads it before unet_forward writes the new answer.
    auto forward = [&](float* t, const NoiseLevel* levels, const float* teacher) {
        q_sample_forward(x, tr->target, levels, teacher, images, flips, noise_key, flip_key, B, c.in_channels, c.H, c.W,
                         bytes);
        net->t = t;
        unet_forward(net, Weights{tr->params, tr->copy, training ? tr->fp8 : Fp8Weights{}}, dropout, B);
    };
    const bool tunes = o.tuning.on();
    if (tunes) {
        draw_teachers(tr->teachers, tr->teacher_t, B, o, level_key);
        forward(tr->teacher_t, tr->teachers, nullptr);
        mark({"draw t, noise; q_sample"});
    }
    const NoiseLevel* const levels = tr->levels + first;
    forward(tr->t + first, levels, tunes ? out : nullptr);

    mark({"loss and its gradient"});
    const float factor = training ? 1.0f / c.batch_size : 1;
    double* const loss = tr->loss + first;
    float* const dout = output_gradient(net);
    const int HW = c.H * c.W;
    const int C = c.in_channels;
    if (tunes) tuning_loss_forward_backward(loss, dout, out, tr->target, levels, o.tuning.c, factor, B, HW * C);
    else loss_forward_backward(loss, dout, out, tr->target, x, levels, o, factor, B, HW, C, c.out_channels());
}

// Returns the mean loss of a data set's images, of which it draws VAL_IMAGES if there are more, or NaN if one can't be
// read. Every call takes the same images, t and noise, and teachers' levels (--objective ect) of the last step, so that
// losses can be compared.
static double validation_loss(Trainer* tr, Dataset* val) {
    const Config& c = tr->net.config;
    const int count = (int)std::min<int64_t>(val->count, VAL_IMAGES);
    const int most = tr->net.B; // the largest number of images in a rank's batch
    const int N = world.size;
    std::vector<double> losses(count);
    // All random draws take *zero, the number 0, as the step's number.
    static int64_t* const zero = device_alloc<int64_t>(1);
    static Upload batch = make_upload(val->batch_bytes(most, c));
    val->asked = 0; // ask for the images again: the system may have dropped them from memory since the last call
    Objective objective = tr->objective;
    objective.rms_losses = nullptr; // draw t uniformly, also with --schedule_sampler loss-second-moment
    objective.tuning.step = tr->last_step;
    for (int i = 0; i < count; i += N * most) { // in each round, every rank computes one batch
        come_to("a batch of validation");
        const int first = world.rank * most;
        const int B = std::min(most, count - i - first); // below 1 if no image is left for this rank
        if (B > 0) {
            if (!load_batch(&batch, val, c, false, i + first, B)) return NAN;
            const RandomKey key{(uint64_t)c.seed, RANDOM_VAL_TIMESTEP, zero, i + first};
            draw_levels(tr->levels + first, tr->t + first, tr->quarters + first, B, objective, key);
            tr->net.labels = (int*)(batch.device + val->labels_at(B));
            tr->net.values = (float*)(batch.device + val->values_at(B));
            const Pixels images{batch.device, val->bytes};
            const Pixels pictures{batch.device + val->pictures_at(B, c), val->cond ? val->cond->bytes : 0};
            if (c.cond_channels) put_pictures(tr, images, pictures, B, key, false);
            forward_and_loss(tr, objective, batch.device, val->bytes, first, B, key, Dropout{}, false);
            release(&batch);
        }
        if (N > 1) {
            meet();
            begin_exchange();
            all_gather(tr->loss, tr->loss + first, most * sizeof(double), MAIN_STREAM);
            end_exchange();
        }
        copy_to_host(&losses[i], tr->loss, std::min(N * most, count - i) * sizeof(double));
    }
    // Wait until all ranks have read tr->loss: in the next step, every rank writes to it (world.direct).
    meet();
    return std::accumulate(losses.begin(), losses.end(), 0.0) / count;
}

// Computes this rank's slice of the gradient of a step, in tr->sum.
//
// N ranks compute the same bits as one rank, although sums of floats depend on their order. They need the same batch
// and microbatch (without --microbatch it depends on N), the same kind of device and the same build. The reasons:
// 1. The same draws. Each random draw is a function of the seed, the step and the sample's index in the step.
//    (--schedule_sampler loss-second-moment also reads losses of earlier steps, which all ranks have: see 5.)
// 2. The same parts. One rank computes a microbatch as a whole, by kernels that add floats in a fixed order. (Atomic
//    additions only count integers.) What runs in one launch depends only on the network, the microbatch and the kind
//    of device. No factor depends on N: the loss is divided by the size of the whole batch.
// 3. The same order of the sum. Let g0, g1, ... be the microbatches' gradients, in the order of the samples. The step's
//    gradient is ((g0 + g1) + g2) + ..., rounded to fp32 after each addition. Rank r computes g(r), g(N + r), ...
//    (first_sample), so in each round the ranks hold the next N terms. Each part of the gradient has one owner, which
//    adds the parts of all ranks to its sum, in the order of the ranks (sum_gradients). Kernels that compute a gradient
//    never add it to the sum: they would add in another order.
// 4. The same norm. Squares are summed by stretches of STRETCH floats at fixed places, each by one rank. All ranks add
//    the sums of all stretches in the same order (judge_step). Padding depends on N, but comes last and adds zeros.
// 5. The same decision. Every rank has the losses of all samples and the sums of all stretches. So all compute the same
//    norm, verdict, clipping and statistics.
// 6. The same update. AdamW and the averages treat each parameter separately. The owner sends the new weight to all.
//    Muon multiplies whole matrices. So every rank computes the directions of all matrices, by the same kernels in the
//    same order (update_by_muon), and uses those of its slice.
static void step_gradients(Trainer* tr, const Upload& batch) {
    const Config& c = tr->net.config;
    const int B = c.micro(); // the images of a microbatch
    const int N = world.size;
    const int rounds = c.batch_size / N / B; // the number of this rank's microbatches
    const uint64_t seed = (uint64_t)c.seed;
    const Slice& own = tr->own;
    mark({"draw t, noise; q_sample"});
    const int64_t* const step = &tr->state->step;
    // Draw the levels of the whole batch, also of other ranks' samples: judge_step and update_rms_losses read all.
    const RandomKey level_key{.seed = seed, .purpose = RANDOM_TIMESTEP, .step = step, .sample0 = 0};
    draw_levels(tr->levels, tr->t, tr->quarters, c.batch_size, tr->objective, level_key);
    if (!tr->fp8_works.empty()) {
        mark({"weights to FP8"});
        round_weights((uint8_t*)tr->fp8.weights, (uint8_t*)tr->fp8.turned, tr->copy, tr->fp8_works);
        mark({"draw t, noise; q_sample"});
    }
    for (int k = 0; k < rounds; k++) {
        const int first = (int)first_sample(k, B);
        const Dropout dropout{c.dropout, seed, step, first};
        const RandomKey key{.seed = seed, .purpose = 0, .step = step, .sample0 = first}; // each draw sets the purpose
        float* const grads = N == 1 && k == 0 ? tr->sum : tr->grads;
        if (k > 0) {
            mark({"draw t, noise; q_sample"});
            // With world.direct, wait until all ranks have read `received`, which this round overwrites.
            meet();
        }
        const Pixels x0 = take_microbatch(tr, batch, k, key);
        forward_and_loss(tr, tr->objective, x0.data, x0.bytes, first, B, key, dropout, true);

        // The backward pass completes the last segment first. From complete_from on, all gradients are complete.
        int unsent = own.segments; // segments 0 to unsent - 1 are not sent yet
        const std::function<void(size_t, Stream*)> send_gradients = [&](size_t complete_from, Stream* stream) {
            while (unsent && own.at(unsent - 1, 0) >= complete_from) {
                unsent--;
                const size_t begin = own.at(unsent, 0);
                if (begin >= own.n) continue; // this segment is padding
                all_to_all(tr->received + begin, grads + begin, own.each() * sizeof(float), stream);
            }
        };
        // NCCL would take multiprocessors from the backward pass, and MPI would stop it. So they send after it.
        unet_backward(&tr->net, Weights{tr->params, tr->copy, tr->fp8}, grads, dropout, B,
                      world.direct ? send_gradients : nullptr);
        if (N > 1) {
            mark({"gradients to their ranks"});
            begin_exchange();
            all_gather(tr->loss + k * N * B, tr->loss + first, B * sizeof(double), MAIN_STREAM);
            send_gradients(0, MAIN_STREAM);
            end_exchange();
        }
        mark({"gradient norm"});
        sum_gradients(tr->sum, everywhere(tr->squares), RankGradients{grads, tr->received, own}, k > 0);
    }
    // judge_step needs the squares of all ranks. With world.direct, sum_gradients has written them to all ranks.
    if (world.direct) meet();
    else if (N > 1) gather(tr->squares, nullptr, sizeof(double), own, own.n);
}

// Updates this rank's slice of the weights and the averages. All ranks get the new weights as kernels read them: the
// first plain_size in fp32, the others in the copy. With world.direct, adamw_update itself writes them to all ranks.
static void update_slice(Trainer* tr) {
    const Config& c = tr->net.config;
    const Slice& own = tr->own;
    const size_t plain = tr->net.plain_size;
    Update update{};
    update.params = everywhere(tr->params);
    update.copy = everywhere(tr->copy);
    update.plain = plain;
    update.ema = tr->emas[0];
    update.m = tr->m;
    update.v = tr->v;
    update.sum = tr->sum;
    update.is_matrix = tr->is_matrix;
    if (c.muon()) update_by_muon(tr, update);
    adamw_update(update, tr->state, tr->adamw, own);
    for (size_t k = 1; k < tr->emas.size(); k++) ema_update(tr->emas[k], tr->params, tr->state, c.emas[k], own);
    if (world.size == 1) return;
    mark({"weights to all ranks"});
    if (world.direct) return meet(); // waits for adamw_update of all ranks, which writes new weights to all ranks
    begin_exchange();
    if (weights_have_copy()) gather(tr->copy, nullptr, STRETCH * act_bytes(), own, own.n);
    gather(tr->params, nullptr, STRETCH * sizeof(float), own, plain);
    end_exchange();
}

// Starts a training step. step: the number of steps before it. Returns false if an image of the step can't be read.
static bool train_step(Trainer* tr, int64_t step) {
    const Config& c = tr->net.config;
    const size_t stretches = tr->own.whole() / STRETCH; // the number of stretches of a whole flat array
    const int B = c.batch_size;
    const int T = c.diffusion_steps;
    Upload* batch = &tr->batch[step % 2];
    come_to("a training step"); // with several ranks: notes that this rank has come here (unet/host/ranks.h)
    if (!load_batch(batch, &tr->data, c, true, step * B, B)) return false;
    // On a GPU, replay records the launches as a graph, once for each of the two batches. On a CPU it calls the lambda.
    replay(&tr->graph[step % 2], [&] {
        step_gradients(tr, *batch);
        // The gradient's norm, loss and learning rate. Are loss and norm finite, and not far larger than usual?
        mark({"judge the step"});
        judge_step(tr->state, tr->squares, stretches, tr->loss, tr->quarters, tr->adamw, B);
        if (tr->history) update_rms_losses(tr->rms_losses, tr->history, tr->levels, tr->loss, tr->state, T, B);
        mark({c.muon() ? "Muon" : "AdamW, EMA"});
        update_slice(tr);
        mark({"record the step"});
        next_step(&tr->state->step);
        record_step(tr->records, tr->state, RECORDS);
        mark({""});
    });
    release(batch);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- the loop over the steps

// Waits until all issued steps are done, and logs them. The last one gets a validation loss if `validate` is true, and
// a status line if `show` is true.
static void collect_steps(Run* run, bool validate, bool show) {
    StepState records[RECORDS]; // the results of the latest steps, which the device has stored (record_step)
    const int64_t logged = run->state.step;
    copy_to_host(records, run->trainer.records, sizeof records); // this waits for the steps
    const double ended = now();
    const double elapsed = ended - run->steps_began;
    const double val = validate ? validation_loss(&run->trainer, &run->val) : NAN;
    if (validate && !std::isfinite(val) && run->val.error.empty())
        tell(run->val.path +
             text(": its validation loss after step %ld is %g; are all values finite?", run->issued, val));
    // Rounded as in log.csv, from which a resumed run reads it (take_best_loss). So it decides the same about best.bin.
    run->val_loss = atof(text("%.9g", val).c_str());

    const double count = (double)(run->issued - logged);
    // A running mean, in which each new step has a weight of 0.1. The first three steps are slower: they are dropped.
    const double kept = logged < run->first_step + 3 ? 0 : std::pow(0.9, count);
    run->per_step = kept * run->per_step + (1 - kept) * elapsed / count;
    run->seconds += elapsed;

    const std::lock_guard<PageTurn> turn(page_turn); // the page must not be written while the log changes
    for (int64_t step = logged; step < run->issued; step++) {
        run->state = records[step % RECORDS];
        const bool is_last = step + 1 == run->issued;
        const double steps_later = (double)(run->issued - 1 - step);
        const double done = ended - elapsed * steps_later / count; // assumes that all steps took the same time
        log_step(run, elapsed * 1e3 / count, is_last ? val : NAN, done - run->began);
        if (!run->state.ok) report_bad_step(run);
        else if (run->proven != run->saved) prove_checkpoint(run);
    }
    write_log(run);
    if (show) print_step(run, val);
    if (now() >= run->page.due) write_page(run, "running");
    run->steps_began = now();
}

// Old checkpoints are removed only when a good step has followed the newest one. So if a finished run has too many
// checkpoints, it does one more step. The weights after this step are not saved.
static void prove_last_checkpoint(Run* run) {
    const int keep = run->config.keep_checkpoints;
    const bool too_many = !world.rank && keep && (int)run->folder.list().size() > keep;
    // Only rank 0 has opened the folder. But all ranks must do the step together, because they exchange gradients.
    if (!any_rank("the question whether a checkpoint is to spare", too_many)) return;
    if (!train_step(&run->trainer, run->issued)) return;
    StepState after;
    copy_to_host(&after, run->trainer.records + run->issued % RECORDS, sizeof after);
    if (after.ok) prove_checkpoint(run);
}

// Ranks must stop after the same step, so they ask each other, every STEPS_AGREED steps.
static bool is_stopped(Run* run) {
    const bool is_due = world.size == 1 || run->issued % STEPS_AGREED == 0;
    if (is_due) run->stop = any_rank("the question whether to stop", stop_signal);
    return run->stop;
}

// Issues a step, and then does all that is due. If nothing is due, the host does not wait until the step is done.
static void run_step(Run* run) {
    const Config& c = run->config;
    if (!train_step(&run->trainer, run->issued)) return; // unreadable images end the run (data_error, in train)
    run->issued++;
    const int64_t step = run->issued;
    const bool last = step >= c.max_steps;
    // A status line shall appear every ten seconds or so. It waits for the end of its step: four steps are a margin.
    const bool slow = now() - run->status_shown + 4 * run->per_step > 10;
    auto due = [&](int interval) { return interval && (step % interval == 0 || last); };
    // A file that is not written, after a skipped step, stays due. written: the newest one's step.
    auto file_due = [&](int interval, int64_t written) {
        return interval && (last || step / interval > written / interval);
    };
    const bool save = file_due(c.save_interval, run->saved_step);
    const bool snapshot = file_due(c.ema_snapshots, run->snapshot_step);
    const bool show = slow || due(c.log_interval);
    const bool draw = due(c.sample_interval) && !last; // finish_complete draws the last grid
    const bool wants_val_loss = due(c.val_interval) || (c.keep_best && save);
    const bool validate = run->val.count && wants_val_loss;
    const bool records_full = step - run->state.step >= STEPS_AHEAD;
    if (!show && !save && !validate && !draw && !snapshot && !records_full) return;

    collect_steps(run, validate, show || validate);
    // If the newest step was skipped, the weights may be broken. Files stay due, but this step's grid is left out.
    if (run->state.bad_in_row) return;
    // The snapshot comes first. If the process is killed between the two files, the resumed run writes it again.
    if (snapshot) save_snapshot(run);
    if (save) save_checkpoint(run);
    if (draw) save_grid(run);
    if (save || draw) write_page(run, "running");
    run->steps_began = now(); // so the time that writing took is not part of a step's time
}

// --------------- TRAINING SECTION END -------------------

// ---------------------------------------------------------------------------------------------------------------------
// --- train and main: a whole run, from the command line to the exit code

// Does a whole run. resume: the checkpoint to go on from, or "". start: that checkpoint or, in a new run, the file of
// --init (size 0: none). Returns the exit code. After a signal it is 128 + the signal's number, as in a shell. So in
// "./train_unet && next", `next` does not start with a model that is half trained.
static int train(const Config& c, const Dataset& whole, Folder output, const std::string& resume,
                 const ModelFile& start) {
    // First find errors in the settings, before the program allocates memory or writes a file.
    if (!world.rank) check_output_dir(c, output, resume, start.state().step);
    const auto [data, val] = training_and_validation_data(c, whole);
    if (start.size) check_size(start, build_unet(config_in_file(c, start)));
    Run run{c, make_trainer(c, data), val, output};
    if (!begin_run(&run, data, resume, start)) return 0; // all steps are done already

    run.steps_began = now();
    while (run.issued < c.max_steps && !is_stopped(&run) && data_error(run).empty()) run_step(&run);
    // A signal may have come after the last step was issued. Then the run ends without its last grid. The next signal
    // ends a wait for a full disk (while_full).
    if (!run.stop) run.stop = any_rank("the end of the steps", stop_signal);
    if (run.stop) stop_signal = 0;
    const bool validate = c.keep_best && data_error(run).empty();
    if (run.state.step < run.issued) collect_steps(&run, validate, validate);
    save_at_the_end(&run);
    end_line();
    if (run.stop || !data_error(run).empty()) finish_stopped(&run); // after an error of the data, this does not return
    else finish_complete(&run);
    if (!run.stop) {
        prove_last_checkpoint(&run); // may remove a checkpoint, so the page is written after it
        write_page(&run, "done");
    }
    if (!world.rank && fsync(run.log_file))
        die("%s/log.csv: writing failed (%s)", c.output_dir.c_str(), strerror(errno));
    end_page();
    return run.stop ? 128 + run.stop : 0;
}

static int run_program(int argc, char** argv) {
    start_process(argv);
    find_ranks();
    Config c;
    parse_command_line(&c, argc, argv);
    if (!c.compare_runs.empty()) {
        compare_runs(c);
        return 0;
    }
    take_aliases(&c);
    take_num_gpus(c.num_gpus, c.rank_timeout, argv); // if this starts a process for each GPU, it does not return
    check_contradictions(c);

    // Rank 0 opens the folders that it writes to, and chooses the checkpoint for all ranks.
    Folder output;  // the folder of --output_dir
    Folder samples; // the folder of --output
    std::string resume;
    if (!world.rank) {
        output = open_folder(c.output_dir);
        // Ends the program if another run trains in the folder. A new folder is locked later (take_folder).
        if (!c.sample) lock_folder(output, false);
        resume = resume_path(c, output);
    }
    resume = broadcast_host("the choice of a checkpoint", resume);
    if (!world.rank && c.sample) samples = open_output(c, resume);

    const bool resumes = !resume.empty();
    ModelFile model;
    if (resumes || !c.init.empty()) model = open_model(resumes ? resume : c.init);
    Dataset data;
    const std::string where = model.size ? model.path + ": " : ""; // error messages about a setting begin with it
    complete_config(&c, model, resumes, where, &data);
    start_device(c.precision, c.device);
    // --exchange auto: GPUs write into each other's memory directly if they can. nccl: they send by NCCL.
    const bool directly = meaning<bool>("exchange", c.exchange, {{"auto", true}, {"nccl", false}});

    // Samples, without a run.
    if (c.sample) {
        if (!model.size) die("--sample %d: needs --init FILE, a model to sample from", c.sample);
        const std::string error = check_model(&c);
        if (!error.empty()) refuse(where + error);
        // Ranks are compared before their devices are joined: that needs only the hosts' connections.
        compare_ranks(c, model.path);
        join_devices(directly);
        return sample_and_stop(c, samples, model);
    }

    // A run: its data, all checks, and then the training.
    check_run(&c, where);
    // If the data decided which preset is used, complete_config has opened the data file already.
    if (!data.size) data = open_dataset(c.data_file);
    open_pictures(&data, "cond_file", c.cond_file);
    take_data_shape(&c, &data, model, where);
    if (resumes) check_resume(c, model, data);
    compare_ranks(c, model.path);
    join_devices(directly);
    return train(c, data, output, resume, model);
}
#ifndef TRAIN_UNET_NO_MAIN
int main(int argc, char** argv) { return run_program(argc, argv); }
#endif

// =====================================================================================================================
// Part II. The device
// The operations of the interface as kernels. All have the same few words, from unet/gpu/shared.h:
//
//   with_act(f)             calls f with a value of the activations' type T (float or bf16). The host knows
//                           activations as act, which is void: an act* has no size until a kernel gives it one
//   launch(kernel, grid, threads, shared bytes, arguments...)      on the main stream; launch_on: on another one
//   await_previous_kernel   a kernel may begin before the one ahead of it has ended (programmatic dependent launch). It
//                           calls this before it reads what that one writes. launch_behind is for kernels that don't
//   each(n, f)              a kernel that calls f(i) for every i < n, a thread each
//   VEC<T>, load16, unpack  a piece of 16 bytes as VEC<T> floats, and back (pack)
//   PARTS<T>                on the tensor cores a float is the sum of PARTS = 2 numbers of fp16: a product is three
//                           products of such halves. bf16 is multiplied as it is (1)
//   decide(call, table)     takes the first row of a table of {condition, function} whose condition holds
//   T                       a type; in attention's comments the number of tokens, in diffusion the number of timesteps

#ifdef __CUDACC__ // the GPU

// =====================================================================================================================
// Small operations: resampling, embeddings, diffusion

// ---------------------------------------------------------------------------------------------------------------------
// --- resample: average pool 2x2, nearest neighbour 2x, the even pixels
// A block loops over pixels of an image for a few pieces of channels. If a group norm reads the result, the block also
// sums what it writes (Stats).

// POOL writes the average of 2x2 pixels. REPEAT writes each pixel 2x2 times. PICK keeps the pixels of even rows and
// columns: a convolution with stride 2 gives the same values as one with stride 1 followed by PICK.
enum Resampling { POOL, REPEAT, PICK };

// where pixel k (0 to 3) of a 2x2 square begins, in elements. W: pixels in a row of the image
INLINE size_t in_square(int k, int W, int C) { return ((size_t)(k / 2) * W + k % 2) * C; }

template <class T> INLINE void add_square(float (&sum)[VEC<T>], const T* x, int W, int C) {
    UNROLL_FOR (int k = 0; k < 4; k++) {
        add_piece<T>(sum, load16(x + in_square(k, W, C)));
    }
}

// grid (blocks that share the pixels, slabs of channels, images). A slab is `columns` pieces of channels. With stats,
// one block has all pixels of its slab.
//
//                   columns
//    pixel 0       [ thread 0     1     2     3 ]
//    pixel 1       [        4     5     6     7 ]      then all go on, gridDim.x THREADS / columns pixels further
//
// A "pixel" p belongs to the smaller image: x for REPEAT, `out` for POOL and PICK.
template <class T, Resampling R>
static __global__ void __launch_bounds__(512) resample_kernel(T* out,        // (B, new H, new W, C)
                                                              double* stats, // (B, C, 2), or null
                                                              const T* x,    // (B, H, W, C)
                                                              int H, int W, int C, int columns) {
    static_assert(R == POOL || R == REPEAT || R == PICK, "another one needs its sizes and places here");
    constexpr int V = VEC<T>;
    constexpr int THREADS = 512;
    constexpr int COPIES = R == REPEAT ? 4 : 1; // how often each pixel is written
    __shared__ float sums[2 * V * (THREADS + 8)];
    const int b = blockIdx.z;
    const int c = (blockIdx.y * columns + threadIdx.x % columns) * V; // this thread's first channel
    const int rows = THREADS / columns;
    const int odd = R == PICK; // is added to H and W before they are halved: PICK rounds up, POOL down
    const int small_H = R == REPEAT ? H : (H + odd) / 2;
    const int small_W = R == REPEAT ? W : (W + odd) / 2;
    const int large_W = R == REPEAT ? 2 * W : W;
    const int pixels = small_H * small_W;
    float sum[V] = {};
    float square[V] = {};
    x += (size_t)b * H * W * C + c;
    out += (size_t)b * pixels * COPIES * C + c;
    await_previous_kernel();
    UNROLL_4_FOR (int p = blockIdx.x * rows + threadIdx.x / columns; p < pixels; p += gridDim.x * rows) {
        const size_t in_small = p;
        const size_t in_large = (size_t)(p / small_W) * 2 * large_W + p % small_W * 2; // the square's first pixel
        const T* from = x + (R == REPEAT ? in_small : in_large) * C;
        T* to = out + (R == REPEAT ? in_large : in_small) * C;
        uint4 piece;
        float v[V] = {};
        if (R == POOL) {
            add_square(v, from, W, C);
            UNROLL_FOR (float& average : v) {
                average *= 0.25f;
            }
            piece = pack<T>(v);
        } else piece = load16(from);
        unpack<T>(v, piece); // the sums below must be those of the rounded values, which the group norm will read
        UNROLL_FOR (int k = 0; k < COPIES; k++) {
            *(uint4*)(to + in_square(k, 2 * W, C)) = piece;
        }
        UNROLL_FOR (int i = 0; i < V; i++) {
            sum[i] += v[i];
            square[i] += v[i] * v[i];
        }
    }
    if (!stats) return;
    fold_columns<THREADS>(sums, columns, sum, square, [&](int k, int column, double total) {
        const int channel = (blockIdx.y * columns + column) * V + k / 2;
        stats[((size_t)b * C + channel) * 2 + k % 2] = COPIES * total;
    });
}

template <class T, Resampling R>
static void launch_resample(act* out, Stats* stats, const act* x, int B, int H, int W, int C,
                            Stream* stream = MAIN_STREAM) {
    if (stats) stats->parts = 1;
    const int pieces = C / VEC<T>;
    const int pixels = R == REPEAT ? H * W : ((H + 1) / 2) * ((W + 1) / 2);
    // With stats a slab has only one block, so slabs are widened only while most multiprocessors still get a block.
    int columns = 2;
    while (columns < 8 && pieces % (2 * columns) == 0) {
        const int blocks = B * pieces / (2 * columns);
        if (stats && blocks < gpu.sms * 3 / 4) break;
        columns *= 2;
    }
    const int pixels_at_once = 512 / columns;
    const dim3 grid(stats ? 1 : ceil_div(pixels, pixels_at_once * 4), pieces / columns, B);
    double* const sums = stats ? stats->sums : nullptr;
    launch_on(stream, 1, resample_kernel<T, R>, grid, 512, 0, out, sums, x, H, W, C, columns);
}

static void downsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C) {
    with_act([&]<class T>(T) { launch_resample<T, POOL>(out, stats, x, B, H, W, C); });
}
static void upsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C) {
    with_act([&]<class T>(T) { launch_resample<T, REPEAT>(out, stats, x, B, H, W, C); });
}

// The gradient of POOL or REPEAT, plus addends. grid (B H): a block computes one row of an image.
//   POOL      a quarter of the pooled pixel's gradient; 0 in an odd last row or column, which was not pooled
//   REPEAT    the sum of the four copies' gradients
template <class T, Resampling R>
static __global__ void __launch_bounds__(256)
    resample_backward_kernel(GradOf<T> dx,  // (B, H, W, C)
                             const T* dout, // POOL: (B, H / 2, W / 2, C); REPEAT: (B, 2 H, 2 W, C)
                             int H, int W, int C) {
    static_assert(R == POOL || R == REPEAT, "another one needs its formula here; the gradient of PICK is spread");
    constexpr int V = VEC<T>;
    const int pieces = C / V;
    const int b = blockIdx.x / H;
    const int h = blockIdx.x % H;
    const int Ho = H / 2;
    const int Wo = W / 2;
    await_previous_kernel();
    for (int i = threadIdx.x; i < W * pieces; i += 256) {
        const int w = i / pieces;
        const int c = (i - w * pieces) * V;
        float v[V] = {};
        if (R == POOL) {
            const size_t pooled = ((size_t)b * Ho + h / 2) * Wo + w / 2;
            if (h / 2 < Ho && w / 2 < Wo) unpack<T>(v, load16(dout + pooled * C + c));
            UNROLL_FOR (float& quarter : v) {
                quarter *= 0.25f;
            }
        } else {
            const size_t first_copy = ((size_t)b * 2 * H + 2 * h) * 2 * W + 2 * w;
            add_square(v, dout + first_copy * C + c, 2 * W, C);
        }
        const size_t pixel = (size_t)blockIdx.x * W + w;
        store_gradient(dx, pixel * C + c, v);
    }
}

template <Resampling R> static void launch_resample_backward(Grad dx, const act* dout, int B, int H, int W, int C) {
    with_act([&]<class T>(T) {
        auto kernel = resample_backward_kernel<T, R>;
        launch(kernel, B * H, 256, 0, typed<T>(dx), dout, H, W, C);
    });
}
static void downsample_backward(Grad dx, const act* dout, int B, int H, int W, int C) {
    launch_resample_backward<POOL>(dx, dout, B, H, W, C);
}
static void upsample_backward(Grad dx, const act* dout, int B, int H, int W, int C) {
    launch_resample_backward<REPEAT>(dx, dout, B, H, W, C);
}

// to_patches is PyTorch's F.pixel_unshuffle, and from_patches is the reverse. Each thread moves one element.
static void to_patches(float* out, const float* x, int B, int H, int W, int C, int p) {
    const size_t n = (size_t)B * H * W * C;
    each(n, [=] __device__(size_t i) { out[place_in_patches(i, H, W, C, p)] = x[i]; });
}
static void from_patches(float* out, const float* x, int B, int H, int W, int C, int p) {
    const size_t n = (size_t)B * H * W * C;
    each(n, [=] __device__(size_t i) { out[i] = x[place_in_patches(i, H, W, C, p)]; });
}

// out = [x | cond]: each pixel has the C channels of x and then the K channels of cond.
static void join_channels(float* out, const float* x, const float* cond, int B, int HW, int C, int K) {
    each((size_t)B * HW * (C + K), [=] __device__(size_t i) {
        const size_t pixel = i / (C + K);
        const int channel = (int)(i % (C + K));
        out[i] = channel < C ? x[pixel * C + channel] : cond[pixel * K + channel - C];
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- linear, silu, timestep and label embedding: fp32 (B, C) throughout
// The embedding is computed, and projected for every residual block. There are too few images to keep the GPU busy, so
// latencies are what this costs. Each weight is read once for 32 images.

static void silu_forward(float* out, const float* x, size_t n, Stream* stream = MAIN_STREAM) {
    each_on(stream, n, [=] __device__(size_t i) { out[i] = Silu<float>::f(x[i]); });
}
static void silu_backward(GradOf<float> dx, const float* dout, const float* x, size_t n) {
    each(n, [=] __device__(size_t i) {
        const float d = dout[i] * Silu<float>::df(x[i]);
        dx.dx[i] = with_addends(dx, i, d);
    });
}

// out (B, dim) = [cos(t f_k), sin(t f_k)], where f_k = max_period^(-k / half) for k < half = dim / 2. f_k is rounded to
// fp32, as in PyTorch. The angle t f_k is a double, because a large angle in fp32 would have a large rounding error.
static void timestep_embedding_forward(float* out, const float* t, int B, int dim, int max_period,
                                       Stream* stream = MAIN_STREAM) {
    const int half = dim / 2;
    const double log_period = std::log((double)max_period);
    each_on(stream, (size_t)B * half, [=] __device__(size_t i) {
        const int b = (int)i / half;
        const int k = (int)i % half;
        const float f_k = (float)exp(-log_period * k / half);
        double sine, cosine;
        sincos((double)t[b] * f_k, &sine, &cosine);
        out[(size_t)b * dim + k] = (float)cosine;
        out[(size_t)b * dim + half + k] = (float)sine;
    });
}

// out (B, C) = x + one row of table (rows, C) for each sample: the row with the number labels[sample]
static void label_embedding_forward(float* out, const float* x, const float* table, const int* labels, int B, int C,
                                    Stream* stream = MAIN_STREAM) {
    each_on(stream, (size_t)B * C, [=] __device__(size_t i) {
        const int label = labels[i / C];
        out[i] = x[i] + table[(size_t)label * C + i % C];
    });
}
// dx = dout + the addends. dtable (rows, C): row r is the sum of dout over the samples whose label is r. Each thread
// looks through all labels. So there are no atomics, and the order of the sum is fixed.
static void label_embedding_backward(GradOf<float> dx, float* dtable, const float* dout, const int* labels, int B,
                                     int rows, int C) {
    const size_t n = (size_t)std::max(B, rows) * C;
    each(n, [=] __device__(size_t i) {
        const int row = (int)(i / C);
        const int c = (int)(i % C);
        if (row < B) dx.dx[i] = with_addends(dx, i, dout[i]);
        if (row >= rows) return;
        float sum = 0;
        for (int b = 0; b < B; b++)
            if (labels[b] == row) sum += dout[(size_t)b * C + c];
        dtable[i] = sum;
    });
}

// out (B, C) = x + values (B, K) weight (C, K)^T, where `values` are the K numbers of each image (--cond_dim)
static void values_embedding_forward(float* out, const float* x, const float* weight, const float* values, int B, int K,
                                     int C, Stream* stream = MAIN_STREAM) {
    each_on(stream, (size_t)B * C, [=] __device__(size_t i) {
        const float* const row = values + i / C * K;
        const float* const of_channel = weight + i % C * K;
        float sum = 0;
        for (int k = 0; k < K; k++) sum += row[k] * of_channel[k];
        out[i] = x[i] + sum;
    });
}
static void values_embedding_backward(GradOf<float> dx, float* dweight, const float* dout, const float* values, int B,
                                      int K, int C) {
    each((size_t)std::max(B, K) * C, [=] __device__(size_t i) {
        if (i < (size_t)B * C) dx.dx[i] = with_addends(dx, i, dout[i]);
        if (i >= (size_t)K * C) return;
        const int c = (int)(i / K), k = (int)(i % K); // dweight is (C, K)
        float sum = 0;
        for (int b = 0; b < B; b++) sum += dout[(size_t)b * C + c] * values[(size_t)b * K + k];
        dweight[i] = sum;
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Diffusion: noise levels, q_sample, losses; images, noise, the network's input and output are fp32
// each(n, f) runs f(i) for every i < n, each in a thread of its own. each_quad gives a thread four values, because one
// quartet of Philox gives four random numbers. The formulas, and samplers' steps, are in diffusion/.

// t: what the network is told of a sample's level. quarters: which quarter of all levels it lies in, for the log
static void draw_levels(NoiseLevel* levels, float* t, int* quarters, int B, const Objective& o, RandomKey key) {
    each(B, [=] __device__(size_t b) {
        const NoiseLevel l = draw_level(o, random_words(key, 0, (int)b));
        levels[b] = l;
        t[b] = l.t;
        quarters[b] = l.quarter;
    });
}

// out (B, per_sample) = scale * z or, with add, out += scale * z. z is standard normal.
static void draw_normals(float* out, int B, int per_sample, RandomKey key, float scale = 1, bool add = false) {
    each_quad(B, per_sample, [=] __device__(int b, int e) {
        float z[4];
        normals(z, random_words(key, e / 4, b));
        for (int k = 0; k < 4 && e + k < per_sample; k++) {
            float& v = out[(size_t)b * per_sample + e + k];
            v = scale * z[k] + (add ? v : 0.0f);
        }
    });
}

// x_t = signal x_0 + sigma z,   target = target_x0 x_0 + target_noise z [+ target_teacher teacher]
// teacher: with --objective ect the teacher's answer, otherwise null. A thread computes four consecutive elements of
// x_t and target, which are (B, H, W, C). `images` is (B, C, H, W); its elements have 1 byte (uint8_t) or 4 (float).
static void q_sample_forward(float* x_t, float* target, const NoiseLevel* levels, const float* teacher,
                             const void* images, bool random_flip, RandomKey noise_key, RandomKey flip_key, int B,
                             int C, int H, int W, int bytes) {
    const int n = H * W * C;
    each_quad(B, n, [=] __device__(int b, int e) {
        const bool flip = random_flip && (random_words(flip_key, 0, b).w[0] & 1);
        const NoiseLevel l = levels[b];
        float z[4]; // the noise; later the target
        float x[4];
        normals(z, random_words(noise_key, e / 4, b));
        int p = e / C;
        int c = e - p * C;
        int h = p / W;
        int w = p - h * W;
        UNROLL_FOR (int k = 0; k < 4; k++) {
            const int column = flip ? W - 1 - w : w;
            const size_t place = (((size_t)b * C + c) * H + h) * W + column;
            float x0 = 0;
            if (e + k < n) x0 = image_value(images, bytes, place); // turns a byte v into v / 127.5 - 1
            x[k] = l.signal * x0 + l.sigma * z[k];
            z[k] = l.target_x0 * x0 + l.target_noise * z[k];
            if (++c == C) {
                c = 0;
                w++;
            }
            if (w == W) {
                w = 0;
                h++;
            }
        }
        const size_t i = (size_t)b * n + e;
        for (int k = 0; k < 4 && teacher && e + k < n; k++) {
            z[k] += l.target_teacher * teacher[i + k];
        }
        // in pieces of 16 bytes if every image begins at a multiple of 16 bytes
        if (n % 4 == 0) {
            *(float4*)(target + i) = make_float4(z[0], z[1], z[2], z[3]);
            *(float4*)(x_t + i) = make_float4(x[0], x[1], x[2], x[3]);
        } else
            for (int k = 0; k < 4 && e + k < n; k++) {
                target[i + k] = z[k];
                x_t[i + k] = x[k];
            }
    });
}

// The loss of an image, and its gradient. Let d = out - target, element by element. Then:
//   loss = the mean over all elements of (mse * d^2 + bound * term)
//   dout = factor * (the derivative of loss with respect to out), with one exception: see d_bound
// mse and bound are weights at this noise level. `term` is the element's part of the variational bound (BoundTerm). If
// Cout > C, the second half of out's channels is the predicted variance, which only the bound uses.
// grid (LOSS_PARTS, B): LOSS_PARTS blocks share an image, and each writes its part of the loss.
template <bool BOUND>
static __global__ void __launch_bounds__(1024, BOUND ? 1 : SUM_BLOCKS)
    loss_kernel(double* sums,        // (B, LOSS_PARTS)
                float* dout,         // (B, HW, Cout)
                const float* out,    // (B, HW, Cout)
                const float* target, // (B, HW, C)
                const float* x,      // (B, HW, C): the network's input
                const NoiseLevel* levels, Objective o, float factor, int HW, int C, int Cout) {
    const size_t first = (size_t)blockIdx.y * HW * Cout;     // this image's first element in out and dout
    const size_t first_target = (size_t)blockIdx.y * HW * C; // this image's first element in target and x
    const NoiseLevel l = levels[blockIdx.y];
    const float mse = o.mse * l.weight;
    const float bound = o.bound * l.importance;
    const float slope = factor / ((float)HW * C);
    double sum = 0;
    NO_UNROLL_FOR (int i = blockIdx.x * 1024 + threadIdx.x; i < HW * C; i += LOSS_PARTS * 1024) {
        const int p = i / C; // the pixel of element i; c is its channel
        const int c = i - p * C;
        const size_t at_mean = first + (size_t)p * Cout + c; // where `out` holds the network's answer for element i
        const size_t at_variance = at_mean + C;
        const float wanted = target[first_target + i];
        const float d = out[at_mean] - wanted;
        BoundTerm term{};
        if (BOUND) { // the bound's term needs v, the answer for the variance (0 if it is not learned), and the true x0
            const float v = Cout > C ? out[at_variance] : 0.0f;
            // If the answer were the target, the x0 computed from it would be the true one.
            const float x0 = l.x0_x * x[first_target + i] + l.x0_out * wanted;
            term = bound_term(l, d, v, x0);
        }
        sum += (double)mse * d * d + (double)bound * term.value;
        // If the loss has an mse term, the bound trains only the variance.
        const float d_bound = o.mse > 0 ? 0.0f : bound * term.d_mean;
        dout[at_mean] = slope * (2 * mse * d + d_bound);
        if (Cout > C) dout[at_variance] = slope * bound * term.d_variance;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.y * LOSS_PARTS + blockIdx.x] = sum;
}
// LOSS_PARTS sums for each image, and for the tuning loss also one slope
static size_t loss_workspace(int B) { return (size_t)B * (LOSS_PARTS + 1) * sizeof(double); }

static void loss_forward_backward(double* loss, float* dout, const float* out, const float* target, const float* x,
                                  const NoiseLevel* levels, const Objective& o, float factor, int B, int HW, int C,
                                  int Cout) {
    double* sums = (double*)device.workspace;
    auto kernel = o.bound > 0 ? loss_kernel<true> : loss_kernel<false>;
    const dim3 grid(LOSS_PARTS, B);
    launch_behind(kernel, grid, 1024, 0, sums, dout, out, target, x, levels, o, factor, HW, C, Cout);
    each(B, [=] __device__(size_t b) {
        double sum = 0;
        for (int k = 0; k < LOSS_PARTS; k++) sum += sums[b * LOSS_PARTS + k];
        loss[b] = sum / ((double)HW * C);
    });
}

// =====================================================================================================================
// Group norm

// ---------------------------------------------------------------------------------------------------------------------
// --- groupnorm_forward and groupnorm_backward: any size, any GPU
// Group norm (Wu & He 2018) over [x1 | x2], for each image and each group of Cg channels:
//
//   mean = E[x]      rstd = 1 / sqrt(E[x^2] - mean^2 + eps)         E: over the group's channels and all pixels
//   xhat = (x - mean) rstd
//   z    = (xhat weight + bias) (1 + film scale) + film shift       = x scale + shift, as the kernel computes it
//   out  = dropout(nonlinearity(z))
//
// The kernel that wrote x has summed x and x^2 (Stats). Film is computed from the embedding (--use_scale_shift_norm).
// A block works on a chunk of one image's pixels, and there on a slab of 64 (or 32) channels. A thread loads PIXELS
// pixels in advance, by cp.async into its own part of shared memory, so these loads need no registers and begin before
// the coefficients are known. norm_grid divides an image only as far as all blocks can run at the same time.
// Where gpu/groupnorm_whole.h is faster, it computes the backward pass.
constexpr int MAX_GROUPS = 64;

// What a thread works on: channels c ... c + VEC - 1 of image b, at the pixels `first`, `first + rows`, ... below
// `end`. For 64 bf16 channels:
//
//                        channels 0 - 7    8 - 15   ...   56 - 63
//    pixel 0            [ thread 0         1        ...   7  ]
//    pixel 1            [ thread 8         9        ...   15 ]        ...   up to pixel rows - 1 = 31
//
// x and dx lie in two tensors of C1 and C2 channels. out and dout lie in one tensor of C channels.
template <class T, int PIXELS> struct NormColumn {
    const NormArgs& a;
    int b;
    int slab0 = blockIdx.y * a.slab; // the slab's first channel
    // this thread's first element in `rows` pixels of the slab, counted pixel after pixel
    int place = threadIdx.x * VEC<T>;
    int c = slab0 + (place & (a.slab - 1));                   // this thread's first channel
    int rows = NORM_THREADS * VEC<T> >> a.log_slab;           // how many pixels the block works on at a time
    int first = blockIdx.x * a.chunk + (place >> a.log_slab); // this thread's first pixel
    int end = min(a.s.HW, ((int)blockIdx.x + 1) * a.chunk);
    bool in_x1 = c < a.s.C1;                              // false: the channels belong to x2
    int pitch = in_x1 ? a.s.C1 : a.s.C2;                  // how many elements a pixel of x1 (or x2) has
    int stride = rows * pitch;                            // from a thread's pixel to its next pixel, in x and dx
    int stride_out = rows * a.C;                          // the same distance in out and dout
    size_t pixel = (size_t)b * a.s.HW + first;            // this thread's first pixel, counted over all images
    size_t at = pixel * pitch + (in_x1 ? c : c - a.s.C1); // index of the thread's first element in x and dx
    size_t at_out = pixel * a.C + c;                      // index of the same element in out and dout
    const T* x = (const T*)(in_x1 ? a.x1 : a.x2) + at;

    // A ring of PIXELS slots, each of which holds what was loaded of one pixel. begin calls fetch for the first PIXELS
    // pixels. walk calls work for each pixel as soon as its loads have arrived; `more`: it has to load a later pixel.
    // Each pixel has one group of copies (copies_committed), also if nothing is loaded for it: walk counts groups, and
    // waits for all but the latest PIXELS - 1 before it calls work.
    template <class F> INLINE void begin(F fetch) const {
        UNROLL_FOR (int i = 0; i < PIXELS; i++) {
            fetch(i, first + i * rows < end);
        }
    }
    template <class F> INLINE void walk(F work) const {
        for (int p = first; p < end;)
            UNROLL_FOR (int slot = 0; slot < PIXELS; slot++, p += rows) {
                if (p >= end) break;
                copies_arrived<PIXELS - 1>();
                work(slot, p, p + PIXELS * rows < end);
            }
    }
};

// Eight lanes add up a table whose rows have n entries, lane i entries i, i + 8, i + 16, ..., counted row by row. For
// x1 this is made before await_previous_kernel, where its divisions overlap the previous kernel.
struct LaneShare {
    int n;
    int row = threadIdx.x % 8 / n;
    int column = threadIdx.x % 8 % n;
    int rows = 8 / n;
    int columns = 8 % n;
};

// groupnorm_forward_kernel's `out` is a T* or, for FP8, an Fp8Copy. place_of: where element i is written
template <class T> INLINE T* place_of(T* out, size_t i) { return out + i; }
INLINE uint8_t* place_of(const Fp8Copy& out, size_t i) { return out.bytes + i; }
template <class T> INLINE void store_out(T* to, const float (&v)[VEC<T>], float) { store_whole(to, pack<T>(v)); }
INLINE void store_out(uint8_t* to, const float (&v)[8], float factor) { store_whole(to, scaled_to_fp8(v, factor)); }

// grid (chunks of pixels, slabs, images). Eight threads together add up the statistics of one of the slab's groups.
template <class T, bool DROPOUT, class OUT>
static __global__ void __launch_bounds__(NORM_THREADS, norm_forward_blocks(DROPOUT))
    groupnorm_forward_kernel(OUT out,            // (B, HW, C)
                             float* mean,        // (B, groups); the backward pass needs mean and rstd
                             float* rstd,        // (B, groups)
                             const Stats stats1, // the sums of x1's channels
                             const Stats stats2, // the sums of x2's channels
                             NormArgs a) {
    constexpr int V = VEC<T>;
    constexpr int PIXELS = 4;
    __shared__ uint4 loads[PIXELS][NORM_THREADS];
    __shared__ float group_mean[MAX_GROUPS], group_rstd[MAX_GROUPS];
    // In reverse order: the last images of x were written last, so they may still be in the L2 cache.
    const NormColumn<T, PIXELS> t{a, (int)(gridDim.z - 1 - blockIdx.z)};
    const T* x = t.x;
    auto fetch = [&](int slot, bool inside) {
        if (inside) copy_async_16(&loads[slot][threadIdx.x], x);
        x += t.stride;
        copies_committed();
    };
    const NormParameters<V> parameters(a, t.b, t.c);
    float factor = 1; // an FP8 output is multiplied by this before it is rounded
    if constexpr (!std::is_same_v<OUT, T*>) factor = *out.factor;
    const uint32_t step = DROPOUT ? (uint32_t)*a.dropout.step : 0;
    const int g = a.group_of(t.slab0) + threadIdx.x / 8; // the group whose sums this thread and its neighbours add up
    const int c0 = g * a.Cg;                             // the group's first channel
    const int of_x1 = min(a.Cg, a.s.C1 - c0);            // how many of the group's channels belong to x1; < 1: none
    const LaneShare share{max(of_x1, 1)};
    await_previous_kernel();
    t.begin(fetch);

    if (g <= a.group_of(t.slab0 + a.slab - 1)) {
        double sum = 0;    // the sum of x
        double square = 0; // the sum of x^2
        // A table has a row for each part of Stats, with an entry for each channel. from: the group's first channel
        auto add = [&](const Stats& stats, int C, int from, const LaneShare& of) {
            const double2* const sums = (const double2*)stats.sums + (size_t)t.b * stats.parts * C + from;
            for (int part = of.row, c = of.column; part < stats.parts;) {
                const double2 q = sums[part * C + c];
                sum += q.x;
                square += q.y;
                part += of.rows;
                c += of.columns;
                if (c < of.n) continue;
                c -= of.n;
                part++;
            }
        };
        if (of_x1 > 0) add(stats1, a.s.C1, c0, share);
        if (of_x1 < a.Cg) add(stats2, a.s.C2, max(c0 - a.s.C1, 0), LaneShare{min(a.Cg, a.Cg - of_x1)});
        sum = group_sum(sum);
        square = group_sum(square);
        if (threadIdx.x % 8 == 0) {
            const double m = sum * a.weight_of_one;
            const double variance = fmax(square * a.weight_of_one - m * m, 0.0);
            const float group_r = 1 / sqrtf((float)(variance + a.s.eps));
            group_mean[g] = (float)m;
            group_rstd[g] = group_r;
            // Several blocks have computed mean and rstd. One of them writes them, for the backward pass.
            if (blockIdx.x == 0 && c0 >= t.slab0) {
                mean[t.b * a.s.groups + g] = (float)m;
                rstd[t.b * a.s.groups + g] = group_r;
            }
        }
    }
    __syncthreads();

    // The thread's V channels may belong to several groups.
    float scale[V], shift[V];
    int group = a.group_of(t.c);         // the group that channel i belongs to
    int next = (group + 1) * a.Cg - t.c; // the i where the next group begins
    UNROLL_FOR (int i = 0; i < V; i++) {
        if (i == next) {
            group++;
            next += a.Cg;
        }
        const float2 q = parameters.coefficients(i, group_mean[group], group_rstd[group]);
        scale[i] = q.x;
        shift[i] = q.y;
    }
    auto to = place_of(out, t.at_out);
    t.walk([&](int slot, int p, bool more) {
        float v[V];
        unpack<T>(v, loads[slot][threadIdx.x]);
        fetch(slot, more);
        UNROLL_FOR (int i = 0; i < V; i++) {
            v[i] = v[i] * scale[i] + shift[i];
        }
        with_nonlinearity<T>(a.s.nonlinearity, [&](auto nonlinearity) {
            UNROLL_FOR (int i = 0; i < V; i++) {
                v[i] = nonlinearity.f(v[i]);
            }
        });
        if (DROPOUT) apply_dropout(v, a, step, t.b, (size_t)p * a.C + t.c);
        store_out(to, v, factor);
        to += t.stride_out;
    });
}

// Backward. dz is the gradient of z: dout, multiplied by dropout's factors and by the nonlinearity's derivative.
//
//   dxhat = w dz                     w = weight (1 + film scale)
//   dx    = rstd (dxhat - E[dxhat] - xhat E[dxhat xhat])
//         = scale dz - (x_factor x + offset)                        scale = rstd w, as in the forward pass
//   x_factor = rstd^2 E[dxhat xhat]    offset = rstd E[dxhat] - x_factor mean
//
// The first pass computes, for each channel, the sums of dz and of dz x over a block's chunk of pixels. From these
// follow each group's x_factor and offset (group_terms) and the gradients of the parameters (put_gradients).
template <class T, bool DROPOUT>
static __global__ void __launch_bounds__(NORM_THREADS, norm_backward_blocks(DROPOUT))
    groupnorm_sums_kernel(float2* partial, // (B, chunks, C)
                          const T* dout,   // (B, HW, C)
                          NormArgs a) {
    constexpr int V = VEC<T>;
    constexpr int PIXELS = 4;
    __shared__ uint4 loads[PIXELS][2][NORM_THREADS]; // pieces of x and of dout; at the end, each thread's sums
    __shared__ __align__(16) float2 coefficients[NORM_SLAB];
    const NormColumn<T, PIXELS> t{a, (int)blockIdx.z};
    const T* next_x = t.x;
    const T* next_d = dout + t.at_out;
    auto fetch_x = [&](int slot, bool inside) {
        if (inside) copy_async_16(&loads[slot][0][threadIdx.x], next_x);
        next_x += t.stride;
    };
    auto fetch_d = [&](int slot, bool inside) {
        if (inside) copy_async_16(&loads[slot][1][threadIdx.x], next_d);
        next_d += t.stride_out;
        copies_committed();
    };
    // The previous kernel has written neither x nor the parameters and statistics that `channel` loads. So these loads
    // need not wait for it.
    const NormChannel channel(a, t.b, t.slab0 + min(threadIdx.x, a.slab - 1));
    t.begin(fetch_x);
    const uint32_t step = DROPOUT ? (uint32_t)*a.dropout.step : 0;
    await_previous_kernel();
    t.begin(fetch_d);
    if ((int)threadIdx.x < a.slab) coefficients[threadIdx.x] = channel.coefficients(Z_FACTOR<T>);
    __syncthreads();
    float scale[V], shift[V];
    float sum[V] = {};     // of each of the thread's channels, the sum of dz
    float product[V] = {}; // of each of the thread's channels, the sum of dz x
    load_pairs(scale, shift, coefficients + (t.c - t.slab0));
    t.walk([&](int slot, int p, bool more) {
        float x[V], dz[V];
        unpack<T>(x, loads[slot][0][threadIdx.x]);
        unpack<T>(dz, loads[slot][1][threadIdx.x]);
        fetch_x(slot, more);
        fetch_d(slot, more);
        norm_dz<T, DROPOUT>(dz, x, scale, shift, a, step, t.b, (size_t)p * a.C + t.c);
        UNROLL_FOR (int i = 0; i < V; i++) {
            sum[i] += dz[i];
            product[i] += dz[i] * x[i];
        }
    });
    copies_arrived<0>();
    __syncthreads();
    float* const to = (float*)(partial + (size_t)(t.b * gridDim.x + blockIdx.x) * a.C + t.slab0);
    fold_columns<NORM_THREADS>((float*)loads, a.slab / V, sum, product,
                               [&](int k, int column, double total) { to[column * 2 * V + k] = (float)total; });
}

// Backward, second pass: dx = scale dz - (x_factor x + offset) [+ addends, if ADD]. The blocks of its first chunk also
// compute this image's part of the parameters' gradients. GRAD: GradOf<T> or, if dx is also wanted in FP8, Fp8GradOf<T>
template <class T, bool DROPOUT, bool ADD, class GRAD>
static __global__ void __launch_bounds__(NORM_THREADS, norm_backward_blocks(DROPOUT || ADD))
    groupnorm_backward_kernel(GRAD dx1, GRAD dx2,
                              const float2* partial, // (B, chunks, C): the first pass's sums
                              int chunks,            // into how many chunks the first pass divides an image
                              const T* dout,         // (B, HW, C)
                              NormArgs a) {
    constexpr int V = VEC<T>;
    constexpr int PIXELS = 3;
    constexpr int SOURCES = ADD ? 3 : 2;
    __shared__ uint4 loads[PIXELS][SOURCES][NORM_THREADS];
    __shared__ __align__(16) float2 coefficients[NORM_SLAB], terms[NORM_SLAB];
    NormColumn<T, PIXELS> t{a, (int)(gridDim.z - 1 - blockIdx.z)};
    const GRAD to = t.in_x1 ? dx1 : dx2;
    if (!to.dx) t.end = 0; // no pixels: nothing needs the gradient of this tensor
    const uint64_t policy = last_read();
    const T* next_x = t.x;
    const T* next_d = dout + t.at_out;
    // add1 may be the same array as dx: a thread loads a piece of add1 before it writes that piece of dx.
    const T* next_add = ADD && to.add1 ? to.add1 + t.at : nullptr;
    auto fetch = [&](int slot, bool inside) {
        if (inside) {
            copy_async_16(&loads[slot][0][threadIdx.x], next_x, policy);
            copy_async_16(&loads[slot][1][threadIdx.x], next_d, policy);
            if (ADD && to.add1) copy_async_16(&loads[slot][SOURCES - 1][threadIdx.x], next_add);
        }
        next_x += t.stride;
        next_d += t.stride_out;
        next_add += t.stride;
        copies_committed();
    };
    const NormChannel channel(a, t.b, t.slab0 + min(threadIdx.x, a.slab - 1));
    t.begin(fetch);
    const uint32_t step = DROPOUT ? (uint32_t)*a.dropout.step : 0;
    // The previous kernel, the first pass, writes only `partial`. So the loads above did not have to wait for it.
    await_previous_kernel();
    if ((int)threadIdx.x < a.slab) coefficients[threadIdx.x] = channel.coefficients(Z_FACTOR<T>);

    partial += (size_t)t.b * chunks * a.C;
    const int first_group = a.group_of(t.slab0);
    const int last_group = a.group_of(t.slab0 + a.slab - 1);
    for (int g = first_group + threadIdx.x / 8; g <= last_group; g += NORM_THREADS / 8) {
        double sum = 0;     // the sum of dxhat
        double product = 0; // the sum of dxhat x
        UNROLL_4_FOR (int i = threadIdx.x % 8; i < a.Cg * chunks; i += 8) {
            const int chunk = a.group_of(i); // i / Cg: i counts Cg channels of chunk 0, then Cg of chunk 1, ...
            const int c = g * a.Cg + i - chunk * a.Cg;
            const float2 q = partial[(size_t)chunk * a.C + c];
            const double w = NormChannel(a, t.b, c).dxhat_factor();
            sum += w * q.x;
            product += w * q.y;
        }
        const int group = t.b * a.s.groups + g;
        const float2 term = group_terms(sum, product, a.mean[group], a.rstd[group], a);
        const int begin = max(g * a.Cg - t.slab0, 0);
        const int end = min((g + 1) * a.Cg - t.slab0, a.slab);
        for (int c = begin + threadIdx.x % 8; c < end; c += 8) {
            terms[c] = term;
        }
    }
    if (blockIdx.x == 0 && (int)threadIdx.x < a.slab) {
        const double2 sum = sum_pairs<8>(partial + channel.c, chunks, a.C);
        channel.put_gradients(a, sum);
    }
    __syncthreads();

    float scale[V], shift[V], x_factor[V], offset[V];
    load_pairs(scale, shift, coefficients + (t.c - t.slab0));
    load_pairs(x_factor, offset, terms + (t.c - t.slab0));
    float factor = 0; // dx is multiplied by this before it is rounded to FP8
    if constexpr (std::is_same_v<GRAD, Fp8GradOf<T>>) factor = to.fp8.bytes ? *to.fp8.factor : 0;
    size_t at = t.at;
    t.walk([&](int slot, int p, bool more) {
        float x[V], dz[V];
        unpack<T>(x, loads[slot][0][threadIdx.x]);
        unpack<T>(dz, loads[slot][1][threadIdx.x]);
        const uint4 add1 = ADD && to.add1 ? loads[slot][SOURCES - 1][threadIdx.x] : make_uint4(0, 0, 0, 0);
        fetch(slot, more);
        norm_dz<T, DROPOUT>(dz, x, scale, shift, a, step, t.b, (size_t)p * a.C + t.c);
        UNROLL_FOR (int i = 0; i < V; i++) {
            const float dx_scale = scale[i] * (1 / Z_FACTOR<T>); // scale without Z_FACTOR, which only norm_dz needs
            dz[i] = dx_scale * dz[i] - x_factor[i] * x[i] - offset[i];
        }
        if (ADD) add_piece<T>(dz, add1);
        store_gradient(GradOf<T>{to.dx, nullptr, ADD ? to.add2 : nullptr}, at, dz);
        if constexpr (std::is_same_v<GRAD, Fp8GradOf<T>>) store_gradient_fp8<T>(to, at, dz, factor);
        at += t.stride;
    });
}

static struct NormSumsList { NormSums norms[MAX_NORM_SUMS]; } norm_sums_list;

// A block works on 32 channels of one norm. Its 8 rows of threads share the images.
static __global__ void __launch_bounds__(256) norm_sums_kernel(NormSumsList list) {
    __shared__ double2 parts[8][32];
    const NormSums n = list.norms[blockIdx.y];
    const int x = threadIdx.x;
    const int y = threadIdx.y; // this thread adds up images y, y + 8, ...
    const int c = blockIdx.x * 32 + x;
    if ((int)blockIdx.x * 32 >= n.C) return;
    await_previous_kernel();
    const int images = ceil_div(n.B - y, 8);
    double2 total = sum_pairs<4>(n.sums + y * n.C + c, images, 8 * n.C);
    parts[y][x] = total;
    __syncthreads();
    if (y) return;
    for (int i = 1; i < 8; i++) {
        total.x += parts[i][x].x;
        total.y += parts[i][x].y;
    }
    n.dbias[c] = (float)total.x;
    n.dweight[c] = (float)total.y;
}

static void finish_gradients() {
    int C = 0;
    for (int i = 0; i < norm_sums_count; i++) {
        C = std::max(C, norm_sums_list.norms[i].C);
    }
    if (C) launch(norm_sums_kernel, dim3(C / 32, norm_sums_count), dim3(32, 8), 0, norm_sums_list);
    norm_sums_count = 0;
    norm_sums_used = 0;
}
static size_t norm_sums_bytes(const NormShape& s) { return (size_t)s.B * (s.C1 + s.C2) * sizeof(float2); }

// Bytes of the chunks' sums at most, for any batch of up to s.B images. An image has several chunks only if all blocks
// fit on the GPU at the same time. Then they write at most on_chip pairs. Otherwise each image is one chunk.
static size_t groupnorm_backward_workspace(const NormShape& s) {
    const int on_chip = norm_backward_blocks(false) * gpu.sms * NORM_SLAB;
    const int of_batch = s.B * (s.C1 + s.C2);
    return std::max(on_chip, of_batch) * sizeof(float2);
}

static void groupnorm_forward(act* out, float* mean, float* rstd, const act* x1, Stats stats1, const act* x2,
                              Stats stats2, const float* weight, const float* bias, const float* scale_shift,
                              int ss_stride, Dropout dropout, NormShape s, Fp8Copy fp8) {
    const bool drop = dropout.p > 0;
    NormArgs a{x1, x2, weight, bias, scale_shift, ss_stride, dropout, s};
    const dim3 grid = norm_grid(a, norm_forward_blocks(drop), s.HW);
    auto run = [&](auto kernel, auto to) { launch(kernel, grid, NORM_THREADS, 0, to, mean, rstd, stats1, stats2, a); };
    if (fp8.bytes) {
        if (!act_has_wgmma()) die("internal error: FP8 is for Hopper");
        if (drop) return run(groupnorm_forward_kernel<bf16, true, Fp8Copy>, fp8);
        return run(groupnorm_forward_kernel<bf16, false, Fp8Copy>, fp8);
    }
    with_act([&]<class T>(T) {
        run(drop ? groupnorm_forward_kernel<T, true, T*> : groupnorm_forward_kernel<T, false, T*>, (T*)out);
    });
}

template <class T> static auto norm_first_pass(bool drop) {
    if (drop) return groupnorm_sums_kernel<T, true>;
    return groupnorm_sums_kernel<T, false>;
}
template <class T, class GRAD> static auto norm_second_pass(bool drop, bool addends) {
    if (addends && drop) return groupnorm_backward_kernel<T, true, true, GRAD>;
    if (addends) return groupnorm_backward_kernel<T, false, true, GRAD>;
    if (drop) return groupnorm_backward_kernel<T, true, false, GRAD>;
    return groupnorm_backward_kernel<T, false, false, GRAD>;
}

static void groupnorm_backward(Grad dx1, Grad dx2,                   // like x1 and x2
                               float* dweight, float* dbias,         // (C1 + C2)
                               float* dscale_shift,                  // (B, ss_stride) or null
                               const act* dout,                      // (B, HW, C1 + C2)
                               const act* x1, const act* x2,         // (B, HW, C1), (B, HW, C2)
                               const float* mean, const float* rstd, // (B, groups)
                               const float* weight, const float* bias, const float* scale_shift, int ss_stride,
                               Dropout dropout, NormShape s, Fp8Copy dx1_fp8, Fp8Copy dx2_fp8) {
    const bool drop = dropout.p > 0;
    const bool addends = dx1.add1 || dx1.add2 || dx2.add1 || dx2.add2;

    // The terms of all images stay in memory until finish_gradients adds up those of many group norms.
    const size_t bytes = norm_sums_bytes(s);
    if (norm_sums_count == MAX_NORM_SUMS || norm_sums_used + bytes > device.norm_sums_bytes) finish_gradients();
    float2* const sums = (float2*)(device.norm_sums + norm_sums_used);
    norm_sums_list.norms[norm_sums_count++] = NormSums{sums, dweight, dbias, s.B, s.C1 + s.C2};
    norm_sums_used += bytes;

    NormArgs a{x1, x2, weight, bias, scale_shift, ss_stride, dropout, s, mean, rstd, dscale_shift, sums};
    const NormWhole w = plan_norm_whole(s, addends);
    auto run = [&]<class T, class GRAD>(T, GRAD to1, GRAD to2) {
        if (w.chunks) {
            auto kernel = norm_whole_kernel<T, GRAD>(drop);
            const dim3 grid(w.chunks, a.C / w.slab, s.B);
            return launch_on(MAIN_STREAM, w.chunks, kernel, grid, w.threads, w.bytes(), to1, to2, dout, a, w);
        }
        // Each block of the second pass reads all chunks' sums of its image, so the first pass has at most 64 chunks.
        // With addends, fewer blocks of the second pass may fit on a multiprocessor, so its chunks are others.
        auto first_pass = norm_first_pass<T>(drop);
        auto second_pass = norm_second_pass<T, GRAD>(drop, addends);
        float2* const partial = (float2*)device.workspace;
        dim3 grid = norm_grid(a, norm_backward_blocks(drop), 64);
        const int chunks = grid.x;
        launch(first_pass, grid, NORM_THREADS, 0, partial, dout, a);
        if (addends) grid = norm_grid(a, norm_backward_blocks(true), s.HW);
        launch(second_pass, grid, NORM_THREADS, 0, to1, to2, partial, chunks, dout, a);
    };
    if (dx1_fp8.bytes || dx2_fp8.bytes) {
        if (!act_has_wgmma()) die("internal error: FP8 is for Hopper");
        using GradFp8 = Fp8GradOf<bf16>;
        const GradFp8 to1{typed<bf16>(dx1), dx1_fp8};
        const GradFp8 to2{typed<bf16>(dx2), dx2_fp8};
        return run(bf16(), to1, to2);
    }
    with_act([&]<class T>(T) { run(T(), typed<T>(dx1), typed<T>(dx2)); });
}

// =====================================================================================================================
// Attention
// Over T = H * W pixels. qkv (B, T, 3C) holds q, k and v, each of which has C = heads * d channels. The formulas are
// for one image and one head: q, k, v, out and their gradients are matrices (T, d), and S, P, dP and dS are (T, T).
//
//   forward    S = q k^T / sqrt(d)      P = softmax(S), by rows      out = P v
//   backward   D = rowsum(dout * out)   dP = dout v^T                dS = P * (dP - D)       *: element by element
//              dv = P^T dout            dq = dS k / sqrt(d)          dk = dS^T q / sqrt(d)
//
// S and P are never written to the GPU's memory (FlashAttention, Dao et al. 2022). A block owns some rows of one head,
// such as queries, and the rows that these are combined with, such as keys and values, stream past in tiles. The
// forward pass stores two numbers for each row of S (SoftmaxRow), from which the backward pass computes P again.
// The hardware computes powers of 2. So scores are q k^T without the division, and get the factor log2(e) / sqrt(d) in
// the exponent. dq and dk are multiplied by 1 / sqrt(d) when they are stored.
// Hopper's kernels: gpu/hopper/attention_wgmma.h. Heads of any size: gpu/attention_general.h.

// Copies rows row0 ... row0 + ROWS - 1 of one head to `to` (ROWS, PITCH), with zeros beyond T rows or d columns.
template <class Tile, int ROWS, class T>
INLINE void load_rows(T* to, const HeadRows<const T>& from, int row0, const AttentionCall& a) {
    constexpr int PIECES = Tile::DIM / VEC<T>;
    constexpr int ROWS_AT_ONCE = Tile::THREADS / PIECES;
    const int r = threadIdx.x / PIECES;
    const int c = threadIdx.x % PIECES * VEC<T>;
    const T* piece = from.p + (size_t)(row0 + r) * from.pitch + c;
    to += r * Tile::PITCH + c; // where this thread's first piece is written
    if (a.d % VEC<T> == 0) {
        const int rows_left = c < a.d ? a.T - row0 - r : 0;
        UNROLL_FOR (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
            copy_async_16(to + i * Tile::PITCH, piece, i < rows_left);
            piece += ROWS_AT_ONCE * from.pitch;
        }
    } else { // Heads of such a d do not begin at multiples of 16 bytes, so elements are copied one by one.
        NO_UNROLL_FOR (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
            NO_UNROLL_FOR (int k = 0; k < VEC<T>; k++) {
                const bool inside = row0 + r + i < a.T && c + k < a.d;
                to[i * Tile::PITCH + k] = inside ? piece[k] : (T)0.0f;
            }
            piece += ROWS_AT_ONCE * from.pitch;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --- attention_forward and attention_backward: heads of up to 256 channels, in fp32 128, any GPU
// Each warp of a block owns 16 MT rows (queries; backward: queries or keys). Other rows stream past through two stages
// of shared memory, N at a time, of which SUB are multiplied at a time:
//
//      S (M, SUB)  =  own rows (M, d) x streamed rows (SUB, d)^T       in registers: 16 MT rows of S for each warp
//      out (M, d) +=  P (M, SUB) x streamed rows (SUB, d)              P: the registers of S (see load_score_fragments)
//
// A result of mma.sync lies in the registers as its first operand does (two tiles of the result are one fragment). So P
// need not go through shared memory. In shared memory, rows are padded by 16 bytes, so that the eight rows that
// ldmatrix reads at once lie in different banks.
// In the backward pass, the blocks that own queries and those that own keys both compute S and dP. In return, every sum
// is computed by one block, in one order.

// N, the number of streamed rows in a stage. row_bytes: the bytes of a row in shared memory, without padding
constexpr int attention_streamed_rows(int row_bytes, int MT) {
    if (row_bytes > 256) return 16;
    if (row_bytes > 128) return 32;
    if (row_bytes > 64 || MT == 1) return 64;
    return 128;
}
// how many blocks fit on a multiprocessor: a thread needs registers for the 16 MT rows of its warp
constexpr int attention_forward_blocks(int row_bytes, int MT) {
    if (row_bytes > 128) return 1;
    if (row_bytes * MT <= 64) return 6;
    return MT == 1 ? 4 : 3;
}
constexpr int attention_backward_blocks(int row_bytes, int MT) {
    if (row_bytes > 128) return 1;
    if (row_bytes * MT <= 64) return 4;
    return row_bytes * MT <= 128 ? 3 : 2;
}

template <class T_, int DIM_, int MT_, bool KEEP_> struct AttentionTile {
    typedef T_ T;
    static constexpr int DIM = DIM_; // columns of a row in shared memory: at least d; those beyond d hold zeros
    static constexpr int ROW_BYTES = DIM * sizeof(T);
    static constexpr int V = VEC<T>;
    static constexpr int PARTS = ::PARTS<T>; // bf16: 1; fp32: 2, since each float is multiplied as two fp16 numbers
    // true: the fragments of own rows stay in registers; false: they are read again for each product
    static constexpr bool KEEP = KEEP_;
    // With MT = 2 a warp multiplies each streamed row that it has read by two tiles of 16 own rows.
    static constexpr int MT = MT_;
    static constexpr int WARP_ROWS = 16 * MT;
    static constexpr int WARPS = ROW_BYTES > 256 ? 2 : 4;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int M = WARPS * WARP_ROWS;
    // Streamed rows are loaded N at a time, and multiplied SUB at a time: NT tiles of 8 columns of S.
    static constexpr int N = attention_streamed_rows(ROW_BYTES, MT);
    static constexpr int SUB = std::min(N, 32);
    static constexpr int NT = SUB / 8;
    // Shared memory. Forward: the own rows, and two stages of k and v. Backward: the own rows of two operands, and two
    // stages of B1 and B2 and, if queries stream, of their SoftmaxRow and D. PITCH, OWN, STREAMED are in elements.
    static constexpr int PITCH = DIM + V; // elements from one row to the next
    static constexpr int OWN = M * PITCH;
    static constexpr int STREAMED = N * PITCH;
    static constexpr int FORWARD_BYTES = (OWN + 4 * STREAMED) * sizeof(T);
    static constexpr int QUERY_VALUES = 3 * N; // floats of a stage: top, log_sum and D of each query
    static constexpr int QUERY_BYTES = 2 * QUERY_VALUES * sizeof(float);
    static constexpr int BACKWARD_BYTES = (2 * OWN + 4 * STREAMED) * sizeof(T) + QUERY_BYTES;
    static constexpr int FORWARD_BLOCKS = attention_forward_blocks(ROW_BYTES, MT);
    static constexpr int BACKWARD_BLOCKS = attention_backward_blocks(ROW_BYTES, MT);
};

// What shared memory and a warp's registers hold in the forward kernel, for MT = 1 and four warps:
//
//      own rows (M, PITCH)        stage 0         stage 1              registers of warp 1
//    [ q of warp 0: 16 rows ]   [ k: N rows ]   [ k: N rows ]        q      16 x d     OwnRows (KEEP)
//    [ q of warp 1          ]   [ v: N rows ]   [ v: N rows ]        S, P   16 x SUB   Scores
//    [ q of warp 2          ]    multiplied      being loaded        out    16 x d     RowSums
//    [ q of warp 3          ]                                        top, sum of 16 rows

// A warp's own rows of one operand, as A fragments: kept[k][m] holds columns 16 k ... 16 k + 15 of the rows 16 m ... 16
// m + 15. Without KEEP there is only one slot, and each product reads the rows again.
template <class Tile> struct OwnRows {
    static constexpr int SLOTS = Tile::KEEP ? Tile::DIM / 16 : 1;
    const typename Tile::T* rows; // the address that this lane gives to ldmatrix to read the first columns
    uint32_t kept[SLOTS][Tile::MT][4 * Tile::PARTS];
    // take_apart_fragments scales floats before it splits them. scale[slot] undoes this (in bf16 it is 1).
    float scale[SLOTS];

    __device__ void load(const typename Tile::T* own) {
        const int lane = threadIdx.x % 32;
        const int row = warp_row<Tile>() + lane % 16;
        rows = own + row * Tile::PITCH + lane / 16 * Tile::V;
        if constexpr (Tile::KEEP) {
            UNROLL_FOR (int k = 0; k < SLOTS; k++) read(k);
        }
    }
    __device__ void read(int k) {
        const int slot = Tile::KEEP ? k : 0;
        UNROLL_FOR (int m = 0; m < Tile::MT; m++)
            UNROLL_FOR (int h = 0; h < Tile::PARTS; h++) { // one ldmatrix reads 32 bytes of each of 16 rows
                uint32_t* const a = kept[slot][m] + 4 * h;
                const auto* from = rows + 16 * m * Tile::PITCH + 16 * k + 8 * h;
                ldmatrix(a, a + 2, shared_address(from));
                // A float's fragment is read in two halves. Now each pair of registers belongs to the same row.
                if (Tile::PARTS == 2) std::swap(a[1], a[2]);
            }
        scale[slot] = take_apart_fragments<typename Tile::T>(kept[slot]);
    }
};

// mma.sync's layout: tiles of 16 rows x 8 columns. With g = lane / 4 and q = lane % 4, a thread holds four numbers of
// tile [m][n]: columns 2q and 2q + 1 of row g ([0], [1]) and of row g + 8 ([2], [3]). Scores: S, P, dP or dS, for SUB
// streamed rows. RowSums: a result such as out or dq, 8 CT of its d columns.
template <class Tile> using Scores = float[Tile::MT][Tile::NT][4];
template <class Tile, int CT> using RowSums = float[Tile::MT][CT][4];

// scores += own rows x (streamed rows n0 ... n0 + SUB - 1)^T, as in S = q k^T
template <class Tile, class T>
INLINE void multiply_transposed(Scores<Tile>& scores, OwnRows<Tile>& own, const T* streamed, int n0) {
    const int lane = threadIdx.x % 32;
    const int row = n0 + lane / 16 * 8 + lane % 8; // the row whose address this lane gives to ldmatrix
    streamed += row * Tile::PITCH + lane / 8 % 2 * Tile::V;
    UNROLL_FOR (int k = 0; k < Tile::DIM / 16; k++) {
        const int slot = Tile::KEEP ? k : 0;
        if (!Tile::KEEP) own.read(k);
        uint32_t b[Tile::NT][2 * Tile::PARTS];
        // Each ldmatrix loads four matrices of 8 rows x 16 bytes: two from 8 rows, and two from the next 8 rows.
        UNROLL_FOR (int n = 0; n < Tile::NT; n += 2)
            UNROLL_FOR (int h = 0; h < Tile::PARTS; h++) {
                const T* from = streamed + 8 * n * Tile::PITCH + 16 * k + 8 * h;
                ldmatrix(b[n] + 2 * h, b[n + 1] + 2 * h, shared_address(from));
            }
        const float scale = own.scale[slot] * take_apart_fragments<T>(b); // for bf16 it is 1
        multiply<T, Tile::MT, Tile::NT>(scores[0], Tile::NT, 1, own.kept[slot], b, scale);
    }
}

// a = columns 16 k ... 16 k + 15 of p, as A fragments. Each lane already holds the numbers of its fragments.
template <class Tile, int REGISTERS>
INLINE void load_score_fragments(uint32_t (&a)[Tile::MT][REGISTERS], const Scores<Tile>& p, int k) {
    UNROLL_FOR (int m = 0; m < Tile::MT; m++)
        UNROLL_FOR (int i = 0; i < 4; i++) { // i = 0, 1: rows g, g + 8 of the first 8 columns; i = 2, 3: of the next 8
            const float* const two = p[m][2 * k + i / 2] + i % 2 * 2;
            if constexpr (Tile::PARTS == 1) {
                a[m][i] = pack_pair<typename Tile::T>(two[0], two[1]);
            } else {
                a[m][2 * i] = __float_as_uint(two[0]);
                a[m][2 * i + 1] = __float_as_uint(two[1]);
            }
        }
}

// sums += p * (columns c0 ... c0 + 8 CT - 1 of the streamed rows n0 ... n0 + SUB - 1), as in out += P v
template <class Tile, int CT, class T>
INLINE void multiply_add(RowSums<Tile, CT>& sums, const Scores<Tile>& p, const T* streamed, int n0, int c0) {
    constexpr int PARTS = Tile::PARTS;
    constexpr int AT_ONCE = 4; // this many tiles of 8 columns are multiplied at a time
    const int lane = threadIdx.x % 32;
    const T* lane_rows; // floats: the first element that this lane loads; bf16: the address that it gives to ldmatrix
    if (PARTS == 1) lane_rows = streamed + (n0 + lane % 16) * Tile::PITCH + c0 + lane / 16 * 8;
    else lane_rows = streamed + (n0 + lane % 4 * 2) * Tile::PITCH + c0 + lane / 4;
    const uint32_t lane_address = shared_address(lane_rows);
    UNROLL_FOR (int k = 0; k < Tile::NT / 2; k++) {
        uint32_t a[Tile::MT][4 * PARTS];
        load_score_fragments<Tile>(a, p, k);
        const float a_scale = take_apart_fragments<T>(a);
        UNROLL_FOR (int n = 0; n < CT; n += AT_ONCE) {
            uint32_t b[AT_ONCE][2 * PARTS];
            UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
                const int offset = 16 * k * Tile::PITCH + 8 * (n + i);
                const uint32_t from = lane_address + offset * sizeof(T);
                if constexpr (PARTS == 1) {
                    if (i % 2 == 0) ldmatrix_trans(b[i], b[i + 1], from);
                } else {
                    UNROLL_FOR (int r = 0; r < 4; r++) { // rows 2q, 2q + 1, 2q + 8, 2q + 9 (q = lane % 4)
                        const int row = r / 2 * 8 + r % 2;
                        const float v = load_float(from + row * Tile::PITCH * 4);
                        b[i][r] = __float_as_uint(v);
                    }
                }
            }
            const float scale = a_scale * take_apart_fragments<T>(b);
            multiply<T, Tile::MT, AT_ONCE>(sums[0] + n, CT, 1, a, b, scale);
        }
    }
}

// Writes factor * sums to columns c0 ... c0 + 8 CT - 1 of a warp's rows. They go through shared memory, over the warp's
// own rows, which no other warp reads. From there they are stored in pieces of 16 bytes.
template <class Tile, int CT, class T>
INLINE void store_rows(const HeadRows<T>& to, T* own, const RowSums<Tile, CT>& sums, const HeadTile& tile, int c0,
                       float factor = 1) {
    constexpr int V = Tile::V;
    constexpr int PIECES = 8 * CT / V;
    const int lane = threadIdx.x % 32;
    const int first = warp_row<Tile>();
    T* warp_rows = own + first * Tile::PITCH;
    __syncwarp();
    UNROLL_FOR (int m = 0; m < Tile::MT; m++)
        UNROLL_FOR (int n = 0; n < CT; n++)
            UNROLL_FOR (int r = 0; r < 2; r++) {
                const int row = 16 * m + 8 * r + lane / 4;
                const int column = 8 * n + lane % 4 * 2;
                const float* const two = sums[m][n] + 2 * r;
                store_two(warp_rows + row * Tile::PITCH + column, factor * two[0], factor * two[1]);
            }
    __syncwarp();
    for (int i = lane; i < Tile::WARP_ROWS * PIECES; i += 32) {
        const int r = i / PIECES;
        const int c = i % PIECES * V;
        const int t = tile.row0 + first + r;
        if (t >= tile.a.T || c0 + c >= tile.a.d) continue;
        const T* piece = warp_rows + r * Tile::PITCH + c;
        T* place = to.row(t) + c0 + c;
        if (tile.a.d % V == 0) *(uint4*)place = *(const uint4*)piece;
        else
            for (int k = 0; k < V && c0 + c + k < tile.a.d; k++) {
                place[k] = piece[k];
            }
    }
}

// Only the first `valid` columns belong to rows below T. The other scores become -infinity, so P is 0 there.
template <class Tile> INLINE void mask_columns(Scores<Tile>& scores, int valid) {
    if (valid >= Tile::SUB) return;
    UNROLL_FOR (int m = 0; m < Tile::MT; m++)
        UNROLL_FOR (int n = 0; n < Tile::NT; n++)
            UNROLL_FOR (int i = 0; i < 4; i++) {
                const int column = 8 * n + (int)threadIdx.x % 4 * 2 + i % 2;
                if (column >= valid) scores[m][n][i] = -INFINITY;
            }
}

// The softmax over all scores so far of a thread's rows (FlashAttention, algorithm 1). top is a row's highest score,
// and sum the sum of its P. New scores S change top, sum and out:
//   top' = max(top, max S)    shrink = e^((top - top') / sqrt(d))    P = e^((S - top') / sqrt(d))
//   sum' = shrink sum + rowsum(P)                                    out' = shrink out + P v (by multiply_add)
// In top and in sum, [m][0] belongs to row g = lane / 4 of tile m, and [m][1] to row g + 8. scale: log2(e) / sqrt(d)
template <class Tile> struct RunningSoftmax {
    float top[Tile::MT][2];
    float sum[Tile::MT][2] = {}; // the sum of P over this thread's columns

    INLINE RunningSoftmax() {
        for (auto& rows : top) { // every score will be higher than this
            rows[0] = -INFINITY;
            rows[1] = -INFINITY;
        }
    }
    template <int CT> INLINE void add(Scores<Tile>& p, RowSums<Tile, CT>& out, float scale) {
        constexpr int NT = Tile::NT;
        UNROLL_FOR (int m = 0; m < Tile::MT; m++)
            UNROLL_FOR (int r = 0; r < 2; r++) {
                float lane_top = top[m][r];
                UNROLL_FOR (int n = 0; n < NT; n++) {
                    const float higher = fmaxf(p[m][n][2 * r], p[m][n][2 * r + 1]);
                    lane_top = fmaxf(lane_top, higher);
                }
                const float highest = lane_max<1, 2>(lane_top); // over the four lanes that share the row
                const float shrink = exp2_fast((top[m][r] - highest) * scale);
                top[m][r] = highest;
                sum[m][r] *= shrink;
                UNROLL_FOR (int n = 0; n < CT; n++) {
                    out[m][n][2 * r] *= shrink;
                    out[m][n][2 * r + 1] *= shrink;
                }
                // If large scores were scaled before the subtraction, the rounding errors would be larger.
                UNROLL_FOR (int n = 0; n < NT; n++)
                    UNROLL_FOR (int i = 2 * r; i < 2 * r + 2; i++) {
                        p[m][n][i] = exp2_fast((p[m][n][i] - highest) * scale);
                        sum[m][r] += p[m][n][i];
                    }
            }
    }
};

// grid (B * heads * tiles of T): a block works on M queries of one head. For each stage of N keys and values S = q k^T,
// P = e^((S - top) / sqrt(d)), out += P v. At the end each row of out is divided by the sum of its P.
template <class Tile, class T = typename Tile::T>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::FORWARD_BLOCKS)
    attention_forward_kernel(AttentionCall a) {
    constexpr int N = Tile::N, MT = Tile::MT;
    constexpr int CT = Tile::DIM / 8; // tiles of 8 columns of out
    extern __shared__ __align__(128) uint4 shared_memory[];
    T* own = (T*)shared_memory;
    // Stage i: its keys begin at element 2 * i * STREAMED, and its values at element (2 * i + 1) * STREAMED.
    T* streamed = own + Tile::OWN;
    const HeadTile tile{a, Tile::M};
    const int lane = threadIdx.x % 32;
    const auto k = tile.of_qkv<const T>(a.qkv, K_PART);
    const auto v = tile.of_qkv<const T>(a.qkv, V_PART);
    const float scale = LOG2E * rsqrtf((float)a.d);
    auto load_stage = [&](int stage, int first) {
        load_rows<Tile, N>(streamed + stage * 2 * Tile::STREAMED, k, first, a);
        load_rows<Tile, N>(streamed + (stage * 2 + 1) * Tile::STREAMED, v, first, a);
    };
    await_previous_kernel();
    load_rows<Tile, Tile::M>(own, tile.of_qkv<const T>(a.qkv, Q_PART), tile.row0, a);
    load_stage(0, 0);
    OwnRows<Tile> q;
    RowSums<Tile, CT> out = {};
    RunningSoftmax<Tile> softmax;
    for (int first = 0, stage = 0; first < a.T; first += N, stage ^= 1) {
        copies_committed();
        copies_arrived<0>();
        __syncthreads(); // all threads' copies have arrived, and no thread reads the other stage any more
        if (first == 0) q.load(own);
        if (first + N < a.T) load_stage(stage ^ 1, first + N);
        const T* keys = streamed + stage * 2 * Tile::STREAMED;
        const T* values = keys + Tile::STREAMED;
        // A thread's registers have no room for the scores of N keys at once.
        NO_UNROLL_FOR (int sub = 0; sub < N && first + sub < a.T; sub += Tile::SUB) {
            Scores<Tile> p = {}; // S, and then P
            multiply_transposed<Tile>(p, q, keys, sub);
            mask_columns<Tile>(p, a.T - first - sub);
            softmax.add(p, out, scale);
            multiply_add<Tile, CT>(out, p, values, sub, 0);
        }
    }
    // Divides out by sum. Four lanes share a row, and each of them holds a part of the row's sum.
    UNROLL_FOR (int m = 0; m < MT; m++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
            const float total = lane_sum<1, 2>(softmax.sum[m][r]);
            const float factor = 1 / total;
            const int t = tile.row0 + warp_row<Tile>() + 16 * m + 8 * r + lane / 4;
            if (lane % 4 == 0 && t < a.T) a.rows[tile.row_index(t)] = SoftmaxRow{softmax.top[m][r], log2f(total)};
            UNROLL_FOR (int n = 0; n < CT; n++) {
                out[m][n][2 * r] *= factor;
                out[m][n][2 * r + 1] *= factor;
            }
        }
    store_rows<Tile, CT>(tile.of_out<T>(a.to), own, out, tile, 0);
}

// If T <= SHORT_T, each block of attention_backward_kernel computes D of its head itself, which saves a launch.
// Otherwise attention_dots_kernel computes D before. Rows beyond T get the last row's D.
constexpr int SHORT_T = 64;
template <class T, int THREADS> INLINE void compute_dots(float* D, const HeadTile& tile, const AttentionCall& a) {
    const auto dout = tile.of_out<const T>(a.dout);
    const auto out = tile.of_out<const T>(a.out);
    NO_UNROLL_FOR (int i = threadIdx.x / 4; i < SHORT_T; i += THREADS / 4) { // four threads work on each row
        const int row = min(i, a.T - 1);
        const float dot = row_dot(dout.row(row), out.row(row), a.d);
        if (threadIdx.x % 4 == 0) D[i] = dot;
    }
    __syncthreads();
}

struct Query {
    float top, log_sum, D;
};

// On entry p holds S, and ds holds dP. On return p holds P, and ds holds dS:
//   P = e^((S - top) / sqrt(d)) / sum = 2^((S - top) scale2 - log_sum)      scale2 = log2(e) / sqrt(d)
//   dS = P (dP - D)
// If the block owns queries, own_queries[m] holds the Query of rows g and g + 8 of tile m (g = lane / 4). If it owns
// keys, each column is a streamed query: rows (SUB, 2) holds top and log_sum, and dots (SUB) holds D.
template <class Tile, bool OWNS_KEYS>
INLINE void softmax_gradient(Scores<Tile>& p, Scores<Tile>& ds, const Query (&own_queries)[Tile::MT][2],
                             const float* rows, const float* dots, float scale2) {
    UNROLL_FOR (int n = 0; n < Tile::NT; n++) {
        Query columns[2]; // the Query of each of this thread's two columns
        const int c = 8 * n + threadIdx.x % 4 * 2;
        if (OWNS_KEYS) {
            const float4 two = *(const float4*)(rows + 2 * c);
            const float2 dot = *(const float2*)(dots + c);
            columns[0] = {two.x, two.y, dot.x};
            columns[1] = {two.z, two.w, dot.y};
        }
        UNROLL_FOR (int m = 0; m < Tile::MT; m++)
            UNROLL_FOR (int i = 0; i < 4; i++) {
                const Query& query = OWNS_KEYS ? columns[i % 2] : own_queries[m][i / 2];
                const float P = exp2_fast((p[m][n][i] - query.top) * scale2 - query.log_sum);
                p[m][n][i] = P;
                ds[m][n][i] = P * (ds[m][n][i] - query.D);
            }
    }
}

// A block of the backward pass owns queries, and computes dq, or keys (OWNS_KEYS), and computes dk and dv. Both run
// this code, with own rows A1, A2 and streamed rows B1, B2:
//
//   own     A1   A2     B1   B2        S = A1 B1^T        dP = A2 B2^T
//   queries q    dout   k    v         dq = dS B1
//   keys    k    v      q    dout      dk = dS B1         dv = P B2        (S, P, dP, dS are transposed here)
//
// It computes the DC columns from chunk * DC on: the registers have no room for more than 128 columns. If T <= SHORT_T,
// it computes D itself, into short_D, and does not read the argument D.
template <class Tile, bool OWNS_KEYS, class T = typename Tile::T>
INLINE void attention_backward_rows(const AttentionCall& a, const float* D, int chunk, float* short_D) {
    constexpr int N = Tile::N, MT = Tile::MT;
    constexpr int DC = std::min(Tile::DIM, 128);
    constexpr int CT = DC / 8; // tiles of 8 columns
    extern __shared__ __align__(128) uint4 shared_memory[];
    T* own1 = (T*)shared_memory;
    T* own2 = own1 + Tile::OWN;
    T* streamed = own2 + Tile::OWN;
    float* query_values = (float*)(streamed + 4 * Tile::STREAMED); // each stage: SoftmaxRow[N], then D[N]
    const HeadTile tile{a, Tile::M};
    const int lane = threadIdx.x % 32;
    const bool short_rows = a.T <= SHORT_T;
    const BackwardOperands<T> operands(tile, a, OWNS_KEYS);
    const SoftmaxRow* const rows = a.rows + tile.row_index(0);
    D += tile.row_index(0);
    auto load_stage = [&](int stage, int first) {
        load_rows<Tile, N>(streamed + stage * 2 * Tile::STREAMED, operands.B1, first, a);
        load_rows<Tile, N>(streamed + (stage * 2 + 1) * Tile::STREAMED, operands.B2, first, a);
        if (!OWNS_KEYS) return;
        // Rows beyond T get the last row's values. These are finite, so P and dS become 0 where scores are -infinity.
        float* values = query_values + stage * Tile::QUERY_VALUES;
        for (int i = threadIdx.x; i < N; i += Tile::THREADS) {
            const int t = min(first + i, a.T - 1);
            copy_async<8>(values + 2 * i, rows + t);
            if (!short_rows) copy_async<4>(values + 2 * N + i, D + t);
        }
    };
    await_previous_kernel();
    load_rows<Tile, Tile::M>(own1, operands.A1, tile.row0, a);
    load_rows<Tile, Tile::M>(own2, operands.A2, tile.row0, a);
    load_stage(0, 0);
    if (short_rows) compute_dots<T, Tile::THREADS>(short_D, tile, a);
    Query own_queries[MT][2];
    UNROLL_FOR (int m = 0; m < MT; m++)
        UNROLL_FOR (int r = 0; r < 2 && !OWNS_KEYS; r++) {
            const int row = tile.row0 + (warp_row<Tile>() + 16 * m + 8 * r + lane / 4);
            const int t = min(row, a.T - 1);
            own_queries[m][r] = {rows[t].top, rows[t].log_sum, short_rows ? short_D[t] : D[t]};
        }

    const float scale = rsqrtf((float)a.d);
    const float scale2 = scale * LOG2E; // the factor of scores in the exponent of 2
    OwnRows<Tile> a1, a2;
    RowSums<Tile, CT> sum1 = {};                // dq or dk, before the division by sqrt(d)
    float sum2[OWNS_KEYS ? MT : 1][CT][4] = {}; // dv; not used if the block owns queries
    for (int first = 0, stage = 0; first < a.T; first += N, stage ^= 1) {
        copies_committed();
        copies_arrived<0>();
        __syncthreads(); // all threads' copies have arrived, and no thread reads the other stage any more
        if (first == 0) {
            a1.load(own1);
            a2.load(own2);
        }
        if (first + N < a.T) load_stage(stage ^ 1, first + N);
        const T* b1 = streamed + stage * 2 * Tile::STREAMED;
        const T* b2 = b1 + Tile::STREAMED;
        const float* stage_rows = query_values + stage * Tile::QUERY_VALUES;
        const float* dots = short_rows ? short_D + first : stage_rows + 2 * N;
        NO_UNROLL_FOR (int sub = 0; sub < N && first + sub < a.T; sub += Tile::SUB) {
            Scores<Tile> p = {};  // S, and then P
            Scores<Tile> ds = {}; // dP, and then dS
            multiply_transposed<Tile>(p, a1, b1, sub);
            mask_columns<Tile>(p, a.T - first - sub);
            multiply_transposed<Tile>(ds, a2, b2, sub);
            softmax_gradient<Tile, OWNS_KEYS>(p, ds, own_queries, stage_rows + 2 * sub, dots + sub, scale2);
            if constexpr (OWNS_KEYS) multiply_add<Tile, CT>(sum2, p, b2, sub, chunk * DC);
            multiply_add<Tile, CT>(sum1, ds, b1, sub, chunk * DC);
        }
    }
    const auto d_own = tile.of_qkv<T>(a.to, OWNS_KEYS ? K_PART : Q_PART);
    store_rows<Tile, CT>(d_own, own1, sum1, tile, chunk * DC, scale);
    if constexpr (OWNS_KEYS) store_rows<Tile, CT>(tile.of_qkv<T>(a.to, V_PART), own2, sum2, tile, chunk * DC);
}

// grid (B * heads * tiles of T, 1, 2 * chunks). Blocks that own keys have more work, so they are started first.
template <class Tile>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::BACKWARD_BLOCKS)
    attention_backward_kernel(AttentionCall a, const float* D) {
    __shared__ float short_D[SHORT_T];
    const bool owns_keys = blockIdx.z % 2 == 0;
    const int chunk = blockIdx.z / 2;
    if (owns_keys) attention_backward_rows<Tile, true>(a, D, chunk, short_D);
    else attention_backward_rows<Tile, false>(a, D, chunk, short_D);
}

// The backward pass if a.dout is not null, and otherwise the forward pass, for heads of up to DIM channels.
template <class T, int DIM, int MT = DIM * sizeof(T) <= 128 ? 2 : 1>
static void launch_attention(const AttentionCall& a) {
    // Small images have few rows. With MT = 2 there would be too few blocks to fill the GPU.
    const int few_rows = a.dout ? 64 : 256;
    if (MT == 2 && a.T <= few_rows) {
        launch_attention<T, DIM, 1>(a);
        return;
    }
    constexpr int ROW_BYTES = DIM * sizeof(T);
    // AttentionTile's last argument is KEEP: own rows are so short that their fragments stay in registers.
    using Forward = AttentionTile<T, DIM, MT, (ROW_BYTES <= 128)>;
    using Backward = AttentionTile<T, DIM, MT, (ROW_BYTES * MT <= 128)>;
    const int tiles = a.all_heads * ceil_div(a.T, Forward::M);
    if (!a.dout) return launch(attention_forward_kernel<Forward>, tiles, Forward::THREADS, Forward::FORWARD_BYTES, a);
    const dim3 grid(tiles, 1, 2 * ceil_div(a.d, 128));
    const float* D = a.T > SHORT_T ? launch_attention_dots<T>(a) : nullptr;
    launch(attention_backward_kernel<Backward>, grid, Backward::THREADS, Backward::BACKWARD_BYTES, a, D);
}

// =====================================================================================================================
// Convolution
// 1x1 and 3x3 convolutions, computed as products of matrices (implicit GEMM):
//
//   out[pixel, co] = sum over taps and input channels ci of   weight[co, tap, ci] * x[source(pixel, tap), ci]
//
//   weights (Cout, taps x Cin)   times   patches (taps x Cin, pixels)   =   out (Cout, pixels)
//
// Column p of the patches holds the inputs that the filter reads for output pixel p. The kernels make patches in shared
// memory, a part at a time, with zeros for the padding. A tap's number is kh * kernel + kw. A chunk is 8 neighbouring
// channels of one pixel, or their weights. k is the index over which a product sums.
// An input's gradient (BACKWARD) is a convolution, too: its input is dout, Cout and Cin change places, and the taps
// have the reverse order. The result of any convolution is rounded once, after bias, embedding and addends. Statistics
// are sums of the rounded values, because the next group norm reads these.
// 1x1, stride 2, and the first and last layers: gpu/conv_any.h. Hopper's kernels: gpu/hopper/.
//
// The way from a layer to an instruction of the tensor cores, from function to function (in brackets: fp32):
//
//   forward_conv                     what a layer of kind CONV calls
//   conv_forward                     fills a ConvCall; upsampling, stride 2, few channels: may replace the convolution
//   conv_product                     asks hopper_conv, then takes the first row of its table whose condition holds
//
//   3x3, stride 1                    all others
//   pick_conv_halo_bf16 (_fp32)      pick_conv_gather
//   conv_halo                        conv_gather
//   conv_halo_kernel                 conv_gather_kernel
//   multiply_step, multiply_tap      multiply
//   mma_bf16 (mma_fp16)              mma_bf16 (mma_fp16)
//   mma.sync m16n8k16                mma.sync m16n8k16
//
// Hopper's conv_tiles and conv_small, in bf16 or FP8, end in wgmma (gpu/hopper/choose.h). For an input's gradient,
// conv_backward_input calls conv_product with BACKWARD = true.

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_halo: 3x3, stride 1, any GPU
// A block computes 16 x 16 pixels of one image, or 8 x 8 pixels of each of two images, for CHANNELS channels. Slice by
// slice, it copies the tile's pixels with a border of one pixel (the halo) to shared memory, once for all nine taps.
//
//     the part of the halo that a warp reads for its 8 x 8 pixels
//       column 0 1 2 ...    9
//     row 0    . . . . . . . . . .    .  pixels around them, of another warp or tile, or zeros outside the image
//     row 1    . x x x x x x x x .    x  the warp's own pixels
//      ...     . x x x x x x x x .
//     row 8    . x x x x x x x x .    tap (kh, kw) reads rows kh .. kh + 7 and columns kw .. kw + 7
//     row 9    . . . . . . . . . .
//
//     shared memory: two halos (a pixel is a row of SLICE channels), a ring of weights, the halo_source of each pixel
//     +-----------+---------------+------------------+------------------+------------------+---------+
//     | halo of   | halo of       | weights of the   | weights of the   | weights of the   | sources |
//     | slice s   | slice s + 1   | taps with kw = 0 | taps with kw = 1 | taps with kw = 2 |         |
//     +-----------+---------------+------------------+------------------+------------------+---------+
//
// A slice takes three steps, one for each kw. At the same time cp.async copies what later steps need:
//
//     step of slice s    kw = 0                   kw = 1                   kw = 2
//     multiplies         kh = 0, 1, 2             kh = 0, 1, 2             kh = 0, 1, 2
//     copies             weights kw = 2 of s      weights kw = 0 of s + 1  weights kw = 1 of s + 1
//                        half of halo s + 1       the rest of halo s + 1
//
// A warp computes 8 x 8 pixels x WARP_CHANNELS channels. Its products are weights (A) x pixels (B). A fragment B holds
// 16 input channels of 8 neighbouring pixels of an image row. In a step the warp loads the 10 rows of the halo that its
// pixels need under this kw, and uses most of them for all three taps. (If pixels were A, a fragment would hold two
// image rows. Each kh would need other pairs of rows.) The copies stand between the products and have no branches, so
// the tensor cores do not wait for them.

// With one image a K group (ProductTile) is 2 x 2 warps, each with 8 x 8 pixels of the tile. With two images it has a
// warp for each. PER_SM: blocks on a multiprocessor, which limits a thread's registers
template <class T_, int IMAGES_, int CHANNELS_, int K_GROUPS_, int PER_SM_>
struct HaloTile : ProductTile<IMAGES_, IMAGES_ == 1 ? 4 : 2, CHANNELS_, CHANNELS_, K_GROUPS_> {
    typedef ProductTile<IMAGES_, IMAGES_ == 1 ? 4 : 2, CHANNELS_, CHANNELS_, K_GROUPS_> Base;
    typedef T_ T;
    static constexpr int IMAGES = IMAGES_;
    static constexpr int CHANNELS = CHANNELS_;
    static constexpr int PER_SM = PER_SM_;
    static constexpr int WARPS_DOWN = IMAGES == 1 ? 2 : 1; // warps of an image, one below the other
    static constexpr int WARPS_ACROSS = WARPS_DOWN;
    static constexpr int TILE_H = WARPS_DOWN * 8;
    static constexpr int TILE_W = WARPS_ACROSS * 8;
    // A slice is 64 bytes of a pixel: 32 channels in bf16, 16 in fp32. It has more bytes if a K group (a set of warps
    // that sums over a part of a slice's channels) would otherwise have fewer than 16 channels.
    static constexpr int PIXEL_BYTES = std::max(64, 16 * (int)sizeof(T) * K_GROUPS_);
    static constexpr int SLICE = PIXEL_BYTES / sizeof(T);
    static constexpr int K16 = SLICE / 16 / K_GROUPS_; // a K group has 16 * K16 input channels of a slice
    static constexpr int H = TILE_H + 2;
    static constexpr int W = TILE_W + 2;
    static constexpr int PIXELS = IMAGES * H * W;
    static constexpr int HALO_BYTES = PIXELS * PIXEL_BYTES;
    static constexpr int WEIGHT_BYTES = 3 * CHANNELS * PIXEL_BYTES; // bytes of the weights of the three taps of one kw
    static constexpr int WEIGHTS_AT = 2 * HALO_BYTES;
    static constexpr int SOURCES_AT = WEIGHTS_AT + 3 * WEIGHT_BYTES;
    // + 64: for the last values of i, HaloCopies::copy reads `sources` beyond PIXELS, but then it copies nothing.
    static constexpr int MAIN_BYTES = SOURCES_AT + (PIXELS + 64) * 4;
    // At the end the results are written to the same memory, in two rounds if there are too many.
    static constexpr int ROUNDS = Base::STAGED_BYTES > MAIN_BYTES ? 2 : 1;
    static constexpr int SHARED_BYTES = std::max(MAIN_BYTES, Base::STAGED_BYTES / ROUNDS);
    static_assert(HALO_BYTES % 128 == 0 && WEIGHT_BYTES % 128 == 0, "swizzled rows begin at multiples of 128 bytes");
    static_assert(SHARED_BYTES <= RTX_30.shared_per_block, "the least that a GPU of sm_80 or later has");
    static_assert(IMAGES * Base::STAT_ROWS * CHANNELS * 8 <= SHARED_BYTES,
                  "at the end, the statistics are summed in shared memory");
};

// A halo pixel's index in the input * 8 + the swizzle key of its row in shared memory; negative if there is no such
// pixel. The key depends only on `column`, the pixel's column in the halo. So any 8 neighbouring pixels of an image row
// are read without bank conflicts, whatever kw is. And a chunk of the pixel below is always the same distance away: one
// address for each kw, plus constants, reaches all rows. h: row in the image. w0: the image column of column 0.
template <class Tile> INLINE int halo_source(const ConvCall& p, int n, int h, int w0, int column) {
    const int w = w0 + column;
    const int up = p.s.upsample; // 1: the input has half of the output's rows and columns
    const int index = (n * (p.H >> up) + (h >> up)) * (p.W >> up) + (w >> up);
    const bool inside = n < p.B && h >= 0 && h < p.H && w >= 0 && w < p.W;
    return (inside ? index << 3 : (int)0x80000000) | swizzle_key<Tile::PIXEL_BYTES / 16>(column);
}

// The two halos in shared memory. A thread copies the same chunk of every PIXELS_AT_ONCE-th pixel.
template <class Tile> struct HaloCopies {
    typedef typename Tile::T T;
    static constexpr int CHUNKS = Tile::SLICE / 8;                // chunks of a pixel
    static constexpr int PIXELS_AT_ONCE = Tile::THREADS / CHUNKS; // pixels that all threads together copy at a time
    static constexpr int HALF_COPIES = ceil_div(Tile::PIXELS / 2, PIXELS_AT_ONCE);
    const ConvCall& p;
    const uint32_t halos; // the address in shared memory where the two halos begin
    int* const sources;   // in shared memory: the halo_source of each pixel
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int first_pixel = (int)threadIdx.x / CHUNKS;

    INLINE HaloCopies(const ConvCall& p, unsigned char* shared)
        : p(p), halos(shared_address(shared)), sources((int*)(shared + Tile::SOURCES_AT)) {}

    // For the tile that begins at image n0, row h0, column w0. Call __syncthreads before the first copy.
    INLINE void find_sources(int n0, int h0, int w0) const {
        for (int i = threadIdx.x; i < Tile::PIXELS; i += Tile::THREADS) {
            const int n = n0 + i / Tile::W / Tile::H;
            const int h = h0 + i / Tile::W % Tile::H - 1;
            sources[i] = halo_source<Tile>(p, n, h, w0 - 1, i % Tile::W);
        }
    }
    // the address in shared memory of this thread's i-th chunk of the slice's halo, i < 2 HALF_COPIES
    INLINE uint32_t place(int slice, int i) const {
        uint32_t first_place = halos + first_pixel * Tile::PIXEL_BYTES;
        asm volatile("" : "+r"(first_place)); // otherwise the compiler would keep an address in a register for every i
        const int key = sources[first_pixel + i * PIXELS_AT_ONCE] & 7;
        const uint32_t halo = first_place + slice % 2 * Tile::HALO_BYTES;
        return halo + chunk_place<T>(chunk, key) + i * PIXELS_AT_ONCE * Tile::PIXEL_BYTES;
    }
    INLINE void copy(int slice, int i) const {
        const int c = slice * Tile::SLICE + chunk * 8;
        const int pixel = first_pixel + i * PIXELS_AT_ONCE;
        const int source = sources[pixel];
        const bool channel_inside = c < p.Cin1;
        const bool valid = channel_inside && source >= 0; // if false, the copy writes zeros
        const T* const x = (const T*)p.x1 + (channel_inside ? c : 0);
        const T* const from = pixel_of(x, valid ? (uint32_t)source >> 3 : 0, p.Cin1);
        copy_channels(place(slice, i), 0, from, valid, pixel < Tile::PIXELS);
    }
    // The place in a halo, in bytes, of the 8 channels that this lane gives to ldmatrix. It loads two fragments B, of 8
    // pixels each, one below the other: the matrices (row r, k 0-7), (r, k 8-15), (r + 1, k 0-7), (r + 1, k 8-15),
    // where k counts from first_k, a channel of the slice.
    static INLINE uint32_t lane_place(int row_begin, int first_column, int first_k) {
        const int lane = threadIdx.x & 31;
        const int row_of_matrix = lane & 7;
        const int upper_k = lane >> 3 & 1;
        const int next_row = lane >> 4;
        const int column = first_column + row_of_matrix;
        const int pixel = row_begin + next_row * Tile::W + column;
        const int key = swizzle_key<Tile::PIXEL_BYTES / 16>(column);
        return channels_on<T>(pixel * Tile::PIXEL_BYTES + chunk_place<T>(upper_k, key), first_k);
    }
    // for take_apart_copies: a function that calls f(address) for each chunk of a halo that this thread copies
    INLINE auto places(int slice) const {
        return [this, slice](auto f) {
            UNROLL_FOR (int i = 0; i < 2 * HALF_COPIES; i++)
                if (first_pixel + i * PIXELS_AT_ONCE < Tile::PIXELS) f(place(slice, i));
        };
    }
};

// The ring of weights in shared memory: a stage for each kw, with three matrices, for kh = 0, 1, 2. A thread copies the
// same chunk of every ROWS_AT_ONCE-th row.
//   forward    weight is (Cout, taps, Cin1). A row is an output channel; its chunks are the channels of the slice.
//   BACKWARD   weight is (Cin1, taps, Cout), where Cin1 is the number of channels of dout (ConvCall). Tap t of the
//              stages is tap 8 - t in global memory. A row is a channel of dout; its chunks are the input gradient's.
template <class Tile, bool BACKWARD> struct HaloWeights {
    typedef typename Tile::T T;
    static constexpr int ROWS = BACKWARD ? Tile::SLICE : Tile::CHANNELS;
    static constexpr int CHUNKS = (BACKWARD ? Tile::CHANNELS : Tile::SLICE) / 8;
    static constexpr int ROW_BYTES = CHUNKS * 8 * sizeof(T);
    static constexpr int TAP_BYTES = ROWS * ROW_BYTES;
    static constexpr int ROWS_AT_ONCE = Tile::THREADS / CHUNKS;     // rows that all threads together copy at a time
    static constexpr int TAP_COPIES = ceil_div(ROWS, ROWS_AT_ONCE); // how many chunks a thread copies for one tap
    static constexpr int COPIES = 3 * TAP_COPIES;                   // how many chunks a thread copies for a stage
    static constexpr bool NO_THREAD_LEFT_OVER = Tile::THREADS % CHUNKS == 0 && ROWS % ROWS_AT_ONCE == 0;
    const ConvCall& p;
    const int c0; // the block's first output channel
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int first_row = (int)threadIdx.x / CHUNKS;
    const uint32_t first_place; // the address that this thread's first copy is written to
    const int first_weight;     // the index in p.weight of the weights of this thread's first chunk, for slice 0, tap 0

    INLINE HaloWeights(const ConvCall& p, uint32_t ring, int c0)
        : p(p),
          c0(c0),
          first_place(ring + first_row * ROW_BYTES + chunk_place<T>(chunk, key(first_row))),
          first_weight(BACKWARD //
                           ? first_row * 9 * p.Cout + c0 + chunk * 8
                           : (c0 + first_row) * 9 * p.Cin1 + chunk * 8) {}
    static INLINE int key(int row) { return swizzle_key<ROW_BYTES / 16>(row); }

    // A thread's i-th chunk of a stage (i < COPIES) belongs to row `first_row + row(i)` of tap kh(i).
    static constexpr int kh(int i) { return i / TAP_COPIES; }
    static constexpr int row(int i) { return i % TAP_COPIES * ROWS_AT_ONCE; }
    INLINE bool owns(int i) const {
        return NO_THREAD_LEFT_OVER || (first_row < ROWS_AT_ONCE && row(i) + first_row < ROWS);
    }
    INLINE uint32_t place(int kw, int i) const {
        // The keys repeat after 8 rows. If rows are not copied a multiple of 8 at once, the XOR with `toggled` replaces
        // the key of first_row by that of the i-th chunk's row.
        const bool same_key = ROWS_AT_ONCE % 8 == 0;
        const uint32_t toggled = same_key ? 0 : (key(first_row) ^ key(row(i) + first_row)) << 4;
        return (first_place ^ toggled) + kw * Tile::WEIGHT_BYTES + kh(i) * TAP_BYTES + row(i) * ROW_BYTES;
    }
    INLINE void copy(int slice, int kw, int i) const {
        const int k0 = slice * Tile::SLICE;
        const int place_of_tap = kh(i) * 3 + kw;
        const int tap = BACKWARD ? 8 - place_of_tap : place_of_tap;
        const int k = k0 + (BACKWARD ? row(i) + first_row : chunk * 8); // channel of the input (BACKWARD: of dout)
        const int c = c0 + (BACKWARD ? chunk * 8 : row(i) + first_row); // channel of the output (BACKWARD: of dx)
        const bool valid = k < p.Cin1 && c < p.Cout;                    // if false, the copy writes zeros
        int C = BACKWARD ? p.Cout : p.Cin1;                             // the distance from tap to tap in p.weight
        asm volatile("" : "+r"(C)); // otherwise the compiler would keep many multiples of C in registers
        const int further = BACKWARD ? ((k0 + row(i)) * 9 + tap) * C : (row(i) * 9 + tap) * C + k0;
        const T* const weight = (const T*)p.weight;
        const uint32_t index = valid ? first_weight + further : 0;
        copy_channels(place(kw, i), 0, weight + index, valid, owns(i));
    }
    // The place in a tap's weights, in bytes, of the row that this lane gives to ldmatrix. The matrices are (channels
    // 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15), where k counts from first_k, a channel of the slice.
    static INLINE uint32_t lane_place(int first_k) {
        const int lane = threadIdx.x & 31;
        const int row_of_matrix = lane & 7;
        const int upper_c = lane >> 3 & 1;
        const int upper_k = lane >> 4;
        if (BACKWARD) {
            const int k = first_k + row_of_matrix + upper_k * 8;
            return k * ROW_BYTES + chunk_place<T>(upper_c, key(k));
        }
        const int c = row_of_matrix + upper_c * 8;
        return channels_on<T>(c * ROW_BYTES + chunk_place<T>(upper_k, key(c)), first_k);
    }
    // The weights of tap (kh, kw), for 16 output channels (BACKWARD: of dx) from m * 16 on, and for 16 input channels
    // from k * 16 on, counted in the K group. lane: this lane's address for kw = kh = m = k = 0
    static INLINE void load(FragmentA<T>& a, uint32_t lane, int kw, int kh, int m, int k) {
        const int tap = kw * Tile::WEIGHT_BYTES + kh * TAP_BYTES;
        if (!BACKWARD) {
            load_fragment<T, false>(a, channels_on<T>(lane, 16 * k), tap + m * 16 * ROW_BYTES);
            return;
        }
        // m * 16 channels further in the same row. The swizzle moves pieces only within a pair of chunks (rows of 2 or
        // 6 chunks: bytes are added), or within 128 bytes (multiples of 4: what is below 128 is XORed).
        const int channel_bytes = m * 16 * sizeof(T);
        uint32_t columns;
        if (CHUNKS % 4) columns = lane + channel_bytes;
        else columns = (lane ^ channel_bytes % 128) + channel_bytes / 128 * 128;
        load_fragment<T, true>(a, columns, tap + k * 16 * ROW_BYTES);
    }
    INLINE auto places(int kw) const {
        return [this, kw](auto f) {
            UNROLL_FOR (int i = 0; i < COPIES; i++)
                if (owns(i)) f(place(kw, i));
        };
    }
};

// acc[r][m] += a x b[r + kh] for the warp's image rows r = 0 .. 7. a: weights of tap kh. b[i]: pixels of row i of the
// warp's halo. With floats, the products of all three taps are first added up in `sum`. Then `scale` undoes the scales
// of both operands. So call this for kh = 0, 1, 2, in this order, with the same `sum`.
template <class T, int M>
INLINE void multiply_tap(float (&acc)[8][M][4], float (&sum)[8][4], int m, int kh, const FragmentA<T>& a,
                         const FragmentB<T> (&b)[10], float scale) {
    if constexpr (PARTS<T> == 1) {
        UNROLL_FOR (int r = 0; r < 8; r++) {
            mma<T>(acc[r][m], a, b[r + kh]);
        }
    } else
        UNROLL_FOR (int first = 0; first < 8; first += 4) { // four sums take turns, which hides an mma's latency
            UNROLL_FOR (int i = 0; i < 16 && kh == 0; i++) {
                sum[first + i / 4][i % 4] = 0;
            }
            UNROLL_FOR (int product = 0; product < 3; product++) // low x high', high x low', high x high'
                UNROLL_FOR (int r = first; r < first + 4; r++)
                    mma_fp16(sum[r], a + 4 * (product == 0), b[r + kh] + 2 * (product == 1));
            UNROLL_FOR (int i = 0; i < 16 && kh == 2; i++) {
                const int r = first + i / 4;
                acc[r][m][i % 4] += sum[r][i % 4] * scale;
            }
        }
}

// A warp's products of one step. Between them copy_in_gap(0), copy_in_gap(1) and so on copy for later steps. x: this
// lane's address for ldmatrix, of rows 0 and 1 of the warp's halo. weights: the argument `lane` of HaloWeights::load
template <class Tile, bool BACKWARD, int M, class Copy>
INLINE void multiply_step(float (&acc)[8][M][4], uint32_t x, uint32_t weights, int kw, float scale, Copy copy_in_gap) {
    typedef typename Tile::T T;
    typedef HaloWeights<Tile, BACKWARD> Weights;
    // In bf16 output channels are the inner loop. With floats it is taps, whose sum is then added to acc.
    auto kh_of = [](int i) { return PARTS<T> == 1 ? i / M : i % 3; };
    auto m_of = [](int i) { return PARTS<T> == 1 ? i % M : i / 3; };
    UNROLL_FOR (int k = 0; k < Tile::K16; k++) {
        FragmentA<T> a[2];
        FragmentB<T> b[10]; // the rows 0 .. 9 of the halo under this kw
        Weights::load(a[0], weights, kw, kh_of(0), m_of(0), k);
        UNROLL_FOR (int r = 0; r < 10; r += 2) {
            const int row = r * Tile::W * Tile::PIXEL_BYTES;
            load_fragments<T, false>(b[r], b[r + 1], channels_on<T>(x, 16 * k), row);
        }
        float sum[8][4];
        UNROLL_FOR (int i = 0; i < 3 * M; i++) {
            const int next = i + 1; // the weights of product `next` are loaded during product i
            if (next < 3 * M) Weights::load(a[next % 2], weights, kw, kh_of(next), m_of(next), k);
            multiply_tap<T, M>(acc, sum, m_of(i), kh_of(i), a[i % 2], b, scale);
            if (next % M == 0) copy_in_gap(k * 3 + i / M);
        }
    }
}

// If there are several K groups, a warp multiplies only its K group's part of each slice. TO: the type of the output
template <class Tile, bool BACKWARD, class TO>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::PER_SM) conv_halo_kernel(const ConvCall p) {
    typedef typename Tile::T T;
    typedef HaloCopies<Tile> Copies;
    typedef HaloWeights<Tile, BACKWARD> Weights;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t base = shared_address(shared);

    const int c0 = blockIdx.x % p.channel_blocks * Tile::CHANNELS;
    const int tile = blockIdx.x / p.channel_blocks;
    const auto [n0, h0, w0] = tile_origin(tile, p.tiles_h, p.tiles_w, Tile::TILE_H, Tile::TILE_W, Tile::IMAGES);

    // The first copies: the halo of slice 0, and the weights of slice 0 for kw = 0 and 1.
    const Copies halo(p, shared);
    const Weights weights(p, base + Tile::WEIGHTS_AT, c0);
    NO_UNROLL_FOR (int i = 0; i < Weights::COPIES; i++) {
        weights.copy(0, 0, i);
    }
    halo.find_sources(n0, h0, w0);
    __syncthreads();
    NO_UNROLL_FOR (int i = 0; i < 2 * Copies::HALF_COPIES; i++) {
        halo.copy(0, i);
    }
    copies_committed();
    NO_UNROLL_FOR (int i = 0; i < Weights::COPIES; i++) {
        weights.copy(0, 1, i);
    }
    copies_committed();

    constexpr int M = Tile::WARP_CHANNELS / 16;
    const int warp = (int)threadIdx.x >> 5;
    const int pixel_warp = Tile::pixel_warp(warp);
    const int image = pixel_warp / (Tile::WARPS_DOWN * Tile::WARPS_ACROSS);
    const int warp_h = pixel_warp / Tile::WARPS_ACROSS % Tile::WARPS_DOWN * 8;
    const int warp_w = pixel_warp % Tile::WARPS_ACROSS * 8;
    const int first_k = Tile::k_group(warp) * Tile::K16 * 16;
    uint32_t lane_pixels[3]; // one address for each kw
    UNROLL_FOR (int kw = 0; kw < 3; kw++)
        lane_pixels[kw] = base + Copies::lane_place((image * Tile::H + warp_h) * Tile::W, warp_w + kw, first_k);
    const uint32_t lane_weights = base + Tile::WEIGHTS_AT + Weights::lane_place(first_k);

    float acc[8][M][4] = {}; // acc[r][m]: the sums of the warp's m-th 16 output channels x 8 pixels of image row r
    float pixel_scale = 1, weight_scale = 1;
    for (int slice = 0; slice < p.slices; slice++) {
        UNROLL_FOR (int kw = 0; kw < 3; kw++) {
            copies_arrived<1>();
            take_apart_copies<T, Tile::THREADS / 32>(pixel_scale, halo.places(slice), weight_scale, weights.places(kw),
                                                     kw == 0);
            __syncthreads(); // all threads' copies for this step have arrived, and all have finished the previous step

            // Copies the weights of the step after the next one, and for kw = 0 and 1 half of the next slice's halo
            auto copy_in_gap = [&](int gap) {
                constexpr int GAPS = 3 * Tile::K16;
                UNROLL_FOR (int i = 0; i < Weights::COPIES; i++)
                    if (i * GAPS / Weights::COPIES == gap) weights.copy(kw ? slice + 1 : slice, (kw + 2) % 3, i);
                UNROLL_FOR (int i = 0; i < Copies::HALF_COPIES; i++)
                    if (kw < 2 && i * GAPS / Copies::HALF_COPIES == gap)
                        halo.copy(slice + 1, kw * Copies::HALF_COPIES + i);
            };
            const uint32_t x = lane_pixels[kw] + slice % 2 * Tile::HALO_BYTES;
            multiply_step<Tile, BACKWARD>(acc, x, lane_weights, kw, pixel_scale * weight_scale, copy_in_gap);
            copies_committed();
        }
    }

    const int n = n0 + image;
    const int tiles = p.tiles_h * p.tiles_w;
    auto output_pixel = [&](int k) { // index of the warp's k-th pixel in the output; -1: outside the image
        const int h = h0 + warp_h + k / 8;
        const int w = w0 + warp_w + k % 8;
        return h < p.H && w < p.W ? (n * p.H + h) * p.W + w : -1;
    };
    store_product<Tile, TO, Tile::ROUNDS, BACKWARD>(acc, shared, p.out, n0, c0, tile % tiles, tiles, output_pixel);
}

template <class Tile, bool BACKWARD, class TO = typename Tile::T> static void conv_halo(const ConvCall& c) {
    ConvCall p = c;
    p.tiles_h = ceil_div(p.H, Tile::TILE_H);
    p.tiles_w = ceil_div(p.W, Tile::TILE_W);
    p.channel_blocks = ceil_div(p.Cout, Tile::CHANNELS);
    p.slices = ceil_div(p.Cin1, Tile::SLICE);
    const int tiles = p.tiles_h * p.tiles_w;
    const int blocks = ceil_div(p.B, Tile::IMAGES) * tiles * p.channel_blocks;
    if (p.out.parts) *p.out.parts = tiles;
    launch_behind(conv_halo_kernel<Tile, BACKWARD, TO>, blocks, Tile::THREADS, Tile::SHARED_BYTES, p);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_weight_halo: weight gradients of 3x3 with stride 1, any GPU (others: conv_weight_gather, gpu/conv_any.h)
// dweight[co, tap, ci] = sum over the output's pixels p of dout[p, co] * x[source(p, tap), ci]
//
// The result has few tiles, and each is a sum over many pixels. So the pixels are divided into ranges, and a block sums
// over one range, in pixel tiles of 64 pixels:
//
//     dout (pixels, 64 co) ^T      x (pixels, 64 ci)         partial sums of 64 x 64 weights
//     +----+----+----+             +----+----+----+          range 0   range 1   range 2
//     | a range of    |     x      | the same     |    ->    [     ] + [     ] + [     ]  -> dweight (conv_weight_sum)
//     | pixel tiles   |            | pixel tiles  |
//     +----+----+----+             +----+----+----+
//
// The bias gradient is dout^T times a matrix of ones. Each image needs a sum
// of its own, too, which is the gradient of its embedding (demb). So a range that goes over the border of two images
// has a partial for each of them.

// A block computes 64 x 64 weights of all nine taps. It has 12 warps: four for each kw, each with a quarter of the
// weights, for all three kh. A pixel tile is 8 x 8 pixels of dout, and the 10 x 10 pixels of x that the taps read for
// them. An mma sums over 16 pixels: two image rows of 8. Shared memory is a ring:
//
//     a stage:   | x: 10 x 10 pixels of 64 channels | dout: 8 x 8 pixels of 64 channels |
constexpr int WEIGHT_HALO_BYTES = 4 * 164 * 128; // bytes of 4 stages in bf16, 2 in fp32, each of 100 + 64 pixels

// A thread copies one chunk of one column, in every X_ROWS-th row of x and in every DOUT_ROWS-th row of dout. There are
// no branches around the copies, so the compiler can place them between products.
template <class T> struct WeightHaloCopies {
    static constexpr int CHUNKS = 8; // chunks of a pixel, which has 64 channels here
    static constexpr int PIXEL_BYTES = 64 * sizeof(T);
    static constexpr int STAGES = 4 / PARTS<T>;
    static constexpr int X_BYTES = 100 * PIXEL_BYTES;
    static constexpr int STAGE_BYTES = X_BYTES + 64 * PIXEL_BYTES;
    static constexpr int X_ROWS = 384 / CHUNKS / 10; // rows of x that all 384 threads together copy at a time
    static constexpr int X_COPIES = ceil_div(10, X_ROWS);
    static constexpr int DOUT_ROWS = 384 / CHUNKS / 8;
    static constexpr int DOUT_COPIES = ceil_div(8, DOUT_ROWS);
    const ConvWeight& p;
    const uint32_t base;             // the address where shared memory begins
    const int co0, ci0;              // the block's first output channel and first input channel
    const int first, end;            // the block's pixel tiles: first .. end - 1
    const int up = p.shape.upsample; // 1: x is read through upsampling, and has half of dout's rows and columns
    const int H = p.shape.H << up;   // rows of dout
    const int W = p.shape.W << up;   // columns of dout
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int pixel = (int)threadIdx.x / CHUNKS; // the first pixel of a tile that this thread copies, of x and of dout
    const int x_col = pixel % 10;
    const int x_row = pixel / 10;
    const int dout_col = pixel % 8;
    const int dout_row = pixel / 8;
    const bool x_in = ci0 + chunk * 8 < p.shape.C1;
    const bool dout_in = co0 + chunk * 8 < p.shape.Cout;
    const T* const x = (const T*)p.x1 + (x_in ? ci0 + chunk * 8 : 0);
    const T* const dout = (const T*)p.dout + (dout_in ? co0 + chunk * 8 : 0);
    const uint32_t x_place = base + pixel * PIXEL_BYTES + chunk_place<T>(chunk, x_col & 7);
    const uint32_t dout_place = base + X_BYTES + pixel * PIXEL_BYTES + chunk_place<T>(chunk, dout_col & 7);
    Origin next = tile_origin(first, p.tiles_h, p.tiles_w, 8, 8); // where the next pixel tile to copy begins

    INLINE bool owns_x(int k) const { return x_row < min(X_ROWS, 10 - k * X_ROWS); }
    INLINE bool owns_dout(int k) const { return dout_row < min(DOUT_ROWS, 8 - k * DOUT_ROWS); }
    INLINE uint32_t stage(int pixel_tile) const { return (uint32_t)(pixel_tile - first) % STAGES * STAGE_BYTES; }

    // Pass the pixel tiles in order, because each call moves `next` on. Tiles from `end` on become zeros.
    INLINE void copy_tile(int pixel_tile) {
        const uint32_t stage = this->stage(pixel_tile);
        UNROLL_FOR (int k = 0; k < X_COPIES; k++) {
            const int h = next.h + x_row + k * X_ROWS - 1;
            const int w = next.w + x_col - 1;
            const bool valid = pixel_tile < end && x_in && (unsigned)h < (unsigned)H && (unsigned)w < (unsigned)W;
            const uint32_t source = valid ? (next.n * p.shape.H + (h >> up)) * p.shape.W + (w >> up) : 0;
            const int offset = stage + k * X_ROWS * 10 * PIXEL_BYTES;
            copy_channels(x_place, offset, pixel_of(x, source, p.shape.C1), valid, owns_x(k));
        }
        UNROLL_FOR (int k = 0; k < DOUT_COPIES; k++) {
            const int h = next.h + dout_row + k * DOUT_ROWS;
            const int w = next.w + dout_col;
            const bool valid = pixel_tile < end && dout_in && h < H && w < W;
            const uint32_t source = valid ? (next.n * H + h) * W + w : 0;
            const int offset = stage + k * DOUT_ROWS * 8 * PIXEL_BYTES;
            copy_channels(dout_place, offset, pixel_of(dout, source, p.shape.Cout), valid, owns_dout(k));
        }
        copies_committed();
        next.w += 8;
        if (next.w < W) return;
        next.w = 0;
        next.h += 8;
        if (next.h < H) return;
        next.h = 0;
        next.n++;
    }
    INLINE auto x_places(uint32_t stage) const {
        return [this, stage](auto f) {
            UNROLL_FOR (int k = 0; k < X_COPIES; k++)
                if (owns_x(k)) f(x_place + stage + k * X_ROWS * 10 * PIXEL_BYTES);
        };
    }
    INLINE auto dout_places(uint32_t stage) const {
        return [this, stage](auto f) {
            UNROLL_FOR (int k = 0; k < DOUT_COPIES; k++)
                if (owns_dout(k)) f(dout_place + stage + k * DOUT_ROWS * 8 * PIXEL_BYTES);
        };
    }
};

template <class T, int WORKS>
static __global__ void __launch_bounds__(384, 1)
    conv_weight_halo_kernel(const __grid_constant__ WeightBatch<ConvWeight, WORKS> batch) {
    using Copies = WeightHaloCopies<T>;
    constexpr int PIXEL_BYTES = Copies::PIXEL_BYTES;
    constexpr int STAGES = Copies::STAGES;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t base = shared_address(shared);
    const int lane = threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    const int co_warp = warp & 1;
    const int ci_warp = warp >> 1 & 1;
    const int kw = warp >> 2;

    const auto [p, block] = batch.work_of_this_block();
    const int tile = block % p.tiles;
    const int split = block / p.tiles;
    const int ci_tile = tile % p.channel_tiles;
    const int first = first_pixel_tile(p, split);
    const int end = first_pixel_tile(p, split + 1);
    const int co0 = tile / p.channel_tiles * 64;
    Copies copies{p, base, co0, ci_tile * 64, first, end};
    for (int i = 0; i < STAGES - 1; i++) copies.copy_tile(first + i);

    // ldmatrix loads four matrices, each of 8 channels of 8 pixels of one image row. They are (image row, channels):
    // Of x:    (row, ci 0-7), (row + 1, ci 0-7), (row, ci 8-15), (row + 1, ci 8-15).
    // Of dout: (row, co 0-7), (row, co 8-15), (row + 1, co 0-7), (row + 1, co 8-15).
    const int row_of_matrix = lane & 7;
    const int low = lane >> 3 & 1;
    const int high = lane >> 4;
    const int column = row_of_matrix + kw; // the column of x in the 10 x 10 pixels
    uint32_t lane_x = base + (low * 10 + column) * PIXEL_BYTES + chunk_place<T>(ci_warp * 4 + high, column & 7);
    uint32_t lane_dout = base + Copies::X_BYTES + (high * 8 + row_of_matrix) * PIXEL_BYTES +
                         chunk_place<T>(co_warp * 4 + low, row_of_matrix);
    // Without this line the compiler would compute lane_x and lane_dout again for every tile.
    asm volatile("" : "+r"(lane_x), "+r"(lane_dout));

    // acc[kh][i][j]: sums of the warp's i-th group of 16 output channels and j-th group of 8 input channels
    float acc[3][2][4][4] = {};
    float x_scale = 1, dout_scale = 1;
    BiasSum<T, 2> bias{p, ci_tile == 0 && ci_warp == 0 && kw == 0, split, co0 + co_warp * 32, first};
    for (int pixel_tile = first; pixel_tile < end; pixel_tile++) {
        copies_arrived<STAGES - 2>();
        const uint32_t stage = copies.stage(pixel_tile);
        take_apart_copies<T, 12>(x_scale, copies.x_places(stage), dout_scale, copies.dout_places(stage));
        __syncthreads(); // all threads' copies for this tile have arrived, and all have finished the previous tile
        copies.copy_tile(pixel_tile + STAGES - 1);
        bias.next_tile();

        // The rows of x for kh = 2 are needed again for kh = 0 of the next round. Floats leave no registers for that.
        constexpr bool KEEP_ROWS = PARTS<T> == 1;
        FragmentB<T> below[4];
        UNROLL_FOR (int r = 0; r < 4; r++) { // each round has two image rows of dout
            FragmentA<T> a[2];
            load_dout<T>(a, lane_dout + stage + r * 16 * PIXEL_BYTES);
            bias.add(a, dout_scale);
            UNROLL_FOR (int kh = 0; kh < 3; kh++) {
                FragmentB<T> b[4];
                if (KEEP_ROWS && r && kh == 0) memcpy(b, below, sizeof b);
                else load_x<T>(b, lane_x + stage + (2 * r + kh) * 10 * PIXEL_BYTES);
                if (KEEP_ROWS && kh == 2) memcpy(below, b, sizeof b);
                multiply<T, 2, 4>(acc[kh][0], 4, 1, a, b, x_scale * dout_scale);
            }
        }
    }
    copies_arrived<0>();
    bias.put();
    put_weights(p, split, [&](auto put) {
        UNROLL_FOR (int f = 0; f < 24; f++) {
            const int kh = f / 8;
            const int fragment = f % 8;
            const float* v = acc[kh][fragment / 4][fragment % 4];
            const int i = (warp % 4 * 8 + fragment) * 32 + lane;
            put(tile, kh * 3 + kw, i, make_float4(v[0], v[1], v[2], v[3]));
        }
    });
}

// =====================================================================================================================
// The optimiser

// ---------------------------------------------------------------------------------------------------------------------
// --- adamw: norm of the gradient, the step's verdict, AdamW, averages
// The squares of the gradient are summed in stretches of a fixed size. So the norm has the same bits for any number of
// GPUs (step_gradients). The GPU itself decides whether to update the weights (judge_step), so the host need not wait
// for the norm. --optimizer muon has kernels of its own (muon.h).

// sum = the old sum (if `add`) + the gradients of all ranks, in the order of the ranks. The kernel also writes |sum|^2
// of each stretch to `squares`, of this rank and of every rank whose memory this rank can write to. There is one block
// for each stretch of this rank's Slice. A thread works on QUADS quads (of 4 floats), 1024 quads apart.
static __global__ void __launch_bounds__(1024, SUM_BLOCKS)
    sum_gradients_kernel(float* sum,                                         // a flat array
                         const __grid_constant__ Everywhere<double> squares, // one number for each stretch
                         RankGradients grads, bool add,
                         bool write) { // false if the only term is `sum` itself
    await_previous_kernel();
    constexpr int QUADS = STRETCH / 4 / 1024;
    const size_t n = grads.slice.n;
    const size_t at = grads.slice.flat(blockIdx.x * STRETCH); // the stretch's place in the flat arrays
    const size_t first = at / 4 + threadIdx.x;                // this thread's first quad
    // the stretch's quads from this thread's first one on; beyond the array's n floats nothing may be read
    const int quads_left = (int)(min(at + STRETCH, n) / 4 - min(at, n) / 4) - (int)threadIdx.x;
    const int first_source = -(int)add; // source -1 is the old sum; source r >= 0 is rank r
    float4 g[QUADS];
    for (int r = first_source; r < grads.slice.ranks; r++) {
        const float* source = r < 0 ? sum : grads.of(r);
        const float4* from = (const float4*)source + first;
        UNROLL_FOR (int k = 0; k < QUADS; k++) {
            const float4 v = k * 1024 < quads_left ? from[k * 1024] : make_float4(0, 0, 0, 0);
            g[k] = r == first_source ? v : g[k] + v;
        }
    }
    double total = 0;
    UNROLL_FOR (int k = 0; k < QUADS; k++) {
        if (write && k * 1024 < quads_left) ((float4*)sum)[first + k * 1024] = g[k];
        const double x = g[k].x;
        const double y = g[k].y;
        const double z = g[k].z;
        const double w = g[k].w;
        total += (x * x + y * y) + (z * z + w * w);
    }
    total = block_sum(total);
    if (threadIdx.x < squares.ranks) squares.at[threadIdx.x][at / STRETCH] = total; // thread k writes to array k
}

static void sum_gradients(float* sum, const Everywhere<double>& squares, const RankGradients& grads, bool add) {
    const Slice& s = grads.slice;
    const bool write = add || s.ranks > 1 || grads.own != sum;
    const int blocks = s.segments * s.stretches;
    launch(sum_gradients_kernel, blocks, 1024, 0, sum, squares, grads, add, write);
}

// One block adds up squares and losses of all ranks, in a fixed order. judge_batch decides if the step is skipped.
static __global__ void __launch_bounds__(256)
    judge_step_kernel(StepState* state,      // the norm, the losses and the decision are written to it
                      const double* squares, // (stretches): |gradient|^2 of each stretch
                      size_t stretches,
                      const double* loss,  // (B): losses of all ranks' samples
                      const int* quarters, // (B): in which quarter of the noise levels a sample's level lies
                      AdamW h, int B) {
    await_previous_kernel();
    __shared__ LossSums warps[8];
    __shared__ double warp_squares[8];
    LossSums mine{};
    double square = 0; // first this thread's part of |gradient|^2; in thread 0, at the end, the whole
    UNROLL_8_FOR (size_t i = threadIdx.x; i < stretches; i += 256) {
        square += squares[i];
    }
    for (int b = threadIdx.x; b < B; b += 256) {
        add_loss(&mine, loss[b], quarters[b]);
    }
    square = warp_sum(square);
    for (double& sum : mine.sum) sum = warp_sum(sum);
    for (int& count : mine.count) count = warp_sum(count);
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = mine;
        warp_squares[threadIdx.x / 32] = square;
    }
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < 8; w++) {
        square += warp_squares[w];
        for (int q = 0; q < 4; q++) {
            mine.sum[q] += warps[w].sum[q];
            mine.count[q] += warps[w].count[q];
        }
    }
    state->grad_norm = sqrt(square);
    judge_batch(state, mine, h, B);
}
static void judge_step(StepState* state, const double* squares, size_t stretches, //
                       const double* loss, const int* quarters, AdamW h, int B) {
    launch(judge_step_kernel, 1, 256, 0, state, squares, stretches, loss, quarters, h, B);
}

// Call this after all kernels that draw random numbers for this step, because they read *step.
static void next_step(int64_t* step) {
    each(1, [=] __device__(size_t) { ++*step; });
}

// next_step has already added 1 to state->step, so this step's number is state->step - 1.
static void record_step(StepState* records, const StepState* state, int count) {
    each(1, [=] __device__(size_t) { records[(state->step - 1) % count] = *state; });
}

template <class T> static void round_params(T* to, const float* params, size_t n) {
    each(n / 4, [=] __device__(size_t quad) { ((Four<T>*)to)[quad] = from_floats<T>(((const float4*)params)[quad]); });
}
static void cast_params(act* copy, const float* params, size_t n) {
    if (weights_have_copy()) with_act([&]<class T>(T) { round_params((T*)copy, params, n); });
}

// Factors of an update that are the same for all parameters. t: the number of updates, including this one.
struct AdamWFactors {
    float clip;      // clip_factor
    float decay;     // 1 - lr weight_decay
    float step_size; // lr / (1 - beta1^t)
    float root;      // sqrt(1 - beta2^t)
    float lr;
    float share; // of the newest weights in the first average (average_share)
};
INLINE AdamWFactors adamw_factors(const StepState* state, const AdamW& h) {
    const double clip = clip_factor(state, h);
    const double correction1 = 1 - pow((double)h.beta1, (double)state->updates);
    const double correction2 = 1 - pow((double)h.beta2, (double)state->updates);
    const float decay = 1 - state->lr * h.weight_decay;
    const float step_size = (float)(state->lr / correction1);
    const float share = average_share(h.ema_rate, state->updates);
    return {(float)clip, decay, step_size, (float)sqrt(correction2), state->lr, share};
}

// AdamW (Loshchilov & Hutter 2019) and the average of the parameters, for one rank's slice:
//
//   g   = clip sum                                            sum: the gradient of the step's whole batch
//   m   = beta1 m + (1 - beta1) g
//   v   = beta2 v + (1 - beta2) g^2
//   p   = decay p - step_size m / (sqrt(v) / root + eps)      p: the parameter
//   ema = ema + share (p - ema)                               share: average_share
//
// A thread updates four weights at a time: quad i of the slice's arrays (ema, m, v), and quad k of the flat arrays
// (params, copy, sum). With MUON, the elements of matrices have another update: p = decay p - lr direction, with their
// directions in `sum`. T is the type in which convolutions read the weights. If it is float, u.copy is u.params.
// u is a __grid_constant__, because u.params.at[r] would otherwise make the compiler copy it to local memory.
template <class T, bool MUON>
static __global__ void __launch_bounds__(256)
    adamw_kernel(const __grid_constant__ Update u, const StepState* state, AdamW h, Slice own) {
    await_previous_kernel();
    __shared__ AdamWFactors shared;
    if (!state->ok) return;
    if (threadIdx.x == 0) shared = adamw_factors(state, h); // slow (in double): only one thread computes them
    __syncthreads();
    const AdamWFactors f = shared;
    constexpr bool has_copy = !std::is_same_v<T, float>;
    float4* const ema = (float4*)u.ema;
    float4* const ms = (float4*)u.m;
    float4* const vs = (float4*)u.v;
    const size_t stride = (size_t)gridDim.x * 256;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < own.owned() / 4; i += stride) {
        const size_t k = own.flat(4 * i) / 4;
        if (4 * k >= own.n) break; // only padding follows after the last parameter
        const float4 sum = ((const float4*)u.sum)[k];
        float4 p = ((float4*)u.params.at[0])[k];
        float4 e = ema[i];
        float4 m = ms[i];
        float4 v = vs[i];
        auto update = [&](float& p, float& e, float& m, float& v, float sum) {
            const float g = sum * f.clip;
            m = h.beta1 * m + (1 - h.beta1) * g;
            v = h.beta2 * v + (1 - h.beta2) * g * g;
            p = p * f.decay - f.step_size * m / (sqrtf(v) / f.root + h.eps);
            e += f.share * (p - e);
        };
        auto move = [&](float& p, float& e, float direction) {
            p = p * f.decay - f.lr * direction;
            e += f.share * (p - e);
        };
        if (MUON && u.is_matrix[k / 16]) { // is_matrix has a byte for each 64 floats, which are 16 quads
            move(p.x, e.x, sum.x);
            move(p.y, e.y, sum.y);
            move(p.z, e.z, sum.z);
            move(p.w, e.w, sum.w);
        } else {
            update(p.x, e.x, m.x, v.x, sum.x);
            update(p.y, e.y, m.y, v.y, sum.y);
            update(p.z, e.z, m.z, v.z, sum.z);
            update(p.w, e.w, m.w, v.w, sum.w);
        }
        ema[i] = e;
        ms[i] = m;
        vs[i] = v;
        // The new weights go to all ranks whose memory this rank can write to. The network reads the first `plain`
        // weights in fp32 (without a copy these are all), and the weights of convolutions from the copy.
        const Four<T> rounded = from_floats<T>(p);
        for (int r = 0; r < u.params.ranks; r++) {
            if (r == 0 || 4 * k < u.plain) ((float4*)u.params.at[r])[k] = p;
            if (has_copy) ((Four<T>*)u.copy.at[r])[k] = rounded;
        }
    }
}
static void adamw_update(const Update& u, const StepState* state, AdamW h, Slice own) {
    const size_t quads = own.owned() / 4;
    const int blocks = (int)std::min<size_t>(blocks_for(quads), 8 * gpu.sms);
    with_act([&]<class T>(T) {
        auto* const kernel = u.is_matrix ? adamw_kernel<T, true> : adamw_kernel<T, false>;
        launch(kernel, blocks, 256, 0, u, state, h, own);
    });
}

// Updates one of the further averages of the parameters, by the same formula.
static __global__ void __launch_bounds__(256)
    ema_kernel(float* ema, const float* params, const StepState* state, float rate, Slice own) {
    __shared__ float share;
    await_previous_kernel();
    if (threadIdx.x == 0) share = average_share(rate, state->updates);
    __syncthreads();
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    const size_t k = own.flat(i);
    if (k < own.n && state->ok) ema[i] += share * (params[k] - ema[i]);
}
static void ema_update(float* ema, const float* params, const StepState* state, float rate, Slice own) {
    launch(ema_kernel, blocks_for(own.owned()), 256, 0, ema, params, state, rate, own);
}
// =====================================================================================================================
// Which kernel runs: costs as measured, tables of decisions, and the operations that have several kernels

// ---------------------------------------------------------------------------------------------------------------------
// --- attention: forward and, where a has dout, backward
// Hopper's kernel (gpu/hopper/), or the smallest kernel that has room for a.d channels.
template <class T> static void attention(const AttentionCall& a) {
    if (hopper_attention(a)) return;
    constexpr int LARGEST = 32 * VEC<T>; // channels of the largest head that launch_attention can compute: 512 bytes
    const Way<AttentionCall> ways[] = {
        {a.d <= 32, launch_attention<T, 32>}, // d is padded to the kernel's number of channels
        {a.d <= 64, launch_attention<T, 64>},           {a.d <= 128, launch_attention<T, 128>},
        {a.d <= LARGEST, launch_attention<T, LARGEST>}, {true, launch_attention_general<T>}, // heads of any size
    };
    decide(a, ways);
}

static void attention_forward(act* out, SoftmaxRow* rows, const act* qkv, int B, int T, int C, int heads) {
    const AttentionCall call{out, rows, qkv, nullptr, nullptr, B, T, C, heads};
    with_act([&]<class A>(A) { attention<A>(call); });
}
static void attention_backward(act* dqkv,              // (B, T, 3C)
                               const act* dout,        // (B, T, C)
                               const act* qkv,         // (B, T, 3C)
                               const act* out,         // (B, T, C)
                               const SoftmaxRow* rows, // (B, heads, T)
                               int B, int T, int C, int heads) {
    const AttentionCall call{dqkv, (SoftmaxRow*)rows, qkv, dout, out, B, T, C, heads};
    with_act([&]<class A>(A) { attention<A>(call); });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- convolution: forward and input gradient

// Hopper's kernels can compute neither stride 2 nor upsampling. So such a 3x3 convolution takes a detour: it is
// replaced by one with stride 1, whose output has the size of its input. Upsampling: x is first upsampled; the input
// gradient is first that of the upsampled input, which is then summed over 2 x 2 pixels. Stride 2: gradients read dout
// with zeros between its pixels. A detour moves more bytes, but wgmma more than makes up for that.
static ConvShape conv_without_detour(ConvShape s) { // returns the convolution that replaces s
    s.H <<= s.upsample;
    s.W <<= s.upsample;
    s.upsample = 0;
    s.stride = 1;
    return s;
}
static bool conv_takes_detour(const ConvShape& s) {
    const bool one_of_both = (s.stride == 2) != (s.upsample == 1);
    return s.kernel == 3 && one_of_both && conv_is_wgmma(conv_without_detour(s));
}
static size_t conv_detour_bytes(const ConvShape& s) {
    if (conv_is_few(s)) return few_bytes(s);
    if (!s.upsample && !conv_takes_detour(s)) return 0;
    const ConvShape one = conv_without_detour(s);
    // upsampling: the upsampled input or its gradient. Stride 2: the output at stride 1, or dout with zeros put in.
    const int channels = s.upsample ? s.C1 : s.Cout;
    const size_t bytes = (size_t)one.B * one.H * one.W * channels * act_bytes();
    return (bytes + 255) / 256 * 256;
}

// a layer that is first replaced by another one (conv_weight_shape), and so shares no launch with others
static bool conv_weight_alone(const ConvShape& s) { return conv_is_few(s) || conv_takes_detour(s); }
static ConvShape conv_weight_shape(const ConvShape& s) {
    return conv_is_few(s) ? few_shape(s, true) : conv_without_detour(s);
}

// A measure of time: rounds of blocks x a block's channels. The last round may be smaller, but takes as long.
template <class Tile> static int halo_rounds(const ConvCall& c) {
    const int tiles = count_tiles(c, Tile::IMAGES, Tile::TILE_H, Tile::TILE_W);
    const int blocks = tiles * ceil_div(c.Cout, Tile::CHANNELS);
    const int fit = std::clamp(gpu.blocks_of(Tile::SHARED_BYTES), 1, Tile::PER_SM); // blocks that a multiprocessor runs
    const int rounds = ceil_div(blocks, fit * gpu.sms);
    return rounds * Tile::CHANNELS;
}
template <class Tile, class Other> static bool halo_is_faster(const ConvCall& c) {
    return halo_rounds<Tile>(c) * 10 <= halo_rounds<Other>(c) * 9;
}
static bool halo_is_last(const ConvCall& c) { return c.s.out == Element::FP32 && conv_is_last(c.s); }
static bool halo_is_small(const ConvCall& c) { return c.H <= 8 || c.W <= 8; }
static bool halo_fills_gpu(const ConvCall& c) {
    const int tiles = count_tiles(c, 1, 16, 16) * ceil_div(c.Cout, 64);
    const int enough = c.Cout % 64 ? 2 : 1; // the GPU is full if there are more tiles for each multiprocessor than this
    return tiles > enough * gpu.sms;
}

template <bool BACKWARD> static void pick_conv_halo_bf16(const ConvCall& c) {
    // HaloTile<type, images, channels, K groups, blocks per multiprocessor>
    using Last = HaloTile<bf16, 1, 16, 1, 4>;
    using Small48 = HaloTile<bf16, 2, 48, 2, 3>;
    using Small32 = HaloTile<bf16, 2, 32, 4, 2>;
    using Large48 = HaloTile<bf16, 1, 48, 1, 2>;
    using Large64 = HaloTile<bf16, 1, 64, 1, 2>;
    using Few32 = HaloTile<bf16, 1, 32, 2, 2>;
    using Few48 = HaloTile<bf16, 1, 48, 2, 1>;
    const bool small = halo_is_small(c);
    const bool many = halo_fills_gpu(c);
    // Tiles of 48 channels are faster for some Cout, because fewer of their channels lie beyond the last channel.
    const bool small_48 = small && halo_is_faster<Small48, Small32>(c);
    const bool large_48 = many && halo_is_faster<Large48, Large64>(c);
    const Way<ConvCall> ways[] = {
        {halo_is_last(c), conv_halo<Last, false, float>},
        // a block has two images, and K groups (ProductTile) give the block more warps
        {small_48, conv_halo<Small48, BACKWARD>},
        {small, conv_halo<Small32, BACKWARD>},
        {large_48, conv_halo<Large48, BACKWARD>},
        {many, conv_halo<Large64, BACKWARD>},
        // few tiles: a block has fewer channels, and two K groups share a tile
        {c.Cout <= 128, conv_halo<Few32, BACKWARD>},
        {true, conv_halo<Few48, BACKWARD>},
    };
    decide(c, ways);
}
template <bool BACKWARD> static void pick_conv_halo_fp32(const ConvCall& c) {
    using Last = HaloTile<float, 1, 16, 1, 2>;
    using Small = HaloTile<float, 2, 32, 2, 2>;
    using Large = HaloTile<float, 1, 64, 1, 2>;
    using Few = HaloTile<float, 1, 32, 1, 3>;
    const Way<ConvCall> ways[] = {
        {halo_is_last(c), conv_halo<Last, false>},
        {halo_is_small(c), conv_halo<Small, BACKWARD>},
        {halo_fills_gpu(c), conv_halo<Large, BACKWARD>},
        {true, conv_halo<Few, BACKWARD>},
    };
    decide(c, ways);
}

template <class T, bool BACKWARD> static void pick_conv_gather(const ConvCall& c) {
    const int HW = c.H * c.W;
    const int tiles_of_128 = c.B * ceil_div(HW, 128);
    const bool many_128 = HW > 64 && tiles_of_128 * ceil_div(c.Cout, 64) >= gpu.sms;
    // GatherTile<type, pixels / 64, channels, channels of a warp, stages>
    using Pixels64 = GatherTile<T, 1, 64, 32, 3>;
    using Pixels128 = GatherTile<T, 2, 64, 32, 3>;
    if constexpr (sizeof(T) == 2) { // tiles of 128 x 128 read the fewest bytes
        using Wide = GatherTile<T, 2, 128, 64, 2>;
        const int blocks_of_128 = ceil_div(c.Cout, 128);
        // at most a fifth of the tiles' channels lie beyond the last channel
        const bool little_wasted = blocks_of_128 * 512 <= c.Cout * 5;
        const bool wide = HW > 64 && little_wasted && tiles_of_128 * blocks_of_128 >= 4 * gpu.sms;
        if (wide) return conv_gather<Wide, BACKWARD>(c);
    }
    if (many_128) conv_gather<Pixels128, BACKWARD>(c);
    else conv_gather<Pixels64, BACKWARD>(c);
}

// Decides which kernel computes a convolution. A pick_ function chooses the kernel's tile, in general the largest with
// which every multiprocessor still has a block.
template <bool BACKWARD> static void conv_product(const ConvCall& c) {
    const ConvShape& s = c.s;
    if (hopper_conv<BACKWARD>(c)) return;
    const bool halo = conv_is_halo(s);
    if (s.upsample && !halo) die("internal error: upsampled, a convolution must be 3x3 with stride 1");
    // Of the kernels for any GPU, only conv_halo can upsample, and store the last layer's fp32.
    const bool needs_halo = s.upsample || s.out != act_element;

    const bool bf16_is_it = act_element == Element::BF16;
    const bool fp32_is_it = act_element == Element::FP32;
    const Way<ConvCall> ways[] = {
        {halo && bf16_is_it, pick_conv_halo_bf16<BACKWARD>},
        {halo && fp32_is_it, pick_conv_halo_fp32<BACKWARD>},
        {bf16_is_it && !needs_halo, pick_conv_gather<bf16, BACKWARD>},
        {fp32_is_it && !needs_halo, pick_conv_gather<float, BACKWARD>},
    };
    decide(c, ways);
}

static void conv_forward(act* out, Stats* stats, const act* x1, const act* x2, const act* weight, // x2: only if 1x1
                         const float* bias, const float* emb, int emb_stride, const act* residual, ConvShape s,
                         const ConvSkip& skip, const float* factors) {
    if (s.kernel == 3 && s.C2) die("internal error: a 3x3 convolution of two inputs: only skip connections have them");
    const bool detour = conv_takes_detour(s);
    char* const workspace = device.workspace;
    if (detour && s.upsample) {
        upsample_forward(workspace, nullptr, x1, s.B, s.H, s.W, s.C1);
        const ConvShape one = conv_without_detour(s);
        return conv_forward(out, stats, workspace, nullptr, weight, bias, emb, emb_stride, residual, one);
    }
    // Stride 2: one way is to compute all pixels with stride 1, and to keep one of every 2 x 2. This takes four times
    // as many products, but by wgmma. With few pixels this is faster. It can't add a residual.
    const bool few_pixels = s.B * s.H * s.W <= 1 << 16;
    if (detour && !residual && few_pixels) {
        const ConvShape one = conv_without_detour(s);
        conv_forward(workspace, nullptr, x1, nullptr, weight, bias, emb, emb_stride, nullptr, one);
        return launch_resample<bf16, PICK>(out, stats, workspace, s.B, s.H, s.W, s.Cout);
    }
    if (conv_is_first(s)) {
        const ConvFew p = make_few_rows(s, x1, weight, workspace);
        const ConvShape rows = few_shape(s);
        return conv_forward(out, stats, p.rows, nullptr, p.weight_rows, bias, emb, emb_stride, residual, rows);
    }
    ConvOut o{.part1 = {out, residual}, .Cout1 = s.Cout, .B = s.B};
    o.bias = bias;
    o.emb = emb;
    o.emb_stride = emb_stride;
    o.skip = skip;
    if (stats) {
        o.stats = stats->sums;
        o.parts = &stats->parts;
    }
    ConvCall call{.s = s, .B = s.B, .H = s.out_H(), .W = s.out_W()};
    call.Cin1 = s.C1;
    call.Cin2 = s.C2;
    call.Cout = s.Cout;
    call.x1 = x1;
    call.x2 = x2;
    call.weight = weight;
    call.out = o;
    call.factors = factors;
    conv_product<false>(call);
}

static void conv_backward_input(Grad dx1, Grad dx2, const act* dout, const act* weight, ConvShape s,
                                const float* factors) {
    if (s.out == Element::FP8_GRADIENT) return conv_backward_input_fp8(dx1, dout, weight, s, factors);
    act* const workspace = device.workspace;
    if (s.upsample) { // on any GPU: first the upsampled input's gradient, then sums of 2 x 2 pixels
        conv_backward_input(Grad{workspace}, Grad{}, dout, weight, conv_without_detour(s));
        return upsample_backward(dx1, workspace, s.B, s.H, s.W, s.C1);
    }
    if (conv_takes_detour(s)) { // stride 2
        spread(workspace, dout, s.B, s.H, s.W, s.Cout);
        return conv_backward_input(dx1, Grad{}, workspace, weight, conv_without_detour(s));
    }
    // needs_grad is never set for the first convolution's input (add_layer).
    if (conv_is_first(s)) die("internal error: the gradient of the images, which nobody needs");
    if (conv_is_last(s)) {
        if (dx1.add2) die("a convolution to %d channels has one addend to its input's gradient at most", s.Cout);
        const ConvFew p = make_few_rows(s, dout, weight, device.workspace);
        const ConvShape rows = few_shape(s);
        return conv_forward(dx1.dx, nullptr, p.rows, nullptr, p.weight_rows, nullptr, nullptr, 0, dx1.add1, rows);
    }
    // The kernel's input is dout. Its output has the channels of both inputs of the layer.
    ConvCall call{.s = s, .B = s.B, .H = s.H, .W = s.W};
    call.Cin1 = s.Cout;
    call.Cin2 = 0;
    call.Cout = s.C1 + s.C2;
    call.x1 = dout;
    call.x2 = nullptr;
    call.weight = weight;
    call.out = ConvOut{.part1 = dx1, .part2 = dx2, .Cout1 = s.C1, .Cout2 = s.C2, .B = s.B};
    conv_product<true>(call);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- convolution: weight gradients
// Several layers are computed at once, because one small layer alone would not keep the GPU busy:
//
//   conv_backward_weights
//     conv_weight_batch       plans each layer, sorts the layers by kind, plans each kind as a whole, and launches:
//       one kernel for each kind (Hopper's: gpu/hopper/weights.h), and conv_weight_sum once for all partials
//     conv_weight_one         a layer that is first replaced by another one (conv_weight_alone)
//
// A plan (gpu/conv_weight_plan.h) is mainly the number of ranges into which the pixels are divided.

// bytes of the side stream's workspace that conv_backward_weights needs for this layer
static size_t conv_workspace(ConvShape s) {
    if (conv_weight_alone(s)) return conv_detour_bytes(s) + conv_workspace(conv_weight_shape(s));
    ConvWeight p = plan_weight(s);
    return put_partials(&p, nullptr);
}

// With `alone` the compiler knows that the layer is entry 0 of the batch, so a block need not search for it.
static void launch_portable(auto* alone, auto* together, const WeightPlans& works, Stream* stream, int threads,
                            int bytes) {
    stream->joined = true; // the kernel must not overlap the work before it: it does not call await_previous_kernel
    if (works.size() == 1) launch_weights(alone, works, stream, threads, bytes, std::identity(), all_blocks);
    else launch_weights(together, works, stream, threads, bytes, std::identity(), all_blocks);
}
template <class T> static void conv_weight_halo(const WeightPlans& works, Stream* stream) {
    launch_portable(conv_weight_halo_kernel<T, 1>, conv_weight_halo_kernel<T, WEIGHT_BATCH>, works, stream, 384,
                    WEIGHT_HALO_BYTES);
}
template <class T, int N> static void conv_weight_gather(const WeightPlans& works, Stream* stream) {
    launch_portable(conv_weight_gather_kernel<T, N, 1>, conv_weight_gather_kernel<T, N, WEIGHT_BATCH>, works, stream,
                    128, WEIGHT_GATHER_STAGES<T, N> * WEIGHT_GATHER_STAGE<T, N>);
}

static WeightKind weight_kind(const ConvWeight& p) {
    const ConvShape& s = p.shape;
    if (is_fp8(s.in)) return s.out_W() > 8 ? FP8_3X3 : FP8_3X3_NARROW;
    if (conv_is_wgmma(s)) {
        if (s.kernel == 1) return TMA_1X1;
        return s.out_W() > 8 ? TMA_3X3 : TMA_3X3_NARROW;
    }
    if (conv_is_halo(s)) return HALO_3X3;
    return p.block_co == 2 ? GATHER_WIDE : GATHER;
}

static void launch_weight_kind(WeightKind kind, const WeightPlans& works, Stream* stream) {
    switch (kind) {
    case TMA_1X1:
    case TMA_3X3:
    case TMA_3X3_NARROW:
    case FP8_3X3:
    case FP8_3X3_NARROW: return hopper_weights(kind, works, stream);
    case HALO_3X3: return with_act([&]<class T>(T) { conv_weight_halo<T>(works, stream); });
    case GATHER: return with_act([&]<class T>(T) { conv_weight_gather<T, 1>(works, stream); });
    case GATHER_WIDE:
        return with_act([&]<class T>(T) {
            constexpr int TILES = PARTS<T> == 1 ? 2 : 1; // weight_kind never returns GATHER_WIDE for floats
            conv_weight_gather<T, TILES>(works, stream);
        });
    }
}

// This layer's work as a fraction of the work that a launch should have. At 1 it needs no other layers in its launch. A
// launch has at most WEIGHT_BATCH layers.
static double conv_weight_load(const ConvShape& s) {
    if (conv_weight_alone(s)) return 1;
    ConvWeight p = plan_weight(s);
    WeightCosts cost = weight_costs(p);
    const bool tma = conv_is_wgmma(s);
    if (tma && !is_fp8(s.in)) {
        set_warpgroups(&p, 1);
        if (s.kernel == 1) cost.tile = 160 + 180 * std::min(3, p.channel_tiles);
        else cost.tile = s.out_W() > 8 ? 830 : 430;
    }
    // A portable kernel's blocks take longer. Its launch must be larger, for the last round does not fill the GPU.
    const double enough = WEIGHT_LAUNCH_CYCLES * (tma ? 1 : 6);
    const double cycles = (double)(range_blocks(p) * cost.tile) * p.pixel_tiles / cost.slots;
    return std::max(1.0 / WEIGHT_BATCH, cycles / enough);
}

// At most WEIGHT_BATCH layers, without those of conv_weight_one. In two halves if the workspace is too small.
static void conv_weight_batch(const std::vector<WeightWork>& works, Stream* stream) {
    std::map<WeightKind, WeightPlans> kinds;
    WeightPlans sums; // the works whose partials have to be added up
    for (const WeightWork& w : works) {
        if (conv_weight_alone(w.shape)) continue;
        ConvWeight p = plan_weight(w.shape);
        (WeightWork&)p = w;
        p.bias_images = conv_is_wgmma(w.shape) && !w.demb ? 1 : w.shape.B;
        kinds[weight_kind(p)].push_back(p);
    }
    size_t workspace_used = 0;
    for (auto& [kind, plans] : kinds) {
        if (plans.size() > 1) plan_weights(plans);
        for (ConvWeight& p : plans) {
            const size_t bytes = put_partials(&p, stream->workspace + workspace_used);
            if (p.splits == 1 && conv_is_wgmma(p.shape)) continue; // p has no partials
            sums.push_back(p);
            workspace_used += bytes;
        }
    }
    if (works.size() > 1 && workspace_used > stream->workspace_bytes) {
        const auto middle = works.begin() + works.size() / 2;
        conv_weight_batch({works.begin(), middle}, stream);
        return conv_weight_batch({middle, works.end()}, stream);
    }
    for (const auto& [kind, plans] : kinds) launch_weight_kind(kind, plans, stream);
    launch_weights(conv_weight_sum, sums, stream, dim3(32, 8), 0, std::identity(), [](const ConvWeight& p) {
        const int weights = p.splits > 1 ? p.tiles * p.taps * 32 * weight_sum_groups(p.splits) / 8 : 0;
        return bias_sum_blocks(p.shape.Cout) + weights;
    });
}

// A layer that is first replaced by another convolution:
//   few channels   by a 1x1 convolution of rows (ConvFew); then conv_few_gradient computes the layer's gradient
//   upsampling     x is first upsampled
//   stride 2       dout is first spread out, with zeros between its pixels; then the stride is 1
static void conv_weight_one(WeightWork w, Stream* stream) {
    const ConvShape s = std::exchange(w.shape, conv_weight_shape(w.shape));
    char* const detour = stream->workspace + conv_workspace(w.shape); // after the workspace of the new convolution
    if (conv_is_few(s)) {
        const act*& few = conv_is_last(s) ? w.dout : w.x1;
        ConvFew p = make_few_rows(s, few, nullptr, detour, stream);
        p.dweight = std::exchange(w.dweight, p.product);
        if (p.is_last_layer) p.dbias = std::exchange(w.dbias, p.bias);
        few = p.rows;
        conv_weight_batch({w}, stream);
        return launch_on(stream, 1, conv_few_gradient, ceil_div(9 * p.F * p.C, 256), 256, 0, p);
    }
    if (s.upsample) {
        launch_resample<bf16, REPEAT>(detour, nullptr, w.x1, s.B, s.H, s.W, s.C1, stream);
        w.x1 = detour;
    } else {
        spread(detour, w.dout, s.B, s.H, s.W, s.Cout, stream);
        w.dout = detour;
    }
    conv_weight_batch({w}, stream);
}

static void conv_backward_weights(const std::vector<WeightWork>& works, Stream* stream) {
    conv_weight_batch(works, stream);
    for (const WeightWork& w : works)
        if (conv_weight_alone(w.shape)) conv_weight_one(w, stream);
}

// =====================================================================================================================
// The GPU: memory, copies, repeated work
//
// The main stream has a high priority and runs nearly everything. The side stream has a low priority: its kernels fill
// multiprocessors that the main stream leaves free. The copy stream copies the next batch to the GPU while the current
// batch is computed. CUDA events order their work. With several GPUs there is a fourth (gpu/ranks.h).

// The smallest part that a kernel writes is a square of 8 x 8 pixels, or 64 consecutive pixels (conv_gather).
static int max_stat_parts(int H, int W) { return ceil_div(H, 8) * ceil_div(W, 8); }

static cudaStream_t side_queue; // the queue of low priority, which the side stream uses if allowed.beside is true

static void start_device(const std::string& precision, int number) {
    number = choose_device(number);
    CUDA_CHECK(cudaSetDevice(number));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, number));
    const int version = code_version(number);
    gpu = {.sms = properties.multiProcessorCount,
           .shared_per_sm = (int)properties.sharedMemPerMultiprocessor,
           .shared_per_block = (int)properties.sharedMemPerBlockOptin,
           .overlap = version >= 90,
           .clusters = version >= 90 && allowed.clusters,
           // 9.0 is always compiled for sm_90a, which has wgmma (the #error in gpu/shared.h)
           .wgmma = version == 90 && allowed.hopper && BUILT_WITH_HOPPER};
    act_element = element_named(precision, Element::BF16);
    if (precision == "fp8" && !gpu.wgmma)
        die("--precision fp8: needs an H100 or H200 (compute capability 9.0), and GPU %d has %d.%d; use bf16", number,
            properties.major, properties.minor);
    int low, high;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
    CUDA_CHECK(cudaStreamCreateWithPriority(&device.queue, cudaStreamDefault, high));
    CUDA_CHECK(cudaStreamCreateWithPriority(&side_queue, cudaStreamNonBlocking, low));
    device.side.queue = allowed.beside ? side_queue : device.queue;
    CUDA_CHECK(cudaStreamCreateWithFlags(&device.copy_stream, cudaStreamNonBlocking));
}

static std::string device_name() { return properties.name; }

// memory that the main stream fills with zeros
static void* device_alloc_bytes(size_t bytes) {
    void* p = nullptr;
    const cudaError_t error = cudaMalloc(&p, bytes);
    if (error != cudaSuccess && error != cudaErrorMemoryAllocation)
        die("CUDA: %s (cudaMalloc of %zu bytes)", cudaGetErrorString(error), bytes);
    if (error != cudaSuccess)
        die("%.2f GiB of GPU memory could not be had (%.2f of %.2f GiB are free); a smaller --batch_size or a "
            "--microbatch needs less",
            bytes / 0x1p30, device_available() / 0x1p30, properties.totalGlobalMem / 0x1p30);
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, device.queue));
    device_bytes += bytes;
    return p;
}

static void device_free(void* p) { CUDA_CHECK(cudaFree(p)); }

static size_t device_available() {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return available;
}

// Both wait until the main stream has done all its work so far and the copy is complete.
static void copy_to_device(void* to, const void* host, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, device.queue));
    CUDA_CHECK(cudaStreamSynchronize(device.queue));
}
static void copy_to_host(void* host, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, device.queue));
    CUDA_CHECK(cudaStreamSynchronize(device.queue));
}

// Runs work() as a CUDA graph. The first call records its launches without running them. Every call then launches the
// whole recording at once, because each of hundreds of launches costs the host microseconds. The arguments of a launch
// stay as recorded. So everything that changes from step to step lies in device memory.
template <class F> static void replay(Graph* g, F work) {
    if (!allowed.graphs) return work();
    if (!g->exec) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(device.queue, cudaStreamCaptureModeRelaxed));
        work();
        CUDA_CHECK(cudaStreamEndCapture(device.queue, &graph));
        CUDA_CHECK(cudaGraphInstantiate((cudaGraphExec_t*)&g->exec, graph, 0));
        CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &g->nodes));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch((cudaGraphExec_t)g->exec, device.queue));
}

// A graph must not be destroyed while it runs.
static void free_graph(Graph* g) {
    CUDA_CHECK(cudaStreamSynchronize(device.queue));
    if (g->exec) CUDA_CHECK(cudaGraphExecDestroy((cudaGraphExec_t)g->exec));
    g->exec = nullptr;
}

// The kernels that work(side stream) launches begin after all of the main stream's work so far. wait_for_side(ticket)
// makes the main stream wait for their end. ticket: a number that the caller chooses
static std::map<int, cudaEvent_t> side_events; // for each ticket: the event that its kernels have ended
template <class F> static void run_beside(int ticket, F work) {
    follow(&device.side, device);
    work(&device.side);
    record(&side_events[ticket], device.side.queue);
}
static void wait_for_side(int ticket) { follow(MAIN_STREAM, side_events[ticket]); }

// An Upload is used again and again: the host fills u->host, `send` copies it to u->device, the main stream reads
// u->device. The host calls `release` when it has launched all kernels that read it.
//
//   host           fill        fill (waits until `sent`)
//   copy stream        copy         copy (waits until `released`)
//   main stream            compute      compute (waits until `sent`)
static void release(Upload* u) { record((cudaEvent_t*)&u->released, device.queue); }
static Upload make_upload(size_t bytes) {
    Upload u{nullptr, (uint8_t*)device_alloc_bytes(bytes), bytes, nullptr, nullptr};
    CUDA_CHECK(cudaMallocHost(&u.host, bytes));
    record((cudaEvent_t*)&u.sent, device.copy_stream);
    release(&u); // the first copy has to wait until the main stream has filled u.device with zeros
    return u;
}
static void wait_for_host_side(Upload* u) { CUDA_CHECK(cudaEventSynchronize((cudaEvent_t)u->sent)); }
static void send(Upload* u) {
    CUDA_CHECK(cudaStreamWaitEvent(device.copy_stream, (cudaEvent_t)u->released));
    CUDA_CHECK(cudaMemcpyAsync(u->device, u->host, u->bytes, cudaMemcpyHostToDevice, device.copy_stream));
    record((cudaEvent_t*)&u->sent, device.copy_stream);
    CUDA_CHECK(cudaStreamWaitEvent(device.queue, (cudaEvent_t)u->sent));
}

// The old content is lost.
static void grow(char** memory, size_t* bytes, size_t wanted) {
    if (wanted <= *bytes) return;
    if (*memory) device_free(*memory);
    *bytes = wanted;
    *memory = device_alloc<char>(wanted);
}
static void reserve(const Workspace& most, bool training) {
    // room for the partials (16384 bytes each) of most batches of layers; larger ones are computed in halves
    const size_t for_most_batches = (size_t)2 * MAX_WEIGHT_PARTIALS * 16384;
    if (training) {
        grow(&device.norm_sums, &device.norm_sums_bytes, most.sums);
        grow(&device.side.workspace, &device.side.workspace_bytes, std::max(most.side, for_most_batches));
    }
    grow(&device.workspace, &device.workspace_bytes, most.main);
}
#endif
