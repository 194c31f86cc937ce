// prepare.h - --prepare: what is known of a data file before a run.
#pragma once
#include "../trainer.h"

// --- a folder of pictures: its data file lies beside it, PICTURES.bin beside PICTURES

static std::string data_file_beside(const std::string& folder) {
    std::string path = folder;
    while (path.ends_with('/')) path.pop_back();
    const std::string name = std::filesystem::path(path).filename().string();
    // A folder such as "." has no name to which .bin could be added, so its real name is looked up.
    const bool is_relative = name.empty() || name == "." || name == "..";
    std::error_code none;
    if (is_relative) path = std::filesystem::canonical(folder, none).string();
    if (path.empty() || path == "/")
        die("--data_dir %s: has no folder in which its data file could lie; name another", folder.c_str());
    return path + ".bin";
}

// Returns whether a data file exists, has the model's size and channels, and is not older than the folder's last
// change. A file that --data_dir can't have made ends the program, since it would be replaced.
static bool is_up_to_date(const std::string& path, const Config& c, int64_t changed) {
    if (!exists(path)) return false;
    InputFile file;
    file.open(path, "--data_dir would replace it: move it away");
    const int* s = file.header.slot;
    const bool holds_pictures = s[SLOT_MAGIC] == DATA_MAGIC && s[DATA_SLOT_BYTES] == 1;
    struct stat st = {};
    must(holds_pictures && !fstat(file.file, &st), path,
         "is no file that --data_dir made, and it would be replaced: move it away, or name it as --data_file");
    close(file.file);
    const bool same_size = s[DATA_SLOT_HEIGHT] == c.H && s[DATA_SLOT_WIDTH] == c.W;
    const bool fits = same_size && s[DATA_SLOT_CHANNELS] == c.in_channels;
    const bool is_kept = fits && changed <= nanoseconds(st.st_mtim);
    must(is_kept || s[DATA_SLOT_VALUES] == 0, path,
         "holds numbers, which --data_dir can't make, and it would be replaced: move it away, "
         "or name it as --data_file");
    return is_kept;
}

// Returns the Python that runs prepare_data.py: that of .venv in the program's folder, which `make python` makes, or
// python3.
static std::string preparing_python(const std::string& own_folder) {
    const std::string own = own_folder + "/.venv/bin/python";
    return exists(own) ? own : "python3";
}

// Returns the words of the command that makes a data file of --data_dir. program: the path of prepare_data.py.
static std::vector<std::string> prepare_command(const Config& c, const std::string& python, const std::string& program,
                                                const std::string& file) {
    const std::string size = size_text(c.H, c.W);
    const std::string channels = std::to_string(c.in_channels);
    return {python, program,        "--data_dir", c.data_dir,   "--output_name",
            file,   "--image_size", size,         "--channels", channels};
}

// Returns the command of prepare_command as one line that a user can type.
static std::string prepare_command_line(const Config& c, const std::string& python, const std::string& file) {
    std::string line = "`";
    for (const std::string& word : prepare_command(c, python, "prepare_data.py", file)) {
        if (line.size() > 1) line += ' ';
        line += shell_word(word);
    }
    return line + '`';
}

// Makes the data file of the pictures in --data_dir, unless the file is up to date.
static void prepare_folder(const Config& c, const std::string& file) {
    const std::string flag = "--data_dir " + c.data_dir;
    struct stat st;
    if (stat(c.data_dir.c_str(), &st)) die("%s: can't be read (%s)", flag.c_str(), strerror(errno));
    must(S_ISDIR(st.st_mode), flag, "is no folder; --data_file takes a file");
    must(c.in_channels == 1 || c.in_channels == 3, flag,
         text("pictures have 1 channel or 3, and the model takes %d", c.in_channels));
    const int64_t changed = last_change(c.data_dir);
    if (is_up_to_date(file, c, changed)) {
        print_line(file + ": is up to date with " + c.data_dir);
        return;
    }

    // prepare_data.py lies beside this program.
    std::error_code none;
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", none);
    const std::string own_folder = self.parent_path().string();
    const std::string python = preparing_python(own_folder);
    const std::string program = own_folder + "/prepare_data.py";
    const std::string by_hand = prepare_command_line(c, python, file);
    must(exists(program), flag, program + " is not there, which prepares it; run " + by_hand + " where it is");
    const int code = run_child(prepare_command(c, python, program, file));
    const std::string why = python == "python3" ? "there is no python3 in PATH" : python + " can't be run";
    must(code != CANT_RUN, flag, why + ", which prepares it; run " + by_hand + " where there is one");
    must(code == 0, flag, "was not prepared, for the reason above; once that is mended, run this again, or " + by_hand);

    // The file gets the time of the folder's last change, which was read before the file was made. So if a picture is
    // changed meanwhile, the next run makes the file again.
    constexpr int64_t SECOND = 1000000000; // in nanoseconds
    const struct timespec times[2] = {{0, UTIME_OMIT}, {changed / SECOND, changed % SECOND}};
    utimensat(AT_FDCWD, file.c_str(), times, 0);
    print_line(file + ": prepared from " + c.data_dir);
}

// With --data_dir: sets --data_file to the file that is made of this folder of pictures. Rank 0 makes it, and the other
// ranks wait. where: what an error message begins with.
static void take_data_dir(Config* c, const std::string& where) {
    if (c->data_dir.empty()) return;
    // parse_model computes the size that the pictures get. Only an error in --image_size matters here.
    const std::string error = parse_model(c);
    if (error.starts_with("--image_size")) refuse(where + error);
    const std::string file = data_file_beside(c->data_dir);
    if (!world.rank) prepare_folder(*c, file);
    broadcast_host("the preparation of --data_dir", "");
    // From here on, the settings are as if the user had given --data_file and not --data_dir.
    c->data_file = file;
    c->on_command_line.insert("data_file");
    c->data_dir = "";
    c->on_command_line.erase("data_dir");
}
