#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "cli/ranks.h"
#include "engine/request.h"

namespace sortie::cli {

// MODEL (or --model-path) and the flags of every command that runs a model.
void add_run_flags(CLI::App& app, RunOptions& options);
// The sampling flags of run.
void add_sampling_flags(CLI::App& app, engine::SamplingParams& sampling);

// A number of at least `least`.
CLI::Validator at_least(double least);

// The sentence for a command line that CLI11 could not parse; names the nearest flag or command.
std::string usage_error(const CLI::App& app, const CLI::ParseError& error);

}  // namespace sortie::cli
