#pragma once

#include <ucp/api/ucp.h>

#include "base/status.h"

namespace sortie::exchange {

// The functions of libucp that `ucx` calls, found when first needed instead of linked. As soon as
// UCX is loaded it rewrites libc's memory calls and installs handlers for SIGSEGV and SIGBUS,
// before main and whatever its configuration in code says; that is no business of a process that
// runs without it, breaks ThreadSanitizer, and can only be forbidden before loading.
struct UcxApi {
  decltype(&ucp_config_read) config_read;
  decltype(&ucp_config_modify) config_modify;
  decltype(&ucp_config_release) config_release;
  decltype(&ucp_init_version) init_version;
  decltype(&ucp_cleanup) cleanup;
  decltype(&ucp_worker_create) worker_create;
  decltype(&ucp_worker_destroy) worker_destroy;
  decltype(&ucp_worker_progress) worker_progress;
  decltype(&ucp_worker_arm) worker_arm;
  decltype(&ucp_worker_get_efd) worker_get_efd;
  decltype(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler;
  decltype(&ucp_am_send_nbx) am_send_nbx;
  decltype(&ucp_worker_get_address) worker_get_address;
  decltype(&ucp_worker_release_address) worker_release_address;
  decltype(&ucp_mem_map) mem_map;
  decltype(&ucp_mem_unmap) mem_unmap;
  decltype(&ucp_mem_query) mem_query;
  decltype(&ucp_rkey_pack) rkey_pack;
  decltype(&ucp_rkey_buffer_release) rkey_buffer_release;
  decltype(&ucp_ep_rkey_unpack) ep_rkey_unpack;
  decltype(&ucp_rkey_ptr) rkey_ptr;
  decltype(&ucp_rkey_destroy) rkey_destroy;
  decltype(&ucp_ep_create) ep_create;
  decltype(&ucp_ep_close_nbx) ep_close_nbx;
  decltype(&ucp_ep_print_info) ep_print_info;
  decltype(&ucp_request_check_status) request_check_status;
  decltype(&ucp_request_free) request_free;
  decltype(&ucs_status_string) status_string;
};

// Loads UCX on the first call. Not while another thread reads the environment.
Result<const UcxApi*> load_ucx();

}  // namespace sortie::exchange
