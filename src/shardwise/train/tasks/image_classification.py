"""Image classification: an image, and its class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.train.config import Config
from shardwise.train.data.rows import RowData, RowSide
from shardwise.train.task_names import TaskName
from shardwise.train.tasks.image_rows import ImageReader
from shardwise.train.tasks.task import IGNORED, Batch, RowSamples, Task


class ImageClassification(Task):
    """Image classification; bytes become (x / 255 - mean) / std, and floating-point images stay as they are."""

    name: TaskName = "image-classification"
    auto_class = "AutoModelForImageClassification"
    mapping = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"
    noun = "images"

    def reader(self, config: Config, facts: Any) -> ImageReader:
        """Return how rows are read."""
        return ImageReader(config, facts)

    def batches(self, data: RowData, rows: RowSide, config: Config) -> RowSamples:
        """Return the samples of one side."""
        images, facts = rows.columns["image"], data.facts or {}
        mean, std = (np.array(facts[name], np.float32)[:, None, None] for name in ("mean", "std"))

        def make(numbers: NDArray[np.int64]) -> Batch:
            pixels = images.of(numbers)
            if pixels.dtype == np.uint8:
                pixels = (pixels.astype(np.float32) / 255 - mean) / std
            labels = torch.from_numpy(rows.columns["label"].of(numbers, IGNORED))
            return torch.from_numpy(np.ascontiguousarray(pixels, np.float32)), labels

        return RowSamples(rows, make)
