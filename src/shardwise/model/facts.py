"""`ModelSpec`: per-parameter facts of a model for planning, read by `read.read_model`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ParameterSpec(BaseModel):
    """Parameter: first name, other (tied) names, shape, and whether it is trained."""

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
        """Return the bytes per element when gathered for compute; quantized ones are unchanged."""
        return self.itemsize if precision == "fp32" or self.dtype == "uint8" else itemsize_of(precision)


class ModelSpec(BaseModel):
    """Facts of a model that a plan needs."""

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
        """Groups of names that share one parameter."""
        return tuple((p.name, *p.aliases) for p in self.parameters if p.aliases)


def itemsize_of(precision: str) -> int:
    """Return the bytes of an element in ``fp32``, ``bf16``, ``fp16``, or ``fp8``.

    The weights and activations of ``fp8`` stay bf16.
    """
    return 4 if precision == "fp32" else 2
