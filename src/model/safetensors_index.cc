#include "model/safetensors_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>

#include "base/json.h"
#include "model/safetensors_header.h"

namespace sortie::model {
namespace {

bool plain_file_name(const std::string& name) {
  return !name.empty() && name.size() < NAME_MAX && name[0] != '.' && printable(name) == name &&
         name.find('/') == std::string::npos && name.ends_with(".safetensors");
}

}  // namespace

Result<SafetensorsIndex> parse_safetensors_index(std::string_view json, const std::string& where) {
  ASSIGN_OR_RETURN(const nlohmann::json j, parse_json(json, where));
  const auto map = j.is_object() ? j.find("weight_map") : j.end();
  if (map == j.end() || !map->is_object()) {
    return Status::invalid(fmt::format("{} lacks \"weight_map\".", where));
  }
  SafetensorsIndex index;
  for (const auto& [name, shard] : map->items()) {
    if (!shard.is_string() || !plain_file_name(shard.get_ref<const std::string&>())) {
      return Status::invalid(fmt::format(
          "{} puts tensor {} into a file that is no plain *.safetensors name in this folder.",
          where, printable(name)));
    }
    index.emplace(name, shard.get_ref<const std::string&>());
  }
  return index;
}

}  // namespace sortie::model
