// The set for processors with AVX-512  F, BW, VL and DQ: the shared kernels over its vectors.
#include "backends/cpu/simd_avx512bw.h"
//
#include "backends/cpu/simd_gemm.h"
#include "backends/cpu/simd_rows.h"

namespace sortie::cpu {

const Kernels kAvx512bwKernels = {
    .prepared_bytes = prepared_bytes,
    .prepare = prepare,
    .gemm = gemm,
    .accumulate = accumulate,
    .softmax_block = softmax_block,
    .amax_bits = amax_bits,
    .e4m3_codes = e4m3_codes,
    .int8_codes = int8_codes,
    .sum_squares = sum_squares,
    .norm = norm,
    .silu_mul = silu_mul,
    .add = add,
    .weigh = weigh,
    .read = read,
    .multiply = multiply,
};

}  // namespace sortie::cpu
