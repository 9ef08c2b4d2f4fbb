"""Xid errors of GPUs that the NVIDIA driver wrote to the kernel's log."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

KERNEL_LOG = Path("/dev/kmsg")
# NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors): those about hardware, and what to do.
MEANING = {
    48: ("an uncorrectable memory error", "reset the GPU (nvidia-smi -r) or restart; if it comes back, replace it"),
    62: ("the GPU's own controller halted", "reset the GPU or restart the machine"),
    63: ("memory rows are to be remapped", "reset the GPU (nvidia-smi -r) so that the remap takes effect"),
    64: ("memory rows could not be remapped", "replace the GPU"),
    74: ("an NVLink error", "reset the GPU; if it comes back, check the bridge or the NVSwitch board"),
    79: ("the GPU has fallen off the bus", "restart; then check power, seating and cooling of the card"),
    92: ("many single-bit memory errors", "watch it; replace the GPU if they continue"),
    94: ("a contained memory error: one program was ended", "reset the GPU when it is free"),
    95: ("an uncontained memory error", "reset the GPU or restart the machine"),
    119: ("the GPU's system processor does not answer", "reset the GPU or restart; update the driver"),
    120: ("an error of the GPU's system processor", "reset the GPU or restart; update the driver"),
}


class Xid(BaseModel):
    """Xid error: the card's PCI address, the number, and its count."""

    model_config = ConfigDict(frozen=True)

    bus: str
    number: int
    times: int = 1

    @property
    def text(self) -> str:
        """Describe the error; empty for errors that only a program's own mistake causes."""
        return MEANING[self.number][0] if self.number in MEANING else "see NVIDIA's list of Xid errors"

    @property
    def is_hardware(self) -> bool:
        """Return whether the error concerns the hardware, not the program."""
        return self.number in MEANING


def parse_xids(text: str) -> tuple[Xid, ...]:
    """Parse Xid errors in a kernel log (``NVRM: Xid (PCI:0000:3b:00): 79, ...``), by card."""
    counts: dict[tuple[str, int], int] = {}
    for found in re.finditer(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)", text):
        key = (found.group(1).lower(), int(found.group(2)))
        counts[key] = counts.get(key, 0) + 1
    return tuple(Xid(bus=bus, number=number, times=times) for (bus, number), times in sorted(counts.items()))


def read_xids(log: Path = KERNEL_LOG) -> tuple[Xid, ...] | None:
    """Read the errors still in the kernel's log; ``None`` if it may not be read."""
    lines = []
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        with contextlib.suppress(BlockingIOError):  # the end of the log
            while True:
                try:
                    line = os.read(fd, 8192)
                except BrokenPipeError:  # a line was overwritten before it was read
                    continue
                if not line:
                    break
                lines.append(line.decode(errors="replace"))
    except OSError:
        return None
    finally:
        os.close(fd)
    return parse_xids("".join(lines))
