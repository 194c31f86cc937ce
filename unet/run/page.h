// page.h - index.html: a run in a browser, while it goes on and when it has ended; and one page of several runs.
// The page is page.html, which is compiled into the program as a string. Where it says RUNS, the program writes the
// runs' numbers in JSON; the scripts in the page draw all curves and tables from them. So a page is one file that needs
// no server, and the page of several runs is the same page with more runs in it.
#pragma once

#include <cmath>
#include <filesystem>
#include <mutex>
#include <sstream>

#include "../host/png.h"
#include "log.h"

// A thread locks this while it changes what the page shows, or writes the page: the main thread, and the watch
// (ranks.h), which writes the last page when another rank is lost. It is recursive because the main thread may end by
// an error while it holds it.
using PageTurn = std::recursive_timed_mutex;
static PageTurn page_turn;

static const char PAGE[] =
#include "page.html"
    ;

// ---------------------------------------------------------------------------------------------------------------------
// --- A run in JSON

// A string in JSON. A "<" is written as a number, too, so that no string can end the script in which it stands.
static std::string quoted(const std::string& s) {
    std::string out = "\"";
    for (const unsigned char c : s) {
        const bool special = c < 32 || c == '"' || c == '\\' || c == '<';
        out += special ? text("\\u%04x", c) : std::string(1, (char)c);
    }
    return out + "\"";
}

// A list in JSON. write(element) is what stands there for an element.
template <class List, class Write> static std::string json_list(const List& elements, const Write& write) {
    std::string out = "[";
    for (const auto& element : elements) {
        if (out.size() > 1) out += ",";
        out += write(element);
    }
    return out += "]";
}

// JSON has no infinity and no NaN; page.html takes null for "there is none".
static std::string json_number(double v) { return std::isfinite(v) ? text("%.6g", v) : "null"; }

// The steps up to `last` in the names of a folder's files. (Later ones may be there if the run went on from an earlier
// step.)
static std::string json_steps(const Folder& folder, const std::string& prefix, const char* suffix, int64_t last) {
    int ignored = 0; // no run ends because its page can't be written
    auto found = folder.list(prefix, suffix, &ignored);
    found.erase(found.upper_bound(last), found.end());
    return json_list(found, [](const auto& file) { return std::to_string(file.first); });
}

// The parts of the log. NAMES in page.html says what the numbers of a row are.
static std::string json_rows(const LogSummary& summary) {
    return json_list(summary.parts, [](const LogPart& p) {
        std::string row = text("\n[%ld,%ld,%ld,", p.first, p.last, p.skipped);
        row += json_number(p.low) + "," + json_number(p.high) + ",";
        for (int k = 0; k < 9; k++) row += json_number(p.sum[k] / p.n[k]) + ","; // 0 / 0, NaN: no row has a value
        return row + text("%.9g,", p.seconds) + json_number(p.copies) + "]";
    });
}

// For each flag: its name, its value, and who chose it: 2 the user, 1 the preset, 0 nobody, so it is the default.
static std::string json_flags(const Config& c) {
    return json_list(FLAGS, [&](const Flag& f) {
        const int who = c.given(f.name) ? 2 : c.chosen(f.name);
        return text("[\"%s\",", f.name) + quoted(flag_value(c, f)) + text(",%d]", who);
    });
}

// The rows of judge.csv, which dev/benchmarks/judge.py --runs writes, or "". When the run has ended, that program puts
// new ones into the page itself.
static std::string judged(const Folder& folder) {
    std::string content(1 << 16, 0);
    const int file = openat(folder.descriptor, "judge.csv", OPEN_TO_READ);
    const ssize_t size = read(file, content.data(), content.size()); // -1: there is none, or none that can be read
    close(file);
    content.resize(std::max<ssize_t>(size, 0));
    return content;
}

// The classes of a grid's images, row by row, by name or number.
static std::string json_classes(const Run& run) {
    const Config& c = run.config;
    const int columns = grid_columns(c.num_samples, c.cond_channels ? 3 : 1);
    std::vector<std::vector<std::string>> rows;
    for (int i = 0; i < c.num_samples && c.class_cond; i++) {
        const size_t k = class_of_image(c, run.sampler, i);
        if (i % columns == 0) rows.emplace_back();
        rows.back().push_back(k < c.class_names.size() ? c.class_names[k] : std::to_string(k));
    }
    return json_list(rows, [](const auto& row) { return json_list(row, quoted); });
}

// For how many seconds a run may write no page although it is well, as while it does the first steps, draws a grid, or
// writes a checkpoint. A page that is older tells the reader that the run may be gone.
static double longest_silence(const Run& run) {
    const Config& c = run.config;
    const UNet& net = run.trainer.net;
    if (run.per_step == 0) return 300; // no step is done yet
    const double grid = 2 * grid_seconds(run);
    const double arrays = 3 + (double)c.emas.size(); // in a checkpoint: weights, two moments, averages
    const double checkpoint = (double)net.flat_size * sizeof(float) * arrays / 50e6; // on a slow disk, 50 MB/s
    return run.page.interval + 4 * run.per_step + grid + checkpoint;
}

// All that page.html shows of a run. state: running, done, stopped or failed; why: what ended it. The rows of the log
// come last, so that run_of_folder finds "path" early.
static std::string json_run(const Run& run, const char* state, const std::string& why) {
    const Config& c = run.config;
    const double seconds = now() - run.began;
    std::string out = "{";
    out += text("\"state\":\"%s\",", state);
    out += text("\"step\":%ld,\"max_steps\":%ld,", run.state.step, c.max_steps);
    out += text("\"ms\":%.9g,\"seconds\":%.9g,", run.per_step * 1e3, seconds);
    out += text("\"started\":%ld,\"resumed\":%ld,", run.page.started, run.first_step);
    out += text("\"written\":%ld,", time(nullptr));
    out += text("\"interval\":%.9g,\"news\":%.9g,", run.page.interval, longest_silence(run));
    out += text("\"batch_size\":%d,", c.batch_size);
    out += "\"why\":" + quoted(why) + ",";
    out += "\"name\":" + quoted(c.output_dir) + ",";
    out += "\"about\":" + quoted(run.page.about) + ",";
    out += "\"commit\":" + quoted(PROGRAM_COMMIT) + ",";
    out += "\"path\":\"\",";
    out += "\"flags\":" + json_flags(c) + ",";
    out += "\"judge\":" + quoted(judged(run.folder)) + ",";
    out += "\"classes\":" + json_classes(run) + ",";
    out += "\"grids\":" + json_steps(run.folder, "samples_", ".png", run.state.step) + ",";
    out += "\"checkpoints\":" + json_steps(run.folder, "model_", ".bin", run.state.step) + ",";
    out += text("\"best\":%s,\n", run.folder.has(BEST) ? "true" : "false");
    out += "\"rows\":" + json_rows(run.summary);
    return out + "}";
}

// ---------------------------------------------------------------------------------------------------------------------
// --- The page of a run

// page.html with these runs in it.
static std::string page_of(const std::vector<std::string>& runs) {
    std::string page = PAGE;
    return page.replace(page.find("RUNS"), 4, json_list(runs, [](const std::string& run) { return run; }));
}

// Writes a file beside its place and gives it its name. Unlike an AtomicFile, this waits neither for the disk nor for
// room on it: the next page comes soon. Result: whether the file is there.
static bool try_write(const Folder& folder, const std::string& name, const std::string& content) {
    const std::string temporary = name + ".tmp" + std::to_string(getpid());
    const int where = folder.descriptor;
    const int file = openat(where, temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) return false;
    size_t done = 0;
    while (done < content.size()) {
        const ssize_t n = write(file, &content[done], content.size() - done);
        if (n <= 0) break;
        done += (size_t)n;
    }
    close(file);
    const bool whole = done == content.size();
    const bool moved = whole && !renameat(where, temporary.c_str(), where, name.c_str());
    if (!moved) folder.remove(temporary);
    return moved;
}

// Writes index.html. Then it sets when the page is due again, so that pages take a thousandth of the run's time at most
// and are ten minutes old at most.
static void write_page(Run* run, const char* state, const std::string& why = "") {
    if (world.rank) return;
    const std::lock_guard<PageTurn> turn(page_turn);
    const double start = now();
    const bool written = try_write(run->folder, "index.html", page_of({json_run(*run, state, why)}));
    const bool last = strcmp(state, "running") != 0; // no page comes behind this one
    if (last && !written)
        tell(run->config.output_dir + "/index.html: its last state, " + state + ", could not be written");
    const double end = now();
    run->page.interval = std::clamp(1000 * (end - start), 10.0, 600.0);
    run->page.due = end + run->page.interval;
}

static Run* shown_run = nullptr; // the run that goes on; null: there is none, or its last page is written

// Called when the program ends by an error, in whichever thread finds it: the run's last page says why. If the other
// thread writes a page that does not end (a disk that hangs), this one goes on without it.
static void fail_page(const std::string& why) {
    const std::unique_lock<PageTurn> turn(page_turn, std::chrono::seconds(3));
    if (turn && shown_run) write_page(std::exchange(shown_run, nullptr), "failed", why);
}

// Writes the first page. From here to end_page, an error that ends the program is told on the page.
static void begin_page(Run* run) {
    run->began = now() - run->summary.seconds;
    const Dataset& d = run->trainer.data;
    const std::string data = text("\ndata: %ld images", d.count) + held_out_words(d);
    run->page.about = describe(run->trainer.net) + "\nhardware: " + device_name() + data;
    std::string names = run->trainer.data.value_names;
    std::ranges::replace(names, '\n', ' ');
    if (run->config.cond_dim && !names.empty()) run->page.about += "\nbelow the samples: " + names;
    if (run->config.cond_channels)
        run->page.about += "\nsamples: what each is conditioned on, the sample, and the image of the data";
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

// ---------------------------------------------------------------------------------------------------------------------
// --- One page of several runs

// The run in a folder, in JSON, taken from its own page. path: how its files are named from the new page; its own page
// has no path there, since it lies beside them.
static std::string run_of_folder(const std::string& folder, const std::string& path) {
    const std::string begin = "<script id=\"data\" type=\"application/json\">[";
    const std::string no_path = "\"path\":\"\"";
    const Folder there = open_folder(folder);
    const std::string page = there.descriptor < 0 ? "" : read_text(there, "index.html");
    if (there.descriptor >= 0) close(there.descriptor);
    const size_t from = page.find(begin);
    const size_t end = page.find("]</script>", from);
    if (from == std::string::npos || end == std::string::npos)
        die("--compare_runs: %s holds no run (an index.html, which ./train_unet writes and train_unet.py does not; "
            "a run that goes on or is resumed writes it anew)",
            folder.c_str());
    const size_t run_begins = from + begin.size();
    std::string run = page.substr(run_begins, end - run_begins);
    const size_t found = run.find(no_path);
    if (found != std::string::npos) run.replace(found, no_path.size(), "\"path\":" + quoted(path));
    return run;
}

// --compare_runs out,out2: writes one page of the runs in these folders.
static void compare_runs(const Config& c) {
    namespace fs = std::filesystem;
    for (const std::string& flag : c.on_command_line)
        if (flag != "compare_runs" && flag != "output") die("--compare_runs: takes --output and no --%s", flag.c_str());
    const std::string output = c.given("output") ? c.output : "compare.html";
    must(output.ends_with(".html"), "--output " + output, "must end in .html");
    const fs::path path = output;
    std::vector<std::string> runs;
    std::istringstream folders(c.compare_runs);
    for (std::string folder; std::getline(folders, folder, ',');) {
        std::error_code none;
        const fs::path here = fs::absolute(path).parent_path();
        runs.push_back(run_of_folder(folder, fs::relative(folder, here, none).string() + "/"));
    }
    must(runs.size() > 1, "--compare_runs " + c.compare_runs, "must name folders with commas, such as out,out2");
    const Folder target = open_folder(path.parent_path().string());
    must(target.descriptor >= 0, "--output " + output,
         text("its folder can't be opened (%s); name one that is there", strerror(target.error)));
    must(!is_name_of_run(target, path.filename().string()), "--output " + output, NAME_OF_RUN);
    // A page that this program has written begins like this one. That of a single run has no path.
    const std::string there = read_text(target, path.filename().string());
    const bool is_ours = there.starts_with(std::string(PAGE, 50)) && there.find("\"path\":\"\"") == std::string::npos;
    must(there.empty() || is_ours, "--output " + output,
         "is there and is no page of --compare_runs; choose another name, or move it away");
    const std::string failure = try_write_file(target, path.filename().string(), page_of(runs));
    must(failure.empty(), output, failure);
    tell(output + text(": %zu runs on one page", runs.size()));
}
