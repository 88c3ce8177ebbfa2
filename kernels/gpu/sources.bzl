"""Files of the GPU library, compiled by CMake where there is a GPU compiler."""

KERNELS_GPU = [
    # These take longest, so they come first: no core waits for the last of them.
    "push_combine.cu",
    "ll_dispatch.cu",
    "ll_combine.cu",
    "combine.cu",
    "net_combine.cu",
    "abandon.cu",
    "api.cc",
    "combine_bulk.cu",
    "device_memory.cc",
    "dispatch.cu",
    "dispatch_halves.cu",
    "entry.cu",
    "net_combine_halves.cu",
    "net_dispatch.cu",
    "net_plan.cu",
    "net_slots.cu",
    "plan.cu",
    "weighted_dispatch.cu",
]
