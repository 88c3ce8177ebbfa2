"""Flags of our own code, as in the top CMakeLists.txt; headers of others are not ours to lint."""

JAX_EP_COPTS = [
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wno-missing-field-initializers",  # designated initialisers leave out what keeps its default
    "-Wno-restrict",  # GCC 12 warns about "text" + std::to_string(n) (its bug 105329)
    "-Werror",
]
