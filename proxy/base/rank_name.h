// RankName: how messages name a rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

namespace jax_ep {

// Which team of its group a rank is counted in: ranks count from 0 in each of them. All processes
// number the teams alike, so a name means the same wherever it is read.
struct TeamId {
  uint32_t index = 0;
  uint32_t num_teams = 1;  // of the group
};

// "rank 3", or "rank 3 of team 1" in a group of several teams.
inline std::string RankName(const TeamId& team, uint64_t rank) {
  std::string name = "rank " + std::to_string(rank);
  if (team.num_teams > 1) name += " of team " + std::to_string(team.index);
  return name;
}

// Whether `text` is what RankName makes, of whatever team and rank.
inline bool IsRankName(std::string_view text) {
  const auto take = [&text](std::string_view word) {
    if (!text.starts_with(word)) return false;
    text.remove_prefix(word.size());
    const size_t num_digits = std::min(text.find_first_not_of("0123456789"), text.size());
    text.remove_prefix(num_digits);
    return num_digits > 0;
  };
  return take("rank ") && (text.empty() || (take(" of team ") && text.empty()));
}

}  // namespace jax_ep
