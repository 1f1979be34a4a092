"""Frames of pictures, animations and films as they are displayed: (H_px, W_px, 3) uint8 RGB.

One reader for all inputs. It does not import PyTorch, as the process that decodes uploads uses it.
Pillow reads pictures and animations, PyAV films. Display metadata is applied: rotation, mirroring,
tiles, pixel aspect ratio, edit lists, transparent pixels over white as on a web page. Time stamps
decide when a frame is on screen.
"""

import contextlib
import itertools
import struct
import threading
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO

import av
import numpy as np
from av.error import FFmpegError
from av.format import Flags
from av.packet import Packet
from av.stream import Disposition
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

Rate = Fraction | float  # frames per second
Pixels = NDArray[np.uint8]

ANIMATIONS = ("GIF", "WEBP", "PNG", "AVIF")  # other formats' pages and previews are ignored
PICTURES = (*ANIMATIONS, "JPEG", "MPO", "TIFF", "BMP", "PPM", "JPEG2000", "HEIF")  # names of Pillow
PICTURE_SUFFIXES = (
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".bmp", ".webp"),
    *(".tif", ".tiff", ".avif", ".heic", ".heif", ".hif", ".ppm", ".pgm", ".jp2"),
)
FILM_SUFFIXES = (
    *(".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".3gp", ".mts", ".m2ts"),
    *(".mpg", ".mpeg", ".ts", ".ogv", ".wmv", ".flv", ".y4m", ".gif"),
)
STILLS = (b"avif", b"heic", b"heix", b"heim", b"heis", b"mif1")  # brands of ISO media files
BOXES = (  # types of the first boxes of films
    *(b"ftyp", b"moov", b"mdat", b"moof", b"mfra", b"free", b"skip", b"wide", b"meta", b"sidx"),
    *(b"styp", b"emsg", b"uuid", b"udta", b"pnot", b"\x1aE\xdf\xa3", b"\x18S\x80g", b"RIFF"),
)
MAX_DISTORTION = 0.02  # of frames scaled to the size of the first
MAX_GAP_S = 10  # in a broadcast, before its clock counts as restarted; as in FFmpeg
MAX_SPAN_S = 86_400  # maximum span of time stamps for choosing frames
MAX_PIXELS = 2**28  # of a frame, close to FFmpeg's limit
FILM_ERRORS = (FFmpegError, OSError, EOFError, ValueError)  # of PyAV
PICTURE_ERRORS = (  # of Pillow
    *(Image.DecompressionBombError, OSError, EOFError, ValueError, LookupError, TypeError),
    *(AttributeError, SyntaxError, ArithmeticError, RuntimeError, struct.error, zlib.error),
)
PILLOW = threading.Lock()


@dataclass(frozen=True, eq=False)
class Times:
    """When each frame is on screen, until the next one; the first one at 0."""

    starts: Sequence[int]  # ascending, in ticks
    end: int  # of the last frame
    tick: Fraction  # seconds
    shortest: int = 1  # shortest time between frames, in ticks

    @classmethod
    def constant(cls, num_frames: int, rate: Fraction) -> "Times":
        return cls(range(num_frames), num_frames, 1 / rate)

    @classmethod
    def of(cls, stamps: Iterable[int], tick: Fraction, last: int, *rates: Any) -> "Times":
        """Sort time stamps; they are constant if all are close to the beat of a rate, or their own.

        Args:
            last: ticks for which the last frame is shown; 0 if unknown.
            rates: rates in a header, in frames per second; may be None.
        """
        first, *others = sorted(stamps)
        starts = [0, *(stamp - first for stamp in others)]
        gaps = [b - a for a, b in itertools.pairwise(starts) if b > a] or [max(last, 1)]
        end, count = starts[-1] + max(last or gaps[-1], min(gaps)), len(starts)
        for rate in (*filter(None, rates), count / (end * tick)):
            beats = np.array(starts, np.float64) * float(tick * rate)
            if (abs(beats - np.arange(count)) < 1 / 4).all():
                return cls.constant(count, Fraction(rate))
        return cls(starts, end, tick, min(gaps))

    @property
    def rate(self) -> Fraction:
        return len(self.starts) / (self.end * self.tick)

    @property
    def max_rate(self) -> Fraction:
        """Highest frames per second between two frames; `rate` if that is constant."""
        return 1 / (self.shortest * self.tick)

    def slower(self, fps: Rate) -> Rate | None:
        """Return a rate to resample to for a model of `fps`, or None if no frames are dropped."""
        return fps if self.max_rate > Fraction(fps) * Fraction(101, 100) else None

    def numbers(self, fps: Rate | None, start: int = 0) -> Iterator[int]:
        """Yield the numbers of the frames to show at a lower frame rate.

        Frame n = start, start + 1 ... of the output is the one on screen at n / fps. A frame that
        comes later by less than half of the shortest interval counts as on screen, so that at a
        constant rate it is the nearest. None, or up to 1% above a constant rate (30 for 29.97), is
        every frame.
        """
        if fps is None:
            return iter(range(start, len(self.starts)))
        if not 0 < fps <= self.max_rate * Fraction(101, 100):
            highest = float(self.max_rate)
            raise ValueError(f"fps must be above 0 and at most the video's {highest:g}, got {fps}")
        if self.end * self.tick > MAX_SPAN_S:
            hours = float(self.end * self.tick / 3600)
            raise ValueError(
                f"time stamps must span at most a day to be read at {fps}, got {hours:g} h"
            )
        ticks = max(1 / (self.tick * Fraction(fps)), Fraction(1))
        places = (int(n * ticks + Fraction(self.shortest, 2)) for n in itertools.count(start))
        shown = itertools.takewhile(lambda place: place < self.end, places)
        return (bisect_right(self.starts, place) - 1 for place in shown)


def rgb_of(image: Image.Image) -> Pixels:
    """Return a Pillow picture as displayed; ValueError if its values have no known white."""
    image.load()
    with contextlib.suppress(SyntaxError, struct.error, ValueError, TypeError, LookupError):
        image = ImageOps.exif_transpose(image)  # ignores a damaged tag
    if image.mode.startswith("I"):  # 16 bits: use the upper 8, as for other pictures
        image = Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("pixels must be integers, got floating-point numbers of unknown range")
    if image.has_transparency_data:
        return _over_white(np.asarray(image.convert("RGBA")))
    return np.array(image.convert("RGB"))


def _over_white(pixels: Pixels) -> Pixels:  # (H_px, W_px, 4) -> (H_px, W_px, 3)
    alpha = pixels[..., 3:].astype(np.uint16)
    return ((pixels[..., :3] * alpha + (255 - alpha) * 255 + 127) // 255).astype(np.uint8)


@contextlib.contextmanager
def opened(
    file: BinaryIO,
    name: str,
    max_pixels: int = MAX_PIXELS,
    container_of: Callable[[bytes], str] | None = None,
) -> Iterator["Shown"]:
    """Open a file to read `frames`, by their numbers, and `times`.

    Args:
        name: of the file; errors begin with it.
        container_of: maps the first bytes of a film to FFmpeg's container name; default: any.

    Raises:
        ValueError: now or later, for a file that is damaged, too large or of another kind.
    """
    with contextlib.ExitStack() as held:
        with _pillow(name):
            Image.init()
            known = [kind for kind in PICTURES if kind in Image.OPEN]
            try:
                image = held.enter_context(Image.open(file, formats=known))
            except UnidentifiedImageError:
                image = None
        if image is None:
            yield _Film(file, name, max_pixels, container_of, held)
        else:
            _check_size(name, *image.size, max_pixels)
            yield _Pictures(image, name)


@contextlib.contextmanager
def _naming(name: str, kinds: tuple[type[Exception], ...] = FILM_ERRORS) -> Iterator[None]:
    """Convert a decoder's error to a one-line ValueError."""
    try:
        yield
    except kinds as error:
        if str(error).startswith(f"{name} "):
            raise
        reason = str(getattr(error, "strerror", None) or error) or type(error).__name__
        raise ValueError(
            f"{name} cannot be decoded (corrupt or truncated): {reason.splitlines()[0]}"
        ) from None


@contextlib.contextmanager
def _pillow(name: str) -> Iterator[None]:
    """Run Pillow without its warnings about damage and size: our errors report them.

    Warning filters are global to the process: one thread at a time.
    """
    with PILLOW, warnings.catch_warnings(action="ignore"), _naming(name, PICTURE_ERRORS):
        yield


def _check_size(name: str, width_px: int, height_px: int, max_pixels: int) -> None:
    if width_px * height_px > max_pixels:
        raise ValueError(
            f"{name} must have at most {max_pixels / 1e6:.0f} megapixels, is {height_px}x{width_px}"
        )


class _Pictures:
    """A still picture or an animation, as Pillow reads it."""

    def __init__(self, image: Image.Image, name: str) -> None:
        self._image, self._name, self._delays = image, name, dict[int, int]()
        with _pillow(name):
            count = getattr(image, "n_frames", 1) if image.format in ANIMATIONS else 1
        # a PNG may begin with a picture for readers without animation
        self._places = range(count)[getattr(image, "default_image", False) :] or range(1)

    def _load(self, number: int) -> Image.Image:
        self._image.seek(self._places[number])
        self._image.load()
        delay = round(self._image.info.get("duration", 0))
        self._delays[number] = delay if delay > 10 else 100  # milliseconds; as in browsers
        return self._image

    @property
    def times(self) -> Times:
        """When frames are shown, which reads all of them; a still picture lasts a second."""
        if (count := len(self._places)) == 1:
            return Times.constant(1, Fraction(1))
        for number in set(range(count)) - set(self._delays):
            with _pillow(self._name):
                self._load(number)
        *starts, end = itertools.accumulate((self._delays[n] for n in range(count)), initial=0)
        return Times.of(starts, Fraction(1, 1000), end - starts[-1])

    def frames(self, numbers: Iterable[int]) -> Iterator[Pixels]:
        """Yield frames by their ascending numbers, up to the end."""
        for number in itertools.takewhile(lambda number: number < len(self._places), numbers):
            with _pillow(self._name):
                pixels = rgb_of(self._load(number))
            yield pixels


class _Film:
    """A film, decoded by PyAV once if possible."""

    def __init__(
        self,
        file: BinaryIO,
        name: str,
        max_pixels: int,
        container_of: Callable[[bytes], str] | None,
        held: contextlib.ExitStack,
    ) -> None:
        self._file, self._name, self._max_pixels, self._held = file, name, max_pixels, held
        self._size: tuple[int, int] | None = None
        self._matrix: tuple[int, int, int, int] | None = None
        self._scaler = VideoReformatter()  # shared by all frames, as it starts threads
        file.seek(0)
        head = file.read(2**16)
        self._kind = container_of and container_of(head)
        with _naming(name):
            boxes = _boxes(file)
            self._begin()
        is_still = head[4:8] == b"ftyp" and head[8:12] in STILLS
        if is_still and (b"grid" in head or len(self._container.streams.video) > 1):
            raise ValueError(f"{name} is stored in tiles, which is not supported: save as JPEG")
        self._times = None if b"moof" in boxes else self._indexed()

    def _begin(self) -> None:
        """Rewind to the first packet."""
        self._file.seek(0)
        # as a byte stream: ffmpeg reads `a:b.mp4` as an address and `50%d.png` as a pattern
        container = av.open(self._file, "r", format=self._kind, metadata_errors="replace")
        self._container = self._held.enter_context(container)
        if not (films := container.streams.video):
            raise ValueError(f"{self._name} holds no video stream (corrupt or truncated?)")
        covers = [film for film in films if film.disposition & Disposition.attached_pic]
        self._stream = stream = next((film for film in films if film not in covers), films[0])
        if (codec := stream.codec_context) is None:
            raise ValueError("no codec")
        _check_size(self._name, codec.width, codec.height, self._max_pixels)
        # otherwise FFmpeg conceals damage
        codec.options = {"err_detect": "explode", "max_pixels": str(self._max_pixels)}
        if self._kind:  # untrusted file
            codec.options |= {"threads": "1"}
        # closing releases the decoder, whose threads a forked process would wait for
        self._packets = self._held.enter_context(contextlib.closing(self._demux()))
        self._stamps, self._last = list[int | None](), 0

    def _demux(self) -> Generator[Packet, None, None]:
        """Yield the packets, and record the time stamps of those that are shown."""
        newest, shift, tick = None, 0, self._stream.time_base or Fraction(1)
        may_jump = self._container.format.flags & Flags.ts_discont.value
        is_vp8 = self._stream.codec_context.name == "vp8"
        for packet in self._container.demux(self._stream):
            stamp, dts = packet.pts, packet.dts
            if dts is not None:
                gap = 0 if newest is None else dts + shift - newest
                if may_jump and not 0 <= gap * tick < MAX_GAP_S:  # concatenated parts
                    shift += (packet.duration or 1) - gap
                newest = dts + shift
            if packet.size and not packet.is_discard and not (is_vp8 and not bytes(packet)[0] & 16):
                stamp = dts if stamp is None else stamp
                self._stamps.append(None if stamp is None else stamp + shift)
                self._last = packet.duration or 0
            yield packet

    def _indexed(self) -> Times | None:
        """Return the times of an mp4 index if they are constant, without reading packets."""
        if not self._container.format.name.startswith("mov"):
            return None
        entries = getattr(self._stream, "index_entries", ())  # PyAV 15 has none
        stamps = [entry.timestamp for entry in entries if not entry.is_discard]
        times = self._times_of(stamps, 0) if stamps else None
        return times if times and isinstance(times.starts, range) else None

    def _times_of(self, stamps: Sequence[int | None], last: int) -> Times:
        stream, known = self._stream, [stamp for stamp in stamps if stamp is not None]
        if not stamps:
            raise ValueError(f"{self._name} holds no frames (corrupt or truncated)")
        if len(known) < len(stamps):  # such as a codec without a container
            rate = stream.guessed_rate or stream.average_rate or 1
            return Times.constant(len(stamps), Fraction(rate))
        assert stream.time_base
        rates = stream.average_rate, stream.guessed_rate
        return Times.of(known, stream.time_base, last, *rates)

    @property
    def times(self) -> Times:
        """When frames are shown; decodes nothing."""
        if self._times is None:
            with _naming(self._name):
                for _ in self._packets:
                    pass
                self._times = self._times_of(self._stamps, self._last)
        return self._times

    def frames(self, numbers: Iterable[int]) -> Iterator[Pixels]:
        """Yield frames by their ascending numbers, up to the end."""
        with _naming(self._name):
            if self._stamps:  # the packets were read for the times
                self._begin()
            numbers, number, is_interlaced = iter(numbers), 0, False
            wanted = next(numbers, None)
            for packet in self._packets:
                for frame in packet.decode():
                    assert isinstance(frame, av.VideoFrame)
                    if number == wanted:
                        pixels = self._shown(frame)
                        while number == wanted:
                            yield pixels
                            wanted = next(numbers, None)
                    if wanted is None:
                        return
                    number += 1
                    is_interlaced |= frame.interlaced_frame  # a field may have its own packet
            if number < (expected := len(self._stamps)) and not is_interlaced:
                raise ValueError(
                    f"{self._name} is truncated: expected {expected} frames, decoded {number}"
                )

    def _shown(self, frame: av.VideoFrame) -> Pixels:
        """Return a frame in square pixels, rotated and mirrored, in the size of the first one."""
        aspect = self._stream.sample_aspect_ratio or Fraction(1)
        width = max(frame.width, round(frame.width * aspect))  # never drop pixels
        height = max(frame.height, round(frame.height / aspect))
        _check_size(self._name, width, height, self._max_pixels)
        first_width, first_height = self._size = self._size or (width, height)
        if abs(width * first_height / (height * first_width) - 1) > MAX_DISTORTION:
            raise ValueError(
                f"{self._name} changes its frame size, "
                f"from {first_height}x{first_width} to {height}x{width} px"
            )
        is_opaque = not any(component.is_alpha for component in frame.format.components)
        form = "rgb24" if is_opaque else "rgba"
        scaled = self._scaler.reformat(frame, first_width, first_height, form)
        pixels: Any = scaled.to_ndarray()
        pixels = pixels if is_opaque else _over_white(pixels)
        a, b, c, d = self._matrix = self._matrix or _matrix_of(frame)
        is_turned = abs(b) > abs(a)  # rotated by 90 degrees, as phone videos are
        across, down = (c, b) if is_turned else (a, d)
        pixels = pixels.swapaxes(0, 1) if is_turned else pixels
        return np.ascontiguousarray(pixels[:: -1 if down < 0 else 1, :: -1 if across < 0 else 1])


def _matrix_of(frame: av.VideoFrame) -> tuple[int, int, int, int]:
    """Return a film's display matrix from one frame, whose `side_data` must stay alive."""
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV does not know all side data of FFmpeg
        turns = round(frame.rotation / 90) % 4
        return ((1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0))[turns]
    a, b, _, c, d, *_ = np.frombuffer(matrix, np.int32).tolist() if matrix else (1, 0, 0, 0, 1)
    return a, b, c, d


def _boxes(file: BinaryIO) -> set[bytes]:
    """Return the types of the top-level boxes of a film in mp4, mov, mkv, webm or avi.

    Raises:
        ValueError: the file is truncated, which FFmpeg would read without an error.
    """
    end, place, kinds = file.seek(0, 2), 0, set[bytes]()
    while place < end:
        file.seek(place)
        head = file.read(16).ljust(16, b"\0")
        if head[:4] in (b"\x1aE\xdf\xa3", b"\x18S\x80g"):  # EBML header and segment of Matroska
            kind, width = head[:4], min(9 - head[4].bit_length(), 8)
            size = int.from_bytes(head[4 : 4 + width]) & (unknown := (1 << 7 * width) - 1)
            size = 0 if size == unknown else 4 + width + size
        elif head[:4] == b"RIFF":
            kind, size = head[:4], 8 + int.from_bytes(head[4:8], "little")
        else:
            kind, size = head[4:8], int.from_bytes(head[:4])
            size = int.from_bytes(head[8:]) if size == 1 else size
        if kind not in BOXES or size <= 8:  # extends to the end, or has an unknown size
            break
        kinds.add(kind)
        place += size
    if place > end + 8:  # some count the RIFF header twice
        raise ValueError(f"{place - end} bytes are missing")
    return kinds


Shown = _Pictures | _Film  # result of `opened`: `times`, and `frames` by their numbers
