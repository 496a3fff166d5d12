"""Fabric's accelerators, which are named by a word here."""

from weft.fabric._absent import DEVICES, absent

__getattr__ = absent(
    __name__,
    {
        'Say it by Fabric(accelerator="cpu") or "cuda".': "Accelerator CPUAccelerator CUDAAccelerator",
        "CUDA_VISIBLE_DEVICES chooses devices.": "find_usable_cuda_devices",
        DEVICES: "MPSAccelerator XLAAccelerator",
    },
)
