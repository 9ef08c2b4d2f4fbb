"""Images with their classes: a folder for each class, a folder saved by ``datasets``, or arrays in ``.npz``."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.document import read_json
from shardwise.errors import DataError, did_you_mean
from shardwise.train.config import Config
from shardwise.train.data.documents import RowProblem
from shardwise.train.data.paths import documents_at
from shardwise.train.data.rows import Row
from shardwise.train.data.sources import BadRows, DataSource, find_source, first_line, need
from shardwise.train.tasks.labels import Labels
from shardwise.train.tasks.text_rows import class_names

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_IMAGE = ("image", "images", "img", "pixel_values", "x", "X", "data")
_LABEL = ("label", "labels", "fine_label", "class", "y", "target")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class _Place:
    """Images of one config key: ``format`` is folder, dataset or npz; ``names`` the columns of image and label."""

    source: DataSource
    format: str
    names: tuple[str, str] = ("image", "label")


class ImageReader:
    """Reads images; see `RowReader`. All have the size that the model takes, or that of the first one."""

    vocab_size = 0

    def __init__(self, config: Config, facts: Any) -> None:
        self.config, self.table = config, config.data
        self.classes = Labels(facts)
        self.labels: Labels | None = self.classes
        size = getattr(facts, "image_size", None)
        self.size: tuple[int, int] | None = (
            None if size is None else (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        )
        self.channels: int | None = getattr(facts, "num_channels", None)
        self.places: list[_Place] = []

    def open(self, value: str, key: str, cache: Path) -> list[Any]:
        """Find the files of a path; see `RowReader.open`.

        Raises:
            DataError: there are none.
        """
        where = f"{key} '{value}'"
        root = documents_at(value, where)
        if root.suffix == ".npz":
            source = find_source(value, key, self.table, cache)
            with np.load(root, allow_pickle=False) if zipfile.is_zipfile(root) else _no_zip(where) as arrays:
                place = _Place(source, "npz", self._columns(list(arrays), where))
        elif (root / "state.json").is_file() or (root / "dataset_dict.json").is_file():
            source = find_source(value, key, self.table, cache)
            place = _Place(source, "dataset", self._columns(list(source.saved().column_names), where))
            self.classes.names = class_names(source, place.names[1]) or self.classes.names
        else:
            source = find_source(value, key, self.table.model_copy(update={"format": "text"}), cache)
            files = [name for name in source.files if Path(name).suffix.lower() in SUFFIXES]
            loose = [name for name in files if "/" not in name]
            if not files or loose:
                what = f"holds '{loose[0]}' beside the folders" if loose else "has no image in a folder"
                raise DataError(
                    f"{where} {what}; give a folder with a folder for each class (class/file.png), a folder saved by "
                    "datasets, or an .npz file"
                )
            place = _Place(DataSource(source.where, "image", source.root, tuple(files)), "folder")
        self.places.append(place)
        return place.source.listing()

    def _columns(self, known: Sequence[str], where: str) -> tuple[str, str]:
        """Find the columns of the images and of the labels.

        Raises:
            DataError: one is missing.
        """
        found = []
        for part, usual in (("image", _IMAGE), ("label", _LABEL)):
            given = {str(key): value for key, value in self.table.columns.items()}.get(part)
            name = given or next((one for one in usual if one in known), None)
            if name is None or name not in known:
                asked = f"'{given}'{did_you_mean(given, known)}" if given else f"for {part}"
                raise DataError(
                    f"{where} has no column {asked}; it has: {', '.join(known)}; name it in data.columns, as {part} = "
                    f"'{known[0] if known else part}'"
                )
            found.append(name)
        return found[0], found[1]

    def rows(self, place: int, bad: BadRows) -> Iterator[Row]:
        """Yield images with their classes; see `RowReader.rows`."""
        one = self.places[place]
        read = {"folder": self._folder, "dataset": self._saved, "npz": self._arrays}[one.format]
        for at, image, label in read(one):
            try:
                pixels = image if isinstance(image, np.ndarray) else self._decoded(image)
                if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
                    raise RowProblem("has values that are not finite; repair it, or remove the row")
                number = self.classes.number_of(label)
            except RowProblem as problem:
                bad.add(f"{one.source.where}: {at} {problem}")
                continue
            yield {"image": pixels, "label": np.asarray(number, np.int64)}
        bad.refuse()

    def _folder(self, place: _Place) -> Iterator[tuple[str, Any, Any]]:
        for name in place.source.files:
            yield f"file '{name}'", place.source.root / name, Path(name).parent.as_posix()

    def _saved(self, place: _Place) -> Iterator[tuple[str, Any, Any]]:
        datasets = need("datasets")
        image, label = place.names
        data = place.source.saved().select_columns([image, label])
        if isinstance(data.features[image], datasets.Image):
            data = data.cast_column(image, datasets.Image(decode=False))  # so that a corrupt one is found by its row
        for number, row in enumerate(data, 1):
            value = row[image]
            if isinstance(value, list):
                value = self._shaped(np.asarray(value, np.float32)[None], f"'{image}'")[0]
            yield f"row {number}", value, row[label]

    def _arrays(self, place: _Place) -> Iterator[tuple[str, Any, Any]]:
        where, (image, label) = place.source.where, place.names
        try:
            with np.load(place.source.root / place.source.files[0], allow_pickle=False) as arrays:
                images, labels = arrays[image], arrays[label]
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{where} cannot be read: {first_line(error)}; save plain arrays with np.savez") from None
        if labels.ndim != 1 or len(labels) != len(images):
            raise DataError(
                f"{where}: '{label}' has shape {list(labels.shape)}, and there are {len(images)} images; give one "
                "class number each"
            )
        if not (images.dtype == np.uint8 or images.dtype.kind == "f"):
            raise DataError(f"{where}: '{image}' holds {images.dtype}; give uint8 (0 to 255) or floating-point values")
        images = self._shaped(images, f"{where}: '{image}'")
        for number, (pixels, value) in enumerate(zip(images, labels, strict=True), 1):
            yield f"row {number}", pixels, value.item()

    def _shaped(self, images: NDArray[Any], what: str) -> NDArray[Any]:
        """Return arrays as [images, channels, height, width].

        Raises:
            DataError: they are of another size.
        """
        if images.dtype.kind == "f":
            images = images.astype(np.float32)
        if images.ndim == 3:
            images = images[:, None]
        elif images.ndim == 4 and images.shape[-1] in _MODES and images.shape[1] != (self.channels or 0):
            images = images.transpose(0, 3, 1, 2)
        if images.ndim != 4:
            raise DataError(f"{what} has shape {list(images.shape)}; give [images, height, width] with channels or not")
        self.channels, self.size = self.channels or images.shape[1], self.size or images.shape[2:]
        if images.shape[1:] != (self.channels, *self.size):
            raise DataError(
                f"{what} has {images.shape[1]} channels of {images.shape[2]} × {images.shape[3]}, and the model takes "
                f"{self.channels} of {self.size[0]} × {self.size[1]} (num_channels, image_size); change one of the two"
            )
        return images

    def _decoded(self, image: Any) -> NDArray[np.uint8]:
        """Decode a file, or a value of a saved data set.

        Raises:
            RowProblem: it is no image, or has another size than the model takes.
        """
        pillow = need("PIL.Image")
        if isinstance(image, dict):
            image = io.BytesIO(image["bytes"]) if image.get("bytes") else image.get("path")
        if image is None:
            raise RowProblem("has no image; add it, or remove the row")
        try:
            with pillow.open(image) as opened:
                self.channels = self.channels or (1 if opened.mode in ("1", "L") else 3)
                found = opened.convert(_MODES.get(self.channels, "RGB"))
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            raise RowProblem(f"is not a readable image ({_reason(error)}); repair or remove it") from None
        height, width = self.size = self.size or (found.height, found.width)
        if (found.height, found.width) != (height, width):
            if not self.table.resize:
                raise RowProblem(
                    f"is {found.height} × {found.width}, and the model takes {height} × {width} (image_size); set "
                    "data.resize = true, or resize it"
                )
            found = found.resize((width, height))
        pixels = np.asarray(found, np.uint8)
        return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))

    def identity(self) -> list[Any]:
        """Return what rows depend on; see `RowReader.identity`."""
        names = [place.names for place in self.places]
        return [self.size, self.channels, self.table.resize, self.classes.identity(), names, *self._normalization()]

    def _normalization(self) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of the channels, of the model's folder or 0.5."""
        path = None if self.config.model.config is None else Path(self.config.model.config)
        file = None if path is None else (path if path.is_dir() else path.parent) / "preprocessor_config.json"
        facts = {}
        if file is not None and file.is_file():
            try:
                facts = read_json(file)
            except ValueError as error:
                raise DataError(f"'{file}' cannot be read as JSON: {error}; repair or remove it") from None
        mean, std = facts.get("image_mean", [0.5]), facts.get("image_std", [0.5])
        return [float(one) for one in mean], [float(one) for one in std]

    def facts(self) -> dict[str, Any]:
        """Return how images are normalised; see `RowReader.facts`."""
        mean, std = self._normalization()
        size = None if self.size is None else f"{self.channels} × {self.size[0]} × {self.size[1]}"
        return {"mean": mean, "std": std, "told": [f"images of {size}"]}


def _reason(error: Exception) -> str:
    text = first_line(error)
    return "not an image file" if text.startswith("cannot identify image file") else text


def _no_zip(where: str) -> Any:
    raise DataError(f"{where} is not an .npz file; write it with numpy.savez")
