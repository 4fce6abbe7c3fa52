#include "model/safetensors.h"

#include <fmt/format.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <set>

#include "base/json.h"
#include "model/safetensors_header.h"
#include "model/safetensors_index.h"

namespace sortie::model {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

constexpr int64_t kMaxIndexBytes = 100'000'000;

std::string real_path(const std::string& path) {
  char* resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return {};
  std::string result = resolved;
  std::free(resolved);
  return result;
}

bool inside(const std::string& path, const std::string& folder) {
  return !folder.empty() && path.size() > folder.size() && path.starts_with(folder) &&
         path[folder.size()] == '/';
}

// A shard may be a symbolic link, but not to outside the folder; the one exception is Hugging
// Face's cache, whose snapshots/<revision>/ link to ../../blobs/.
Status check_stays_inside(const std::string& folder, const std::string& name) {
  const std::string root = real_path(folder);
  const std::string target = real_path(folder + "/" + name);
  if (target.empty() || inside(target, root)) return Status::ok();  // absent: said elsewhere
  const size_t revision = root.rfind('/');
  if (revision != std::string::npos && root.substr(0, revision).ends_with("/snapshots")) {
    const std::string repository = root.substr(0, revision - std::strlen("/snapshots"));
    if (inside(target, repository + "/blobs")) return Status::ok();
  }
  return Status::invalid(
      fmt::format("{}/{} is a link that leaves the model folder.", folder, printable(name)));
}

constexpr std::string_view kIndexSuffix = ".safetensors.index.json";

// What msModelSlim calls the weights: the index's or the one file's name, or empty.
std::string model_slim_weights(const std::string& folder) {
  for (const char* name :
       {"quant_model_weights", "quant_model_weight_w8a8_dynamic", "quant_model_weight_w8a8"}) {
    for (const std::string_view suffix : {std::string_view(".safetensors"), kIndexSuffix}) {
      std::string file = fmt::format("{}{}", name, suffix);
      if (file_exists(folder + "/" + file)) return file;
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Checkpoint>> Checkpoint::open(const std::string& folder) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint);
  const std::string single = folder + "/model.safetensors";
  const std::string index = folder + "/model.safetensors.index.json";
  if (file_exists(single)) {
    RETURN_IF_ERROR(check_stays_inside(folder, "model.safetensors"));
    RETURN_IF_ERROR(checkpoint->add_shard(single));
  } else if (file_exists(index)) {
    RETURN_IF_ERROR(checkpoint->add_index(folder, index));
  } else if (const std::string slim = model_slim_weights(folder); !slim.empty()) {
    RETURN_IF_ERROR(check_stays_inside(folder, slim));
    RETURN_IF_ERROR(slim.ends_with(kIndexSuffix)
                        ? checkpoint->add_index(folder, folder + "/" + slim)
                        : checkpoint->add_shard(folder + "/" + slim));
  } else {
    return Status::invalid(fmt::format(
        "{} holds neither model.safetensors nor model.safetensors.index.json.", folder));
  }
  return checkpoint;
}

Result<std::unique_ptr<Checkpoint>> Checkpoint::open_file(const std::string& path) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint);
  RETURN_IF_ERROR(checkpoint->add_shard(path));
  return checkpoint;
}

Status Checkpoint::add_index(const std::string& folder, const std::string& index_path) {
  ASSIGN_OR_RETURN(const std::string text, read_text_file(index_path, kMaxIndexBytes));
  ASSIGN_OR_RETURN(const SafetensorsIndex index, parse_safetensors_index(text, index_path));
  std::set<std::string> shards;
  for (const auto& [name, shard] : index) shards.insert(shard);
  std::string missing;
  for (const std::string& shard : shards) {
    RETURN_IF_ERROR(check_stays_inside(folder, shard));
    if (!file_exists(folder + "/" + shard)) missing += (missing.empty() ? "" : ", ") + shard;
  }
  if (!missing.empty()) {
    return Status::invalid(
        fmt::format("{} is incomplete: missing {}.", folder, missing.substr(0, 1000)));
  }
  for (const std::string& shard : shards) RETURN_IF_ERROR(add_shard(folder + "/" + shard));
  for (const auto& [name, shard] : index) {
    const auto it = tensors_.find(name);
    const std::string path = folder + "/" + shard;
    if (it == tensors_.end() || paths_[static_cast<size_t>(it->second.shard)] != path) {
      return Status::invalid(fmt::format("{} says that {} holds tensor {}, but it does not.",
                                         index_path, path, printable(name)));
    }
  }
  return Status::ok();
}

Status Checkpoint::add_shard(const std::string& path) {
  ASSIGN_OR_RETURN(std::unique_ptr<MappedFile> file, MappedFile::open(path));
  uint64_t header_bytes = 0;
  if (file->size() < 8) {
    return Status::invalid(
        fmt::format("{} is no safetensors file: it has {} bytes.", path, file->size()));
  }
  RETURN_IF_ERROR(file->read(0, &header_bytes, 8));
  if (header_bytes > static_cast<uint64_t>(kMaxSafetensorsHeader)) {
    return Status::invalid(fmt::format(
        "{} is no safetensors file: its header would have {} bytes, at most {} are allowed.", path,
        header_bytes, kMaxSafetensorsHeader));
  }
  const auto header_size = static_cast<int64_t>(header_bytes);
  if (header_size > file->size() - 8) {
    return Status::invalid(fmt::format("{} is truncated: its header has {} bytes, the file {}.",
                                       path, header_size, file->size()));
  }
  std::string header(static_cast<size_t>(header_size), '\0');
  RETURN_IF_ERROR(file->read(8, header.data(), header_size));
  const Result<std::vector<HeaderEntry>> entries =
      parse_safetensors_header(header, file->size() - 8 - header_size);
  if (!entries.is_ok()) {
    return Status::invalid(fmt::format("{} is malformed: {}.", path, entries.status().message()));
  }
  const std::byte* data = file->data() + 8 + header_size;
  for (const HeaderEntry& e : *entries) {
    Entry entry;
    entry.tensor = Tensor{data + e.begin, e.dtype, e.rank, e.shape};
    entry.shard = static_cast<int>(files_.size());
    if (!tensors_.emplace(e.name, entry).second) {
      return Status::invalid(
          fmt::format("Tensor {} stands in {} and in another shard.", printable(e.name), path));
    }
    bytes_ += e.end - e.begin;
  }
  files_.push_back(std::move(file));
  paths_.push_back(path);
  return Status::ok();
}

const Tensor* Checkpoint::find(const std::string& name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second.tensor;
}

void Checkpoint::drop_pages(const Tensor& tensor) const {
  for (const auto& file : files_) {
    if (tensor.data >= file->data() && tensor.data < file->data() + file->size()) {
      file->drop(tensor.data, tensor.bytes());
    }
  }
}

Status Checkpoint::check() const {
  for (const auto& file : files_) RETURN_IF_ERROR(file->check());
  return Status::ok();
}

}  // namespace sortie::model
