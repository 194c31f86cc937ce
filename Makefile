# make train_unet        the trainer, for the GPU if there is one (and nvcc), else for the CPU; says which
# make train_unet_cpu    the CPU build         make train_unet_asan   the same with AddressSanitizer and UBSan
# make train_unet_mpi    the CPU build for several processes (libopenmpi-dev): mpirun -n 4 ./train_unet_mpi; make train_unet_cpu MPI=1 makes both
# make train_unet_cuda   the GPU build, for the GPUs of this machine, or, without one, for all that people own; ARCH="80 90a 120" or all for others
# make train_unet_plain  the GPU build without unet/gpu/hopper/: train_unet.cu as it is read      make one   the program as one file, train_unet_one.cu
# make test              what fails often, in under six minutes on two cores once all is built; sets up .venv if no Python here has what the tests need
# make test_all          everything that this machine can check, in half an hour: the GPU build without a GPU, too, and all tests marked `long`
# make test_launches     the GPU build's launches on GPUs that are not there (a part of make test_all); ARCH=all for all architectures
# make test_emulated     the GPU build's kernels on a GPU made of software, in all cases of a bearable size (a part of make test_all, in some): needs nvcc
# make test_faults       every call of a short run fails, one after the other, and processes are killed at random moments for ten minutes (a part of make test_all, in some)
# make mutants           changes instructions of the kernels, one at a time, and says what no test of a pair notices: needs nvcc
# make fuzz              hostile model files, data files, logs and command lines under the sanitizers, for FUZZ_SECONDS=600; needs clang
# make lint              clang-format and ruff
# make bench_cpu         the CPU build against PyTorch on the same threads       make bench   the GPU build against compiled PyTorch and JAX
# make bench_data        how long training waits for images that come from the disk; FLAGS="--gib 40" for a file larger than memory
# make speedrun          how good the pictures are after how many seconds of training, three seeds; FLAGS="--seeds 0 --moments 4" for less,
#                        FLAGS="--rivals lucidrains,diffusers,guided,edm" for others' programs in the same table
# make profile           where the time of a training step and of a forward pass goes; FLAGS="--preset adm64 --batch_size 32" for other models

CXX ?= g++
include dev/cpu.mk
CXXFLAGS = -std=c++20 -O3 $(NATIVE) $(WIDTH) $(OPENMP) -fno-math-errno -fno-trapping-math $(WARNINGS) $(NAME_COMMIT)
HEADERS = $(wildcard unet/*.h unet/*/*.h unet/*/*/*.h)
SOURCES = train_unet.cu $(HEADERS) unet/run/page.html dev/reference.h dev/winograd.h
# In a git checkout the program is told the latest commit of its sources, and whether they were changed since: a run's page names it.
COMMIT = $(shell git log -1 --format=%h -- $(SOURCES) 2>/dev/null)
CHANGED = $(shell git diff --quiet HEAD -- $(SOURCES) 2>/dev/null || echo -changed)
NAME_COMMIT = $(addprefix -DTRAIN_UNET_COMMIT=,$(addsuffix $(CHANGED),$(COMMIT)))
# A Python that has what the twin and the tests need, or the one that `make python` sets up; looked for only where it is needed.
NEEDED = from importlib.util import find_spec; \
	assert all(map(find_spec, "torch numpy pytest xdist pytest_rerunfailures PIL safetensors tqdm matplotlib onnx onnxruntime onnxscript coremltools diffusers torch_fidelity playwright".split()))
PYTHON = $(eval PYTHON := $(shell for p in $${VIRTUAL_ENV:+$$VIRTUAL_ENV/bin/python} .venv/bin/python python3; do \
	$$p -c '$(NEEDED)' >/dev/null 2>&1 && echo $$p && exit; done; echo .venv/bin/python))$(PYTHON)

include dev/gpu.mk
ALL_NVCCFLAGS = -std=c++20 -O3 --expt-relaxed-constexpr --extended-lambda --threads 0 -Xcompiler -Wall,-Wextra -Werror all-warnings $(NVCCFLAGS) $(NAME_COMMIT)
BUILD = $(if $(and $(GPU),$(HAS_NVCC)),cuda,cpu)
# Why `make train_unet` makes the CPU build although there is a GPU, or nvcc.
NO_NVCC = , though this machine has a GPU: $(NEEDS_NVCC)
OLD_GPU = , as make train_unet_cpu makes it: $(NEEDS_80), and this machine's has $(call dotted,$(GPUS))
NO_ANSWER = , though this machine has nvidia-smi: it names no GPU, so the driver does not run, or is too old; make train_unet_cuda ARCH=86 builds for a GPU of 8.6
NO_GPU = , because no GPU is here; nvcc is, and make train_unet_cuda compiles for GPUs of other machines
WHY_NO_GPU = $(if $(shell command -v nvidia-smi),$(NO_ANSWER),$(if $(HAS_NVCC),$(NO_GPU)))
WHY_CPU = $(if $(GPU),$(NO_NVCC),$(if $(GPUS),$(OLD_GPU),$(if $(HIDDEN),,$(WHY_NO_GPU))))

train_unet: train_unet_$(BUILD) data
	@cp train_unet_$(BUILD) train_unet
	@echo "train_unet: the $(if $(filter cuda,$(BUILD)),GPU build,CPU build$(WHY_CPU))"

# For any number of processes.
train_unet_mpi: $(SOURCES)
	@command -v mpicxx >/dev/null || { echo "$@: mpicxx is missing; on Debian: apt-get install libopenmpi-dev openmpi-bin"; exit 1; }
	mpicxx -DUSE_MPI -x c++ $(CXXFLAGS) train_unet.cu -o $@

ifdef MPI
train_unet_cpu: train_unet_mpi
	cp $< $@
.PHONY: train_unet_cpu
else
train_unet_cpu: $(SOURCES)
	$(CXX) -x c++ $(CXXFLAGS) train_unet.cu -o $@
endif

train_unet_cuda: $(SOURCES)
	$(check_gpu_build)$(NVCC) -x cu $(ALL_NVCCFLAGS) $(call gencode,$(ARCHS)) $(NCCL_FLAGS) train_unet.cu -o $@
	@echo "train_unet_cuda: code for compute capability $(call dotted,$(ARCHS))$(if $(PTX),; newer GPUs' drivers compile $(call dotted,$(PTX))'s as the program starts)"
	@echo "train_unet_cuda: $(if $(NCCL),several GPUs through $(NCCL_LIBRARY),one GPU; libnccl-dev or the Python package nvidia-nccl-cu12 would make it several)"

# dev/benchmarks/bench.cu, which is the trainer, too, and not the CUDA runtime but dev/test/fake_cudart.cpp, which checks every launch. It is told what ptxas says of the kernels. Unless ARCH says otherwise, for A100, RTX 30
# and 40 (80) and H100 (90a): the others take another two minutes to compile.
LAUNCH_ARCHS = $(if $(filter file,$(origin ARCH)),80 90a,$(ARCHS))
launches_of = train_unet_launches_$(subst $() ,_,$(strip $1))
LAUNCHES = $(call launches_of,$(LAUNCH_ARCHS))
ALL_LAUNCHES = $(call launches_of,$(filter-out 86 89,$(EVERY)))# which run the code for 80
train_unet_launches_%: $(SOURCES) dev/benchmarks/bench.cu dev/benchmarks/timing.h dev/test/fake_cudart.cpp dev/test/emulator.h
	$(check_gpu_build)$(NVCC) $(ALL_NVCCFLAGS) $(call gencode,$(subst _, ,$*)) -Xptxas -v -cudart none $(NCCL_FLAGS) dev/benchmarks/bench.cu dev/test/fake_cudart.cpp -o $@ 2> $@.ptxas \
		|| { cat $@.ptxas; exit 1; }

# Without unet/gpu/hopper/: train_unet.cu as it is read, for any GPU. On an H100 it runs the kernels of an A100.
PLAIN_ARCH = 80
train_unet_plain: $(SOURCES)
	$(check_gpu_build)$(NVCC) -x cu $(ALL_NVCCFLAGS) -DNO_HOPPER $(call gencode,$(PLAIN_ARCH)) $(NCCL_FLAGS) train_unet.cu -o $@

# One file, for those who want one: train_unet.cu with all quoted includes expanded.
one: train_unet_one.cu
train_unet_one.cu: $(SOURCES) dev/one.py
	python3 dev/one.py > $@

train_unet_asan: $(SOURCES)
	$(CXX) -x c++ $(CXXFLAGS) -O1 -g -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all train_unet.cu -o $@

# The data sets, unpacked (gunzip in the Quick start does the same and removes the .gz, so nothing here may depend on it).
data:
	@for f in fashion32 emoji64; do [ -f data/$$f.bin ] || gunzip -k data/$$f.bin.gz; done

python:
	@$(PYTHON) -c '$(NEEDED)' 2>/dev/null || (python3 -m venv .venv && .venv/bin/python -m pip install --quiet -r requirements.txt)

# A test is repeated, twice at most, if mpirun itself crashed as it ended: its message then holds a line of mpirun's trace. (Seen once, in Open MPI
# 4.1.4 with PMIx 4.2.2.) Every other failure counts at once.
MPIRUN_CRASHED = --reruns 2 --only-rerun 'PMIx_server_finalize[+]0x'
# Tests use one thread each, and some wait: one more at a time than there are cores fills that time. More than eight fill a GPU's memory with nothing but their start.
# The folder of a test is kept if it failed: those of all together are gigabytes. Bytecode is kept, also where the environment says no: each process would compile all tests.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -q $(MPIRUN_CRASHED) -o tmp_path_retention_policy=failed -n $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
# Programs are compiled side by side. Those that take longest come first, so that no core waits for one of them at the end.
SIDE_BY_SIDE = --no-print-directory -j $(shell nproc)
TESTED = train_unet_asan dev/pairs_$(BUILD) $(if $(GPU),dev/bench_cuda) train_unet $(if $(shell command -v mpicxx),train_unet_mpi) train_unet_cpu
ON_THE_GPU = $(foreach name,training diffusion editing posthoc gpu world,dev/test/test_$(name).py)
test: python
	$(MAKE) $(SIDE_BY_SIDE) $(TESTED)
	$(PYTEST) -m "not long" dev/test
	$(if $(GPU),TRAIN_UNET_BUILD=cuda $(PYTEST) -m "not long" $(ON_THE_GPU))

# Where there is no GPU, its kernels are run by software, and its launches are checked against described GPUs of all architectures.
test_all: python
	$(MAKE) $(SIDE_BY_SIDE) $(if $(HAS_NVCC),$(if $(GPU),,workshop_emulated) $(ALL_LAUNCHES)) $(TESTED) dev/bench_cpu
	$(if $(HAS_NVCC),$(if $(GPU),,BUILD=emulated $(PYTEST) dev/test/test_pairs.py))
	$(if $(HAS_NVCC),TRAIN_UNET_LAUNCHES=$(abspath $(ALL_LAUNCHES))) TRAIN_UNET_FAULT_SECONDS=60 $(PYTEST) dev/test
	$(if $(GPU),TRAIN_UNET_BUILD=cuda $(PYTEST) $(ON_THE_GPU))

test_emulated: workshop_emulated python
	EMULATE_ALL=1 BUILD=emulated $(PYTEST) dev/test/test_pairs.py dev/test/test_order.py

# Every call of a short run fails once (a part of make test_all, in some), and processes are killed for ten minutes.
test_faults: train_unet_cpu python
	$(if $(HAS_NVCC),$(if $(GPU),,$(MAKE) dev/bench_emulated))
	TRAIN_UNET_FAILURES=all TRAIN_UNET_FAULT_SECONDS=600 $(PYTEST) dev/test/test_failures.py dev/test/test_faults.py

test_launches: $(LAUNCHES) python
	TRAIN_UNET_LAUNCHES=$(abspath $(LAUNCHES)) $(PYTEST) dev/test/test_launches.py

# One instruction changed at a time: which tests notice? docs/TESTING.md
mutants: python
	$(MAKE) -C dev BUILD=emulated
	$(PYTHON) dev/test/mutants.py --count 400

# What was found lies in .fuzz/: FUZZ_TARGET=model .fuzz/fuzz .fuzz/model-crash-... repeats it.
FUZZ_SECONDS = 600
fuzz:
	@command -v clang++ >/dev/null || { echo "make fuzz: clang++ is missing; on Debian: apt-get install clang"; exit 1; }
	@mkdir -p .fuzz/model .fuzz/data .fuzz/log .fuzz/flags
	clang++ -std=c++20 -O2 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Wno-unknown-pragmas -Wno-unused-function dev/test/fuzz.cpp -o .fuzz/fuzz
	@for target in model data log flags; do \
		echo "fuzz: $$target, $$(($(FUZZ_SECONDS) / 4)) s"; \
		ASAN_OPTIONS=detect_leaks=0 FUZZ_TARGET=$$target .fuzz/fuzz -max_total_time=$$(($(FUZZ_SECONDS) / 4)) -close_fd_mask=3 -rss_limit_mb=4096 \
			-max_len=2000 -timeout=300 -report_slow_units=300 -verbosity=0 -print_final_stats=1 -artifact_prefix=.fuzz/$$target- .fuzz/$$target 2>.fuzz/$$target.txt \
			|| { grep -a "ERROR\|runtime error\|Test unit\|^    #" .fuzz/$$target.txt | head -n 20; failed=1; }; \
		grep -a "number_of_executed" .fuzz/$$target.txt; \
	done; exit $${failed:-0}

lint: python
	clang-format --dry-run --Werror train_unet.cu $(HEADERS) dev/*.h dev/*/*.cu dev/*/*.h dev/*/*.cpp
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

bench_cpu: train_unet_cpu data
	$(PYTHON) dev/benchmarks/bench_cpu.py

# dev/Makefile knows what these are made of.
dev/pairs_cpu dev/pairs_cuda dev/bench_cpu dev/bench_cuda dev/bench_emulated:
	@$(MAKE) --no-print-directory -C dev $(notdir $@)

workshop_emulated:
	@$(MAKE) --no-print-directory -C dev bench_emulated pairs_emulated bench_plain_emulated

bench_data: $(if $(GPU),train_unet_cuda dev/bench_cuda)
	$(PYTHON) dev/benchmarks/bench_data.py $(FLAGS)

bench: $(if $(GPU),dev/bench_cuda)
	$(PYTHON) dev/benchmarks/bench.py --chart assets/bench.png --output assets/bench.json $(FLAGS)

bench_gpus: dev/bench_cuda
	$(PYTHON) dev/benchmarks/bench_gpus.py

# The other recipe is what ./train_unet did before its defaults were chosen by pictures.
speedrun: train_unet python
	@mkdir -p out_speedrun
	for name in fashion32 emoji64; do $(PYTHON) dev/benchmarks/speedrun.py --data_file data/$$name.bin --recipes "" "--preset $(if $(filter cuda,$(BUILD)),unet64,fashion32)" \
		--seeds 0,1,2 --output out_speedrun/$$name.json --plot out_speedrun/$$name.png $(FLAGS) || exit; done

profile: dev/bench_$(BUILD)
	dev/bench_$(BUILD) --profile 20 $(FLAGS)

clean:
	rm -rf .fuzz
	rm -f train_unet train_unet_cpu train_unet_mpi train_unet_cuda train_unet_plain train_unet_asan train_unet_one.cu train_unet_launches_*
	$(MAKE) -C dev clean

.PHONY: train_unet one data python test test_all test_emulated test_faults test_launches mutants fuzz lint bench bench_cpu bench_data bench_gpus speedrun profile clean workshop_emulated dev/pairs_cpu dev/pairs_cuda dev/bench_cpu dev/bench_cuda dev/bench_emulated
