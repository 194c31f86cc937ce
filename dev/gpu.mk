# Which GPUs are here, whether there is an nvcc, and what it is told: for the Makefile and dev/Makefile.
NVCC ?= $(shell command -v nvcc || echo /usr/local/cuda/bin/nvcc)
HAS_NVCC := $(shell command -v $(NVCC))
# The compute capabilities (86 is 8.6) of all GPUs, each once, since nvidia-smi counts GPUs in another order than CUDA does, and what runs may be any of them.
# None where CUDA_VISIBLE_DEVICES hides them all.
HIDDEN := $(shell case "$${CUDA_VISIBLE_DEVICES-all}" in (""|-*) echo yes ;; esac)
GPUS := $(if $(HIDDEN),,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n 's/^ *\([0-9][0-9]*\)\.\([0-9]\) *$$/\1\2/p' \
	| sort -un))
BEFORE_80 = 3% 5% 6% 7%
GPU := $(filter-out $(BEFORE_80),$(GPUS))# those that the GPU build can use

# Architectures to compile for. ARCH=all or ARCH="80 120" says which; else those of the GPUs that are here; where there is none (an image is being built), code
# for what people own: 8.6 to 8.9 run 8.0's, 12.1 runs 12.0's, 9.0 has instructions of its own (90a).
KNOWN = $(eval KNOWN := $(shell $(NVCC) --list-gpu-code 2>/dev/null | sed -n 's/^sm_\([0-9]*\)$$/\1/p' | sort -n))$(KNOWN)
newest = $(shell printf '%s\n' $(KNOWN) | awk '$$1 <= $1 { best = $$1 } END { print best }')# that nvcc knows, up to this one
EVERY = $(foreach a,80 86 89 90a 100 120,$(if $(filter $(a:a=),$(KNOWN)),$a))
ARCH ?= $(if $(GPU),$(foreach g,$(GPU),$(if $(filter $g,$(KNOWN)),$(g:90=90a),$(call newest,$g))),$(filter-out 86 89,$(EVERY)))
ARCHS = $(shell printf '%s\n' $(if $(filter all,$(ARCH)),$(EVERY),$(ARCH)) | sort -u | sort -n)
dotted = $(shell echo $1 | sed 's/\([0-9]\)a* /.\1 /g; s/\([0-9]\)a*$$/.\1/')
# For each its code and, but for those that end in a, its PTX, which the driver of a GPU that no code is for compiles when the program starts.
, := ,
PTX = $(lastword $(filter-out %a,$(ARCHS)))
gencode = $(foreach a,$1,-gencode arch=compute_$a,code=$(if $(filter %a,$a),sm_$a,'[sm_$a$(,)compute_$a]'))

# Ends a recipe in a sentence where it cannot work.
NEEDS_80 = the GPU build needs a GPU of compute capability 8.0 or later (A100, RTX 30)
NEEDS_NVCC = there is no nvcc: install the CUDA toolkit (12.4 or later), or say where its compiler is (NVCC=/path/to/nvcc)
TOO_OLD = $(or $(filter $(BEFORE_80),$(ARCHS)),$(if $(filter file,$(origin ARCH)),$(if $(GPU),,$(GPUS))))
UNKNOWN = $(filter-out $(KNOWN),$(ARCHS:a=))
check_gpu_build = $(if $(HAS_NVCC),,$(error $(NEEDS_NVCC); make train_unet_cpu needs none))$(if $(TOO_OLD),$(error $(NEEDS_80), and this would be \
	for $(TOO_OLD); make train_unet_cpu builds the program for the processor))$(if $(UNKNOWN),$(error ARCH=$(ARCH): this nvcc knows $(KNOWN)))

# NCCL: the system's, or that of a Python (PyTorch brings it along): a folder with include/nccl.h and lib/libnccl.so.
OF_PYTHON = import importlib.util as u; print(*u.find_spec("nvidia.nccl").submodule_search_locations)
NCCL_PLACES = /usr $(dir $(NVCC)).. $(foreach p,$(wildcard $(VIRTUAL_ENV)/bin/python .venv/bin/python) python3,$(shell $p -c '$(OF_PYTHON)' 2>/dev/null))
NCCL = $(eval NCCL := $(firstword $(foreach p,$(NCCL_PLACES),$(if $(wildcard $p/include/nccl.h),$p))))$(NCCL)
NCCL_LIBRARY = $(firstword $(wildcard $(foreach l,lib/x86_64-linux-gnu lib/aarch64-linux-gnu lib64 lib,$(NCCL)/$l/libnccl.so $(NCCL)/$l/libnccl.so.2)))
NCCL_FLAGS = $(if $(NCCL),-DUSE_NCCL -I$(NCCL)/include -L$(dir $(NCCL_LIBRARY)) -l:$(notdir $(NCCL_LIBRARY)) -Xlinker -rpath$(,)$(abspath $(dir $(NCCL_LIBRARY))))
