// The tile instructions, and what of the AMX set differs from AVX-512's. Never run on a processor
// that has them: the arithmetic around them is tested over an emulation (amx_test.cc).
#include <immintrin.h>

#include "backends/cpu/amx_gemm.h"

namespace sortie::cpu {
namespace {

// The operand of LDTILECFG (Intel SDM volume 1, 18.2): all tiles whole.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// GCC 12's tile loads do not say that they read memory, so stores before them must be kept there.
inline void memory_is_read() { asm volatile("" : : : "memory"); }

// Tiles 0 to 3 are the sums, 4 and 5 weights, 6 and 7 activations.
struct HardwareTiles {
  static void begin() {
    TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = static_cast<uint16_t>(kTileBytes);
      config.rows[i] = static_cast<uint8_t>(kTile);
    }
    memory_is_read();
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }
  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  template <bool kInt8>
  static void step(const void* weights, const void* first, const void* second) {
    memory_is_read();
    _tile_loadd(4, weights, kTileBytes);
    _tile_loadd(5, static_cast<const std::byte*>(weights) + kTile * kTileBytes, kTileBytes);
    _tile_loadd(6, first, kTileBytes);
    if (kInt8) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(2, 5, 6);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (second == nullptr) return;
    _tile_loadd(7, second, kTileBytes);
    if (kInt8) {
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  static void store(void* product) {
    auto* out = static_cast<std::byte*>(product);
    _tile_stored(0, out, kTileBytes);
    _tile_stored(1, out + kTile * kTileBytes, kTileBytes);
    _tile_stored(2, out + 2 * kTile * kTileBytes, kTileBytes);
    _tile_stored(3, out + 3 * kTile * kTileBytes, kTileBytes);
  }
};

}  // namespace

int64_t amx_prepared_bytes(Format format, int64_t k) {
  return is_tiled(format) ? tiles_prepared_bytes(format, k)
                          : kAvx512Kernels.prepared_bytes(format, k);
}

int32_t amx_prepare(Format format, const std::byte* codes, int64_t k, std::byte* out) {
  if (!is_tiled(format)) return kAvx512Kernels.prepare(format, codes, k, out);
  tiles_prepare(format, codes, k, out);
  return 0;
}

void amx_gemm(const Panel& p) {
  if (!is_tiled(p.format)) return kAvx512Kernels.gemm(p);
  tiles_gemm<HardwareTiles>(p);
}

}  // namespace sortie::cpu
