"""Hardware: GPUs and networks as data, with their sources, and the time that an operation takes on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from flk_runtime.errors import SetupError
from flk_runtime.system import mfu

GIB: Final = 1 << 30
# Fractions of the peaks that well-made kernels reach. None is fitted to a run that flk's documentation compares with.
# - matrix products: the rate of large bfloat16 products on an H100 and an A100 (ml-engineering, accelerator chapter).
# - attention: FlashAttention-2, forward and backward pass together, on an A100 (Dao, arXiv 2307.08691, table 1) reaches
#   0.5 to 0.6 of the peak; its kernels do not use the H100's newer instructions and reach 0.35 there (Shah et al.,
#   FlashAttention-3, arXiv 2407.08608, figure 5).
# - memory: the rate of copies of large tensors.
# - links: NCCL's busbw over the links' own bandwidth (ml-engineering, network chapter).
MATMUL_EFFICIENCY: Final = 0.75
ATTENTION_EFFICIENCY: Final = 0.35
MEMORY_EFFICIENCY: Final = 0.85
LINK_EFFICIENCY: Final = 0.8
# - launch: an assumption of the order of magnitude. The driver takes about 5 µs to launch a kernel, and torch's
#   dispatcher, autograd and Python as much again.
LAUNCH_SECONDS: Final = 10e-6  # that an operation takes at least
COLLECTIVE_SECONDS: Final = 30e-6  # that a collective takes at least
DDP_BUCKET: Final = 25 << 20  # bytes of gradients that DDP sends together (bucket_cap_mb)
RESERVED: Final = int(1.5 * GIB)  # CUDA context, NCCL's buffers and the libraries' workspaces
FRAGMENTATION: Final = 0.05  # of the memory: the share that the caching allocator cannot use


@dataclass(frozen=True)
class Gpu:
    """A type of GPU. Sources of the figures: the vendors' data sheets. Without figures, times are 0."""

    name: str
    memory: int  # bytes
    bandwidth: float = 0.0  # of its memory, in bytes per second
    link: float = 0.0  # to the other GPUs of the node, one direction, in bytes per second
    flops: float | None = None  # of matrix products, in FLOP/s, where no peak is published
    overlaps: bool = True  # communication and computation go on at the same time

    @property
    def is_known(self) -> bool:
        """Whether there are figures for it."""
        return self.bandwidth > 0

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether a peak of matrix products in ``dtype`` is known."""
        return self.flops is not None or mfu.peak(self.name, dtype, tf32=mfu.uses_tf32()) is not None

    def peak(self, dtype: torch.dtype) -> float:
        """Peak of matrix products in FLOP/s, in TF32 where torch uses it. Raises SetupError if it is not known."""
        found = self.flops or mfu.peak(self.name, dtype, tf32=mfu.uses_tf32())
        if found is None:
            raise SetupError(
                f"there is no figure for matrix products in {str(dtype).removeprefix('torch.')} on GPUs of type "
                f"{self.name}: use another dtype, or plan for another type"
            )
        return found

    def seconds(self, flops: int, size: int, dtype: torch.dtype, *, attention: bool) -> float:
        """Time of an operation that does ``flops`` and reads and writes ``size`` bytes, by the roofline model.

        Source: Williams et al., "Roofline: An Insightful Visual Performance Model", CACM 52(4), 2009.
        """
        if not self.is_known:
            return 0.0
        efficiency = ATTENTION_EFFICIENCY if attention else MATMUL_EFFICIENCY
        compute = flops / (self.peak(dtype) * efficiency) if flops else 0.0
        return LAUNCH_SECONDS + max(compute, size / (self.bandwidth * MEMORY_EFFICIENCY))


def _gpu(name: str, gib: float, terabytes: float, gigabytes: float) -> Gpu:
    return Gpu(name, int(gib * GIB), terabytes * 1e12, gigabytes * 1e9)


# By the name that users give: name for `mfu.peak`, GiB, TB/s of memory, GB/s to GPUs of the node,
# over NVLink or Infinity Fabric, else over 16 lanes of PCIe 3 (16 GB/s), 4 (32) or 5 (64). Data sheets name the sum of
# both directions; here is one. Sources, for these figures and for mfu.PEAKS:
# - T4, V100 (SXM2, PCIe), L4, A10, A40, L40S, RTX A6000: NVIDIA's data sheet of each.
# - A100: NVIDIA's data sheets of the A100 with 40 and with 80 GB, columns SXM and PCIe.
# - H100: NVIDIA's data sheet of the H100, columns SXM and NVL, and its product brief PB-11133 of the PCIe card. NVL:
#   600 GB/s over the bridge of two cards. With 96 GB: torchtitan's report (arXiv 2410.06511), on the GPUs of its runs.
# - H200: NVIDIA's data sheet, columns SXM and NVL. NVL: 900 GB/s over the bridge.
# - B200, B300: an eighth of the HGX boards. GB200: of the NVL72, by its GPUs.
# - MI300X, MI325X: AMD's data sheets. Seven links of Infinity Fabric of 128 GB/s, both directions together.
# - A10G: the provider of the machines that have it (AWS, G5).
# Not compared with a document: RTX A6000, A10G's tensor cores, H20, both NVL, B300 and GB300 (documents differ in the
# memory of eight B300: 2.1 or 2.3 TB), peaks and bandwidth of MI325X, MI250X and MI355X. Documents of NVIDIA differ in
# float32 and TF32 of B200 (75 or 80, 1100 or 1125) and in float32 of GB200 (80 or 90).
GPUS: Final = {
    "t4": _gpu("T4", 16, 0.32, 16),
    "v100-16gb": _gpu("V100", 16, 0.9, 150),
    "v100": _gpu("V100", 32, 0.9, 150),
    "v100-pcie": _gpu("V100 PCIe", 32, 0.9, 16),
    "l4": _gpu("L4", 24, 0.3, 32),
    "a10": _gpu("A10", 24, 0.6, 32),
    "a10g": _gpu("A10G", 24, 0.6, 32),
    "a40": _gpu("A40", 48, 0.696, 32),
    "a6000": _gpu("A6000", 48, 0.768, 32),
    "a100-pcie-40gb": _gpu("A100 PCIe", 40, 1.555, 32),
    "a100-pcie": _gpu("A100 PCIe", 80, 1.935, 32),
    "a100-40gb": _gpu("A100", 40, 1.555, 300),
    "a100": _gpu("A100", 80, 2.039, 300),
    "h100": _gpu("H100", 80, 3.35, 450),
    "h100-96gb": _gpu("H100", 96, 2.4, 450),
    "h100-pcie": _gpu("H100 PCIe", 80, 2.0, 64),
    "h100-nvl": _gpu("H100 NVL", 94, 3.9, 300),
    "h200": _gpu("H200", 141, 4.8, 450),
    "h200-nvl": _gpu("H200 NVL", 141, 4.8, 450),
    "b200": _gpu("B200", 180, 7.7, 900),
    "b300": _gpu("B300", 288, 8.0, 900),
    "gb200": _gpu("GB200", 186, 8.0, 900),
    "l40s": _gpu("L40S", 48, 0.864, 32),
    "mi300x": _gpu("MI300X", 192, 5.3, 448),
    "mi325x": _gpu("MI325X", 256, 6.0, 448),
}

# One process on some cores of a server: the order of magnitude, for a choice of the strategy. `flk bench` measures.
_CPU: Final[dict[str, Any]] = {"bandwidth": 10e9, "link": 1e9, "flops": 50e9, "overlaps": False}


def gpu_of_type(name: str) -> Gpu:
    """The GPU of a type in GPUS. Raises SetupError if there is none."""
    found = GPUS.get(name.lower())
    if found is None:
        raise SetupError(f"no figures for GPUs of type {name.lower()!r}: expected one of {', '.join(GPUS)}")
    return found


def find_gpu(device: str, memory: int) -> Gpu:
    """The figures of a device by the name that torch has for it, with its own memory in bytes.

    A device that is not in GPUS has no figures.
    """
    if device == "cpu":
        return Gpu("CPU", memory, **_CPU)
    known = [each for each in GPUS.values() if mfu.is_device(each.name, device)]
    if not known:
        return Gpu(device, memory)
    nearest = min(known, key=lambda each: (-len(each.name.split()), abs(each.memory - memory)))
    return replace(nearest, memory=memory)


def type_of(gpu: Gpu) -> str:
    """The type of a GPU in GPUS, of those with its name the one that has most nearly its memory; else its name."""
    same = {key: each for key, each in GPUS.items() if each.name == gpu.name}
    return min(same, key=lambda key: abs(same[key].memory - gpu.memory), default=gpu.name)


# Bytes per second and GPU between nodes, one direction, by the name of flk's preset of the fabric.
FABRICS: Final = {
    "socket": 100e9 / 8 / 8,  # one network card of 100 Gbit/s for eight GPUs
    "auto": 400e9 / 8,
    "infiniband": 400e9 / 8,  # NDR, one port for each GPU
    "roce": 400e9 / 8,
    "efa": 400e9 / 8,  # p5.48xlarge: 3,200 Gbit/s for eight GPUs
    "tcpx": 100e9 / 8,  # A3 High: 800 Gbit/s for eight GPUs
    "tcpxo": 200e9 / 8,  # A3 Mega: 1,600 Gbit/s for eight GPUs
    "gib": 400e9 / 8,  # A3 Ultra: 3,200 Gbit/s for eight GPUs
}
