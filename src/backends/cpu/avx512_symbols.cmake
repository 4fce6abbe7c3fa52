# Fails if an object file with AVX-512 code defines a weak symbol: an inline function or template
# that the linker might keep for files meant for any processor.
execute_process(COMMAND ${NM} -A -C --defined-only ${ARCHIVE} OUTPUT_VARIABLE symbols
                RESULT_VARIABLE rc)
if(NOT rc EQUAL 0 OR NOT symbols MATCHES "avx512_gemm_f32")
  message(FATAL_ERROR "${NM} found no AVX-512 object in ${ARCHIVE}")
endif()
string(REGEX MATCHALL "[^\n]*avx512[a-z0-9_]*\\.cc\\.o:[0-9a-f]* [WVu] [^D\n][^\n]*" weak "${symbols}")
# DW.ref.* are unoptimised builds' references to the exception runtime: data, no code.
if(weak)
  message(FATAL_ERROR "weak symbols in AVX-512 objects: ${weak}")
endif()
