"""A link of so many bits per second and such a round trip, with the server of ``_s3_server.py`` behind.

``python -m benchmarks._link`` prints the server's address. The kernel's TCP runs at both ends, so handshakes, slow
start and windows cost what they cost on such a link. The server is in a network namespace of its own, reached through
two TUN devices between which this process carries the packets, late and no faster than the rate: what ``tc netem`` does
where the kernel has it. Needs root and ``/dev/net/tun``. All of it is gone with the process.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
from queue import SimpleQueue

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_HEADER = 10  # virtio_net_hdr
_PACKET = (1 << 16) + _HEADER  # more would be a new mapping of memory for each read
_UNDER_WAY = 1000  # packets, as netem's default
_NETWORK = "198.18"  # for benchmarks of networks, by RFC 2544


def _tun(name: str, address: str) -> int:
    """An end of the link in this network namespace. Segments cross in bunches of up to 64 KiB, as inside a machine;
    to TCP they have the usual size all the same."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    for command in (f"address add {address}/30 dev {name}", f"link set {name} up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return fd


def _carry(source: int, target: int, rate: float, delay: float) -> None:
    """One direction. What comes while so much is under way is dropped, as by a router."""
    under_way: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def deliver() -> None:
        while True:
            due, packet = under_way.get()
            if (early := due - time.monotonic()) > 0:
                time.sleep(early)
            os.write(target, packet)

    threading.Thread(target=deliver, daemon=True).start()
    free = 0.0  # when the link has sent what it has
    while True:
        packet = os.read(source, _PACKET)
        if under_way.qsize() < _UNDER_WAY:
            free = max(free, time.monotonic()) + (len(packet) - _HEADER) * 8 / rate
            under_way.put((free + delay, packet))


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--gbit", type=float, default=1.0, help="per second, each way (default %(default)s)")
    made.add_argument("--ms", type=float, default=20.0, help="of a round trip (default %(default)s)")
    options = made.parse_args()
    number = os.getpid() % 250
    here = _tun(f"bench{number}", f"{_NETWORK}.{number}.1")
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace of its own")
    there = _tun("far", f"{_NETWORK}.{number}.2")
    for source, target in ((here, there), (there, here)):
        arguments = (source, target, options.gbit * 1e9, options.ms / 2000)
        threading.Thread(target=_carry, args=arguments, daemon=True).start()
    server = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_s3_server.py")
    sys.exit(subprocess.run([sys.executable, server, f"{_NETWORK}.{number}.2"]).returncode)


if __name__ == "__main__":
    main()
