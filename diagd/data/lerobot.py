"""LeRobot datasets (LeRobotDataset v2.1 and v3.0) as clips, with vectors for actions.

Such a folder holds meta/info.json, parquet tables with a row for each frame, and the films of its
cameras. In v2.1 an episode has a table and films of its own; in v3.0 they hold many episodes, whose
places meta/episodes/ lists. Row t of a table is what the robot saw and did at frame t: its `action`
led to frame t + 1, its `observation.state` came with frame t.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diagd.checks import brief
from diagd.data.actions import write_actions
from diagd.data.vectors import VectorActions, spell
from diagd.data.video import fit, open_video, video_length, write_video
from diagd.extras import require
from diagd.files import naming, parse_object, read_json_object, read_lines, require_file, write_json
from diagd.system import refuse_other_run

VERSIONS = ("v2.0", "v2.1", "v3.0")  # v2.0 differs in its statistics, which nobody reads here
OBSERVED = "observation."  # features that came with their frame; others led to the next one
FRAMES_PER_SECOND = 10  # approximate default rate of clips
SOURCE = "source.json"  # of a folder of clips: where they come from
CRF = 4  # of H.264: almost nothing is lost before frames are tokenized
INFO = Path("meta", "info.json")


@dataclass(frozen=True)
class Episode:
    """Where an episode is stored."""

    number: int
    length: int  # frames, and rows of its table
    table: Path
    film: Path
    start: int = 0  # its first frame in the film

    @property
    def name(self) -> str:
        return f"episode_{self.number:06d}"


@dataclass(frozen=True)
class RobotClips:
    """The episodes of a dataset as one camera saw them, every n-th frame a clip's."""

    source: dict[str, Any]  # the dataset, and how it is read
    episodes: list[Episode]
    every: int
    fps: Fraction  # of the clips
    rows: list[NDArray[np.float64]]  # of each episode: vectors that led to its frames but the first
    codec: VectorActions

    def lengths(self, folder: Path) -> dict[Path, int]:
        """Return the frames of each clip that `write` leaves in a folder, by its path."""
        pairs = zip(self.episodes, self.rows, strict=True)
        return {folder / f"{one.name}.mp4": 1 + len(rows) for one, rows in pairs}

    def write(self, folder: Path, size_px: tuple[int, int] | None) -> Iterator[Path]:
        """Write the clips, fitted to a size, with their actions; keep and yield those there are.

        ValueError if the folder holds clips of another dataset, or of this one read in another way.
        """
        record, source = folder / SOURCE, self.source | {"size_px": size_px and list(size_px)}
        if record.is_file():
            refuse_other_run(f"{folder} holds clips of", read_json_object(record), source)
        write_json(record, source)
        self.codec.save(folder / "actions.json")
        pairs = zip(self.episodes, self.rows, strict=True)
        for film, group in groupby(pairs, lambda pair: pair[0].film):
            clips = [(folder / f"{one.name}.mp4", one, rows) for one, rows in group]
            missing = [clip for clip in clips if not clip[0].with_suffix(".jsonl").is_file()]
            yield from (path for path, *_ in clips if path.with_suffix(".jsonl").is_file())
            numbers = (
                number
                for _, one, rows in missing
                for number in range(one.start, one.start + one.length, self.every)
            )
            with open_video(film) as shown:
                frames = (torch.from_numpy(frame) for frame in shown.frames(numbers))  # in one pass
                for path, _, rows in missing:
                    seen = [fit(frame, size_px) for frame in islice(frames, 1 + len(rows))]
                    write_video(path, torch.stack(seen), self.fps, CRF)
                    write_actions(path.with_suffix(".jsonl"), ["none", *map(spell, rows)])
                    yield path


def read_lerobot(
    folder: Path,
    camera: str | None = None,
    vectors: Sequence[str] = ("action",),
    every: int | None = None,
    bins: int = 64,
) -> RobotClips:
    """Read the tables of a dataset, and check its films.

    Args:
        folder: of the dataset.
        camera: feature of a film, such as `observation.images.top` or `top`; may be None if there
            is only one.
        vectors: features whose numbers are the axes of an action.
        every: take every n-th frame, and the mean of the actions between; default: about 10 fps.
        bins: ids of each axis.

    Raises:
        ValueError: another version, no such camera or feature, vectors that change their length,
            damaged files, films that do not fit their tables.
        FileNotFoundError: a file of the dataset is missing.
    """
    require("LeRobot data", "pyarrow")
    info = read_json_object(require_file(folder / INFO, "info of a LeRobot dataset"))
    with naming(folder / INFO, (ValueError, TypeError, KeyError, AttributeError)):
        if (version := info.get("codebase_version")) not in VERSIONS:
            expected = ", ".join(VERSIONS)
            raise ValueError(f"expected codebase_version {expected}, got {brief(version)}")
        if not 0.1 <= (fps := info["fps"]) <= 1000:
            raise ValueError(f"fps must be in [0.1, 1000], got {brief(fps)}")
        features = dict(info["features"])
        camera = _camera(features, camera)
        axes = _axes(features, vectors)
    rate = Fraction(fps).limit_denominator(1001)
    every = every or max(round(rate / FRAMES_PER_SECOND), 1)
    find = _episodes_of_v3 if version == "v3.0" else _episodes_of_v2
    episodes = sorted(find(folder, info, camera), key=attrgetter("film", "start"))
    if not episodes:
        raise ValueError(f"{folder}: expected episodes, got none")
    _check_films(episodes, rate, is_alone=version != "v3.0")
    widths = {key: features[key]["shape"][0] for key in vectors}
    read: dict[int, NDArray[np.float64]] = {}
    by_table = attrgetter("table")
    for table, group in groupby(sorted(episodes, key=by_table), by_table):
        read |= _read_vectors(table, list(group), widths)
    is_led = np.repeat([not key.startswith(OBSERVED) for key in vectors], list(widths.values()))
    rows = [_rows(read[one.number], is_led, every) for one in episodes]
    if not (together := np.concatenate(rows)).size:
        raise ValueError(f"{folder}: episodes must have more than {every} frames")
    lowest, highest = (tuple(ends.tolist()) for ends in (together.min(0), together.max(0)))
    source = {"lerobot": str(folder.resolve()), "camera": camera, "vectors": list(vectors)}
    source |= {"every": every, "bins": bins}
    codec = VectorActions(axes, lowest, highest, bins)
    return RobotClips(source, episodes, every, rate / every, rows, codec)


def _camera(features: dict[str, Any], wanted: str | None) -> str:
    films = [name for name, one in features.items() if one["dtype"] == "video"]
    found = [one for one in films if wanted in (None, one, one.rpartition(".")[2])]
    if len(found) != 1:
        known = f"expected one of: {', '.join(films)}" if films else "this dataset has no films"
        raise ValueError(
            f"no camera {wanted}, {known}" if wanted else f"camera must be given: {known}"
        )
    return found[0]


def _axes(features: dict[str, Any], vectors: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all numbers, by their feature if there are several."""
    axes: list[str] = []
    for key in vectors:
        shape = features[key]["shape"] if key in features else None
        if shape is None or len(shape) != 1 or not re.match("float|int", features[key]["dtype"]):
            flat = [n for n, one in features.items() if re.match("float", one["dtype"])]
            raise ValueError(f"no vectors named {key}, expected one of: {', '.join(flat)}")
        short, names = key.rpartition(".")[2], features[key].get("names") or ()
        if isinstance(names, dict):  # such as {"motors": [...]}
            names = [name for part in names.values() for name in part]
        words = [re.sub(r"[^\w.-]", "_", str(name)) for name in names]
        is_named = all(re.match(r"[^\W\d]", word) for word in words)
        if not is_named or len(set(words)) != shape[0]:
            words = [f"{short}_{number}" for number in range(shape[0])]
        axes += [f"{short}.{word}" for word in words] if len(vectors) > 1 else words
    return tuple(axes)


def _rows(
    vectors: NDArray[np.float64], is_led: NDArray[np.bool_], every: int
) -> NDArray[np.float64]:
    """Return what led to frames n, 2n ...: the mean of n rows before, or what came with a frame."""
    last = (len(vectors) - 1) // every * every
    means = vectors[:last].reshape(-1, every, vectors.shape[1]).mean(1)
    return np.where(is_led, means, vectors[every : last + 1 : every])


def _check_films(episodes: list[Episode], rate: Fraction, is_alone: bool) -> None:
    for film, group in groupby(episodes, attrgetter("film")):
        count, found = video_length(require_file(film, "film of a camera"))
        if abs(found / rate - 1) > 0.01:
            raise ValueError(
                f"{film}: expected {float(rate):g} frames/s as in info.json, got {float(found):g}"
            )
        for one in group:
            end = one.start + one.length
            if end > count or (is_alone and end < count):
                raise ValueError(f"{film}: expected {end} frames for {one.name}, got {count}")


def _episodes_of_v2(folder: Path, info: dict[str, Any], camera: str) -> Iterator[Episode]:
    listed = folder / "meta" / "episodes.jsonl"
    for line, text in enumerate(read_lines(listed, "list of episodes"), start=1):
        with naming(f"{listed}:{line}", (ValueError, TypeError, KeyError)):
            one = parse_object(text)
            number, length = int(one["episode_index"]), int(one["length"])
        chunk = number // _whole(info, "chunks_size")
        place = {"episode_chunk": chunk, "episode_index": number, "video_key": camera}
        table, film = (_path(folder, info, name, place) for name in ("data_path", "video_path"))
        yield Episode(number, length, table, film)


def _episodes_of_v3(folder: Path, info: dict[str, Any], camera: str) -> Iterator[Episode]:
    films = f"videos/{camera}"
    indices = [f"{part}/{kind}_index" for part in ("data", films) for kind in ("chunk", "file")]
    columns = ["episode_index", "length", *indices, begins := f"{films}/from_timestamp"]
    tables = sorted((folder / "meta" / "episodes").glob("*/*.parquet"))
    if not tables:
        raise FileNotFoundError(f"list of episodes not found: {folder}/meta/episodes/*/*.parquet")
    for table in tables:
        for one in _read_table(table, columns).to_pylist():
            number = one["episode_index"]
            with naming(f"{table}: episode {number}", (ValueError, TypeError, OverflowError)):
                start = round(float(one[begins]) * info["fps"])
                if min(start, number, one["length"]) < 0:
                    raise ValueError(f"expected numbers from 0, got {brief(one)}")
                places = [
                    {f"{kind}_index": one[f"{part}/{kind}_index"] for kind in ("chunk", "file")}
                    for part in ("data", films)
                ]
                data = _path(folder, info, "data_path", places[0])
                film = _path(folder, info, "video_path", places[1] | {"video_key": camera})
                yield Episode(number, one["length"], data, film, start)


def _whole(info: dict[str, Any], name: str) -> int:
    if not isinstance(value := info.get(name), int) or value < 1:
        raise ValueError(f"{INFO}: {name} must be a whole number from 1, got {brief(value)}")
    return value


def _path(folder: Path, info: dict[str, Any], name: str, place: dict[str, Any]) -> Path:
    """Fill in a path that info.json gives as a pattern; it stays inside the folder."""
    misfits = ValueError, LookupError, AttributeError, TypeError
    with naming(f"{folder / INFO}: {name} {brief(info.get(name))}", misfits):
        path = Path(info[name].format(**place))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError("expected a path inside the folder")
    return folder / path


def _read_table(path: Path, columns: list[str]) -> Any:
    """Read columns of a parquet file as a table of pyarrow."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    require_file(path, "table of a LeRobot dataset")
    damage = pyarrow.ArrowException, OSError
    with naming(f"{path} cannot be read (corrupt or truncated)", damage), ParquetFile(path) as file:
        there = file.schema_arrow.names
        missing = [name for name in columns if name not in there]
        table = None if missing else file.read(columns)
    if missing:
        raise ValueError(f"{path}: expected a column {missing[0]}, got {', '.join(there)}")
    return table


def _read_vectors(
    path: Path, episodes: list[Episode], widths: dict[str, int]
) -> dict[int, NDArray[np.float64]]:
    """Return the vectors (T, axes) of the episodes in a table, by their numbers."""
    table = _read_table(path, ["episode_index", *widths])
    owners = table["episode_index"].to_numpy()
    parts = [_numbers(path, key, width, table[key], owners) for key, width in widths.items()]
    vectors = np.concatenate(parts, axis=1)
    found = {one.number: vectors[owners == one.number] for one in episodes}
    for one in episodes:
        if len(found[one.number]) != one.length:
            got = len(found[one.number])
            raise ValueError(f"{path}: expected {one.length} rows of {one.name}, got {got}")
    return found


def _numbers(
    path: Path, key: str, width: int, column: Any, owners: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the numbers (rows, width) of a column of vectors, or of numbers."""
    import pyarrow
    from pyarrow import types
    from pyarrow.compute import call_function

    column = column.combine_chunks()
    is_list = types.is_list(column.type) or types.is_fixed_size_list(column.type)
    measure = "list_value_length" if is_list else "is_valid"
    lengths = (
        call_function(measure, [column]).cast("int32").fill_null(0).to_numpy(zero_copy_only=False)
    )
    if (wrong := np.flatnonzero(lengths != width)).size:
        row = wrong[0]
        raise ValueError(
            f"{path}: {key} must be {width} numbers as info.json says, "
            f"got {lengths[row]} in row {row}, of episode {owners[row]}"
        )
    flat = column.flatten() if is_list else column
    with naming(f"{path}: {key} must be numbers, got {flat.type}", pyarrow.ArrowException):
        numbers = flat.cast("float64").to_numpy(zero_copy_only=False).reshape(-1, width)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{path}: {key} must be finite numbers")
    return numbers
