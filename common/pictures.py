"""From pictures to arrays: of a file, of a folder. This module needs numpy, Pillow and tqdm."""

from __future__ import annotations

import functools
import io
import math
import os
import random
import sys
import unicodedata
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, TextIO

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from tqdm import tqdm

from common.data_files import Data, brief_list, class_names_block, data_header, write_data
from common.files import DataError, open_file, open_regular
from common.flags import Config
from common.program import NOT_OF_PICTURES, UserError, printable

MOST_PIXELS = 1 << 27  # of a picture that is enlarged for a random crop: half a GiB
MOST_GREY = 65535  # of 16 bits

# Pillow's formats that are no pictures made of pixels (documents, drawings, films), or of which it knows no more than the name.
NO_PICTURES = {"EPS", "PDF", "WMF", "MPEG", "BUFR", "GRIB", "HDF5"}
# Folders that systems and other programs make. They, and those whose names begin with a dot, hold copies, or what was thrown away.
NOT_THE_USERS = {"@eadir", "@recycle", "#recycle", "#snapshot", "$recycle.bin", "recycler", "system volume information", "__macosx", "lost+found"}
OF_A_RUN = {"log.csv", ".lock"}  # a folder that holds one of these files

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # of a picture of 90 million pixels; one of 180 million is refused


def say(text: str, file: TextIO) -> None:
    """Prints a line, beside the progress bar if there is one."""
    tqdm.write(printable(text), file=file)


def tell(text: str) -> None:
    """The same on stderr, after the program's name."""
    say(f"prepare_data: {text}", sys.stderr)


def progress(items: Iterable) -> Iterable:
    """The items under a progress bar; without one if stderr is not a terminal."""
    return tqdm(items, unit=" images", disable=None)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nfc(name: str) -> str:
    """A name as it is compared: an accent is part of its letter here, and a character of its own in names that a Mac has written."""
    return unicodedata.normalize("NFC", name)


@dataclass
class Account:
    """What a set of pictures has lost on the way, and what else nobody could see in the result. It is told when all of them have been read."""

    white: int = 0  # --white; 0: not given
    folders: set[str] = field(default_factory=set)  # left out, of systems and other programs
    runs: set[str] = field(default_factory=set)  # left out, of runs
    hidden: int = 0  # files
    kinds: Counter[str] = field(default_factory=Counter)  # how the names of other files end
    unusable: int = 0  # pictures, each of which has been named
    frames: int = 0  # that follow the first one
    animated: int = 0  # pictures that have such
    bad_profiles: int = 0
    deep: int = 0  # pictures of 16-bit grey
    largest: int = 0  # value in them

    def left_out(self) -> str:
        """Counted by reason; "" if nothing was left out."""
        kinds = [f"{kind} {number}" for kind, number in self.kinds.most_common()]
        found = {
            f"{counted(self.kinds.total(), 'file')} of other kinds ({brief_list(kinds)})": self.kinds,
            counted(self.hidden, "hidden file"): self.hidden,
            f"{counted(len(self.folders), 'folder')} of a system or another program ({brief_list(sorted(self.folders))})": self.folders,
            f"{counted(len(self.runs), 'folder')} of runs ({brief_list(sorted(self.runs))})": self.runs,
            f"{counted(self.unusable, 'picture')} that can't be used, named above": self.unusable,
            f"{counted(self.frames, 'further frame')} of {counted(self.animated, 'picture')}": self.frames,
        }
        return "; ".join(text for text, there in found.items() if there)

    def report(self) -> None:
        """Prints it, a line for each kind of thing."""
        if left_out := self.left_out():
            tell(f"left out: {left_out}")
        if self.bad_profiles:
            tell(f"colour profiles that are broken or don't fit, so that sRGB was taken: {self.bad_profiles}")
        if self.white and not self.deep:
            tell(f"--white {self.white}: changes nothing, because no picture has grey values of more than 8 bits")
        if not self.white and self.deep and self.largest <= MOST_GREY // 4:
            white = (1 << self.largest.bit_length()) - 1
            told = (
                f"the largest value in {counted(self.deep, 'picture')} of 16-bit grey is {self.largest}, and white is {MOST_GREY}, so they are dark"
            )
            tell(f"{told}; if their white is {white}, prepare_data.py --white {white} says so")

    def count_frames(self, picture: Image.Image) -> None:
        """Of a picture that has been read."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a damaged frame that is not used
                frames = 1 if picture.format == "PSD" else getattr(picture, "n_frames", 1)  # a PSD file counts its layers
        except NOT_OF_PICTURES:
            raise
        except Exception:  # noqa: BLE001 (as in decode_images; the first frame is fine)
            return
        self.frames += frames - 1
        self.animated += frames > 1


# ----------------------------------------------------------------------------------------------------------------------
# a picture


@functools.cache
def picture_formats() -> tuple[list[str], frozenset[str]]:
    """The formats of pictures that this Pillow decodes, and how names of such files end."""
    Image.preinit()  # which come first, as in Image.open: some of the others know no sign by which a file begins
    Image.init()
    formats = [name for name in Image.ID if name not in NO_PICTURES]
    return formats, frozenset(end for end, name in Image.registered_extensions().items() if name in formats or name == "MPO")  # which opens as JPEG


def is_deep(image: Image.Image) -> bool:
    """Whether this is grey of more than 8 bits, which convert() would clip at 255, or cut off at 0 and 1."""
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def is_grey(image: Image.Image) -> bool:
    """Whether a picture, just opened, has no colours by what its file says."""
    return image.mode in ("1", "L", "LA") or is_deep(image)


def white_value(image: Image.Image, told: int) -> tuple[int, bool]:
    """(which value of a deep grey picture, just opened, is white; whether the file itself does not say so). told: --white. DataError if nothing does."""
    if image.mode == "F":
        return 1, False
    if image.format == "PPM":
        return MOST_GREY, False  # Pillow has scaled it by the white that the file names
    if told:
        return told, True
    if image.format == "TIFF" and image.tag_v2.get(258) == (12,):  # bits of a value
        return 4095, False
    if image.mode == "I" and image.format != "PNG":  # of 16 bits in PNG, which older Pillows open as I
        raise DataError("its grey values are integers of 32 bits, or with a sign, and nothing says which one is white; prepare_data.py --white does")
    return MOST_GREY, True


def eight_bits(image: Image.Image, white: int) -> Image.Image:
    """A deep grey picture as L, or as LA where one of its values is transparent."""
    values = np.asarray(image)
    is_clear = values == image.info.get("transparency")  # the grey value that is transparent, as a PNG may have one
    values = np.where(is_clear, white, values)
    if not (values.min() >= 0 and values.max() <= white):
        raise DataError(f"its grey values are from {values.min():g} to {values.max():g}, not from 0 to {white}")
    grey, opaque = np.rint(values * (255 / white)).astype(np.uint8), np.where(is_clear, 0, 255).astype(np.uint8)
    return Image.fromarray(np.stack([grey, opaque], axis=-1), "LA") if np.any(is_clear) else Image.fromarray(grey)


@functools.lru_cache(maxsize=8)
def to_srgb(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform] | None:
    """The mode of the colours that a profile describes, and what makes sRGB of them; None if it is broken, or describes others."""
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}[opened.profile.xcolor_space]
        return mode, ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, KeyError):
        return None


def in_srgb(image: Image.Image, profile: bytes, account: Account) -> Image.Image:
    """A picture of 8 bits in RGB, or RGBA, by what its colour profile says. One that is broken, or is of other colours than the picture, is none."""
    mode, transform = to_srgb(profile) or ("", None)
    if not transform or (mode == "CMYK") != (image.mode == "CMYK") or (mode == "L" and not is_grey(image)):
        account.bad_profiles += 1
        return image
    image = image.convert("RGBA") if image.has_transparency_data else image
    colours = ImageCms.applyTransform(image.convert(mode), transform)
    if image.mode == "RGBA":
        colours.putalpha(image.getchannel("A"))
    return colours


def flat_image(image: Image.Image, channels: int, account: Account | None = None) -> Image.Image:
    """A picture, just opened, upright, of 8 bits and in sRGB: on white in grey (1 channel) or RGB (3), or RGBA (4)."""
    account = account or Account()
    profile = image.info.get("icc_profile")
    white, is_guess = white_value(image, account.white) if is_deep(image) else (0, False)
    image = ImageOps.exif_transpose(image)  # photographs that are stored lying on their side
    if image.mode == "LAB":  # colours that need no profile, and which convert() knows only how to make RGB
        image, profile = image.convert("RGB"), None
    if is_guess:
        account.deep += 1
        account.largest = max(account.largest, int(np.asarray(image).max()))
    if white:
        image = eight_bits(image, white)
    if profile:
        image = in_srgb(image, profile, account)
    if channels == 4:
        return image.convert("RGBA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def flat_array(image: Image.Image) -> np.ndarray:
    """A picture in grey, RGB or RGBA as uint8 (C, H, W)."""
    array = np.asarray(image)
    return np.ascontiguousarray(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))


def image_to_array(image: Image.Image, size: tuple[int, int], channels: int, resample: Image.Resampling = Image.Resampling.LANCZOS) -> np.ndarray:
    """A picture as uint8 (C, H, W): on white, cropped at the centre to the aspect ratio of (height, width), resized."""
    return flat_array(ImageOps.fit(flat_image(image, channels), size[::-1], method=resample))  # Pillow's sizes are (width, height)


def picture_file(flag: str, path: str, channels: int, config: Config, folder: str) -> str:
    """A data file in this folder that holds one picture, in the size of the images. flag: the one that names it. A smaller picture to --cond of a
    super-resolution model is what is to be enlarged, and is brought to the size that such pictures have."""
    if channels not in (1, 3):
        raise UserError(f"--{flag} {path}: a picture has 1 or 3 channels and this model's {'pictures' if flag == 'cond' else 'images'} {channels}")
    H, W = config.image_size
    factor = config.picture_factor if flag == "cond" else 0
    resample = Image.Resampling.BOX if flag == "mask" else Image.Resampling.LANCZOS
    try:
        with open_file(path) as file, Image.open(file, formats=picture_formats()[0]) as picture:
            is_small = factor > 0 and (picture.width < W or picture.height < H)
            array = image_to_array(picture, (H // factor, W // factor) if is_small else (H, W), channels, resample)
    except UnidentifiedImageError:
        raise UserError(f"--{flag} {path}: is no picture; .png and .jpg are") from None
    except NOT_OF_PICTURES:
        raise
    except Exception as e:  # noqa: BLE001 (Pillow's decoders raise nearly anything at a damaged file)
        raise UserError(f"--{flag} {path}: can't be read ({getattr(e, 'strerror', None) or e})") from None
    write_data(f"{folder}/{flag}.bin", array[None])
    return f"{folder}/{flag}.bin"


def random_crop(image: Image.Image, image_size: tuple[int, int], draw: random.Random) -> Image.Image:
    """A part from anywhere in the picture, 0.8 to 1 times as high or wide as it: guided-diffusion's random_crop_arr (image_datasets.py), which is
    for squares. Of a (height, width) that differ, the part has their ratio."""
    height, width = image_size
    covered_height = draw.randrange(height, math.ceil(height / 0.8) + 1)
    covered_width = math.ceil(covered_height * width / height)
    # Lanczos and its like look at few pixels: the picture is halved, each pixel a mean of four, until it is nearly small enough.
    while image.width >= 2 * covered_width and image.height >= 2 * covered_height:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = max(covered_width / image.width, covered_height / image.height)
    size = round(image.width * scale), round(image.height * scale)
    if size[0] * size[1] > MOST_PIXELS:
        raise DataError("it is too long and narrow to be cut from anywhere")
    image = image.resize(size, resample=Image.Resampling.BICUBIC)
    top = draw.randrange(image.height - height + 1)
    left = draw.randrange(image.width - width + 1)
    return image.crop((left, top, left + width, top + height))


@dataclass(frozen=True)
class Cut:
    """What parts of a picture become images: one at its centre, or, with crops, so many from anywhere in it."""

    image_size: tuple[int, int]  # (height, width)
    crops: int = 0

    def parts(self, picture: Image.Image, index: int) -> list[np.ndarray]:
        """uint8 (C, H, W) each. They are the same for every picture of an index and a size, and whenever the command runs."""
        if not self.crops:
            return [flat_array(ImageOps.fit(picture, self.image_size[::-1], method=Image.Resampling.LANCZOS))]
        draws = [random.Random(f"crop {crop} of picture {index}") for crop in range(self.crops)]
        return [flat_array(random_crop(picture, self.image_size, draw)) for draw in draws]


def read_picture(path: str, channels: int, account: Account, open_picture: Callable[[str], BinaryIO] = open_regular) -> Image.Image:
    """A picture as flat_image makes it."""
    with open_picture(path) as file, Image.open(file, formats=picture_formats()[0]) as picture:
        flat = flat_image(picture, channels, account)
        account.count_frames(picture)
        return flat


def channels_of(paths: Iterable[str], open_picture: Callable[[str], BinaryIO] = open_regular) -> int:
    """1 if all pictures are grey, which a line says; else 3. They are opened, but not decoded. Those that can't be opened say nothing."""
    opened = 0
    for path in paths:
        try:
            with open_picture(path) as file, Image.open(file, formats=picture_formats()[0]) as picture:
                opened += 1
                if not is_grey(picture):
                    return 3
        except NOT_OF_PICTURES:
            raise
        except Exception:  # noqa: BLE001 (as in decode_images, which names them)
            continue
    if not opened:
        return 3
    tell("all pictures are grey, so images have 1 channel; prepare_data.py --channels 3, or train_unet --in_channels 3, makes them RGB")
    return 1


# ----------------------------------------------------------------------------------------------------------------------
# a folder, or a zip: which files are pictures, and of which class. A path is a tuple of its parts, seen from the folder.

Parts = tuple[str, ...]


def is_foreign(folder: str) -> bool:
    """Whether a folder of this name is left out."""
    return folder.startswith(".") or folder.lower() in NOT_THE_USERS


def choose_pictures(files: Iterable[Parts], where: str, account: Account) -> list[Parts]:
    """Those of the files that are pictures, sorted; what is left out is counted."""
    files = sorted(files)
    runs = {parts[:-1]: parts[-1] for parts in files if parts[-1] in OF_A_RUN}
    if () in runs:
        raise DataError(f"{where} holds {runs[()]}, so it is the folder of a run, whose grids are no pictures to train on; give a folder of its own")
    ends, found = picture_formats()[1], []
    for parts in files:
        above = [parts[:k] for k in range(1, len(parts))]
        end = os.path.splitext(parts[-1])[1].lower()
        if foreign := next((folder for folder in above if is_foreign(folder[-1])), None):
            account.folders.add("/".join(foreign))
        elif run := next((folder for folder in above if folder in runs), None):
            account.runs.add("/".join(run))
        elif parts[-1].startswith("."):
            account.hidden += 1
        elif end not in ends:
            account.kinds[end or "without an end"] += 1
        else:
            found.append(parts)
    if not found:
        left_out = account.left_out()
        raise DataError(f"there are no pictures in {where}{f' (left out: {left_out})' if left_out else ''}")
    return found


def list_images(data_dir: str, account: Account) -> list[Parts]:
    """All pictures below a folder, sorted. Links are followed, each folder once."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    found: list[Parts] = []
    visited: set[str] = set()
    for folder, subfolders, files in os.walk(data_dir, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:  # links may lead here twice, or in circles
            subfolders.clear()
            continue
        visited.add(real)
        prefix = () if folder == data_dir else tuple(os.path.relpath(folder, data_dir).split(os.sep))
        account.folders |= {"/".join((*prefix, name)) for name in subfolders if is_foreign(name)}
        subfolders[:] = sorted(name for name in subfolders if not is_foreign(name))
        found += [(*prefix, name) for name in files]
    return choose_pictures(found, data_dir, account)


def label_by_folder(found: list[Parts]) -> tuple[list[int] | None, list[str]]:
    """Labels and the names of the classes: the last level of folders that has more than one folder, and in which all pictures lie. None and [] if there
    is no such level. A line says so wherever folders mean less than they might."""
    levels = range(max(len(parts) for parts in found) - 1)
    folders = [sorted({printable(nfc(parts[level])) for parts in found if len(parts) > level + 1}) for level in levels]
    several = [level for level in levels if len(folders[level]) > 1]
    loose = {level: [parts for parts in found if len(parts) <= level + 1] for level in several}
    chosen = max((level for level in several if not loose[level]), default=None)
    if several and chosen != several[-1]:
        beside, others = loose[several[-1]], brief_list(folders[several[-1]])
        lie = f"{counted(len(beside), 'picture')} ({'/'.join(beside[0])}{', ...' * (len(beside) > 1)}) {'lies' if len(beside) == 1 else 'lie'}"
        told = "no labels" if chosen is None else f"the classes are {brief_list(folders[chosen])}"
        tell(f"{told}: {lie} beside the folders {others}; if these are the classes, move what lies beside them into one of them, or away")
    elif chosen is not None and chosen != several[0]:
        tell(f"the classes are {brief_list(folders[chosen])}, the folders of the last level, and not {brief_list(folders[several[0]])}")
    elif folders and not several:
        tell(f"no labels: there is one folder of pictures ({'/'.join(names[0] for names in folders)}), and one class is no class")
    if chosen is None:
        return None, []
    number = {name: index for index, name in enumerate(folders[chosen])}
    return [number[printable(nfc(parts[chosen]))] for parts in found], folders[chosen]


def decode_images(paths: list[str], kept: list[int], decode: Callable[[str, int], Iterable[np.ndarray]], account: Account) -> Iterator[np.ndarray]:
    """Yields what `decode` makes of each path and its index, all of a path or nothing, and appends the index for each image to `kept`; names on stderr
    the paths that can't be read, and tells what the account counts."""
    for index, path in enumerate(progress(paths)):
        try:
            arrays = list(decode(path, index))
        except MemoryError as error:
            raise DataError(f"{path}: needs more memory than is free; make it smaller, or move it away") from error
        except NOT_OF_PICTURES:
            raise
        except Exception as error:  # noqa: BLE001 (Pillow's decoders raise nearly anything on a damaged file)
            reason = "Pillow cannot identify it" if isinstance(error, Image.UnidentifiedImageError) else error
            tell(f"skipped {path}: {reason}")
            account.unusable += 1
            continue
        for array in arrays:
            kept.append(index)
            yield array
    account.report()
    if not kept:
        raise DataError("none of the images could be read")


def load_folder(data_dir: str, image_size: tuple[int, int], channels: int) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """What `--data_dir` writes of a folder, in memory: uint8 (N, C, H, W), int32 labels or None, and the names of the classes."""
    account = Account()
    found = list_images(data_dir, account)
    labels, class_names = label_by_folder(found)
    images = np.empty((len(found), channels, *image_size), np.uint8)
    kept: list[int] = []
    cut = Cut(image_size)
    paths = [os.path.join(data_dir, *parts) for parts in found]
    decoded = decode_images(paths, kept, lambda path, index: cut.parts(read_picture(path, channels, account), index), account)
    for position, image in enumerate(decoded):
        images[position] = image
    return images[: len(kept)], None if labels is None else np.array(labels, np.int32)[kept], class_names


def folder_channels(path: str) -> int:
    """How many channels the images in a folder have, if only its pictures say it."""
    return channels_of(os.path.join(path, *parts) for parts in list_images(path, Account()))


def open_pictures(path: str, config: Config) -> Data:
    """Reads the images in a folder, cropped to the configuration's size; sub-folders are classes."""
    images, labels, names = load_folder(path, config.image_size, config.in_channels)
    # The checksum is that of the data file that `prepare_data.py` makes of this folder, so that a resumed run notices other pictures.
    classes, behind = (0, b"") if labels is None else (len(names), labels.astype("<i4").tobytes())
    block = class_names_block(names, classes)
    header = data_header([1, *images.shape, classes, 1], zlib.crc32(behind + block, zlib.crc32(images)), class_name_bytes=len(block))
    return Data(path, images, labels, classes, int(header[8]), class_names=names)
