// The trace: its ring, its file, and who may open it.
#include "proxy/base/trace.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

namespace jax_ep {
namespace {

struct Written {
  std::vector<std::string> processes, tracks, names, sites;
  std::map<uint32_t, std::vector<TraceEvent>> events;
  std::map<uint32_t, uint64_t> dropped;
};

Written Parse(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  const std::string data = text.str();
  Written out;
  for (size_t at = 0; at < data.size();) {
    uint32_t head[2];
    EXPECT_LE(at + sizeof(head), data.size());
    std::memcpy(head, data.data() + at, sizeof(head));
    at += sizeof(head);
    EXPECT_LE(at + head[1], data.size());
    const std::string body = data.substr(at, head[1]);
    at += head[1];
    uint32_t track = 0;
    std::memcpy(&track, body.data(), sizeof(track));
    switch (static_cast<TraceRecord>(head[0])) {
      case TraceRecord::kProcess:
        out.processes.push_back(body);
        break;
      case TraceRecord::kTrack:
        out.tracks.push_back(body.substr(4));
        break;
      case TraceRecord::kName:
        out.names.push_back(body.substr(8));
        break;
      case TraceRecord::kSite:
        out.sites.push_back(body.substr(8));
        break;
      case TraceRecord::kEvents:
        for (size_t i = 8; i < body.size(); i += sizeof(TraceEvent)) {
          std::memcpy(&out.events[track].emplace_back(), body.data() + i, sizeof(TraceEvent));
        }
        break;
      case TraceRecord::kDropped:
        std::memcpy(&out.dropped[track], body.data() + 8, sizeof(uint64_t));
        break;
      default:
        ADD_FAILURE() << "record " << head[0];
    }
  }
  return out;
}

class TraceTest : public ::testing::Test {
 protected:
  TraceTest() { std::filesystem::create_directory(folder_); }
  ~TraceTest() override { std::filesystem::remove_all(folder_); }

  std::string prefix() const { return (folder_ / "t").string(); }
  // The only file of the folder.
  std::string OnlyFile() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      found.push_back(entry.path().string());
    }
    EXPECT_EQ(found.size(), 1u);
    return found.empty() ? std::string() : found.front();
  }
  std::shared_ptr<Tracer> MustOpen() {
    auto tracer = Tracer::Open(prefix(), 3, [](uint64_t site) {
      return site == 7 ? std::string("train.py:42") : std::string();
    });
    EXPECT_TRUE(tracer.ok()) << tracer.status().message();
    return *tracer;
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("jax_ep_trace_" + std::to_string(getpid()));
};

const TrackLabel kLabel{.kind = TrackKind::kRank, .rank = 2, .group_name = "g"};

TEST(TraceTrack, events_come_out_in_order_across_the_end_of_its_memory) {
  TraceTrack track(0, "");
  uint64_t next_in = 0, next_out = 0;
  const auto take = [&](const TraceEvent* events, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(events[i].value, next_out++);
  };
  for (int round = 0; round < 7; ++round) {
    for (uint64_t i = 0; i < TraceTrack::kCapacity / 3 * 2; ++i) track.Add({.value = next_in++});
    while (track.Read(take) > 0) {
    }
    EXPECT_EQ(next_out, next_in);
  }
  EXPECT_EQ(track.num_dropped(), 0u);
}

TEST(TraceTrack, what_finds_it_full_is_dropped_and_counted) {
  TraceTrack track(0, "");
  for (uint64_t i = 0; i < TraceTrack::kCapacity + 5; ++i) track.Add({.value = i});
  EXPECT_EQ(track.num_dropped(), 5u);
  uint64_t last = 0;
  while (track.Read([&](const TraceEvent* events, uint64_t count) {
    last = events[count - 1].value;
  }) > 0) {
  }
  EXPECT_EQ(last, TraceTrack::kCapacity - 1);
  track.Add({.value = 99});
  track.Read([&](const TraceEvent* events, uint64_t) { last = events[0].value; });
  EXPECT_EQ(last, 99u);
}

TEST(TraceTrack, a_writer_and_a_reader_lose_nothing) {
  TraceTrack track(0, "");
  constexpr uint64_t kEvents = 300'000;
  std::thread writer([&track] {
    for (uint64_t i = 0; i < kEvents; ++i) {
      track.Add({.value = i, .name = track.NameIndex(i % 2 == 0 ? "even" : "odd")});
    }
  });
  uint64_t seen = 0, next = 0;
  while (seen + track.num_dropped() < kEvents) {
    track.Read([&](const TraceEvent* events, uint64_t count) {
      for (uint64_t i = 0; i < count; ++i) {
        ASSERT_GE(events[i].value, next);  // those in between were dropped
        next = events[i].value + 1;
        ASSERT_STREQ(track.name(events[i].name), events[i].value % 2 == 0 ? "even" : "odd");
      }
      seen += count;
    });
  }
  writer.join();
  EXPECT_GT(seen, 0u);
}

TEST_F(TraceTest, the_file_has_what_was_added) {
  {
    const std::shared_ptr<Tracer> tracer = MustOpen();
    const std::shared_ptr<TraceTrack> track = tracer->AddTrack(kLabel);
    track->Add({.begin_ns = 1, .end_ns = 2, .detail = 7, .name = track->NameIndex("dispatch")});
    track->Add({.begin_ns = 3,
                .end_ns = 4,
                .kind = TraceKind::kPhase,
                .name = track->NameIndex("pull rows")});
  }
  const Written written = Parse(OnlyFile());
  ASSERT_EQ(written.processes.size(), 1u);
  std::string pid_and_index = "\n";
  pid_and_index.append(std::to_string(getpid())).append("\n3\n");
  EXPECT_NE(written.processes[0].find(pid_and_index), std::string::npos);
  EXPECT_EQ(written.tracks, std::vector<std::string>{"rank\n0\n1\n2\ng"});
  EXPECT_EQ(written.names, (std::vector<std::string>{"dispatch", "pull rows"}));
  EXPECT_EQ(written.sites, std::vector<std::string>{"train.py:42"});
  ASSERT_EQ(written.events.size(), 1u);
  const std::vector<TraceEvent>& events = written.events.begin()->second;
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].end_ns, 2u);
  EXPECT_EQ(events[1].name, 1u);
}

TEST_F(TraceTest, all_groups_of_a_process_share_a_file_that_later_ones_continue) {
  uint32_t first_id = 0;
  {
    const std::shared_ptr<Tracer> one = MustOpen();
    EXPECT_EQ(one, MustOpen());
    const auto track = one->AddTrack(kLabel);
    first_id = track->id();
    track->Add({.value = 1, .kind = TraceKind::kSignal});
  }
  {
    const std::shared_ptr<Tracer> two = MustOpen();
    const auto track = two->AddTrack(kLabel);
    EXPECT_NE(track->id(), first_id);
    track->Add({.value = 2, .kind = TraceKind::kSignal});
  }
  const Written written = Parse(OnlyFile());
  EXPECT_EQ(written.processes.size(), 2u);
  EXPECT_EQ(written.tracks.size(), 2u);
  EXPECT_EQ(written.events.size(), 2u);
}

TEST_F(TraceTest, a_killed_process_leaves_what_it_did) {
  const pid_t child = fork();
  if (child == 0) {
    const std::shared_ptr<Tracer> tracer = MustOpen();
    const std::shared_ptr<TraceTrack> track = tracer->AddTrack(kLabel);
    track->Add({.value = 5, .kind = TraceKind::kSignal});
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // ten periods
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  const Written written = Parse(OnlyFile());
  ASSERT_EQ(written.events.size(), 1u);
  EXPECT_EQ(written.events.begin()->second.at(0).value, 5u);
}

TEST_F(TraceTest, a_file_that_cannot_be_made_is_an_error_that_names_it) {
  const auto tracer = Tracer::Open(prefix() + "/none/t", 0, [](uint64_t) { return ""; });
  ASSERT_FALSE(tracer.ok());
  EXPECT_EQ(tracer.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(tracer.status().message().find("JAX_EP_TRACE"), std::string::npos);
  EXPECT_NE(tracer.status().message().find(prefix() + "/none/t"), std::string::npos);
}

TEST_F(TraceTest, what_is_added_after_the_end_is_lost_and_harms_nobody) {
  std::shared_ptr<TraceTrack> track;
  {
    const std::shared_ptr<Tracer> tracer = MustOpen();
    track = tracer->AddTrack(kLabel);
  }
  for (uint64_t i = 0; i <= TraceTrack::kCapacity; ++i) track->Add({.value = i});
  EXPECT_EQ(track->num_dropped(), 1u);
}

}  // namespace
}  // namespace jax_ep
