#pragma once

#include <immintrin.h>

// Functions of vectors that several files of the AVX-512 set use.
namespace sortie::cpu {
namespace {

// e^x within about 1 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, e^r = 1 + r + r^2 q(r) with q of degree
// 4 (Chebyshev fit, relative error 1.1e-8), times 2^n. Below -104 the result is 0, above 88.73
// infinite; NaN stays.
[[maybe_unused]] inline __m512 exp(__m512 x) {
  // min and max return their second operand if one is NaN.
  x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-105.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20f), r);
  __m512 q = _mm512_set1_ps(0x1.6d117cp-10f);
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.120be2p-7f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.555518p-5f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.5554dcp-3f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.5f));
  // 1 + (r + r^2 q): the small terms first, so that one rounding decides the last bit.
  const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(r, r), q, r);
  return _mm512_scalef_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), small), n);
}

}  // namespace
}  // namespace sortie::cpu
