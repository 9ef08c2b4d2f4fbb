"""Images with their classes: three ways to give them, and what is refused, each with its file or row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardwise.errors import ConfigError, DataError, ModelError
from shardwise.train.config import Config
from shardwise.train.data.rows import RowData
from shardwise.train.tasks.registry import open_data, order_of, prepare_data, samples_of
from tests.task_models import QUIET, write_task

DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(0, 256, (12, 8, 8)).astype(np.uint8)
CLASSES = ["ant", "bee", "cat"]


def image_folder(folder: Path) -> Path:
    for number, pixels in enumerate(IMAGES):
        path = folder / CLASSES[number % 3] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


def prepared(tmp_path: Path, path: Path | None = None, *, model: dict[str, Any] | None = None, **data: Any) -> RowData:
    tables = write_task(tmp_path, "vit", **(model or {}))
    tables["data"] |= {**({"path": str(path)} if path is not None else {}), **data}
    found = prepare_data(config_of(tables), tmp_path / "cache", QUIET)
    assert isinstance(found, RowData)
    return found


def config_of(tables: dict[str, Any]) -> Config:
    return Config.model_validate(tables)


def saved(tmp_path: Path, rows: dict[str, Any], *, as_images: bool = True) -> Path:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    datasets.Dataset.from_dict(rows, features=features if as_images else None).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


class TestThreeWays:
    def pixels(self, data: RowData, tmp_path: Path) -> dict[bytes, int]:
        samples = samples_of(data, config_of(write_task(tmp_path, "vit")))
        inputs, labels = samples.batch(np.arange(len(samples)))
        assert inputs.shape == (12, 1, 8, 8)
        return {image.numpy().tobytes(): int(label) for image, label in zip(inputs, labels, strict=True)}

    def expected(self) -> dict[bytes, int]:
        scaled = (IMAGES.astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)
        return {image.tobytes(): number % 3 for number, image in enumerate(scaled)}

    def test_a_folder_for_each_class(self, tmp_path):
        data = prepared(tmp_path, image_folder(tmp_path / "images"))
        assert (data.classes, data.num_classes) == (tuple(CLASSES), 4)
        assert self.pixels(data, tmp_path) == self.expected()

    def test_a_folder_saved_by_datasets(self, tmp_path):
        rows = {"image": [Image.fromarray(one) for one in IMAGES], "label": [i % 3 for i in range(12)]}
        data = prepared(tmp_path, saved(tmp_path, rows))
        assert data.classes == tuple(CLASSES)
        assert self.pixels(data, tmp_path) == self.expected()

    def test_arrays(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=IMAGES, y=np.arange(12) % 3)
        assert self.pixels(prepared(tmp_path, tmp_path / "a.npz"), tmp_path) == self.expected()

    def test_floating_point_arrays_are_what_the_model_gets(self, tmp_path):
        np.savez(tmp_path / "a.npz", images=(IMAGES / 16)[..., None], labels=np.arange(12) % 3)
        found = self.pixels(prepared(tmp_path, tmp_path / "a.npz"), tmp_path)
        assert found == {(one / 16).astype(np.float32).tobytes(): i % 3 for i, one in enumerate(IMAGES)}

    def test_normalised_as_the_model_s_folder_says(self, tmp_path):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.2], "image_std": [0.25]}))
        np.savez(tmp_path / "a.npz", images=IMAGES, labels=np.arange(12) % 3)
        data = prepared(tmp_path, tmp_path / "a.npz")
        inputs, _ = samples_of(data, config_of(write_task(tmp_path, "vit"))).batch(np.array([3]))
        assert np.allclose(inputs[0, 0].numpy(), (IMAGES[3] / 255 - 0.2) / 0.25, atol=1e-6)

    def test_a_class_that_the_model_names_has_its_number(self, tmp_path):
        names = {"id2label": {0: "cat", 1: "ant", 2: "bee"}, "label2id": {"cat": 0, "ant": 1, "bee": 2}}
        data = prepared(tmp_path, image_folder(tmp_path / "images"), model=names | {"num_labels": 3})
        labels = data.train.columns["label"].values.tolist()
        assert labels == [1] * 4 + [2] * 4 + [0] * 4  # in the order of the files

    def test_resized_on_request(self, tmp_path):
        folder = image_folder(tmp_path / "images")
        Image.fromarray(DRAW.integers(0, 256, (20, 30)).astype(np.uint8)).save(folder / "ant" / "wide.png")
        assert len(prepared(tmp_path, folder, resize=True).train) == 13


class TestKept:
    def test_prepared_once_and_again_when_a_file_changes(self, tmp_path):
        folder, said = image_folder(tmp_path / "images"), list[str]()
        tables = write_task(tmp_path, "vit")
        tables["data"]["path"] = str(folder)
        config = config_of(tables)
        first = prepare_data(config, tmp_path / "cache", said.append)
        again = prepare_data(config, tmp_path / "cache", said.append)
        assert first.fingerprint == again.fingerprint and said == ["reading the rows"]
        Image.fromarray(IMAGES[0] // 2).save(folder / "bee" / "more.png")
        assert prepare_data(config, tmp_path / "cache", said.append).fingerprint != first.fingerprint
        assert len(said) == 2

    def test_a_damaged_folder_is_written_anew(self, tmp_path):
        data = prepared(tmp_path, image_folder(tmp_path / "images"))
        (data.folder / "image.bin").write_bytes(b"123")
        with pytest.raises(DataError, match="cannot be opened"):
            open_data(data.folder)
        assert len(prepared(tmp_path, tmp_path / "images").train) == 12

    def test_copies_are_on_one_side_and_neither_is_empty(self, tmp_path):
        twice = np.concatenate([IMAGES, IMAGES])
        for fraction in (0.01, 0.5, 0.99):
            np.savez(tmp_path / "a.npz", images=twice, labels=np.arange(24) % 12 % 3)
            data = prepared(tmp_path, tmp_path / "a.npz", heldout_fraction=fraction)
            sides = [{int(i) % 12 for i in side.index} for side in (data.train, data.heldout)]
            assert sides[0] and sides[1] and not sides[0] & sides[1] and len(data.train) + len(data.heldout) == 24

    def test_held_out_images_of_their_own(self, tmp_path):
        for name, part in (("a", IMAGES[:8]), ("b", IMAGES[8:])):
            np.savez(tmp_path / f"{name}.npz", images=part, labels=np.arange(len(part)) % 3)
        tables = write_task(tmp_path, "vit")
        tables["data"] = {"path": str(tmp_path / "a.npz"), "heldout_path": str(tmp_path / "b.npz")}
        config = config_of(tables)
        data = prepare_data(config, tmp_path / "cache", QUIET)
        assert (len(data.train), len(data.heldout)) == (8, 4)
        inputs, labels = samples_of(data, config, heldout=True).batch(np.array([0, -1]))
        assert np.allclose(inputs[0, 0].numpy(), IMAGES[8] / 127.5 - 1, atol=1e-6) and labels.tolist() == [0, -100]

    def test_every_sample_is_in_an_epoch_once(self, tmp_path):
        data = prepared(tmp_path, image_folder(tmp_path / "images"))
        config = config_of(write_task(tmp_path, "vit"))
        order = order_of(data, samples_of(data, config), config)
        assert sorted(order.ids(12, 12).tolist()) == list(range(12))


class TestRefused:
    def test_images_of_other_sizes_corrupt_ones_and_other_formats_are_all_named(self, tmp_path):
        folder = image_folder(tmp_path / "images")
        Image.fromarray(np.zeros((9, 8), np.uint8)).save(folder / "ant" / "high.png")
        (folder / "bee" / "broken.png").write_bytes((folder / "bee" / "01.png").read_bytes()[:40])
        (folder / "cat" / "text.png").write_text("not an image")
        with pytest.raises(DataError) as told:
            prepared(tmp_path, folder)
        high, broken, text, fix = told.value.problems
        assert "file 'ant/high.png' is 9 × 8, and the model takes 8 × 8 (image_size)" in high
        assert "file 'bee/broken.png' is not a readable image" in broken
        assert "file 'cat/text.png' is not a readable image (not an image file)" in text
        assert 'data.bad_rows = "skip"' in fix

    def test_up_to_twenty_at_once(self, tmp_path):
        for number in range(30):
            path = tmp_path / "images" / "ant" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("no")
        with pytest.raises(DataError) as told:
            prepared(tmp_path, tmp_path / "images")
        assert len(told.value.problems) == 21

    def test_skipped_on_request_and_refused_over_a_tenth(self, tmp_path):
        folder = image_folder(tmp_path / "images")
        (folder / "bee" / "a.png").write_text("no")
        data = prepared(tmp_path, folder, bad_rows="skip")
        assert len(data.train) == 12 and data.left_out == 1 and "bee/a.png" in data.left_out_first[0]
        (folder / "bee" / "b.png").write_text("no")
        with pytest.raises(DataError, match="2 of 14 rows, over a tenth"):
            prepared(tmp_path, folder, bad_rows="skip")

    def test_more_classes_than_the_head_has(self, tmp_path):
        with pytest.raises(DataError, match=r"'cat/02.png' has the label 'cat', a class more than the 2 of the head"):
            prepared(tmp_path, image_folder(tmp_path / "images"), model={"num_labels": 2})
        np.savez(tmp_path / "a.npz", images=IMAGES, labels=[0, 1, 5] * 4)
        with pytest.raises(DataError) as told:
            prepared(tmp_path, tmp_path / "a.npz")
        assert "row 3 has the label 5, and classes are 0 to 3: the head has 4 classes (num_labels)" in str(told.value)
        assert len(told.value.problems) == 5  # four rows, and what to do

    def test_a_corrupt_image_of_a_saved_data_set_has_its_row(self, tmp_path):
        images = [{"bytes": b"nothing", "path": None}] + [Image.fromarray(one) for one in IMAGES[1:]]
        path = saved(tmp_path, {"image": images, "label": [0] * 11 + [None]})
        with pytest.raises(DataError) as told:
            prepared(tmp_path, path)
        assert "row 1 is not a readable image" in told.value.problems[0]
        assert "row 12 has no label; add it, or remove the row" in told.value.problems[1]

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"images": IMAGES, "labels": np.arange(3)}, r"'labels' has shape \[3\], and there are 12 images"),
            ({"images": IMAGES.astype(np.int64), "labels": np.arange(12)}, "holds int64; give uint8"),
            ({"images": IMAGES[:, :6], "labels": np.arange(12)}, "1 channels of 6 × 8, and the model takes 1 of 8 × 8"),
            ({"pictures": IMAGES, "labels": np.arange(12)}, "no column for image; it has: pictures, labels; name it"),
            ({"images": IMAGES[0, 0], "labels": np.arange(8)}, r"has shape \[8\]; give \[images, height, width\]"),
            ({"images": IMAGES * np.nan, "labels": np.zeros(12, int)}, "row 1 has values that are not finite"),
            ({"images": IMAGES, "labels": np.full(12, 0.5)}, "has the label 0.5, which is neither a class number"),
            ({"images": np.array([None] * 3), "labels": np.zeros(3, int)}, "cannot be read: .*; save plain arrays"),
        ],
    )
    def test_arrays(self, tmp_path, arrays, message):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(DataError, match=message):
            prepared(tmp_path, tmp_path / "a.npz")

    def test_files_beside_the_folders_and_no_images(self, tmp_path):
        with pytest.raises(DataError, match="has no image in a folder"):
            (tmp_path / "empty").mkdir()
            (tmp_path / "empty" / "read.txt").write_text("x")
            prepared(tmp_path, tmp_path / "empty")
        folder = image_folder(tmp_path / "images")
        Image.fromarray(IMAGES[0]).save(folder / "loose.png")
        with pytest.raises(DataError, match=r"holds 'loose.png' beside the folders; give a folder with a folder for"):
            prepared(tmp_path, folder)

    def test_a_file_that_is_no_archive(self, tmp_path):
        (tmp_path / "a.npz").write_text("no")
        with pytest.raises(DataError, match=r"a.npz' is not an .npz file"):
            prepared(tmp_path, tmp_path / "a.npz")

    def test_keys_of_other_tasks(self, tmp_path):
        tables = write_task(tmp_path, "vit")
        tables["data"] |= {"seq_len": 8, "mask_share": 0.2, "columns": {"text": "x"}}
        with pytest.raises(ValueError) as told:
            config_of(tables)
        for part in ("'data.seq_len' does nothing for the task image", "'data.mask_share' does", "names text, which"):
            assert part in str(told.value)

    def test_a_model_of_another_task(self, tmp_path):
        tables = write_task(tmp_path, "vit")
        tables["model"] |= {"task": "seq2seq"}
        tables["data"] |= {"seq_len": 8}
        with pytest.raises((ModelError, ConfigError), match="no model of model_type 'vit' for the task seq2seq"):
            prepare_data(config_of(tables), tmp_path / "cache", QUIET)
