#include "model/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

namespace sortie::model {
namespace {

// What the SIGBUS handler may look at: plain atomics in static storage, nothing that locks.
struct Slot {
  std::atomic<uintptr_t> begin{0};  // 0: free
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> faulted{false};
};
constexpr int kSlots = 4096;  // published models have up to some 200 shards
std::array<Slot, kSlots> g_slots;
std::mutex g_slots_mutex;  // taken by open and close, never by the handler
struct sigaction g_previous;

uintptr_t page_bytes() {
  static const auto bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

// Past the end of a truncated file every later page is gone too, so the rest of the mapping
// becomes zeros at once: one fault, not one a page.
bool zero_rest_of_mapping(uintptr_t address) {
  for (Slot& slot : g_slots) {
    const uintptr_t begin = slot.begin.load(std::memory_order_acquire);
    const uintptr_t end = slot.end.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= end) continue;
    const uintptr_t page = address / page_bytes() * page_bytes();
    slot.faulted.store(true, std::memory_order_release);
    return ::mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
  }
  return false;
}

void on_sigbus(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const bool ours = zero_rest_of_mapping(reinterpret_cast<uintptr_t>(info->si_addr));
  errno = saved_errno;
  if (ours) return;
  // Somebody else's fault: hand it on as if this handler were not there.
  if ((g_previous.sa_flags & SA_SIGINFO) != 0) {
    g_previous.sa_sigaction(signal, info, context);
  } else if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(signal);
  } else {
    ::sigaction(SIGBUS, &g_previous, nullptr);  // returning repeats the fault with the default
  }
}

void install_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    page_bytes();  // its static is made here, not in the handler
    struct sigaction action {};
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(SIGBUS, &action, &g_previous);
  });
}

int take_slot(const std::byte* data, int64_t size) {
  const std::lock_guard lock(g_slots_mutex);
  for (int i = 0; i < kSlots; ++i) {
    Slot& slot = g_slots[static_cast<size_t>(i)];
    if (slot.begin.load(std::memory_order_relaxed) != 0) continue;
    const auto begin = reinterpret_cast<uintptr_t>(data);
    const auto bytes = static_cast<uintptr_t>(size);
    slot.faulted.store(false, std::memory_order_relaxed);
    slot.end.store(begin + (bytes + page_bytes() - 1) / page_bytes() * page_bytes(),
                   std::memory_order_release);
    slot.begin.store(begin, std::memory_order_release);
    return i;
  }
  return -1;
}

}  // namespace

Result<std::unique_ptr<MappedFile>> MappedFile::open(const std::string& path) {
  install_handler();
  std::unique_ptr<MappedFile> file(new MappedFile);
  file->path_ = path;
  // O_NONBLOCK: opening a FIFO that lies under this name must not wait.
  file->fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file->fd_ < 0) {
    return Status::invalid(fmt::format("Cannot open {}: {}.", path, std::strerror(errno)));
  }
  struct stat info {};
  if (::fstat(file->fd_, &info) != 0 || !S_ISREG(info.st_mode)) {
    return Status::invalid(fmt::format("{} is not a regular file.", path));
  }
  file->size_ = info.st_size;
  if (file->size_ == 0) return Status::invalid(fmt::format("{} is empty.", path));
  void* data =
      ::mmap(nullptr, static_cast<size_t>(file->size_), PROT_READ, MAP_PRIVATE, file->fd_, 0);
  if (data == MAP_FAILED) {
    return Status::exhausted(fmt::format("Cannot map {}: {}.", path, std::strerror(errno)));
  }
  file->data_ = static_cast<const std::byte*>(data);
  file->slot_ = take_slot(file->data_, file->size_);
  if (file->slot_ < 0) {
    return Status::exhausted(
        fmt::format("Cannot map {}: {} files are mapped already.", path, kSlots));
  }
  return file;
}

MappedFile::~MappedFile() {
  if (slot_ >= 0) {
    const std::lock_guard lock(g_slots_mutex);
    Slot& slot = g_slots[static_cast<size_t>(slot_)];
    slot.begin.store(0, std::memory_order_release);
    slot.end.store(0, std::memory_order_release);
  }
  if (data_ != nullptr) {
    ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(size_));
  }
  if (fd_ >= 0) ::close(fd_);
}

Status MappedFile::read(int64_t offset, void* to, int64_t bytes) const {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t n = ::pread(fd_, static_cast<char*>(to) + done, static_cast<size_t>(bytes - done),
                              offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return Status::invalid(fmt::format("Cannot read {}: {}.", path_, std::strerror(errno)));
    }
    if (n == 0) return Status::invalid(fmt::format("{} was truncated while it was read.", path_));
    done += n;
  }
  return Status::ok();
}

Status MappedFile::check() const {
  // The last page of a shrunk file reads as zeros without any fault, hence the size too.
  struct stat info {};
  if (::fstat(fd_, &info) == 0 && info.st_size < size_) {
    return Status::invalid(fmt::format("{} was truncated while it was read.", path_));
  }
  if (g_slots[static_cast<size_t>(slot_)].faulted.load(std::memory_order_acquire)) {
    return Status::invalid(fmt::format(
        "{} could not be read through: it was truncated meanwhile, or its disk failed.", path_));
  }
  return Status::ok();
}

void MappedFile::drop(const std::byte* begin, int64_t bytes) const {
  const uintptr_t page = page_bytes();
  const auto from = reinterpret_cast<uintptr_t>(begin);
  const auto end = reinterpret_cast<uintptr_t>(data_) + static_cast<uintptr_t>(size_);
  const uintptr_t first = from / page * page;
  const uintptr_t last =
      std::min((from + static_cast<uintptr_t>(bytes) + page - 1) / page, (end + page - 1) / page) *
      page;
  // A neighbour's share of the edge pages is read again when it is wanted.
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace sortie::model
