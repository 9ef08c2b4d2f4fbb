"""`ModelSpec`: the facts of a model that a plan needs, parameter by parameter. `read.read_model` reads them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ParameterSpec(BaseModel):
    """One parameter: its first name, every other name it has (tied), its shape and whether it is trained."""

    model_config = ConfigDict(frozen=True)

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    itemsize: int
    dtype: str
    trainable: bool
    block: str | None = None

    @property
    def num_elements(self) -> int:
        """Elements, 1 for a 0-d parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def gathered_itemsize(self, precision: str) -> int:
        """Bytes of an element where the parameter is gathered to be computed with: packed ones stay as they are."""
        return self.itemsize if precision == "fp32" or self.dtype == "uint8" else itemsize_of(precision)


class ModelSpec(BaseModel):
    """What a plan needs to know of a model."""

    model_config = ConfigDict(frozen=True)

    parameters: tuple[ParameterSpec, ...]
    blocks: tuple[str, ...]
    batch_norms: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(p.num_elements for p in self.parameters)

    @property
    def num_trainable(self) -> int:
        """Elements that get a gradient."""
        return sum(p.num_elements for p in self.parameters if p.trainable)

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that are one parameter."""
        return tuple((p.name, *p.aliases) for p in self.parameters if p.aliases)


def itemsize_of(precision: str) -> int:
    """Bytes of one element in ``fp32``, ``bf16``, ``fp16``, or ``fp8`` (whose weights and activations stay bf16)."""
    return 4 if precision == "fp32" else 2
