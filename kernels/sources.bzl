"""Files that CMake (bazel/sources.cmake) and Bazel both compile."""

KERNELS_CPU = [
    "cpu/combine.cc",
    "cpu/dispatch.cc",
    "cpu/fp8_rows.cc",
    "cpu/huge_pages.cc",
    "cpu/internode.cc",
    "cpu/ll_combine.cc",
    "cpu/ll_dispatch.cc",
    "cpu/partials.cc",
    "cpu/plan.cc",
    "cpu/plan_tables.cc",
    "cpu/published.cc",
    "cpu/row_index.cc",
    "cpu/rounds.cc",
    "cpu/rows.cc",
    "cpu/sync.cc",
    "cpu/tree.cc",
    "cpu/unpack.cc",
]
