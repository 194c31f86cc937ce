// no_hopper.h - in place of gpu/hopper/ where the program is built without it (-DNO_HOPPER): nothing is Hopper's.
#pragma once
#include "attention.h"
#include "conv.h"

#ifdef __CUDACC__ // the GPU

static bool hopper_attention(const AttentionCall&) { return false; }
template <bool BACKWARD> static bool hopper_conv(const ConvCall&) { return false; }
static bool conv_takes_skip(const ConvShape&, const ConvShape&) { return false; }

// start_device refuses --precision fp8, and conv_is_wgmma and hopper_muon are false, so these are never called.
static void conv_backward_input_fp8(Grad, const act*, const act*, ConvShape, const float*) {}
static WeightCosts hopper_weight_costs(const ConvWeight&) { return {}; }
static void hopper_weights(WeightKind, const WeightPlans&, Stream*) {}
static void round_weights(uint8_t*, uint8_t*, const act*, const std::vector<WeightRounding>&) {}
static void round_gradient(Fp8Copy, const act*, size_t) {}
static bool hopper_muon() { return false; }
static void prepare_hopper_muon(MuonWork*, size_t) {}
static void orthogonalise_by_wgmma(float*, const MuonWork&, const StepState*) {}
#endif
