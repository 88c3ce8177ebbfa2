// What verbs and ofi ask their libraries for when memory is a GPU's. The libraries are stand-ins:
// no NIC and no GPU has seen these calls.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <memory>

#include "tests/proxy/fake_fabric.h"
#include "tests/proxy/fake_verbs.h"

namespace jax_ep {
namespace {

constexpr int kDevice = 5;
constexpr int kDescriptor = 42;
alignas(64) std::array<std::byte, 4096> memory;

TEST(GpuMemory, is_registered_with_verbs_by_its_dmabuf) {
  FakeVerbs verbs;
  const auto transport = verbs.Make();
  const auto region =
      transport->Register({.bytes = memory, .device = kDevice, .dmabuf_fd = kDescriptor});
  ASSERT_TRUE(region.ok()) << region.status().message();
  const FakeVerbs::Registration& got = verbs.registered();
  EXPECT_EQ(got.fd, kDescriptor);
  EXPECT_EQ(got.offset, 0u);  // the descriptor is of these bytes
  EXPECT_EQ(got.length, memory.size());
  EXPECT_EQ(got.iova, reinterpret_cast<uint64_t>(memory.data()));  // what peers' offsets count from
  EXPECT_EQ(got.access, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
}

// Where the platform exports none, the kernel's peer memory module may know the address.
TEST(GpuMemory, without_a_dmabuf_is_registered_with_verbs_by_its_address) {
  FakeVerbs verbs;
  const auto transport = verbs.Make();
  ASSERT_TRUE(transport->Register({.bytes = memory, .device = kDevice}).ok());
  EXPECT_EQ(verbs.registered().fd, -1);
  EXPECT_EQ(verbs.registered().iova, reinterpret_cast<uint64_t>(memory.data()));
  EXPECT_EQ(verbs.registered().length, memory.size());
}

TEST(GpuMemory, is_refused_by_a_libibverbs_that_knows_no_dmabuf) {
  FakeVerbs verbs;
  verbs.ForgetDmabuf();
  const auto transport = verbs.Make();
  const Status refused =
      transport->Register({.bytes = memory, .device = kDevice, .dmabuf_fd = kDescriptor}).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnimplemented) << refused.message();
}

TEST(GpuMemory, is_registered_with_ofi_by_interface_and_device) {
  FakeFabric fabric;
  fabric.ServeGpuMemory(FI_MR_HMEM);
  const auto transport = fabric.Make({.serves_device = true});
  EXPECT_EQ(fabric.p2p(), FI_HMEM_P2P_REQUIRED);  // never through the host
  const auto region = transport->Register({.bytes = memory, .device = kDevice});
  ASSERT_TRUE(region.ok()) << region.status().message();
  const fi_mr_attr& got = fabric.registered();
  EXPECT_EQ(got.iface, FI_HMEM_CUDA);
  EXPECT_EQ(got.device.cuda, kDevice);
  EXPECT_EQ(got.access, static_cast<uint64_t>(FI_WRITE | FI_REMOTE_WRITE));
  EXPECT_EQ(got.iov_count, 1u);
  EXPECT_EQ(fabric.registered_part().iov_base, memory.data());
  EXPECT_EQ(fabric.registered_part().iov_len, memory.size());
}

// fi_mr(3), FI_MR_HMEM: device buffers need a descriptor also where host buffers (FI_MR_LOCAL) do
// not.
TEST(GpuMemory, is_named_by_its_descriptor_in_writes_of_ofi) {
  FakeFabric fabric;
  fabric.ServeGpuMemory(FI_MR_HMEM);
  const auto transport = fabric.Make({.serves_device = true});
  const auto peer = transport->Connect(transport->LocalAddress(), Deadline::After({}));
  ASSERT_TRUE(peer.ok());
  for (const int device : {kDevice, -1}) {
    const auto region = transport->Register({.bytes = memory, .device = device});
    ASSERT_TRUE(region.ok()) << region.status().message();
    const auto remote = transport->ImportRemoteKey(*peer, region->key);
    ASSERT_TRUE(remote.ok()) << remote.status().message();
    const Status posted = transport->PostWrite({.peer = *peer,
                                                .local_region = region->handle,
                                                .remote_region = *remote,
                                                .length_bytes = 1024,
                                                .has_immediate = true,
                                                .immediate = 1});
    ASSERT_TRUE(posted.ok()) << posted.message();
    EXPECT_EQ(fabric.written_descriptor(), device < 0 ? nullptr : fabric.descriptor());
  }
}

TEST(GpuMemory, is_refused_by_a_provider_of_ofi_that_knows_none) {
  FakeFabric fabric;
  const auto transport = fabric.Make({});
  EXPECT_EQ(fabric.p2p(), -1);
  const Status refused = transport->Register({.bytes = memory, .device = kDevice}).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnimplemented);
  EXPECT_NE(refused.message().find("does not register a GPU's memory"), std::string::npos)
      << refused.message();
}

}  // namespace
}  // namespace jax_ep
