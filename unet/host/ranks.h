// ranks.h - the processes of one run find each other, talk to each other, and watch each other. Needs files.h.
//
// What a rank is. A run on several GPUs consists of several processes, one for each GPU. They are called its ranks and
// are numbered from 0 on. All of them take the same steps at the same time. Gradients and weights go from GPU to GPU,
// which is not done here (see "Between ranks" in train_unet.cu). Here are the hosts: the programs on the processors.
//
// How they meet. A launcher (torchrun, mpirun, srun, or this program itself by --num_gpus) starts the processes and
// tells each its number by environment variables (find_ranks). Rank 0 then listens at a port. Every other rank connects
// to it and says who it is (join_ranks). This connection is called its line; it stays open until the run ends.
//
//        rank 1 ---- line ----+
//        rank 2 ---- line ----+---- rank 0, which has a line to each of the others
//        rank 3 ---- line ----+
//
// What they say. Over the lines they send notes (NoteKind): that they are alive, small values that all need, errors.
//
// What the watch does. The main thread of a rank may wait in MPI, in NCCL or for a kernel. Most of these would wait for
// ever if another rank were gone. So every process has a second thread, the watch (keep_watch). It reads all notes as
// they come and sends a sign of life every second, whatever the main thread does. When the watch finds that the run is
// lost, it says why, in one sentence, and ends its process.
//
// A run is lost in one of three ways:
// 1. A process has ended: the system closes its line, and the watch at the other end sees that.
// 2. A process stands still, or its machine is gone: no sign of life comes for --rank_timeout seconds.
// 3. A process does something else than the others, and waits for what they never do. Whatever all ranks must do
//    together therefore has a name, a place ("the choice of a checkpoint"), and each rank notes that it has come there
//    (come_to). All ranks must come to the same places in the same order. The watch of rank 0 compares them.
#pragma once

#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cmath>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>

#include "files.h"
#ifndef MSG_NOSIGNAL // macOS
#define MSG_NOSIGNAL 0
#endif

// Which rank this process is, of how many. A program that runs alone is rank 0 of 1.
struct World {
    int rank = 0, size = 1;
    int local_rank = 0;  // its number among the processes of this machine
    bool direct = false; // GPUs write into each other's memory; the program sets it
};
static World world;

// The program that includes this file defines these three, because they depend on its devices.
static const char* ranks_need();     // what to build or install for more than one rank; null: nothing
static std::string device_trouble(); // what went wrong between devices; empty: nothing
static void leave_devices();         // called at the end of the program, when nothing more is sent between devices

// ---------------------------------------------------------------------------------------------------------------------
// --- Notes, and the lines over which they go

// A note is its kind (4 bytes), the length of its content (4 bytes), and the content.
enum NoteKind : uint32_t {
    NO_NOTE, // never sent: receive() returns it when the line has ended
    ALIVE,   // a sign of life, every second; its content: the places that the sender has come to since the last one
    HELLO,   // the first note of a line: which rank it is
    WELCOME, // rank 0's answer to HELLO
    PART,    // a value for broadcast_host or gather_host; its content: the place, \n, the value
    ERROR,   // to rank 0: say this sentence, and end the run
    LEAVE,   // from rank 0: the run ends, and why was said already
    DONE,    // at LAST_PLACE, a PART that says: I have nothing more to do. From rank 0: nobody has; all may end
};

constexpr const char* LAST_PLACE = "its end"; // the last place of every rank
constexpr int JOIN_SECONDS = 60;              // within which all ranks must have come

// A connection to another rank, and what came over it.
struct Line {
    int socket = -1;               // -1: closed
    double heard = now();          // when the last note came
    std::deque<std::string> parts; // contents of PART notes that wait for fetch()
    std::string places;            // where that rank has come to; see Ranks::places
};

// Where a rank runs.
struct Host {
    char name[60]; // of its machine
    int process;   // its process number; 0: not known yet
};

// What the main thread and the watch share.
struct Ranks {
    std::map<int, Line> lines; // by rank. Rank 0 has a line to each other rank, every other rank only one to rank 0
    std::vector<Host> hosts;   // by rank

    std::mutex send_lock; // held while notes are sent, so that those of two threads do not mix

    std::mutex parts_lock;             // held by a thread that uses any line's parts
    std::condition_variable part_came; // wakes fetch()

    // The places that this rank has come to, each with \n behind it: at rank 0 those that are not compared yet, else
    // those that rank 0 was not told yet.
    std::string places;
    std::mutex places_lock; // held by a thread that uses places

    std::atomic<int> patience = 20; // --rank_timeout: a rank that is silent for so many seconds is lost
    std::atomic<bool> said = false; // a thread has begun to say why the run ends
    std::atomic<bool> over = false; // all ranks are done, so a line that ends is no loss
};
static Ranks& ranks = *new Ranks; // never destroyed: the watch uses it until the process ends

// Such as "rank 1 (process 4711 on gpu07)".
static std::string rank_name(int rank) {
    const Host& host = ranks.hosts[rank];
    const std::string process = host.process ? text(" (process %d on %s)", host.process, host.name) : "";
    return text("rank %d", rank) + process;
}

// Errors are not reported here: when a line breaks, the watch that reads from it notices.
static void send_note(int socket, NoteKind kind, const std::string& content) {
    const uint32_t head[2] = {kind, (uint32_t)content.size()};
    const std::string note = std::string((const char*)head, sizeof head) + content;
    for (size_t sent = 0; sent < note.size();) {
        const ssize_t n = send(socket, note.data() + sent, note.size() - sent, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR) break;
        if (n > 0) sent += (size_t)n;
    }
}

// Sends a note to all whom this rank has a line to: rank 0 to all others, another rank to rank 0.
static void post(NoteKind kind, const std::string& content = "") {
    const std::lock_guard<std::mutex> lock(ranks.send_lock);
    for (const auto& [rank, line] : ranks.lines) send_note(line.socket, kind, content);
}

// Waits for the next note. NO_NOTE: the line has ended, or who is at its other end is none of ours.
static NoteKind receive(int socket, std::string* content) {
    constexpr size_t LARGEST = 1 << 28;
    uint32_t head[2];
    if (recv(socket, head, sizeof head, MSG_WAITALL) != sizeof head) return NO_NOTE;
    const size_t size = head[1];
    if (size > LARGEST) return NO_NOTE;
    content->resize(size);
    if (size && recv(socket, content->data(), size, MSG_WAITALL) != (ssize_t)size) return NO_NOTE;
    return (NoteKind)head[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// --- How a run ends early: one sentence, said by one rank, then all processes end

// Says why, tells the others to leave, too, and ends this process by _exit, since another thread may hold any lock.
[[noreturn]] static void say_and_leave(const std::string& why) {
    while (ranks.said.exchange(true)) pause(); // another thread says something already, and will end the process
    fprintf(stderr, "train_unet: %s\n", printable(why).c_str());
    post(LEAVE);
    remove_unfinished();
    if (const Listener tell = tell_page) tell(why);
    _exit(1);
}

// Ends all ranks, for an error of this one. Rank 0 says the sentence, so that it appears once.
[[noreturn]] static void end_ranks(const std::string& why) {
    if (!world.rank) say_and_leave(why);
    if (!ranks.lines.empty()) {
        post(ERROR, why);
        sleep(10); // within this time rank 0 says it and tells this process to leave
    }
    say_and_leave(rank_name(world.rank) + ": " + why); // rank 0 did not
}

// Another rank is gone. Rank 0 says so. If rank 0 itself is gone, the lowest rank of each machine says so.
[[noreturn]] static void lose_rank(int lost, const std::string& how) {
    int speaker = world.rank ? 1 : 0;
    while (speaker < world.rank && strcmp(ranks.hosts[speaker].name, ranks.hosts[world.rank].name)) speaker++;
    if (speaker != world.rank) {
        sleep(3); // a launcher that sees one process end may end the speaker before it has spoken
        _exit(1);
    }
    say_and_leave(
        rank_name(lost) + how +
        ", so the run ends; the same command with --resume_checkpoint auto goes on from its latest checkpoint");
}

// A rank has come to another place than rank 0. Either rank 0 finds this, or the rank itself.
[[noreturn]] static void lose_the_way(int rank, const std::string& place, const std::string& place_of_0) {
    const std::string why =
        text("has come to %s, and rank 0 to %s; all ranks must do the same, with the same flags and "
             "files",
             place.c_str(), place_of_0.c_str());
    if (world.rank) end_ranks(why);
    say_and_leave(rank_name(rank) + ": " + why);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- The watch: a thread that looks at the lines twice a second, or whenever a note comes

// What the watch remembers from one look to the next. Moments are in seconds, as now() has them.
struct Watch {
    double woke = now();          // when this look began
    double continued = -INFINITY; // when the process went on after it had been stopped as a whole (Ctrl-Z, then fg)
    double told = 0;              // when it last sent a sign of life
    double healthy = now();       // when there was last no trouble between devices
    double moved = now();         // rank 0: when the slowest rank last came to a place, or no rank waited
    bool noted = false;           // rank 0: it has said for whom the others wait
    std::string place;            // rank 0: the latest place that all have come to
};

// Reads one note of another rank. Result: false, if the line has ended.
static bool take_note(int rank, Line* line) {
    std::string content;
    const NoteKind kind = receive(line->socket, &content);
    if (kind == NO_NOTE) return false;
    line->heard = now();
    if (kind == ALIVE) line->places += content;
    if (kind == LEAVE) _exit(1);
    if (kind == ERROR) {
        usleep(300000); // rank 0 often finds the same mistake itself, and then says it without naming another rank
        say_and_leave(rank_name(rank) + ": " + content);
    }
    if (kind == DONE && world.rank) ranks.over = true;
    if (kind == PART || kind == DONE) {
        const std::lock_guard<std::mutex> lock(ranks.parts_lock);
        line->parts.push_back(std::move(content));
        ranks.part_came.notify_one();
    }
    return true;
}

// Ways 1 and 2 of the three: reads what has come, and finds out who has ended and who is silent. sockets: what poll()
// says of each line, in the order of the lines.
static void read_lines(const Watch& watch, const std::vector<struct pollfd>& sockets) {
    // Until rank 0 has let all others in, it sends no signs of life, since its watch is not started yet.
    const bool all_came = ranks.hosts[0].process;
    const int patience = ranks.patience + (all_came ? 0 : JOIN_SECONDS);
    size_t k = 0;
    for (auto& [rank, line] : ranks.lines) {
        const bool came = sockets[k].revents != 0;
        k++;
        const bool ended = came && !take_note(rank, &line);
        // While this process was stopped, the others may have missed it and ended. Then their launcher ends this one,
        // too.
        if (ended && watch.woke - watch.continued < 3) sleep(3);
        if (ended && !ranks.over) lose_rank(rank, " has ended");
        if (ended) line.socket = -1;
        if (watch.woke == watch.continued) line.heard = watch.woke; // while it was stopped, it heard nobody
        const bool silent = watch.woke - line.heard > patience;
        if (silent && !ranks.over) lose_rank(rank, text(" has been silent for %d s", patience));
    }
}

// The name of the place in whose line of `places` the character number i stands.
static std::string place_at(const std::string& places, size_t i) {
    const size_t start = i ? places.rfind('\n', i - 1) + 1 : 0;
    return places.substr(start, places.find('\n', start) - start);
}

// Rank 0 says once for whom the others wait. Whoever is late sends signs of life and may only be slow, as with a full
// disk, so the run goes on.
static void note_who_is_late(Watch* watch) {
    if (watch->noted || watch->woke - watch->moved < ranks.patience) return;
    std::string late = ranks.places.empty() ? rank_name(0) : "";
    for (const auto& [rank, line] : ranks.lines) {
        if (!line.places.empty()) continue;       // it waits
        if (watch->woke - line.heard > 3) return; // it is not late but silent, and will soon be lost
        if (!late.empty()) late += ", ";
        late += rank_name(rank);
    }
    watch->noted = true;
    fprintf(stderr, "train_unet: the others have waited for %d s for %s since %s; it is alive, so they wait on\n",
            (int)ranks.patience, late.c_str(), watch->place.empty() ? "the start" : watch->place.c_str());
}

// Way 3 of the three, at rank 0: compares the places of all ranks, and forgets those that all have come to.
static void compare_places(Watch* watch) {
    const std::lock_guard<std::mutex> lock(ranks.places_lock);
    std::string& own = ranks.places;
    size_t common = own.size();   // so many characters have come from every rank
    size_t farthest = own.size(); // and so many from the one that is ahead of all
    for (const auto& [rank, line] : ranks.lines) {
        const size_t both = std::min(own.size(), line.places.size());
        const auto differ = std::mismatch(own.begin(), own.begin() + both, line.places.begin());
        const size_t i = differ.first - own.begin();
        if (i < both) lose_the_way(rank, place_at(line.places, i), place_at(own, i));
        common = std::min(common, line.places.size());
        farthest = std::max(farthest, line.places.size());
    }
    if (common) {
        watch->place = place_at(own, common - 1);
        own.erase(0, common);
        for (auto& [rank, line] : ranks.lines) line.places.erase(0, common);
    }
    const bool nobody_waits = common == farthest;
    const bool just_continued = watch->woke == watch->continued;
    if (common || nobody_waits || just_continued) {
        watch->moved = watch->woke;
        watch->noted = false;
    }
    if (!nobody_waits) note_who_is_late(watch);
}

// Once a second: a sign of life and, to rank 0, the places that this rank has come to.
static void tell_others(Watch* watch) {
    if (watch->woke - watch->told < 1) return;
    watch->told = watch->woke;
    if (!world.rank) return post(ALIVE);
    std::string places;
    {
        const std::lock_guard<std::mutex> lock(ranks.places_lock);
        places.swap(ranks.places);
    }
    post(ALIVE, places);
}

// Trouble between devices ends the run after three seconds, within which the watch finds a rank that has ended. Then
// the user is told this reason instead of its consequence.
static void report_device_trouble(Watch* watch) {
    const std::string trouble = device_trouble();
    if (trouble.empty()) watch->healthy = watch->woke;
    if (watch->woke - watch->healthy < 3) return;
    watch->healthy = watch->woke;
    if (!world.rank) say_and_leave(trouble);
    post(ERROR, trouble);
}

// The thread. It never returns; it ends with the process.
static void keep_watch() {
    sigset_t all; // signals such as Ctrl-C are for the main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    Watch watch;
    while (true) {
        std::vector<struct pollfd> sockets;
        for (const auto& [rank, line] : ranks.lines) sockets.push_back({line.socket, POLLIN, 0});
        poll(sockets.data(), sockets.size(), 500); // milliseconds
        const double before = watch.woke;
        watch.woke = now();
        if (watch.woke - before > 3) watch.continued = watch.woke; // half a second took so long: it had been stopped
        read_lines(watch, sockets);
        if (!world.rank) compare_places(&watch);
        tell_others(&watch);
        report_device_trouble(&watch);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --- What ranks do together: come to a place, exchange small values

// Every rank calls this, with the same name, before what all ranks must do together. It does not wait.
static void come_to(const char* place) {
    if (world.size < 2) return;
    const std::lock_guard<std::mutex> lock(ranks.places_lock);
    ranks.places += std::string(place) + "\n";
}

// Sends a value for this place to whom this rank has lines to.
static void post_part(const char* place, const std::string& value, NoteKind kind = PART) {
    post(kind, std::string(place) + "\n" + value);
}

// Waits for the next value from another rank. It must be for this place.
static std::string fetch(int rank, const char* place) {
    std::deque<std::string>& parts = ranks.lines.at(rank).parts;
    std::unique_lock<std::mutex> lock(ranks.parts_lock);
    ranks.part_came.wait(lock, [&] { return !parts.empty(); });
    const std::string part = std::move(parts.front());
    parts.pop_front();
    lock.unlock();
    const std::string its_place = place_at(part, 0);
    if (its_place == place) return part.substr(its_place.size() + 1);
    if (world.rank) lose_the_way(world.rank, place, its_place);
    lose_the_way(rank, its_place, place);
}

static std::string send_from_0(const char* place, const std::string& mine) {
    if (world.rank) return fetch(0, place);
    post_part(place, mine);
    return mine;
}

// Result: rank 0's value, at all ranks.
static std::string broadcast_host(const char* place, const std::string& mine) {
    come_to(place);
    return send_from_0(place, mine);
}

// Result: the values of all ranks in their order, at all ranks. Rank 0 collects them and sends them to all.
template <class T> static std::vector<T> gather_host(const char* place, const T& mine) {
    come_to(place);
    std::string values((const char*)&mine, sizeof mine);
    if (world.rank) post_part(place, values);
    for (int rank = 1; rank < world.size && !world.rank; rank++) values += fetch(rank, place);
    values = send_from_0(place, values);
    std::vector<T> all(world.size);
    if (values.size() != all.size() * sizeof mine) die("internal error: at %s the ranks' values differ in size", place);
    memcpy(all.data(), values.data(), values.size());
    return all;
}

// Result: the largest value of any rank, at all ranks. Of conditions (0 or 1): is it true at any rank?
static int any_rank(const char* place, int mine) { return std::ranges::max(gather_host(place, mine)); }

// All ranks must have the same lines. A rank that has another one than rank 0 says which, and the run ends.
static void must_agree(const char* place, const std::string& lines) {
    std::istringstream here(lines), there(broadcast_host(place, lines));
    for (std::string own, of_0; std::getline(here, own) && std::getline(there, of_0);)
        if (own != of_0) die("has %s, and rank 0 has %s; all ranks need the same", own.c_str(), of_0.c_str());
    any_rank(place, false); // nobody goes on before all have compared
}

// Whether all ranks run on the same machine.
[[maybe_unused]] static bool on_one_machine() {
    return std::ranges::all_of(ranks.hosts, [](const Host& h) { return !strcmp(h.name, ranks.hosts[0].name); });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Launchers: who has started this process, and what it was told

// What a launcher tells each process that it starts, by environment variables.
struct Launcher {
    const char *rank, *size, *local_rank; // the variables' names
    std::vector<const char*> job;         // variables that name the job: the same in its processes, and in no other job
    const char* host_list;                // the job's machines, rank 0's first, such as gpu[07-09,12]; null: not told
};
static const Launcher LAUNCHERS[] = {
    // torchrun and start_ranks: MASTER_ADDR and MASTER_PORT say where to meet
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", {}, nullptr},
    // mpirun, Open MPI's
    {"OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
     nullptr},
    // mpirun, MPICH's and Intel's, and srun --mpi=pmi2
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", {"SLURM_JOB_ID", "SLURM_STEP_ID"}, "SLURM_STEP_NODELIST"},
    // srun
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", {"SLURM_JOB_ID", "SLURM_STEP_ID"}, "SLURM_STEP_NODELIST"},
};
static const Launcher* launcher = nullptr; // that has started this process as one of several; null: none has
constexpr int MOST_RANKS = 100000;

// A launcher's variable, as a number from low to high.
static int launcher_number(const char* name, int low, int high) {
    const char* const value = getenv(name);
    char* end = nullptr;
    errno = 0;
    const long number = strtol(value, &end, 10);
    const bool whole = end != value && !*end && !errno;
    if (!whole || number < low || number > high)
        die("the environment variable %s is \"%s\", and must be a whole number from %d to %d; a launcher (torchrun, "
            "mpirun, srun) sets it, or nobody does",
            name, value, low, high);
    return (int)number;
}

// Sets world if this launcher has started this process as one of several. Result: which variable is missing, or "".
static std::string ask_launcher(const Launcher& l) {
    const bool has_rank = getenv(l.rank), has_size = getenv(l.size);
    const int size = has_size ? launcher_number(l.size, 1, MOST_RANKS) : 1;
    if (!has_rank) return size > 1 ? text("%s is %d, but %s is not set", l.size, size, l.rank) : "";
    const int rank = launcher_number(l.rank, 0, has_size ? size - 1 : MOST_RANKS);
    if (!has_size) return rank ? text("%s is %d, but %s is not set", l.rank, rank, l.size) : "";
    if (size < 2) return "";
    const int local_rank = getenv(l.local_rank) ? launcher_number(l.local_rank, 0, size - 1) : 0;
    world = World{rank, size, local_rank};
    launcher = &l;
    end_all_ranks = end_ranks;
    return "";
}

// The process that has started the ranks of this machine. A rank's parent may be a script, which has inherited the
// rank's number. So the launcher is the nearest ancestor that was not told this number.
static int launcher_process() {
    const std::string told = std::string(launcher->rank) + "=" + getenv(launcher->rank);
    int process = getppid();
    while (process > 1) {
        const std::string folder = "/proc/" + std::to_string(process);
        std::ifstream variables(folder + "/environ"), status(folder + "/status");
        bool was_told = false;
        for (std::string variable; std::getline(variables, variable, '\0');) was_told = was_told || variable == told;
        if (!was_told) break;
        for (std::string line; std::getline(status, line);) sscanf(line.c_str(), "PPid: %d", &process);
    }
    return process;
}

// A name that all processes of this job share, and no process of another job on the same machines.
static std::string job_name() {
    if (launcher->job.empty() && getenv("MASTER_PORT")) return ""; // the port is the job's own
    std::string name;
    for (const char* variable : launcher->job)
        if (const char* value = getenv(variable)) name += text("%s=%s ", variable, value);
    return name.empty() ? text("process %d", launcher_process()) : name;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Meeting: rank 0 listens at a port, and the others connect to it

// Rank 0's machine, the port there, and a number made of the job's name: who comes with another one is of another run.
struct Meeting {
    std::string host, port;
    uint32_t job;
};

static Meeting find_meeting() {
    Meeting m;
    const std::string job = job_name();
    m.job = crc32(0, job.data(), job.size());
    const char* const list = launcher->host_list ? getenv(launcher->host_list) : nullptr;
    char name[256] = "127.0.0.1", number[16] = "";
    if (list) sscanf(list, "%255[^[,][%15[0-9]", name, number); // the first host: gpu07 of gpu[07-09,12]
    m.host = getenv("MASTER_ADDR") ? getenv("MASTER_ADDR") : std::string(name) + number;
    // torchrun itself listens at MASTER_PORT, so the next port is taken. Without it, a port below 32768, from where on
    // systems give ports to any program.
    if (getenv("MASTER_PORT")) m.port = std::to_string(launcher_number("MASTER_PORT", 1, 65534) + 1);
    else m.port = std::to_string(20000 + m.job % 12000);
    return m;
}

// listens: the socket at which rank 0 listens; else a line to it. -1: it can't be had, or not yet.
static int open_socket(const std::string& host, const std::string& port, bool listens) {
    struct addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = listens ? AI_PASSIVE : 0;
    const bool local = host == "127.0.0.1" || host == "localhost";
    const char* const name = listens && !local ? nullptr : host.c_str(); // null: at all addresses of this machine
    if (getaddrinfo(name, port.c_str(), &hints, &found)) return -1;
    int fd = -1, yes = 1;
    for (const struct addrinfo* a = found; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM, 0);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes); // though a run before this one has just ended
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes); // notes are sent at once, however short
        const int failed = (listens ? bind : connect)(fd, a->ai_addr, a->ai_addrlen);
        if (failed || (listens && listen(fd, 4096))) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(found);
    return fd;
}

// Someone who connects but sends nothing, or half a note, must not keep its reader for ever.
static void limit_waiting(int socket) {
    const struct timeval limit = {5, 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

// Rank 0 reads who has connected. Result: its rank; 0: it does not belong to this run.
static int ask_who(int socket, uint32_t job) {
    std::string who;
    uint32_t its_job = 0;
    int rank = 0, size = 0;
    if (receive(socket, &who) != HELLO) return 0;
    if (sscanf(who.c_str(), "train_unet job %x rank %d/%d", &its_job, &rank, &size) != 3 || its_job != job) return 0;
    if (size != world.size || rank < 1 || rank >= size || ranks.lines.count(rank))
        die("rank %d of %d came to a run of %d, or came twice; another run may use this MASTER_PORT", rank, size,
            world.size);
    return rank;
}

// Rank 0 waits until all others have come, or until that moment. door: the socket at which it listens.
static void let_in(int door, uint32_t job, double until) {
    while ((int)ranks.lines.size() + 1 < world.size) {
        struct pollfd someone = {door, POLLIN, 0};
        if (now() > until)
            die("only %d of %d ranks came within %d s", (int)ranks.lines.size() + 1, world.size, JOIN_SECONDS);
        if (poll(&someone, 1, 1000) < 1) continue;
        const int socket = accept(door, nullptr, nullptr);
        limit_waiting(socket);
        const int rank = ask_who(socket, job);
        if (!rank) {
            close(socket);
            continue;
        }
        ranks.lines[rank].socket = socket;
        send_note(socket, WELCOME, "");
    }
}

// Another rank tries once to be let in by rank 0. Result: "", or why it was not.
static std::string knock(const Meeting& meeting) {
    const int socket = open_socket(meeting.host, meeting.port, false);
    if (socket < 0) return strerror(errno);
    limit_waiting(socket);
    send_note(socket, HELLO, text("train_unet job %x rank %d/%d", meeting.job, world.rank, world.size));
    std::string nothing;
    if (receive(socket, &nothing) != WELCOME) {
        close(socket);
        return "who listens there is not this run's rank 0";
    }
    ranks.lines[0].socket = socket;
    return "";
}

// Opens the lines, starts the watch, and tells everyone where each rank runs.
static void join_ranks() {
    const Meeting meeting = find_meeting();
    const double until = now() + JOIN_SECONDS;
    std::string failed;
    if (world.rank) {
        while (!(failed = knock(meeting)).empty() && now() < until) usleep(50000);
    } else {
        const int door = open_socket(meeting.host, meeting.port, true);
        if (door < 0) failed = strerror(errno);
        else let_in(door, meeting.job, until);
        close(door);
    }
    if (!failed.empty())
        die("port %s of %s, where the ranks meet, can't be %s (%s); MASTER_ADDR names rank 0's machine, MASTER_PORT is "
            "one less",
            meeting.port.c_str(), meeting.host.c_str(), world.rank ? "reached" : "had", failed.c_str());
    std::thread(keep_watch).detach();
    Host& own = ranks.hosts[world.rank];
    gethostname(own.name, sizeof own.name - 1);
    own.process = getpid();
    const std::vector<Host> hosts = gather_host("the introduction", own);
    std::ranges::copy(hosts, ranks.hosts.begin());
}

// ---------------------------------------------------------------------------------------------------------------------
// --- The start and the end of a rank

// At the end of a run that went well. Rank 0 waits for DONE from all others, and they for DONE from rank 0. So a rank
// that is lost before all are done is missed, and one that ends behind that is not.
static void leave_ranks() {
    come_to(LAST_PLACE);
    leave_devices();
    if (world.rank) {
        post_part(LAST_PLACE, "", DONE);
        fetch(0, LAST_PLACE);
        return;
    }
    for (const auto& [rank, line] : ranks.lines) fetch(rank, LAST_PLACE);
    ranks.over = true;
    post_part(LAST_PLACE, "", DONE);
}

// At the start of the program: who is this process, who are the others? Without a launcher, it is alone.
static void find_ranks() {
    std::string lacks;
    for (const Launcher& l : LAUNCHERS) {
        const std::string it_lacks = ask_launcher(l);
        if (launcher) break;
        if (lacks.empty()) lacks = it_lacks;
    }
    if (!launcher && !lacks.empty())
        die("environment variables of a launcher: %s; it sets both, or nobody does", lacks.c_str());
    if (!launcher) return;
    if (const char* const need = ranks_need()) {
        // The ranks can't talk to each other yet. Rank 0 says it first, and its launcher then ends the others.
        if (world.rank) sleep(2);
        fprintf(stderr, "train_unet: %d processes were started, of which this is rank %d; %s\n", world.size, world.rank,
                need);
        exit(1);
    }
    ranks.hosts.resize(world.size);
    join_ranks();
    atexit(leave_ranks);
    if (world.rank && !freopen("/dev/null", "w", stdout)) die("/dev/null: %s", strerror(errno)); // only rank 0 prints
}

// ---------------------------------------------------------------------------------------------------------------------
// --- --num_gpus: the program is its own launcher, for the GPUs of this machine

static std::vector<pid_t> started; // the processes that have not ended yet

// Starts this program `count` times. Each process finds in its environment which rank it is, as torchrun has it.
static void start_processes(int count, char** argv) {
    struct sockaddr_in free_port = {};
    socklen_t bytes = sizeof free_port;
    const int door = open_socket("127.0.0.1", "0", true); // port 0: one that is free
    getsockname(door, (struct sockaddr*)&free_port, &bytes);
    close(door);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", std::to_string(ntohs(free_port.sin_port) - 1).c_str(), 1);
    setenv("WORLD_SIZE", std::to_string(count).c_str(), 1);
    for (int rank = 0; rank < count; rank++) {
        for (const char* name : {"RANK", "LOCAL_RANK"}) setenv(name, std::to_string(rank).c_str(), 1);
        started.push_back(fork());
        if (started.back() < 0) die("another process can't be started (%s)", strerror(errno));
        if (started.back()) continue;
        prctl(PR_SET_PDEATHSIG, SIGTERM); // when the process that started it ends, it ends, too
        execv("/proc/self/exe", argv);
        _exit(1);
    }
}

// Starts a rank for each GPU and waits until all have ended. When one has failed, the others get five seconds. The exit
// code is that of the first that failed.
[[noreturn]] static void start_ranks(int count, char** argv) {
    start_processes(count, argv);
    auto pass_on = [](int number) {
        stop_signal = number;
        for (const pid_t process : started) kill(process, number);
    };
    for (const auto& [number, name] : STOP_SIGNALS) signal(number, pass_on);
    double failed = INFINITY; // when the first one failed
    int code = 0;
    while (!started.empty()) {
        int status = 0;
        const pid_t process = waitpid(-1, &status, failed < INFINITY ? WNOHANG : 0);
        const bool killed = process > 0 && WIFSIGNALED(status);
        const bool told = killed && WTERMSIG(status) == stop_signal; // a signal ended it before it looked for signals
        if (killed && !told && failed > now() - 5)
            fprintf(stderr, "train_unet: process %d was ended by signal %d (%s)\n", process, WTERMSIG(status),
                    strsignal(WTERMSIG(status)));
        std::erase(started, process);
        if (process > 0 && status && !code) {
            failed = now();
            code = killed ? 1 : WEXITSTATUS(status);
            if (told) code = 128 + stop_signal;
        }
        for (const pid_t left : started)
            if (now() > failed + 5) kill(left, SIGKILL);
        if (!process) usleep(20000);
    }
    exit(code);
}
