# make train_unet        the trainer, for the GPU if there is one (and nvcc), else for the CPU; says which
# make train_unet_cpu    the CPU build         make train_unet_asan   the same with AddressSanitizer and UBSan
# make train_unet_cuda   the GPU build, for the GPU of this machine (without one: 80 and 90a); ARCH=80, 86, 89, 90a, 100 or all for others
# make test              everything that this machine can check; sets up .venv if no Python here has what the tests need
# make lint              clang-format and ruff
# make bench_cpu         the CPU build against PyTorch on the same threads       make bench   the GPU build against compiled PyTorch
# make bench_data        how long training waits for images that come from the disk; FLAGS="--gib 40" for a file larger than memory
# make profile           where the time of a training step and of a forward pass goes; FLAGS="--preset adm64 --batch_size 32" for other models

CXX ?= g++
CXXFLAGS = -std=c++17 -O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math -Wall -Wextra
SOURCES = train_unet.cu dev/reference.h
# A Python that has what the twin and the tests need, or the one that `make python` sets up; looked for only where it is needed.
NEEDED = from importlib.util import find_spec; \
	assert all(map(find_spec, "torch numpy pytest PIL safetensors tqdm matplotlib onnx onnxruntime onnxscript coremltools".split()))
PYTHON = $(eval PYTHON := $(shell for p in $${VIRTUAL_ENV:+$$VIRTUAL_ENV/bin/python} .venv/bin/python python3; do \
	$$p -c '$(NEEDED)' >/dev/null 2>&1 && echo $$p && exit; done; echo .venv/bin/python))$(PYTHON)

NVCC ?= $(shell command -v nvcc || echo /usr/local/cuda/bin/nvcc)
GPU := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
ARCH ?= $(if $(GPU),$(patsubst 90,90a,$(GPU)),80 90a)
# Code for each architecture and, but for those that end in a, also PTX, which later GPUs compile when the program starts.
, := ,
ARCHS = $(if $(filter all,$(ARCH)),80 86 89 90a 100,$(ARCH))
NVCCFLAGS = -std=c++17 -O3 --expt-relaxed-constexpr --threads 0 -Xcompiler -Wall,-Wextra -Werror all-warnings $(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=$(if $(filter %a,$(a)),sm_$(a),'[sm_$(a)$(,)compute_$(a)]'))
BUILD = $(if $(and $(GPU),$(wildcard $(NVCC))),cuda,cpu)

train_unet: train_unet_$(BUILD) data
	@cp train_unet_$(BUILD) train_unet
	@echo "train_unet: the $(if $(filter cuda,$(BUILD)),GPU build (compute capability $(ARCH)),CPU build)"

train_unet_cpu: $(SOURCES)
	$(CXX) -x c++ $(CXXFLAGS) train_unet.cu -o $@

train_unet_cuda: $(SOURCES)
	$(NVCC) -x cu $(NVCCFLAGS) train_unet.cu -o $@

train_unet_asan: $(SOURCES)
	$(CXX) -x c++ $(CXXFLAGS) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all train_unet.cu -o $@

# The data sets, unpacked (gunzip in the Quick start does the same and removes the .gz, so nothing here may depend on it).
data:
	@for f in fashion32 emoji64; do [ -f data/$$f.bin ] || gunzip -k data/$$f.bin.gz; done

python:
	@$(PYTHON) -c '$(NEEDED)' 2>/dev/null || (python3 -m venv .venv && .venv/bin/python -m pip install --quiet -r requirements.txt)

test: train_unet train_unet_cpu train_unet_asan $(if $(wildcard $(NVCC)),train_unet_cuda) python
	$(MAKE) -C dev PYTHON=$(abspath $(PYTHON))
	$(PYTHON) -m pytest -q dev/test
	$(if $(GPU),TRAIN_UNET_BUILD=cuda $(PYTHON) -m pytest -q dev/test/test_training.py dev/test/test_diffusion.py dev/test/test_gpu.py)

lint: python
	clang-format --dry-run --Werror train_unet.cu dev/*.cu dev/*.h
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

bench_cpu: train_unet_cpu data
	$(PYTHON) dev/bench_cpu.py

bench_data: $(if $(GPU),train_unet_cuda)
	$(PYTHON) dev/bench_data.py $(FLAGS)

bench: $(if $(GPU),train_unet_cuda)
	$(PYTHON) dev/bench.py --chart assets/bench.png --output assets/bench.json

profile: train_unet
	./train_unet --profile 20 $(FLAGS)

clean:
	rm -f train_unet train_unet_cpu train_unet_cuda train_unet_asan
	$(MAKE) -C dev clean

.PHONY: train_unet data python test lint bench bench_cpu bench_data profile clean
