// Whoever reaches the port of an ofi endpoint over tcp or net can write to it without any target
// address, and so without a key that libfabric would check; the immediate arrives all the same.
// Such a write must neither move a flag nor end the group.
#include <gtest/gtest.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdlib.h>
#include <string.h>

#include <array>
#include <string>

#include "proxy/abi/imm.h"
#include "proxy/base/blob.h"
#include "proxy/peer_blob.h"
#include "proxy/transport/ofi_library.h"
#include "proxy/transport/registry.h"
#include "tests/proxy/proxy_world.h"

namespace jax_ep {
namespace {

constexpr std::chrono::seconds kTimeout{30};

// An endpoint of libfabric that knows the address of another and nothing else.
class Stranger {
 public:
  Stranger(const OfiLibrary& library, const std::string& provider, const std::string& target) {
    hints_ = library.dupinfo(nullptr);
    hints_->ep_attr->type = FI_EP_RDM;
    hints_->caps = FI_MSG | FI_RMA;
    hints_->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints_->fabric_attr->prov_name = strdup(provider.c_str());
    EXPECT_EQ(library.getinfo(FI_VERSION(1, 17), "127.0.0.1", nullptr, FI_SOURCE, hints_, &info_),
              0);
    EXPECT_EQ(library.fabric(info_->fabric_attr, &fabric_, nullptr), 0);
    EXPECT_EQ(fi_domain(fabric_, info_, &domain_, nullptr), 0);
    fi_av_attr av{};
    av.type = FI_AV_TABLE;
    fi_cq_attr cq{};
    cq.format = FI_CQ_FORMAT_DATA;
    EXPECT_EQ(fi_av_open(domain_, &av, &av_, nullptr), 0);
    EXPECT_EQ(fi_cq_open(domain_, &cq, &cq_, nullptr), 0);
    EXPECT_EQ(fi_endpoint(domain_, info_, &ep_, nullptr), 0);
    EXPECT_EQ(fi_ep_bind(ep_, &av_->fid, 0), 0);
    EXPECT_EQ(fi_ep_bind(ep_, &cq_->fid, FI_TRANSMIT | FI_RECV), 0);
    EXPECT_EQ(fi_enable(ep_), 0);
    EXPECT_EQ(fi_av_insert(av_, target.data(), 1, &target_, 0, nullptr), 1);
  }
  ~Stranger() {
    for (fid* object : {&ep_->fid, &cq_->fid, &av_->fid, &domain_->fid, &fabric_->fid}) {
      fi_close(object);
    }
    OfiLibrary::Get().value()->freeinfo(info_);
    OfiLibrary::Get().value()->freeinfo(hints_);
  }

  // A write of nothing to nowhere, with `immediate`. True when libfabric has sent it.
  bool Write(uint64_t immediate) {
    const fi_msg_rma message{
        .msg_iov = nullptr,
        .desc = nullptr,
        .iov_count = 0,
        .addr = target_,
        .rma_iov = nullptr,
        .rma_iov_count = 0,
        .context = &context_,
        .data = immediate,
    };
    return Finish([&] { return fi_writemsg(ep_, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION); });
  }
  // A message that nobody has asked for.
  bool Send(uint64_t immediate) {
    return Finish([&] {
      return fi_senddata(ep_, text_.data(), text_.size(), nullptr, immediate, target_, &context_);
    });
  }

 private:
  template <typename Post>
  bool Finish(Post&& post) {
    const Deadline deadline = Deadline::After(kTimeout);
    for (bool is_posted = false; !deadline.expired();) {
      if (!is_posted) {
        const ssize_t rc = post();
        if (rc != 0 && rc != -FI_EAGAIN) return false;
        is_posted = rc == 0;
      }
      fi_cq_data_entry entry;
      if (const ssize_t rc = fi_cq_read(cq_, &entry, 1); rc != -FI_EAGAIN) return rc == 1;
    }
    return false;
  }

  fi_info* hints_ = nullptr;
  fi_info* info_ = nullptr;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* av_ = nullptr;
  fid_cq* cq_ = nullptr;
  fid_ep* ep_ = nullptr;
  fi_addr_t target_ = FI_ADDR_UNSPEC;
  fi_context2 context_{};
  std::array<char, 16> text_{};
};

// The socket address of an endpoint, as its blob has it.
std::string SocketAddress(const std::string& blob) {
  const std::string address = PeerBlob::Decode(blob)->transport_address;
  BlobReader reader(address);
  reader.U64();
  reader.U64();
  reader.Text();
  reader.U64();
  return std::string(reader.Text());
}

class OfiStranger : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    setenv("JAX_EP_OFI_PROVIDER", GetParam(), 1);
    setenv("JAX_EP_SOCKET_IFNAME", "lo", 1);
  }
  void TearDown() override {
    unsetenv("JAX_EP_OFI_PROVIDER");
    unsetenv("JAX_EP_SOCKET_IFNAME");
  }
};

TEST_P(OfiStranger, moves_no_flag_and_ends_no_group) {
  const Result<const OfiLibrary*> library = OfiLibrary::Get();
  if (!library.ok()) GTEST_SKIP() << library.status().message();
  if (const auto made = MakeTransport("ofi", TransportOptions{}); !made.ok()) {
    GTEST_SKIP() << "no provider " << GetParam() << ": " << made.status().message();
  }
  WorldOptions options;
  options.ranks_per_process = 1;
  options.proxy.transport = "ofi";
  ProxyWorld world(options);
  world.Start();
  ASSERT_FALSE(HasFatalFailure());
  world.Barrier();

  Stranger stranger(**library, GetParam(), SocketAddress(world.Blob(1)));
  const Imm signal{
      .kind = ImmKind::kSignal, .flow = static_cast<uint32_t>(Channel::kDispatch), .epoch = 1};
  const Imm failed{.kind = ImmKind::kControl, .epoch = static_cast<uint32_t>(ImmControl::kFailed)};
  const Imm unknown{.kind = ImmKind::kSignal, .flow = kMaxFlows - kNumChannels, .epoch = 1};
  for (const Imm& imm : {signal, failed, unknown}) {
    EXPECT_TRUE(stranger.Write(*TryEncodeImm(imm)));
    EXPECT_TRUE(stranger.Write(uint64_t{0xbad} << 32 | *TryEncodeImm(imm)));
  }
  const Deadline deadline = Deadline::After(kTimeout);
  while (world.proxy(1).DumpState().find("forged immediates dropped 6") == std::string::npos) {
    ASSERT_FALSE(deadline.expired() || world.failure(1).failed())
        << world.failure(1).status().message() << world.proxy(1).DumpState();
    std::this_thread::yield();
  }
  EXPECT_TRUE(stranger.Send(*TryEncodeImm(signal)));
  EXPECT_EQ(world.flag(1, Channel::kDispatch, 0)->load(), 0u);
  world.Push(0,
             Command{.op = Op::kSignal, .dst_rank = 1, .channel = Channel::kDispatch, .epoch = 1});
  world.AwaitFlag(1, Channel::kDispatch, 0, 1);
  world.Barrier();
  EXPECT_EQ(world.flag(1, Channel::kDispatch, 0)->load(), 1u);
  world.Stop();
}

INSTANTIATE_TEST_SUITE_P(Ofi, OfiStranger, testing::Values("tcp", "net"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace jax_ep
