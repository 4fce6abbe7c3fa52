// The set for processors with AVX2, FMA and F16C: the shared kernels over its vectors.
#include "backends/cpu/simd_avx2.h"
//
#include "backends/cpu/simd_gemm.h"
#include "backends/cpu/simd_rows.h"

namespace sortie::cpu {

const Kernels kAvx2Kernels = {
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
