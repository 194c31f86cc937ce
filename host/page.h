// page.h - index.html: a run in a browser, while it goes on and when it has ended; and one page of several runs.
//
// The page is page.html, which is compiled into the program, with the run's numbers in it. train_unet.cu includes this
// file behind what it shows: Run, Config and its FLAGS, LogSummary, describe. It needs files.h and ranks.h, too.
#pragma once

#include <filesystem>
#include <mutex>
#include <sstream>

#include "files.h"
#include "ranks.h"

// Who changes what the page shows, or writes it, holds this: a thread that finds another rank lost writes the last one.
using PageTurn = std::recursive_timed_mutex;
static PageTurn page_turn;

// What index.html shows, before the run's numbers are in it.
static const char PAGE[] =
#include "page.html"
    ;

// Which state of the sources this program was made of, if it was made in a git checkout.
#ifndef TRAIN_UNET_COMMIT
#define TRAIN_UNET_COMMIT
#endif
#define AS_STRING(word) #word
#define STRING_OF(macro) AS_STRING(macro)
static const char PROGRAM_COMMIT[] = STRING_OF(TRAIN_UNET_COMMIT);

// A string in JSON; it ends no script.
static std::string quoted(const std::string& s) {
    std::string out = "\"";
    for (unsigned char c : s)
        out += c < 32 || c == '"' || c == '\\' || c == '<' ? text("\\u%04x", c) : std::string(1, (char)c);
    return out + "\"";
}

// A list in JSON, of what add writes for each element.
template <class List, class Add> static std::string json_list(const List& elements, const Add& add) {
    std::string out = "[";
    for (const auto& element : elements) {
        if (out.size() > 1) out += ",";
        out += add(element);
    }
    return out += "]";
}

// The steps of a run's grids or checkpoints.
static std::string json_steps(const Folder& folder, const std::string& prefix, const char* suffix) {
    int ignored = 0; // a page ends no run
    const auto found = folder.list(prefix, suffix, &ignored);
    return json_list(found, [](const auto& file) { return std::to_string(file.first); });
}

static std::string json_number(double v) { return std::isfinite(v) ? text("%.6g", v) : "null"; }

// Rows of the log, as page.html's NAMES say.
static std::string json_rows(const LogSummary& summary) {
    return json_list(summary.parts, [](const LogPart& p) {
        std::string row = text("\n[%ld,%ld,%ld,", p.first, p.last, p.skipped);
        row += json_number(p.low) + "," + json_number(p.high) + ",";
        for (int k = 0; k < 9; k++) row += json_number(p.sum[k] / p.n[k]) + ","; // of none: 0 / 0
        return row + text("%.9g]", p.seconds);
    });
}

// 2: given, 1: the preset's, 0: the default.
static std::string json_flags(const Config& c) {
    return json_list(FLAGS, [&](const Flag& f) {
        const int from = c.given(f.name) ? 2 : c.chosen(f.name);
        return text("[\"%s\",", f.name) + quoted(flag_value(c, f)) + text(",%d]", from);
    });
}

// How long nothing may be heard of a run that is well: it draws a grid or writes a checkpoint (to a slow disk, of
// 50 MB/s), or has not even done its first steps.
static double longest_silence(const Run& run) {
    const Config& c = run.config;
    const UNet& net = run.trainer.net;
    if (run.per_step == 0) return 300;
    const double forward = run.per_step / c.batch_size / 3; // of an image; a step is about three times as much
    const double evaluations = (double)run.sampler.plan.steps.size() * 2; // of a sampler that looks twice
    const double grid = c.sample_interval ? c.num_samples * evaluations * forward : 0;
    const double checkpoint = (double)net.flat_size * sizeof(float) * (3 + (double)c.emas.size()) / 50e6;
    return run.page.interval + 4 * run.per_step + grid + checkpoint;
}

// A run as page.html takes it. Its rows come last, so that --compare_runs can put others in their place.
static std::string json_run(const Run& run, const char* state, const std::string& why) {
    const Config& c = run.config;
    std::string out = text("{\"state\":\"%s\",\"step\":%ld,\"max_steps\":%ld,\"ms\":%.9g,\"seconds\":%.9g,", state,
                           run.state.step, c.max_steps, run.per_step * 1e3, now() - run.began);
    out += text("\"started\":%ld,\"resumed\":%ld,\"written\":%ld,", run.page.started, run.first_step, time(nullptr));
    out += text("\"interval\":%.9g,\"news\":%.9g,\"batch_size\":%d,", run.page.interval, longest_silence(run),
                c.batch_size);
    out += "\"why\":" + quoted(why) + ",\"name\":" + quoted(c.output_dir) + ",\"about\":" + quoted(run.page.about);
    out += ",\"commit\":" + quoted(PROGRAM_COMMIT) + ",\"path\":\"\",\"flags\":" + json_flags(c);
    out += ",\"grids\":" + json_steps(run.folder, "samples_", ".png");
    out += ",\"checkpoints\":" + json_steps(run.folder, "model_", ".bin");
    return out + ",\n\"rows\":" + json_rows(run.summary) + "}";
}

// page.html with these runs in it.
static std::string page_of(const std::vector<std::string>& runs) {
    std::string page = PAGE;
    return page.replace(page.find("RUNS"), 4, json_list(runs, [](const std::string& run) { return run; }));
}

// Unlike an AtomicFile, this does not wait for the disk: the next page comes soon, and a full disk may be what the last
// one tells of. Result: whether the file is there.
static bool try_write(const Folder& folder, const std::string& name, const std::string& content) {
    const std::string temporary = name + ".tmp" + std::to_string(getpid());
    const int file = openat(folder.descriptor, temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    size_t done = 0;
    for (ssize_t n; done < content.size() && (n = write(file, &content[done], content.size() - done)) > 0;)
        done += (size_t)n;
    if (file < 0) return false;
    close(file);
    const bool moved =
        done == content.size() && !renameat(folder.descriptor, temporary.c_str(), folder.descriptor, name.c_str());
    if (!moved) folder.remove(temporary);
    return moved;
}

// state: running, done, stopped or failed; why: what ended the run.
// Pages take a thousandth of the time at most; news is at most ten minutes old.
static void write_page(Run* run, const char* state, const std::string& why = "") {
    if (world.rank) return;
    const std::lock_guard<PageTurn> turn(page_turn);
    const double start = now();
    const bool written = try_write(run->folder, "index.html", page_of({json_run(*run, state, why)}));
    const bool last = strcmp(state, "running") != 0; // no page comes behind this one
    if (last && !written)
        printf("%s/index.html: its last state, %s, could not be written\n", run->config.output_dir.c_str(), state);
    const double end = now();
    run->page.interval = std::clamp(1000 * (end - start), 10.0, 600.0);
    run->page.due = end + run->page.interval;
}

static Run* shown_run = nullptr; // that goes on, and has a page

// For an error that ends the program: the run's last page says why.
static void fail_page(const std::string& why) {
    const std::unique_lock<PageTurn> turn(page_turn, std::chrono::seconds(3));
    if (turn && shown_run) write_page(std::exchange(shown_run, nullptr), "failed", why);
}

// The first page. From then on, until end_page, an error that ends the program is told there.
static void begin_page(Run* run) {
    run->began = now() - run->summary.seconds;
    const std::string data = text("\ndata: %ld images", run->trainer.data.count);
    run->page.about = describe(run->trainer.net) + "\nhardware: " + device_name() + data;
    run->page.started = time(nullptr);
    write_page(run, "running");
    const std::lock_guard<PageTurn> turn(page_turn);
    shown_run = run;
    tell_page = fail_page;
}

static void end_page() {
    const std::lock_guard<PageTurn> turn(page_turn);
    shown_run = nullptr;
}

// The run in a folder, as its own page holds it. path: from the new page to the folder.
static std::string run_of_folder(const std::string& folder, const std::string& path) {
    const std::string begin = "<script id=\"data\" type=\"application/json\">[", no_path = "\"path\":\"\"";
    const Folder there = open_folder(folder);
    const std::string page = there.descriptor < 0 ? "" : read_text(there, "index.html");
    if (there.descriptor >= 0) close(there.descriptor);
    const size_t from = page.find(begin), to = page.find("]</script>", from);
    if (from == std::string::npos || to == std::string::npos)
        die("--compare_runs: %s holds no run (an index.html that train_unet has written; a run that goes on or is "
            "resumed writes it anew)",
            folder.c_str());
    std::string run = page.substr(from + begin.size(), to - from - begin.size());
    const size_t at = run.find(no_path);
    if (at != std::string::npos) run.replace(at, no_path.size(), "\"path\":" + quoted(path));
    return run;
}

// --compare_runs: one page of several runs.
static void compare_runs(const Config& c) {
    namespace fs = std::filesystem;
    for (const std::string& flag : c.on_command_line)
        if (flag != "compare_runs" && flag != "output") die("--compare_runs: takes --output and no --%s", flag.c_str());
    const std::string output = c.given("output") ? c.output : "compare.html";
    must(output.ends_with(".html"), "--output " + output, "must end in .html");
    std::vector<std::string> runs;
    std::istringstream folders(c.compare_runs);
    for (std::string folder; std::getline(folders, folder, ',');) {
        std::error_code none;
        const fs::path from = fs::absolute(fs::path(output)).parent_path();
        runs.push_back(run_of_folder(folder, fs::relative(folder, from, none).string() + "/"));
    }
    must(runs.size() > 1, "--compare_runs " + c.compare_runs, "must name folders with commas, such as out,out2");
    const fs::path path = output;
    const Folder target = open_folder(path.parent_path().string());
    must(target.descriptor >= 0, "--output " + output,
         text("its folder can't be opened (%s); name one that is there", strerror(target.error)));
    const std::string failure = try_write_file(target, path.filename().string(), page_of(runs));
    must(failure.empty(), output, failure);
    printf("%s: %zu runs on one page\n", output.c_str(), runs.size());
}
