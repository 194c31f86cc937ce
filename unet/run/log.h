// log.h - the log and the status line.
#pragma once
#include "../diffusion/samplers.h"
#include "../diffusion/verdict.h"
#include "model_file.h"

// ---------------------------------------------------------------------------------------------------------------------
// --- the log in memory, as index.html shows it

constexpr char LOG_COLUMNS[] = "step,loss,lr,grad_norm,ms,loss_q0,loss_q1,loss_q2,loss_q3,val_loss,seconds,copies";

// The places of some of these columns in a row of log.csv, counted from 0.
enum LogColumn {
    COLUMN_STEP,
    COLUMN_LOSS,
    COLUMN_GRAD_NORM = 3,
    COLUMN_MS,
    COLUMN_VAL_LOSS = 9,
    COLUMN_SECONDS,
    COLUMN_COPIES
};
using LogValues = std::array<double, COLUMN_COPIES + 1>; // a row's values; NaN: the row has no value in this column
static_assert(std::ranges::count(LOG_COLUMNS, ',') == COLUMN_COPIES, "a column needs its place in LogColumn");

// Returns the values of a row of log.csv. A value that can't be read becomes 0, and a missing value becomes NaN.
static LogValues parse_row(const std::string& row) {
    std::istringstream fields(row); // the row's fields, with commas between them
    std::string field;
    LogValues values;
    for (double& value : values) {
        const bool there = std::getline(fields, field, ',') && !field.empty();
        value = there ? atof(field.c_str()) : NAN;
    }
    return values;
}

// Summarises neighbouring rows of log.csv for index.html. The arrays `sum` and `n` hold one element for each of the
// nine columns from loss to val_loss. The loss of a skipped step is left out of low, high, sum and n.
struct LogPart {
    int64_t first;   // the first row's step
    int64_t last;    // the last row's step
    int64_t skipped; // how many of these steps were skipped, because the guard found them bad
    double low;      // the lowest loss; infinite: there is no loss
    double high;     // the highest loss; -infinite: there is no loss
    double seconds;  // the length of the run when the last of these steps was done
    double copies;   // the share of copies in the last grid that was drawn after one of these steps; NaN: there is none
    double sum[9];   // the sum of a column's values
    int n[9];        // how many values `sum` has added up in this column

    // Adds the rows of `next`, which follow the rows of this part.
    void join(const LogPart& next) {
        last = next.last;
        skipped += next.skipped;
        low = std::min(low, next.low);
        high = std::max(high, next.high);
        seconds = next.seconds;
        if (!std::isnan(next.copies)) copies = next.copies;
        for (int k = 0; k < 9; k++) {
            sum[k] += next.sum[k];
            n[k] += next.n[k];
        }
    }
};

// Summarises a log of any length in fewer than MAX_PARTS parts of equally many rows; only the last part may hold fewer.
// When there are MAX_PARTS, each pair of neighbours is joined into one.
struct LogSummary {
    static constexpr size_t MAX_PARTS = 4096;
    std::vector<LogPart> parts;
    int64_t rows = 1; // how many rows a part summarises; this number is doubled when parts are joined
    Guard guard{};    // the run's guard after the newest row; add_read computes it again, since rows do not hold it
    int skipped = 0;  // how many bad rows add_read has added since the last good row (add leaves it as it is)
    int most_skipped = Config{}.max_bad_steps; // after this many bad steps in a row, a run ends
    bool skip_outliers = true;                 // see `healthy`
    double mean = 0;    // the mean loss over about the latest tenth of the steps, at most about 50 steps
    double seconds = 0; // the length of the run when the last row's step was done
    // Both functions add the next row of the log. add_read is for rows that are read from log.csv: it finds out by
    // `guard` whether the row's step was skipped.
    void add(const std::string& row, bool is_skipped);
    void add_read(const std::string& row);
};

// Returns a LogPart of a single row. seconds: the length of the run when the row's step was done.
static LogPart part_of_row(const LogValues& values, double seconds, bool skipped) {
    const int64_t step = (int64_t)values[COLUMN_STEP];
    LogPart part{step, step, skipped, INFINITY, -INFINITY, seconds, values[COLUMN_COPIES], {}, {}};
    for (int k = 0; k < 9; k++) {
        const double value = values[COLUMN_LOSS + k];
        const bool is_counted = k > 0 || !skipped; // a skipped step's loss is left out
        if (!is_counted || !std::isfinite(value)) continue;
        part.sum[k] = value;
        part.n[k] = 1;
    }
    if (part.n[0]) {
        part.low = values[COLUMN_LOSS];
        part.high = values[COLUMN_LOSS];
    }
    return part;
}

// Adds a row, which must be the next row of the log.
void LogSummary::add(const std::string& row, bool is_skipped) {
    const LogValues values = parse_row(row);
    const double loss = values[COLUMN_LOSS];
    const double ms = values[COLUMN_MS];
    const double logged = values[COLUMN_SECONDS];
    // Rows of older programs have no seconds. Then the time of the step is added.
    if (logged >= seconds && logged < BIG) seconds = logged;
    else if (ms > 0 && ms < BIG) seconds += ms / 1000;

    const LogPart part = part_of_row(values, seconds, is_skipped);
    // The newest loss of a healthy step has a share of 10 / (guard.n + 9) in the mean, which then describes about the
    // latest tenth of the losses; but at least 0.02, so about the latest fifty. The log's first loss is the whole mean:
    // a run that is resumed in another folder has no earlier ones.
    const double share = mean == 0 ? 1 : std::max(10 / (guard.n + 9), 0.02);
    if (part.n[0] && std::fabs(loss) < 1e9) mean += (loss - mean) * share;

    // The row is added to the last LogPart if that part still has room. Otherwise the row becomes a new part.
    const bool fits = !parts.empty() && parts.back().last - parts.back().first + 1 < rows;
    if (fits) return parts.back().join(part);
    parts.push_back(part);
    if (parts.size() < MAX_PARTS) return;
    for (size_t i = 0; i < MAX_PARTS / 2; i++) {
        parts[i] = parts[2 * i];
        parts[i].join(parts[2 * i + 1]);
    }
    parts.resize(MAX_PARTS / 2);
    rows *= 2;
}

void LogSummary::add_read(const std::string& row) {
    const LogValues values = parse_row(row);
    // The run's guard judged the step by the same rule. But a resumed run may have started its guard anew
    // (compare_with_checkpoint), which rows do not say. A run ends after most_skipped bad steps in a row. So if one
    // more row follows these, the guard was started anew.
    if (skipped == most_skipped) guard = Guard{};
    const bool is_skipped = !healthy(&guard, values[COLUMN_LOSS], values[COLUMN_GRAD_NORM], skipped, skip_outliers);
    skipped = is_skipped ? skipped + 1 : 0;
    add(row, is_skipped);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- what a run holds

// What unet/run/page.h needs to write index.html, besides the other members of Run.
struct Page {
    std::string about{}; // a text that describes the model, the machine and the data
    int64_t started = 0; // when this process began to train, in seconds since 1970
    double interval = 0; // the seconds from one writing of the page to the next
    double due = 0;      // when the page is to be written again, in seconds, as now() returns them
};

// Times are in seconds, as now() returns them. Steps are counted from 1: after step 7, state.step is 7.
struct Run {
    // What is trained.
    Config config;
    Trainer trainer;
    Dataset val;       // the images of --val_data_file; without them val.count is 0
    Folder folder;     // the output folder; only rank 0 opens it
    Sampler sampler{}; // draws the grids

    // Progress. A step is issued when the host has given its work to the device. Up to STEPS_AHEAD steps later the host
    // fetches the results (collect_steps); then the step is logged.
    int64_t first_step = 0; // the step that this process went on from; 0: the run is new
    int64_t issued = 0;     // the newest issued step
    StepState state{};      // the results of the newest logged step
    double val_loss = NAN;  // the validation loss after that step; NaN: it was not measured
    int stop = 0;           // the signal that ends the run; all ranks agreed on it; 0: no signal came

    // Checkpoints and snapshots of the averages. Updates are the steps that were not skipped.
    int64_t saved_step = 0;       // the step of the newest checkpoint; 0: there is none
    std::string saved{};          // the path of that checkpoint
    std::string proven{};         // the path of the newest checkpoint that is known to be good (prove_checkpoint)
    int64_t saved_updates = 0;    // how many updates had been done when that checkpoint was written
    int64_t snapshot_step = 0;    // the step of the newest snapshot or, before there is one, the step resumed from
    int64_t snapshot_updates = 0; // how many updates had been done when that snapshot was written
    double best_loss = INFINITY;  // at rank 0: the validation loss of best.bin; infinite: unknown, or no best.bin

    // The log, the page and the line on the terminal.
    int log_file = -1;               // the file descriptor of log.csv
    LogSummary summary{};            // a summary of log.csv, from which index.html draws its curves
    Page page{};                     // what else the page needs
    std::string new_rows{};          // rows that log.csv still lacks
    double status_shown = -INFINITY; // when the latest status line was printed

    // The clock.
    double seconds = 0;     // the time that this process has spent in steps
    double steps_began = 0; // the start of the oldest step that is issued but not logged yet
    double began = 0;       // now() - began is the length of the run, without the pauses before it was resumed
    double per_step = 0;    // the seconds that a step takes: a mean over recent steps; 0: not known yet
    double grid_took = 0;   // the seconds that the newest grid took; 0: none was drawn yet
};

// ---------------------------------------------------------------------------------------------------------------------
// --- the log and the status line

// With --keep_best, this is a hard link to (or a copy of) the checkpoint of the lowest validation loss, whose content
// stays when its file model_STEP.bin is removed.
constexpr char BEST[] = "best.bin";

// Returns whether `name` is a name that a run gives to its own files.
static bool may_be_of_run(const std::string& name) {
    for (const char* one_of_its : {"index.html", "log.csv", "loss.png", BEST, ".lock"}) // train_unet.py writes loss.png
        if (name == one_of_its) return true;
    const bool has_step = step_in_name(name, "model_", ".bin") >= 0 || step_in_name(name, "ema_", ".bin") >= 0 ||
                          step_in_name(name, "samples_", ".png") >= 0;
    return has_step;
}

// Returns whether the folder holds a run, and `name` is a name that the run gives to its own files. Nothing else may
// write a file of such a name there: the run would replace it, or read it as its own.
static bool is_name_of_run(const Folder& folder, const std::string& name) {
    const bool holds_run = folder.has("log.csv") || !folder.list().empty();
    return holds_run && may_be_of_run(name);
}

constexpr char NAME_OF_RUN[] = "is a name for files of the run in that folder; choose another one";

// Opens log.csv at rank 0. A resumed run does the steps after its checkpoint again, so their rows are removed. The rows
// that stay are added to run->summary.
static void open_log(Run* run) {
    if (world.rank) return;
    run->summary.most_skipped = run->config.most_bad_steps();
    run->summary.skip_outliers = run->trainer.adamw.skip_outliers;
    std::string kept = std::string(LOG_COLUMNS) + "\n";
    std::istringstream old(read_text(run->folder, "log.csv"));
    std::string row;
    while (std::getline(old, row) && !old.eof()) { // a last row without a line break was cut short, and is ignored
        const double step = parse_row(row)[COLUMN_STEP];
        const bool belongs = step > 0 && step <= (double)run->first_step; // false for the line of column names (step 0)
        if (!belongs) continue;
        run->summary.add_read(row);
        const int64_t missing = COLUMN_COPIES - std::ranges::count(row, ','); // columns that an older program lacked
        kept += row + std::string(std::max<int64_t>(missing, 0), ',') + "\n";
    }
    // The new log replaces the old one as a whole, so a crash at this moment loses nothing.
    const std::string path = run->folder.name("log.csv");
    const std::string failure = try_write_file(run->folder, "log.csv", kept);
    must(failure.empty(), path, failure);
    // O_NOFOLLOW: if somebody has put a link in the place of log.csv meanwhile, it is not followed.
    run->log_file = openat(run->folder.descriptor, "log.csv", O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
    const bool at_its_end = run->log_file >= 0 && lseek(run->log_file, 0, SEEK_END) >= 0;
    if (!at_its_end) die("%s: can't be opened (%s)", path.c_str(), strerror(errno));
}

// Returns the command that goes on with a run. from: a checkpoint's path, or "latest".
static std::string resume_command(const Config& c, const std::string& from) {
    return "./train_unet --resume_checkpoint " + shell_word(from) + " --output_dir " + shell_word(c.output_dir);
}

// Returns a text that tells the user which saved step the run can go on from if it ends now.
static std::string saved_so_far(const Run& run) {
    if (!run.saved_step) return run.state.updates ? "no checkpoint was written yet" : "no good step was there to save";
    return text("saved is step %ld; ", run.saved_step) + resume_command(run.config, run.saved) + " goes on from there";
}

// Writes the rows that log.csv lacks.
static void write_log(Run* run) {
    const std::string name = run->folder.name("log.csv");
    if (!write_all(run->log_file, name, run->new_rows.data(), run->new_rows.size()))
        die("%s: can't be written (%s); stopped after step %ld; %s", name.c_str(), strerror(errno), run->state.step,
            saved_so_far(*run).c_str());
    run->new_rows.clear();
}

// Adds the step in run->state to the log. ms: the time that the step took. val: the validation loss after the step, or
// NaN. seconds: the length of the run. Each of the columns loss_q0 to loss_q3 is the mean loss in one quarter of the
// noise levels, empty if no sample of the step lies there. The last column is empty until log_copies fills it.
static void log_step(Run* run, double ms, double val, double seconds) {
    const StepState& s = run->state;
    // A float that is written with nine digits can be read back exactly.
    std::string row = text("%ld,%.9g,%.9g,%.9g,%.3f", s.step, s.loss, s.lr, s.grad_norm, ms);
    for (int q = 0; q < 4; q++) row += s.count_q[q] ? text(",%.9g", s.loss_q[q]) : ",";
    row += std::isnan(val) ? "," : text(",%.9g", val);
    row += text(",%.3f,", seconds);
    if (!world.rank) run->new_rows += row + "\n";
    run->summary.guard = s.guard;
    run->summary.add(row, !s.ok);
}

// Adds the share of copies in a grid to the row of the newest step, which ends log.csv. A single call writes over the
// row's line break, so the row is whole before and after it.
static void log_copies(Run* run, double share) {
    run->summary.parts.back().copies = share;
    if (lseek(run->log_file, -1, SEEK_END) < 0)
        die("%s: can't be written (%s)", run->folder.name("log.csv").c_str(), strerror(errno));
    run->new_rows = text("%.9g\n", share);
    write_log(run);
}

// Returns how many grids a run draws from a step to its end: one after each --sample_interval steps, and one at the
// end.
static int64_t grids_from(const Config& c, int64_t step) {
    if (!c.sample_interval) return 0;
    return (c.max_steps + c.sample_interval - 1) / c.sample_interval - (step - 1) / c.sample_interval;
}

// Returns how many seconds a grid takes. Before the first one this is estimated: a forward pass of an image is a third
// of its training step, and guidance may take two of them.
static double grid_seconds(const Run& run) {
    const Config& c = run.config;
    if (run.grid_took > 0) return run.grid_took;
    const double calls = (double)run.sampler.plan.steps.size() * (c.guided() ? 2 : 1);
    return c.sample_interval ? c.num_samples * calls * run.per_step / c.batch_size / 3 : 0;
}

// Returns the whole status line. val: a validation loss, or NaN. eta: the seconds until the run ends.
static std::string status_line(const Run& run, double val, double eta) {
    const Config& c = run.config;
    const StepState& s = run.state;
    // These speeds are computed from the mean time of recent steps.
    const double ms = run.per_step * 1e3;
    const double images_per_s = c.batch_size / run.per_step;
    // A backward pass costs about as much as two forward passes. So a step costs about as much as three forward passes.
    const double gflop_per_s = 3 * run.trainer.net.flops * c.batch_size / run.per_step / 1e9;
    std::string line = text("step %ld/%ld | loss %.4f (mean %.4f)", s.step, c.max_steps, s.loss, run.summary.mean);
    line += text(" | lr %.2e | norm %.3f | %.1f ms", s.lr, s.grad_norm, ms);
    line += text(" | %.1f images/s | %.0f GFLOP/s | ETA %s", images_per_s, gflop_per_s, duration(eta).c_str());
    if (!std::isnan(val)) line += text(" | val %.4f", val);
    if (s.bad_total) line += text(" | skipped %ld", s.bad_total);
    return line;
}

// Removes parts of a status line, the least important first, until it fits into `columns` columns; 0: there is no
// terminal.
static std::string shorten_status(std::string line, size_t columns) {
    // A part is found by a word in it, and ends at the next " | ".
    for (const char* word : {"GFLOP", "norm", "lr", "images", " ms", "skipped", "val", "ETA"}) {
        if (!columns || line.size() < columns) break;
        const size_t found = line.find(word);
        if (found == std::string::npos) continue;
        // The part is erased with the separator before it.
        const size_t begin = line.rfind(" | ", found);
        const size_t end = line.find(" | ", found);
        line.erase(begin, end - begin);
    }
    return line;
}

// Prints the status line. val: a validation loss, or NaN.
static void print_step(Run* run, double val) {
    const int64_t step = run->state.step;
    const double of_grids = grid_seconds(*run) * (double)grids_from(run->config, step);
    const double eta = run->per_step * (double)(run->config.max_steps - step) + of_grids;
    // On a terminal the next status line replaces this one. In a file or a pipe all status lines stay, one a line.
    const size_t columns = (size_t)terminal_columns();
    show_status(shorten_status(status_line(*run, val, eta), columns));
    run->status_shown = now();
}
