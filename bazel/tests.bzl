"""One cc_test for each file of a folder's TESTS."""

load("//bazel:flags.bzl", "JAX_EP_COPTS")

def gtests(sources, deps, hdrs = [], local_defines = {}, size = "small"):
    """Declares the tests.

    Args:
      sources: names of files, one executable each.
      deps: what all of them link.
      hdrs: headers that they include.
      local_defines: name of a file -> the definitions that it is compiled with.
      size: Bazel's size class of each.
    """
    for source in sources:
        native.cc_test(
            name = source[:-len(".cc")],
            size = size,
            srcs = [source] + hdrs,
            copts = JAX_EP_COPTS + ["-O1"],  # compiles in two thirds of the time of -O2
            local_defines = local_defines.get(source, []),
            deps = deps + ["//bazel:gtest_main"],
        )
