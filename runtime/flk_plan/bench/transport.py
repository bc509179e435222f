"""Transport: the network that NCCL uses, by its log, and whether the preset of the fabric names this network."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

# Expressions for NCCL's names of its networks, in lower case, and what to do where a preset has another network. NCCL
# writes "NCCL INFO Using network IB" (src/init.cc), and before it "NET/IB : Using [0]mlx5_0:1/RoCE" (src/transport).
_USING: Final = re.compile(r"NCCL INFO (?:.*: )?Using network (.+?)\s*$")
_ROCE: Final = re.compile(r"NCCL INFO NET/IB : Using .*/RoCE")
_IB: Final = r"\bg?ib(ext)?(_v\d+)?\b"  # IBext, IBext_v8: NVIDIA's plugin
_EXPECTED: Final = {
    "efa": ("libfabric", "ofi"),
    "infiniband": (_IB,),  # and not libfabric
    "roce": (_IB,),
    "gib": (_IB,),
    "tcpx": ("tcpx",),
    "tcpxo": ("fastrak", "tcpxo"),
    "socket": ("socket",),
}
_REMEDIES: Final = {
    "efa": "use an image with aws-ofi-nccl, and check that the pods have vpc.amazonaws.com/efa",
    "infiniband": "check that the pods have the RDMA devices of their node and may lock memory",
    "roce": "check that the pods have the RDMA devices of their node, and NCCL_IB_GID_INDEX",
    "gib": "check that the gIB plugin's libraries are mounted, and the annotations of its networks",
    "tcpx": "check that the tcpx-daemon runs beside the ranks and that the plugin's libraries are mounted",
    "tcpxo": "check that the tcpxo-daemon runs beside the ranks and that the plugin's libraries are mounted",
    "socket": "another network is there; use its fabric",
}


def transport(lines: Iterable[str]) -> str | None:
    """The network between nodes by NCCL's own name, as IB, IB (RoCE), Socket, AWS Libfabric; None if there is none."""
    found, roce = None, False
    for line in lines:
        roce = roce or bool(_ROCE.search(line))
        match = _USING.search(line)
        if match:
            found = match[1]
    return f"{found} (RoCE)" if found == "IB" and roce else found


def warning(fabric: str, used: str | None) -> str | None:
    """A sentence if NCCL does not use the network of the preset ``fabric``, with what to do; None if all is well."""
    if used is None:
        return None
    name = used.lower()
    if fabric == "auto":
        if name == "socket":
            return "NCCL uses TCP sockets between nodes: if the nodes have a faster network, name it with --fabric"
        return None
    if fabric not in _EXPECTED or any(re.search(word, name) for word in _EXPECTED[fabric]):
        return None
    return f"NCCL uses the network {used}, and the job's fabric is {fabric}: {_REMEDIES[fabric]}"
