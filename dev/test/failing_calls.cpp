// A preloaded library that makes calls of a program fail, as they may on any machine: the disk is full, a descriptor or memory is not to be had, a disk is broken.
//
//   c++ -shared -fPIC failing_calls.cpp -o failing_calls.so
//   FAIL_CALL=write FAIL_AT=3 LD_PRELOAD=./failing_calls.so ./train_unet ...       the third write fails, and no other
//
// FAIL_CALL   a name of CALLS below, or malloc                      FAIL_AT     which one fails first, from 1 on; 0: none
// FAIL_FOR    how many fail from there on, by default one           FAIL_REPORT file that says what failed, and at the end how many calls there were
// FAIL_FAST   how fast the clock goes, and sleep() with it, from the first failure on: a program waits ten minutes for a full disk before it ends
//
// Calls of the system are caught where the program enters the kernel (seccomp's SIGSYS), so that those of the C library, as of fwrite, are caught, too.
// What goes to the standard streams never fails: it is how a program says what happened. malloc counts from LARGE bytes on: operator new is made of it.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <vector>

namespace {

constexpr size_t LARGE = 10000;

enum class First { PATH, FOLDER_AND_PATH, DESCRIPTOR, OTHER }; // what the first arguments of a call name

struct Call {
    const char* name;
    int error; // with which it fails; 0: it does only half of what it is asked to
    long number;
    First first;
};
const Call CALLS[] = {
#ifdef SYS_open // not on newer machines than x86
    {"open", EMFILE, SYS_open, First::PATH},
    {"rename", ENOSPC, SYS_rename, First::PATH},
    {"stat", EIO, SYS_stat, First::PATH},
    {"stat", EIO, SYS_access, First::PATH},
    {"unlink", EACCES, SYS_unlink, First::PATH},
    {"mkdir", ENOSPC, SYS_mkdir, First::PATH},
#endif
#ifdef SYS_renameat // nor everywhere
    {"rename", ENOSPC, SYS_renameat, First::FOLDER_AND_PATH},
#endif
    {"open", EMFILE, SYS_openat, First::FOLDER_AND_PATH},
    {"rename", ENOSPC, SYS_renameat2, First::FOLDER_AND_PATH},
    {"stat", EIO, SYS_newfstatat, First::FOLDER_AND_PATH},
    {"stat", EIO, SYS_statx, First::FOLDER_AND_PATH},
    {"stat", EIO, SYS_faccessat, First::FOLDER_AND_PATH},
    {"stat", EIO, SYS_fstat, First::DESCRIPTOR},
    {"unlink", EACCES, SYS_unlinkat, First::FOLDER_AND_PATH},
    {"mkdir", ENOSPC, SYS_mkdirat, First::FOLDER_AND_PATH},
    {"list", EIO, SYS_getdents64, First::DESCRIPTOR},
    {"read", EIO, SYS_read, First::DESCRIPTOR},
    {"read", EIO, SYS_pread64, First::DESCRIPTOR},
    {"write", ENOSPC, SYS_write, First::DESCRIPTOR},
    {"write", ENOSPC, SYS_writev, First::DESCRIPTOR},
    {"write", ENOSPC, SYS_pwrite64, First::DESCRIPTOR},
    {"short write", 0, SYS_write, First::DESCRIPTOR},
    {"seek", EIO, SYS_lseek, First::DESCRIPTOR},
    {"sync", EIO, SYS_fsync, First::DESCRIPTOR},
    {"sync", EIO, SYS_fdatasync, First::DESCRIPTOR},
    {"close", EIO, SYS_close, First::DESCRIPTOR},
    {"truncate", EIO, SYS_ftruncate, First::DESCRIPTOR},
    {"lock", ENOLCK, SYS_flock, First::DESCRIPTOR},
    {"mmap", ENOMEM, SYS_mmap, First::OTHER},
};

const char* wanted = "";
long first = 0, last = 0;
long fast = 1;
std::atomic<long> count = 0;
int report = -1;

// The kernel's own entrance, at an address that the filter lets pass.
__attribute__((noinline)) long enter(long number, const long* a) {
#ifdef __x86_64__
    long result;
    register long r10 asm("r10") = a[3];
    register long r8 asm("r8") = a[4];
    register long r9 asm("r9") = a[5];
    asm volatile("syscall\n.global failing_calls_entered\n.hidden failing_calls_entered\nfailing_calls_entered:"
                 : "=a"(result)
                 : "0"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                 : "rcx", "r11", "memory");
    return result;
#else
    register long x8 asm("x8") = number;
    register long x0 asm("x0") = a[0];
    register long x1 asm("x1") = a[1];
    register long x2 asm("x2") = a[2];
    register long x3 asm("x3") = a[3];
    register long x4 asm("x4") = a[4];
    register long x5 asm("x5") = a[5];
    asm volatile("svc #0\n.global failing_calls_entered\n.hidden failing_calls_entered\nfailing_calls_entered:"
                 : "+r"(x0)
                 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                 : "memory");
    return x0;
#endif
}
extern "C" const char failing_calls_entered[];

template <class... Arguments> long kernel(long number, Arguments... arguments) {
    const long a[6] = {(long)arguments...};
    return enter(number, a);
}

// A line of the report; no memory is asked for.
void tell(const char* what, long number, const char* more) {
    char line[600];
    const int n = snprintf(line, sizeof line, "%s %ld %s\n", what, number, more);
    if (report >= 0) kernel(SYS_write, report, line, n < (int)sizeof line ? n : (int)sizeof line - 1);
}

// Counts a call. Whether this one fails.
bool fails() {
    const long n = ++count;
    return first && n >= first && n <= last;
}

void tell_call(const Call& call, const long* a) {
    char link[64], path[500] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%ld", a[0]);
    if (call.first == First::DESCRIPTOR) kernel(SYS_readlinkat, -100, link, path, sizeof path - 1);
    else if (call.first != First::OTHER) snprintf(path, sizeof path, "%s", (const char*)a[call.first != First::PATH]);
    tell("failed", count, path);
}

// What the kernel would have returned.
long answer(long number, long* a) {
    for (const Call& call : CALLS) {
        if (call.number != number || strcmp(call.name, wanted)) continue;
        if (call.first == First::DESCRIPTOR && (a[0] <= 2 || a[0] == report)) break;
        if (!fails()) break;
        tell_call(call, a);
        if (call.error) return -call.error;
        a[2] = (a[2] + 1) / 2;
    }
    return enter(number, a);
}

void take_call(int, siginfo_t* info, void* context) {
    const int before = errno;
    mcontext_t& m = ((ucontext_t*)context)->uc_mcontext;
#ifdef __x86_64__
    greg_t* const r = m.gregs;
    long a[6] = {(long)r[REG_RDI], (long)r[REG_RSI], (long)r[REG_RDX],
                 (long)r[REG_R10], (long)r[REG_R8],  (long)r[REG_R9]};
    r[REG_RAX] = answer(info->si_syscall, a);
#else
    long a[6];
    for (int k = 0; k < 6; k++) a[k] = (long)m.regs[k];
    m.regs[0] = (unsigned long)answer(info->si_syscall, a);
#endif
    errno = before;
}

// From here on the kernel asks take_call before it does what the wanted calls say.
void catch_calls() {
    struct sigaction action = {};
    action.sa_sigaction = take_call;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSYS, &action, nullptr);
    const uint64_t ours = (uint64_t)failing_calls_entered;
    const unsigned pointer = offsetof(seccomp_data, instruction_pointer);
    std::vector<sock_filter> filter = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, pointer),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)ours, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, pointer + 4),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(ours >> 32), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
    };
    for (const Call& call : CALLS) {
        if (strcmp(call.name, wanted)) continue;
        filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call.number, 0, 1));
        filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    }
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    const sock_fprog program = {(unsigned short)filter.size(), filter.data()};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        fprintf(stderr, "failing_calls: this system does not let a process catch its calls\n");
        _exit(77);
    }
}

bool mallocs = false;

__attribute__((constructor)) void start() {
    const char *const name = getenv("FAIL_CALL"), *const at = getenv("FAIL_AT"), *const many = getenv("FAIL_FOR");
    const char* const path = getenv("FAIL_REPORT");
    if (!name) return;
    wanted = name;
    if (const char* times = getenv("FAIL_FAST")) fast = atol(times);
    first = at ? atol(at) : 0;
    last = first + (many ? atol(many) : 1) - 1;
    const long flags = 01 | 0100 | 02000 | 02000000; // O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC
    if (path) report = (int)kernel(SYS_openat, -100, path, flags, 0600);
    mallocs = !strcmp(name, "malloc");
    if (!mallocs) catch_calls();
}
__attribute__((destructor)) void end() { tell("calls", count, wanted); }

// The monotonic clock's nanoseconds for the program, and when it began to be fast.
long long fast_nanoseconds(long long real) {
    static std::atomic<long long> began = 0;
    if (fast == 1 || !first || count < first) return real;
    long long none = 0;
    began.compare_exchange_strong(none, real);
    return began + (real - began) * fast;
}

// Whether memory of so many bytes is to be had.
bool has_memory(size_t bytes) {
    if (!mallocs || bytes < LARGE || !fails()) return true;
    tell("failed", (long)bytes, "bytes");
    errno = ENOMEM;
    return false;
}

} // namespace

extern "C" {
int clock_gettime(clockid_t which, struct timespec* t) noexcept {
    const int result = (int)kernel(SYS_clock_gettime, which, t);
    if (result || which != CLOCK_MONOTONIC) return result;
    const long long ns = fast_nanoseconds(t->tv_sec * 1000000000LL + t->tv_nsec);
    *t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    return 0;
}
unsigned sleep(unsigned seconds) {
    const long long ns = seconds * 1000000000LL / (count < first || !first ? 1 : fast);
    const struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    return kernel(SYS_nanosleep, &t, nullptr) ? 1 : 0;
}

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) { return has_memory(bytes) ? __libc_malloc(bytes) : nullptr; }
void* calloc(size_t n, size_t bytes) { return has_memory(n * bytes) ? __libc_calloc(n, bytes) : nullptr; }
void* realloc(void* p, size_t bytes) { return has_memory(bytes) ? __libc_realloc(p, bytes) : nullptr; }
void* aligned_alloc(size_t align, size_t bytes) { return has_memory(bytes) ? __libc_memalign(align, bytes) : nullptr; }
int posix_memalign(void** p, size_t align, size_t bytes) {
    if (!has_memory(bytes)) return ENOMEM;
    *p = __libc_memalign(align, bytes);
    return *p ? 0 : ENOMEM;
}
}
