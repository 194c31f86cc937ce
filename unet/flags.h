// Every flag and every preset, once, for both programs.
//
// config.h includes this file inside struct Config, where its macros make of each row a member with a default, and a
// row of FLAGS. common/flags.py parses the same lines. They are written so that they are Python, too, once // is #.
//
//   HEADING(name, title)                        a part of --help begins
//   FLAG(type, name, default, help)             a flag
//   FLAG(type, name, default, help, low, high)  a number from low to high
//   FLAG(type, name, default, help, WORDS(w))   one of several words, "a|b"
//   SAVED(slot, ...)                            a flag that model files keep, in this slot (docs/FORMATS.md)
//   FREE(slot, ...)                             the same, and it may change from run to run
//   OBJECTIVES(name, w)                         the next flags are for these objectives alone, "a|b"; "": for all
//   PRESET(name, flags[, NAME])                 what a preset sets; what it leaves out keeps its default
//   PRESETS_SHARE(NAME, flags[, NAME])          what several presets have in common
//   TEXT(NAME, text)                            a text that both programs know
//
// Of the types, pixels (64, or 48x64), ints, floats, and names or numbers (with commas) are text in C++, which parses
// them later.

// docs/CHANGELOG.md says what is new in it.
TEXT(VERSION, "1.0");
// The flags that --help lists. The others are listed by --help all.
TEXT(FIRST_FLAGS, "preset data_dir data_file image_size output_dir max_steps batch_size lr class_cond augment "
                  "resume_checkpoint init sample output num_gpus");
// What a run without a data file and without a preset learns.
TEXT(DEFAULT_DATA, "data/fashion32.bin");

HEADING(start, "Start");
FLAG(string, preset, "", "a set of flags to start from; any other flag overrides it",
     WORDS("quick32|quick64|photos32|photos32_wide|fashion32|emoji64|unet64|cifar10|adm|adm64|adm128|adm256|lsun256|"
           "adm64_256|adm128_512|latent32"));
FLAG(int, sample, 0, "draw this many images from --init FILE into --output, and stop", 0, 1e8);
SAVED(115, string, precision, "auto",
      "of activations; auto: bf16 on a GPU, else fp32; fp8: as auto, but most 3x3 products take 8-bit numbers",
      WORDS("auto|fp32|bf16|fp8"));
FLAG(int, device, 0, "which GPU, as CUDA counts them; CUDA_VISIBLE_DEVICES says which it counts", 0, 1000);
FLAG(string, num_gpus, "1", "GPUs of this machine, a process each, or all; torchrun, mpirun and srun do it, too");
FLAG(string, exchange, "auto", "between GPUs; auto: into each other's memory, if they can", WORDS("auto|nccl"));
FLAG(int, rank_timeout, 20, "seconds of silence after which a process is lost and the run ends", 5, 1e6);
FLAG(bool, use_fp16, false, "guided-diffusion's name for --precision: True bf16, False fp32");

HEADING(model, "Model");
FLAG(pixels, image_size, "64", "pixels: 64, or HxW such as 48x64 (default: the data file's)");
SAVED(8, int, in_channels, 3, "channels of an image (default: the data file's)", 1, 64);
SAVED(56, int, patch_size, 0, "the network sees squares of so many pixels a side as one pixel; 0: none", 0, 8);
SAVED(9, int, num_channels, 64, "channels of the first level, a multiple of 32", 32, 8192);
SAVED(10, int, num_res_blocks, 2, "residual blocks per level", 1, 32);
FLAG(floats, channel_mult, "", "channels of each level, as multiples of num_channels");
FLAG(ints, attention_resolutions, "16,8", "image heights at which there is attention; may be empty");
SAVED(11, int, num_heads, 4, "attention heads", 1, 1024);
SAVED(12, int, num_head_channels, -1, "channels per head instead of num_heads; -1: use num_heads", -1, 8192);
SAVED(13, int, num_heads_upsample, -1, "heads in the upward half; -1: num_heads", -1, 1024);
FREE(21, float, dropout, 0, "probability", 0, 0.99);
SAVED(14, bool, class_cond, false, "condition on the labels of the data");
SAVED(15, int, num_classes, 0, "classes (default: the data file's)", 0, 1e6);
SAVED(58, int, cond_dim, 0, "condition on so many numbers an image, which the data file holds; 0: on none", 0, 4096);
SAVED(50, float, class_dropout, 0, "probability of leaving out an image's class and numbers, for --guidance_scale", 0,
      0.99);
SAVED(60, int, cond_channels, 0, "condition on a picture of so many channels beside each image (default: cond_file's)",
      0, 64);
FLAG(string, cond, "",
     "make these pictures of the images: lowres:K (a coarse picture, K times smaller: super-resolution), gray "
     "(colouring), or mask (random parts left out: inpainting)");
FLAG(int, large_size, 0, "guided-diffusion's image_size of an upsampler, which small_size goes with", 0, 4096);
FLAG(int, small_size, 0, "guided-diffusion's cond lowres:K, where K is large_size / small_size", 0, 4096);
SAVED(114, float, cond_noise, 0, "with cond lowres: largest standard deviation of noise on the coarse picture", 0, 2);
FREE(61, float, cond_dropout, 0, "probability of leaving out an image's picture, for --guidance_scale", 0, 0.99);
SAVED(16, bool, learn_sigma, false, "twice the output channels, for a learned variance");
SAVED(17, bool, use_scale_shift_norm, false, "the embedding scales and shifts the second norm of a block");
SAVED(18, bool, resblock_updown, false, "residual blocks change the resolution");
SAVED(19, bool, conv_resample, true, "convolutions change the resolution; False: pooling, as in unet.cu");
SAVED(20, bool, use_new_attention_order, true, "how files order qkv's rows: q, k, v, then heads");
SAVED(40, int, max_period, 10000, "slowest period of the timestep embedding, in steps", 1, 1e8);
SAVED(59, float, augment, 0,
      "probability of each of EDM's changes to a training image, which the network is told: turned, scaled, stretched, "
      "shifted, upside down, mirrored; 0: none",
      0, 1);

HEADING(diffusion, "Diffusion");
SAVED(41, int, diffusion_steps, 1000, "T, steps of the forward process", 2, 100000);
SAVED(42, string, noise_schedule, "linear", "how beta grows with t", WORDS("linear|cosine"));
SAVED(45, bool, rescale_timesteps, false, "tell the network 1000 t / T instead of t");
SAVED(43, string, objective, "ddpm",
      "T steps (Ho et al. 2020), any sigma (Karras et al. 2022), a flow (Liu et al. 2022); ect tunes an edm or flow "
      "model into one that samples in one or two steps (Geng et al. 2024)",
      WORDS("ddpm|edm|flow|ect"));
SAVED(44, string, predict, "eps", "its output: the noise, x_0, or signal * noise - sigma * x_0", WORDS("eps|x0|v"));
FLAG(bool, predict_xstart, false, "guided-diffusion's name for --predict x0");
FREE(46, float, min_snr_gamma, 0, "weigh the loss by min(SNR, gamma), Hang et al. 2023; 0: don't", 0, 1e6);
FREE(47, float, vlb_weight, 1e-3, "with --learn_sigma: the variational bound's weight; 0: not learned", 0, 1000);
FLAG(bool, rescale_learned_sigmas, true, "guided-diffusion's --vlb_weight: True 1/1000, False 1/T");
FREE(48, bool, use_kl, false, "train on the variational bound alone");
FREE(49, bool, sigma_small, false, "the smaller of the two fixed variances, where none is learned");
OBJECTIVES(of_edm, "edm|ect");
SAVED(51, float, sigma_data, 0.5, "edm, ect: standard deviation of the data", 1e-3, 1e3);
FREE(52, float, P_mean, -1.2, "edm, ect: mean of ln(sigma) in training (default of ect: -1.1)", -20, 20);
FREE(53, float, P_std, 1.2, "edm, ect: its standard deviation (default of ect: 2)", 0, 20);
OBJECTIVES(of_flow, "flow");
FREE(54, float, t_mean, 0, "flow: mean of ln(t / (1 - t)) in training", -20, 20);
FREE(55, float, t_std, 0, "flow: its standard deviation; 0: t is uniform", 0, 20);
OBJECTIVES(of_ect, "ect");
SAVED(57, string, ect_frame, "edm", "ect: whose network it is (default: that of the --init file)", WORDS("edm|flow"));
SAVED(107, float, ect_q, 2, "ect: the teacher's sigma r, of the student's t: r / t = 1 - n(t) / q^a", 1.01, 1e6);
SAVED(108, float, ect_k, 8, "ect: n(t) = 1 + k sigmoid(-b t)", 0, 1000);
SAVED(109, float, ect_b, 1, "ect: see ect_k", 0, 1000);
SAVED(110, int, ect_d, 0, "ect: steps after which a, at first 1, grows by 1; 0: an eighth of max_steps", 0, 2e9);
SAVED(111, float, ect_c, 0, "ect: of the distance, sqrt(|difference|^2 + c^2) - c", 0, 1e6);
SAVED(112, string, ect_weight, "gap", "ect: 1 / (t - r), or snr: 1 / t^2 + 1 / sigma_data^2", WORDS("gap|snr"));
OBJECTIVES(of_all, "");

HEADING(sampling, "Sampling");
FLAG(string, sampler, "ddim", "of grids and --sample; with any objective (default of ect: consistency)",
     WORDS("ddim|ddpm|euler|heun|dpmpp_2m|consistency"));
FLAG(string, timestep_respacing, "50",
     "its steps: 50, ddim25, or 10,15,20 for equal parts of T (their sum, if not ddim or ddpm); empty: all "
     "(default of consistency: 2)");
FLAG(float, eta, 0, "ddim's noise: 0 deterministic, 1 as ddpm", 0, 1);
FLAG(float, sigma_min, 0.002, "euler, heun, dpmpp_2m: the last sigma before 0, at least the model's", 1e-6, 1e6);
FLAG(float, sigma_max, 80, "the first sigma, at most the model's", 1e-6, 1e6);
FLAG(float, mid_t, 0.821, "consistency: the last sigma before 0, of two or more steps", 1e-6, 1e6);
FLAG(float, rho, 7, "the larger, the shorter the steps at low sigma", 0.1, 1000);
FLAG(float, S_churn, 0, "euler, heun: noise added anew, in all steps together", 0, 1e6);
FLAG(float, S_min, 0, "the lowest sigma at which", 0, 1e9);
FLAG(float, S_max, 1e9, "the highest", 0, 1e9);
FLAG(float, S_noise, 1, "its factor", 0, 10);
FLAG(bool, clip_denoised, true, "clip the predicted x_0 to [-1, 1] while sampling");
FLAG(float, dynamic_threshold, 0, "clip x_0 to this quantile of its |values|, if above 1; 0: don't", 0, 1);
FLAG(string, start_from, "", "--sample changes this data file's images: adds noise, then takes the last steps");
FLAG(float, strength, 0.6, "start_from: the part of the steps; 1: little is left of the image", 0, 1);
FLAG(string, inpaint, "", "--sample paints the images of this data file anew where --mask says so");
FLAG(string, mask, "",
     "for inpaint, or with cond mask for --sample: a data file of 1 channel: above half the range, paint anew");
FLAG(int, jump_length, 10, "inpaint: steps to go back, for what is new to fit to what is known", 1, 100000);
FLAG(int, jump_n_sample, 10, "inpaint: how often the same steps are taken; 1: never back", 1, 1000);
FLAG(names, classes, "", "classes of the images by number or name, such as 3,5 or cat,dog, in turns (default: all)");
FLAG(string, values, "",
     "numbers of the images, such as 0.3,1,0, or a .csv file with a row for each image, in turns (default in a run: "
     "those of the data)");
FLAG(float, guidance_scale, 1,
     "1: the condition alone; above: away from no condition; needs --class_dropout or --cond_dropout", 0, 1000);
FLAG(float, guidance_min, 0, "the lowest sigma at which guidance_scale acts (elsewhere it is 1)", 0, 1e9);
FLAG(float, guidance_max, 1e9, "the highest", 0, 1e9);
FLAG(int64_t, noise_seed, -1, "of the sampler's noise; -1: seed", -1, 9e15);

HEADING(training, "Training");
SAVED(70, int64_t, max_steps, 1000, "training steps in all", 1, 2e9);
SAVED(68, int, batch_size, 16, "images per step", 1, 1e6);
SAVED(69, int, microbatch, 0, "images that a process takes at a time; 0 or -1: its share at once", 0, 1e6);
FLAG(bool, use_checkpoint, false, "compute blocks again in the backward pass: half the activations, more time");
SAVED(71, float, lr, 1e-3, "learning rate", 0, 100);
SAVED(78, string, lr_schedule, "constant", "after the warmup; at the end 0", WORDS("constant|linear|cosine"));
SAVED(77, int64_t, warmup_steps, 0, "steps over which lr rises from 0", 0, BIG);
SAVED(116, string, optimizer, "adamw",
      "muon: Muon (Jordan et al. 2024) for the matrices between hidden channels, AdamW for the rest",
      WORDS("adamw|muon"));
SAVED(72, float, weight_decay, 0, "AdamW's and Muon's, per unit of lr", 0, 100);
SAVED(73, float, adam_beta1, 0.9, "decay of the first moment", 0, 0.999999);
SAVED(74, float, adam_beta2, 0.999, "decay of the second moment", 0, 0.999999);
SAVED(75, float, adam_eps, 1e-8, "added to the root of the second moment", 1e-30, 1);
SAVED(76, float, grad_clip, 1, "largest global norm of the gradient; 0: no clipping", 0, 1e30);
FLAG(int64_t, lr_anneal_steps, 0, "guided-diffusion's: max_steps, over which lr falls to 0", 0, 2e9);
SAVED(106, string, schedule_sampler, "uniform", "how t is drawn", WORDS("uniform|loss-second-moment"));
FLAG(int, ema_snapshots, 0, "steps between two snapshots for train_unet.py --ema_sigma_rel; 0: none", 0, BIG);
FLAG(floats, ema_rate, "0.995",
     "decay of the averaged weights, 1: their mean; of several, 0.9,0.8, pictures use the first");
FLAG(float, fp16_scale_growth, 1e-3, "guided-diffusion's, for fp16's loss scale; bf16 has none", 0, 1e9);
FLAG(int, max_bad_steps, 10, "stop after so many skipped steps in a row; 0: after 10, and skip no outliers", 0, BIG);
FLAG(int64_t, seed, 0, "of everything random", 0, 9e15);

HEADING(files, "Data and files");
FLAG(string, data_file, "", "images, from prepare_data.py");
FLAG(string, data_dir, "",
     "or a folder of pictures, of which prepare_data.py makes FOLDER_64x64x3.bin; sub-folders are classes");
SAVED(80, bool, random_flip, false, "mirror half of the images");
FLAG(string, val_data_file, "", "images whose loss is logged but not trained on (512 of them, if there are more)");
SAVED(123, float, val_fraction, 0,
      "or hold out this part of data_file's images, drawn at random: they are not trained on, and their loss is logged",
      0, 0.99);
FLAG(string, cond_file, "",
     "pictures to condition on: a data file with one for each image of data_file, in the same order; with --sample "
     "those of the samples, in turns (with cond: or images, of which they are made)");
FLAG(string, val_cond_file, "", "those of val_data_file's images");
FLAG(int, val_interval, 100, "steps between two validation losses", 1, BIG);
FLAG(string, init, "",
     "start from the weights of this .bin file, whose model flags then hold; images and classes may be others");
FLAG(string, resume_checkpoint, "", "continue from this file, or output_dir's: latest, or auto: if it has one");
FLAG(string, output_dir, "out", "folder for the log, pictures and checkpoints");
FLAG(string, output, "samples.png", "--sample's file: .png (one grid) or .bin (float images)");
FLAG(string, compare_runs, "", "put the runs of these folders, out,out2, on one page, --output F.html, and stop");
FLAG(bool, use_ema, true, "--sample draws from the averaged weights if the file has them");
SAVED(120, int, save_interval, 500, "steps between two checkpoints", 1, BIG);
FLAG(int, keep_checkpoints, 3, "checkpoints kept, the newest; 0: all", 0, BIG);
FLAG(bool, keep_best, false, "keep that of the lowest validation loss, too, as best.bin; needs validation images");
SAVED(121, int, sample_interval, 250, "steps between two grids of samples; 0: none", 0, BIG);
SAVED(122, int, num_samples, 36, "images in a grid", 1, 4096);
FLAG(int, log_interval, 10, "steps between two lines on the screen, one in ten seconds at least", 1, BIG);

PRESETS_SHARE(LARGE, "--use_scale_shift_norm True --resblock_updown True --lr 1e-4 --ema_rate 0.9999 "
                     "--sample_interval 5000 --save_interval 5000 --log_interval 50");
PRESETS_SHARE(ADM,
              "--num_channels 256 --num_res_blocks 2 --attention_resolutions 32,16,8 "
              "--use_new_attention_order False --learn_sigma True --noise_schedule linear",
              LARGE);
// How classes are learned, and how pictures are guided by them, where sigma is between 0.2 and 2 (docs/LEARNT.md).
// Without --preset, these flags are set before those of the preset if the user's images have labels.
PRESETS_SHARE(OF_LABELS,
              "--class_cond True --class_dropout 0.1 --guidance_scale 2 --guidance_min 0.2 --guidance_max 2");
// What ./train_unet alone does, on a CPU and on a GPU: chosen by the pictures that a minute gives (docs/LEARNT.md). A
// network that sees squares of 2x2 pixels is four times as fast. One that predicts x_0, not noise, leaves no grain in
// them. With Muon a step does about as much as two with AdamW. The average of quick32's weights reaches back over a
// third of the run: 1 / (1 - 0.993) is 143 steps.
PRESET(quick32,
       "--image_size 32 --in_channels 1 --patch_size 2 --num_channels 64 --channel_mult 1,1 "
       "--num_res_blocks 1 --attention_resolutions 8 --num_head_channels 32 --conv_resample False "
       "--use_scale_shift_norm True --class_cond True --class_dropout 0.1 --guidance_scale 2 "
       "--guidance_min 0.2 --guidance_max 5 --noise_schedule cosine --predict x0 --min_snr_gamma 5 --sampler heun "
       "--S_churn 20 --timestep_respacing 50 --batch_size 64 --optimizer muon --lr 4e-3 --warmup_steps 50 "
       "--lr_schedule constant --adam_beta2 0.99 --max_steps 400 --ema_rate 0.993 "
       "--data_file data/fashion32.bin --save_interval 200 --sample_interval 200");
// What three presets for a GPU share.
PRESETS_SHARE(QUICK, "--channel_mult 1,2,2 --attention_resolutions 16,8 --num_head_channels 32 --conv_resample False "
                     "--use_scale_shift_norm True --noise_schedule cosine --predict x0 --sampler heun --S_churn 20 "
                     "--timestep_respacing 50 --optimizer muon --warmup_steps 500 --lr_schedule cosine "
                     "--adam_beta2 0.99 --log_interval 50");
// Emoji, and the user's own images that are larger than 32x32 pixels. Of 2,026 emoji most samples are copies at the
// end.
PRESET(quick64,
       "--image_size 64 --patch_size 2 --num_channels 128 --num_res_blocks 1 --min_snr_gamma 0.5 --batch_size 128 "
       "--lr 1e-3 --max_steps 7500 --ema_rate 0.999 --data_file data/emoji64.bin --sample_interval 2500 "
       "--save_interval 2500",
       QUICK);
// The network sees each pixel, not squares of pixels.
PRESETS_SHARE(PHOTOS,
              "--image_size 32 --class_cond True --class_dropout 0.1 --guidance_scale 2 --guidance_min 0.2 "
              "--guidance_max 2 --min_snr_gamma 5 --batch_size 256 --lr 1.4e-3 --data_file data/fashion32.bin",
              QUICK);
// clothing, and the user's own images of 32x32 pixels
PRESET(photos32,
       "--num_channels 96 --num_res_blocks 1 --max_steps 6000 --ema_rate 0.999 --sample_interval 2000 "
       "--save_interval 2000",
       PHOTOS);
// Better photographs in seven times as long. No recipe of ten minutes made better ones (docs/LEARNT.md, "Ten minutes,
// searched").
PRESET(photos32_wide,
       "--num_channels 160 --num_res_blocks 2 --dropout 0.1 --max_steps 12500 --ema_rate 0.9995 "
       "--sample_interval 2500 --save_interval 2500",
       PHOTOS);
// clothing on two CPU cores
PRESET(fashion32, "--image_size 32 --in_channels 1 --num_channels 32 --channel_mult 1,2,2 --num_res_blocks 1 "
                  "--attention_resolutions 8 --num_head_channels 32 --use_scale_shift_norm True "
                  "--noise_schedule cosine --eta 1 --batch_size 16 --lr 2e-3 --warmup_steps 100 "
                  "--lr_schedule linear --adam_beta2 0.99 --max_steps 1000 --ema_rate 0.98 "
                  "--data_file data/fashion32.bin");
// 64x64 pictures on two CPU cores: as quick64, with a network that is narrower and one level deeper, smaller batches,
// and a constant lr
PRESET(emoji64, "--image_size 64 --patch_size 2 --num_channels 64 --channel_mult 1,1,1,1 --num_res_blocks 1 "
                "--attention_resolutions 8,4 --num_head_channels 32 --conv_resample False "
                "--use_scale_shift_norm True --noise_schedule cosine --predict x0 --min_snr_gamma 0.5 --sampler heun "
                "--S_churn 20 --timestep_respacing 50 --batch_size 32 --optimizer muon --lr 2e-3 --warmup_steps 100 "
                "--lr_schedule constant --adam_beta2 0.99 --max_steps 2700 --ema_rate 0.999 "
                "--data_file data/emoji64.bin --sample_interval 900 --save_interval 900");
// unet.cu's model
PRESET(unet64, "--image_size 64 --num_channels 64 --channel_mult 1,2,3,4 --num_res_blocks 2 "
               "--attention_resolutions 16,8 --num_head_channels 32 --conv_resample False --noise_schedule cosine "
               "--eta 1 --timestep_respacing 100 --batch_size 32 --lr 4e-4 --warmup_steps 500 --lr_schedule cosine "
               "--adam_beta2 0.99 --max_steps 25000 --ema_rate 0.999 --data_file data/emoji64.bin "
               "--sample_interval 2500 --save_interval 5000 --log_interval 50");
// EDM's recipe of CIFAR-10 (Karras et al. 2022, table 7: its DDPM++ network, 200 million images in batches of 512, an
// average with a half-life of half a million images) on guided-diffusion's layers
PRESET(cifar10, "--image_size 32 --num_channels 128 --channel_mult 2,2,2 --num_res_blocks 4 "
                "--attention_resolutions 16 --num_heads 1 --resblock_updown True --dropout 0.13 --objective edm "
                "--random_flip True --sampler heun --timestep_respacing 18 --batch_size 512 --lr 1e-3 "
                "--warmup_steps 19531 --grad_clip 0 --max_steps 390625 --ema_rate 0.99929 "
                "--data_file data/cifar10.bin --sample_interval 5000 --save_interval 5000 --log_interval 50");
// guided-diffusion's defaults, for which its recipes are written, and its published models of ImageNet and LSUN
PRESET(adm, "--image_size 64 --num_channels 128 --num_res_blocks 2 --attention_resolutions 16,8 --num_heads 4 "
            "--use_scale_shift_norm True --use_new_attention_order False --num_classes 1000 --noise_schedule linear "
            "--rescale_learned_sigmas False --batch_size 1 --lr 1e-4 --grad_clip 0 --max_steps 1000000 "
            "--ema_rate 0.9999 --data_file data/imagenet64.bin --save_interval 10000 --sample_interval 10000");
PRESET(adm64,
       "--image_size 64 --num_channels 192 --channel_mult 1,2,3,4 --num_res_blocks 3 "
       "--attention_resolutions 32,16,8 --num_head_channels 64 --learn_sigma True --class_cond True "
       "--num_classes 1000 --dropout 0.1 --noise_schedule cosine --batch_size 32 --max_steps 540000 "
       "--data_file data/imagenet64.bin",
       LARGE);
PRESET(adm128,
       "--image_size 128 --num_heads 4 --class_cond True --num_classes 1000 --batch_size 16 "
       "--max_steps 4360000 --data_file data/imagenet128.bin",
       ADM);
PRESET(adm256,
       "--image_size 256 --num_head_channels 64 --class_cond True --num_classes 1000 --batch_size 8 "
       "--max_steps 1980000 --data_file data/imagenet256.bin",
       ADM);
PRESET(lsun256,
       "--image_size 256 --num_head_channels 64 --dropout 0.1 --batch_size 8 --max_steps 1000000 "
       "--data_file data/lsun256.bin",
       ADM);
// guided-diffusion's upsamplers: from small images, enlarged, to large ones
PRESETS_SHARE(UPSAMPLER,
              "--num_channels 192 --num_res_blocks 2 --channel_mult 1,1,2,2,4,4 --cond lowres:4 "
              "--class_cond True --num_classes 1000 --use_new_attention_order False --learn_sigma True "
              "--noise_schedule linear --max_steps 500000",
              LARGE);
PRESET(adm64_256,
       "--image_size 256 --attention_resolutions 32,16,8 --num_heads 4 --batch_size 8 --data_file data/imagenet256.bin",
       UPSAMPLER);
PRESET(adm128_512,
       "--image_size 512 --attention_resolutions 32,16 --num_head_channels 64 --batch_size 4 "
       "--data_file data/imagenet512.bin",
       UPSAMPLER);
// latents of 256x256 pictures, as prepare_data.py --encode makes them: an eighth as wide and high, of any size
PRESET(latent32,
       "--image_size 32 --in_channels 4 --num_channels 192 --channel_mult 1,2,2,4 --num_res_blocks 2 "
       "--attention_resolutions 16,8,4 --num_head_channels 64 --noise_schedule linear "
       "--clip_denoised False --batch_size 64 --max_steps 400000 --data_file data/latent32.bin",
       LARGE);
