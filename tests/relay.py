"""A relay between two network namespaces that holds every packet back for a while: delay without the kernel's netem.

Run as a program: ``relay.py SECONDS NAMESPACE DEVICE NAMESPACE DEVICE``. It makes a TUN device in each namespace, says
``ready`` and carries packets between them until it is told to end. It keeps what waits in memory and drops nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x1, 0x1000, 0x40000000
LARGEST = 65536
BATCH = 64  # packets that are read in one go before what is due is sent


def open_tun(namespace: str, device: str) -> int:
    """A TUN device of that name in a named namespace, as a file descriptor; this process moves there."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(place, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
    finally:
        os.close(place)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def relay(one: int, other: int, delay_s: float) -> None:
    """Carry packets both ways, each ``delay_s`` after it came."""
    peers = {one: other, other: one}
    waiting: dict[int, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}
    while True:
        due = [queue[0][0] for queue in waiting.values() if queue]
        left_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([one, other], [], [], left_s)
        for source in ready:
            for _ in range(BATCH):
                try:
                    packet = os.read(source, LARGEST)
                except BlockingIOError:
                    break
                waiting[peers[source]].append((time.monotonic() + delay_s, packet))
        now = time.monotonic()
        for target, queue in waiting.items():
            while queue and queue[0][0] <= now:
                try:
                    os.write(target, queue[0][1])
                except BlockingIOError:
                    break
                except OSError:  # the device is down: the packet is lost, as on a cable that is pulled
                    pass
                queue.popleft()


def main() -> None:
    """The program."""
    delay_s, places = float(sys.argv[1]), sys.argv[2:]
    one, other = open_tun(places[0], places[1]), open_tun(places[2], places[3])
    print("ready", flush=True)
    relay(one, other, delay_s)


if __name__ == "__main__":
    main()
