// prepare.h - --data_dir: a data file of the pictures in a folder.
// Nothing in here knows what the program computes. Two rules hold everywhere:
// - What can go wrong is a mistake of the user or of the machine. The program says it in one sentence and ends (die).
//     Functions whose names begin with try_ return the sentence instead.
// - A file appears whole or not at all (AtomicFile), and nothing is overwritten before its successor is on the disk.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>
#ifdef __APPLE__ // macOS knows none of these. They are advice to the system, or concern processes for several GPUs.
enum { POSIX_FADV_RANDOM, POSIX_FADV_WILLNEED, PR_SET_PDEATHSIG };
static void posix_fadvise(int, off_t, off_t, int) {}
static void prctl(int, int) {}
#define st_mtim st_mtimespec
#define st_ctim st_ctimespec
#else
#include <sys/prctl.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------
// --- Errors

// What printf would print, as a string.
__attribute__((format(printf, 1, 2))) static std::string text(const char* format, ...) {
    va_list args;
    va_start(args, format);
    char buffer[8192];
    vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    return buffer;
}

// What a terminal would obey becomes an escape such as \x1b: the name of a file may hold anything.
static std::string printable(const std::string& sentence) {
    std::string shown;
    for (const unsigned char c : sentence) {
        shown += c < 32 || c == 127 ? text("\\x%02x", c) : std::string(1, (char)c);
    }
    return shown;
}

// A word of a command that a user may paste into a shell.
static std::string shell_word(const std::string& word) {
    const char* const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./,:+=@";
    if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
    std::string quoted = "'";
    for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
    return quoted + "'";
}

// When the program ends by an error, each of these is told; null: nobody asks.
typedef void (*Listener)(const std::string& why);
static std::atomic<Listener> end_all_ranks = nullptr; // of ranks.h, in a run of several processes; it does not return
static std::atomic<Listener> tell_page = nullptr;     // of page.h, while a run goes on: its page says why it ended

static void remove_unfinished(); // files that are half written, see AtomicFile

// Ends the program for a mistake of the user or of the machine, in one sentence, with exit code 1.
[[noreturn]] static void refuse(const std::string& why) {
    fflush(stdout);
    if (const Listener end = end_all_ranks) end(why);
    fprintf(stderr, "train_unet: %s\n", printable(why).c_str());
    remove_unfinished();
    if (const Listener tell = tell_page) tell(why);
    exit(1);
}

// The same, with a sentence as printf formats it.
#define die(...) refuse(text(__VA_ARGS__))

// Ends the program with "what: why" unless ok.
static void must(bool ok, const std::string& what, const std::string& why) {
    if (!ok) refuse(what + ": " + why);
}

// Called by new when there is no memory, in any thread. It ends the process by _exit: an exception can't leave an
// OpenMP loop, and exit() may not run in one of its threads.
[[maybe_unused]] static const std::new_handler handler_before = std::set_new_handler([] {
    fflush(stdout);
    fprintf(stderr, "train_unet: there is not enough memory; "
                    "fewer images at a time (--batch_size, --microbatch, --sample) need less\n");
    _exit(1);
});

// ---------------------------------------------------------------------------------------------------------------------
// --- Time, the terminal, and signals that end a run

// Seconds, from some moment in the past on.
static double now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::duration<double>(1); }

// Such as 0:01:30 or 2 days 13:00:05.
static std::string duration(double seconds) {
    const long s = (long)seconds;
    const long days = s / 86400;
    const std::string clock = text("%ld:%02ld:%02ld", s / 3600 % 24, s / 60 % 60, s % 60);
    return days ? text("%ld days ", days) + clock : clock;
}

// The width of the terminal that stdout is, at this moment; 0: stdout is no terminal.
static int terminal_columns() {
    if (!isatty(1)) return 0;
    struct winsize size {};
    const bool known = ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_col;
    return known ? size.ws_col : 80;
}

// Signals that ask a run to end: Ctrl-C, kill, a terminal that is closed, a reader that went away (./train_unet |
// head).
static const std::map<int, const char*> STOP_SIGNALS = {
    {SIGINT, "SIGINT"}, {SIGTERM, "SIGTERM"}, {SIGHUP, "SIGHUP"}, {SIGPIPE, "SIGPIPE"}};
static volatile sig_atomic_t stop_signal = 0; // the one that came; 0: none. Who listens to them, sets it.

// After this call, a signal of STOP_SIGNALS is noted in stop_signal: what was trained or drawn is kept, and then the
// program ends.
static void listen_to_signals() {
    for (const auto& [number, name] : STOP_SIGNALS) {
        const auto before = signal(number, [](int s) { stop_signal = s; });
        const bool is_nohup = before == SIG_IGN && number == SIGHUP;
        if (is_nohup) signal(number, SIG_IGN); // the command nohup asks that programs go on when the terminal closes
    }
}

// Waits until stdout takes a line. A terminal that is held by Ctrl-S takes none, nor does a full pipe. printf would
// wait, too, but no signal would end that wait. Result: false if a signal came instead.
static bool stdout_takes_a_line() {
    struct pollfd out = {1, POLLOUT, 0};
    while (true) {
        const int ready = poll(&out, 1, 200); // milliseconds
        const bool waits = ready == 0 || (ready < 0 && errno == EINTR);
        if (!waits) return true;
        if (stop_signal) return false;
    }
}

static bool status_line_open = false; // the cursor stands in a status line, which the next status line replaces

// Prints a line about how things stand. On a terminal it replaces the line before it, and is cut to the terminal's
// width.
static void show_status(const std::string& line) {
    if (!stdout_takes_a_line()) return;
    const int columns = terminal_columns();
    if (columns) printf("\r\033[K%s", line.substr(0, (size_t)columns - 1).c_str());
    else printf("%s\n", line.c_str());
    fflush(stdout);
    status_line_open = columns && !line.empty();
}

// Moves the cursor out of a status line. What is printed next begins a new line.
static void end_line() {
    if (status_line_open && stdout_takes_a_line()) printf("\n");
    status_line_open = false;
}

// Prints a sentence, which may stay in stdout's buffer: at a run's start, a reader that goes away must not end it.
static void print_line(const std::string& sentence) { printf("%s\n", printable(sentence).c_str()); }

// Prints a sentence on a line of its own. If a signal comes while stdout takes no line, the sentence is left out.
static void tell(const std::string& sentence) {
    end_line();
    if (stdout_takes_a_line()) print_line(sentence);
    fflush(stdout);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- The process

// The first call of main: prepares the process for what the system may do to it.
static void start_process([[maybe_unused]] char** argv) {
#ifdef _OPENMP
    // A thread of libgomp that waits first looks 300,000 times whether it may go on, which makes a step 8 times as slow
    // beside one busy process. 3,000 looks take 0.04 to 0.15 ms. The library reads the number when it is loaded, so the
    // program starts itself again, once. It does not if the user has said how threads shall wait.
    std::error_code none;
    const std::string self = std::filesystem::read_symlink("/proc/self/exe", none);
    if (!none && !getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT") && !setenv("GOMP_SPINCOUNT", "3000", 1))
        execv(self.c_str(), argv); // if this fails, the threads wait as they always did
#endif
    // If stdin, stdout or stderr is closed, the next file that is opened would take its number, and messages would go
    // into that file.
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);
    // Under ulimit -f, writing beyond the limit sends this signal. Ignored, it makes write() fail as on a full disk.
    signal(SIGXFSZ, SIG_IGN);
}

constexpr int CANT_RUN = 127; // as a shell has it

// Runs another program, which is looked for in PATH, and waits for it. Result: its exit code, or CANT_RUN.
static int run_child(std::vector<std::string> words) {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    fflush(stdout);
    const pid_t child = fork();
    if (child < 0) die("%s: can't be started (%s)", argv[0], strerror(errno));
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGTERM); // when this program ends, the child ends, too
        execvp(argv[0], argv.data());
        _exit(CANT_RUN);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- CRC-32, the checksum of zlib and PNG (polynomial 0xEDB88320)

// The checksum of n bytes. crc: 0 or, to go on, the checksum of all bytes before them. Eight bytes are taken at a time
// ("slicing by 8"): table[256 k + i] is the checksum of the byte i with k bytes of zeros behind it.
static uint32_t crc32(uint32_t crc, const void* data, size_t n) {
    static const std::vector<uint32_t> table = [] {
        std::vector<uint32_t> t(8 * 256);
        for (uint32_t i = 0; i < t.size(); i++) {
            t[i] = i < 256 ? i : t[i - 256];
            for (int bit = 0; bit < 8; bit++) t[i] = t[i] & 1 ? 0xEDB88320u ^ t[i] >> 1 : t[i] >> 1;
        }
        return t;
    }();
    const uint8_t* p = (const uint8_t*)data;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t eight;
        memcpy(&eight, p, 8);
        eight ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table[(7 - k) * 256 + (eight >> 8 * k & 255)];
    }
    for (; n > 0; n--, p++) crc = table[(crc ^ *p) & 255] ^ crc >> 8;
    return ~crc;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Folders

// True also if nobody can tell, as of a disk that fails: then it is not safe to write there as if it were free.
static bool exists(const std::string& path) {
    return access(path.c_str(), F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

// A folder, held by its descriptor: it stays the same folder when it is moved, or when another one takes its name.
struct Folder {
    std::string path;    // as it was named
    int descriptor = -1; // -1: it is not there, or can't be opened
    int error = 0;       // errno, which says why not

    std::string name(const std::string& file) const; // of a file in it, for messages
    bool has(const std::string& file) const;         // true also if an error other than "no such file" hides it
    // The files PREFIX0001000SUFFIX, such as a run's checkpoints, by the step in their name. If they can't be listed,
    // *trouble becomes errno; without trouble the program ends.
    std::map<int64_t, std::string> list(const std::string& prefix = "model_", const char* suffix = ".bin",
                                        int* trouble = nullptr) const;
    void remove(const std::string& file) const;
    // Removes what killed processes left: temporary files whose names begin so and that no living process has locked.
    void remove_leftovers(const std::vector<std::string>& starts) const;
};

static Folder open_folder(const std::string& path) {
    Folder folder{path};
    folder.descriptor = open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder.descriptor < 0) folder.error = errno;
    return folder;
}

// Opens the folder of --output_dir. If it is not there, makes it, and those that it lies in.
static Folder make_folder(const std::string& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    const Folder folder = open_folder(path);
    const std::string why = error ? error.message() : strerror(folder.error);
    if (folder.descriptor < 0)
        die("--output_dir %s: can't be written to (%s); choose another", path.c_str(), why.c_str());
    return folder;
}

inline std::string Folder::name(const std::string& file) const {
    return path.empty() || path.ends_with("/") ? path + file : path + "/" + file;
}

inline bool Folder::has(const std::string& file) const {
    struct stat st;
    return descriptor >= 0 && (!fstatat(descriptor, file.c_str(), &st, 0) || errno != ENOENT);
}

// The names of all that is in a folder, as far as they can be read. If that is not all, *error becomes errno.
static std::vector<std::string> names_in(const Folder& folder, int* error) {
    std::vector<std::string> names;
    // A descriptor of its own: the folder's own one remembers how far it was read the last time.
    const int descriptor = openat(folder.descriptor, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR* const list = descriptor < 0 ? nullptr : fdopendir(descriptor);
    *error = list ? 0 : errno;
    if (!list) return names;
    while (true) {
        errno = 0;
        const struct dirent* const entry = readdir(list);
        if (!entry) break;
        names.push_back(entry->d_name);
    }
    *error = errno;
    closedir(list);
    return names;
}

// The step in a name PREFIX0001000SUFFIX; -1: it is no such name.
static int64_t step_in_name(const std::string& file, const std::string& prefix, const char* suffix) {
    long step = -1;
    if (file.starts_with(prefix)) sscanf(&file[prefix.size()], "%18ld", &step);
    const bool is_such = step >= 0 && file == prefix + text("%07ld%s", step, suffix);
    return is_such ? step : -1;
}

inline std::map<int64_t, std::string> Folder::list(const std::string& prefix, const char* suffix, int* trouble) const {
    std::map<int64_t, std::string> found;
    std::vector<std::string> names;
    int why = error;
    if (descriptor >= 0) names = names_in(*this, &why);
    for (const std::string& file : names) {
        const int64_t step = step_in_name(file, prefix, suffix);
        if (step >= 0) found[step] = file;
    }
    // A folder that can't be read is not an empty one: a run would begin again and write over what is there.
    if (trouble) *trouble = why;
    if (!trouble && why && why != ENOENT && why != ENOTDIR)
        die("%s: its files can't be listed (%s)", path.c_str(), strerror(why));
    return found;
}

inline void Folder::remove(const std::string& file) const { unlinkat(descriptor, file.c_str(), 0); }

// Their names end in .tmp and the number of a process (see AtomicFile). Its lock is gone when the process is.
inline void Folder::remove_leftovers(const std::vector<std::string>& starts) const {
    int none = 0;
    for (const std::string& file : names_in(*this, &none)) {
        const size_t digits = file.find_last_not_of("0123456789") + 1; // where the number behind .tmp begins
        if (digits == file.size() || !file.substr(0, digits).ends_with(".tmp")) continue;
        if (std::ranges::none_of(starts, [&](auto& start) { return file.starts_with(start); })) continue;
        const int fd = openat(descriptor, file.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB)) remove(file);
        if (fd >= 0) close(fd);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Files that are written

// A full disk is waited for, so that somebody who reads the line can make room. This loop is the only place for it.
constexpr double PATIENCE = 600;    // seconds
constexpr unsigned RETRY_AFTER = 5; // seconds

// Repeats a system call while the disk has no room for it: for PATIENCE seconds at most, or until a signal comes. file:
// what it writes, for the line that it prints. Result: the last call's, whose error is in errno.
template <class Call> static auto while_full(const std::string& file, Call call) {
    const double began = now();
    bool told = false;
    while (true) {
        const auto result = call();
        if (result < 0 && errno == EINTR) continue;
        const bool is_full = result < 0 && (errno == ENOSPC || errno == EDQUOT);
        if (!is_full || stop_signal || now() - began > PATIENCE) return result;
        const std::string why = file + ": " + strerror(errno);
        if (!told) tell(why + text("; it is tried again for %.0f minutes", PATIENCE / 60));
        told = true;
        sleep(RETRY_AFTER); // a signal ends it early
    }
}

// Writes n bytes, of which the system may take fewer at a time. Result: false if it fails; errno says why.
static bool write_all(int descriptor, const std::string& file, const void* data, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t count = while_full(file, [&] { return write(descriptor, (const char*)data + done, n - done); });
        if (count <= 0) return false;
        done += (size_t)count;
    }
    return true;
}

// A file that appears whole or not at all. It is written under a temporary name beside its place and locked meanwhile;
// commit() waits until it is on the disk and gives it its name. If something fails, error and failure say what, nothing
// is left of the file, and what was there before is untouched. Calls after a failure do nothing.
struct AtomicFile {
    const Folder& folder;
    const std::string name;
    std::string temporary;
    int file = -1;       // descriptor
    int error = 0;       // errno of what failed
    std::string failure; // a sentence about that

    AtomicFile(const Folder& folder, const std::string& name);
    void write(const void* data, size_t n); // behind what was written last
    void write_at(off_t offset, const void* data, size_t n);
    void commit();                                   // the file is complete: it takes its place
    void discard();                                  // the file is given up
    void fail(const char* what, const char* advice); // notes errno as a sentence, and gives the file up
};

static std::set<const AtomicFile*> unfinished; // neither committed nor discarded yet
static std::mutex finishing;                   // guards it

// Called when the program ends by an error. Another thread may still write to such a file, which then has no name.
static void remove_unfinished() {
    const std::lock_guard lock(finishing);
    for (const AtomicFile* file : unfinished) file->folder.remove(file->temporary);
}

inline AtomicFile::AtomicFile(const Folder& folder, const std::string& name) : folder(folder), name(name) {
    folder.remove_leftovers({name + ".tmp"});
    temporary = name + ".tmp" + std::to_string(getpid());
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
    file = while_full(folder.name(name), [&] { return openat(folder.descriptor, temporary.c_str(), flags, 0666); });
    if (file < 0) {
        fail("can't be written", "choose a folder that exists and is yours");
        return;
    }
    flock(file, LOCK_EX | LOCK_NB); // so that nobody takes it for a leftover
    const std::lock_guard lock(finishing);
    unfinished.insert(this);
}

inline void AtomicFile::write(const void* data, size_t n) {
    if (!error && !write_all(file, folder.name(name), data, n))
        fail("writing failed", "what was there before is untouched");
}

inline void AtomicFile::write_at(off_t offset, const void* data, size_t n) {
    if (!error && lseek(file, offset, SEEK_SET) < 0) fail("writing failed", "what was there before is untouched");
    write(data, n);
}

// The bytes are on the disk before the name is changed. So even after a power cut, the name stands for the old file or
// for the whole new one.
inline void AtomicFile::commit() {
    if (error) return;
    const int where = folder.descriptor;
    auto take_name = [&] { return renameat(where, temporary.c_str(), where, name.c_str()); };
    if (fsync(file) || while_full(folder.name(name), take_name))
        return fail("writing failed", "what was there before is untouched");
    close(file);
    fsync(where); // the new name, too, must survive a power cut
    const std::lock_guard lock(finishing);
    unfinished.erase(this);
}

inline void AtomicFile::discard() {
    if (file >= 0) close(file);
    if (file >= 0) folder.remove(temporary);
    file = -1;
    const std::lock_guard lock(finishing);
    unfinished.erase(this);
}

inline void AtomicFile::fail(const char* what, const char* advice) {
    error = errno;
    failure = text("%s (%s); %s", what, strerror(error), advice);
    discard();
}

// Writes a whole file. Result: why that failed, or "".
static std::string try_write_file(const Folder& folder, const std::string& name, const std::string& content) {
    AtomicFile file(folder, name);
    file.write(content.data(), content.size());
    file.commit();
    return file.failure;
}

// Result: why that failed, or "".
static std::string try_copy_file(const Folder& folder, const std::string& file, const std::string& name) {
    const int from = openat(folder.descriptor, file.c_str(), O_RDONLY | O_CLOEXEC);
    if (from < 0) return text("%s can't be opened (%s)", file.c_str(), strerror(errno));
    AtomicFile copy(folder, name);
    std::vector<char> part(1 << 20);
    ssize_t n = 0;
    while (!copy.error && (n = read(from, part.data(), part.size())) > 0) copy.write(part.data(), (size_t)n);
    if (n < 0) copy.fail("copying failed", "what was there before is untouched");
    copy.commit();
    close(from);
    return copy.failure;
}

// Gives a file a second name in its folder, in place of the file that has that name; without hard links, a copy.
// Result: why that failed, or "".
static std::string try_link_file(const Folder& folder, const std::string& file, const std::string& name) {
    const std::string temporary = name + ".tmp" + std::to_string(getpid());
    const int where = folder.descriptor;
    folder.remove(temporary); // a killed process of this number may have left it
    if (linkat(where, file.c_str(), where, temporary.c_str(), 0)) return try_copy_file(folder, file, name);
    const int error = renameat(where, temporary.c_str(), where, name.c_str()) ? errno : 0;
    folder.remove(temporary); // rename does nothing if both names are the same file's already
    fsync(where);
    return error ? text("can't be written (%s); what was there before is untouched", strerror(error)) : "";
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Files that are read

// The first 1024 bytes of our data and model files: 256 little-endian int32. Other values lie in them as their bits.
struct Header {
    int32_t slot[256] = {};

    template <class T> T get(int i) const {
        T v;
        memcpy(&v, &slot[i], sizeof v);
        return v;
    }
    template <class T> void set(int i, const T& v) { memcpy(&slot[i], &v, sizeof v); }
};

// A data or model file. What is no file, or shorter than a header, is refused; hint tells the user what to do then.
struct InputFile {
    std::string path;
    int file = -1; // descriptor
    size_t size = 0;
    Header header;

    void open(const std::string& name, const char* hint);
    const char* try_read(void* to, size_t n, size_t offset) const; // result: null, or why not
    void read(void* to, size_t n, size_t offset) const;            // or the program ends
    uint32_t crc(uint32_t before, size_t offset) const;            // of all from there on, chained to that before
};

// O_NONBLOCK: opening a pipe must not wait for its other end; it is refused for being a pipe.
constexpr int OPEN_TO_READ = O_RDONLY | O_NONBLOCK | O_CLOEXEC;

inline void InputFile::open(const std::string& name, const char* hint) {
    path = name;
    file = ::open(name.c_str(), OPEN_TO_READ);
    if (file < 0) die("%s: can't be opened (%s); %s", name.c_str(), strerror(errno), hint);
    struct stat st;
    if (fstat(file, &st) || !S_ISREG(st.st_mode)) die("%s: is not a file; %s", name.c_str(), hint);
    size = (size_t)st.st_size;
    if (size < 1024) die("%s: is %zu bytes long, and a header alone is 1024; %s", name.c_str(), size, hint);
    read(header.slot, 1024, 0);
}

// The system may give fewer bytes at a time than it is asked for.
inline const char* InputFile::try_read(void* to, size_t n, size_t offset) const {
    for (size_t done = 0; done < n;) {
        const ssize_t got = pread(file, (char*)to + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got ? strerror(errno) : "the file ends before it";
        done += (size_t)got;
    }
    return nullptr;
}

inline void InputFile::read(void* to, size_t n, size_t offset) const {
    if (const char* why = try_read(to, n, offset))
        die("%s: can't be read (%s); it was cut short, or its disk fails", path.c_str(), why);
}

// A file may be larger than memory, so it is read in parts of a megabyte.
inline uint32_t InputFile::crc(uint32_t before, size_t offset) const {
    std::vector<uint8_t> part(1 << 20);
    for (; offset < size; offset += part.size()) {
        part.resize(std::min(part.size(), size - offset));
        read(part.data(), part.size(), offset);
        before = crc32(before, part.data(), part.size());
    }
    return before;
}

// Slots from .. to - 1 of a header must be 0, since they mean nothing. then: the end of the sentence.
static void check_unused(const Header& h, int from, int to, const std::string& path, const std::string& then) {
    for (int i = from; i < to; i++)
        if (const int v = h.slot[i])
            refuse(path + text(": its header is damaged (field %d holds %d, which means nothing)", i, v) + then);
}

// A whole text file of a folder; "" if it is not there.
static std::string read_text(const Folder& folder, const std::string& name) {
    InputFile f;
    f.path = folder.name(name);
    f.file = openat(folder.descriptor, name.c_str(), OPEN_TO_READ);
    if (f.file < 0 && errno == ENOENT) return "";
    struct stat st;
    if (f.file < 0 || fstat(f.file, &st)) die("%s: can't be opened (%s)", f.path.c_str(), strerror(errno));
    if (!S_ISREG(st.st_mode)) die("%s: is not a file; move it away", f.path.c_str());
    std::string content((size_t)st.st_size, 0);
    f.read(content.data(), content.size(), 0);
    close(f.file);
    return content;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- The lock of a run's folder

// One process at a time trains in a folder: it locks the file .lock there until it ends, however it ends. The file says
// whose lock it is. create: if the file is not there, it is made; false: then nothing is locked.
static void lock_folder(const Folder& folder, bool create) {
    static int fd = -1; // it stays open, and so locked, until the process ends
    const char* const name = folder.path.c_str();
    const int flags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | (create ? O_CREAT : 0);
    if (folder.error && folder.error != ENOENT)
        die("--output_dir %s: can't be written to (%s); choose another", name, strerror(folder.error));
    if (fd < 0) fd = openat(folder.descriptor, ".lock", flags, 0666);
    if (fd < 0 && errno == ELOOP) die("%s/.lock: is a link, and a run's is a file of its own; remove it", name);
    if (fd < 0 && create) die("--output_dir %s: can't be written to (%s); choose another", name, strerror(errno));
    if (fd < 0) return;
    const bool is_taken = flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK; // other errors: there are no locks here
    char holder[128] = "";
    const bool has_holder = pread(fd, holder, sizeof holder - 1, 0) > 0;
    const std::string who = has_holder ? std::string(holder, strcspn(holder, "\n")) : "another process";
    if (is_taken) die("%s: %s trains there; wait until it ends, or choose another --output_dir", name, who.c_str());
    // What is there is written over below, so it must be a lock.
    const bool is_lock = !has_holder || who.starts_with("process ");
    if (!is_lock) die("%s/.lock: is no run's lock, but something else; move it away", name);
    if (!create) return;
    char host[64] = "", since[32] = "";
    const time_t today = time(nullptr);
    gethostname(host, sizeof host - 1);
    strftime(since, sizeof since, "%Y-%m-%d %H:%M:%S", localtime(&today));
    const std::string own = text("process %d on %s, since %s,\n", getpid(), host, since);
    // On a full disk nobody will know whose lock it is, but it is one.
    if (ftruncate(fd, 0) || pwrite(fd, own.data(), own.size(), 0) < 0) return;
}
