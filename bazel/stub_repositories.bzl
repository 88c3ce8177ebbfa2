"""The two repositories that Bazel 4.2 loads and Debian has in no form that fits.

rules_cc: Debian's is for a newer Bazel; the rules themselves are built in.
remote_coverage_tools: implicit dependencies of cc_test, used by `bazel coverage` only.
"""

_CC_DEFS = """
cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
objc_library = native.objc_library
"""

_COVERAGE_TARGETS = ["Main", "coverage_report_generator", "lcov_merger"]

def _rules_cc_impl(ctx):
    ctx.file("cc/BUILD")
    ctx.file("cc/defs.bzl", _CC_DEFS)

def _remote_coverage_tools_impl(ctx):
    ctx.file("BUILD", "".join([
        'filegroup(name = "%s", visibility = ["//visibility:public"])\n' % name
        for name in _COVERAGE_TARGETS
    ]))

_rules_cc = repository_rule(implementation = _rules_cc_impl)
_remote_coverage_tools = repository_rule(implementation = _remote_coverage_tools_impl)

def stub_repositories():
    _rules_cc(name = "rules_cc")
    _remote_coverage_tools(name = "remote_coverage_tools")
