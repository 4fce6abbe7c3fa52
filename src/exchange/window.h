#pragma once

#include <cstdint>

#include "exchange/exchange.h"

namespace sortie::exchange {

// What a source writes about a dispatch before its signal: this, then ids [tokens, K], then weights
// [tokens, K], in one put. The fields after `tokens` only prove that the ranks agree on the step.
struct alignas(64) DispatchMeta {
  int64_t tokens = 0;
  int64_t row_bytes = 0;
  int64_t max_tokens = 0;
  int32_t layer = 0;
};

// Where things lie in a rank's window. Both modes use the same places (a mode decides only how many
// slots a source has), since what proves the reuse of a place does not depend on the mode.
//
// Every source has a region of its own in each, at a place that no mode and no row size moves: what
// a rank still writes after the others went on without it lands where nobody reads any more.
//
//   headers  2 x [ranks] StepHeader. Two, by the epoch's parity: a peer may send the header of step
//            n + 1 while this rank still reads those of step n. It cannot send n + 2, because for
//            that it must have this rank's header of n + 1, and all_gather's result ends there.
//   meta     [ranks] DispatchMeta, ids, weights
//   rows     [ranks * row_stride(row_bytes)] x row_bytes. One of each: a peer sends dispatch n + 1
//   only after
//            this rank's signal of combine n, and by then this rank has read rows and meta.
//   parts    [ranks * capacity, hidden] fp32. One: a peer sends combine n + 1 only after this
//            rank's signal of dispatch n + 1, and by then this rank has read the parts of n.
//   reports  [ranks] Report, read at rank 0 (agreement.h). One: a rank reports again only after
//            rank 0 has decided on its last report.
//   decision 2 x Decision, by the generation's parity. Rank 0 sends g + 1 only to the members of g,
//            and g + 2 after that rank's report on g + 1 or without it: then g + 1 stays as it is
//            for a rank that reads late, and nothing follows.
struct WindowLayout {
  WindowLayout(const Options& options, int ranks);

  int64_t header(uint64_t epoch, int source) const {
    return (static_cast<int64_t>(epoch % 2) * ranks + source) *
           static_cast<int64_t>(sizeof(StepHeader));
  }
  int64_t meta(int source) const { return meta_offset + source * meta_stride; }
  // A source's rows lie source * row_stride rows from the first. Rounding down moves that place by
  // less than ranks rows between row sizes, which the region has to spare, so regions of different
  // sources never meet, whatever the row size of each.
  int64_t row_stride(int64_t row_bytes) const { return source_bytes / row_bytes; }
  int64_t report(int source) const { return reports_offset + source * report_stride; }
  int64_t decision(uint64_t generation) const {
    return decisions_offset + static_cast<int64_t>(generation % 2) * decision_stride;
  }

  int ranks;
  int64_t capacity;  // slots a source in the wider mode
  int64_t meta_offset;
  int64_t meta_stride;
  int64_t source_bytes;  // of one source's rows
  int64_t rows_offset;
  int64_t rows_bytes;
  int64_t parts_offset;
  int64_t parts_bytes;
  int64_t reports_offset;
  int64_t report_stride;
  int64_t decisions_offset;
  int64_t decision_stride;
  int64_t bytes;
};

}  // namespace sortie::exchange
