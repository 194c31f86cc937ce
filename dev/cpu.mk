# What this machine's C++ compiler is told about it: for the Makefile and dev/Makefile.
# g++ itself prefers 256 bits on Intel's CPUs, where 512 are 1.3 times as fast
WIDTH := $(if $(shell grep -m 1 -w avx512f /proc/cpuinfo 2>/dev/null),-mprefer-vector-width=512)
# On a Mac g++ is Apple's clang, which knows OpenMP but has no library for it: Homebrew's is taken, on either kind of Mac, as in llm.c's Makefile.
MAC := $(filter Darwin,$(shell uname))
NATIVE := $(if $(and $(MAC),$(filter arm64,$(shell uname -m))),-mcpu=native,-march=native)
LIBOMP = $(firstword $(wildcard /opt/homebrew/opt/libomp /usr/local/opt/libomp))
NEEDS_LIBOMP = Apple's compiler comes without OpenMP's library: brew install libomp, or say where it lies (LIBOMP=/path/to/libomp)
MAC_OPENMP = $(if $(LIBOMP),-Xclang -fopenmp -I$(LIBOMP)/include -L$(LIBOMP)/lib -lomp,$(error $(NEEDS_LIBOMP)))
OPENMP = $(if $(MAC),$(MAC_OPENMP),-fopenmp)
# A Mac's int64_t is long long: as wide as the long that %ld asks for, but another type.
# A switch over an enumeration has no default, so that a new word without a case is an error.
WARNINGS = -Wall -Wextra -Werror=switch $(if $(MAC),-Wno-format)
