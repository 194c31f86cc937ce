// begin_end.h - how a run begins and ends.
#pragma once
#include "../diffusion/pictures.h"
#include "checkpoint.h"

// ---------------------------------------------------------------------------------------------------------------------
// --- how a run begins: validation data, conditions of grids, its folder

// Opens --val_data_file and --val_cond_file, and checks that they fit the model. Without them the data set is empty,
// and the run measures no validation loss. data: the training data.
static Dataset open_validation_data(const Config& c, const Dataset& data) {
    if (c.val_data_file.empty()) return Dataset{};
    Dataset val = open_dataset(c.val_data_file);
    const bool reads_pictures = c.cond_channels && c.picture_kind == PictureKind::FILE;
    if (!c.val_cond_file.empty() && !reads_pictures)
        die("--val_cond_file %s: is not read: this model is not conditioned on pictures, or --cond makes them",
            c.val_cond_file.c_str());
    open_pictures(&val, "val_cond_file", c.val_cond_file);
    if (c.class_cond) take_class_names(&val, data.class_names, data.path);
    check_data(c, val, "val_data_file", "val_cond_file", "");
    return val;
}

// Returns the images to train on, and those whose loss is logged. data: all images of --data_file.
static std::pair<Dataset, Dataset> training_and_validation_data(const Config& c, const Dataset& data) {
    if (c.val_fraction > 0) return hold_out(data, c.val_fraction);
    return {data, open_validation_data(c, data)};
}

// Without --values, the images of a run's grids are conditioned on the numbers of images that are spread over d: the
// validation data or, without it, the training data.
static void take_values_of_data(const Config& c, Sampler* s, const Dataset& d) {
    if (!s->value_rows.empty()) return;
    const int64_t rows = std::min<int64_t>(d.count, c.num_samples);
    for (int64_t i = 0; i < rows && c.cond_dim; i++) {
        const auto row = d.values.begin() + spread(i, rows, d.count) * c.cond_dim;
        s->value_rows.insert(s->value_rows.end(), row, row + c.cond_dim);
    }
}

// With --cond_channels, the images of a run's grids are conditioned on the pictures of images that are spread over d,
// or with --cond on pictures that are made of these images, and on their labels.
static void take_pictures_of_data(const Config& c, Sampler* s, const Dataset& d) {
    if (!c.cond_channels) return;
    const char* const flag = c.val_cond_file.empty() ? "cond_file" : "val_cond_file";
    // truth holds the images that these pictures belong to. A grid shows them beside the samples (beside_pictures).
    const int n = c.num_samples;
    s->truth = some_images(d, c.val_data_file.empty() ? "data_file" : "val_data_file", c.in_channels, n, true);
    if (c.picture_kind != PictureKind::FILE) s->pictures = made_pictures(c, d, n, {}, true);
    else s->pictures = some_images(*d.cond, flag, c.cond_channels, n, true);
    const int64_t shown = std::min<int64_t>(d.count, n);
    for (int64_t i = 0; i < shown && c.class_cond; i++) s->own_labels.push_back(d.labels[spread(i, shown, d.count)]);
}

// Rank 0 calls this to prepare the output folder. From now on only this run may write into this folder.
static void take_folder(Run* run, const std::string& resume) {
    const Config& c = run->config;
    // The lock is held until the program ends, so that no other run writes here.
    if (run->folder.descriptor < 0) run->folder = make_folder(c.output_dir);
    const Folder& folder = run->folder;
    lock_folder(folder, true);
    check_output_dir(c, folder, resume, run->first_step); // again: before the lock, another run could begin here
    // Remove the files that a killed process left unfinished.
    folder.remove_leftovers({"model_", "samples_", "log.csv.", "index.html.", "ema_", "best.bin."});
    leave_later_snapshots(folder, run->first_step);
}

// Begins a run: fills the weights and opens the files that the run writes. data, resume, start: as in train. Returns
// false if all steps were done before.
static bool begin_run(Run* run, const Dataset& data, const std::string& resume, const ModelFile& start) {
    const Config& c = run->config;
    const Dataset& val = run->val;
    Trainer& tr = run->trainer;
    run->sampler = make_sampler(c, tr.net.B);
    take_values_of_data(c, &run->sampler, val.count ? val : data);
    take_pictures_of_data(c, &run->sampler, val.count ? val : data);
    print_start(c, tr, data);
    if (resume.empty()) start_weights(&tr, start);
    else restore(run, start);
    cast_params(tr.copy, tr.params, tr.net.flat_size); // with bf16, convolutions read this copy of the weights
    if (run->state.step >= c.max_steps) {
        const int64_t more = std::min<int64_t>(2 * run->state.step, 2000000000);
        tell(text("nothing to do: step %ld of %ld is reached; ", run->state.step, c.max_steps) +
             resume_command(c, resume) + text(" --max_steps %ld goes on", more));
        return false;
    }
    if (!resume.empty()) compare_with_checkpoint(run, start);
    // From here on the run writes into its folder.
    if (!world.rank) take_folder(run, resume);
    open_log(run);
    take_best_loss(run);
    begin_page(run);
    listen_to_signals();
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- how a run ends

// Writes the last checkpoint and snapshot, if they do not exist yet. Unlike run_step, it also saves if the newest steps
// were skipped: no older checkpoint is removed before a good step has followed (prove_checkpoint).
static void save_at_the_end(Run* run) {
    const int64_t updates = run->state.updates;
    // The snapshot comes first. If the process is killed between the two, the resumed run goes on from an earlier
    // checkpoint, and writes the snapshot again.
    if (run->config.ema_snapshots && run->snapshot_updates < updates) save_snapshot(run);
    if (run->saved_updates < updates) save_checkpoint(run);
}

// Returns why an image could not be read; "": all images could be read.
static std::string data_error(const Run& run) { return run.trainer.data.error + run.val.error; }

// Ends a run that was stopped by a signal, or by data that cannot be read.
static void finish_stopped(Run* run) {
    // Data that can't be read is an error, and a signal is not an error. In both cases the message says what is saved.
    const int64_t step = run->state.step;
    const std::string saved = saved_so_far(*run);
    const std::string error = data_error(*run);
    if (!error.empty()) die("%s; stopped after step %ld; %s", error.c_str(), step, saved.c_str());
    const std::string end = text("stopped by %s after step %ld; ", STOP_SIGNALS.at(run->stop), step) + saved;
    write_page(run, "stopped", end);
    tell(end);
}

// Ends a run that has done all its steps.
static void finish_complete(Run* run) {
    const Config& c = run->config;
    const StepState& s = run->state;
    if (c.sample_interval) save_grid(run);
    if (run->stop) return finish_stopped(run); // a signal came while the grid was drawn
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    const double ms = run->seconds / (double)(s.step - run->first_step) * 1e3;
    const double peak_mib = usage.ru_maxrss / 1024.0; // Linux gives it in KiB
    tell(text("done: %ld steps, %.1f ms a step, peak memory %.0f MiB; open ", s.step, ms, peak_mib) + c.output_dir +
         "/index.html");
    const bool takes_more = c.cond_channels || c.cond_dim; // pictures or numbers, which the command would have to name
    if (!takes_more)
        tell("more images: ./train_unet --sample 64 --init " + shell_word(run->saved) + " --output samples_more.png");
}
