#include "cli/process_test_util.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "backends/cpu/isa.h"
#include "base/check.h"

namespace sortie::cli {

namespace {

namespace fs = std::filesystem;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

std::vector<std::string> all_devices() {
  std::vector<std::string> names = {"reference"};
  for (const cpu::Isa isa : cpu::all_isas()) names.emplace_back(cpu::isa_name(isa));
  return names;
}

SortieProcess::SortieProcess(const std::vector<std::string>& arguments,
                             const std::vector<std::string>& environment,
                             const std::function<bool()>& enter) {
  std::vector<std::string> words = {SORTIE_BINARY};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  const std::string out = folder_ / "out";
  const std::string err = folder_ / "err";
  pid_ = fork();
  CHECK(pid_ >= 0, "fork");
  if (pid_ != 0) return;
  if (enter && !enter()) _exit(126);
  for (const std::string& e : environment) putenv(const_cast<char*>(e.c_str()));
  const int in_fd = open("/dev/null", O_RDONLY);
  const int out_fd = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  const int err_fd = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  dup2(in_fd, 0);
  dup2(out_fd, 1);
  dup2(err_fd, 2);
  execv(argv[0], argv.data());
  _exit(127);
}

SortieProcess::~SortieProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

std::vector<pid_t> SortieProcess::children() const {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream stat(entry.path() / "stat");
    std::string text;
    std::getline(stat, text);
    const size_t after = text.rfind(')');
    if (after == std::string::npos) continue;
    std::istringstream rest(text.substr(after + 1));
    char state = 0;
    pid_t parent = 0;
    rest >> state >> parent;
    if (parent == pid_ && state != 'Z') found.push_back(std::stoi(name));
  }
  return found;
}

bool SortieProcess::wait_for_output(size_t bytes, Duration most) const {
  const Deadline deadline(most);
  while (!deadline.passed()) {
    std::error_code error;
    const auto size = fs::file_size(folder_ / "out", error);
    if (!error && size >= bytes) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

Finished SortieProcess::finish(Duration most) {
  const Deadline deadline(most);
  int status = 0;
  Finished finished;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (deadline.passed()) {
      kill(pid_, SIGKILL);
      waitpid(pid_, &status, 0);
      pid_ = -1;
      finished.out = read_file(folder_ / "out");
      finished.err = read_file(folder_ / "err") + "\n(killed at the test's deadline)";
      return finished;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  pid_ = -1;
  finished.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  finished.out = read_file(folder_ / "out");
  finished.err = read_file(folder_ / "err");
  return finished;
}

Finished run_sortie(const std::vector<std::string>& arguments,
                    const std::vector<std::string>& environment, double seconds_most) {
  SortieProcess process(arguments, environment);
  return process.finish(seconds(seconds_most));
}

}  // namespace sortie::cli
