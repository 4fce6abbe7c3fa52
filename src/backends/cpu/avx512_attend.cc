// Decode attention over a bf16 cache with vdpbf16ps, 16 heads in the lanes of a vector.
//
// Scores: the query lies as pairs of channels x heads, so a key's pair is one broadcast operand and
// nothing is added across lanes; eight keys share each load of the query. Values: pairs of keys are
// the products' depth, two latents are interleaved on the fly, and 16 sums (heads) of 16 channels
// stay in registers over the block. Both loops are one dot product instruction a cycle but for what
// feeds them. A lane's sums take their terms in one order whatever the other lanes hold.
//
// vdpbf16ps takes subnormals as zero: values under 2^-126, which no latent and no exponential that
// counts reaches.
#include "backends/cpu/avx512_gemm.h"
#include "backends/cpu/avx512_math.h"

namespace sortie::cpu {
namespace {

constexpr int kKeysAtOnce = 8;
static_assert(kBlockKeys % kKeysAtOnce == 0);

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// sum += the pair of bf16 at `pair` . x, in every lane. As a memory operand of the instruction: a
// broadcast of its own would be another load.
SORTIE_INLINE inline __m512 dot_broadcast(__m512 sum, __m512i x, const void* pair) {
  struct Pair {
    char bytes[4];
  };
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*static_cast<const Pair*>(pair)));
  return sum;
}

// Keys [key, key + kCount) against all heads: scores[key][head].
template <int kCount>
void score(const AttendBlock& b, int64_t key, float* scores) {
  const std::byte* rows[kCount];
  __m512 sum[kCount];
  unroll<kCount>([&](auto i) SORTIE_INLINE {
    rows[i.value] = static_cast<const std::byte*>(b.keys[key + i.value]);
    sum[i.value] = _mm512_setzero_ps();
  });
  const std::byte* query = b.queries;
  const int64_t bytes = 2 * b.width;
  const int64_t coming = key < b.next_count ? smaller(kCount, b.next_count - key) : 0;
  for (int64_t line = 0; line < bytes; line += 64) {
    for (int64_t i = 0; i < coming; ++i) {
      _mm_prefetch(static_cast<const char*>(b.next[key + i]) + line, _MM_HINT_T1);
    }
    const int64_t end = smaller(line + 64, bytes);
    for (int64_t at = line; at < end; at += 4, query += 64) {
      const __m512i q = held(_mm512_load_si512(query));
      unroll<kCount>([&](auto i) SORTIE_INLINE {
        sum[i.value] = dot_broadcast(sum[i.value], q, rows[i.value] + at);
      });
    }
  }
  unroll<kCount>([&](auto i) SORTIE_INLINE {
    _mm512_store_ps(scores + (key + i.value) * kLaneHeads, sum[i.value]);
  });
}

// 16 low halves and 16 high halves -> 16 pairs.
inline __m512i interleave(__m512i halves) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

inline __m512i pairs_of(__m512 low, __m512 high) {
  const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
  __m512i bits;
  __builtin_memcpy(&bits, &both, sizeof bits);
  return interleave(bits);
}

// Scores become exponentials, as pairs of keys x heads in bf16; the states move on. Returns by what
// each head's context must be multiplied.
__m512 soften(const AttendBlock& b, const float* scores, std::byte* weights) {
  const __m512 scale = _mm512_set1_ps(b.scale);
  const __m512 before = _mm512_loadu_ps(b.max);
  __m512 now = before;
  for (int64_t i = 0; i < b.count; ++i) {
    // NaN second, so that it is kept.
    now = _mm512_max_ps(now, _mm512_mul_ps(_mm512_load_ps(scores + i * kLaneHeads), scale));
  }
  const auto weight = [&](int64_t i) SORTIE_INLINE {
    return exp(_mm512_fmsub_ps(_mm512_load_ps(scores + i * kLaneHeads), scale, now));
  };
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < b.count; i += 2) {
    const __m512 even = weight(i);
    const __m512 odd = i + 1 < b.count ? weight(i + 1) : _mm512_setzero_ps();
    total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
    _mm512_store_si512(weights + i / 2 * 4 * kLaneHeads, pairs_of(even, odd));
  }
  const __m512 kept = exp(_mm512_sub_ps(before, now));
  _mm512_storeu_ps(b.sum, _mm512_fmadd_ps(_mm512_loadu_ps(b.sum), kept, total));
  _mm512_storeu_ps(b.max, now);
  return kept;
}

// Channels [channel, channel + 16) of the contexts of kCount heads from `head` on.
template <int kCount>
void add_values(const AttendBlock& b, const std::byte* weights, const float* kept, int64_t head,
                int64_t channel) {
  float* context = b.context + head * b.lora + channel;
  __m512 sum[kCount];
  unroll<kCount>([&](auto h) SORTIE_INLINE {
    const float factor = kept[head + h.value];
    const __mmask16 read = factor == 0 ? static_cast<__mmask16>(0) : static_cast<__mmask16>(0xffff);
    sum[h.value] = _mm512_mul_ps(_mm512_maskz_loadu_ps(read, context + h.value * b.lora),
                                 _mm512_set1_ps(factor));
  });
  const auto half = [&](int64_t key) SORTIE_INLINE {
    return _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(static_cast<const std::byte*>(b.keys[key]) + 2 * channel));
  };
  const std::byte* weight = weights + 4 * head;
  for (int64_t i = 0; i < b.count; i += 2, weight += 4 * kLaneHeads) {
    // The weight of a key past an odd count is 0.
    const __m256i odd = half(i + 1 < b.count ? i + 1 : i);
    const __m512i value =
        held(interleave(_mm512_inserti64x4(_mm512_castsi256_si512(half(i)), odd, 1)));
    unroll<kCount>([&](auto h) SORTIE_INLINE {
      sum[h.value] = dot_broadcast(sum[h.value], value, weight + 4 * h.value);
    });
  }
  unroll<kCount>([&](auto h)
                     SORTIE_INLINE { _mm512_storeu_ps(context + h.value * b.lora, sum[h.value]); });
}

}  // namespace

void avx512_attend_prepare(const float* q, int64_t heads, int64_t width, std::byte* out) {
  for (int64_t c = 0; c < width; c += 2) {
    alignas(64) float low[kLaneHeads] = {};
    alignas(64) float high[kLaneHeads] = {};
    for (int64_t h = 0; h < heads; ++h) {
      low[h] = q[h * width + c];
      high[h] = q[h * width + c + 1];
    }
    _mm512_store_si512(out + c / 2 * 4 * kLaneHeads,
                       pairs_of(_mm512_load_ps(low), _mm512_load_ps(high)));
  }
}

void avx512_attend(const AttendBlock& b) {
  float* scores = b.scratch;
  auto* weights = reinterpret_cast<std::byte*>(b.scratch + kBlockKeys * kLaneHeads);
  int64_t key = 0;
  for (; key + kKeysAtOnce <= b.count; key += kKeysAtOnce) score<kKeysAtOnce>(b, key, scores);
  for (; key < b.count; ++key) score<1>(b, key, scores);
  alignas(64) float kept[kLaneHeads];
  _mm512_store_ps(kept, soften(b, scores, weights));
  for (int64_t channel = 0; channel < b.lora; channel += 16) {
    int64_t head = 0;
    for (; head + 16 <= b.heads; head += 16) add_values<16>(b, weights, kept, head, channel);
    for (; head + 4 <= b.heads; head += 4) add_values<4>(b, weights, kept, head, channel);
    for (; head < b.heads; ++head) add_values<1>(b, weights, kept, head, channel);
  }
}

}  // namespace sortie::cpu
