// pairs.cu - all pairs of the workshop in one binary, since each has the whole trainer in it, whose kernels take minutes to compile.
//
// dev/conv3x3 and the others are links to it: the name that it is started by says which pair it is.
#include "block.h"
#include "conv.h"
#include "resample.h"

namespace pair_adamw {
#include "adamw.cu"
}
namespace pair_attention {
#include "attention.cu"
}
namespace pair_attention_block {
#include "attention_block.cu"
}
namespace pair_augment {
#include "augment.cu"
}
namespace pair_conv1x1 {
#include "conv1x1.cu"
}
namespace pair_conv3x3 {
#include "conv3x3.cu"
}
namespace pair_ddpm_loss {
#include "ddpm_loss.cu"
}
namespace pair_downsample {
#include "downsample.cu"
}
namespace pair_fp8 {
#include "fp8.cu"
}
namespace pair_groupnorm {
#include "groupnorm.cu"
}
namespace pair_linear {
#include "linear.cu"
}
namespace pair_muon {
#include "muon.cu"
}
namespace pair_patches {
#include "patches.cu"
}
namespace pair_resblock {
#include "resblock.cu"
}
namespace pair_sampler_step {
#include "sampler_step.cu"
}
namespace pair_silu {
#include "silu.cu"
}
namespace pair_timestep_embedding {
#include "timestep_embedding.cu"
}
namespace pair_unet {
#include "unet.cu"
}
namespace pair_upsample {
#include "upsample.cu"
}

int main(int argc, char** argv) {
    static const std::map<std::string, int (*)(int, char**)> pairs = {
        {"adamw", pair_adamw::main},
        {"attention", pair_attention::main},
        {"attention_block", pair_attention_block::main},
        {"augment", pair_augment::main},
        {"conv1x1", pair_conv1x1::main},
        {"conv3x3", pair_conv3x3::main},
        {"ddpm_loss", pair_ddpm_loss::main},
        {"downsample", pair_downsample::main},
        {"fp8", pair_fp8::main},
        {"groupnorm", pair_groupnorm::main},
        {"linear", pair_linear::main},
        {"muon", pair_muon::main},
        {"patches", pair_patches::main},
        {"resblock", pair_resblock::main},
        {"sampler_step", pair_sampler_step::main},
        {"silu", pair_silu::main},
        {"timestep_embedding", pair_timestep_embedding::main},
        {"unet", pair_unet::main},
        {"upsample", pair_upsample::main},
    };
    const std::string path = argv[0], file = path.substr(path.rfind('/') + 1),
                      name = file.substr(0, std::min(file.rfind("_c"), file.rfind("_emu"))); // _cpu, _cuda or _emulated
    if (!pairs.count(name)) {
        fprintf(stderr, "%s: is the workshop's pairs, of which its name should be one:", file.c_str());
        for (const auto& [other, main] : pairs) fprintf(stderr, " %s", other.c_str());
        fprintf(stderr, "\n");
        return 1;
    }
    return pairs.at(name)(argc, argv);
}
