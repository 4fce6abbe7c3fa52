#pragma once

namespace sortie::cli {

// GB/s at which this machine's memory can be read by so many threads, each one sequential stream
// over memory far larger than the caches: the median of several passes, about half a second.
double measure_read_bandwidth(int threads);

}  // namespace sortie::cli
