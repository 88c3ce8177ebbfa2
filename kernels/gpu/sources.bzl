"""Files of the GPU library, compiled by CMake where there is a GPU compiler."""

KERNELS_GPU = [
    "api.cc",
    "combine.cu",
    "combine_bulk.cu",
    "device_memory.cc",
    "dispatch.cu",
    "dispatch_halves.cu",
    "entry.cu",
    "ll_dispatch.cu",
    "net_combine.cu",
    "net_combine_halves.cu",
    "net_dispatch.cu",
    "net_plan.cu",
    "net_slots.cu",
    "plan.cu",
    "push_combine.cu",
    "weighted_dispatch.cu",
]
