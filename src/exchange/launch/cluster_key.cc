#include "exchange/launch/cluster_key.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "exchange/control.h"

namespace sortie::exchange {
namespace {

constexpr size_t kShortest = 16;
constexpr size_t kLongest = 4096;

Status file_error(const std::string& path, const char* what, int error) {
  return Status::usage(
      fmt::format("--cluster-key-file {}: cannot {} it: {}", path, what, strerror(error)));
}

// 0 or errno.
int write_key(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.open()) return errno;
  std::string text;
  for (const std::byte b : random_nonce()) text += fmt::format("{:02x}", static_cast<unsigned>(b));
  text += '\n';
  return write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : EIO;
}

}  // namespace

Result<ClusterKey> read_cluster_key(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.open()) return file_error(path, "open", errno);
  struct stat info = {};
  if (fstat(fd.get(), &info) != 0) return file_error(path, "look at", errno);
  if (!S_ISREG(info.st_mode)) {
    return Status::usage(fmt::format("--cluster-key-file {} is not a file", path));
  }
  if ((info.st_mode & 077) != 0) {
    return Status::usage(fmt::format(
        "--cluster-key-file {} can be read or written by others (mode {:03o}); run chmod 600 {}",
        path, info.st_mode & 0777, path));
  }
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return Status::usage(
        fmt::format("--cluster-key-file {} belongs to user {}, not to this one; "
                    "make a copy of your own with mode 600",
                    path, info.st_uid));
  }
  ClusterKey key;
  key.secret.resize(kLongest + 1);
  size_t n = 0;
  while (n < key.secret.size()) {
    const ssize_t got = read(fd.get(), key.secret.data() + n, key.secret.size() - n);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return file_error(path, "read", errno);
    if (got == 0) break;
    n += static_cast<size_t>(got);
  }
  while (n > 0 && (key.secret[n - 1] == std::byte{'\n'} || key.secret[n - 1] == std::byte{'\r'})) {
    --n;
  }
  if (n < kShortest || n > kLongest) {
    return Status::usage(fmt::format(
        "--cluster-key-file {} has {}; a key has {} to {}: openssl rand -hex 32 makes "
        "one",
        path, n > kLongest ? "too many bytes" : fmt::format("{} bytes", n), kShortest, kLongest));
  }
  key.secret.resize(n);
  return key;
}

Result<ClusterKey> host_cluster_key() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const std::string folder = runtime != nullptr && *runtime == '/'
                                 ? std::string(runtime) + "/sortie"
                                 : fmt::format("/tmp/sortie-{}", geteuid());
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return Status::exhausted(
        fmt::format("cannot make {} for this host's cluster key: {}; give --cluster-key-file",
                    folder, strerror(errno)));
  }
  // In /tmp anybody could have made it.
  struct stat info = {};
  if (lstat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid() ||
      (info.st_mode & 077) != 0) {
    return Status::invalid(
        fmt::format("{} is not a folder of this user alone (mode 700), so no "
                    "cluster key is safe there; give --cluster-key-file",
                    folder));
  }
  const std::string path = folder + "/cluster.key";
  if (access(path.c_str(), F_OK) != 0) {
    // All ranks try at once; the first link stands, and each reads what stands.
    const std::string mine = fmt::format("{}.{}", path, getpid());
    const int error = write_key(mine);
    const bool linked = error == 0 && (link(mine.c_str(), path.c_str()) == 0 || errno == EEXIST);
    unlink(mine.c_str());
    if (!linked) {
      return Status::exhausted(fmt::format("cannot write {}: {}; give --cluster-key-file", path,
                                           strerror(error != 0 ? error : errno)));
    }
  }
  return read_cluster_key(path);
}

Nonce random_nonce() {
  Nonce nonce;
  CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), nonce.size()) == 1,
        "no random numbers");
  return nonce;
}

Mac hmac_sha256(const ClusterKey& key, std::string_view label,
                std::initializer_list<std::span<const std::byte>> parts) {
  std::string text(label);
  text += '\0';
  for (const auto part : parts) {
    text.append(reinterpret_cast<const char*>(part.data()), part.size());
  }
  Mac mac;
  unsigned length = 0;
  // An empty key is a key of no bytes; OpenSSL wants a pointer all the same.
  static constexpr std::byte kNone{};
  const void* secret = key.secret.empty() ? &kNone : key.secret.data();
  const auto* made = HMAC(EVP_sha256(), secret, static_cast<int>(key.secret.size()),
                          reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                          reinterpret_cast<unsigned char*>(mac.data()), &length);
  CHECK(made != nullptr && length == mac.size(), "HMAC-SHA256");
  return mac;
}

bool same_mac(const Mac& a, const Mac& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace sortie::exchange
