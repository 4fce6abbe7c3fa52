#include "exchange/ucx_api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <string>

namespace sortie::exchange {
namespace {

// The oldest soname that has all of UcxApi (UCX 1.10 and later).
constexpr const char* kLibrary = "libucp.so.0";

struct Loaded {
  UcxApi api{};
  std::string error;
};

template <typename Function>
void find(void* library, const char* name, Function& function, std::string& error) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) error = fmt::format("{} has no {}", kLibrary, name);
}

Loaded load() {
  Loaded out;
  // Read by UCX while it is loaded: no hooks in libc, no signal handlers, and no log on stdout,
  // which belongs to the answer (errors come back as codes).
  for (const auto& [name, value] : {std::pair{"UCX_MEM_EVENTS", "n"},
                                    {"UCX_HANDLE_ERRORS", "none"},
                                    {"UCX_LOG_LEVEL", "fatal"},
                                    {"UCX_WARN_UNUSED_ENV_VARS", "n"}}) {
    setenv(name, value, 1);
  }
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    out.error = dlerror();
    return out;
  }
  UcxApi& a = out.api;
  const auto get = [&](const char* name, auto& function) {
    find(library, name, function, out.error);
  };
  get("ucp_config_read", a.config_read);
  get("ucp_config_modify", a.config_modify);
  get("ucp_config_release", a.config_release);
  get("ucp_init_version", a.init_version);
  get("ucp_cleanup", a.cleanup);
  get("ucp_worker_create", a.worker_create);
  get("ucp_worker_destroy", a.worker_destroy);
  get("ucp_worker_progress", a.worker_progress);
  get("ucp_worker_arm", a.worker_arm);
  get("ucp_worker_get_efd", a.worker_get_efd);
  get("ucp_worker_set_am_recv_handler", a.worker_set_am_recv_handler);
  get("ucp_am_send_nbx", a.am_send_nbx);
  get("ucp_worker_get_address", a.worker_get_address);
  get("ucp_worker_release_address", a.worker_release_address);
  get("ucp_mem_map", a.mem_map);
  get("ucp_mem_unmap", a.mem_unmap);
  get("ucp_mem_query", a.mem_query);
  get("ucp_rkey_pack", a.rkey_pack);
  get("ucp_rkey_buffer_release", a.rkey_buffer_release);
  get("ucp_ep_rkey_unpack", a.ep_rkey_unpack);
  get("ucp_rkey_ptr", a.rkey_ptr);
  get("ucp_rkey_destroy", a.rkey_destroy);
  get("ucp_ep_create", a.ep_create);
  get("ucp_ep_close_nbx", a.ep_close_nbx);
  get("ucp_ep_print_info", a.ep_print_info);
  get("ucp_request_check_status", a.request_check_status);
  get("ucp_request_free", a.request_free);
  get("ucs_status_string", a.status_string);
  return out;
}

}  // namespace

Result<const UcxApi*> load_ucx() {
  static const Loaded loaded = load();
  if (loaded.error.empty()) return &loaded.api;
  return Status::exhausted(fmt::format(
      "UCX cannot be loaded ({}); install it (Debian: libucx0) or use --moe-a2a-backend local",
      loaded.error));
}

}  // namespace sortie::exchange
