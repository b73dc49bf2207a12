"""Holds MiB of memory on each of some GPUs, by the driver alone: `hold_memory.py MIB INDEX ...`.

Says `ready` once it holds them, and ends when it is told to by a signal.
"""

import ctypes
import signal
import sys


def check(code: int, what: str) -> None:
    if code:
        sys.exit(f"{what}: CUDA error {code}")


def main(mib: int, *indexes: int) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    check(cuda.cuInit(0), "cuInit")
    for index in indexes:
        context, memory = ctypes.c_void_p(), ctypes.c_uint64()
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), index), "context")
        check(cuda.cuCtxSetCurrent(context), "current")
        size = ctypes.c_size_t(mib << 20)
        check(cuda.cuMemAlloc_v2(ctypes.byref(memory), size), "memory")
    print("ready", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
