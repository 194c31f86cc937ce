// checkpoint.h - checkpoints, snapshots and grids; a run's first weights.
#pragma once
#include "../host/png.h"
#include "copies.h"
#include "log.h"
#include "page.h"
#include "settings.h"

// ---------------------------------------------------------------------------------------------------------------------
// --- checkpoints, snapshots and grids

// Is called after a good step that follows the newest checkpoint: so its weights are good, and the oldest checkpoints
// may be removed. --keep_checkpoints: how many stay; 0: all.
static void prove_checkpoint(Run* run) {
    const size_t keep = run->config.keep_checkpoints;
    auto found = run->folder.list(); // sorted by step: the oldest checkpoint comes first
    // If best.bin is a link to a removed checkpoint, the content stays on the disk under the name best.bin.
    while (keep && found.size() > keep) {
        const auto oldest = found.begin();
        run->folder.remove(oldest->second);
        found.erase(oldest);
    }
    run->proven = run->saved;
}

// Ends a run whose weights are broken, and prints which checkpoint the user can go on from.
static void stop_run(Run* run, const std::string& why) {
    // The newest checkpoint is good if a good step followed it. Otherwise its weights may have been broken already.
    const std::string proven = resume_command(run->config, run->proven);
    const std::string earlier = run->proven.empty() ? "start again or from an earlier one" : "go on with " + proven;
    std::string last = "no checkpoint was written yet";
    if (!run->saved.empty()) last = "no step was good from " + run->saved + ", so move it away and " + earlier;
    if (!run->saved.empty() && run->saved == run->proven) last = proven + " goes on from the last good checkpoint";
    refuse(text("stopped at step %ld: ", run->state.step) + why + "; " + last +
           "; a lower --lr or a --warmup_steps may help");
}

// Writes a model file: the header, the arrays, `history`, a copy of Trainer::history or empty, and the names of the
// classes. slices: this rank's slice of each array (of the weights: the whole array Trainer::params), in the file's
// order. All ranks call it and gather the slices together; rank 0 writes. If the file can't be written, the run ends.
static void save_arrays(Run* run, const std::string& name, Header header, const std::vector<float*>& slices,
                        const std::vector<float>& history = {}) {
    const UNet& net = run->trainer.net;
    if (world.rank) { // this rank only sends its slices
        for (float* slice : slices) whole_array(run->trainer, slice);
        return;
    }
    const Dataset& data = run->trainer.data;
    std::string names;
    if (net.config.class_cond && std::ssize(data.class_names) == net.config.num_classes)
        names = class_names_block(data.class_names);
    AtomicFile file(run->folder, name); // the file appears under this name when it is complete (commit)
    uint32_t crc = 0;                   // the checksum of all bytes that were written so far
    auto write = [&](const void* data, size_t n) {
        crc = crc32(crc, data, n);
        file.write(data, n);
    };
    header.set(SLOT_PARAMS, net.num_params);
    header.slot[SLOT_CLASS_NAMES] = (int)names.size();
    write(header.slot, 1024); // SLOT_CRC is still 0: the file's checksum is computed with 0 in this slot

    std::vector<float> flat(net.flat_size); // an array in our layout
    std::vector<float> tensor;              // one parameter of the array, in PyTorch's layout
    for (float* slice : slices) {
        const float* whole = whole_array(run->trainer, slice);
        copy_to_host(flat.data(), whole, flat.size() * sizeof(float));
        for (const Param& p : net.params) {
            tensor.resize(p.size);
            permute_param(net.config, p, tensor.data(), &flat[p.offset], true);
            if (!all_finite(tensor.data(), p.size)) {
                file.discard();
                stop_run(run, "weights, their average or moments are not finite and were not saved");
            }
            write(tensor.data(), p.size * sizeof(float));
        }
    }
    if (!history.empty()) write(history.data(), history.size() * sizeof(float));
    write(names.data(), names.size());
    file.write_at(SLOT_CRC * 4, &crc, 4); // a slot has 4 bytes
    file.commit();
    if (file.error)
        die("%s: %s; stopped after step %ld; %s", run->folder.name(name).c_str(), file.failure.c_str(), run->state.step,
            saved_so_far(*run).c_str());
}

// Returns a checksum of all validation data: of the images and, with --val_cond_file, of the pictures; with
// --val_fraction also of the images' numbers. Of more than VAL_IMAGES the first ones were taken once, so the checksum
// says that they are drawn.
static uint32_t validation_crc(const Dataset& val) {
    uint32_t crc = val.header_crc;
    if (val.count > VAL_IMAGES) crc = crc32(crc, "drawn", 5);
    if (val.cond) crc = crc32(crc, &val.cond->header_crc, sizeof val.cond->header_crc);
    return crc32(crc, val.numbers.data(), val.numbers.size() * sizeof(int32_t));
}

// With --keep_best: if the checkpoint that was just written has the lowest validation loss so far, makes best.bin a
// link to it. After a signal, or if data could not be read, the loss may be unknown (NaN).
static void keep_best(Run* run, const std::string& checkpoint) {
    const bool is_better = run->val_loss < run->best_loss; // false if val_loss is NaN
    if (world.rank || !run->config.keep_best || !is_better) return;
    // A link costs no room on the disk. If it can't be made, the run goes on.
    const std::string failure = try_link_file(run->folder, checkpoint, BEST);
    if (failure.empty()) {
        run->best_loss = run->val_loss;
        return;
    }
    tell(run->folder.name(BEST) + ": " + failure + "; the run goes on, and " + checkpoint +
         " is the best checkpoint until now");
}

// Writes a checkpoint (docs/FORMATS.md). A run that is resumed from it computes the same bits as if it had not paused.
static void save_checkpoint(Run* run) {
    const Config& c = run->config;
    const StepState& s = run->state;
    const Trainer& tr = run->trainer;
    Header h = model_header(c, HAS_EMA | HAS_TRAINING, s.step);
    h.slot[SLOT_UPDATES] = (int)s.updates;
    h.slot[SLOT_BAD_TOTAL] = (int)s.bad_total;
    h.slot[SLOT_BAD_IN_ROW] = (int)s.bad_in_row;
    h.slot[SLOT_GUARD_KIND] = 1;
    h.set(SLOT_GUARD, s.guard);
    h.set(SLOT_PRESET, preset_checksum(c.preset, c.default_preset));
    // These slots identify the run's data: the training images, the validation images, and the pictures.
    h.set(SLOT_IMAGES, tr.data.file_count);
    h.set(SLOT_DATA_CRC, tr.data.header_crc);
    h.set(SLOT_VAL_CRC, validation_crc(run->val));
    if (tr.data.cond) h.set(SLOT_COND_CRC, tr.data.cond->header_crc);
    const std::string paths = c.data_file + '\0' + c.cond_file;
    memcpy(&h.slot[SLOT_PATH], paths.data(), paths.size());
    // The rates of the averages: the first, how many others there are, and these.
    h.set(SLOT_EMA_RATE, c.emas[0]);
    h.slot[SLOT_EMAS] = (int)c.emas.size() - 1;
    for (size_t k = 1; k < c.emas.size(); k++) h.set(SLOT_EMAS + (int)k, c.emas[k]);

    // Collect the arrays in the order of the format. In the file, the history of losses follows them.
    std::vector<float> history(tr.history ? (size_t)c.diffusion_steps * (HISTORY + 1) : 0);
    if (tr.history) copy_to_host(history.data(), tr.history, history.size() * sizeof(float));
    std::vector<float*> arrays = {tr.params, tr.emas[0], tr.m, tr.v};
    arrays.insert(arrays.end(), tr.emas.begin() + 1, tr.emas.end());
    // The name holds the step with at least seven digits. So, up to step 9,999,999, sorting by name sorts by step.
    const std::string name = text("model_%07ld.bin", s.step);
    save_arrays(run, name, h, arrays, history);
    // The checkpoint is written. The next step shows whether its weights are good (prove_checkpoint).
    run->saved_step = s.step;
    run->saved_updates = s.updates;
    run->saved = Folder{c.output_dir}.name(name);
    keep_best(run, name);
}

// Writes the two averages whose rates are in POWER_EMAS into a model file, in the places of the weights and of the
// first average. Of a run's snapshots, train_unet.py --ema_sigma_rel makes averages with other exponents. SLOT_STEP
// holds the number of updates here, since the averages depend on it.
static void save_snapshot(Run* run) {
    const Config& c = run->config;
    const Header h = model_header(c, HAS_EMA, run->state.updates);
    std::vector<float*> slices;
    // With --ema_snapshots, parse_ema_rate has added both numbers of POWER_EMAS to c.emas.
    for (float power : POWER_EMAS) {
        const size_t k = std::ranges::find(c.emas, power) - c.emas.begin();
        slices.push_back(run->trainer.emas[k]);
    }
    const std::string name = text("ema_%07ld.bin", run->state.step);
    save_arrays(run, name, h, slices);
    run->snapshot_step = run->state.step;
    run->snapshot_updates = run->state.updates;
}

// Returns the texts below n images in a grid: the numbers that each image is conditioned on, if there are any.
static std::vector<std::string> value_captions(const Config& c, const Sampler& s, int n) {
    std::vector<std::string> captions(c.cond_dim ? n : 0);
    for (int i = 0; i < std::ssize(captions); i++)
        for (const float v : values_of_image(c, s, i)) captions[i] += text("%.2g ", v);
    return captions;
}

// Returns what a grid shows of images (n, H, W, C) that are conditioned on pictures: the picture, the image, and the
// data's image that belongs to the picture, side by side, (n, H, 3 W, C). If a picture has fewer channels than an
// image, its first channel is shown.
static std::vector<float> beside_pictures(const Config& c, const Sampler& s, const std::vector<float>& images) {
    const int K = c.cond_channels;
    const int C = c.in_channels;
    const size_t row = (size_t)c.W * C;
    std::vector<float> shown;
    for (size_t at = 0; at < images.size(); at += row) {          // at: where a row of pixels of an image begins
        const size_t first_pixel = at / C % (s.truth.size() / C); // if there are too few pictures, they are used again
        for (int w = 0; w < c.W; w++)
            for (int channel = 0; channel < C; channel++)
                shown.push_back(s.pictures[(first_pixel + w) * K + (K >= C ? channel : 0)]);
        shown.insert(shown.end(), images.begin() + at, images.begin() + at + row);
        const auto truth = s.truth.begin() + at % s.truth.size();
        shown.insert(shown.end(), truth, truth + row);
    }
    return shown;
}

// Draws samples with the first average of the weights, writes them as a grid, and counts the copies among them. All
// grids of a run start from the same noise. If a signal comes meanwhile, the grid is given up.
static void save_grid(Run* run) {
    const Config& c = run->config;
    Trainer& tr = run->trainer;
    end_line();
    // Every rank needs the whole average, in the type that the network reads.
    const double start = now();
    const float* ema = whole_array(tr, tr.emas[0]);
    cast_params(tr.ema_copy, ema, tr.net.flat_size);
    const auto images = sample_images(&tr.net, Weights{ema, tr.ema_copy}, &run->sampler, c.num_samples);
    run->grid_took = now() - start;
    run->stop = any_rank("the end of a grid", stop_signal);
    if (run->stop || world.rank) return;
    const auto captions = value_captions(c, run->sampler, c.num_samples);
    const int parts = c.cond_channels ? 3 : 1;
    const std::vector<float> shown = c.cond_channels ? beside_pictures(c, run->sampler, images) : images;
    const std::string name = text("samples_%07ld.png", run->state.step);
    const std::string png = grid_png(shown, c.num_samples, c.H, parts * c.W, c.in_channels, captions, parts);
    const std::string failure = try_write_file(run->folder, name, png);
    if (!failure.empty()) tell(run->folder.name(name) + ": " + failure + "; the run goes on");
    const int copies = count_copies(&tr.data, images, c.random_flip);
    if (copies < 0) return;
    tell(text("step %ld: %d of %d samples are copies of training images", run->state.step, copies, c.num_samples));
    const std::lock_guard<PageTurn> turn(page_turn); // the page must not be written while the log changes
    log_copies(run, (double)copies / c.num_samples);
}

// Prints that a step was skipped. Ends the run after --max_bad_steps skipped steps in a row.
static void report_bad_step(Run* run) {
    const StepState& s = run->state;
    const double mean_loss = s.guard.n ? exp(s.guard.mean_loss) : NAN;
    const double mean_norm = s.guard.n ? exp(s.guard.mean_norm) : NAN;
    tell(text("step %ld: loss %g (mean %g), gradient norm %g (mean %g): not finite or far outside its spread, "
              "so this step is skipped (%ld in a row, %ld in all)",
              s.step, s.loss, mean_loss, s.grad_norm, mean_norm, s.bad_in_row, s.bad_total));
    if (s.bad_in_row < run->config.most_bad_steps()) return;
    write_log(run); // the last rows of log.csv show what happened
    stop_run(run, text("%ld steps in a row had to be skipped", s.bad_in_row));
}

// ---------------------------------------------------------------------------------------------------------------------
// --- a run's first weights: new, of a file, or of the run that is resumed

// Returns the configuration of a model file's network. It differs from c, that of a run which starts from the file, if
// the run has images of other channels, or other classes (adapt_to_data).
static Config config_in_file(Config c, const ModelFile& m) {
    c.in_channels = m.header.slot[SLOT_IN_CHANNELS];
    c.cond_channels = m.header.slot[SLOT_COND_CHANNELS];
    c.num_classes = m.header.slot[SLOT_NUM_CLASSES];
    return c;
}

// Returns the weights with which a run begins that starts from a model file m (--init): those in an array of the file.
// What has another shape there begins as in a new run: the weights of the first layer and all of the last one, if the
// images have other channels. So does the row of each class that the file does not know. Prints what was taken.
static std::vector<float> weights_of_init(const UNet& net, const ModelFile& m, int array, const Dataset& data) {
    const Config& c = net.config;
    const UNet there = build_unet(config_in_file(c, m));
    const std::vector<float> from = read_array(m, there, array);
    std::vector<float> flat = init_params(net);
    std::vector<int> rows = class_rows(m, data, c.num_classes);
    const int64_t new_classes = c.class_cond ? std::ranges::count(rows, -1) : 0;
    if (c.null_class()) rows.push_back(there.config.num_classes); // the row of "no class" is the last one in both
    for (size_t i = 0; i < net.params.size(); i++) {
        const Param& p = net.params[i];
        const float* const old = &from[there.params[i].offset];
        const bool is_of_classes = p.name == "label_emb.weight";
        const size_t row = p.size / p.shape[0];
        for (size_t k = 0; is_of_classes && k < rows.size(); k++)
            if (rows[k] >= 0) std::copy_n(old + rows[k] * row, row, &flat[p.offset + k * row]);
        if (!is_of_classes && p.shape == there.params[i].shape) std::copy_n(old, p.size, &flat[p.offset]);
    }

    std::string fresh; // what begins anew
    if (there.config.in_channels != c.in_channels) fresh = "the first and the last layer";
    if (new_classes) fresh += fresh.empty() ? "" : " and ";
    if (new_classes) fresh += text("%ld of %d classes", new_classes, c.num_classes);
    if (!fresh.empty()) fresh = " but those of " + fresh + ", which begin anew";
    print_line("started from " + m.path + ": all weights are taken" + fresh);
    return flat;
}

// Sets the weights of a new run. With --init they are read from that file, from its average unless --use_ema is False;
// otherwise they are random. The run's own averages are replaced at the first update (average_share is 1 then).
static void start_weights(Trainer* tr, const ModelFile& m) {
    const UNet& net = tr->net;
    const bool takes_average = m.has(HAS_EMA) && net.config.use_ema;
    const int array = takes_average ? m.ema_array(0) : 0;
    const std::vector<float> flat = m.size ? weights_of_init(net, m, array, tr->data) : init_params(net);
    copy_slice(tr->params, flat, slice_of(flat.size())); // every rank copies all weights
    for (float* ema : tr->emas) copy_slice(ema, flat, tr->own);
}

// Returns the number of the checkpoint's array from which the k-th average of a resumed run goes on: the average of the
// same rate, else the k-th average, else the weights (array 0). The run continues as if this were the average over all
// updates so far. --ema_snapshots needs an average of the same rate.
static int array_for_average(const Config& c, const ModelFile& m, int k) {
    const float rate = c.emas[k];
    // In the resumed run, --ema_rate may list the rates in another order than before.
    for (int i = 0; i < m.emas(); i++)
        if (m.ema_rate(i) == rate) return m.ema_array(i);
    const bool averages_whole_run = rate > 1; // a power function, which --ema_snapshots has added (POWER_EMAS)
    must(!averages_whole_run, text("--ema_snapshots %d", c.ema_snapshots),
         "averages the whole run, and " + m.path + " has kept no such average; leave it out");
    return k < m.emas() ? m.ema_array(k) : 0;
}

// Reads the losses at the end of a checkpoint that --schedule_sampler loss-second-moment remembers: for every timestep
// t HISTORY places for losses, and how many of them are filled.
static void restore_history(const Trainer& tr, const ModelFile& m) {
    std::vector<float> history(tr.history ? m.history() : 0); // empty if t is drawn uniformly, now or in the old run
    const size_t bytes = history.size() * sizeof(float);
    m.read(history.data(), bytes, m.size - m.header.slot[SLOT_CLASS_NAMES] - bytes);
    for (size_t i = 0; i < history.size(); i++) {
        const float value = history[i];
        const bool is_count = i % (HISTORY + 1) == HISTORY;
        const bool in_range = !is_count || (value >= 0 && value <= HISTORY);
        if (!std::isfinite(value) || !in_range)
            die("%s: its history of losses is damaged: use an earlier checkpoint", m.path.c_str());
    }
    if (bytes) copy_to_device(tr.history, history.data(), bytes);
}

// Compares the flags for which matters(flag) is true with a checkpoint's header h. Returns a text about the first one
// that has changed, or "". Flags that the checkpoint does not hold are not compared.
static std::string changed_flag(const Config& c, const Header& h, auto matters) {
    for (const Flag& f : FLAGS) {
        if (!f.slot || !matters(f) || !slot_is_used(h, f)) continue;
        Config then; // holds the checkpoint's value of this flag
        set_flag(&then, f, header_value(c, h, f));
        const std::string before = flag_value(then, f);
        const std::string now = flag_value(c, f);
        if (!same_value(f.name, now, before))
            return text("--%s %s: was %s before", f.name, now.c_str(), before.c_str());
    }
    return "";
}

// Returns whether a flag belongs to the objective, so that it changes what a loss means.
static bool is_of_objective(const Config& c, const Flag& f) {
    // sigma_small is for samples, but with --use_kl True it may also be a part of the loss.
    if (f.slot == SLOT_SIGMA_SMALL) return c.use_kl;
    // The stages of --objective ect, and so its losses, depend on the length of the run.
    if (f.slot == SLOT_MAX_STEPS) return c.objective == "ect";
    const bool is_of_ect = f.slot >= SLOT_ECT && f.slot < SLOT_ECT_END;
    return is_of_ect || (f.slot >= SLOT_DIFFUSION && f.slot < SLOT_PATCH_SIZE);
}

// Returns why the losses or gradients of a resumed run can't be compared with those before its checkpoint m: the flag
// or the data file that has changed. "": they can be compared.
static std::string changed_loss(const Config& c, const ModelFile& m, const Dataset& d) {
    const std::string flag = changed_flag(c, m.header, [&](const Flag& f) {
        const bool is_of_batch = f.slot == SLOT_SAMPLER || f.slot == SLOT_BATCH_SIZE || f.slot == SLOT_COND_NOISE;
        const bool is_of_training = f.free && f.slot != SLOT_SIGMA_SMALL;
        return is_of_training || is_of_batch || is_of_objective(c, f);
    });
    if (!flag.empty()) return flag;
    if (m.header.get<uint32_t>(SLOT_DATA_CRC) != d.header_crc)
        return text("--data_file %s: was another one before", d.path.c_str());
    if (d.cond && m.header.get<uint32_t>(SLOT_COND_CRC) != d.cond->header_crc)
        return text("--cond_file %s: was another one before", d.cond->path.c_str());
    return "";
}

// Returns the validation loss in log.csv's row of a step; infinite: there is none.
static double logged_val_loss(const Run& run, int64_t step) {
    std::istringstream rows(read_text(run.folder, "log.csv"));
    for (std::string row; std::getline(rows, row);) {
        const LogValues values = parse_row(row);
        const bool is_it = values[COLUMN_STEP] == (double)step && std::isfinite(values[COLUMN_VAL_LOSS]);
        if (is_it) return values[COLUMN_VAL_LOSS];
    }
    return INFINITY;
}

// Sets best_loss of a resumed run to the validation loss of best.bin. If it is unknown, or the objective or the
// validation data has changed since, it stays infinite, so that the next checkpoint becomes the best.
static void take_best_loss(Run* run) {
    const Config& c = run->config;
    if (world.rank || !c.keep_best || !run->folder.has(BEST)) return;
    InputFile best;
    best.open(run->folder.name(BEST), "move it away, for --keep_best would replace it");
    close(best.file);
    const Header& h = best.header;
    const bool is_checkpoint = h.slot[SLOT_MAGIC] == MODEL_MAGIC && h.slot[SLOT_CONTENTS] == (HAS_EMA | HAS_TRAINING);
    must(is_checkpoint, best.path, "is no checkpoint; move it away, for --keep_best would replace it");
    const int64_t step = h.get<int64_t>(SLOT_STEP);
    std::string why = changed_flag(c, h, [&](const Flag& f) { return is_of_objective(c, f); });
    if (why.empty() && h.get<uint32_t>(SLOT_VAL_CRC) != validation_crc(run->val))
        why = "the validation data has changed";
    if (why.empty()) run->best_loss = logged_val_loss(*run, step);
    if (why.empty() && std::isinf(run->best_loss)) why = text("log.csv has no validation loss of its step %ld", step);
    if (!why.empty()) print_line(best.path + ": " + why + ", so the next checkpoint becomes the best");
}

// If losses or gradient norms of a resumed run mean something else than before its checkpoint m, starts the guard anew.
// The old one could skip every step.
static void compare_with_checkpoint(Run* run, const ModelFile& m) {
    const Config& c = run->config;
    if (c.val_fraction > 0 && m.header.get<uint32_t>(SLOT_VAL_CRC) != validation_crc(run->val))
        print_line(
            text("--val_fraction %g: the images have changed, ", c.val_fraction) +
            "so others are held out than before, of which the steps before have seen some; a new run would not have");
    const std::string why = changed_loss(c, m, run->trainer.data);
    if (why.empty()) return;
    print_line(why + ", so the first 100 steps show anew which losses and gradient norms are usual");
    run->state.guard = Guard{};
    copy_to_device(run->trainer.state, &run->state, sizeof run->state);
}

// Gives a resumed run the state that is in its checkpoint.
static void restore(Run* run, const ModelFile& m) {
    const Config& c = run->config;
    Trainer& tr = run->trainer;
    run->state = m.state();
    const StepState& s = run->state;
    // Every rank reads all weights, but keeps only its own slices of the moments and of the averages.
    copy_slice(tr.params, read_array(m, tr.net, 0), slice_of(tr.net.flat_size));
    copy_slice(tr.m, read_array(m, tr.net, 2), tr.own);
    copy_slice(tr.v, read_array(m, tr.net, 3), tr.own);
    for (int k = 0; k < (int)c.emas.size(); k++) {
        const int array = array_for_average(c, m, k);
        copy_slice(tr.emas[k], read_array(m, tr.net, array), tr.own);
    }
    restore_history(tr, m);
    // This state is saved already, in the checkpoint.
    run->first_step = s.step;
    run->issued = s.step;
    run->saved_step = s.step;
    run->saved_updates = s.updates;
    run->saved = m.path;
    run->snapshot_step = s.step;
    run->snapshot_updates = s.updates;
    copy_to_device(tr.state, &s, sizeof s);
    // The probability of each t depends on rms_losses, which are computed from the history. 0: no new losses.
    if (tr.history) update_rms_losses(tr.rms_losses, tr.history, nullptr, nullptr, tr.state, c.diffusion_steps, 0);
    print_line("resumed from " + m.path +
               text(": step %ld of %ld, %ld updates, seed %ld", s.step, c.max_steps, s.updates, c.seed));
    // The images of a step begin at position step * B of the stream of images.
    const int B = c.batch_size;
    const int before = m.header.slot[SLOT_BATCH_SIZE];
    if (B != before)
        printf("--batch_size %d: was %d before; the order of the data goes by batches, "
               "so that image %ld of it comes next, not %ld\n",
               B, before, s.step * B, s.step * before);
}

// Returns whether a file may be replaced: it is empty, or of this program (samples, a grid, a run's page).
static bool may_be_replaced(const Folder& folder, const std::string& name) {
    // Samples are marked within these bytes: in the header of a data file, or by a text at the start of a PNG.
    std::string head(1024, 0);
    const int file = openat(folder.descriptor, name.c_str(), OPEN_TO_READ);
    const ssize_t size = read(file, head.data(), head.size()); // -1 if the file could not be opened
    close(file);
    if (size <= 0) return size == 0;
    if (name.ends_with(".html")) return head.starts_with(std::string(PAGE, 50));
    if (name.ends_with(".png")) return head.find(PNG_MARK) != std::string::npos;
    Header h;
    memcpy(h.slot, head.data(), sizeof h.slot);
    return h.slot[SLOT_MAGIC] == DATA_MAGIC && h.slot[DATA_SLOT_KIND] == SAMPLES;
}

// Ends the program if this run must not write into the output folder. A new run needs a folder that holds no run. A
// resumed run needs its own folder, without later checkpoints, or one that holds no run. resume: the path of the
// checkpoint that the run goes on from; "": the run is new. resume_step: its step.
static void check_output_dir(const Config& c, const Folder& output, const std::string& resume, int64_t resume_step) {
    int none = 0;
    struct stat st;
    for (const std::string& name : names_in(output, &none)) {
        const bool is_folder = !fstatat(output.descriptor, name.c_str(), &st, 0) && S_ISDIR(st.st_mode);
        must(!is_folder || !may_be_of_run(name), output.name(name),
             "is a folder, where the run would write a file; move it away");
        const bool is_seen = name == "index.html" || step_in_name(name, "samples_", ".png") >= 0; // what people look at
        must(!resume.empty() || !is_seen || may_be_replaced(output, name), output.name(name),
             "is no run's, and the run may replace it; move it away, or choose another --output_dir");
    }
    // A log without a checkpoint was left by a run that was killed early, and --resume_checkpoint auto starts anew
    // there. But best.bin alone is what is left of a run that a new one must not replace.
    const auto found = output.list();
    const bool has_checkpoint = !found.empty();
    const bool has_log = output.has("log.csv") && c.resume_checkpoint != "auto";
    if (!has_checkpoint && !has_log && !output.has(BEST)) return;

    // The folder holds a run. So the program must resume this run; it must not start a new run here.
    const int64_t newest_step = has_checkpoint ? found.rbegin()->first : 0;
    std::string what = ", but no checkpoint model_STEP.bin to continue; move its log.csv and best.bin away";
    if (has_checkpoint)
        what = text(" (up to step %ld); continue it with `", newest_step) + resume_command(c, "latest") + "`";
    must(!resume.empty(), c.output_dir, "already holds a run" + what + ", or choose another --output_dir");

    // The checkpoint that this run goes on from must lie in this folder.
    std::error_code error;
    const std::filesystem::path folder = std::filesystem::path(resume).parent_path() / ".";
    must(std::filesystem::equivalent(folder, c.output_dir + "/.", error), c.output_dir,
         "already holds a run, but " + resume + " is not part of it; choose another --output_dir");
    // The run would come to that step, too, and replace that checkpoint.
    must(newest_step <= resume_step, output.name(has_checkpoint ? found.rbegin()->second : ""),
         text("is called step %ld, which is later than step %ld of ", newest_step, resume_step) + resume +
             "; go on from that one with `" + resume_command(c, "latest") +
             "`, move it away, or choose another --output_dir");
}

// A run that goes on from an early checkpoint does later steps again, maybe with other flags. Post-hoc averages
// (--ema_sigma_rel) must not mix snapshots of both, so later ones are renamed.
static void leave_later_snapshots(const Folder& folder, int64_t first_step) {
    for (const auto& [step, name] : folder.list("ema_")) {
        if (step <= first_step) continue; // this snapshot is a part of this run
        const std::string new_name = name + ".left";
        if (renameat(folder.descriptor, name.c_str(), folder.descriptor, new_name.c_str()))
            die("%s: can't be renamed (%s); move it away", folder.name(name).c_str(), strerror(errno));
        print_line(folder.name(name) +
                   text(": is later than step %ld, where this run goes on; it is called ", first_step) + new_name +
                   " now");
    }
}

// Prints how the memory of the device is used, in GiB.
static void print_memory(const Config& c, const UNet& net, const MuonWork& muon) {
    const double GIB = 0x1p30;
    const double array = net.flat_size * sizeof(float) / GIB; // all parameters in fp32
    const double slice = slice_of(net.flat_size, 0, world.size).owned() * sizeof(float) / GIB;
    // If activations are bf16, there are copies of the weights and of their first average. With --precision fp8 there
    // are two more copies of the weights, with one byte for each weight.
    double copies = weights_have_copy() ? 2.0 * net.flat_size * act_bytes() / GIB : 0;
    if (c.precision == "fp8") copies += 2.0 * net.flat_size * bytes_of(Element::FP8) / GIB;

    // What the allocated memory is used for. `rest` is the memory that belongs to none of the other uses.
    const double all = device_bytes / GIB;
    const double weights = array + c.emas.size() * slice + copies;
    // There is a second array of gradients if those of several microbatches or ranks are added up (Trainer::sum).
    const bool adds_up = world.size > 1 || c.batch_size > c.micro();
    const double grads = adds_up ? 2 * array : array;
    double moments = 2 * slice;
    if (muon.X) moments += net.flat_size * act_bytes() / GIB; // only a GPU has this copy of Muon's momentum
    const double arena = net.arena_bytes / GIB;
    const double rest = all - weights - grads - moments - arena;
    printf("memory: %.2f GiB: weights and EMA %.2f, gradients %.2f, moments %.2f, "
           "activations of %d images at a time %.2f, workspace and batches %.2f\n",
           all, weights, grads, moments, net.B, arena, rest);
}

// --precision fp8: prints how much of the work is done in FP8.
static void print_fp8(const Config& c, const UNet& net) {
    if (c.precision != "fp8") return;
    int convs = 0, gradients = 0;
    double flops = 0; // operations in FP8, in a forward pass of one image
    for (const Layer& l : net.layers) {
        gradients += l.fp8_gradient;
        if (!l.fp8) continue;
        convs++;
        const Tensor& out = net.tensors[l.out];
        flops += 2.0 * out.H * out.W * (double)net.params[l.weight].size; // as in conv_flops
    }
    const double gflops = flops * c.micro() / convs * 1e-9; // GFLOP of an FP8 convolution for a microbatch (mean)
    printf("fp8: %d convolutions, %.0f %% of a forward pass, %.3g GFLOP each, and the input gradients of %d\n", convs,
           100 * flops / net.flops, gflops, gradients);
}

// Prints what is about to be trained, on which data, what it costs, and where to look.
static void print_start(const Config& c, const Trainer& tr, const Dataset& data) {
    const UNet& net = tr.net;
    printf("train_unet %s: preset %s on %s\n", Config::VERSION.c_str(), c.preset.c_str(), device_name().c_str());
    std::string given; // the flags of the command line, so that the output tells how to repeat the run
    for (const Flag& f : FLAGS)
        if (c.given(f.name)) given += std::string(" --") + f.name + " " + flag_value(c, f);
    if (!given.empty()) print_line("flags:" + given);
    // The model, the memory, the ranks, the data.
    printf("%s\n", describe(net).c_str());
    print_memory(c, net, tr.muon);
    print_fp8(c, net);
    if (world.size > 1)
        printf("processes: %d, which share a step's batch of %d, %d images at a time; "
               "each keeps its part of the moments and averages\n",
               world.size, c.batch_size, c.micro());
    // An image can't be verified if the file is longer than READ_AT_START and holds no checksum of each image.
    const bool verified = !data.image_crc.empty();
    const char* doubt = verified ? "" : " (not verified: more than 4 GiB, and no checksums of them)";
    const int64_t steps_an_epoch = (data.count + c.batch_size - 1) / c.batch_size;
    print_line("data: " + c.data_file + text(", %ld images%s", data.count, doubt) + held_out_words(data) +
               text(", %ld steps of %d an epoch", steps_an_epoch, c.batch_size));
    const int64_t epochs = c.max_steps * c.batch_size / data.count;
    if (epochs > MANY_EPOCHS)
        printf("each image is seen %ld times, so many samples will be copies; --max_steps %ld shows each %ld times\n",
               epochs, std::max<int64_t>(1, FEW_EPOCHS * data.count / c.batch_size), FEW_EPOCHS);
    if (!c.class_cond && !c.given("class_cond") && c.default_preset && data.labels.empty())
        printf("classes: none, because the data has no labels\n");
    std::string classes = text("classes: %d", c.num_classes);
    for (size_t k = 0; k < std::min<size_t>(data.class_names.size(), 10); k++) // the number is for --classes
        classes += text("%s%zu ", k ? ", " : ": ", k) + data.class_names[k];
    if (data.classes < c.num_classes) classes += text(", of which the data has %d", data.classes);
    if (c.class_cond)
        print_line(classes +
                   text("; --class_dropout %g; grids: --guidance_scale %g", c.class_dropout, c.guidance_scale));
    else if (data.classes && !c.given("class_cond"))
        printf("classes: the data has %d, which this model does not learn; --class_cond True does\n", data.classes);
    if (data.K && !c.cond_dim)
        printf("numbers: the data has %d an image, which this model does not learn; --cond_dim %d does\n", data.K,
               data.K);
    if (data.cond) print_line("condition: " + c.cond_file + text(", pictures of %d channels", c.cond_channels));
    const int C = c.in_channels;
    if (C != 1 && C != 3) printf("grids show the first of %d channels, in grey\n", C);
    if (c.sample_interval && !is_compared(data))
        printf("copies are not counted in grids, because the images have more than %zu MiB; "
               "dev/benchmarks/judge.py counts them\n",
               MOST_COMPARED >> 20);
    std::string cost = text("run: %ld steps", c.max_steps);
    if (c.sample_interval)
        cost += text(", a grid of %d samples every %d; the ETA counts both", c.num_samples, c.sample_interval);
    print_line(cost + "; open " + c.output_dir + "/index.html to watch it");
    fflush(stdout);
}
