"""The reader of racecheck's reports lets known pairs pass, and nothing else."""

import pytest
from check_racecheck import problems_of

FLAGS = """\
========= Error: Race reported between Read access at jax_ep::gpu::LoadAcquireBlock(const unsigned int *)+0x3240 in memory_order.cuh:116
=========     and Write access at jax_ep::gpu::StoreReleaseBlock(unsigned int *, unsigned int)+0xe2d0 in memory_order.cuh:121 [184 hazards]
========= 
"""  # noqa: E501
CLONES = """\
========= Error: Race reported between Read access at [clone void jax_ep::gpu::<unnamed>::CombineRows<jax_ep::gpu::F32, jax_ep::gpu::F32, (bool)0, (unsigned int)7>(jax_ep::gpu::CombineKernelParams)] jax_ep::gpu::LoadAcquireBlock(const unsigned int *)+0x10540 in memory_order.cuh:131
=========     and Write access at [clone void jax_ep::gpu::<unnamed>::CombineRows<jax_ep::gpu::F32, jax_ep::gpu::F32, (bool)0, (unsigned int)7>(jax_ep::gpu::CombineKernelParams)] jax_ep::gpu::StoreReleaseBlock(unsigned int *, unsigned int)+0x105b0 in memory_order.cuh:136 [264 hazards]
"""  # noqa: E501
CLONE_AND_KERNEL = """\
========= Error: Race reported between Read access at [clone jax_ep::gpu::<unnamed>::PullRowsInBulk(jax_ep::gpu::PullParams)] jax_ep::gpu::LoadAcquireBlock(const unsigned int *)+0x10540 in memory_order.cuh:131
=========     and Write access at jax_ep::gpu::<unnamed>::PullRowsInBulk(jax_ep::gpu::PullParams)+0x105b0 in dispatch.cu:136 [264 hazards]
"""  # noqa: E501
SLOTS = """\
========= Error: Race reported between Write access at jax_ep::gpu::BulkLoad(void *, const void *, unsigned int, unsigned long *)+0x10 in memory_order.cuh:163
=========     and Read access at jax_ep::gpu::team::Summer<jax_ep::gpu::F16, jax_ep::gpu::F32, (unsigned int)2>::Run(const jax_ep::gpu::CombineKernelParams &)+0x90 in combine_summer.cuh:72 [4 hazards]
"""  # noqa: E501
SUMMARY = "========= RACECHECK SUMMARY: {} displayed ({}, 0 warnings)\n"


def summary(displayed, errors):
    return SUMMARY.format(f"{displayed} hazards", f"{errors} errors")


@pytest.mark.parametrize("log", [summary(0, 0), FLAGS + CLONES + summary(2, 2)])
def test_nothing_and_what_is_known_pass(log):
    assert problems_of("[  PASSED  ] 1 test.\n" + log) == []


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        (FLAGS, "no summary"),
        (FLAGS + summary(1, 30), "30 hazards, 1 shown"),
        (FLAGS + summary(2, 2), "2 hazards, 2 shown, 1 read"),
        (SLOTS + summary(1, 1), "BulkLoad races with team::Summer::Run"),
        (CLONE_AND_KERNEL + summary(1, 1), "LoadAcquireBlock races with ::PullRowsInBulk"),
    ],
)
def test_everything_else_fails(log, problem):
    assert any(problem in found for found in problems_of(log))
