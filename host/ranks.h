// ranks.h - the processes of one run find each other, talk to each other, and watch each other. Needs files.h.
//
// A run on several GPUs is several processes, its ranks. Here they learn who they are (find_ranks), meet (join_ranks),
// and see to it that all are still there and do the same (keep_watch). Gradients and weights are not sent here: they go
// from device to device (see Between ranks).
//
// Each rank has a TCP connection to rank 0, its line. Over it they send notes: small decisions, errors, signs of life.
// In every process one thread, the watch, reads all notes, whatever the main thread does meanwhile. That is needed
// because the main thread may wait inside MPI, inside NCCL or for a kernel, and none of these notices every neighbour
// that is gone: without a watch it would wait for ever.
//
// A run is lost in three ways, and each has its sign:
// - A process has ended: its line ends.
// - A process stands still, or its machine is gone: it sends no sign of life for --rank_timeout seconds.
// - A process does something else than the others, and so waits for what they never do: it comes to another place.
//   Places have names (come_to), and all ranks must come to the same ones in the same order. Rank 0 compares them.
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

// The ranks of a run: processes, one a GPU, that take every step together. A program that runs alone is rank 0 of 1.
struct World {
    int rank = 0, size = 1;
    int local_rank = 0;  // among the processes of this machine
    bool direct = false; // their devices write into each other's memory (set by the program)
};
static World world;

// What the program defines, since it depends on its devices:
static const char* ranks_need();     // what to build or install for more than one rank; null: nothing
static std::string device_trouble(); // what went wrong between devices; empty: nothing
static void leave_devices();         // at the end of the program: no rank sends another one anything any more

enum NoteKind : uint32_t {
    NO_NOTE, // the line has ended: nothing will come any more
    ALIVE,   // once a second; it holds the places that the sender has come to since the last one
    HELLO,   // the first note of a line: which rank it is
    WELCOME, // rank 0's answer
    PART,    // something for broadcast_host or gather_host: the place it is for, then the value
    ERROR,   // to rank 0: say this, and end the run
    LEAVE,   // from rank 0: the run ends, and why was said
    DONE,    // a PART of the last place; from rank 0: all are done, and may go
};
constexpr int JOIN_SECONDS = 60;              // within which all ranks must have come
constexpr const char* LAST_PLACE = "its end"; // of every rank

struct Line { // to another rank
    int socket = -1;
    double heard = now();          // when a note last came
    std::deque<std::string> parts; // that came, and wait for fetch
    std::string places;            // where it has come to, as far as that is not compared yet; each ends in \n
};

struct Host {
    char name[60];
    int process;
};

static struct Ranks {
    std::map<int, Line> lines;         // by rank: rank 0 has one to each, the others have one to rank 0
    std::vector<Host> hosts;           // by rank
    std::mutex sending;                // notes are sent one at a time
    std::mutex receiving;              // guards all lines' parts
    std::condition_variable part_came; // told of each new one
    std::mutex walking;                // guards places
    std::string places;                // where this rank has come to, as far as rank 0 has not been told or compared
    std::atomic<int> patience = 20;    // --rank_timeout
    std::atomic<bool> said = false;    // why the run ends
    std::atomic<bool> over = false;    // all are done, and anyone may go
}& ranks = *new Ranks;                 // never destroyed: the watch needs it until the process ends

static std::string rank_name(int rank) {
    const Host& host = ranks.hosts[rank];
    const std::string process = host.process ? text(" (process %d on %s)", host.process, host.name) : "";
    return text("rank %d", rank) + process;
}

// Where it fails, whoever reads notices.
static void send_note(int socket, NoteKind kind, const std::string& content) {
    const uint32_t head[2] = {kind, (uint32_t)content.size()};
    const std::string note = std::string((const char*)head, sizeof head) + content;
    for (size_t sent = 0; sent < note.size();) {
        const ssize_t n = send(socket, note.data() + sent, note.size() - sent, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR) break;
        sent += (size_t)std::max<ssize_t>(n, 0);
    }
}

// To rank 0 or, as rank 0, to all others.
static void post(NoteKind kind, const std::string& content = "") {
    const std::lock_guard<std::mutex> turn(ranks.sending);
    for (const auto& [rank, line] : ranks.lines) send_note(line.socket, kind, content);
}

static NoteKind receive(int socket, std::string* content) {
    uint32_t head[2];
    if (recv(socket, head, sizeof head, MSG_WAITALL) != sizeof head) return NO_NOTE;
    const size_t size = head[1];
    if (size > 1 << 28) return NO_NOTE; // it is none of ours
    content->resize(size);
    if (size && recv(socket, content->data(), size, MSG_WAITALL) != (ssize_t)size) return NO_NOTE;
    return (NoteKind)head[0];
}

[[noreturn]] static void say_and_leave(const std::string& why) {
    while (ranks.said.exchange(true)) pause(); // another thread says something, and then ends the process
    fprintf(stderr, "train_unet: %s\n", why.c_str());
    post(LEAVE);
    remove_unfinished();
    if (const Listener tell = tell_page) tell(why);
    _exit(1);
}

// Ends all ranks, for an error of this one.
[[noreturn]] static void end_ranks(const std::string& why) {
    if (!world.rank) say_and_leave(why);
    if (!ranks.lines.empty()) {
        post(ERROR, why);
        sleep(10); // rank 0 says it, and tells this process to leave
    }
    say_and_leave(rank_name(world.rank) + ": " + why);
}

// Another rank is gone. Rank 0 says so; if it is rank 0, the first of the others on each machine.
[[noreturn]] static void lose_rank(int lost, const std::string& how) {
    int speaker = world.rank ? 1 : 0;
    while (speaker < world.rank && strcmp(ranks.hosts[speaker].name, ranks.hosts[world.rank].name)) speaker++;
    if (speaker != world.rank) {
        sleep(3); // a launcher that sees one process end may end the speaker before it has spoken
        _exit(1);
    }
    say_and_leave(rank_name(lost) + how +
                  ", so the run ends; --resume_checkpoint auto goes on from its latest checkpoint");
}

// Rank 0, or another rank itself: that rank does something else than rank 0.
[[noreturn]] static void lose_the_way(int rank, const std::string& place, const std::string& place_of_0) {
    const std::string why =
        text("has come to %s, and rank 0 to %s; all ranks must do the same, with the same flags and "
             "files",
             place.c_str(), place_of_0.c_str());
    if (world.rank) end_ranks(why);
    say_and_leave(rank_name(rank) + ": " + why);
}

// A note from another rank. False: none will come any more.
static bool take_note(int rank, Line* line) {
    std::string content;
    const NoteKind kind = receive(line->socket, &content);
    if (kind == NO_NOTE) return false;
    line->heard = now();
    if (kind == ALIVE) line->places += content;
    if (kind == LEAVE) _exit(1);
    if (kind == ERROR) {
        usleep(300000); // rank 0 may find the same mistake, and say it without another rank's name
        say_and_leave(rank_name(rank) + ": " + content);
    }
    if (kind == DONE && world.rank) ranks.over = true;
    if (kind == PART || kind == DONE) {
        const std::lock_guard<std::mutex> turn(ranks.receiving);
        line->parts.push_back(std::move(content));
        ranks.part_came.notify_one();
    }
    return true;
}

// What the watch remembers from one look to the next.
struct Watch {
    double woke = now();
    double continued = -INFINITY; // when this process went on, after it had been stopped as a whole (Ctrl-Z, then fg)
    double told = 0;              // when it last told the others that this process is alive
    double healthy = now();       // when there was last no trouble between devices
    double moved = now();         // when the last of the ranks came to a place
    bool noted = false;           // that some wait for others
    std::string place;            // the latest one that all have come to
};

// Reads what has come, and misses who is gone.
static void read_lines(const Watch& watch, const std::vector<struct pollfd>& sockets) {
    for (size_t k = 0; auto& [rank, line] : ranks.lines) {
        const bool came = sockets[k].revents != 0;
        k++;
        const bool ended = came && !take_note(rank, &line);
        if (ended && watch.woke - watch.continued < 3)
            sleep(3); // while this process was stopped the others missed it, and their launcher ends all
        if (ended && !ranks.over) lose_rank(rank, " has ended");
        if (ended) line.socket = -1;
        if (watch.woke == watch.continued) line.heard = watch.woke;
        const bool all_came = ranks.hosts[0].process; // until then rank 0 lets others in and has no watch
        const int patience = ranks.patience + (all_came ? 0 : JOIN_SECONDS);
        if (!ranks.over && watch.woke - line.heard > patience)
            lose_rank(rank, text(" has been silent for %d s", patience));
    }
}

// The name of a place, of which places[at] is a part.
static std::string place_at(const std::string& places, size_t at) {
    const size_t start = at ? places.rfind('\n', at - 1) + 1 : 0;
    return places.substr(start, places.find('\n', start) - start);
}

// Rank 0, once in patience seconds: says for whom the others wait. They are alive and may only be slow: reading a large
// file, or writing to a slow disk. So the run goes on.
static void note_who_is_late(Watch* watch) {
    if (watch->noted || watch->woke - watch->moved < ranks.patience) return;
    std::string late = ranks.places.empty() ? rank_name(0) : "";
    for (const auto& [rank, line] : ranks.lines) {
        if (!line.places.empty()) continue;
        if (watch->woke - line.heard > 3) return; // it will be missed soon
        late += (late.empty() ? "" : ", ") + rank_name(rank);
    }
    watch->noted = true;
    fprintf(stderr, "train_unet: the others have waited for %d s for %s since %s; it is alive, so they wait on\n",
            (int)ranks.patience, late.c_str(), watch->place.empty() ? "the start" : watch->place.c_str());
}

// Rank 0: all ranks must have come to the same places, as far as each of them has got.
static void compare_places(Watch* watch) {
    const std::lock_guard<std::mutex> turn(ranks.walking);
    std::string& own = ranks.places;
    size_t common = own.size();
    size_t farthest = own.size();
    for (const auto& [rank, line] : ranks.lines) {
        const size_t both = std::min(own.size(), line.places.size());
        const auto differ = std::mismatch(own.begin(), own.begin() + both, line.places.begin());
        const size_t at = differ.first - own.begin();
        if (at < both) lose_the_way(rank, place_at(line.places, at), place_at(own, at));
        common = std::min(common, line.places.size());
        farthest = std::max(farthest, line.places.size());
    }
    if (common) {
        watch->place = place_at(own, common - 1);
        own.erase(0, common);
        for (auto& [rank, line] : ranks.lines) line.places.erase(0, common);
    }
    const bool nobody_waits = common == farthest;
    if (common || nobody_waits || watch->woke == watch->continued) {
        watch->moved = watch->woke;
        watch->noted = false;
    }
    if (!nobody_waits) note_who_is_late(watch);
}

// Once a second: a sign of life, and where this rank has come to.
static void tell_others(Watch* watch) {
    if (watch->woke - watch->told < 1) return;
    watch->told = watch->woke;
    if (!world.rank) return post(ALIVE); // it compares places itself
    std::string places;
    {
        const std::lock_guard<std::mutex> turn(ranks.walking);
        places.swap(ranks.places);
    }
    post(ALIVE, places);
}

// Trouble between devices ends the run after three seconds. If a rank has ended, that is the reason to be said, and it
// is found earlier.
static void report_device_trouble(Watch* watch) {
    const std::string trouble = device_trouble();
    if (trouble.empty()) watch->healthy = watch->woke;
    if (watch->woke - watch->healthy < 3) return;
    watch->healthy = watch->woke;
    if (!world.rank) say_and_leave(trouble);
    post(ERROR, trouble);
}

// The watch.
static void keep_watch() {
    sigset_t all; // signals are for the main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    Watch watch;
    while (true) {
        std::vector<struct pollfd> sockets;
        for (const auto& [rank, line] : ranks.lines) sockets.push_back({line.socket, POLLIN, 0});
        poll(sockets.data(), sockets.size(), 500);
        const double before = watch.woke;
        watch.woke = now();
        if (watch.woke - before > 3) watch.continued = watch.woke;
        read_lines(watch, sockets);
        if (!world.rank) compare_places(&watch);
        tell_others(&watch);
        report_device_trouble(&watch);
    }
}

// Stands before what all ranks must do together. All ranks come to the same places in the same order; ranks that don't are
// found, and the run ends with a sentence instead of waiting for ever. The functions below come to a place themselves.
static void come_to(const char* place) {
    if (world.size < 2) return;
    const std::lock_guard<std::mutex> turn(ranks.walking);
    ranks.places += std::string(place) + "\n";
}

// The next part from another rank, which must be meant for this place.
static std::string fetch(int rank, const char* place) {
    std::deque<std::string>& parts = ranks.lines.at(rank).parts;
    std::unique_lock<std::mutex> turn(ranks.receiving);
    ranks.part_came.wait(turn, [&] { return !parts.empty(); });
    const std::string part = std::move(parts.front());
    parts.pop_front();
    turn.unlock();
    const std::string its_place = place_at(part, 0);
    if (its_place == place) return part.substr(its_place.size() + 1);
    if (world.rank) lose_the_way(world.rank, place, its_place);
    lose_the_way(rank, its_place, place);
}

static void post_part(const char* place, const std::string& value, NoteKind kind = PART) {
    post(kind, std::string(place) + "\n" + value);
}

static std::string send_from_0(const char* place, const std::string& mine) {
    if (world.rank) return fetch(0, place);
    post_part(place, mine);
    return mine;
}

// Rank 0's value, at all ranks, which wait for it.
static std::string broadcast_host(const char* place, const std::string& mine) {
    come_to(place);
    return send_from_0(place, mine);
}

// Everyone's value, in the order of the ranks, at all of them.
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

// The largest value of any rank, at all of them. Of conditions: is it true anywhere?
static int any_rank(const char* place, int mine) { return std::ranges::max(gather_host(place, mine)); }

// All ranks must have the same lines. Who differs from rank 0 says in which one, and the run ends.
static void must_agree(const char* place, const std::string& lines) {
    std::istringstream here(lines), there(broadcast_host(place, lines));
    for (std::string own, of_0; std::getline(here, own) && std::getline(there, of_0);)
        if (own != of_0) die("has %s, and rank 0 has %s; all ranks need the same", own.c_str(), of_0.c_str());
    any_rank(place, false); // nobody goes on before all have compared
}

// What a launcher tells each process that it starts, by environment variables.
struct Launcher {
    const char *rank, *size, *local_rank; // the variables' names
    std::vector<const char*> job;         // those that name the job: the same in all of its processes, and in no other
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
static const Launcher* launcher = nullptr; // that has started this process as one of several
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

// The process that has started the ranks of this machine. It is not always a rank's parent: that may be a script that
// waits for it. But a script has inherited what the launcher told it, so the launcher is the nearest ancestor that was
// not told this rank. Where there is no /proc, the parent.
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

// What all processes of this job have in common, and those of another one on the same machines don't.
static std::string job_name() {
    if (launcher->job.empty() && getenv("MASTER_PORT")) return ""; // the port says it
    std::string name;
    for (const char* variable : launcher->job)
        if (const char* value = getenv(variable)) name += text("%s=%s ", variable, value);
    return name.empty() ? text("process %d", launcher_process()) : name;
}

// Where the ranks meet: rank 0's machine, and a port there at which rank 0 listens.
struct MeetingPlace {
    std::string host, port;
    uint32_t job; // made of job_name: whoever comes with another one belongs to another run
};

static MeetingPlace meeting_place() {
    MeetingPlace place;
    const std::string job = job_name();
    place.job = crc32(0, job.data(), job.size());
    const char* const list = launcher->host_list ? getenv(launcher->host_list) : nullptr;
    char name[256] = "127.0.0.1", number[16] = "";
    if (list) sscanf(list, "%255[^[,][%15[0-9]", name, number); // the first host
    place.host = getenv("MASTER_ADDR") ? getenv("MASTER_ADDR") : std::string(name) + number;
    // torchrun itself listens at MASTER_PORT. From 32768 on systems give ports to whoever asks for any.
    if (getenv("MASTER_PORT")) place.port = std::to_string(launcher_number("MASTER_PORT", 1, 65534) + 1);
    else place.port = std::to_string(20000 + place.job % 12000);
    return place;
}

// The socket at which rank 0 listens, or a line to it; -1: it can't be had, or not yet.
static int open_socket(const std::string& host, const std::string& port, bool listens) {
    struct addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = listens ? AI_PASSIVE : 0;
    const bool local = host == "127.0.0.1" || host == "localhost";
    if (getaddrinfo(listens && !local ? nullptr : host.c_str(), port.c_str(), &hints, &found)) return -1;
    int fd = -1, yes = 1;
    for (const struct addrinfo* a = found; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM, 0);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        const int failed = (listens ? bind : connect)(fd, a->ai_addr, a->ai_addrlen);
        if (failed || (listens && listen(fd, 4096))) close(fd), fd = -1;
    }
    freeaddrinfo(found);
    return fd;
}

// A rank that has just connected says who it is. Result: its rank; 0: it is none of this run's.
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

// A peer that sends half a note, or nothing, must not keep its reader for ever.
static void limit_waiting(int socket) {
    const struct timeval limit = {5, 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

// Rank 0 waits for the others.
static void let_in(int door, uint32_t job, double until) {
    while ((int)ranks.lines.size() + 1 < world.size) {
        struct pollfd knock = {door, POLLIN, 0};
        if (now() > until)
            die("only %d of %d ranks came within %d s", (int)ranks.lines.size() + 1, world.size, JOIN_SECONDS);
        if (poll(&knock, 1, 1000) < 1) continue;
        const int socket = accept(door, nullptr, nullptr);
        limit_waiting(socket);
        const int rank = ask_who(socket, job);
        if (rank) ranks.lines[rank].socket = socket;
        if (rank) send_note(socket, WELCOME, "");
        else close(socket);
    }
}

// The others knock at rank 0's door until they are let in. Result: why not; empty: they are.
static std::string knock(const MeetingPlace& place) {
    const int socket = open_socket(place.host, place.port, false);
    if (socket < 0) return strerror(errno);
    limit_waiting(socket);
    send_note(socket, HELLO, text("train_unet job %x rank %d/%d", place.job, world.rank, world.size));
    std::string nothing;
    if (receive(socket, &nothing) != WELCOME) {
        close(socket);
        return "who listens there is not this run's rank 0";
    }
    ranks.lines[0].socket = socket;
    return "";
}

// Draws the lines, and tells everyone who all are.
static void join_ranks() {
    const MeetingPlace place = meeting_place();
    const double until = now() + JOIN_SECONDS;
    std::string failed;
    if (world.rank) {
        while (!(failed = knock(place)).empty() && now() < until) usleep(50000);
    } else {
        const int door = open_socket(place.host, place.port, true);
        if (door < 0) failed = strerror(errno);
        else let_in(door, place.job, until);
        close(door);
    }
    if (!failed.empty())
        die("port %s of %s, where the ranks meet, can't be %s (%s); MASTER_ADDR names rank 0's machine, MASTER_PORT is "
            "one less",
            place.port.c_str(), place.host.c_str(), world.rank ? "reached" : "had", failed.c_str());
    std::thread(keep_watch).detach();
    gethostname(ranks.hosts[world.rank].name, sizeof(Host::name) - 1);
    ranks.hosts[world.rank].process = getpid();
    const std::vector<Host> hosts = gather_host("the introduction", ranks.hosts[world.rank]);
    std::ranges::copy(hosts, ranks.hosts.begin());
}

// Whether all ranks run on the same machine.
[[maybe_unused]] static bool on_one_machine() {
    return std::ranges::all_of(ranks.hosts, [](const Host& h) { return !strcmp(h.name, ranks.hosts[0].name); });
}

// At the end of a run that went well: who is lost before rank 0 has heard that all are done is missed.
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

// Who this process is, as a launcher says by its variables. Empty, or what they lack.
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

// At the start of the program: who is this process, and who are the others?
static void find_ranks() {
    std::string lacks;
    for (const Launcher& l : LAUNCHERS) {
        const std::string it_lacks = ask_launcher(l);
        if (launcher) break;
        if (lacks.empty()) lacks = it_lacks;
    }
    if (!launcher && !lacks.empty())
        die("environment variables of a launcher: %s; it sets both, or nobody does", lacks.c_str());
    if (!launcher) return; // alone
    if (const char* const need = ranks_need()) {
        // Rank 0 says it, and a launcher ends the others. Where there is none, or rank 0 is another program, they say it.
        if (world.rank) sleep(2);
        fprintf(stderr, "train_unet: %d processes were started, of which this is rank %d; %s\n", world.size, world.rank,
                need);
        exit(1);
    }
    ranks.hosts.resize(world.size);
    join_ranks();
    atexit(leave_ranks);
    if (world.rank && !freopen("/dev/null", "w", stdout)) die("/dev/null: %s", strerror(errno)); // rank 0 speaks
}

// --num_gpus: starts a process for each GPU, and ends when all have ended, soon after one failed.
static std::vector<pid_t> started;
[[noreturn]] static void start_ranks(int count, char** argv) {
    struct sockaddr_in free_port = {};
    socklen_t bytes = sizeof free_port;
    const int door = open_socket("127.0.0.1", "0", true);
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
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        execv("/proc/self/exe", argv);
        _exit(1);
    }
    auto pass_on = [](int number) {
        stop_signal = number;
        for (const pid_t process : started) kill(process, number);
    };
    for (const auto& [number, name] : STOP_SIGNALS) signal(number, pass_on);
    double failed = INFINITY;
    int code = 0; // of the first that failed
    for (int status; !started.empty();) {
        const pid_t process = waitpid(-1, &status, failed < INFINITY ? WNOHANG : 0);
        const bool killed = process > 0 && WIFSIGNALED(status);
        const bool told = killed && WTERMSIG(status) == stop_signal; // before it looked at signals itself
        if (killed && !told && failed > now() - 5)
            fprintf(stderr, "train_unet: process %d was ended by signal %d (%s)\n", process, //
                    WTERMSIG(status), strsignal(WTERMSIG(status)));
        std::erase(started, process);
        if (process > 0 && status && !code) {
            failed = now();
            code = killed ? 1 : WEXITSTATUS(status);
            if (told) code = 128 + stop_signal;
        }
        for (const pid_t process : started)
            if (now() > failed + 5) kill(process, SIGKILL);
        if (!process) usleep(20000);
    }
    exit(code);
}
